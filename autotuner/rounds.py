"""One cycle of every slot at once: a slot whose host does not answer holds up nobody else.

A round ends when every slot's cycle has, or soon after; a cycle that takes longer goes on beside the next rounds, in which
its slot is not begun again. A slot without a whole cycle for too long is wedged, and that is an error of the daemon.
"""

import asyncio
from collections.abc import Sequence

from autotuner.edge import clock
from autotuner.edge.hanging import where_it_waits
from autotuner.errors import StoreError
from autotuner.slotworker import SlotWorker

CYCLE_OF = "cycle of slot "  # what the task of a cycle is called
PATIENCE_S = 1.0  # a cycle on this machine takes milliseconds
END_S = 5.0
FAR_FACTOR = 10.0  # a question to another host has its own bound, which is longer than a cycle here may take


class Rounds:
    """The cycles of some slots. A slot that has had no whole cycle for `deadline_s` is wedged, one on another host later."""

    def __init__(self, workers: Sequence[SlotWorker], deadline_s: float) -> None:
        self._workers = {worker.ctx.name: worker for worker in workers}
        self._deadline_s = deadline_s
        self._running: dict[str, tuple[asyncio.Task[object], float]] = {}
        self._whole_s: dict[str, float] = {}

    async def go(self) -> None:
        """Begin the cycle of every slot that is not in one, and wait a little for their ends.

        Raise what a cycle raised, StoreError before all else; TimeoutError for a slot that is wedged.
        """
        now = clock.monotonic_s()
        for name, worker in self._workers.items():
            self._whole_s.setdefault(name, now)
            if name not in self._running:
                self._running[name] = (asyncio.create_task(worker.cycle(), name=f"{CYCLE_OF}{name}"), now)
        await asyncio.wait([task for task, _ in self._running.values()], timeout=PATIENCE_S)
        errors = [error for name in list(self._running) if (error := self._end_of(name)) is not None]
        errors += [error for name in self._workers if (error := self._wedged(name)) is not None]
        for error in sorted(errors, key=lambda error: not isinstance(error, StoreError)):
            raise error

    async def end(self) -> None:
        """Let go of the cycles that still run."""
        tasks = [task for task, _ in self._running.values()]
        self._running.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_S)

    def _end_of(self, name: str) -> BaseException | None:
        """Take in a cycle that has ended; return what it raised."""
        task, _ = self._running[name]
        if not task.done():
            return None
        del self._running[name]
        error = TimeoutError(f"the {CYCLE_OF}{name} was given up") if task.cancelled() else task.exception()
        if error is None:
            self._whole_s[name] = clock.monotonic_s()
        return error

    def _wedged(self, name: str) -> TimeoutError | None:
        """An error for as long as a slot is wedged. A cycle that hangs is given up, and the next begins once it has ended."""
        now = clock.monotonic_s()
        limit_s = self._deadline_s * (1.0 if self._workers[name].ctx.host.here else FAR_FACTOR)
        if name not in self._running or now - self._whole_s[name] <= limit_s:
            return None
        task, begun_s = self._running[name]
        where = where_it_waits(task)
        if now - begun_s > limit_s:
            self._running[name] = (task, now)  # should it not end by this, it is told again, but not in each round
            task.cancel()
        return TimeoutError(f"the {CYCLE_OF}{name} took longer than {limit_s:g} s; it waits at {where}")
