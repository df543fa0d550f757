"""How long a level's load may take, from its benchmark: what is later hangs. Pure.

The load's own parts have limits: its warm-up, its steady part, its tail. Beside them stand generous times for what has none: a
start, reading a dataset, putting the samples of a large level together.
"""

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.client import TAIL_LEAST_S, WARMUP_LEAST_S

START_S = 120.0  # until a process has its prompts and connections
SAMPLES_S = 120.0  # from the end of the load until its samples are there
SILENT_S = 120.0  # a load speaks twice a second; the times above are the only ones in which it does not


def tail_s(benchmark: Benchmark) -> float:
    """Given a benchmark, return the seconds within which a level's samples come after its steady part was told to end."""
    return max(TAIL_LEAST_S, benchmark.seconds) + SAMPLES_S


def level_s(benchmark: Benchmark, processes_max: int) -> float:
    """Given a benchmark and how many processes may carry it, return the seconds within which a level's samples must come.

    Each time that the load turns out to be too much for its processes it begins anew with twice as many. The steady part may
    go on for its own time once more where few requests were answered.
    """
    begins = max(1, processes_max).bit_length() + 1
    warm_s = max(WARMUP_LEAST_S, 4 * benchmark.seconds) + benchmark.ramp_s
    return begins * (START_S + warm_s) + 2 * benchmark.seconds + tail_s(benchmark)
