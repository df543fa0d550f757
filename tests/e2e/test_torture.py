"""A slice of the harness: one kill of each kind, a full disk, a failing sync, a race. `make torture` does it by the hundred."""

import importlib
import os

import pytest
from torture import planted, sabotage
from torture.tally import Tally

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def found_by(part: str, seed: int, seconds: float = 1.0) -> Tally:
    tally: Tally = importlib.import_module(f"torture.{part}").run(seed, seconds)
    return tally


@pytest.mark.parametrize("part", ["kills", "full_disk", "bad_disk", "races"])
def test_a_round_of_each_part_finds_every_promise_kept(part: str) -> None:
    tally = found_by(part, 2)
    assert not tally.violated, tally.examples
    assert tally.tried


@pytest.mark.slow
def test_rounds_of_kills_find_every_promise_kept() -> None:
    tally = found_by("kills", 100, 120.0)
    assert not tally.violated, tally.examples
    assert tally.counts["at a chosen call"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in sabotage.BUGS if name != sabotage.NO_CLIENT])
def test_a_bug_planted_in_the_daemon_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = next(bug for bug in planted.BUGS if bug.name == name)
    monkeypatch.setenv("TORTURE_BUG", name)
    tally = found_by(bug.module, 1, bug.seconds)
    assert tally.violated[bug.promise], tally.counts
    assert os.environ["TORTURE_BUG"] == name
