"""`diagnose` reads any log, says what it makes of it, and says what is wrong with the facts it is given."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autotuner.cli.diagnosing import HEAD_BYTES, TAIL_BYTES, diagnose
from autotuner.errors import InvalidInput

RECORDINGS = Path(__file__).parents[1] / "engines" / "recordings"
CAPPED = RECORDINGS / "sglang-0.5.12-load.log"


def run(*arguments: object, text: str | None = None) -> Result:
    return CliRunner().invoke(diagnose, [str(a) for a in arguments], input=text)


def test_a_capped_server_is_told_with_the_line_that_shows_it(tmp_path: Path) -> None:
    facts = tmp_path / "facts.toml"
    facts.write_text('phase = "level"\nconcurrency = 128\nspeculation = "eagle3"\nnum_steps = 3\n')
    said = run(CAPPED, "--know", facts, "--json")
    assert said.exit_code == 0
    table = json.loads(said.stdout)
    assert (table["engine"], table["state"], table["cause"], table["action"]) == (
        "sglang", "serving", "admission-cap", "fix-flags",
    )  # fmt: skip
    assert "#running-req: 48" in table["evidence"][0]


def test_a_wrong_flag_is_told_to_a_person() -> None:
    said = run(RECORDINGS / "sglang-0.5.12-bad-flag.log").stdout
    assert said.startswith("crashed: SGLang refused a flag.")
    assert "Cause: bad-flag-combination" in said
    assert "Do: fix-flags" in said
    assert "--cuda-graph-max-batch" in said


def test_standard_input_is_read_too() -> None:
    said = run(
        "-", "--json", text="0.01.250.741 W common_speculative_init: no implementations specified for speculative\n"
    )
    assert json.loads(said.stdout)["cause"] == "speculation-inactive"


def test_of_a_long_log_the_start_and_the_end_count(tmp_path: Path) -> None:
    noise = '[2026-11-29 15:02:16] INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    middle = noise * ((HEAD_BYTES + TAIL_BYTES) // len(noise) + 9)
    log = tmp_path / "long.log"
    log.write_text(f"{noise}{middle}sglang serve: error: unrecognized arguments: --no-such-flag\n")
    assert "bad-flag-combination" in run(log, "--engine", "sglang").stdout


@pytest.mark.parametrize("text", ["concurrancy = 4\n", "phase = 'sometimes'\n", "not toml"])
def test_facts_that_are_not_understood_are_named_with_their_file(tmp_path: Path, text: str) -> None:
    facts = tmp_path / "facts.toml"
    facts.write_text(text)
    said = run(CAPPED, "--know", facts)
    assert isinstance(said.exception, InvalidInput)
    assert str(facts) in str(said.exception)


@pytest.mark.parametrize("text", ["", "\x00\x01\x02", "hello\n" * 3])
def test_nothing_of_use_is_still_an_answer(text: str) -> None:
    said = run("-", "--json", text=text)
    assert said.exit_code == 0
    assert json.loads(said.stdout)["cause"] == "none"


def test_a_request_that_waits_for_a_moment_shows_no_cap(tmp_path: Path) -> None:
    facts = tmp_path / "facts.toml"
    facts.write_text('phase = "level"\nconcurrency = 128\n')
    line = (
        "[2026-08-02 10:05:0{0} TP0] Decode batch, #running-req: {1}, #token: 90112, token usage: 0.22, cuda graph: True, "
        "gen throughput (token/s): 2110.00, #queue-req: {2}\n"
    )
    passing = "".join(line.format(*row) for row in ((1, 124, 3), (2, 125, 1), (3, 125, 1)))
    assert json.loads(run("-", "--know", facts, "--json", text=passing).stdout)["cause"] != "admission-cap"
    held = "".join(line.format(*row) for row in ((1, 100, 28), (2, 100, 28), (3, 100, 27)))
    assert json.loads(run("-", "--know", facts, "--json", text=held).stdout)["cause"] == "admission-cap"
