"""Says where a daemon hangs, before the service manager ends it for its silence.

Two looks, since either alone sees nothing of the other's case: from the loop itself, the tasks with where each waits (a
loop that turns, but whose cycle does not end); and from outside of it, the stack of each thread (a loop that is blocked in
a call and turns no more).
"""

import asyncio
import faulthandler
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

STDERR = 2  # the descriptor itself: this must work where Python does not
FRAMES_MAX = 40  # of one task; deeper than any chain of awaits here
BLOCKED_LATER_S = 1.0  # a loop that turns says it first, and better


class HangWatch:
    """Set anew by each cycle; tells `say` the tasks of a loop whose cycle is late, and standard error a blocked one's stack."""

    def __init__(self, say: Callable[[tuple[str, ...]], None]) -> None:
        self._say = say
        self._timer: asyncio.TimerHandle | None = None
        faulthandler.enable(file=STDERR)  # SIGABRT is how systemd's watchdog ends a service

    def expect(self, within_s: float) -> None:
        """The next call of this, or of `rest`, comes within so many seconds, or something hangs."""
        self.rest()
        self._timer = asyncio.get_running_loop().call_later(within_s, self._late)
        faulthandler.dump_traceback_later(within_s + BLOCKED_LATER_S, file=STDERR)

    def rest(self) -> None:
        """Expect nothing."""
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._say(waiting_tasks())


def waiting_tasks() -> tuple[str, ...]:
    """Every task of this loop with the chain of its awaits, outermost first: `daemon.py:92 run > daemon.py:110 _cycle > …`."""
    return tuple(f"{task.get_name()}: {where_it_waits(task)}" for task in asyncio.all_tasks())


def where_it_waits(task: asyncio.Task[Any]) -> str:
    """The chain of a task's awaits, outermost first."""
    return " > ".join(_chain(task.get_coro()))


def _chain(awaited: Any) -> list[str]:
    """The frames from a coroutine down to what it waits for in the end."""
    places: list[str] = []
    while awaited is not None and len(places) < FRAMES_MAX:
        frame: FrameType | None = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            inner = getattr(awaited, "ag_frame", None)
            places.append(_place(inner.f_code, inner.f_lineno) if inner is not None else type(awaited).__name__)
            break
        places.append(_place(frame.f_code, frame.f_lineno))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return places


def _place(code: CodeType, line: int) -> str:
    return f"{code.co_filename.rpartition('/')[2]}:{line} {code.co_name}"
