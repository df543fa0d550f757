"""Intervals, sequential bounds, ratios and the noise floor. Pure.

Everything here is a published formula; each says which, and what it assumes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

# Student's t, two-sided 95 %, by degrees of freedom; from the usual tables. Above 30 it is near 1.96 + 2.5/df.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip
Z95, Z99 = NormalDist().inv_cdf(0.975), NormalDist().inv_cdf(0.995)

# Assumed relative standard deviation between two launches of the same server, until the host's own is measured by
# launching the baseline again. On an H200 one configuration launched twice differed by 1 to 12 % up to concurrency 32.
LAUNCH_NOISE_PRIOR = 0.03

# Prior variance of the standardised effect in the confidence sequence. Larger is tighter after few values and looser after
# many; 30 bounds the mean from the sixth value on at an error of 0.0003, where losers are mostly recognised.
_EFFECT_VARIANCE = 30.0


@dataclass(frozen=True)
class Interval:
    """A mean and its two-sided 95 % bounds."""

    mean: float
    low: float
    high: float


def t95(df: int) -> float:
    """Given degrees of freedom (at least 1), return Student's two-sided 95 % quantile."""
    return _T95[df - 1] if df <= len(_T95) else Z95 + 2.5 / df


def mean_interval(values: list[float]) -> Interval:
    """Given independent values, return their mean with Student's 95 % interval; a single value has no width known.

    For one value the bounds are the value itself: the caller must not take that for certainty.
    """
    if not values:
        return Interval(0.0, 0.0, 0.0)
    mean = sum(values) / len(values)
    if len(values) < 2:
        return Interval(mean, mean, mean)
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    half = t95(len(values) - 1) * math.sqrt(variance / len(values))
    return Interval(mean, mean - half, mean + half)


def confidence_sequence(values: list[float], alpha: float) -> Interval:
    """Given values in order, return their mean with bounds that hold at all times at once with probability 1 - alpha.

    So one may look after every value and stop when it suits, which Student's interval does not allow. It inverts the
    Bayes factor of the t-test with a normal prior on the standardised effect, which is a martingale under the null
    whatever the variance (Hendriksen, de Heide and Gruenwald 2021; Wang and Ramdas 2024). Assumes independent, nearly
    normal values; positive correlation between neighbours widens it (see `correlation_factor`). The bounds are infinite
    while there are too few values.
    """
    n = len(values)
    if n == 0:
        return Interval(0.0, -math.inf, math.inf)
    mean = sum(values) / n
    if n < 3:
        return Interval(mean, -math.inf, math.inf)
    spread = 1 + n * _EFFECT_VARIANCE
    evidence = (math.sqrt(spread) / alpha) ** (2 / n)
    if evidence >= spread:
        return Interval(mean, -math.inf, math.inf)
    # t^2 / (n - 1) at which the Bayes factor reaches 1 / alpha.
    excess = (evidence - 1) / (1 - evidence / spread)
    variance = correlation_factor(values) * sum((v - mean) ** 2 for v in values) / (n - 1)
    half = math.sqrt(excess * (n - 1) * variance / n)
    return Interval(mean, mean - half, mean + half)


def correlation_factor(values: list[float]) -> float:
    """Given values in order, return by how much correlation of neighbours raises the variance of their mean, at least 1.

    (1 + r) / (1 - r) of a first-order autoregression (Bartlett 1946), r being the lag-1 autocorrelation with its
    small-sample bias of about 1/n added back (Kendall 1954). At most 19, which is r = 0.9: beyond, it is drift.
    """
    n = len(values)
    if n < 4:
        return 1.0
    mean = sum(values) / n
    squares = sum((v - mean) ** 2 for v in values)
    if squares <= 0:
        return 1.0
    r = sum((a - mean) * (b - mean) for a, b in pairwise(values)) / squares + 1 / n
    r = min(0.9, max(0.0, r))
    return (1 + r) / (1 - r)


