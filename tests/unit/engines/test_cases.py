"""Situations that operators have met, each with the one right reading: state, cause, action and figures.

Those up to 099 came first. The others were written by authors who did not know the readers; each batch was scored before
it was looked at, and what was missed was then mended by its kind.
"""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.engines.check import check, misses
from autotuner.engines.context import Context
from autotuner.engines.figures import figures
from autotuner.engines.reading import read
from autotuner.engines.vocabulary import CAUSES

FOLDER = Path(__file__).parent / "cases"
CASES = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.toml"))}
CONTEXTS = [case.get("context", {}) for case in CASES.values()]
LINES = sorted({line for case in CASES.values() for line in case["log"].splitlines() if line.strip()})


@pytest.mark.parametrize("name", CASES)
def test_the_case_is_read_right(name: str) -> None:
    assert misses(CASES[name]) == {}


def test_what_is_expected_but_not_checkable_is_no_part_of_a_case() -> None:
    case: dict[str, Any] = dict(next(iter(CASES.values())))
    case = {**case, "checkable": [], "expect": {"state": "hung", "cause": "none", "action": "wait"}}
    assert misses(case) == {}


def test_a_wrong_reading_is_a_miss() -> None:
    case = dict(CASES["044-normal-ladder"])
    case["expect"] = {**case["expect"], "state": "hung", "figures": {"line2_weights_gb": 99.0}}
    assert set(misses(case)) == {"state", "figures"}


def test_a_context_that_is_not_understood_is_a_miss_and_no_crash() -> None:
    case = {**CASES["044-normal-ladder"], "context": {"concurrancy": 4}}
    assert "concurrancy" in misses(case)["state"]


@given(
    st.sampled_from(CONTEXTS), st.lists(st.sampled_from(LINES), max_size=6), st.sampled_from(["sglang", "vllm", "x"])
)
def test_any_lines_under_any_context_have_a_reading_of_the_closed_lists(
    context: dict[str, Any], lines: list[str], engine: str
) -> None:
    said = read(engine, "", "\n".join(lines), Context.model_validate(context))
    assert said.cause in CAUSES
    assert said.sentence


@given(st.text(max_size=200) | st.sampled_from(LINES).map(lambda line: line[: len(line) // 2]))
def test_no_line_stops_the_reading_of_figures(text: str) -> None:
    for value in figures(text).values():
        assert isinstance(value, int | float | str)


def test_the_scorer_says_what_it_missed_and_the_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = (FOLDER / "044-normal-ladder.toml").read_text(encoding="utf-8")
    (tmp_path / "a.toml").write_text(source, encoding="utf-8")
    (tmp_path / "b.toml").write_text(source.replace('state = "ready"', 'state = "hung"'), encoding="utf-8")
    assert check(tmp_path) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "b: state: expected hung, read ready"
    assert out[1:] == ["state 1/2", "cause 2/2", "action 2/2", "figures 2/2"]
