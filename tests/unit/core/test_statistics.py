"""Intervals that say what they say in a textbook."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.core.statistics import (
    LAUNCH_NOISE_PRIOR,
    Z95,
    Interval,
    between_launches,
    budget_share,
    confidence_sequence,
    correlation_factor,
    launch_noise,
    mean_interval,
    median,
    most_within,
    quantile,
    ratio_interval,
    relative_half_width,
    t95,
    z_of,
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


@pytest.mark.parametrize("df", range(1, 41))
def test_beyond_students_t_lie_five_percent_of_its_distribution(df: int) -> None:
    """The density between 0 and t, summed by Simpson's rule: 0.475; so every entry of the table is right to its last digit."""
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)

    def density(x: float) -> float:
        return scale * (1 + x * x / df) ** (-(df + 1) / 2)

    t, steps = t95(df), 2000
    inner = sum((4 if i % 2 else 2) * density(i * t / steps) for i in range(1, steps))
    inside = (density(0) + inner + density(t)) * t / steps / 3
    assert (inside - 0.475) / density(t) == pytest.approx(0.0, abs=0.0006 if df <= 30 else 0.002)


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


def test_two_values_have_a_width_and_a_wide_one() -> None:
    found = mean_interval([9.0, 11.0])
    assert (found.low, found.high) == (pytest.approx(10 - 12.706), pytest.approx(10 + 12.706))


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
    assert found.high - found.mean == pytest.approx(1.1 * Z95 * 0.03 * math.sqrt(2))


def test_the_noise_of_a_ratio_falls_with_the_launches_of_either_side() -> None:
    exact = Interval(100.0, 100.0, 100.0)
    assert between_launches(0.03, (1, 1)) == pytest.approx(2 * 0.03**2)
    for launches in ((2, 1), (1, 2)):
        found = ratio_interval(exact, exact, 0.03, launches)
        assert found.high - 1 == pytest.approx(Z95 * 0.03 * math.sqrt(1.5))


def test_relative_errors_of_a_ratio_add_in_squares() -> None:
    found = ratio_interval(Interval(100.0, 97.0, 103.0), Interval(200.0, 192.0, 208.0), 0.0)
    assert found.mean == pytest.approx(0.5)
    assert (found.high - found.mean) / 0.5 == pytest.approx(math.hypot(0.03, 0.04))


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_a_ratio_is_the_same_for_servers_a_thousand_times_slower(scale: float) -> None:
    top, bottom = (Interval(r * scale, 0.9 * r * scale, 1.1 * r * scale) for r in (30.0, 20.0))
    found = ratio_interval(top, bottom, 0.03)
    assert found.mean == pytest.approx(1.5)
    assert (found.high - 1.5) / 1.5 == pytest.approx(math.sqrt(2 * 0.1**2 + 2 * (Z95 * 0.03) ** 2))


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


def test_the_noise_of_several_servers_is_pooled_around_their_own_means() -> None:
    """Squares 2 x 0.01^2 and 2 x 0.02^2 and the prior's, over one, one and one degrees of freedom."""
    pooled = launch_noise([99.0, 101.0], [196.0, 204.0])
    assert pooled == pytest.approx(math.sqrt((2 * 0.01**2 + 2 * 0.02**2 + LAUNCH_NOISE_PRIOR**2) / 3))
    assert launch_noise([99.0, 101.0], [500.0]) == launch_noise([99.0, 101.0]), "a single launch says nothing"


def test_many_repeats_give_their_own_standard_deviation() -> None:
    assert launch_noise([90.0, 110.0] * 200) == pytest.approx(0.1, rel=0.01)


def test_half_widths_are_shares_of_the_mean() -> None:
    assert relative_half_width(Interval(10.0, 9.0, 11.0)) == pytest.approx(0.1)
    assert relative_half_width(Interval(0.0, 0.0, 0.0)) == math.inf


# --- bounds that hold at every look


def test_the_bounds_are_those_of_the_published_formula() -> None:
    """Five values, mean 10, variance 2.5; BF = (1+5g)^-1/2 ((1+t2/4) / (1+t2/(4(1+5g))))^(5/2) = 1/alpha, with g = 30."""
    found = confidence_sequence([8.0, 10.0, 12.0, 9.0, 11.0], 0.05)
    assert found.mean == 10.0
    t2 = ((found.high - 10.0) / math.sqrt(2.5 / 5)) ** 2
    bayes = 151**-0.5 * ((1 + t2 / 4) / (1 + t2 / (4 * 151))) ** 2.5
    assert bayes == pytest.approx(20.0)
    assert found.high - found.mean == pytest.approx(found.mean - found.low)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 1.1]])
def test_before_there_are_enough_values_nothing_is_bounded(values: list[float]) -> None:
    found = confidence_sequence(values, 0.05)
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert found.mean == pytest.approx(sum(values) / len(values) if values else 0.0)


def test_a_smaller_error_asks_for_more_values_before_it_bounds_anything() -> None:
    values = [1.0, 1.1, 0.9, 1.0, 1.05]
    assert confidence_sequence(values[:3], 0.05).high < math.inf
    assert confidence_sequence(values[:3], 0.0005) == Interval(pytest.approx(1.0), -math.inf, math.inf)  # type: ignore[arg-type]
    assert confidence_sequence(values, 0.0005).high < math.inf


