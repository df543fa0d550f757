"""One cycle of every slot at once: a slot whose host does not answer holds up nobody else.

A round ends when every slot's cycle has, or soon after; a cycle that takes longer goes on beside the next rounds, in which
its slot is not begun again. A slot without a whole cycle for too long is wedged, and that is an error of the daemon.
"""

import asyncio
from collections.abc import Sequence

from autotuner.edge import clock
from autotuner.errors import StoreError
from autotuner.slotworker import SlotWorker

PATIENCE_S = 1.0  # a cycle on this machine takes milliseconds


class Rounds:
    """The cycles of some slots."""

    def __init__(self, workers: Sequence[SlotWorker], deadline_s: float) -> None:
        self._workers = workers
        self._deadline_s = deadline_s
        self._running: dict[str, asyncio.Task[object]] = {}
        self._whole_s: dict[str, float] = {}

    async def go(self) -> None:
        """Begin the cycle of every slot that is not in one, and wait a little for their ends.

        Raise what a cycle raised, StoreError before all else; TimeoutError for a slot that is wedged.
        """
        now = clock.monotonic_s()
        for worker in self._workers:
            name = worker.ctx.name
            self._whole_s.setdefault(name, now)
            if name not in self._running:
                self._running[name] = asyncio.create_task(worker.cycle())
        await asyncio.wait(self._running.values(), timeout=PATIENCE_S)
        errors = [error for name in list(self._running) if (error := self._end_of(name)) is not None]
        errors += self._wedged()
        for error in sorted(errors, key=lambda error: not isinstance(error, StoreError)):
            raise error

    def end(self) -> None:
        """Let go of the cycles that still run."""
        for task in self._running.values():
            task.cancel()
        self._running.clear()

    def _end_of(self, name: str) -> BaseException | None:
        """Take in a cycle that has ended; return what it raised."""
        task = self._running[name]
        if not task.done():
            return None
        del self._running[name]
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self._whole_s[name] = clock.monotonic_s()
        return error

    def _wedged(self) -> list[BaseException]:
        late = [n for n in self._running if clock.monotonic_s() - self._whole_s[n] > self._deadline_s]
        for name in late:
            self._running.pop(name).cancel()
        return [TimeoutError(f"the cycle of slot {name} took longer than {self._deadline_s:g} s") for name in late]
