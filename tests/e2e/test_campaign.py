"""Campaigns from enqueue to journal, with the daemon as a real process and a fake server in a real one."""

import json
import re
import time

import pytest
from e2e.house import SLOT, House

from autotuner.core.state import Purpose
from autotuner.edge.store import Store

HARSH = """
description = "ends whatever runs"
[[rule]]
name = "anything"
on = "window"
when = "level.concurrency > 1"
action = "abandon"
sentence = "it runs"
"""

pytestmark = pytest.mark.e2e


def test_the_faster_server_is_promoted_and_serves_at_the_end(house: House) -> None:
    house.write_settings()
    files = [
        house.candidate("base", tok_s=100),
        house.candidate("faster", tok_s=200),
        house.candidate("slower", tok_s=50),
    ]
    house.cli("enqueue", *files)
    house.start()
    house.wait_settled()
    house.wait_serving("faster")
    assert house.verdicts() == {"base": "pass", "faster": "pass", "slower": "fail"}
    order = [(r.name, r.trial_id) for r in house.launches() if r.purpose is Purpose.TRIAL]
    assert order == [("base", 1), ("faster", 2), ("base", 4), ("faster", 5), ("slower", 3)], (
        "A1 B1 A2 B2, then the rest"
    )
    assert house.titles()[:4] == ["promoted base", "measured faster", "measured base", "promoted faster"]
    assert house.status()["best_known"] | {"candidate": ""} == {"name": "faster", "candidate": "", "trial": 5}
    won, again, confirmed = (house.cli("why", number).stdout for number in (2, 4, 5))
    assert "it is promoted once fresh launches have confirmed that" in won
    assert "the best-known, base, is launched again as trial 4: it has 1 launch on record, 2 are asked" in won
    assert "; faster is launched again as trial 5: a win is promoted on a fresh launch only" in won
    assert "- Trial: 4, best-known again (A/A), for trial 2" in again
    assert "of the launch before" in again
    assert "is confirmed on a fresh launch" in confirmed
    assert "1 against 2 launches" in confirmed
    verified = house.cli("journal", "verify").stdout
    assert "entries intact" in verified
    replayed = house.cli("journal", "replay").stdout.splitlines()
    assert [line.partition(": ")[2].split(",")[0] for line in replayed] == ["pass", "pass", "fail", "pass", "pass"]
    assert all(line.endswith(": as recorded") for line in replayed), replayed
    assert "0 of 5 levels on record would end otherwise" in house.cli("policies", "test").stdout
    rules = house.folder / "harsh"
    rules.mkdir()
    (rules / "harsh.toml").write_text(HARSH)
    tried = house.cli("policies", "test", rules).stdout
    assert "would lose faster at concurrency 4: harsh.toml/anything" in tried


def test_a_winner_that_was_lucky_once_is_not_promoted(house: House) -> None:
    house.write_settings()
    lucky = {"lucky_tok_s": 200, "lucky_mark": house.folder / "mark"}
    house.cli("enqueue", house.candidate("base", tok_s=100), house.candidate("lucky", tok_s=101, **lucky))
    house.start()
    house.wait_settled()
    house.wait_serving("base")
    assert [(t.name, str(t.verdict), t.promoted) for t in house.read(lambda s: s.trials())] == [
        ("base", "pass", True),
        ("lucky", "pass", False),
        ("base", "pass", False),
        ("lucky", "inconclusive", False),
    ]
    said = house.cli("why", "lucky").stdout
    assert re.search(
        r"The win of trial 2, 1\.[5-9]\d+ then, is not confirmed on a fresh launch: the objective is [01]\.", said
    )
    assert house.status()["trials"][-1]["confirms"] == 2
    assert "followed by: trial 4, lucky: confirms trial 2, inconclusive" in house.cli("show", 2).stdout
    assert all(line.endswith(": as recorded") for line in house.cli("journal", "replay").stdout.splitlines())


