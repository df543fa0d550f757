"""An asyncio loop in virtual time: nothing waits, and what is ready at one instant runs in an order that the seed shuffles.

One loop is one life of the daemon. A daemon that is killed leaves its loop as it is: no handler, no `finally` and no callback runs
in it any more.
"""

import asyncio
import contextlib
import heapq
import random
from collections.abc import Callable
from typing import Any

from torture.simworld import Killed, World

CLOSE_ENOUGH_S = 1e-9


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs coroutines against a world's clock. Private parts of asyncio are used; the harness is run on 3.11 to 3.13."""

    _ready: Any
    _scheduled: Any

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._rng: random.Random = world.rng("loop")
        self.set_exception_handler(lambda _loop, _context: None)

    def time(self) -> float:
        return self._world.now

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        """The simulated daemon gets no signals: it is killed, or its host goes down."""

    def _write_to_self(self) -> None:
        """Nothing sleeps in a selector."""

    def _process_events(self, event_list: Any) -> None:
        """There are no sockets."""

    def _run_once(self) -> None:
        """One turn: go to the next timer if nothing is ready, then run what is, in an order of the seed's choosing."""
        scheduled = self._scheduled
        while scheduled and scheduled[0]._cancelled:
            self._unschedule()
        if not self._ready and scheduled:
            self._world.advance(scheduled[0]._when)
        due = self._world.now + CLOSE_ENOUGH_S
        while scheduled and scheduled[0]._when <= due:
            handle = self._unschedule()
            if not handle._cancelled:
                self._ready.append(handle)
        turn = list(self._ready)
        self._ready.clear()
        if len(turn) > 1:
            self._rng.shuffle(turn)
        for handle in turn:
            if not handle._cancelled:
                self._world.before_step()
                handle._run()
                if self._world.dead:
                    raise Killed

    def _unschedule(self) -> Any:
        handle = heapq.heappop(self._scheduled)
        handle._scheduled = False
        if handle._cancelled:
            self._timer_cancelled_count -= 1
        return handle


def drop(loop: VirtualLoop) -> None:
    """Forget a loop with all that still waits in it, as the kernel forgets a killed process."""
    for task in asyncio.all_tasks(loop):
        with contextlib.suppress(BaseException):
            task.get_coro().close()
        task._log_destroy_pending = False
    loop._ready.clear()
    loop._scheduled.clear()
    loop.close()
