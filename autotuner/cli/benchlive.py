"""What a benchmark shows while it runs: a bar and a live line on a terminal, elsewhere a plain line now and then."""

import sys
from collections import deque
from types import TracebackType
from typing import Any, Self

import click

from autotuner.bench.benchmark import Benchmark, Level, level_name
from autotuner.bench.measurement import Progress

PLAIN_EVERY_S = 10.0
_RECENT = 4  # lines of progress, about two seconds, that "now" is taken over


class LiveLevels:
    """Shows the progress of levels on standard error."""

    def __init__(self, benchmark: Benchmark) -> None:
        self._benchmark = benchmark
        self._level: Level | None = None
        self._recent: deque[Progress] = deque(maxlen=_RECENT)
        self._warm: tuple[float, int] = (0.0, 0)  # when the steady part began, and what was answered before it
        self._said_s = 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = (
                progress.TextColumn("{task.description}"),
                progress.BarColumn(24),
                progress.TextColumn("{task.fields[live]}"),
            )
            self._bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, level: Level, progress: Progress) -> None:
        """Take in one line of a level's progress, and show it where it is time."""
        if level != self._level:
            self._level, self._said_s, self._warm = level, -PLAIN_EVERY_S, (progress.at_s, progress.done)
            self._recent.clear()
            if self._bar is not None:
                if self._task is not None:
                    self._bar.remove_task(self._task)
                name = level_name(self._benchmark.load, level)
                self._task = self._bar.add_task(name, total=1.0, live="")
        self._recent.append(progress)
        if progress.phase == "warm-up":
            self._warm = (progress.at_s, progress.done)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._share(progress), live=self._line(progress))
        elif progress.at_s - self._said_s >= PLAIN_EVERY_S:
            self._said_s = progress.at_s
            click.echo(f"{level_name(self._benchmark.load, level)}: {self._line(progress)}", err=True)

    def _share(self, progress: Progress) -> float:
        """How much of the level is done: of its time, or of its requests where that is further."""
        if progress.phase == "warm-up":
            return 0.0
        since_s, before = self._warm
        share = (progress.at_s - since_s) / self._benchmark.seconds
        if self._benchmark.requests:
            share = max(share, (progress.done - before) / self._benchmark.requests)
        return min(1.0, share)

    def _line(self, progress: Progress) -> str:
        phase: str = progress.phase
        if phase == "steady":
            phase = f"{progress.at_s - self._warm[0]:.0f} of {self._benchmark.seconds:.0f} s"
        rate = self._rate()
        now = f", {rate:,.0f} tok/s now" if rate is not None else ""
        return f"{phase}, {progress.in_flight} in flight, {progress.done} done, {progress.failed} failed{now}"

    def _rate(self) -> float | None:
        """Output tok/s over the last lines; the first one only says from when on."""
        seconds = self._recent[-1].at_s - self._recent[0].at_s
        if seconds <= 0:
            return None
        return sum(p.events for p in list(self._recent)[1:]) * self._recent[-1].tokens_per_event / seconds
