"""Latencies -> mean and quantiles with 95 % intervals, as the tables in Figures hold them. Pure.

A bound that so few values cannot give is left out of a table: with 100 requests nobody knows an upper bound of p99.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from autotuner.core.statistics import mean_interval, quantile, t95

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# Into so many stretches a series is cut for the bounds of its mean, where each then has two values or more.
BATCHES = 20
_TAIL = 0.025


def summary(values: list[float]) -> dict[str, float]:
    """Given one value a request, in the order in which they ended, return mean, p50, p90 and p99 with their bounds.

    Quantiles have the order-statistic interval that the binomial distribution gives (Conover, Practical Nonparametric
    Statistics, 3.2): no shape is assumed, only requests that are independent. The mean's is Student's over batch means, since
    neighbours in time are not: they shared batches.
    """
    if not values:
        return {}
    ordered = sorted(values)
    found = {"mean": sum(values) / len(values)}
    found |= {name: quantile(ordered, q) for name, q in QUANTILES.items()}
    if len(values) > 1:
        found |= _bounds("mean", *_mean_bounds(values, found["mean"]))
    for name, q in QUANTILES.items():
        low, high = order_ranks(len(ordered), q)
        # The quantile is interpolated, so among very few values it may lie beside a rank that bounds it.
        found |= _bounds(
            name,
            min(ordered[low], found[name]) if low is not None else None,
            max(ordered[high], found[name]) if high is not None else None,
        )
    return found


def clustered(groups: Sequence[Sequence[int]], unit: float) -> dict[str, float]:
    """Given values in groups (the gaps of each request), return the same table over all of them, times `unit`.

    Gaps of one request depend on one another, so bounds count requests: the variance of the share of gaps below a quantile
    is that of a ratio over clusters, and the quantiles at that share plus and minus Student's multiple of it are the bounds
    (Woodruff 1952). The mean's are of the same ratio estimator (Cochran, Sampling Techniques, 6.4 and 9A.3).
    """
    counts: Counter[int] = Counter()
    for group in groups:
        counts.update(group)
    if not counts:
        return {}
    ordered = _Counted(counts)
    mean = sum(value * count for value, count in counts.items()) / len(ordered)
    points = {name: quantile(ordered, q) for name, q in QUANTILES.items()}
    found = {"mean": unit * mean, **{name: unit * value for name, value in points.items()}}
    if len(groups) < 2:
        return found
    sizes = [len(group) for group in groups]
    half = _ratio_half([sum(group) for group in groups], sizes, mean)
    below = [_below(group, list(points.values())) for group in groups]
    found |= _bounds("mean", max(0.0, unit * (mean - half)), unit * (mean + half))
    for number, name in enumerate(points):
        under = [ranks[number] for ranks in below]
        share = sum(under) / len(ordered)
        half = _ratio_half(under, sizes, share)
        # A share that is the same in every request is still not known better than the number of gaps allows.
        half = max(half, t95(len(groups) - 1) * math.sqrt(QUANTILES[name] * (1 - QUANTILES[name]) / len(ordered)))
        low, high = QUANTILES[name] - half, QUANTILES[name] + half
        found |= _bounds(
            name,
            unit * quantile(ordered, low) if low > 0 else None,
            unit * quantile(ordered, high) if high < 1 else None,
        )
    return found


class _Counted(Sequence[int]):
    """Ascending values, each held once however often it comes: of millions of gaps only thousands differ."""

    def __init__(self, counts: Counter[int]) -> None:
        self._values = sorted(counts)
        self._ends = list(accumulate(counts[value] for value in self._values))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, rank: Any) -> Any:
        return self._values[bisect_right(self._ends, rank)]


def _below(group: Sequence[int], points: list[float]) -> list[int]:
    """How many of a group's values are at most each of the points."""
    ordered = sorted(group)
    return [bisect_right(ordered, point) for point in points]


@lru_cache(maxsize=64)  # three tables of a level have as many requests
def order_ranks(n: int, q: float) -> tuple[int | None, int | None]:
    """Given how many values there are, return the ranks (from 0) of the quantile's lower and upper 95 % bound.

    None where even the least or the largest value is no bound: P(all n above the quantile) would exceed 2.5 %.
    """
    cumulative = _binomial(n, q)
    # The value of rank k is above the quantile if at most k of n are below it, and P(at most k) is cumulative[k].
    low = bisect_right(cumulative, _TAIL) - 1
    high = next((k for k, p in enumerate(cumulative) if p >= 1 - _TAIL), n)
    return (low if low >= 0 else None), (high if high < n else None)


def _binomial(n: int, q: float) -> list[float]:
    """P(at most k of n) for k = 0 … n."""
    log_q, log_rest, whole = math.log(q), math.log1p(-q), math.lgamma(n + 1)
    total, found = 0.0, []
    for k in range(n + 1):
        total += math.exp(whole - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * log_q + (n - k) * log_rest)
        found.append(total)
    return found


def _mean_bounds(values: list[float], mean: float) -> tuple[float, float]:
    count = BATCHES if len(values) >= 2 * BATCHES else len(values)
    edges = [i * len(values) // count for i in range(count + 1)]
    parts = [values[a:b] for a, b in pairwise(edges)]
    spread = mean_interval([sum(part) / len(part) for part in parts])
    half = (spread.high - spread.low) / 2
    return max(0.0, mean - half), mean + half


def _ratio_half(sums: Sequence[float], sizes: Sequence[int], ratio: float) -> float:
    """Half the 95 % interval of sum(sums) / sum(sizes), clusters being what was drawn."""
    count = len(sizes)
    squares = sum((s - ratio * size) ** 2 for s, size in zip(sums, sizes, strict=True))
    return t95(count - 1) * math.sqrt(count / (count - 1) * squares) / sum(sizes)


def _bounds(name: str, low: float | None, high: float | None) -> dict[str, float]:
    pairs = ((f"{name}_low", low), (f"{name}_high", high))
    return {key: value for key, value in pairs if value is not None}
