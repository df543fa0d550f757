"""Several hosts as one: a launch lives while any rank does, a rank that ended ends the others, and what is unknown ends nothing."""

import asyncio
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import soon

from autotuner.edge import procfs
from autotuner.edge.host import GpuUse, LaunchSpec, PortHolder, ServerSeen, rank_id
from autotuner.edge.host_local import LocalHost
from autotuner.edge.host_nodes import Member, NodesHost
from autotuner.errors import DiskFull, HostError, HostKeyRefused, HostUnreachable

SLEEPS = (sys.executable, "-S", "-c", "import time; time.sleep(600)")


class Away(LocalHost):
    """A host that does not answer, or answers with an error."""

    error: Exception | None = None

    async def start(self, spec: LaunchSpec) -> None:
        if self.error is not None:
            raise self.error
        await super().start(spec)

    async def inspect(self, launch_id: str) -> ServerSeen:
        if isinstance(self.error, HostUnreachable | HostKeyRefused):
            raise self.error
        return await super().inspect(launch_id)

    async def stop(self, launch_id: str, grace_s: float) -> ServerSeen:
        if isinstance(self.error, HostUnreachable | HostKeyRefused):
            raise self.error
        return await super().stop(launch_id, grace_s)


class Nodes:
    """Two nodes in two folders of this machine, and one launch over them."""

    def __init__(self, folder: Path) -> None:
        self.hosts = [Away(folder / name, "shim") for name in ("a", "b")]
        self.launch = uuid.uuid4().hex[:16]

    def host(self) -> NodesHost:
        """The nodes as a daemon that was just started has them."""
        members = [Member(f"gpu{n}", host) for n, host in enumerate(self.hosts, 1)]
        return NodesHost(members, grace_s=2.0)

    def spec(self, rank: int = 0) -> LaunchSpec:
        others = (self.spec(1),) if rank == 0 else ()
        return LaunchSpec(rank_id(self.launch, rank), f"t.{rank}", SLEEPS, {}, stop_grace_s=1.0, others=others)

    def pids(self) -> list[int]:
        return [pid for rank in (0, 1) for pid in procfs.of_launch(rank_id(self.launch, rank))]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    for host in made.hosts:
        host.error = None
    asyncio.run(made.host().stop(made.launch, 1.0))
    assert not made.pids()


async def gone(host: NodesHost, launch: str) -> ServerSeen:
    """Look until the launch lives no more; until then it must never look as if it did not."""
    seen = [await host.inspect(launch)]
    while seen[-1].alive:
        await asyncio.sleep(0.05)
        seen.append(await host.inspect(launch))
    return seen[-1]


def test_every_rank_is_started_seen_and_stopped(nodes: Nodes) -> None:
    async def work() -> None:
        host = nodes.host()
        await host.start(nodes.spec())
        seen = await host.inspect(nodes.launch)
        assert seen.alive
        assert not seen.failing
        assert [rank.where for rank in seen.ranks] == ["gpu1", "gpu2"]
        assert all(rank.seen.alive for rank in seen.ranks)
        assert (await host.activity(nodes.launch)).rss_bytes > 0
        stopped = await host.stop(nodes.launch, 2.0)
        assert not stopped.alive
        assert not nodes.pids()
        assert not any(rank.first for rank in stopped.ranks)

    asyncio.run(work())


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_ends_ends_the_others_and_is_named(nodes: Nodes, dead: int) -> None:
    async def work() -> None:
        host = nodes.host()
        await host.start(nodes.spec())
        await nodes.hosts[dead].stop(rank_id(nodes.launch, dead), 1.0)
        first = await host.inspect(nodes.launch)
        assert first.alive  # for as long as the other does, the slot is not free
        assert f"rank {dead} on gpu{dead + 1} has ended" in first.failing
        seen = await gone(host, nodes.launch)
        assert not nodes.pids()
        assert [rank.first for rank in seen.ranks] == [rank == dead for rank in (0, 1)]

    asyncio.run(work())


@pytest.mark.parametrize("started", [0, 1])
def test_a_daemon_that_died_between_two_starts_leaves_nothing_that_lives(nodes: Nodes, started: int) -> None:
    async def work() -> None:
        await nodes.hosts[started].start(nodes.spec(started))
        seen = await gone(nodes.host(), nodes.launch)
        assert not seen.started  # so that it counts against nobody
        assert not nodes.pids()

    asyncio.run(work())


def test_a_daemon_that_died_behind_the_starts_takes_the_ranks_up(nodes: Nodes) -> None:
    async def work() -> None:
        await nodes.host().start(nodes.spec())
        seen = await nodes.host().inspect(nodes.launch)
        assert seen.alive
        assert not seen.failing

    asyncio.run(work())


