"""The one seam between the daemon and a host: start, inspect and stop servers, read their logs, look at ports and GPUs.

Everything the daemon does to a machine goes through this protocol, so one fake of it replaces the world in tests.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class LaunchSpec:
    """What to start. `secret_files` maps a variable to a file that the host itself reads.

    Of a server over several nodes this is rank 0, and `others` holds ranks 1, 2 and so on, each for its own node.
    """

    launch_id: str
    slot: str
    argv: tuple[str, ...]
    env: dict[str, str]
    secret_files: dict[str, str] = field(default_factory=dict)
    stop_grace_s: float = 30.0
    others: tuple["LaunchSpec", ...] = ()


@dataclass(frozen=True)
class ServerSeen:
    """How a launch is right now. `exit_code` is None while it lives, and where it was never recorded.

    `started` is false for one that was committed and of which nothing ever ran. `failing` says why one that lives is
    being ended. `ranks` has the ranks of a server over several nodes, rank 0 first.
    """

    launch_id: str
    alive: bool
    exit_code: int | None = None
    error: str = ""
    started: bool = True
    failing: str = ""
    ranks: tuple["RankSeen", ...] = ()


@dataclass(frozen=True)
class RankSeen:
    """One rank of a server over several nodes; `first` if it was seen to end before the others."""

    where: str
    seen: ServerSeen
    first: bool = False


@dataclass(frozen=True)
class Activity:
    """Signs of life of a launch's processes: numbers that only grow while something is being done."""

    read_bytes: int = 0
    cpu_s: float = 0.0
    rss_bytes: int = 0
    log_bytes: int = 0


@dataclass(frozen=True)
class PortHolder:
    """The process that listens on a port; `launch_id` if it is one of ours, `pid` None if the host hides it."""

    pid: int | None
    name: str
    launch_id: str | None


@dataclass(frozen=True)
class GpuUse:
    """One GPU: memory in MiB and the processes on it as (pid, name, MiB).

    `index` is the driver's; over several nodes it counts on from one to the next, and `label` says which GPU of which node.
    """

    index: int
    used_mib: float
    total_mib: float
    processes: tuple[tuple[int, str, float], ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        """The GPU for people: `0`, or `0 on gpu2`."""
        return self.label or str(self.index)


@dataclass(frozen=True)
class Readings:
    """GPUs and host at an instant. `gpus` has a table each, with the names of `bench.machine.GpuSample`.

    `cpu_busy` and `cpu_all` are ticks of all cores since boot, so that any two readings give a share; `memory_mib` is in use.
    `why_no_gpus` says why there are none, where some were wanted.
    """

    gpus: tuple[dict[str, float | None], ...] = ()
    cpu_busy: int | None = None
    cpu_all: int | None = None
    memory_mib: float | None = None
    why_no_gpus: str = ""


@dataclass(frozen=True)
class Ran:
    """A finished command: exit code and its output, both streams together."""

    code: int
    output: str


def rank_id(launch_id: str, rank: int) -> str:
    """Given a launch, return the id of one of its ranks on its node; rank 0 has the launch's own.

    Ranks that share a host are told apart by it, and a launch without ranks is one with rank 0 alone.
    """
    return f"{launch_id}.{rank}" if rank else launch_id


def launch_of_rank(found: str) -> str:
    """Given the id of a rank, return its launch."""
    return found.partition(".")[0]


class Host(Protocol):
    """A machine that holds slots. Every method raises HostError when the host cannot do it.

    For want of room it is DiskFull on this machine, HostDiskFull on another.
    HostUnreachable says that there is no connection, and so nothing of what runs there. `cuts` counts how often a connection
    was lost: what was learned over HTTP while it changed may be the connection's fault. Always 0 for this machine, for which
    `here` is true: its files are ours to look at.
    """

    here: bool

    @property
    def cuts(self) -> int:
        """How many connections were lost."""
        ...

    @property
    def can_bench(self) -> bool:
        """Whether a load can be driven on the host itself, where that is not this machine."""
        ...

    async def start(self, spec: LaunchSpec) -> None:
        """Start a launch; returns once its server runs or has already ended."""
        ...

    async def inspect(self, launch_id: str) -> ServerSeen:
        """Look at a launch. One that was committed but never started is revoked, so that it cannot start later."""
        ...

    async def stop(self, launch_id: str, grace_s: float) -> ServerSeen:
        """Stop a launch and everything below it, however detached; returns how it is afterwards."""
        ...

    async def read_log(self, launch_id: str, offset: int, limit: int = 1 << 20) -> bytes:
        """Return up to `limit` bytes of a launch's log from `offset` on; empty if there are none."""
        ...

    async def activity(self, launch_id: str) -> Activity:
        """Sum the signs of life over a launch's processes."""
        ...

    async def port_holder(self, port: int) -> PortHolder | None:
        """Tell who listens on a port; None if nobody does."""
        ...

    async def gpus(self, indices: tuple[int, ...]) -> tuple[GpuUse, ...]:
        """Report memory and processes of these GPUs; empty where there are none. HostError: the driver does not tell."""
        ...

    async def free_disk_mib(self) -> float:
        """Free space where the state lives, in MiB."""
        ...

    async def readings(self, gpus: tuple[int, ...]) -> Readings:
        """Read what these GPUs and the host do now; none of them wanted lets go of the driver."""
        ...

    async def run(self, argv: tuple[str, ...], timeout_s: float) -> Ran:
        """Run a short command to its end."""
        ...

    async def reach(self, address: str, port: int) -> tuple[str, int]:
        """Return where we reach what listens there on the host: the same, or this end of a forwarded port."""
        ...

    async def start_bench(self) -> tuple[Any, int]:
        """Start the load client on the host itself; return its process and the cores that it may use."""
        ...

    def close(self) -> None:
        """Let go of the host; what runs there lives on."""
        ...

    async def launch_of(self, pid: int) -> str | None:
        """Tell the launch that a process belongs to; None if it is not of autotuner, or hidden."""
        ...


class OneHost(Host, Protocol):
    """A host that is one machine, and can be tidied up."""

    async def cut_logs(self, launch_ids: Sequence[str], most_bytes: int) -> dict[str, str]:
        """Cut the middle out of logs that hold more; return what was cut as empty, and what could not be with the reason."""
        ...

    async def old_launches(self, protected: AbstractSet[str]) -> list[str]:
        """Return the launches that have a folder and are not protected, oldest first."""
        ...

    async def remove_launches(self, launch_ids: Sequence[str]) -> int:
        """Remove folders of launches that do not live, so many that it does not take long; return how many are gone."""
        ...

    async def forget_programs(self) -> int:
        """Remove what earlier versions of ours copied to the host; return how many files are gone."""
        ...
