"""Whether the benchmark client was itself the limit of a level: judged by the harm it did, not by how busy it was. Pure.

A closed loop's stream is idle from its answer's last byte to its next request: that time is the client's own, and what it
takes of all streams' time is taken off the throughput. Latencies of an open loop count from when a request was due, so that
lateness in sending is added to them. Where only the gaps between events are wrong, the level's other figures hold.
"""

from autotuner.bench.samples import LevelSamples

# Fitted on runs against a null server on two cores (docs/benchmark-client.md): overloaded clients lost 20 to 90 % of their
# streams' time, clients within their means at most 2 %.
LOST_RATIO_MAX = 0.05
MERGED_RATIO_MAX = 0.05
BUSY_RATIO_MAX = 0.9
LAG_MS_MAX = 20.0  # only where the kernel gave no receive times, and the reads' own have to do
LATE_RATIO_MAX = 0.05  # of the mean TTFT
# What the client took from a server by sharing its cores: less is not worth a word in an entry.
TAKEN_RATIO_MAX = 0.02
WAITED_RATIO_MAX = 0.05


def client_limit(samples: LevelSamples) -> str:
    """Given a level's samples, say why the client was its limit; empty if it was not."""
    harm = _lost(samples) or _late(samples) or _blind(samples)
    if not harm:
        return ""
    return f"the benchmark client was the limit: {harm}; {_why(samples)}. {_could(samples)}"


def _lost(samples: LevelSamples) -> str:
    """Throughput that a closed loop lost between an answer and the next request."""
    idle_s = samples.send_delay_ms.get("mean", 0.0) / 1000
    took = [r.end_s - r.sent_s for r in samples.requests if r.end_s is not None and not r.error]
    if samples.open_loop or not samples.kernel_stamps or not took:
        return ""
    request_s = sum(took) / len(took)
    ratio = idle_s / (idle_s + request_s) if idle_s > 0 else 0.0
    return f"it took {100 * ratio:.0f} % of its streams' time for itself" if ratio > LOST_RATIO_MAX else ""


def blurred(samples: LevelSamples) -> str:
    """Given a level's samples, say why the gaps between its events must not be used; empty where they may.

    Events share a read where the client was late, and where the server sent them at once; then nobody is late, and it is true.
    """
    itl_ms = samples.itl_ms.get("p50", 0.0)
    late = samples.busy_ratio > BUSY_RATIO_MAX or samples.lag_p99_ms > max(1.0, itl_ms)
    if samples.merged_ratio <= MERGED_RATIO_MAX or not late:
        return ""
    return f"ITL is not known: the client was late, and {100 * samples.merged_ratio:.0f} % of the events shared a read"


def shared(samples: LevelSamples) -> str:
    """Given a level's samples, say what the client took of cores that the server may use; empty where it is next to nothing."""
    placed = samples.placed
    if placed is None or not placed.shares or not placed.server_cores:
        return ""
    taken = samples.cpu_ratio * samples.processes / placed.server_cores
    if taken <= TAKEN_RATIO_MAX and samples.waited_ratio <= WAITED_RATIO_MAX:
        return ""
    waited = f", and waited for a core {100 * samples.waited_ratio:.0f} % of the time"
    waited = waited if samples.waited_ratio > WAITED_RATIO_MAX else ""
    return f"{placed.said}; it took {100 * taken:.0f} % of the cores that the server may use{waited}"


def _late(samples: LevelSamples) -> str:
    """Requests of an open loop that went out late though nothing but the client held them back."""
    if not samples.open_loop or samples.held_back:
        return ""
    waits = [1000 * (r.first_s - r.began_s) for r in samples.requests if r.first_s is not None]
    late_ms = samples.send_delay_ms.get("mean", 0.0)
    if not waits or late_ms <= LATE_RATIO_MAX * sum(waits) / len(waits):
        return ""
    return f"requests went out {late_ms:.1f} ms late on average"


def _blind(samples: LevelSamples) -> str:
    """Without the kernel's receive times lateness goes into the figures themselves."""
    if samples.kernel_stamps or samples.busy_ratio <= BUSY_RATIO_MAX or samples.lag_p99_ms <= LAG_MS_MAX:
        return ""
    return f"its event loop ran {samples.lag_p99_ms:.0f} ms late (p99)"


def _why(samples: LevelSamples) -> str:
    each = "each of its processes' cores" if samples.processes > 1 else "its core"
    if samples.waited_ratio > max(0.1, samples.cpu_ratio):
        return f"something else used {each} while it waited, {100 * samples.waited_ratio:.0f} % of the time"
    if samples.busy_ratio > BUSY_RATIO_MAX:
        return f"{each} was {100 * samples.busy_ratio:.0f} % busy"
    return f"it was held up from outside, since {each} was only {100 * samples.busy_ratio:.0f} % busy"


def _could(samples: LevelSamples) -> str:
    """What it could have measured: its calibrated capacity, else what it took per second on a core."""
    seconds = (samples.steady_to_s or 0.0) - (samples.steady_from_s or 0.0)
    capacity = samples.capacity_tok_s
    if capacity is None and samples.cpu_ratio > 0 and seconds > 0:
        capacity = sum(samples.bins) / seconds / samples.cpu_ratio
    if capacity is None:
        return "What it could have measured is not known"
    rounded = float(f"{capacity * samples.processes:.2g}")
    cores = f"a core for each of its {samples.processes} processes" if samples.processes > 1 else "a core to itself"
    return f"With {cores} it takes about {rounded:,.0f} events/s on this host"