def z_of(alpha: float) -> float:
    """Given a two-sided error probability above 0, return the standard normal quantile: 1.96 for 0.05."""
    return -NormalDist().inv_cdf(alpha / 2)  # 1 - alpha / 2 would round to 1 for a small one


# A campaign whose budget is spent (the operator made it smaller) must go on: bounds of this are 6 standard deviations wide.
LEAST_SHARE = 1e-9


def budget_share(budget: float, spent: float, left: int, before: int = 0) -> float:
    """Given a campaign's error budget, what the trials `before` spent of it, and those left with this one, return its part.

    Half of what is left goes to the trials that are known, in equal parts, so that those which are enqueued later find
    something too; the sum never exceeds the budget. Alpha spending (Lan and DeMets 1983) with equal parts. Half as many as
    were before are always expected: with candidates enqueued one by one the parts would else halve each time, and nothing
    could be promoted after some twenty; so they fall with the square of their number.
    """
    return max(LEAST_SHARE, (budget - spent) / 2 / max(1, left, before / 2))


def quantile(ordered: Sequence[float], q: float) -> float:
    """Given ascending values, return the quantile by linear interpolation (Hyndman and Fan's type 7)."""
    if not ordered:
        raise ValueError("no values")
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: list[float]) -> float:
    """Given values, return their median; raise ValueError if there are none."""
    return quantile(sorted(values), 0.5)


def relative_half_width(interval: Interval) -> float:
    """Given an interval, return half its width as a share of its mean; infinite where the mean is 0."""
    return (interval.high - interval.low) / 2 / interval.mean if interval.mean > 0 else math.inf


def ratio_interval(
    numerator: Interval,
    denominator: Interval,
    launch_noise: float,
    launches: tuple[int, int] = (1, 1),
    alpha: float = 0.05,
) -> Interval:
    """Given two measured rates, each the mean of so many `launches`, return their ratio with bounds of confidence 1 - alpha.

    Adds three relative variances (first-order error propagation): within each measurement, and between launches.
    `launch_noise` is the relative standard deviation of one launch. The numerator's bounds are taken to be of confidence
    1 - alpha already, the denominator's of 95 %. Assumes the three to be independent.
    """
    if denominator.mean <= 0:
        return Interval(math.inf, 0.0, math.inf)
    ratio, z = numerator.mean / denominator.mean, z_of(alpha)
    half = relative_half_width(numerator) if numerator.mean > 0 else 0.0
    other = math.hypot(relative_half_width(denominator) / Z95, math.sqrt(between_launches(launch_noise, launches)))
    half = math.hypot(half, z * other)
    return Interval(ratio, max(0.0, ratio * (1 - half)), ratio * (1 + half))


def between_launches(launch_noise: float, launches: tuple[int, int]) -> float:
    """Given the relative standard deviation of one launch and each side's launches, return the variance of their ratio.

    That of a ratio of two means, to first order: noise^2 (1 / n_a + 1 / n_b).
    """
    return launch_noise**2 * (1 / launches[0] + 1 / launches[1])


def launch_noise(*groups: Sequence[float]) -> float:
    """Given one rate from each launch of a configuration, for one or more of them, return their relative standard deviation.

    Pooled over the configurations. With fewer than two launches of any nothing was measured, and the prior stands. Two or
    three repeats can agree by chance, so the prior counts as one more observation of the variance.
    """
    squares, freedom = LAUNCH_NOISE_PRIOR**2, 1
    for rates in groups:
        if len(rates) > 1:
            mean = sum(rates) / len(rates)
            squares += sum((r - mean) ** 2 for r in rates) / mean**2
            freedom += len(rates) - 1
    return math.sqrt(squares / freedom)


def most_within(times_s: list[float], window_s: float) -> int:
    """Given times in order, return the most of them that lie within any one window of this length.

    A budget that is spent stays spent: were it counted back from now, a best-known that cannot live would take the place of
    the older one that can, over and over, once a window.
    """
    return max((sum(at <= t < at + window_s for t in times_s[i:]) for i, at in enumerate(times_s)), default=0)
