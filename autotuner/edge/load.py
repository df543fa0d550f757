"""The benchmark's worker process as the daemon sees it: start it, hear from it, stop it at any instant.

A worker that hangs is killed: one that says nothing for long, or has no samples when any level would be over.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from autotuner import log
from autotuner.bench import deadline, worker
from autotuner.bench.benchmark import Benchmark, Level
from autotuner.bench.placement import AUTO
from autotuner.bench.samples import LevelSamples, Progress, read_message
from autotuner.edge import clock, reaping
from autotuner.edge.calibration import capacity_tok_s
from autotuner.edge.tokenizer import words_for
from autotuner.errors import HostError

PROCESSES_MAX = 16
LINE_BYTES_MAX = 256 << 20  # the samples of a level come as one line
ORDER_S = 30.0  # for the worker to take its order
LAST_LOOK_S = 5.0  # we may have been stopped ourselves: what was said meanwhile is there at once
SAID_S = 5.0  # for the last words of a worker that has ended


class Load:
    """One level's load, driven by a process of its own so that the daemon's loop never competes with it.

    `cache` is a folder: what the client can take on this host is kept there, and measured first where it is not. `cores` says
    which cores the client is bound to, None that the server is on another machine than the client.
    """

    def __init__(
        self,
        url: str,
        benchmark: Benchmark,
        level: Level,
        model: str | None,
        *,
        api_key: str | None = None,
        cache: Path | None = None,
        processes_max: int | None = None,
        cores: str | None = AUTO,
    ) -> None:
        self._job: dict[str, Any] = {
            "url": url,
            "benchmark": benchmark.model_dump(mode="json"),
            "concurrency": level,
            "model": model,
            "api_key": api_key,
            "processes_max": processes_max or usual_processes_max(),
            "cores": cores,
        }
        self.void = ""  # what our own client has to say against a level is in its samples, unless it hung
        self.hung = False
        self._until_s = 0.0
        self._late_s = float("inf")  # when a line was first waited for although the level should be over
        self._benchmark = benchmark
        self._cache = cache
        self._process: Any = None  # one of asyncio's, or of another host's with the same methods

    async def __aenter__(self) -> Self:
        if self._cache is not None:
            self._job["capacity_tok_s"] = await capacity_tok_s(self._cache, self._job["cores"])
        if not self._benchmark.dataset or self._benchmark.load == "trace":
            words = await words_for(self._job["url"], self._benchmark, self._job["model"], self._job["api_key"])
            self._job["words"] = words.model_dump(mode="json")
        try:
            self._process = await self._start()
        except OSError as error:
            raise HostError(f"the benchmark worker cannot be run: {error.strerror}") from None
        self._input.write(json.dumps(self._job).encode() + b"\n")
        try:
            async with asyncio.timeout(ORDER_S):
                await self._input.drain()
        except ConnectionError:
            pass  # it has ended already; why is read where its messages are
        except BaseException as error:
            await self._end()  # nobody will leave a block that was never entered
            if isinstance(error, TimeoutError):
                raise HostError(f"the benchmark worker did not take its order within {ORDER_S:.0f} s") from None
            raise
        self._until_s = clock.monotonic_s() + deadline.level_s(self._benchmark, self._job["processes_max"])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The load is over when this returns, also when the daemon's own work was cancelled."""
        await self._end()

    async def messages(self) -> AsyncIterator[Progress | LevelSamples]:
        """Yield what the worker says; the last message is its samples. Raise HostError if it ends without them.

        One that hangs leaves samples without requests: `hung` is set then, and `void` says why they must not be used.
        """
        if self._process is None or self._process.stdout is None:
            raise HostError("the benchmark worker was not started")
        lines = self._lines()
        while (line := await self._heard(lines)) is not None:
            try:
                message = read_message(line)
            except ValidationError as error:
                raise HostError(f"the benchmark worker said something unknown: {error.errors()[0]['msg']}") from None
            yield message
            if isinstance(message, LevelSamples):
                return
        if self.hung:
            yield LevelSamples(concurrency=self._job["concurrency"], stopped_early=True)
            return
        said = await self._last_words()
        raise HostError(f"the benchmark worker ended without a result: {said.decode('utf-8', 'replace').strip()}")

    async def _start(self) -> Any:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *worker.command(), stdin=pipe, stdout=pipe, stderr=pipe, limit=LINE_BYTES_MAX
        )

    async def _lines(self) -> AsyncIterator[bytes]:
        async for line in self._process.stdout:
            yield line

    async def _heard(self, lines: AsyncIterator[bytes]) -> bytes | None:
        """The next line; None if there is none any more, or if it did not come in time: then the worker is killed."""
        now_s = clock.monotonic_s()
        self._late_s = min(self._late_s, now_s) if now_s > self._until_s else float("inf")
        silent = self._until_s - now_s > deadline.SILENT_S
        patience_s = deadline.SILENT_S if silent else max(0.0, self._until_s - now_s)
        waiting = asyncio.ensure_future(anext(lines, None))
        try:
            done, _ = await asyncio.wait({waiting}, timeout=patience_s)
            if not done and now_s - self._late_s <= LAST_LOOK_S:
                done, _ = await asyncio.wait({waiting}, timeout=LAST_LOOK_S)
            if done:
                return waiting.result()
        finally:
            waiting.cancel()
        why = f"said nothing for {deadline.SILENT_S:.0f} s" if silent else "had no samples when any level is over"
        self.hung, self.void = True, f"the benchmark's client hung: it {why}, and was killed"
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await self._end()
        return None

    async def _last_words(self) -> bytes:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SAID_S):  # whoever else holds the pipe may live on
                return bytes(await self._process.stderr.read(2000)) if self._process.stderr else b""
        return b""

    async def _end(self) -> None:
        if self._process is not None and not await reaping.killed(self._process):
            log.get().error("the benchmark worker does not end", pid=self._process.pid)

    def finish(self) -> None:
        """End the steady part now, as if its time were over; the samples come when the requests that began in it have ended."""
        if self._process is not None and self._process.returncode is None and not self._input.is_closing():
            self._input.write(b'{"finish": true}\n')
            self._must_end_soon()

    def stop(self) -> None:
        """End the level now; the samples of what it measured still come.

        The end of its stdin tells the worker so at any instant; a signal would just kill one that is still starting.
        """
        if self._process is not None:
            self._input.close()
            self._must_end_soon()

    def _must_end_soon(self) -> None:
        self._until_s = min(self._until_s, clock.monotonic_s() + deadline.tail_s(self._benchmark))

    @property
    def _input(self) -> Any:
        if self._process is None or self._process.stdin is None:
            raise HostError("the benchmark worker was not started")
        return self._process.stdin


def usual_processes_max() -> int:
    """How many processes a load may grow to: half of the cores we may use, so that the server on them keeps the rest."""
    return max(1, min(PROCESSES_MAX, len(os.sched_getaffinity(0)) // 2))
