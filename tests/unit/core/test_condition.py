"""Conditions mean what an operator reads in them, and what cannot work is known before it is looked at."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.core.condition import ConditionError, compiled, evaluate, misfit

KINDS: dict[str, Any] = {"a.n": float, "a.m": float, "a.t": bool, "a.s": str}
compiled("true")  # the CEL library raises the recursion limit when it first parses, which hypothesis would report
numbers = st.floats(-100, 100).map(lambda x: round(x, 2))


@given(numbers, numbers)
def test_comparisons_and_arithmetic_are_those_of_decimals(n: float, m: float) -> None:
    facts: dict[str, Any] = {"a.n": n, "a.m": m}
    assert evaluate("a.n < a.m * 2 - 1", facts) is (n < m * 2 - 1)
    assert evaluate("a.n == a.m || !(a.n >= a.m)", facts) is (n <= m)
    assert evaluate("a.n > 0 && a.n > 0.5 && a.m <= 3", facts) is (n > 0.5 and m <= 3)


def test_the_facts_of_a_condition_are_told_once_and_in_order() -> None:
    assert compiled("b.y > 1 && a.x < b.y || a.x.startsWith('q') && size(c.z) > 2").facts == ("a.x", "b.y", "c.z")
    assert compiled("true").facts == ()
    assert compiled("bare > a.x").facts == ("a.x", "bare")


@pytest.mark.parametrize(
    "condition",
    ["a.n > 1", "1 < a.n", "a.t", "!a.t && a.n < a.m", "a.s == 'x'", "a.t == true", "a.s in ['x', 'y']", "a.s + 'y' == 'xy'",
     "(a.n + 1) / (a.m - 2) > 0.5", "a.t ? a.n > 1 : a.m > 1", "a.s.contains('x') || a.n != 0", "-a.n < 3"],
)  # fmt: skip
def test_a_condition_that_fits_the_facts_has_no_misfit(condition: str) -> None:
    assert misfit(condition, KINDS) == ""


@pytest.mark.parametrize(
    "condition",
    ["a.n", "a.s", "1", "'x'", "a.n > 'x'", "a.s > 1", "a.t > 1", "1 < a.t", "a.t == 1", "a.s == true", "a.t < true", "a.t + 1 > 2",
     "a.n && a.t", "a.t || a.n", "a.n ? true : false", "-a.t > 1", "!a.s", "(a.n > 1) == 1", "a.t || a.n > 'x'", "a.t && a.n > 'x'"],
)  # fmt: skip
def test_a_condition_whose_types_do_not_fit_is_known_beforehand(condition: str) -> None:
    assert misfit(condition, KINDS)


@pytest.mark.parametrize(
    ("text", "line"), [("a.n >", 1), ("a.n > 1 &&\n  )", 2), ("", 1), ("a.n = 1", 1), ("a.n > 1\n\n>", 3)]
)
def test_what_is_no_cel_has_its_line(text: str, line: int) -> None:
    with pytest.raises(ConditionError) as caught:
        compiled(text)
    assert caught.value.line == line
    assert "\n" not in str(caught.value)


@given(st.text("a.n<>=&|!() 1'\"\n+-*/?:[]{}x", max_size=20))
def test_any_text_is_a_condition_or_an_error_of_its_own_kind(text: str) -> None:
    try:
        found = compiled(text).facts
    except ConditionError as error:
        found = (str(error),)
    assert all(found)
