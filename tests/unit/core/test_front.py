"""The front holds what no other beats, and a level that was not measured is neither a win nor a loss."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.core.building import fired, level

from autotuner.core.front import described, front, front_of, valid_rates
from autotuner.core.objective import Constraints, Objective
from autotuner.core.verdict import TrialSoFar

FIELD = {"vllm-baseline": {1: 82.5, 128: 1536.0}, "sglang-base": {1: 63.6, 128: 2370.0}}


def names(rates: dict[str, dict[int, float]]) -> list[str]:
    return [row.name for row in front(rates)]


def trial(*results: Any, **more: Any) -> TrialSoFar:
    return TrialSoFar(**{"objective": Objective(), "levels": (1, 128), "results": results, **more})


def test_the_field_case_has_two_winners_and_each_is_named_for_what_it_is_best_at() -> None:
    rates = {**FIELD, "eagle3": {1: 62.9, 128: 849.0}}
    assert names(rates) == ["vllm-baseline", "sglang-base"]
    assert described(front(rates)) == [
        "best at 1: vllm-baseline 82.5 tok/s",
        "best at 128: sglang-base 2,370 tok/s",
    ]


def test_one_that_is_best_nowhere_may_still_be_unbeaten() -> None:
    found = front({**FIELD, "between": {1: 75.0, 128: 2000.0}})
    assert described(found)[-1] == "between them: between (75.0 at 1, 2,000 at 128 tok/s)"


def test_a_server_beaten_at_every_level_is_not_on_the_front_and_twins_both_are() -> None:
    assert names({"a": {1: 1.0, 8: 5.0}, "b": {1: 2.0, 8: 5.0}, "c": {1: 0.5, 8: 9.0}}) == ["b", "c"]
    assert names({"a": {1: 1.0}, "twin": {1: 1.0}}) == ["a", "twin"]
    assert described(front({"a": {1: 1.0}, "twin": {1: 1.0}})) == ["best at 1: a and twin 1.0 tok/s"]
    assert names({}) == []
    assert names({"a": {}}) == []


def test_a_level_that_was_skipped_saves_nobody_from_being_beaten() -> None:
    assert names({"whole": {1: 80.0, 128: 2000.0}, "part": {1: 70.0}}) == ["whole"]


def test_a_level_that_was_skipped_is_no_loss_either() -> None:
    assert names({"whole": {1: 80.0, 128: 2000.0}, "part": {1: 90.0}}) == ["whole", "part"]


def test_one_that_was_not_measured_at_a_level_beats_nobody_there() -> None:
    assert names({"fast-at-1": {1: 90.0}, "whole": {1: 80.0, 128: 10.0}}) == ["fast-at-1", "whole"]
    circle = {"a": {1: 3.0, 8: 1.0}, "b": {8: 2.0, 32: 1.0}, "c": {32: 2.0, 1: 1.0}}
    assert names(circle) == ["a", "b", "c"], "over shared levels alone each would beat the next"


RATES = st.dictionaries(st.sampled_from((1, 8, 32)), st.floats(1, 9), min_size=1)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), RATES, min_size=1))
def test_the_best_at_any_level_is_on_the_front_and_who_is_off_it_is_beaten_by_one_that_is_on(
    rates: dict[str, dict[int, float]],
) -> None:
    found = front(rates)
    on = {row.name for row in found}
    for lv in {lv for mine in rates.values() for lv in mine}:
        fastest = max(mine[lv] for mine in rates.values() if lv in mine)
        assert any(lv in row.best_at and row.output_tok_s[lv] == fastest for row in found)
    for name in set(rates) - on:
        assert any(all(rates[o].get(lv, 0.0) >= rate for lv, rate in rates[name].items()) for o in on)


@pytest.mark.parametrize(
    "bad", [level(128, 900.0, void="the client was the limit"), level(128, 900.0, stopped_early=True), level(128, 0.0)]
)
def test_only_levels_that_ran_to_their_end_and_are_valid_count(bad: Any) -> None:
    assert valid_rates(trial(level(1, 50.0), bad)) == {1: 50.0}


def test_a_rule_that_only_skipped_a_level_leaves_the_others() -> None:
    skipped = level(128, 900.0, fired=fired("skip-level"), stopped_early=True)
    assert valid_rates(trial(level(1, 50.0), skipped)) == {1: 50.0}


@pytest.mark.parametrize(
    "no_choice",
    [
        trial(level(1, 50.0), ended=fired("abandon")),
        trial(level(1, 50.0), level(128, 1.0, fired=fired("abandon"))),
        trial(level(1, 50.0, requests_failed=1, errors={"reset": 1})),
        trial(level(1, 50.0, ttft_ms={"p99": 9.0}), objective=Objective(constraints=Constraints(ttft_p99_ms_max=1.0))),
        trial(level(1, 50.0), answers=("!!!!",) * 8, best_answers=("the light",) * 8),
    ],
)
def test_a_server_that_was_abandoned_or_violates_a_constraint_is_no_choice_at_any_level(no_choice: TrialSoFar) -> None:
    assert valid_rates(no_choice) == {}


def test_a_candidate_stands_on_the_front_by_its_newest_trial() -> None:
    rows = [
        ("id-a", "a", trial(level(1, 90.0))),
        ("id-b", "b", trial(level(1, 60.0))),
        ("id-a", "a", trial(level(1, 50.0))),
    ]
    assert [row.name for row in front_of(rows)] == ["b"]
    rows.append(("id-b", "b", trial(ended=fired("abandon"))))
    assert [row.name for row in front_of(rows)] == ["b"], "a trial without a figure says nothing"


def test_at_a_rate_there_is_no_front_of_what_was_sent() -> None:
    measured = trial(level(2.5, 400.0, load="request-rate"), levels=(2.5,), load="request-rate")
    assert valid_rates(measured) == {}
    assert valid_rates(trial(level(1, 400.0))) == {1: 400.0}