@pytest.mark.parametrize("correlation", [0.0, 0.3])
def test_looking_after_every_value_is_no_cheating(correlation: float) -> None:
    """Of 1,000 runs of 40 values, each looked at 40 times, few ever exclude the truth; Student's interval fails in a third."""
    rng = random.Random(4)
    wrong = cheated = 0
    for _ in range(1000):
        value, values, outside, outside_t = rng.gauss(0, 1), [], False, False
        for _ in range(40):
            value = correlation * value + math.sqrt(1 - correlation**2) * rng.gauss(0, 1)
            values.append(value)
            bound, textbook = confidence_sequence(values, 0.05), mean_interval(values)
            outside |= not bound.low <= 0 <= bound.high
            outside_t |= len(values) > 1 and not textbook.low <= 0 <= textbook.high
        wrong += outside
        cheated += outside_t
    assert wrong <= (50 if not correlation else 100)
    assert cheated > 250


def test_the_bounds_narrow_with_more_values_and_widen_with_less_error() -> None:
    values = [1.0, 1.1, 0.9, 1.05, 0.95] * 8

    def width(n: int, alpha: float) -> float:
        found = confidence_sequence(values[:n], alpha)
        return found.high - found.low

    assert width(40, 0.05) < width(20, 0.05) < width(10, 0.05) < width(10, 0.01)
    assert width(40, 0.05) > 2 * (mean_interval(values).high - 1.0), "wider than an interval for one look"


def test_correlated_neighbours_raise_the_variance_of_their_mean() -> None:
    rng = random.Random(1)
    independent = [rng.gauss(0, 1) for _ in range(2000)]
    walk, value = [], 0.0
    for noise in independent:
        value = 0.5 * value + noise
        walk.append(value)
    assert correlation_factor(independent) == pytest.approx(1.0, abs=0.15)
    assert correlation_factor(walk) == pytest.approx(3.0, abs=0.4)
    assert correlation_factor([1.0, -1.0] * 10) == 1.0, "alternating values do not narrow anything"
    assert correlation_factor([1.0, 2.0, 3.0]) == correlation_factor([]) == correlation_factor([5.0] * 9) == 1.0
    assert correlation_factor([float(n) for n in range(200)]) == pytest.approx(19.0), "a trend is bounded"


def test_four_values_are_enough_to_see_that_neighbours_are_alike() -> None:
    """1, 2, 3, 4: squares 5, lagged products 1.25, so r = 0.25 + 1/4 and the variance three times as large."""
    assert correlation_factor([1.0, 2.0, 3.0, 4.0]) == pytest.approx(3.0)
    assert correlation_factor([101.0, 102.0, 103.0, 104.0]) == pytest.approx(3.0), "wherever they lie"


@pytest.mark.parametrize(("alpha", "z"), [(0.05, 1.960), (0.01, 2.576), (0.001, 3.291)])
def test_normal_quantiles_are_those_of_the_tables(alpha: float, z: float) -> None:
    assert z_of(alpha) == pytest.approx(z, abs=0.0005)


@given(st.floats(0.001, 0.5), st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_a_campaign_never_spends_more_than_its_error_budget(budget: float, queue: list[int]) -> None:
    spent = 0.0
    for before, left in enumerate(queue):
        share = budget_share(budget, spent, left, before)
        assert share > 0
        spent += share
    assert spent <= budget * (1 + 1e-9)


def test_after_hundreds_of_trials_enqueued_one_by_one_a_promotion_is_still_possible() -> None:
    spent = 0.0
    for before in range(300):
        share = budget_share(0.05, spent, 1, before)
        assert z_of(share) < 5.5
        assert math.isfinite(confidence_sequence([1.0, 1.1, 0.9] * 5, share / 8).high)
        spent += share
    assert spent <= 0.05


def test_a_budget_that_was_made_smaller_than_what_is_spent_leaves_bounds_finite() -> None:
    share = budget_share(0.01, 0.05, 3)
    assert z_of(share) < 7
    assert math.isfinite(confidence_sequence([1.0, 1.1, 0.9] * 5, share / 8).high)


def test_the_trials_that_are_known_share_half_of_what_is_left() -> None:
    assert budget_share(0.05, 0.0, 10) == pytest.approx(0.0025)
    assert budget_share(0.05, 0.03, 1) == pytest.approx(0.01)
    assert budget_share(0.05, 0.0, 0) == pytest.approx(0.025), "a trial that nobody counted is one"
    assert budget_share(0.05, 0.0, 2, 10) == pytest.approx(0.005), "half as many as were before are expected to come"


def test_a_ratio_of_smaller_error_is_wider_by_the_quantile() -> None:
    exact = Interval(100.0, 100.0, 100.0)
    found = ratio_interval(exact, exact, 0.03, alpha=0.001)
    assert found.high - 1 == pytest.approx(z_of(0.001) * math.sqrt(2) * 0.03)


def test_the_most_events_within_a_window_are_counted_wherever_it_lies() -> None:
    assert most_within([], 10.0) == 0
    assert most_within([0.0, 10.0, 20.0], 10.0) == 1
    assert most_within([0.0, 5.0, 9.9, 20.0], 10.0) == 3
    assert most_within([0.0, 50.0, 51.0, 52.0, 400.0], 10.0) == 3, "also long after"
