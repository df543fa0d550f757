"""Intervals of latencies hold what they promise, say nothing where nothing is known, and count requests, not gaps."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.bench.latency import clustered, order_ranks, summary


def covered(source: random.Random, n: int, q: str, truth: float) -> bool:
    found = summary([source.expovariate(1.0) for _ in range(n)])
    return found.get(f"{q}_low", -math.inf) <= truth <= found.get(f"{q}_high", math.inf)


@pytest.mark.parametrize(("q", "share"), [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)])
@pytest.mark.parametrize("n", [20, 200])
def test_the_interval_of_a_quantile_holds_the_true_one_in_95_of_100_runs(q: str, share: float, n: int) -> None:
    source = random.Random(3)
    held = sum(covered(source, n, q, -math.log(1 - share)) for _ in range(600))
    assert held / 600 > 0.93


def test_ranks_are_those_of_the_published_table() -> None:
    """For the median of 20 values the 95 % interval runs from the 6th to the 15th."""
    assert order_ranks(20, 0.5) == (5, 14)
    assert order_ranks(5, 0.5) == (None, None), "five values give no 95 % interval for a median; six do"
    assert order_ranks(6, 0.5) == (0, 5)


def test_an_upper_bound_that_so_few_requests_cannot_give_is_left_out() -> None:
    values = [float(i) for i in range(367)]
    assert "p99_high" not in summary(values)
    assert summary([*values, 367.0])["p99_high"] == 367.0, "0.99^368 is below 2.5 %"
    assert set(summary([7.0, 8.0])) & {"p50_low", "p50_high", "p90_high", "p99_high"} == set()
    assert "mean_low" not in summary([7.0])
    assert summary([]) == {}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_every_figure_lies_within_its_bounds(values: list[float]) -> None:
    found = summary(values)
    for name in ("mean", "p50", "p90", "p99"):
        slack = 1e-9 * max(1.0, found[name])
        assert found.get(f"{name}_low", -math.inf) <= found[name] + slack
        assert found.get(f"{name}_high", math.inf) >= found[name] - slack


def test_the_mean_of_a_series_that_drifts_is_not_called_surer_than_its_stretches_allow() -> None:
    """Waves of slow and fast requests, 50 each: neighbours are alike, so 400 requests are worth far fewer."""
    waves = [10.0 + 5 * (i // 50 % 2) + 0.01 * (i % 7) for i in range(400)]
    found, shuffled = summary(waves), random.Random(1).sample(waves, len(waves))
    assert found["mean_high"] - found["mean_low"] > 2 * (summary(shuffled)["mean_high"] - summary(shuffled)["mean_low"])


def gaps(source: random.Random, requests: int, each: int) -> list[list[int]]:
    """Requests of which each has a speed of its own: its gaps are alike."""
    return [
        [round(1000 * source.gauss(speed, 0.5)) for _ in range(each)]
        for speed in [source.gauss(20, 3) for _ in range(requests)]
    ]


def test_bounds_of_gaps_count_requests() -> None:
    """A hundred times the gaps a request tell little more of what requests do: the bounds stay where they were."""
    few, many = (clustered(gaps(random.Random(2), 30, each), 0.001) for each in (10, 1000))
    assert many["p50_high"] - many["p50_low"] > 0.5 * (few["p50_high"] - few["p50_low"])
    pooled = summary([g / 1000 for group in gaps(random.Random(2), 30, 1000) for g in group])
    assert many["p50_high"] - many["p50_low"] > 5 * (pooled["p50_high"] - pooled["p50_low"])


@pytest.mark.parametrize("name", ["p50", "mean"])
def test_the_interval_of_dependent_gaps_holds_the_truth_in_95_of_100_runs(name: str) -> None:
    source = random.Random(4)
    runs = [clustered(gaps(source, 40, 30), 0.001) for _ in range(400)]
    assert sum(run[f"{name}_low"] <= 20 <= run[f"{name}_high"] for run in runs) / 400 > 0.92


def test_gaps_that_are_all_alike_have_figures_in_milliseconds() -> None:
    found = clustered([[5000] * 9] * 8, 0.001)
    assert [found[name] for name in ("mean", "p50", "p90", "p99")] == pytest.approx([5.0] * 4)
    assert (found["p50_low"], found["p50_high"]) == pytest.approx((5.0, 5.0))
    assert clustered([], 0.001) == {}
    assert set(clustered([[1, 2, 3]], 0.001)) == {"mean", "p50", "p90", "p99"}, "one request has no spread"