def test_a_daemon_killed_during_the_confirmation_goes_on_with_it(house: House) -> None:
    house.benchmark["seconds"] = "3"
    house.write_settings()
    house.cli("enqueue", house.candidate("base", tok_s=100), house.candidate("faster", tok_s=200))
    house.start()
    house.wait(lambda: len(house.read(lambda s: s.trials())) == 4, why="the win")
    house.kill()
    house.start()
    house.wait(lambda: (house.status()["trial"] or {}).get("id") == 4, why="the confirming trial")
    house.wait_measuring("faster")
    house.kill()
    house.start()
    house.wait_settled()
    house.wait_serving("faster")
    assert [(t.id, t.promoted) for t in house.read(lambda s: s.trials())] == [
        (1, True),
        (2, False),
        (3, False),
        (4, True),
    ]
    assert house.titles().count("promoted faster") == 1


def test_a_record_that_was_changed_does_not_replay(house: House) -> None:
    house.write_settings()
    house.cli("enqueue", house.candidate("base", tok_s=100))
    house.start()
    house.wait_settled()
    house.end()
    store = Store(house.state / "state.db")
    store.db.run("UPDATE trials SET promoted = 0")
    store.close()
    ran = house.cli("journal", "replay", "--json", check=False)
    assert ran.returncode == 8
    assert json.loads(ran.stdout)[0]["differences"] == ["promoted was False, now True"]
    assert house.cli("journal", "replay", "99", check=False).returncode == 5


def test_every_decision_is_explained_once_and_why_finds_it(house: House) -> None:
    house.write_settings()
    house.cli("enqueue", house.candidate("base", tok_s=100), house.candidate("same", tok_s=101))
    house.start()
    house.wait_settled()
    titles = house.titles()
    assert titles.count("promoted base") == 1
    assert "inconclusive same" in titles
    said = house.cli("why", "same").stdout
    assert "no difference to act on" in said
    shown = json.loads(house.cli("show", "base", "--json", "--evidence").stdout)
    assert shown["evidence"]["4"]["samples"]["requests"]
    assert shown["results"][0]["figures"]["tokens_counted"]
    compared = json.loads(house.cli("compare", "--json").stdout)
    assert [row["name"] for row in compared] == ["base", "same"]


def test_a_server_that_dies_hangs_or_fails_requests_costs_a_trial_and_nothing_else(house: House) -> None:
    house.write_settings()
    house.cli("enqueue", house.candidate("base", tok_s=100))
    house.start()
    house.wait_serving("base")
    files = [
        house.candidate("dies", mode="die-after", die_after=20),
        house.candidate("never", timeout_s=2, mode="never-ready"),
        house.candidate("mute", timeout_s=2, mode="empty-stream"),
        house.candidate("errors", mode="http-500", timeout_s=2),
    ]
    house.cli("enqueue", *files)
    house.wait(lambda: not house.status()["queue"])
    house.wait_settled()
    house.wait_serving("base")
    assert house.verdicts() == {"base": "pass", **dict.fromkeys(("dies", "never", "mute", "errors"), "fail")}


def test_restore_always_puts_the_best_known_back_between_trials(house: House) -> None:
    house.settings["restore"] = '"always"'
    house.write_settings()
    files = [house.candidate("base", tok_s=200), house.candidate("b", tok_s=50), house.candidate("c", tok_s=40)]
    house.cli("enqueue", *files)
    house.start()
    house.wait_settled()
    served = [row.name for row in house.launches()]
    assert served == ["base", "b", "base", "c", "base"]


def test_a_server_that_ignores_sigterm_is_stopped_all_the_same(house: House) -> None:
    house.slot["stop_grace_s"] = "1"
    house.write_settings()
    house.cli("enqueue", house.candidate("stubborn", mode="ignore-term", tok_s=50), house.candidate("b", tok_s=200))
    house.start()
    house.wait_settled()
    house.wait_serving("b")


