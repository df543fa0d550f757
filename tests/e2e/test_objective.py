"""What "best" means, through the real daemon: goodput, answers that must agree, limits that must be kept, and the front."""

import json

import pytest
from e2e.house import House

from autotuner.core.answers import PROMPTS

pytestmark = pytest.mark.e2e

GOODPUT = """
[objective]
maximise = "goodput"
ttft_ms_max = 150
"""
LIMITED = """
[objective.constraints]
ttft_p99_ms_max = 400
"""


def test_a_server_that_answers_nonsense_fails_however_fast_it_is(house: House) -> None:
    house.extra = "[objective.constraints]\nanswers_agree_min = 0.25"
    house.write_settings()
    files = [house.candidate("base", tok_s=200), house.candidate("honest", tok_s=150)]
    house.cli("enqueue", *files, house.candidate("corrupt", tok_s=900, mode="corrupt"))
    house.start()
    house.wait_settled()
    house.wait_serving("base")
    assert house.verdicts() == {"base": "pass", "honest": "fail", "corrupt": "fail"}
    said = house.cli("why", "corrupt").stdout
    assert "Its answers agree with the best-known's to 0.00 over 8 prompts, at least 0.25 is asked" in said
    assert PROMPTS[0] in said
    assert "agree with the best-known's to 1.00 over 8 prompts" in house.cli("why", "honest").stdout
    trials = {t.name: t for t in house.read(lambda s: s.trials())}
    assert len(trials["base"].answers) == len(PROMPTS)
    assert house.read(lambda s: s.results(trials["corrupt"].id)) == (), "nothing was measured of it"
    assert [row["name"] for row in house.status()["pareto_front"]] == ["base"]
    assert "as recorded" in house.cli("journal", "replay", "3").stdout


def test_a_changed_objective_is_applied_to_what_was_measured_before_it(house: House) -> None:
    """Faster in tokens, but late with the first one: what counts by goodput is the other, from the samples on record."""
    house.benchmark |= {"levels": "[1, 4]", "output_tokens": "16"}
    house.write_settings()
    house.cli("enqueue", house.candidate("late", tok_s=400, ttft_ms=250))
    house.start()
    house.wait_serving("late")
    house.end()
    house.extra = GOODPUT
    house.write_settings()
    house.cli("enqueue", house.candidate("prompt", tok_s=60, ttft_ms=20))
    house.start()
    house.wait_settled()
    house.wait_serving("prompt")
    assert house.verdicts() == {"late": "pass", "prompt": "pass"}
    row = next(t for t in house.status()["trials"] if t["name"] == "prompt")
    assert row["goodput_req_s"][4] > 5
    said = house.cli("why", "prompt").stdout
    assert "goodput req/s" in said
    assert "goodput at the busiest level (requests per second with TTFT up to 150 ms)" in said
    replayed = house.cli("journal", "replay").stdout.splitlines()
    assert all(line.endswith(": as recorded") for line in replayed), replayed


def test_a_limit_that_is_violated_ends_the_trial_at_that_level_and_servers_best_at_different_levels_are_told(
    house: House,
) -> None:
    house.benchmark |= {"levels": "[1, 4]", "output_tokens": "16"}
    house.extra = LIMITED
    house.write_settings()
    files = [
        house.candidate("wide", tok_s=100),
        house.candidate("single", tok_s=300, max_running=1),
        house.candidate("late", tok_s=900, ttft_ms=600),
    ]
    house.cli("enqueue", *files)
    house.start()
    house.wait_settled()
    house.wait_serving("wide")
    trials = {t.name: t for t in house.read(lambda s: s.trials())}
    assert str(trials["late"].verdict) == "fail"
    assert [r.concurrency for r in house.read(lambda s: s.results(trials["late"].id))] == [4]
    assert "ttft-above-limit" in house.cli("why", "late").stdout
    status = json.loads(house.cli("status", "--json").stdout)
    (slot,) = status["slots"].values()
    assert {row["name"]: row["best_at"] for row in slot["pareto_front"]} == {"wide": [4], "single": [1]}
    shown = house.cli("status").stdout
    assert "no single winner over all levels" in shown
    assert "best at 1: single" in shown
    assert "best at 1: single" in house.cli("why", "single").stdout
