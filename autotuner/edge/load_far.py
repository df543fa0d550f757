"""A level's load driven on the server's own host: the same worker, copied there, its lines over the connection."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from autotuner.bench.benchmark import Benchmark, Level
from autotuner.edge.host import Host
from autotuner.edge.load import PROCESSES_MAX, Load

CLOSE_S = 10.0  # a connection that is gone does not answer


class FarLoad(Load):
    """One level's load from `host` itself to a server that listens there at `url`; `reached` is where we reach it.

    What the client can take there is not measured, so a level of more than a core's worth is known by its harm alone.
    """

    def __init__(
        self, host: Host, url: str, reached: str, benchmark: Benchmark, level: Level, model: str | None
    ) -> None:
        super().__init__(reached, benchmark, level, model)
        self._host = host
        self._url = url

    async def _start(self) -> Any:
        self._job["url"] = self._url
        process, cores = await self._host.start_bench()
        self._job["processes_max"] = max(1, min(PROCESSES_MAX, cores // 2))
        return process

    async def _lines(self) -> AsyncIterator[bytes]:
        from autotuner.edge import ssh  # noqa: PLC0415 - slow to import, and loaded already where there is such a host

        async for line in ssh.lines(self._process.stdout):
            yield line

    async def _end(self) -> None:
        """The end of its stdin ends the worker at any instant, whether we close it or the connection goes."""
        if self._process is not None:
            self._process.close()
            with contextlib.suppress(TimeoutError, OSError):
                await asyncio.wait_for(self._process.wait_closed(), CLOSE_S)
