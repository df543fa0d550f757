"""Intervals that say what they say in a textbook."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.core.statistics import (
    LAUNCH_NOISE_PRIOR,
    Interval,
    between_launches,
    launch_noise,
    mean_interval,
    median,
    quantile,
    ratio_interval,
    relative_half_width,
    t95,
)

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("df", "t"),
    [
        (1, 12.706),
        (2, 4.303),
        (5, 2.571),
        (10, 2.228),
        (20, 2.086),
        (30, 2.042),
        (40, 2.021),
        (60, 2.000),
        (120, 1.980),
    ],
)
def test_students_t_is_that_of_the_tables(df: int, t: float) -> None:
    assert t95(df) == pytest.approx(t, abs=0.0025)


def test_students_t_falls_towards_the_normal_quantile() -> None:
    values = [t95(df) for df in range(1, 2000)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(1.96, abs=0.002)


def test_a_mean_has_the_interval_of_the_textbook() -> None:
    """NIST's handbook, 1.3.5.2: of 195 values the mean is 9.261460 and s is 0.022789, so ± 0.003219."""
    found = mean_interval(
        [9.261460 - 0.022789 * math.sqrt(194 / 195), 9.261460 + 0.022789 * math.sqrt(194 / 195)] * 97 + [9.261460]
    )
    assert found.mean == pytest.approx(9.261460)
    assert found.high - found.mean == pytest.approx(0.003219, abs=2e-5)
    five = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (five.mean, five.high) == (3.0, pytest.approx(3 + 2.776 * math.sqrt(2.5 / 5)))


def test_one_value_has_no_known_width_and_none_no_mean() -> None:
    assert mean_interval([5.0]) == Interval(5.0, 5.0, 5.0)
    assert mean_interval([]) == Interval(0.0, 0.0, 0.0)


@given(numbers)
def test_an_interval_holds_its_mean_in_the_middle(values: list[float]) -> None:
    found = mean_interval(values)
    assert found.low <= found.mean <= found.high
    assert found.high - found.mean == pytest.approx(found.mean - found.low, abs=1e-3)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """2,000 samples of six values each from a normal distribution: 95 % of the intervals hold its mean."""
    import random

    source = random.Random(7)
    samples = [mean_interval([source.gauss(10, 2) for _ in range(6)]) for _ in range(2000)]
    covered = sum(i.low <= 10 <= i.high for i in samples) / len(samples)
    assert 0.935 <= covered <= 0.965


@pytest.mark.parametrize(("q", "value"), [(0.0, 1.0), (0.25, 3.25), (0.5, 5.5), (0.75, 7.75), (0.9, 9.1), (1.0, 10.0)])
def test_quantiles_are_those_of_type_7(q: float, value: float) -> None:
    """The default of R and of numpy for 1..10."""
    assert quantile([float(i) for i in range(1, 11)], q) == pytest.approx(value)


@given(numbers, st.floats(0, 1), st.floats(0, 1))
def test_quantiles_rise_and_stay_within_the_values(values: list[float], p: float, q: float) -> None:
    ordered = sorted(values)
    low, high = sorted((p, q))
    margin = 1e-6 * max(1.0, *(abs(v) for v in values))
    assert ordered[0] - margin <= quantile(ordered, low) <= quantile(ordered, high) + margin <= ordered[-1] + 2 * margin


def test_a_median_needs_no_order_and_at_least_one_value() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    with pytest.raises(ValueError, match="no values"):
        median([])


def test_the_noise_between_launches_counts_on_both_sides_of_a_ratio() -> None:
    exact = Interval(100.0, 100.0, 100.0)
    found = ratio_interval(Interval(110.0, 110.0, 110.0), exact, 0.03)
    assert found.mean == pytest.approx(1.1)
    assert found.high - found.mean == pytest.approx(1.1 * 1.96 * 0.03 * math.sqrt(2))


def test_the_noise_of_a_ratio_falls_with_the_launches_of_either_side() -> None:
    exact = Interval(100.0, 100.0, 100.0)
    assert between_launches(0.03, (1, 1)) == pytest.approx(2 * 0.03**2)
    for launches in ((2, 1), (1, 2)):
        found = ratio_interval(exact, exact, 0.03, launches)
        assert found.high - 1 == pytest.approx(1.96 * 0.03 * math.sqrt(1.5))


def test_relative_errors_of_a_ratio_add_in_squares() -> None:
    found = ratio_interval(Interval(100.0, 97.0, 103.0), Interval(200.0, 192.0, 208.0), 0.0)
    assert found.mean == pytest.approx(0.5)
    assert (found.high - found.mean) / 0.5 == pytest.approx(math.hypot(0.03, 0.04))


def test_a_ratio_to_nothing_decides_nothing() -> None:
    assert ratio_interval(Interval(1.0, 1.0, 1.0), Interval(0.0, 0.0, 0.0), 0.03) == Interval(math.inf, 0.0, math.inf)
    nothing = ratio_interval(Interval(0.0, 0.0, 0.0), Interval(10.0, 9.0, 11.0), 0.03)
    assert (nothing.mean, nothing.high) == (0.0, 0.0)


@given(st.floats(1, 1e5), st.floats(1, 1e5), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 0.3))
def test_more_noise_never_makes_a_ratio_surer(
    a: float, b: float, spread_a: float, spread_b: float, noise: float
) -> None:
    top, bottom = (
        Interval(a, a * (1 - spread_a), a * (1 + spread_a)),
        Interval(b, b * (1 - spread_b), b * (1 + spread_b)),
    )
    narrow, wide = ratio_interval(top, bottom, noise), ratio_interval(top, bottom, noise + 0.01)
    assert wide.low <= narrow.low <= narrow.mean <= narrow.high <= wide.high
    assert narrow.low >= 0


def test_launch_noise_is_the_prior_until_a_launch_was_repeated() -> None:
    assert launch_noise([]) == launch_noise([100.0]) == LAUNCH_NOISE_PRIOR


def test_repeats_that_agree_by_chance_do_not_make_the_noise_zero() -> None:
    assert launch_noise([100.0, 100.0]) == pytest.approx(LAUNCH_NOISE_PRIOR / math.sqrt(2))


def test_many_repeats_give_their_own_standard_deviation() -> None:
    assert launch_noise([90.0, 110.0] * 200) == pytest.approx(0.1, rel=0.01)


def test_half_widths_are_shares_of_the_mean() -> None:
    assert relative_half_width(Interval(10.0, 9.0, 11.0)) == pytest.approx(0.1)
    assert relative_half_width(Interval(0.0, 0.0, 0.0)) == math.inf
