"""Where a level's rate stands still: its steady part begins there, and not where the first answers were. Pure.

A server can be warm for one request and not for so many: kernels are made for the first large batch, an allocator grows, and
schedulers that replace requests one by one are several times slower than when many end together, which comes about by itself
after some seconds. Figures of a level that holds both are those of neither, and their interval says so by being useless.

Only a rise counts: a rate that falls is what a long load does to a server, and stays in its figures.
"""

import math
from collections.abc import Sequence

from autotuner.bench.measurement import itl_table
from autotuner.bench.samples import BIN_S, LevelSamples, Progress
from autotuner.core.statistics import quantile

RISE_MIN = 0.25  # seen on one H200: a factor of 1.5 to 3; what is smaller is told as drift and left in
SURE = 4.0  # standard errors: a level is looked at twice a second, and must not be cut for its waves
SLOT_S = 1.0  # a slot is at least so long, and at least half a request
BEFORE_MIN, AFTER_MIN = 2, 3  # slots; fewer have no spread to tell a rise from
FLOOR = 0.01  # of the rate: the least that a spread is taken for, where counts happen to be equal


def settled(samples: LevelSamples) -> LevelSamples:
    """Given a level's samples, return them with the steady part beginning where the rate stood still.

    `unsettled_s` says by how much that is later. Loads that are not kept in flight come back as they were.
    """
    start, bins = samples.steady_from_s, samples.bins
    durations = sorted(
        r.end_s - r.began_s for r in samples.requests if r.end_s is not None and not r.error and not r.cut
    )
    if samples.load != "concurrency" or start is None or not durations:
        return samples
    size = round(max(SLOT_S, quantile(durations, 0.5) / 2) / BIN_S)
    counts = [sum(bins[at : at + size]) for at in range(0, len(bins) - size + 1, size)]
    cold = size * settled_from(counts)
    if not cold:
        return samples
    cold_s = cold * BIN_S
    update = {
        "steady_from_s": round(start + cold_s, 6),
        "unsettled_s": round(cold_s, 3),
        "bins": bins[cold:],
    }
    moved = samples.model_copy(update=update)
    return moved.model_copy(update={"itl_ms": itl_table(moved)})


def settled_line(progress: Sequence[Progress], concurrency: int) -> int:
    """Given the line that a closed loop's steady part began with and those since, return how many came before it stood still.

    A request's duration is what Little's law makes of the requests in flight and those answered.
    """
    if len(progress) < 2:
        return 0
    first, last = progress[0], progress[-1]
    answered, seconds = last.done - first.done, last.at_s - first.at_s
    if not answered:
        return 0
    slot_s = max(SLOT_S, concurrency * seconds / answered / 2)
    rates, ends, events, since = [], [], 0, first.at_s
    for number, line in enumerate(progress[1:], 1):
        events += line.events
        if line.at_s - since >= slot_s:
            rates.append(events / (line.at_s - since))
            ends.append(number)
            events, since = 0, line.at_s
    cold = settled_from(rates)
    return ends[cold - 1] if cold else 0


def settled_from(rates: Sequence[float]) -> int:
    """Given the rates of slots of equal length in order, return how many of the first are from before the rate stood still."""
    cold = 0
    while risen := _rise(rates[cold:]):
        cold += risen
    return cold


def _rise(rates: Sequence[float]) -> int:
    """The slots before the one change that explains most, if that is a rise and no accident; else 0."""
    splits = range(BEFORE_MIN, len(rates) - AFTER_MIN + 1)
    at = max(splits, key=lambda k: _explained(rates[:k], rates[k:]), default=0)
    if not at:
        return 0
    before, after = rates[:at], rates[at:]
    low, high = _mean(before), _mean(after)
    if high < (1 + RISE_MIN) * low or not high:
        return 0
    error = math.sqrt(_variance(before, high) / len(before) + _variance(after, high) / len(after))
    return at if high - low >= SURE * error else 0


def _explained(before: Sequence[float], after: Sequence[float]) -> float:
    """The sum of squares between the two parts, negative where the rate fell."""
    difference = _mean(after) - _mean(before)
    return math.copysign(difference * difference, difference) * len(before) * len(after)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _variance(values: Sequence[float], scale: float) -> float:
    mean = _mean(values)
    return max((FLOOR * scale) ** 2, sum((v - mean) ** 2 for v in values) / (len(values) - 1))
