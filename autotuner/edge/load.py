"""The benchmark's worker process as the daemon sees it: start it, hear from it, stop it at any instant."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from autotuner.bench import worker
from autotuner.bench.benchmark import Benchmark, Level
from autotuner.bench.placement import AUTO
from autotuner.bench.samples import LevelSamples, Progress, read_message
from autotuner.edge.calibration import capacity_tok_s
from autotuner.edge.tokenizer import words_for
from autotuner.errors import HostError

PROCESSES_MAX = 16
LINE_BYTES_MAX = 256 << 20  # the samples of a level come as one line


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
        self.void = ""  # what our own client has to say against a level is in its samples
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
            await self._input.drain()
        except ConnectionError:
            pass  # it has ended already; why is read where its messages are
        except BaseException:
            await self._end()  # nobody will leave a block that was never entered
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The load is over when this returns, also when the daemon's own work was cancelled."""
        await self._end()

    async def messages(self) -> AsyncIterator[Progress | LevelSamples]:
        """Yield what the worker says; the last message is its samples. Raise HostError if it ends without them."""
        if self._process is None or self._process.stdout is None:
            raise HostError("the benchmark worker was not started")
        async for line in self._lines():
            try:
                message = read_message(line)
            except ValidationError as error:
                raise HostError(f"the benchmark worker said something unknown: {error.errors()[0]['msg']}") from None
            yield message
            if isinstance(message, LevelSamples):
                return
        said = await self._process.stderr.read(2000) if self._process.stderr else b""
        raise HostError(f"the benchmark worker ended without a result: {said.decode('utf-8', 'replace').strip()}")

    async def _start(self) -> Any:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *worker.command(), stdin=pipe, stdout=pipe, stderr=pipe, limit=LINE_BYTES_MAX
        )

    async def _lines(self) -> AsyncIterator[bytes]:
        async for line in self._process.stdout:
            yield line

    async def _end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def finish(self) -> None:
        """End the steady part now, as if its time were over; the samples come when the requests that began in it have ended."""
        if self._process is not None and self._process.returncode is None and not self._input.is_closing():
            self._input.write(b'{"finish": true}\n')

    def stop(self) -> None:
        """End the level now; the samples of what it measured still come.

        The end of its stdin tells the worker so at any instant; a signal would just kill one that is still starting.
        """
        if self._process is not None:
            self._input.close()

    @property
    def _input(self) -> Any:
        if self._process is None or self._process.stdin is None:
            raise HostError("the benchmark worker was not started")
        return self._process.stdin


def usual_processes_max() -> int:
    """How many processes a load may grow to: half of the cores we may use, so that the server on them keeps the rest."""
    return max(1, min(PROCESSES_MAX, len(os.sched_getaffinity(0)) // 2))
