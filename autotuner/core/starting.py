"""Follows a start by its stages: what was reached, how far, and for how long nothing has moved. Pure.

Owns the promise that a slow load is never called a hang: silence counts from the last sign of progress of any kind (a
line, a bar that moved, bytes read, CPU time, memory), and each stage has its own limit.
"""

from dataclasses import dataclass, replace

from autotuner.core.facts import StartSoFar
from autotuner.engines.base import STAGE_ORDER, LogFact, Stage, StageSeen

READ_STEP_BYTES = 4 << 20  # less than this much read, CPU used or memory grown is idling, not progress
CPU_STEP_S = 1.0
MEMORY_STEP_BYTES = 16 << 20


@dataclass(frozen=True)
class Pulse:
    """The signs of life last counted as progress."""

    read_bytes: int = 0
    cpu_s: float = 0.0
    rss_bytes: int = 0
    log_bytes: int = 0


@dataclass(frozen=True)
class Start:
    """A start as far as it is known; times in seconds since the launch."""

    stage: Stage = Stage.PROCESS
    done: int | None = None
    total: int | None = None
    moved_at_s: float = 0.0
    pulse: Pulse = Pulse()
    reached: tuple[tuple[str, float], ...] = ((Stage.PROCESS.value, 0.0),)

    @property
    def progress(self) -> str:
        """The stage in words, with its count where the engine gives one."""
        return (
            f"{self.stage.value} {self.done}/{self.total}" if self.done is not None and self.total else self.stage.value
        )


def follow(start: Start, facts: tuple[LogFact, ...], pulse: Pulse, now_s: float) -> Start:
    """Given a start, the new facts of its log and its signs of life, return it as it is now."""
    for fact in facts:
        if isinstance(fact, StageSeen):
            start = _reach(start, fact, now_s)
    if _moved(start.pulse, pulse):
        start = replace(start, moved_at_s=now_s, pulse=pulse)
    return start


def so_far(start: Start, now_s: float, limit_s: float, silence_limit_s: float) -> StartSoFar:
    """Given a start, the time and its limits, return what policies look at."""
    return StartSoFar(start.stage, now_s, limit_s, now_s - start.moved_at_s, silence_limit_s)


def _reach(start: Start, seen: StageSeen, now_s: float) -> Start:
    """Ranks interleave, so a line of an earlier stage moves the clock but not the stage."""
    if STAGE_ORDER.index(seen.stage) < STAGE_ORDER.index(start.stage):
        return replace(start, moved_at_s=now_s)
    reached = start.reached
    if seen.stage is not start.stage:
        reached = (*reached, (seen.stage.value, round(now_s, 3)))
    moved = seen.stage is not start.stage or seen.done != start.done or seen.done is None
    at = now_s if moved else start.moved_at_s
    return replace(start, stage=seen.stage, done=seen.done, total=seen.total, moved_at_s=at, reached=reached)


def _moved(old: Pulse, new: Pulse) -> bool:
    return (
        new.log_bytes != old.log_bytes
        or new.read_bytes - old.read_bytes >= READ_STEP_BYTES
        or new.cpu_s - old.cpu_s >= CPU_STEP_S
        or abs(new.rss_bytes - old.rss_bytes) >= MEMORY_STEP_BYTES
    )
