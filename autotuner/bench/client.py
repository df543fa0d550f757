"""The load of one level: keeps `concurrency` streaming requests in flight, warms up, measures, stops when asked.

It shows whether it was the limit itself: its loop lag, CPU share and merged reads are part of what it returns.
"""

import asyncio
import contextlib
import json
import resource
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.connection import CONNECT_REFUSED, CONNECTION_RESET, TIMEOUT, Connection
from autotuner.bench.measurement import BIN_S, LevelSamples, Progress
from autotuner.bench.meter import Histogram, Meter, Record
from autotuner.bench.workload import request_body
from autotuner.edge.clock import monotonic_s

CONNECT_TIMEOUT_S = 10.0
PROGRESS_S = 0.5
LAG_PROBE_S = 0.02
WARMUP_LEAST_S = 60.0  # warm-up may last this long or four times the measured part, whichever is longer
WARMUP_FAILURES = 3  # a stream that failed so often in its warm-up holds the level up no longer
PAUSE_S = (0.1, 1.0)  # after a failed request: first and longest, so that a dead server is not hammered
POOL_BYTES = 64 * 1024 * 1024


class Target:
    """Where requests go, and how one is written; the API key appears on the wire only."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"the URL must be like http://127.0.0.1:8080, not {parts.scheme or url!r}")
        self.host = parts.hostname
        self.port = parts.port or 80
        name = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1",
            f"Host: {name}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "Accept-Encoding: identity",
            "User-Agent: autotuner-bench",
        ]
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        if any(c < " " for line in lines for c in line):
            raise ValueError("the URL or the API key contains control characters")
        self._head = "\r\n".join(lines).encode()

    def request(self, body: dict[str, Any]) -> bytes:
        """Given a JSON body, return the whole request as it goes on the wire."""
        content = json.dumps(body).encode()
        return b"%b\r\nContent-Length: %d\r\n\r\n%b" % (self._head, len(content), content)


class _Pool:
    """Requests written ahead: when many streams end together, none waits until the prompts of others are made."""

    def __init__(self, write: Callable[[int], bytes], size: int) -> None:
        self._write = write
        self._size = size
        self._ready: deque[bytes] = deque()
        self._next = 0
        self._wanted = asyncio.Event()

    def take(self) -> bytes:
        """Return the next request."""
        if not self._ready:
            self._add()
        self._wanted.set()
        return self._ready.popleft()

    async def fill(self) -> None:
        """Write requests until the pool is full, one a turn of the loop."""
        while len(self._ready) < self._size:
            self._add()
            await asyncio.sleep(0)

    async def keep_full(self) -> None:
        """Refill whenever one was taken, for ever."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self.fill()

    def _add(self) -> None:
        request = self._write(self._next)
        self._next += 1
        self._ready.append(request)
        self._size = max(1, min(self._size, POOL_BYTES // len(request)))


class LevelRun:
    """One level of a benchmark against one server; `details` has one message for each error's name."""

    def __init__(
        self,
        url: str,
        benchmark: Benchmark,
        concurrency: int,
        model: str | None,
        on_progress: Callable[[Progress], None],
        *,
        api_key: str | None = None,
    ) -> None:
        self._target = Target(url, api_key)
        self._benchmark = benchmark
        self._concurrency = concurrency
        self._model = model
        self._on_progress = on_progress
        self._meter = Meter()
        self._lag = Histogram()
        self._records: list[Record] = []
        self._live: dict[Record, Connection | None] = {}
        self._good = self._failed = self._good_before = self._told = 0
        self._cold = concurrency if benchmark.warmup_requests else 0  # streams not yet warm
        self._zero = self._cpu_from = 0.0
        self._stopping = False
        self._change = asyncio.Event()
        self._pool = _Pool(self._write, concurrency)
        self.details: dict[str, str] = {}

    async def run(self) -> LevelSamples:
        """Drive the load to its end or until `stop`, and return what was measured."""
        await self._pool.fill()
        self._zero = monotonic_s()
        jobs: list[Coroutine[Any, Any, None]] = [self._stream() for _ in range(self._concurrency)]
        jobs += [self._course(), self._watch_lag(), self._report(), self._pool.keep_full()]
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            # Only the course ends by itself; whatever else does has raised what must not be swallowed.
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            now = monotonic_s()
            cpu_s = self._cut()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in ended:
            task.result()
        return self._samples(now, cpu_s)

    def stop(self) -> None:
        """End the level at once; what it measured so far stays valid. To be called in the loop's thread."""
        self._stopping = True
        self._change.set()

    def _write(self, index: int) -> bytes:
        return self._target.request(request_body(self._benchmark, self._concurrency, index, self._model))

    # The course of a level: warm-up, the steady part, perhaps some more of it.

    async def _course(self) -> None:
        seconds = self._benchmark.seconds
        await self._until(lambda: self._cold == 0, max(WARMUP_LEAST_S, 4 * seconds))
        if self._stopping or (self._failed and not self._good and not self._cold):
            return  # stopped, or every request of the warm-up failed
        self._tell()  # so that no later line mixes events of the warm-up into the steady part
        self._meter.steady_from = monotonic_s()
        self._cpu_from = _cpu_s()
        self._good_before = self._good
        await self._until(lambda: False, seconds)
        await self._until(lambda: self._good - self._good_before >= self._concurrency, seconds)

    async def _until(self, reached: Callable[[], bool], limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not (self._stopping or reached()):
                    self._change.clear()
                    await self._change.wait()

    # One stream: request after request on one connection.

    async def _stream(self) -> None:
        connection: Connection | None = None
        pause, warmup, failures = PAUSE_S[0], self._benchmark.warmup_requests, 0
        try:
            while True:
                record = Record(sent=monotonic_s())
                connection = await self._one_request(connection, record)
                self._note(record)
                if warmup:
                    failures += bool(record.error)
                    warmup = 0 if failures >= WARMUP_FAILURES else warmup - (not record.error)
                    self._cold -= not warmup
                self._change.set()
                if record.error:
                    await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSE_S[1]) if record.error else PAUSE_S[0]
        finally:
            if connection is not None:
                connection.drop()

    async def _one_request(self, connection: Connection | None, record: Record) -> Connection | None:
        """Given the stream's connection, if any, send the next request and return the connection to use next."""
        request = self._pool.take()
        self._live[record] = None
        reused = connection is not None and connection.usable
        for _ in range(2):
            if connection is not None and not connection.usable:
                connection.drop()
                connection = None
            connection = connection or await self._connect(record)
            if connection is None:
                break
            self._live[record] = connection
            await connection.ask(request, record, self._benchmark.request_timeout_s)
            if not (reused and connection.unanswered):
                break
            # The server closed an idle connection just as the request went out, as llama.cpp does: no failure.
            record.error, record.detail, record.end, reused = "", "", None, False
        del self._live[record]
        return connection

    async def _connect(self, record: Record) -> Connection | None:
        """Open a connection; where that fails, say why in the record and return None."""
        loop, host, port = asyncio.get_running_loop(), self._target.host, self._target.port
        try:
            async with asyncio.timeout(min(CONNECT_TIMEOUT_S, self._benchmark.request_timeout_s)):
                _, made = await loop.create_connection(lambda: Connection(self._meter), host, port)
        except OSError as error:  # TimeoutError is one
            record.error, record.detail = _connect_error(error), str(error)
            record.end = monotonic_s()
            return None
        return made

    def _note(self, record: Record) -> None:
        self._records.append(record)
        if record.error:
            self._failed += 1
            self.details.setdefault(record.error, record.detail)
        else:
            self._good += 1
            self._meter.finished(record)

    def _cut(self) -> float:
        """Abort what is in flight and keep its records, marked; return the client's CPU seconds so far."""
        for record, connection in self._live.items():
            record.cut = record.end is None
            if connection is not None:
                connection.drop()
            self._records.append(record)
        return _cpu_s()

    # What the client says about the load and about itself.

    async def _watch_lag(self) -> None:
        while True:
            due = monotonic_s() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            if self._meter.steady_from is not None:
                self._lag.add(max(0.0, monotonic_s() - due))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._tell()

    def _tell(self) -> None:
        events, self._told = self._meter.events - self._told, self._meter.events
        self._on_progress(
            Progress(
                at_s=round(monotonic_s() - self._zero, 3),
                phase="warm-up" if self._meter.steady_from is None else "steady",
                events=events,
                in_flight=len(self._live),
                done=self._good,
                failed=self._failed,
                tokens_per_event=round(self._meter.tokens_per_event, 4),
            )
        )

    def _samples(self, now: float, cpu_s: float) -> LevelSamples:
        start = self._meter.steady_from
        bins = self._meter.whole_bins(now)
        steady_s = len(bins) * BIN_S
        busy = 0.0 if start is None or now <= start else (cpu_s - self._cpu_from) / (now - start)
        return LevelSamples(
            concurrency=self._concurrency,
            steady_from_s=None if start is None else round(start - self._zero, 6),
            steady_to_s=None if start is None else round(start - self._zero + steady_s, 6),
            stopped_early=self._stopping,
            requests=tuple(record.sample(self._zero) for record in self._records),
            bins=bins,
            itl_ms=self._meter.gaps.quantiles(),
            merged_ratio=round(self._meter.merged_ratio, 5),
            lag_p99_ms=round(self._lag.quantiles().get("p99", 0.0), 3),
            cpu_ratio=round(busy, 4),
        )


def _connect_error(error: OSError) -> str:
    match error:
        case ConnectionRefusedError():
            return CONNECT_REFUSED
        case ConnectionResetError():
            return CONNECTION_RESET
        case TimeoutError():
            return TIMEOUT
        case socket.gaierror():
            return "host not found"
        case _:
            return "connect failed"


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
