"""Several hosts behind the seam of one: a server over several nodes, each rank of it a launch on its own host.

Owns two promises. Where one rank has ended, the others are ended, whoever looks next; until the last of them is gone the
launch lives, so that nothing else is launched. And what cannot be seen on one host is not known of the launch: a host that
does not answer makes the whole of it unreachable, and nothing is ended by it.

Ranks are found again by the launch and their number (`rank_id`), on whichever host the settings have for that number.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from autotuner import log
from autotuner.edge.host import (
    Activity,
    GpuUse,
    Host,
    LaunchSpec,
    PortHolder,
    Ran,
    RankSeen,
    Readings,
    ServerSeen,
    launch_of_rank,
    rank_id,
)
from autotuner.errors import AutotunerError, HostError, HostKeyRefused, HostUnreachable

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """One node: its name for people, its host, and the GPUs and ports that its rank has there, the slot's port first."""

    name: str
    host: Host
    gpus: tuple[int, ...] = ()
    ports: tuple[int, ...] = ()


class NodesHost:
    """The hosts of one slot's nodes as one host; rank 0's is the one that answers, runs commands and drives loads.

    `grace_s` is how long ranks may take to end once one of them has.
    """

    def __init__(self, members: Sequence[Member], grace_s: float) -> None:
        self.members = tuple(members)
        self._grace_s = grace_s
        self._busy: set[str] = set()  # launches that are being started or stopped: their ranks come and go
        self._first: dict[str, int] = {}  # which rank of a launch was seen to end while others lived
        self._endings: dict[str, asyncio.Task[None]] = {}
        self.here = all(member.host.here for member in members)

    @property
    def cuts(self) -> int:
        """How many connections were lost, of all nodes."""
        return sum(member.host.cuts for member in self.members)

    @property
    def can_bench(self) -> bool:
        """Whether a load can be driven where rank 0 is."""
        return self._head.can_bench

    async def start(self, spec: LaunchSpec) -> None:
        """Start every rank at once; where one cannot be started, none is left.

        A host whose answer was lost may have started its rank: that is seen once it answers, and the others live until then.
        """
        specs = (spec, *spec.others)
        if len(specs) != len(self.members):
            raise HostError(f"launch {spec.launch_id} has {len(specs)} ranks for {len(self.members)} nodes")
        self._busy.add(spec.launch_id)
        try:
            await self._every(lambda rank, host: host.start(replace(specs[rank], others=())))
        except HostUnreachable:
            raise
        except AutotunerError:
            with contextlib.suppress(AutotunerError):  # what is left all the same is found by the next look
                await self._every(lambda rank, host: host.stop(rank_id(spec.launch_id, rank), self._grace_s))
            raise
        finally:
            self._busy.discard(spec.launch_id)

    async def inspect(self, launch_id: str) -> ServerSeen:
        """Look at every rank. Where some have ended and others have not, the others' end is begun."""
        seen = await self._every(lambda rank, host: host.inspect(rank_id(launch_id, rank)))
        return self._as_one(launch_id, seen)

    async def stop(self, launch_id: str, grace_s: float) -> ServerSeen:
        """Stop every rank at once; return how the launch is afterwards. The others are stopped also where a host is away."""
        self._busy.add(launch_id)
        try:
            seen = await self._every(lambda rank, host: host.stop(rank_id(launch_id, rank), grace_s))
        finally:
            self._busy.discard(launch_id)
        return self._as_one(launch_id, seen)

    async def read_log(self, launch_id: str, offset: int, limit: int = 1 << 20) -> bytes:
        """Return bytes of a rank's log, by the rank's own id."""
        _, _, rank = launch_id.partition(".")
        return await self.members[int(rank or 0)].host.read_log(launch_id, offset, limit)

    async def activity(self, launch_id: str) -> Activity:
        """Sum the signs of life over all ranks."""
        every = await self._every(lambda rank, host: host.activity(rank_id(launch_id, rank)))
        return Activity(
            sum(a.read_bytes for a in every),
            sum(a.cpu_s for a in every),
            sum(a.rss_bytes for a in every),
            sum(a.log_bytes for a in every),
        )

    async def port_holder(self, port: int) -> PortHolder | None:
        """Tell who listens on the slot's port where rank 0 is; if nobody does, on any other port that a rank needs."""
        every = await self._every(self._holder)
        return next((holder for holder in every if holder is not None), None)

    async def gpus(self, indices: tuple[int, ...]) -> tuple[GpuUse, ...]:
        """Report the GPUs of every node, whichever of them are asked for; their indices count on from node to node."""
        every = await self._every(lambda rank, host: host.gpus(self.members[rank].gpus))
        found, before = list[GpuUse](), 0
        for member, uses in zip(self.members, every, strict=True):
            place = {gpu: before + number for number, gpu in enumerate(member.gpus)}
            found += [replace(use, index=place[use.index], label=f"{use.index} on {member.name}") for use in uses]
            before += len(member.gpus)
        return tuple(found)

    async def free_disk_mib(self) -> float:
        """The least that is free on any node."""
        return min(await self._every(lambda _, host: host.free_disk_mib()))

    async def readings(self, gpus: tuple[int, ...]) -> Readings:
        """Read what rank 0's GPUs and host do: its figures stand for the others', which do the same work."""
        return await self._head.readings(self.members[0].gpus if gpus else ())

    async def run(self, argv: tuple[str, ...], timeout_s: float) -> Ran:
        """Run a short command where rank 0 is."""
        return await self._head.run(argv, timeout_s)

    async def reach(self, address: str, port: int) -> tuple[str, int]:
        """Return where we reach what listens there where rank 0 is."""
        return await self._head.reach(address, port)

    async def start_bench(self) -> tuple[Any, int]:
        """Start the load client where rank 0 is."""
        return await self._head.start_bench()

    async def launch_of(self, pid: int) -> str | None:
        """Tell the launch that a process of this number belongs to, on whichever node there is one of ours."""
        every = await self._every(lambda _, host: host.launch_of(pid))
        return next((launch_of_rank(found) for found in every if found is not None), None)

    def close(self) -> None:
        """Let go of what is being ended; the hosts themselves are shared, and closed by whoever made them."""
        for task in self._endings.values():
            task.cancel()
        self._endings.clear()

    @property
    def _head(self) -> Host:
        return self.members[0].host

    async def _holder(self, rank: int, host: Host) -> PortHolder | None:
        """Who listens on a port of a rank; which one is said in the holder's name, but for the slot's own."""
        for number in self.members[rank].ports:
            holder = await host.port_holder(number)
            if holder is None:
                continue
            own = rank == 0 and number == self.members[0].ports[0]
            name = holder.name if own else f"{holder.name} on {self.members[rank].name}, port {number}"
            launch = launch_of_rank(holder.launch_id) if holder.launch_id is not None else None
            return replace(holder, name=name, launch_id=launch)
        return None

    async def _every(self, ask: Callable[[int, Host], Coroutine[Any, Any, T]]) -> list[T]:
        """Ask all nodes at once and wait for all. Raise the gravest of what they raised, with the node's name."""
        asked = (ask(rank, member.host) for rank, member in enumerate(self.members))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        wrong = [(rank, answer) for rank, answer in enumerate(answers) if isinstance(answer, BaseException)]
        if wrong:
            rank, error = min(wrong, key=lambda item: _gravity(item[1]))
            raise self._named(rank, error) from error
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def _named(self, rank: int, error: BaseException) -> BaseException:
        name = self.members[rank].name
        if not isinstance(error, AutotunerError) or f"host {name}" in str(error):
            return error
        return type(error)(f"rank {rank} on {name}: {error}")

    def _as_one(self, launch_id: str, every: list[ServerSeen]) -> ServerSeen:
        """The launch as its ranks make it up: it lives while any of them does, and fails as soon as one does not."""
        over = [rank for rank, seen in enumerate(every) if not seen.alive]
        settled = launch_id not in self._busy
        if over and len(over) < len(every) and settled:
            self._first.setdefault(launch_id, over[0])
            self._end(launch_id, every)
        first = self._first.get(launch_id)
        ranks = tuple(
            RankSeen(member.name, seen, first=rank == first)
            for rank, (member, seen) in enumerate(zip(self.members, every, strict=True))
        )
        if len(over) < len(every):
            errors = "; ".join(f"rank {n} on {r.where}: {r.seen.error}" for n, r in enumerate(ranks) if r.seen.error)
            failing = (
                "" if first is None else f"rank {first} on {ranks[first].where} has ended, and the others are ended"
            )
            return ServerSeen(launch_id, alive=True, error=errors, failing=failing if settled else "", ranks=ranks)
        ill = (n for n, seen in enumerate(every) if seen.error or seen.exit_code)
        cause = first if first is not None else next(ill, 0)
        told = every[cause]
        error = f"rank {cause} on {ranks[cause].where}: {told.error}" if told.error else ""
        started = all(seen.started for seen in every)
        return ServerSeen(launch_id, alive=False, exit_code=told.exit_code, error=error, started=started, ranks=ranks)

    def _end(self, launch_id: str, every: list[ServerSeen]) -> None:
        """Begin to end the ranks that live, unless that is being done; what goes wrong is begun again at the next look."""
        task = self._endings.get(launch_id)
        if task is not None and not task.done():
            return
        first = self._first[launch_id]
        living = [rank for rank, seen in enumerate(every) if seen.alive]
        where = self.members[first].name
        log.get().warning("a rank has ended, so the others are ended", launch=launch_id, rank=first, host=where)
        self._endings[launch_id] = asyncio.create_task(self._end_ranks(launch_id, living))

    async def _end_ranks(self, launch_id: str, living: list[int]) -> None:
        stops = [self.members[rank].host.stop(rank_id(launch_id, rank), self._grace_s) for rank in living]
        for answer in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(answer, BaseException):
                log.get().warning("a rank could not be ended yet", launch=launch_id, error=str(answer))


def members_of(host: Host) -> tuple[Host, ...]:
    """Given a host, return the hosts that it is made of; itself, unless it is several."""
    return tuple(member.host for member in host.members) if isinstance(host, NodesHost) else (host,)


def _gravity(error: BaseException) -> int:
    """A key that is refused needs a person; a host that is away says nothing of the others; then what failed."""
    order = (HostKeyRefused, HostUnreachable, AutotunerError)
    return next((n for n, kind in enumerate(order) if isinstance(error, kind)), -1)
