"""Reads a launch's log from where it stopped: facts, last lines, why it ended. Of several ranks' logs as if they were one."""

from collections import deque
from dataclasses import dataclass, field

from autotuner.core.effective import merge, overlay
from autotuner.core.nccl import Nccl, absorb
from autotuner.core.ranks import LineOrder
from autotuner.edge import clock
from autotuner.edge.host import Host, ServerSeen, rank_id
from autotuner.engines.base import Diagnosis, Effective, Engine, LogFact, NcclSaid, ServerExit
from autotuner.engines.diagnosis import of_ranks, own_stop
from autotuner.engines.factreader import FactReader

TAIL_LINES = 400  # kept of each log for a diagnosis; the whole log stays in the launch's folder


@dataclass
class _Part:
    """The log of one rank: its id on its host, how far it was read, and its reader."""

    id: str
    reader: FactReader
    offset: int = 0


@dataclass
class LogReader:
    """Reads a launch's log from where it stopped; keeps the last lines and what the server and NCCL said they resolved.

    A server over several nodes has a log a rank. Each is cut into lines by itself, and what is new in all is read in the
    order of their stamps.
    """

    host: Host
    launch_id: str
    engine: Engine
    ranks: int = 1
    said: dict[tuple[str, str], Effective] = field(default_factory=dict)  # by source and rank, later over earlier
    nccl: Nccl = field(default_factory=Nccl)
    _parts: list[_Part] = field(init=False)
    _order: LineOrder = field(init=False, default_factory=LineOrder)
    _merged: deque[tuple[int, str]] = field(init=False)
    _found: list[LogFact] = field(init=False, default_factory=list)  # read, and not yet returned

    def __post_init__(self) -> None:
        ids = [rank_id(self.launch_id, rank) for rank in range(self.ranks)]
        self._parts = [_Part(part, FactReader(self.engine, TAIL_LINES)) for part in ids]
        self._merged = deque(maxlen=self.ranks * TAIL_LINES)

    @property
    def running_cap(self) -> int | None:
        """The requests that the whole server runs at once, as far as its log says."""
        return self.effective.running_cap

    @property
    def effective(self) -> Effective:
        """What the server resolved, as far as its log says."""
        return merge(self.said.values())

    async def facts(self) -> tuple[LogFact, ...]:
        """Return the facts of the lines that are new since the last call; of a call that failed, the next one returns them."""
        while any(pieces := [await self.host.read_log(part.id, part.offset) for part in self._parts]):
            # Once all were read: a host that is away loses no other's.
            for part, piece in zip(self._parts, pieces, strict=True):
                part.offset += len(piece)
            for rank, piece in self._in_order(pieces):
                before = self._parts[rank].reader.lines
                self._found += self._parts[rank].reader.feed(piece)
                self._merge(rank, before)
        found, self._found = self._found, []
        self._keep(found)
        return tuple(found)

    async def rest(self) -> tuple[str, ...]:
        """Read to the end and return the last lines: the server has ended."""
        await self.facts()
        for rank, part in enumerate(self._parts):
            before = part.reader.lines
            self._keep(part.reader.flush())
            self._merge(rank, before)
        return self.since(0)

    async def why_ended(self, seen: ServerSeen, *, asked: bool, became_ready: bool) -> Diagnosis:
        """Given how a launch ended, read to the end and return why; over several nodes, with the rank whose failure it was."""
        await self.rest()
        if self.ranks == 1 or not seen.ranks:
            return self.engine.diagnose(ServerExit(seen.exit_code, asked, became_ready), self.since(0))
        if asked:
            return own_stop()
        found = [
            (rank.where, self.engine.diagnose(ServerExit(rank.seen.exit_code, asked, became_ready), part.reader.tail))
            for rank, part in zip(seen.ranks, self._parts, strict=True)
        ]
        return of_ranks(found, next((number for number, rank in enumerate(seen.ranks) if rank.first), None))

    @property
    def lines(self) -> int:
        """How many lines were read so far."""
        return sum(part.reader.lines for part in self._parts)

    def since(self, line: int) -> tuple[str, ...]:
        """The lines after this many, as far as they are kept."""
        if self.ranks == 1:
            return self._parts[0].reader.since(line)
        return tuple(text for number, text in self._merged if number > line)

    def _in_order(self, pieces: list[bytes]) -> list[tuple[int, bytes]]:
        cleaned = [piece.replace(b"\0", b"") for piece in pieces]  # zeros are the middle of a log that was cut
        return [(0, cleaned[0])] if self.ranks == 1 else self._order.order(cleaned, clock.monotonic_s())

    def _merge(self, rank: int, before: int) -> None:
        """Keep a rank's new lines among those of the others."""
        if self.ranks > 1:
            self._merged += [(self.lines, text) for text in self._parts[rank].reader.since(before)]

    def _keep(self, facts: list[LogFact]) -> None:
        for fact in facts:
            if isinstance(fact, Effective):
                key = (fact.source, fact.rank)
                self.said[key] = overlay(self.said[key], fact) if key in self.said else fact
        self.nccl = absorb(self.nccl, (fact for fact in facts if isinstance(fact, NcclSaid)))
