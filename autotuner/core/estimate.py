"""How much longer a start takes: the durations of its stages learned from earlier starts, and what its bar says. Pure.

An estimate is shown and never decided on. Where nothing was learned, nothing is claimed.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from autotuner.core.report import duration
from autotuner.engines.base import STAGE_ORDER, Stage

BAR_OVER_USUAL_MAX = 3.0  # a bar's first tick can be off by any factor; a load three times as slow as ever is rare
_ORDER = {stage.value: number for number, stage in enumerate(STAGE_ORDER)}


@dataclass(frozen=True)
class History:
    """One earlier start: (stage, seconds since the launch at which it was reached), and when it served."""

    reached: tuple[tuple[str, float], ...]
    ready_s: float


@dataclass(frozen=True)
class Estimate:
    """What earlier starts say of one that is under way, in seconds; None where they say nothing.

    `stage_usual_s` is how long the stage it is in usually takes. `overdue` tells that it has been in it for longer than
    that, and no bar says how far it is: then what remains is not known.
    """

    stage_usual_s: float | None = None
    remaining_s: float | None = None
    overdue: bool = False


def learn(histories: Iterable[History]) -> dict[str, float]:
    """Given earlier starts, return the median duration in seconds of each stage that at least half of them went through.

    A stage of few, such as a drafter's weights, is not to be expected of the next one.
    """
    seen: dict[str, list[float]] = {}
    every = tuple(histories)
    for history in every:
        ends = [at_s for _, at_s in history.reached[1:]] + [history.ready_s]
        for (stage, began_s), ended_s in zip(history.reached, ends, strict=False):
            if stage in _ORDER:
                seen.setdefault(stage, []).append(max(0.0, ended_s - began_s))
    return {stage: float(median(durations)) for stage, durations in seen.items() if 2 * len(durations) >= len(every)}


def remaining(
    usual: Mapping[str, float], stage: Stage, in_stage_s: float, done: int | None = None, total: int | None = None
) -> Estimate:
    """Given learned durations, the stage, the seconds spent in it and its bar if it has one, return what is left.

    The further the bar, the more it is believed: it knows today's disk, where history knows the size of the model.
    """
    if not usual:
        return Estimate()
    later = sum(seconds for name, seconds in usual.items() if _ORDER[name] > _ORDER[stage.value])
    mine = usual.get(stage.value)
    left_by_history = max(0.0, mine - in_stage_s) if mine is not None else None
    share = min(1.0, done / total) if done and total else 0.0
    if share:
        left_by_bar = in_stage_s * (1 - share) / share
        if mine is None or left_by_history is None:
            return Estimate(None, left_by_bar + later)
        if in_stage_s < mine:
            left_by_bar = min(left_by_bar, BAR_OVER_USUAL_MAX * mine)
            return Estimate(mine, share * left_by_bar + (1 - share) * left_by_history + later)
        return Estimate(mine, left_by_bar + later)  # slower than ever: history has no more to say of this stage
    if mine is not None and in_stage_s > mine:
        return Estimate(mine, None, overdue=True)
    return Estimate(mine, (left_by_history or 0.0) + later)


def in_words(estimate: Estimate) -> str:
    """Given an estimate, return it as `usually 4 min 10 s in this stage; about 5 min to go`; empty if nothing is known."""
    parts = []
    if estimate.stage_usual_s is not None and estimate.stage_usual_s >= 1:
        parts.append(f"usually {duration(round(estimate.stage_usual_s))} in this stage")
    if estimate.overdue:
        parts.append("longer than usual now")
    elif estimate.remaining_s is not None:
        parts.append(f"about {_about(estimate.remaining_s)} to go")
    return "; ".join(parts)


def _about(seconds: float) -> str:
    """Up to what an estimate can be trusted with: whole minutes, tens of seconds, or seconds."""
    if seconds >= 120:
        minutes = math.ceil(seconds / 60)
        return f"{minutes} min" if minutes < 100 else duration(minutes * 60)
    step = 10 if seconds >= 30 else 1
    return f"{max(1, math.ceil(seconds / step) * step)} s"
