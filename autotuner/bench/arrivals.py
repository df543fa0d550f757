"""When the requests of an open loop are due: seeded, so that both sides of a comparison get the same arrivals. Pure."""

import math
import random
from collections.abc import Iterator

from autotuner.bench.benchmark import Benchmark, Level


def arrivals(benchmark: Benchmark, rate: Level) -> Iterator[float]:
    """Given a benchmark and a request rate per second, yield when each request is due, in seconds after the start, for ever.

    Poisson arrivals have independent exponential gaps, constant ones equal gaps. Over the first `ramp_s` seconds the rate grows
    evenly from 0 to `rate`: then half as many requests come as would at the full rate.
    """
    source = random.Random(f"{benchmark.seed}/arrivals/{float(rate)}")  # noqa: S311 - reproducible, not secret
    expected = 0.0  # how many requests are expected until the next one, at any rate
    while True:
        expected += source.expovariate(1.0) if benchmark.arrivals == "poisson" else 1.0
        yield _when(expected, rate, benchmark.ramp_s)


def _when(expected: float, rate: Level, ramp_s: float) -> float:
    """The instant until which a rate that grows over `ramp_s` makes so many arrivals expected."""
    in_ramp = rate * ramp_s / 2
    if expected < in_ramp:
        return math.sqrt(2 * ramp_s * expected / rate)
    return ramp_s + (expected - in_ramp) / rate
