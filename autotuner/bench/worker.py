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
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autotuner.bench.benchmark import LEVEL_MAX, Benchmark, Level
from autotuner.bench.client import LevelRun
from autotuner.bench.conductor import Conductor
from autotuner.bench.hotloop import HotLoop
from autotuner.bench.measurement import LevelSamples, Progress, itl_table
from autotuner.bench.placement import OFF
from autotuner.bench.samples import Placement
from autotuner.bench.target import Target
from autotuner.bench.words import Words
from autotuner.bench.workload import Workload
from autotuner.core.redact import one_line
from autotuner.edge.clock import monotonic_s
from autotuner.edge.cores import ClientCores, bind
from autotuner.edge.datasets import load_records
from autotuner.errors import InvalidInput

_PR_SET_PDEATHSIG = 1
_STOPPERS = (signal.SIGTERM, signal.SIGINT)
# Of an order, and not for all processes alike.
_OWN = {"processes", "processes_max", "cores", "shard", "shards", "bind"}


class Order(BaseModel):
    """What to run: the line that the worker reads.

    A level is carried by one process until it turns out in its warm-up that one is more than `busy_max` busy; then by twice as
    many, up to `processes_max`. `cores` says which cores the client is to be bound to (`placement.place`), None that the server
    is on another machine. `shard`, `shards` and `bind` are for the processes among themselves.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    benchmark: Benchmark
    concurrency: Level = Field(gt=0, le=LEVEL_MAX)
    model: str | None = None
    api_key: str | None = Field(default=None, repr=False)
    processes: int = Field(default=1, ge=1)
    processes_max: int = Field(default=1, ge=1)
    busy_max: float = Field(default=0.6, ge=0.0)
    capacity_tok_s: float | None = None
    words: Words | None = None
    cores: str | None = OFF
    shard: int = 0
    shards: int = Field(default=0, ge=0)
    bind: tuple[int, ...] = ()


def command() -> tuple[str, ...]:
    """Return the argv that starts a worker."""
    if sys.argv[0].endswith(".pyz"):  # copied to another host as one file
        return (sys.executable, "-I", sys.argv[0])
    return (sys.executable, "-m", "autotuner.bench.worker")


def main() -> int:
    """Read the order, carry it out, write the samples; return the exit code."""
    _die_with_parent()
    with open(
        sys.stdin.fileno(), "rb", buffering=0, closefd=False
    ) as stdin:  # what comes after the line is not ours to take
        line = stdin.readline()
    # From here on a signal means "stop and report", so it waits until there is a load to stop.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPERS)
    reporter = _Reporter(sys.stdout.fileno())
    try:
        order = _order(line)
        level = _Level(order, reporter.progress)
    except (ValueError, InvalidInput) as error:
        _complain(str(error))
        return 2
    _allow_many_sockets()
    gc.freeze()
    gc.set_threshold(100_000)  # a collection is a stall; nearly all that the load makes is freed without one
    try:
        with asyncio.Runner(loop_factory=HotLoop) as runner:
            # Before the loop is closed, which waits for a name that is still being looked up.
            return reporter.samples(runner.run(level.run()))
    except (RuntimeError, ValueError) as error:
        _complain(str(error))
        return 1


def _complain(message: str) -> None:
    with contextlib.suppress(OSError):  # a parent that is gone reads no complaints
        sys.stderr.write(f"autotuner.bench.worker: {one_line(message)}\n")
        sys.stderr.flush()


def _order(line: bytes) -> Order:
    """Given the order's line, return it; raise ValueError that does not repeat it, for it may hold a key."""
    try:
        return Order.model_validate_json(line)
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False, include_context=False)
        told = "; ".join(f"{'.'.join(map(str, p['loc'])) or 'the order'}: {p['msg']}" for p in problems)
        raise ValueError(told) from None


