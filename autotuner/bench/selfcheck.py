"""Whether the benchmark client was the limit of a level itself, from what it says about itself. Pure."""

from autotuner.bench.samples import LevelSamples

# A level is void where the client was the limit. Fitted on runs against a null server: a saturated client's loop lag
# was above 20 ms at its 99th percentile in every run whose median ITL was wrong, and its core was full.
LAG_MS_MAX = 50.0
CPU_RATIO_MAX = 0.95


def client_limited(samples: LevelSamples) -> bool:
    """Given a level's samples, tell whether the client was the limit."""
    return samples.lag_p99_ms > LAG_MS_MAX and samples.cpu_ratio > CPU_RATIO_MAX


def why_limited(samples: LevelSamples) -> str:
    """Given a level's samples, return why they must not be used; empty where the client was not the limit."""
    if not client_limited(samples):
        return ""
    return (
        f"the benchmark client was the limit: its event loop ran {samples.lag_p99_ms:.0f} ms late (p99) "
        f"and its core was {100 * samples.cpu_ratio:.0f} % busy"
    )
