"""Several worker processes that carry one level together, for a load that is too much for one core.

Each takes its share of the streams or arrivals; all begin their steady part at the same instant, which they are told over
stdin as soon as all are warm, and their lines become those of one.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autotuner.bench.merge import merge
from autotuner.bench.samples import LevelSamples, Progress, read_message
from autotuner.edge import reaping
from autotuner.edge.clock import monotonic_s, sleep

BEGIN_IN_S = 0.2  # how far ahead the instant is at which all begin together
TELL_S = 0.5
SILENT_S = 10.0  # of one process: then nothing is told of the others either, for together they do not get on
LINE_BYTES_MAX = 256 << 20

_PHASES = ("warm-up", "steady", "tail")


@dataclass(eq=False)
class _Part:
    """One process, and what it said last."""

    process: asyncio.subprocess.Process
    latest: Progress | None = None
    heard_s: float = 0.0
    samples: LevelSamples | None = None


@dataclass(eq=False)
class Conductor:
    """The processes of one level: `run` starts them and returns the level's samples, None if they were too busy as well."""

    command: tuple[str, ...]
    order: dict[str, Any]
    processes: int
    busy_max: float
    on_progress: Callable[[Progress], None]
    cores_of: Callable[[int], tuple[int, ...]] = lambda _: ()
    _parts: list[_Part] = field(default_factory=list)
    _untold: Counter[str] = field(default_factory=Counter)
    _warm: asyncio.Event = field(default_factory=asyncio.Event)
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: bool = False
    _too_busy: bool = False

    async def run(self) -> LevelSamples | None:
        """Carry the level out. Raise RuntimeError if a process ends without its samples; none is left in any case."""
        start = monotonic_s()
        try:
            for number in range(self.processes):
                self._parts.append(_Part(await self._started(number)))
            async with asyncio.TaskGroup() as group:
                for part in self._parts:
                    group.create_task(self._listen(part))
                teller = group.create_task(self._tell(start))
                group.create_task(self._conduct(teller))
        except* RuntimeError as failures:
            raise failures.exceptions[0] from None
        finally:
            for part in self._parts:
                await reaping.killed(part.process)
        if self._too_busy:
            return None
        return merge([part.samples for part in self._parts if part.samples is not None])

    def stop(self) -> None:
        """End the level at once; what was measured still comes."""
        self._stopping = True
        self._warm.set()
        self._end_all()

    def finish(self) -> None:
        """End the steady part now, on all at once."""
        for part in self._parts:
            if part.process.stdin is not None and not part.process.stdin.is_closing():
                part.process.stdin.write(b'{"finish": true}\n')

    async def _started(self, number: int) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self.command, stdin=pipe, stdout=pipe, limit=LINE_BYTES_MAX)
        own = {"shard": number, "shards": self.processes, "bind": self.cores_of(number)}
        await self._say(process, {**self.order, **own})
        return process

    async def _say(self, process: asyncio.subprocess.Process, document: dict[str, Any]) -> None:
        if process.stdin is not None and not process.stdin.is_closing():
            with contextlib.suppress(ConnectionError):  # it has ended; its missing samples tell
                process.stdin.write(json.dumps(document).encode() + b"\n")
                await process.stdin.drain()

    async def _listen(self, part: _Part) -> None:
        if part.process.stdout is None:
            return
        with contextlib.suppress(ValueError):  # a line that ends where its process was killed
            async for line in part.process.stdout:
                message = read_message(line)
                if isinstance(message, LevelSamples):
                    part.samples = message
                    break
                part.latest, part.heard_s = message, monotonic_s()
                self._untold[message.phase] += message.events
                if all(p.latest is not None and p.latest.waits for p in self._parts):
                    self._warm.set()
        if part.samples is None:
            raise RuntimeError("one of the benchmark's processes ended without a result")
        self._warm.set()  # it may have ended in its warm-up, and the others must not wait for it
        if all(p.samples is not None for p in self._parts):
            self._over.set()

    async def _conduct(self, teller: "asyncio.Task[None]") -> None:
        await self._warm.wait()
        known = [part.latest.busy_ratio for part in self._parts if part.latest is not None]
        self._too_busy = not self._stopping and max(known, default=0.0) > self.busy_max
        if self._too_busy or self._stopping or any(part.samples is not None for part in self._parts):
            self._end_all()
        at = monotonic_s() + BEGIN_IN_S
        for part in self._parts:
            await self._say(part.process, {"begin_at": at})
        await self._over.wait()
        teller.cancel()

    async def _tell(self, start: float) -> None:
        """Say twice a second what all have said since, the events of each phase in a line of their own."""
        while True:
            await sleep(TELL_S)
            latest = [part.latest for part in self._parts if part.latest is not None]
            silent = any(p.samples is None and monotonic_s() - p.heard_s > SILENT_S for p in self._parts if p.heard_s)
            if not latest or silent:
                continue
            now = min((p.phase for p in latest), key=_PHASES.index)  # told also where nothing came
            for phase in _PHASES:
                events = self._untold.pop(phase, 0)
                if events or phase == now:
                    self.on_progress(_sum(latest, phase, events, monotonic_s() - start))

    def _end_all(self) -> None:
        """End all at once, with what they measured: the end of its stdin does that at any instant, also while one starts."""
        for part in self._parts:
            if part.process.stdin is not None:
                part.process.stdin.close()


def _sum(latest: list[Progress], phase: Any, events: int, at_s: float) -> Progress:
    return Progress(
        at_s=round(at_s, 3),
        phase=phase,
        events=events,
        in_flight=sum(p.in_flight for p in latest),
        done=sum(p.done for p in latest),
        failed=sum(p.failed for p in latest),
        tokens_per_event=round(sum(p.tokens_per_event for p in latest) / len(latest), 4),
        busy_ratio=max(p.busy_ratio for p in latest),
    )
