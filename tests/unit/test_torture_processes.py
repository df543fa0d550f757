"""A slice of the torture harness's parts about processes, so that they keep running between its long runs."""

import pytest
from torture import probes, sandbox, trees, wedged, wedging
from torture.tally import Tally


def kept(tally: Tally, *promises: str) -> bool:
    """Whether each of these was tried, and none broken."""
    assert not tally.violated, tally.examples
    return all(tally.tried[promise] for promise in promises)


def test_hostile_trees_leave_nothing_and_bystanders_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "AT_ONCE", 1)
    assert kept(trees.run(5, 0.0), "P5", "P6")


def test_servers_that_lie_are_never_called_serving() -> None:
    assert kept(probes.run(1, 0.0), "P24")


def test_a_wedged_loop_is_silent_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """One await of the loop, in two ways: any cycle comes to it."""
    place = next(place for place, function in wedging.awaits().items() if function == "cycle")
    monkeypatch.setattr(wedging, "awaits", lambda: {place: "cycle"})
    monkeypatch.setattr(wedged, "_map", lambda _house: {place})
    monkeypatch.setattr(wedged, "HOWS", ("deaf", "blocks"))
    monkeypatch.setattr(wedged, "REACHED_S", 60.0)
    assert kept(wedged.run(1, 0.0), "P23")


def test_the_units_scores_are_within_what_is_promised() -> None:
    tally = sandbox.run(1, 0.0)
    assert kept(tally) or tally.counts
