"""Arrivals are the same for both sides of a comparison, in order, and as many as the rate says."""

from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.bench.arrivals import arrivals
from autotuner.bench.benchmark import Benchmark

rates = st.floats(0.01, 2000.0)


def plan(rate: float, count: int, **fields: object) -> list[float]:
    benchmark = Benchmark.model_validate({"levels": (1,), "load": "request-rate", **fields})
    return list(islice(arrivals(benchmark, rate), count))


@given(rates, st.integers(0, 9), st.floats(0.0, 100.0), st.sampled_from(["poisson", "constant"]))
def test_arrivals_are_reproducible_in_order_and_after_the_start(
    rate: float, seed: int, ramp_s: float, kind: str
) -> None:
    once, again = (plan(rate, 50, seed=seed, ramp_s=ramp_s, arrivals=kind) for _ in range(2))
    assert once == again
    assert once[0] >= 0
    assert all(a <= b for a, b in pairwise(once))


def test_another_seed_or_rate_has_other_arrivals_but_a_whole_rate_is_one_rate_however_it_is_written() -> None:
    assert plan(8.0, 9, seed=1) != plan(8.0, 9, seed=2)
    assert plan(8, 9) == plan(8.0, 9)
    assert [8 * at for at in plan(8.0, 9)] != [4 * at for at in plan(4.0, 9)]


@given(rates, st.floats(0.0, 60.0), st.integers(1, 400))
def test_constant_arrivals_ramp_up_evenly_and_then_keep_their_distance(rate: float, ramp_s: float, count: int) -> None:
    for number, at in enumerate(plan(rate, count, arrivals="constant", ramp_s=ramp_s), 1):
        expected = rate * at**2 / (2 * ramp_s) if at < ramp_s else rate * (at - ramp_s / 2)
        assert expected == pytest.approx(number)


@pytest.mark.parametrize("rate", [0.5, 20, 500.0])
def test_poisson_arrivals_have_the_rate_and_the_spread_of_independent_ones(rate: float) -> None:
    found = plan(rate, 20_000)
    gaps = [b - a for a, b in pairwise([0.0, *found])]
    mean = sum(gaps) / len(gaps)
    assert mean * rate == pytest.approx(1.0, abs=0.03)
    assert sum((g - mean) ** 2 for g in gaps) / len(gaps) * rate**2 == pytest.approx(1.0, abs=0.08)


def test_in_a_ramp_half_as_many_come_as_at_the_full_rate() -> None:
    assert sum(at < 100.0 for at in plan(40.0, 5000, ramp_s=100.0)) == pytest.approx(2000, rel=0.08)