class _Level:
    """One order on its way: who carries it now, and what comes in on stdin meanwhile."""

    def __init__(self, order: Order, on_progress: Callable[[Progress], None]) -> None:
        self._order = order
        self._on_progress = on_progress
        url = urlsplit(order.url)
        self._cores = ClientCores(order.cores, url.port or (443 if url.scheme == "https" else 80))
        self._placed = self._own_place()
        self._load: LevelRun | Conductor = self._own_load()
        self._begin_at: asyncio.Future[float] | None = None
        self._read = b""
        self._stopped = False

    async def run(self) -> LevelSamples:
        """Carry the order out. Raise RuntimeError if a process among several is lost."""
        loop = asyncio.get_running_loop()
        self._begin_at = loop.create_future()
        for number in _STOPPERS:
            loop.add_signal_handler(number, self._stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPERS)
        # A regular file cannot be watched; then there is no parent to lose either.
        with contextlib.suppress(PermissionError):
            loop.add_reader(sys.stdin.fileno(), self._on_stdin)
        order, processes = self._order, self._order.processes
        samples = await self._alone() if processes == 1 else None
        while samples is None:
            processes = min(2 * processes, self._processes_max) if processes == 1 else processes
            samples = await self._together(processes)
            processes = min(2 * processes, self._processes_max)
        # The load is over: a stop that comes now must not keep its samples from being written.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPERS)
        known = {"capacity_tok_s": order.capacity_tok_s, "prompts_said": order.words.said if order.words else ""}
        measured = samples.model_copy(update={**known, "placed": self._placed})
        if order.shards:
            return measured
        return measured.model_copy(update={"itl_ms": itl_table(measured)})

    async def _alone(self) -> LevelSamples | None:
        """Carry the level in this process; None if more are needed."""
        load = self._load
        if not isinstance(load, LevelRun):
            raise TypeError("a level of one process needs its own load")
        self._grow = False
        samples = await load.run()
        for name, detail in load.details.items():
            _complain(f"{name}: {detail}".removesuffix(": "))
        return None if self._grow and not self._stopped else samples

    @property
    def _processes_max(self) -> int:
        """As many as are allowed and each have something to do."""
        benchmark = self._order.benchmark
        streams = int(self._order.concurrency) if benchmark.load == "concurrency" else benchmark.max_concurrency
        known = [most for most in (streams, benchmark.requests) if most is not None]
        return max(1, min(self._order.processes_max, *known))

    async def _together(self, processes: int) -> LevelSamples | None:
        self._placed = self._cores.take(processes)
        order = self._order.model_dump(mode="json", exclude=_OWN)
        busy_max = self._order.busy_max if processes < self._processes_max else float("inf")
        self._load = Conductor(command(), order, processes, busy_max, self._on_progress, self._placed.cores_of)
        if self._stopped:
            self._load.stop()
        return await self._load.run()

    def _own_place(self) -> Placement | None:
        """Bind this process before it has any thread; one of several is told its cores."""
        order = self._order
        if not order.shards:
            return self._cores.take(1) if order.processes == 1 else None
        if order.bind:
            with contextlib.suppress(OSError):  # then it keeps those that are its parent's: all of the client's
                bind(order.bind)
        return None

    def _own_load(self) -> LevelRun:
        order = self._order
        target = Target(order.url, order.api_key, order.benchmark.endpoint)
        records = load_records(order.benchmark)
        workload = Workload(order.benchmark, order.concurrency, order.model, order.words, records)
        shard = (order.shard, order.shards or 1)
        return LevelRun(target, workload, order.concurrency, self._on_progress, shard=shard, begin=self._begin)

    async def _begin(self, busy: float) -> float | None:
        """When the steady part may begin: at once, or when the conductor says; None to have more processes instead."""
        if self._order.shards and self._begin_at is not None and isinstance(self._load, LevelRun):
            self._load.wait(busy)
            return await self._begin_at
        self._grow = busy > self._order.busy_max and self._processes_max > 1
        return None if self._grow else monotonic_s()

    def _stop(self) -> None:
        self._stopped = True
        self._load.stop()
        if self._begin_at is not None and not self._begin_at.done():
            self._begin_at.set_result(monotonic_s())

    def _on_stdin(self) -> None:
        """We are told when to begin and when to finish; whoever closes our stdin stops the load, as its end does by itself."""
        data = os.read(sys.stdin.fileno(), 4096)
        if not data:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._stop()
        *lines, self._read = (self._read + data).split(b"\n")
        for line in lines:
            self._told(line)

    def _told(self, line: bytes) -> None:
        try:
            said = json.loads(line)
            begin_at = float(said.get("begin_at", 0.0))
            finish = bool(said.get("finish"))
        except (ValueError, TypeError, AttributeError):
            return  # whatever else is written there is of no concern
        if finish:
            self._load.finish()
        if begin_at and self._begin_at is not None and not self._begin_at.done():
            self._begin_at.set_result(begin_at)


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
        # A level has tens of thousands of requests and millions of gaps: no copy that need not be, nothing that is a default.
        fields = samples.model_dump_json(exclude_defaults=True, exclude={"kind", "gaps"})
        try:
            self._write(f'{{"kind":"samples",{fields[1:-1]},"gaps":"'.encode())
            self._write(samples.gaps.encode())
            self._write(b'"}\n')
        except BrokenPipeError:
            return 1
        return 0

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]


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
