"""Ranks of a rehearsed server over several nodes: they meet at rank 0, load side by side, and notice nothing when one goes.

They are joined by a connection each to rank 0, on loopback alone. A real rank whose peer has died mostly hangs in a collective
until its own time limit, ten minutes and more, and that is what is rehearsed: one that is left stands still, and its port
still answers. Real ranks behind the first have no interface; SGLang's open a port for health checks, which is left out here,
since rehearsed ranks share a machine.
"""

import asyncio
import contextlib
from dataclasses import dataclass

from autotuner.edge import clock

JOIN_S = 600.0  # torch's limit for ranks to find each other
JOIN_MIN_S = 15.0  # of it when loads are compressed: processes do not start faster for that
RETRY_S = 0.1


@dataclass(frozen=True)
class Ranks:
    """Which rank of how many this is, where they meet, and the number of its first GPU among all."""

    number: int = 0
    count: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    first_gpu: int = 0


ALONE = Ranks()


class Peers:
    """The other ranks, as one of them knows them. `lost` once one has gone, `ended` the answers that rank 0 last told of."""

    def __init__(self, ranks: Ranks, scale: float) -> None:
        self.ranks = ranks
        self.lost = False
        self.ended = 0
        self._limit_s = max(JOIN_MIN_S, JOIN_S / scale)
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._loaded: set[int] = set()
        self._server: asyncio.Server | None = None
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def meet(self) -> str:
        """Wait until every rank has come; return what torch says of one that does not, empty if all have."""
        if self.ranks.count < 2:
            return ""
        try:
            async with asyncio.timeout(self._limit_s):
                await (self._welcome_all() if self.ranks.number == 0 else self._go_there())
        except TimeoutError:
            return self._nobody()
        except OSError as error:
            where = "The server socket has failed to listen on any local network address."
            return f"torch.distributed.DistNetworkError: {where} {error}"
        return ""

    async def loaded(self) -> None:
        """Say that this rank has loaded; rank 0 waits for that of all, the others go on."""
        if self.ranks.number:
            self._say(0, "loaded")
            return
        async with self._news:
            await self._news.wait_for(lambda: len(self._loaded) == self.ranks.count - 1)

    def tell(self, ended: int) -> None:
        """Tell the other ranks how many answers there were; only rank 0 sees them."""
        for rank in self._writers if self.ranks.number == 0 else ():
            self._say(rank, f"ended {ended}")

    async def _welcome_all(self) -> None:
        self._server = await asyncio.start_server(self._welcome, "127.0.0.1", self.ranks.port)
        async with self._news:
            await self._news.wait_for(lambda: len(self._writers) == self.ranks.count - 1)
        for rank in self._writers:
            self._say(rank, "go")

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = int(await reader.readline() or b"0")
        if rank:
            async with self._news:
                self._writers[rank] = writer
                self._news.notify_all()
            await self._listen(rank, reader)

    async def _go_there(self) -> None:
        while True:
            try:
                reader, self._writers[0] = await asyncio.open_connection(self.ranks.host, self.ranks.port)
            except OSError:
                await clock.sleep(RETRY_S)
                continue
            self._say(0, str(self.ranks.number))
            if await reader.readline() == b"go\n":
                task = asyncio.create_task(self._listen(0, reader))
                self._tasks.add(task)
                return
            self._writers.pop(0).close()  # on loopback a port that nobody listens on may even answer itself
            await clock.sleep(RETRY_S)

    async def _listen(self, rank: int, reader: asyncio.StreamReader) -> None:
        """Take what another rank says, until it is gone."""
        with contextlib.suppress(OSError):
            async for line in reader:
                word, _, number = line.decode().strip().partition(" ")
                async with self._news:
                    self._loaded |= {rank} if word == "loaded" else set()
                    self.ended = int(number) if word == "ended" else self.ended
                    self._news.notify_all()
        self.lost = True

    def _say(self, rank: int, what: str) -> None:
        self._writers[rank].write(f"{what}\n".encode())

    def _nobody(self) -> str:
        """As torch 2 words it (torch/csrc/distributed/c10d/TCPStore.cpp and socket.cpp), whatever time it really took."""
        if self.ranks.number == 0:
            here = 1 + len(self._writers)
            waited = f"Timed out after {JOIN_S + 1:.0f} seconds waiting for clients. {here}/{self.ranks.count} clients joined."
            return f"torch.distributed.DistStoreError: {waited}"
        there = f"({self.ranks.host}, {self.ranks.port})"
        waited = f"The client socket has timed out after {JOIN_S * 1000:.0f}ms while trying to connect to {there}."
        return f"torch.distributed.DistNetworkError: {waited}"