def test_a_changed_benchmark_measures_the_best_known_first(house: House) -> None:
    house.write_settings()
    house.cli("enqueue", house.candidate("base", tok_s=100))
    house.start()
    house.wait_serving("base")
    house.end()
    house.benchmark["levels"] = "[2]"
    house.write_settings()
    house.cli("enqueue", house.candidate("faster", tok_s=300))
    house.start()
    house.wait_settled()
    house.wait_serving("faster")
    assert "queued baseline base" in house.titles()
    names = [(t.name, t.is_baseline) for t in house.read(lambda s: s.trials())]
    assert names == [("base", False), ("faster", False), ("base", True), ("base", True), ("faster", False)]


def test_enqueue_of_a_thousand_files_is_quick_and_loses_none(house: House) -> None:
    house.write_settings()
    for i in range(1000):
        house.candidate(f"c{i}", tok_s=50 + i)
    began = time.monotonic()
    ran = house.cli("enqueue", str(house.folder / "c*.toml"))
    assert time.monotonic() - began < 100  # it takes a second or two; one transaction each would take minutes
    assert "1000 candidates" in ran.stdout
    assert len(json.loads(house.cli("queue", "--json").stdout)) == 1000


def test_the_same_file_twice_is_one_trial_and_a_done_one_needs_again(house: House) -> None:
    house.write_settings()
    file = house.candidate("base", tok_s=300)
    assert "already queued" in house.cli("enqueue", file, file).stdout + house.cli("enqueue", file).stdout
    assert len(house.read(lambda s: s.trials())) == 1
    house.start()
    house.wait_serving("base")
    refused = house.cli("enqueue", file, check=False)
    assert refused.returncode == 4
    assert "--again" in refused.stderr
    house.cli("enqueue", file, "--again", "--wait", "--timeout", "120")
    assert [str(t.verdict) for t in house.read(lambda s: s.trials())] == ["pass", "inconclusive"]


def test_good_files_are_queued_although_one_is_broken_and_the_exit_code_tells(house: House) -> None:
    house.write_settings()
    good = house.candidate("good", tok_s=100)
    broken = house.folder / "broken.toml"
    broken.write_text('name = "x"\nengine = "command"\n[launch]\ncomand = ["a"]\n')
    ran = house.cli("enqueue", good, broken, house.folder / "missing.toml", check=False)
    assert ran.returncode == 3
    assert f"{broken}:4: launch.comand: unknown key (did you mean command?)" in ran.stderr
    assert "missing.toml: cannot be read" in ran.stderr
    assert [t.name for t in house.read(lambda s: s.queue(SLOT))] == ["good"]


def test_queue_can_be_listed_moved_and_cancelled(house: House) -> None:
    house.write_settings()
    house.cli("enqueue", *(house.candidate(n, tok_s=50 + i) for i, n in enumerate("abc")))
    house.cli("queue", "move", "c", "--first")
    house.cli("queue", "cancel", "a")
    assert [row["name"] for row in json.loads(house.cli("queue", "list", "--json").stdout)] == ["c", "b"]
    assert house.cli("queue", "cancel", "a", check=False).returncode == 4
    assert house.cli("queue", "cancel", "nothing", check=False).returncode == 5


def test_a_budget_of_trials_ends_the_campaign_with_the_best_known_serving(house: House) -> None:
    house.extra = "[budget]\ntrials = 2\n[noise]\nconfirm_launches = 0"
    house.write_settings()
    house.cli("enqueue", *(house.candidate(n, tok_s=r) for n, r in (("a", 200), ("b", 50), ("c", 400))))
    house.start()
    house.wait(lambda: "trials is spent" in house.status()["decision"])
    house.wait_serving("a")
    assert [t["name"] for t in house.status()["queue"]] == ["c"]
    house.cli("resume", "--new-campaign")
    house.wait_serving("c")
