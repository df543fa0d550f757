"""The load of one level: warms up, measures, stops when asked, and says whether it was the limit itself.

A closed loop keeps as many requests in flight as the level says; an open one sends each when it is due, whether or not earlier
ones were answered. Where it was itself the limit shows in what it returns: its lateness, its CPU, merged reads.
"""

import asyncio
import contextlib
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from itertools import islice
from typing import Any, Literal

from autotuner.bench.arrivals import arrivals
from autotuner.bench.benchmark import Benchmark, Level
from autotuner.bench.busy import used
from autotuner.bench.connection import Connection
from autotuner.bench.dialing import Dialer
from autotuner.bench.hotloop import HotLoop
from autotuner.bench.measurement import BIN_S, LevelSamples, Progress
from autotuner.bench.meter import Meter, Record, quantiles_ms
from autotuner.bench.pool import TOGETHER_S, Pool, Prepared
from autotuner.bench.samples import METHOD
from autotuner.bench.target import Target
from autotuner.bench.workload import Workload
from autotuner.edge.clock import monotonic_s

PROGRESS_S = 0.5
LAG_PROBE_S = 0.02
WARMUP_LEAST_S = 60.0  # warm-up may last this long or four times the measured part, whichever is longer
WARMUP_FAILURES = 3  # a stream that failed so often in its warm-up holds the level up no longer
HOPELESS_S = 3.0  # nor does an open loop of which so many requests failed, and none was answered, for so long
SETTLED_REQUESTS = 2.0  # an open loop is warm after so many durations of its first request: then as many end as begin
TAIL_LEAST_S = 10.0  # requests of the steady part may end for so long after it, or for its own length if that is longer
PAUSE_S = (0.1, 1.0)  # after a failed request: first and longest, so that a dead server is not hammered
POOL_AHEAD_S = 2.0  # an open loop has the requests of so many seconds written ahead
IN_FLIGHT_MAX = 16_384  # of an open loop without a limit of its own; later requests wait, and their lateness is counted
SPARE_MAX = 64  # connections opened before an open loop begins
LOOKED_INTO_MAX = 512  # sockets whose unread bytes are looked at: a look at thousands would be a stall of its own

# Given the busiest share of the warm-up, says when the steady part begins; None ends the level there.
Begin = Callable[[float], Awaitable[float | None]]


async def at_once(_busy: float) -> float:
    """Begin the steady part now, as a load that is one process does."""
    return monotonic_s()


