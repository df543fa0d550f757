"""Rules tried on recorded levels: what would end otherwise, what it saves, and above all which winner it would lose."""

from typing import Any

import pytest

from autotuner.core.backtest import End, Outcome, end_of
from autotuner.core.policy import Policy, load_policy
from autotuner.core.source import Source

RULE = """
description = "one rule"
[[rule]]
name = "slow"
on = "window"
when = "level.running < {limit}"
looks = {looks}
action = "{action}"
sentence = "it runs too few"
dry_run = {dry}
"""


def policies(limit: int, looks: int = 1, action: str = "skip-level", *, dry: bool = False) -> tuple[Policy, ...]:
    text = RULE.format(limit=limit, looks=looks, action=action, dry=str(dry).lower())
    return (load_policy(Source("house.toml", text)),)


def looks(*running: float) -> list[dict[str, Any]]:
    return [{"on": "window", "facts": {"level.running": r, "level.load_s": 10.0 * n}} for n, r in enumerate(running, 1)]


def test_a_level_ends_at_the_look_at_which_a_rule_first_ends_it() -> None:
    assert end_of(policies(5), looks(8, 4, 3)) == End("house.toml/slow", 20.0)
    assert end_of(policies(5, looks=2), looks(8, 4, 3)) == End("house.toml/slow", 30.0)
    assert end_of(policies(1), looks(8, 4, 3)) == End("", 30.0)
    assert end_of(policies(5), []) == End("", 0.0)


@pytest.mark.parametrize("harmless", [policies(5, dry=True), policies(5, action="extend")])
def test_what_ends_no_level_changes_nothing(harmless: tuple[Policy, ...]) -> None:
    assert end_of(harmless, looks(8, 4, 3)) == End("", 30.0)


def test_a_level_that_a_rule_settled_ended_there_and_is_not_lost() -> None:
    settled = end_of(policies(5, action="settle"), looks(8, 4, 3))
    assert settled == End("house.toml/slow", 20.0, settled=True)
    assert outcome(End("", 30.0), settled, won=True).saved_s == 10.0
    assert not outcome(End("", 30.0), settled, won=True).loses_winner
    assert outcome(settled, End("a/b", 20.0), won=True).loses_winner


def outcome(then: End, now: End, *, won: bool = False) -> Outcome:
    return Outcome(1, "a", 8, won, then, now)


def test_earlier_is_saved_later_is_lost_and_what_goes_on_is_unknown() -> None:
    ended, early, never = End("a/b", 30.0), End("a/b", 10.0), End("", 30.0)
    assert outcome(ended, early).saved_s == 20.0
    assert outcome(early, ended).saved_s == -20.0
    assert (outcome(ended, never).goes_on, outcome(ended, never).saved_s) == (True, 0.0)
    assert not outcome(ended, ended).changed


def test_a_winner_that_would_be_ended_is_told() -> None:
    assert outcome(End("", 60.0), End("a/b", 10.0), won=True).loses_winner
    assert not outcome(End("", 60.0), End("a/b", 10.0)).loses_winner
