"""A level's load driven on the server's own host: the same worker, copied there, its lines over the connection."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Self

from autotuner.bench.benchmark import Benchmark, Level
from autotuner.bench.placement import AUTO
from autotuner.bench.samples import LevelSamples, Progress
from autotuner.edge.host import Host
from autotuner.edge.load import PROCESSES_MAX, Load
from autotuner.errors import HostUnreachable

CLOSE_S = 10.0  # a connection that is gone does not answer


class FarLoad(Load):
    """One level's load from `host` itself to a server that listens there at `url`; `reached` is where we reach it.

    What the client can take there is not measured, so a level of more than a core's worth is known by its harm alone. `cores`
    are that host's.
    """

    def __init__(
        self,
        host: Host,
        url: str,
        reached: str,
        benchmark: Benchmark,
        level: Level,
        model: str | None,
        *,
        cores: str = AUTO,
    ) -> None:
        super().__init__(reached, benchmark, level, model, cores=cores)
        self._host = host
        self._url = url

    async def __aenter__(self) -> Self:
        from autotuner.edge.ssh import LOST  # noqa: PLC0415 - slow to import, and loaded already where there is such a host

        try:
            return await super().__aenter__()
        except LOST as error:
            await self._end()
            raise self._lost(error) from None

    async def messages(self) -> AsyncIterator[Progress | LevelSamples]:
        """Yield what the worker says, as `Load` does; raise HostUnreachable if the connection is lost meanwhile."""
        from autotuner.edge.ssh import LOST  # noqa: PLC0415 - as above

        try:
            async for message in super().messages():
                yield message
        except LOST as error:
            raise self._lost(error) from None

    def finish(self) -> None:
        """End the steady part now; where the connection is lost, that is told where messages are read."""
        with contextlib.suppress(OSError):
            super().finish()

    def stop(self) -> None:
        """End the level now: by the end of its stdin alone, for a channel that is closed brings no samples back."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._input.write_eof()
            self._must_end_soon()

    async def _start(self) -> Any:
        self._job["url"] = self._url
        process, cores = await self._host.start_bench()
        self._job["processes_max"] = max(1, min(PROCESSES_MAX, cores // 2))
        return process

    def _lost(self, error: BaseException) -> HostUnreachable:
        return HostUnreachable(f"the connection to the load client was lost: {error}")

    async def _lines(self) -> AsyncIterator[bytes]:
        from autotuner.edge import ssh  # noqa: PLC0415 - as above

        async for line in ssh.lines(self._process.stdout):
            yield line

    async def _end(self) -> None:
        """The end of its stdin ends the worker at any instant, whether we close it or the connection goes."""
        if self._process is not None:
            self._process.close()
            with contextlib.suppress(TimeoutError, OSError):  # a channel that is gone is closed
                await asyncio.wait_for(self._process.wait_closed(), CLOSE_S)
