"""The process that carries one level's load: a JSON line in, JSON lines out, no load after its parent is gone.

`python -m autotuner.bench.worker` reads its order from stdin, writes Progress lines while it runs and one LevelSamples
line at the end. SIGTERM, SIGINT and the end of stdin stop the load at once; what was measured is still written, and the
exit code is 0. A wrong order gets one line on stderr and exit code 2.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autotuner.bench.benchmark import Benchmark, Level
from autotuner.bench.client import LevelRun
from autotuner.bench.hotloop import HotLoop
from autotuner.bench.measurement import LevelSamples, Progress
from autotuner.bench.target import Target
from autotuner.bench.workload import Workload
from autotuner.core.redact import one_line

_PR_SET_PDEATHSIG = 1
_STOPPERS = (signal.SIGTERM, signal.SIGINT)


class Order(BaseModel):
    """What to run: the line that the worker reads."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    benchmark: Benchmark
    concurrency: Level = Field(gt=0, le=65_536)
    model: str | None = None
    api_key: str | None = Field(default=None, repr=False)


def command() -> tuple[str, ...]:
    """Return the argv that starts a worker."""
    return (sys.executable, "-m", "autotuner.bench.worker")


def main() -> int:
    """Read the order, carry it out, write the samples; return the exit code."""
    _die_with_parent()
    line = sys.stdin.buffer.readline()
    # From here on a signal means "stop and report", so it waits until there is a load to stop.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPERS)
    reporter = _Reporter(sys.stdout.fileno())
    try:
        run = _level_run(line, reporter.progress)
    except ValueError as error:
        _complain(str(error))
        return 2
    _allow_many_sockets()
    gc.freeze()
    gc.set_threshold(100_000)  # a collection is a stall; what the load makes is freed without one
    with asyncio.Runner(loop_factory=HotLoop) as runner:
        samples = runner.run(_drive(run))
    for name, detail in run.details.items():
        _complain(f"{name}: {detail}".removesuffix(": "))
    return reporter.samples(samples)


def _complain(message: str) -> None:
    with contextlib.suppress(OSError):  # a parent that is gone reads no complaints
        sys.stderr.write(f"autotuner.bench.worker: {one_line(message)}\n")
        sys.stderr.flush()


def _level_run(line: bytes, on_progress: Callable[[Progress], None]) -> LevelRun:
    """Given the order's line, return its run; raise ValueError that does not repeat it, for it may hold a key."""
    try:
        order = Order.model_validate_json(line)
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False, include_context=False)
        told = "; ".join(f"{'.'.join(map(str, p['loc'])) or 'the order'}: {p['msg']}" for p in problems)
        raise ValueError(told) from None
    target = Target(order.url, order.api_key, order.benchmark.endpoint)
    workload = Workload(order.benchmark, order.concurrency, order.model)
    return LevelRun(target, workload, order.concurrency, on_progress)


async def _drive(run: LevelRun) -> LevelSamples:
    loop = asyncio.get_running_loop()
    for number in _STOPPERS:
        loop.add_signal_handler(number, run.stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPERS)
    # A regular file cannot be watched; then there is no parent to lose either.
    with contextlib.suppress(PermissionError):
        loop.add_reader(sys.stdin.fileno(), _on_stdin, loop, run)
    return await run.run()


def _on_stdin(loop: asyncio.AbstractEventLoop, run: LevelRun) -> None:
    """The parent closes our stdin to stop the load, or by dying; whatever it writes there is of no concern."""
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        run.stop()


class _Reporter:
    """Writes the lines; a parent that does not read must not hold up the load, so progress may skip a line."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._untold = 0

    def progress(self, progress: Progress) -> None:
        """Write a progress line, or add its events to those of the next if the pipe is full."""
        events = progress.events + self._untold
        line = progress.model_copy(update={"events": events}).model_dump_json().encode() + b"\n"
        if not self._poll.poll(0):
            self._untold = events
            return
        self._untold = 0
        with contextlib.suppress(BrokenPipeError):  # the parent is gone; its end of stdin stops the load
            os.write(self._fd, line)  # shorter than PIPE_BUF, so it goes out whole or not at all

    def samples(self, samples: LevelSamples) -> int:
        """Write the samples line; return 0, or 1 if nobody is there to read it."""
        document = {"kind": samples.kind, **samples.model_dump(mode="json", exclude_defaults=True)}
        rest = memoryview(json.dumps(document, separators=(",", ":")).encode() + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BrokenPipeError:
            return 1
        return 0


def _die_with_parent() -> None:
    """Ask the kernel to stop us when the thread that started us ends: load must never outlive the daemon."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew of our wish
        os.kill(os.getpid(), signal.SIGKILL)


def _allow_many_sockets() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