class LevelRun:
    """One level of a benchmark against one server; `details` has one message for each error's name.

    `shard` of `shards` means that the level is carried by so many of these together, each with its part of the requests.
    """

    def __init__(
        self,
        target: Target,
        workload: Workload,
        level: Level,
        on_progress: Callable[[Progress], None],
        *,
        shard: tuple[int, int] = (0, 1),
        begin: Begin = at_once,
    ) -> None:
        self._workload = workload
        self._benchmark: Benchmark = workload.benchmark
        self._level = level
        self._closed = self._benchmark.load == "concurrency"
        self._shard, self._shards = shard
        self._streams = self._part(int(level)) if self._closed else 0
        self._on_progress = on_progress
        self._begin = begin
        self._meter = Meter()
        self._lag: array[float] = array("d")
        self._live: dict[Record, Connection | None] = {}
        self._ended: deque[Record] = deque()  # over, and to be packed when there is time: their streams go on first
        self._has_ended = asyncio.Event()
        self._idle: list[Connection] = []
        self._good = self._failed = self._ended_before = self._told = 0
        self._cold = self._streams if self._benchmark.warmup_requests else 0  # streams not yet warm
        self._settled_at: float | None = None
        self._exhausted = self._held_back = False
        self._unread = 0
        self._phase: Literal["warm-up", "steady", "tail"] = "warm-up"
        self._waits: float | None = None  # how busy the warm-up was, while we wait to be told to begin
        self._next_due = float("inf")  # of an open loop's next request
        self._zero = 0.0
        self._stopping = self._finishing = False
        self._change = asyncio.Event()
        self._dialer = Dialer(target, self._meter.read_delays, self._benchmark.request_timeout_s)
        self._pool = Pool(target, workload, self._shard, self._shards)
        self.details: dict[str, str] = {}

    async def run(self) -> LevelSamples:
        """Drive the load to its end or until `stop`, and return what was measured."""
        await self._prepare_until_stopped()
        loop = asyncio.get_running_loop()
        if isinstance(loop, HotLoop):
            loop.hot.precise = not self._closed
        self._zero = self._told_at = monotonic_s()
        self._used_told = self._used_from = used()
        load = [self._stream(i) for i in range(self._streams)] if self._closed else [self._open_loop()]
        jobs: list[Coroutine[Any, Any, None]] = [
            self._course(),
            self._watch_lag(),
            self._report(),
            self._pool.keep_full(),
            self._pack_ended(),
        ]
        running = [asyncio.create_task(job) for job in jobs]
        running += [asyncio.create_task(job) for job in load]
        try:
            await self._first_end(running)
        finally:
            samples = self._cut()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return samples

    async def _prepare_until_stopped(self) -> None:
        """Make ready what would hold up the load's first moments; a stop does not wait for it."""
        preparing = asyncio.create_task(self._prepare())
        preparing.add_done_callback(lambda _: self._change.set())
        await self._until(preparing.done, None)
        if preparing.done():
            preparing.result()
        preparing.cancel()

    async def _prepare(self) -> None:
        if not self._closed or self._streams:
            await self._pool.fill(self._streams or max(4, round(POOL_AHEAD_S * self._level / self._shards)))
        await self._dialer.look_up()
        await self._open_spares()

    def _part(self, whole: int) -> int:
        """How many of so many are this shard's."""
        return len(range(self._shard, whole, self._shards))

    async def _first_end(self, running: list["asyncio.Task[None]"]) -> None:
        """Wait for the course, which ends by itself; whatever else ends early has raised what must not be swallowed."""
        waiting = set(running)
        while running[0] in waiting:
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()

    def stop(self) -> None:
        """End the level at once; what it measured so far stays valid. To be called in the loop's thread."""
        self._stopping = True
        self._change.set()

    def finish(self) -> None:
        """End the steady part now, as if its time were over: requests that began in it may still end, where that matters."""
        self._finishing = True
        self._change.set()

    # The course of a level: warm-up, the steady part, and its tail.

    async def _course(self) -> None:
        seconds = self._benchmark.seconds
        await self._until(self._warm, max(WARMUP_LEAST_S, 4 * seconds))
        if self._stopping or (self._failed and not self._good and not self._cold):
            return  # stopped, or every request of the warm-up failed
        now = monotonic_s()
        start = await self._begin(used().since(self._used_from, now - self._zero).busy)
        self._waits = None
        if start is None or self._stopping:
            return
        # Before the wait: a request that ends while this waits late is counted from `start` on.
        self._meter.begin(start)
        await self._until(lambda: False, start - monotonic_s())
        if monotonic_s() < start:
            self._meter.steady_from = None  # stopped before
            return
        self.tell()  # so that no later line mixes events of the warm-up into the steady part
        self._phase = "steady"
        self._used_from = used()
        self._ended_before = self._good + self._failed
        wanted = self._benchmark.requests
        most = None if wanted is None else self._part(wanted)
        await self._until(lambda: self._enough(most), start + seconds - monotonic_s())
        if wanted is None and not self._finishing:
            await self._until(lambda: self._enough(self._streams), seconds)
        self.tell()
        self._phase = "tail"
        self._meter.end(monotonic_s())
        self._used_to = used()
        if not self._closed or not self._benchmark.fixed_length:
            await self._until(self._all_ended, max(TAIL_LEAST_S, seconds))

    def _warm(self) -> bool:
        if self._exhausted and not self._live:
            return True
        if self._benchmark.load == "trace":
            return True  # a recording is measured from its first request
        elapsed = monotonic_s() - self._zero
        if elapsed < self._benchmark.ramp_s:
            return False
        if self._closed:
            return self._cold == 0
        if not self._good and self._failed >= WARMUP_FAILURES and elapsed >= HOPELESS_S:
            return True  # nothing is answered, and nobody need wait for it
        return not self._benchmark.warmup_requests or (self._settled_at is not None and elapsed >= self._settled_at)

    def _enough(self, requests: int | None) -> bool:
        """So many requests have ended in the steady part, or none can come any more, or it is to end in any case."""
        if self._finishing or (self._exhausted and not self._live):
            return True
        return requests is not None and self._good + self._failed - self._ended_before >= requests

    def _all_ended(self) -> bool:
        """Every request that began in the steady part has ended, those among them that were held back."""
        is_steady = self._meter.is_steady
        return not is_steady(self._next_due) and not any(is_steady(_began(record)) for record in self._live)

    async def _until(self, reached: Callable[[], bool], limit_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if limit_s is None else max(0.0, limit_s)):
                while not (self._stopping or reached()):
                    self._change.clear()
                    await self._change.wait()

    # Closed loop: one stream, request after request on one connection.

    async def _stream(self, number: int) -> None:
        connection: Connection | None = None
        pause, warmup, failures = PAUSE_S[0], self._benchmark.warmup_requests, 0
        await asyncio.sleep(self._benchmark.ramp_s * number / max(1, self._streams))
        before: Record | None = None
        try:
            while (item := self._pool.take()) is not None:
                said: tuple[str, ...] = ()
                while item is not None:
                    record, connection = await self._one_request(connection, item, before)
                    if warmup:
                        failures += bool(record.error)
                        warmup = 0 if failures >= WARMUP_FAILURES else warmup - (not record.error)
                        self._cold -= not warmup
                        self._change.set()
                    if record.error:
                        await asyncio.sleep(pause)
                    pause = min(2 * pause, PAUSE_S[1]) if record.error else PAUSE_S[0]
                    before = None if record.error else record
                    item, said = self._pool.next_turn(item, record, said)
            self._exhausted = True
            self._change.set()
        finally:
            if connection is not None:
                connection.drop()

    # Open loop: each request when it is due, on any connection that is free.

    async def _open_loop(self) -> None:
        planned = arrivals(self._benchmark, self._level)
        most = self._benchmark.max_concurrency
        limit = asyncio.Semaphore(IN_FLIGHT_MAX if most is None else self._part(most))
        async with asyncio.TaskGroup() as group:
            for number in range(1 << 62):
                at_s = next(planned)
                if number % self._shards != self._shard:
                    continue
                item = self._pool.take()
                if item is None:
                    break
                due = self._zero + (at_s if item.ask.at_s is None else item.ask.at_s)
                self._next_due = due
                await asyncio.sleep(due - monotonic_s())
                self._held_back |= limit.locked()
                await limit.acquire()
                group.create_task(self._arrival(item, due, limit))
        self._next_due = float("inf")
        self._exhausted = True
        self._change.set()

    async def _arrival(self, item: Prepared | None, due: float | None, limit: asyncio.Semaphore) -> None:
        connection: Connection | None = None
        said: tuple[str, ...] = ()
        try:
            while item is not None:
                free = connection or (self._idle.pop() if self._idle else None)
                record, connection = await self._one_request(free, item, None, due)
                self._note_settled(record)
                item, said = self._pool.next_turn(item, record, said)
                due = record.end  # a turn is due when the one before was answered
        finally:
            limit.release()
            if connection is not None and connection.usable:
                self._idle.append(connection)
            elif connection is not None:
                connection.drop()

    def _note_settled(self, record: Record) -> None:
        """From the first good request at the full rate on it is known when as many requests end as begin."""
        began_s, ramp_s = _began(record) - self._zero, self._benchmark.ramp_s
        if self._settled_at is None and not record.error and record.end is not None and began_s >= ramp_s:
            self._settled_at = began_s + SETTLED_REQUESTS * (record.end - self._zero - began_s)

    async def _open_spares(self) -> None:
        if self._closed:
            return
        for _ in range(min(SPARE_MAX, max(4, round(self._level)))):
            spare = await self._dialer.connect(Record(sent=monotonic_s()))
            if spare is None:
                return  # the load itself will say why
            self._idle.append(spare)

    # One request.

    async def _one_request(
        self, connection: Connection | None, item: Prepared, before: Record | None, due: float | None = None
    ) -> tuple[Record, Connection | None]:
        """Send a request on a connection, if there is one, and return its record and the connection to use next."""
        began = monotonic_s()
        record = Record(sent=began, due=due, asked_tokens=item.asked_tokens, turn=item.turn)
        record.heard = [] if item.ask.more else None
        self._live[record] = None
        reused = connection is not None and connection.usable
        for _ in range(2):
            if connection is not None and not connection.usable:
                connection.drop()
                connection = None
            connection = connection or await self._dialer.connect(record)
            if connection is None:
                break
            self._live[record] = connection
            await connection.ask(item.request, record, self._benchmark.request_timeout_s)
            if not (reused and connection.unanswered):
                break
            # The server closed an idle connection just as the request went out, as llama.cpp does: no failure.
            record.error, record.detail, record.end, reused, record.retried = "", "", None, False, True
        del self._live[record]
        self._meter.stamped |= connection is not None and connection.wire is not None and connection.wire.stamped
        self._note(record, before, began)
        return record, connection

    def _note(self, record: Record, before: Record | None, began: float) -> None:
        """A request is over; `began` is when it was taken up. What connecting took from then on is not ours to answer for."""
        wanted = record.due if before is None else before.end
        if wanted is not None and self._meter.is_steady(record.sent):
            self._meter.send_delays.append(max(0.0, began - wanted))
        if record.error:
            self._failed += 1
            self.details.setdefault(record.error, record.detail)
        else:
            self._good += 1
        self._ended.append(record)
        self._has_ended.set()
        self._change.set()

    async def _pack_ended(self) -> None:
        """Pack what has ended, one a turn of the loop: when many end together, all have their next request out before."""
        while True:
            await self._has_ended.wait()
            await asyncio.sleep(TOGETHER_S)
            self._has_ended.clear()
            while self._ended:
                self._meter.archive(self._ended.popleft(), self._zero)
                await asyncio.sleep(0)

    def _cut(self) -> LevelSamples:
        """Abort what is in flight, keep its records, marked, and return the samples of all."""
        now = monotonic_s()
        self._used_to = used() if self._meter.steady_to is None else self._used_to
        while self._ended:
            self._meter.archive(self._ended.popleft(), self._zero)
        for record, connection in self._live.items():
            if connection is not None and connection.unanswered:
                record.end, record.error = None, ""  # it was about to go out once more
            record.cut = record.end is None
            if connection is not None:
                connection.drop()
            self._meter.archive(record, self._zero)
        for connection in self._idle:
            connection.drop()
        return self._samples(now if self._meter.steady_to is None else self._meter.steady_to)

    # What the client says about the load and about itself.

    async def _watch_lag(self) -> None:
        while True:
            due = monotonic_s() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            self._dialer.ahead.check()
            if self._meter.is_steady(due):
                self._lag.append(max(0.0, monotonic_s() - due))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._dialer.ahead.refresh()
            if self._meter.is_steady(monotonic_s()):
                looked_into = islice(self._live.values(), LOOKED_INTO_MAX)
                self._unread = max(self._unread, sum(c.unread_bytes for c in looked_into if c is not None))
            self.tell()
            self._change.set()  # a ramp is over by time, and an open loop is warm by it

    def wait(self, busy: float) -> None:
        """Say from now on that the load is warm, and how busy that kept us; until it is told to begin."""
        self._waits = busy
        self.tell()

    def tell(self) -> None:
        """Say how far the load is."""
        now, spent = monotonic_s(), used()
        total = self._meter.events + sum(len(r.times) for records in (self._live, self._ended) for r in records)
        events, self._told = total - self._told, total
        busy = spent.since(self._used_told, now - self._told_at).busy
        self._told_at, self._used_told = now, spent
        self._on_progress(
            Progress(
                at_s=round(now - self._zero, 3),
                phase=self._phase,
                events=events,
                in_flight=len(self._live),
                done=self._good,
                failed=self._failed,
                tokens_per_event=round(self._meter.tokens_per_event, 4),
                busy_ratio=round(busy if self._waits is None else self._waits, 3),
                waits=self._waits is not None,
            )
        )

    def _samples(self, end: float) -> LevelSamples:
        meter, start = self._meter, self._meter.steady_from
        bins = meter.whole_bins(end)
        share = self._used_to.since(self._used_from, 0.0 if start is None else end - start)
        return LevelSamples(
            concurrency=self._level,
            steady_from_s=None if start is None else round(start - self._zero, 6),
            steady_to_s=None if start is None else round(start - self._zero + len(bins) * BIN_S, 6),
            stopped_early=self._stopping,
            requests=meter.samples(self._zero),
            bins=bins,
            gaps=meter.gaps(),
            merged_ratio=round(meter.merged_ratio(bins), 5),
            lag_p99_ms=quantiles_ms(self._lag).get("p99", 0.0),
            cpu_ratio=round(share.cpu, 4),
            waited_ratio=round(share.waited, 4),
            read_delay_ms=quantiles_ms(meter.read_delays) if meter.stamped else {},
            send_delay_ms=quantiles_ms(meter.send_delays),
            unread_bytes_max=self._unread,
            kernel_stamps=meter.stamped,
            load=self._benchmark.load,
            held_back=self._held_back,
            method=METHOD,
        )


def _began(record: Record) -> float:
    return record.sent if record.due is None else record.due