def test_nothing_is_known_and_nothing_ended_while_a_host_is_away(nodes: Nodes) -> None:
    async def work() -> None:
        host = nodes.host()
        await host.start(nodes.spec())
        await nodes.hosts[0].stop(nodes.launch, 1.0)
        nodes.hosts[1].error = HostUnreachable("host gpu2 cannot be reached")
        with pytest.raises(HostUnreachable):
            await host.inspect(nodes.launch)
        assert nodes.pids()
        nodes.hosts[1].error = None
        await gone(host, nodes.launch)
        assert not nodes.pids()

    asyncio.run(work())


@pytest.mark.parametrize("error", [HostError("no program"), DiskFull("no room")])
def test_where_one_rank_cannot_be_started_none_is_left(nodes: Nodes, error: Exception) -> None:
    async def work() -> None:
        nodes.hosts[1].error = error
        with pytest.raises(type(error), match="rank 1 on gpu2: no"):
            await nodes.host().start(nodes.spec())
        assert not nodes.pids()

    asyncio.run(work())


def test_an_order_that_was_lost_with_its_connection_leaves_the_other_rank_until_that_is_known(nodes: Nodes) -> None:
    async def work() -> None:
        host = nodes.host()
        nodes.hosts[1].error = HostUnreachable("host gpu2 cannot be reached")
        with pytest.raises(HostUnreachable):
            await host.start(nodes.spec())
        await soon(nodes.pids)
        nodes.hosts[1].error = None
        seen = await gone(host, nodes.launch)
        assert not seen.started
        assert not nodes.pids()

    asyncio.run(work())


def test_a_refused_key_is_graver_than_a_host_that_is_away(nodes: Nodes) -> None:
    nodes.hosts[0].error = HostUnreachable("host gpu1 cannot be reached")
    nodes.hosts[1].error = HostKeyRefused("host gpu2 shows another key")
    with pytest.raises(HostKeyRefused):
        asyncio.run(nodes.host().inspect(nodes.launch))


def test_ranks_on_one_host_are_told_apart(tmp_path: Path) -> None:
    async def work() -> None:
        one = LocalHost(tmp_path, "shim")
        host = NodesHost([Member("local", one), Member("local", one)], grace_s=2.0)
        launch = uuid.uuid4().hex[:16]
        other = LaunchSpec(rank_id(launch, 1), "t.1", SLEEPS, {}, stop_grace_s=1.0)
        await host.start(LaunchSpec(launch, "t", SLEEPS, {}, stop_grace_s=1.0, others=(other,)))
        await one.stop(rank_id(launch, 1), 1.0)
        assert (await one.inspect(launch)).alive
        assert not (await gone(host, launch)).alive
        assert not procfs.of_launch(launch)

    asyncio.run(work())


class Told(LocalHost):
    """A host of which only ports and GPUs are told."""

    def __init__(self, ports: dict[int, PortHolder], gpus: tuple[GpuUse, ...] = ()) -> None:
        super().__init__(Path("/nowhere"), "shim")
        self._ports, self._uses = ports, gpus

    async def port_holder(self, port: int) -> PortHolder | None:
        return self._ports.get(port)

    async def gpus(self, indices: tuple[int, ...]) -> tuple[GpuUse, ...]:
        return tuple(use for use in self._uses if use.index in indices)


def test_whoever_holds_a_port_of_any_rank_is_named_with_his_node() -> None:
    async def holder(first: dict[int, PortHolder], second: dict[int, PortHolder]) -> PortHolder | None:
        members = [Member("gpu1", Told(first), (), (30000, 31000)), Member("gpu2", Told(second), (), (30000,))]
        return await NodesHost(members, 1.0).port_holder(30000)

    nobody = asyncio.run(holder({}, {}))
    assert nobody is None
    ours = asyncio.run(holder({30000: PortHolder(5, "x", "abc")}, {30000: PortHolder(6, "y", "abc.1")}))
    assert ours == PortHolder(5, "x", "abc")
    there = asyncio.run(holder({}, {30000: PortHolder(6, "y", None)}))
    assert there == PortHolder(6, "y on gpu2, port 30000", None)
    meeting = asyncio.run(holder({31000: PortHolder(7, "z", "def")}, {}))
    assert meeting == PortHolder(7, "z on gpu1, port 31000", "def")
    dummy = asyncio.run(holder({}, {30000: PortHolder(6, "y", "abc.1")}))
    assert dummy is not None
    assert dummy.launch_id == "abc"


def test_gpus_of_all_nodes_are_told_apart() -> None:
    use = [GpuUse(index, 100.0 + index, 80000.0) for index in range(4)]
    members = [Member("gpu1", Told({}, tuple(use)), (0, 1)), Member("gpu2", Told({}, tuple(use)), (1, 3))]
    found = asyncio.run(NodesHost(members, 1.0).gpus((0, 1)))
    assert [gpu.index for gpu in found] == [0, 1, 2, 3]
    assert [gpu.name for gpu in found] == ["0 on gpu1", "1 on gpu1", "1 on gpu2", "3 on gpu2"]
    assert [gpu.used_mib for gpu in found] == [100.0, 101.0, 101.0, 103.0]
