"""Processes of the client benchmark: pinned to a core, measured as a tree, and gone when it ends."""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SAMPLE_S = 0.5  # between looks at the memory: reading it takes time from the server's core
AFTER_S = 0.05  # the same once the last answer is written, when a client's report may take more memory than the load
_LIBC = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of whatever a client leaves behind, so that it can be told and ended."""
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pinned(core: int) -> Callable[[], None]:
    """Return what a new process does before anything else: stay on this core, end with us."""

    def prepare() -> None:
        os.sched_setaffinity(0, {core})
        _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    return prepare


def children(pid: int) -> list[int]:
    """The processes that a process, any thread of it, has started."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:  # grows as it is gone through
        found += children(one)
    return found


def cpu_s(pids: list[int]) -> float:
    """CPU seconds of these processes so far, to the nanosecond; one that is gone counts nothing."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~pid << 3) | 2)  # a process's CPU clock, as clock_getcpuclockid(3) makes it
    return total


def pss_mb(pids: list[int]) -> float:
    """The memory of these processes, what they share counted once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process of ours and wait for it."""
    if process.poll() is None:
        process.kill()
    process.wait()


def end_orphans(spared: set[int]) -> int:
    """End what a client left behind; return how many processes that were."""
    count = 0
    while orphans := [pid for pid in children(os.getpid()) if pid not in spared]:
        for pid in orphans:
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if not ended:
                count += 1
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return count


_STALLER = """
import ctypes, os, signal, sys, time
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
every, stopped, pids = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
fds = [os.pidfd_open(int(pid)) for pid in pids]
def tell(number):
    for fd in fds:
        signal.pidfd_send_signal(fd, number)
due = time.monotonic()
try:
    while True:
        due += every
        time.sleep(max(0.0, due - time.monotonic()))
        tell(signal.SIGSTOP)
        time.sleep(stopped)
        tell(signal.SIGCONT)
except ProcessLookupError:
    pass
finally:
    try:
        tell(signal.SIGCONT)
    except ProcessLookupError:
        pass
"""


@contextlib.contextmanager
def stalled(pids: list[int], core: int, *, every_s: float, for_s: float) -> Iterator[None]:
    """Stop these processes for a while every so often, by a helper on another core, until the block ends."""
    argv = [sys.executable, "-S", "-c", _STALLER, str(every_s), str(for_s), *map(str, pids)]
    helper = subprocess.Popen(argv, preexec_fn=pinned(core))  # noqa: PLW1509 - this program has one thread
    try:
        yield
    finally:
        if helper.poll() is None:
            helper.terminate()
        helper.wait()


@contextlib.contextmanager
def busy_loops(count: int, core: int) -> Iterator[None]:
    """Keep a core busy with so many processes until the block ends."""
    loops = []
    try:
        for _ in range(count):
            argv = [sys.executable, "-S", "-c", "while True: pass"]
            loops.append(subprocess.Popen(argv, preexec_fn=pinned(core)))  # noqa: PLW1509 - this program has one thread
        yield
    finally:
        for loop in loops:
            end(loop)


@dataclass
class Watched:
    """What `watch` saw of a client's processes; `cpu_first_s` when the first request came, the others later."""

    pid: int
    started_ns: int
    cpu_first_s: float | None = None
    cpu_last_s: float | None = None
    cpu_end_s: float = 0.0
    pss_mb: float = 0.0
    exit_code: int = 0
    timed_out: bool = False
    known: list[int] = field(default_factory=list)
    look_again_at: float = float("inf")  # when `watch` is to say "again"


def watch(
    process: "subprocess.Popen[bytes]",
    started_ns: int,
    events: int,
    on_event: Callable[[str, Watched], None],
    limit_s: float,
) -> Watched:
    """Follow a process to its end: `events` is where the server writes its lines, which are handed on.

    It is followed from the server's core, so as little as can be is done while tokens flow: a clock read a process at the
    first request, and a look at the memory every SAMPLE_S, which is oftener once that can disturb nothing.
    """
    seen = Watched(process.pid, started_ns, known=[process.pid])
    pidfd = os.pidfd_open(process.pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(events, select.POLLIN)
    pause_s = SAMPLE_S
    sample_at, end_at = time.monotonic() + SAMPLE_S / 4, time.monotonic() + limit_s
    try:
        while True:
            wait_s = min(sample_at, seen.look_again_at) - time.monotonic()
            ready = {fd for fd, _ in poll.poll(max(0.0, wait_s) * 1000)}
            if events in ready:
                for line in os.read(events, 4096).decode().split():
                    if line == "first" and seen.cpu_first_s is None:
                        seen.cpu_first_s = cpu_s(seen.known)
                    elif line == "last":
                        seen.cpu_last_s = cpu_s(seen.known)
                        sample_at, pause_s = 0.0, AFTER_S
                    on_event(line, seen)
            if pidfd in ready:
                break
            if time.monotonic() >= seen.look_again_at:
                seen.look_again_at = float("inf")
                on_event("again", seen)
            if time.monotonic() >= sample_at:
                seen.known = tree(process.pid)
                seen.pss_mb = max(seen.pss_mb, pss_mb(seen.known))
                sample_at = time.monotonic() + pause_s
            if time.monotonic() >= end_at:
                seen.timed_out = True
                for pid in reversed(tree(process.pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                end_at = float("inf")
    finally:
        os.close(pidfd)
    _, status, usage = os.wait4(process.pid, 0)
    seen.exit_code = process.returncode = os.waitstatus_to_exitcode(status)
    seen.cpu_end_s = usage.ru_utime + usage.ru_stime
    return seen
