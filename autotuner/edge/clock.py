"""The clocks; the only module that imports time or asks what time it is.

Budgets and waiting use the monotonic clock, which counts suspended time too; wall time is only a label.
"""

import asyncio
import datetime as dt
import time
from functools import cache
from pathlib import Path


def monotonic_s() -> float:
    """Seconds since the host booted; never goes back."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def realtime_ahead_s(readings: int = 5) -> float:
    """How many seconds the wall clock is ahead of `monotonic_s` now; the kernel stamps packets with the wall clock."""
    best = (float("inf"), 0.0)
    for _ in range(readings):  # the reading between whose two others least time passed was disturbed least
        before = time.clock_gettime(time.CLOCK_BOOTTIME)
        wall = time.clock_gettime(time.CLOCK_REALTIME)
        after = time.clock_gettime(time.CLOCK_BOOTTIME)
        best = min(best, (after - before, wall - (before + after) / 2))
    return best[1]


def monotonic_us() -> int:
    """Microseconds on the clock that the service manager uses, for its reload protocol."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def utc_label() -> str:
    """The wall time as entries show it: `2026-02-23 00:14:07Z`."""
    return f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M:%S}Z"


def utc_now() -> dt.datetime:
    """The wall time in UTC."""
    return dt.datetime.now(dt.UTC)


def local_now() -> dt.datetime:
    """The wall time in the host's own zone, which maintenance windows are written in."""
    return dt.datetime.now().astimezone()


@cache
def boot_id() -> str:
    """What changes with each boot of this host: monotonic times of two boots must not be compared."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


async def sleep(seconds: float) -> None:
    """Let other work go on for so long."""
    await asyncio.sleep(seconds)


def pause(seconds: float) -> None:
    """Block for so long; for commands that wait, never for the daemon."""
    time.sleep(seconds)
