"""A campaign measured by another benchmark client: its figures decide, and where it has none the verdict says why."""

import json
import sys
from pathlib import Path

import pytest
from e2e.house import House

FAKE = Path(__file__).parents[1] / "fakes" / "fake_client.py"
pytestmark = pytest.mark.e2e


def measured_by(house: House, client: str, mode: str) -> None:
    command = [sys.executable, str(FAKE), client, mode]
    house.benchmark |= {"levels": "[2]", "output_tokens": "4", "client": f'"{client}"'}
    house.benchmark["client_command"] = json.dumps(command)
    house.write_settings()


@pytest.mark.parametrize("client", ["vllm", "sglang", "guidellm"])
def test_the_figures_of_another_client_decide_and_are_computed_again_from_the_record(house: House, client: str) -> None:
    measured_by(house, client, "good")
    house.cli("enqueue", house.candidate("base", tok_s=100))
    house.start()
    house.wait_settled()
    assert house.verdicts() == {"base": "pass"}
    result = house.read(lambda s: s.results(1))[0]
    assert result.figures.void == ""
    assert result.figures.output_tok_s == pytest.approx(2 * 4 / 0.25, rel=0.1)
    replayed = house.cli("journal", "replay").stdout.splitlines()
    assert replayed
    assert all(line.endswith(": as recorded") for line in replayed), replayed


def test_a_client_that_cannot_run_ends_the_trial_with_what_to_do_and_the_server_is_not_blamed(house: House) -> None:
    measured_by(house, "vllm", "no-tokenizer")
    house.cli("enqueue", house.candidate("base", tok_s=100))
    house.start()
    house.wait(lambda: house.verdicts() == {"base": "error"}, why="the trial to end")
    assert "set tokenizer in the benchmark" in house.cli("why", "base").stdout


def test_a_client_whose_requests_all_failed_promotes_nothing(house: House) -> None:
    measured_by(house, "guidellm", "all-failed")
    house.cli("enqueue", house.candidate("base", tok_s=100))
    house.start()
    house.wait(lambda: house.verdicts()["base"] not in {"queued", "running"}, why="the trial to end")
    assert house.verdicts()["base"] != "pass"
    assert "all 12 requests of guidellm failed" in house.read(lambda s: s.results(1))[0].figures.void
