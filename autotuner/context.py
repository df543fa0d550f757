"""What the actions of one slot share: its settings, store and host, and what this daemon knows of its servers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotuner import log
from autotuner.bench.benchmark import Benchmark, Level
from autotuner.core.candidate import Candidate
from autotuner.core.objective import Objective
from autotuner.core.policy import Policy
from autotuner.core.redact import redact_argv
from autotuner.core.shell import command_line
from autotuner.core.starting import Pulse
from autotuner.core.topology import Topology
from autotuner.edge import clock
from autotuner.edge.host import Activity, Host, ServerSeen
from autotuner.edge.host_nodes import members_of
from autotuner.edge.probes import Probe
from autotuner.edge.store import Store
from autotuner.engines import engine_for
from autotuner.engines.base import Engine, Place
from autotuner.errors import HostError, HostUnreachable
from autotuner.serverlog import LogReader
from autotuner.settings import Settings, Slot

SECRET_TIMEOUT_S = 10.0
RANKS_END_S = 150.0  # what the ranks of a server may take beyond their grace once one of them has ended
RANKS_POLL_S = 0.1


@dataclass
class Live:
    """What is going on right now, for `status`; lost with the daemon, and nothing is decided on it."""

    stage: str = ""
    progress: str = ""
    level: Level | None = None
    running: float | None = None
    output_tok_s: float | None = None
    accept_len: float | None = None
    needed: float | None = None
    since_s: float | None = None
    usual_s: float | None = None
    stage_s: float | None = None
    stage_usual_s: float | None = None
    remaining_s: float | None = None
    overdue: bool = False


@dataclass
class Given:
    """What a slot knows of the GPU memory of its last server, for as long as the daemon lives.

    `owed_s` is when `launch` was first seen to owe some, `back` that it once owed none any more: what comes after is somebody
    else's. `own` are pids that were seen on the GPUs as its processes, by an earlier daemon too. `unread` is why the GPUs
    cannot be read, since `unread_s`; `failed` if that was an error, `told` once an entry says so.
    """

    launch: str = ""
    owed_s: float = float("inf")
    back: bool = False
    own: frozenset[int] = frozenset()
    unread: str = ""
    unread_s: float = 0.0
    failed: bool = False
    told: bool = False


@dataclass
class SlotContext:
    """One slot's world. `living` holds the launches seen alive last, `verified` those that generated tokens for this daemon.

    `settled` are the trials whose proposals it has tried to work out, `refused` the launches that the host could not start
    when this daemon told it to, `learned` the secret files of another host that were read;
    `measured` has, by benchmark, the last entry that was looked at and what each candidate's newest trial came to by then.
    `blocked` is what the record says of a slot that cannot go on, once known. `topology` is how its host's GPUs are joined,
    with the number of connections that had been lost when it was asked: a host that was booted anew may have other GPUs.
    `failed_end_s` is when the last launch ended that was not asked to.
    `ranks` are those of a server over several nodes as they were seen last, for `status`.
    """

    name: str
    settings: Settings
    policies: tuple[Policy, ...]
    store: Store
    host: Host
    verified: set[str] = field(default_factory=set)
    living: frozenset[str] = frozenset()
    generated: dict[str, int] = field(default_factory=dict)
    starting: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    live: Live = field(default_factory=Live)
    given: Given = field(default_factory=Given)
    failed_end_s: float = 0.0
    logs: dict[str, LogReader] = field(default_factory=dict)
    announced: str = ""
    blocked: str | None = None
    settled: set[int] = field(default_factory=set)
    learned: set[str] = field(default_factory=set)
    ranks: tuple[dict[str, Any], ...] = ()
    measured: dict[str, tuple[int, dict[str, tuple[str, dict[Level, float]]]]] = field(default_factory=dict)
    topology: tuple[int, Topology | None] | None = None

    async def learn_secrets(self) -> None:
        """Learn what must never be shown of a slot on another host, where its secret files are; kept in memory alone."""
        paths = set() if self.host.here else set(self.slot.secret_files.values()) - self.learned
        for path in paths:
            for node, host in zip(self.slot.members, members_of(self.host), strict=True):
                ran = await host.run(("cat", path), SECRET_TIMEOUT_S)
                if ran.code == 0 and (value := ran.output.strip()):
                    self.store.secrets |= {value}
                    log.hide(self.store.secrets)
                else:
                    log.get().warning("a secret file cannot be read", slot=self.name, path=path, host=node.host)
            self.learned.add(path)

    @property
    def slot(self) -> Slot:
        """The slot's settings."""
        return self.settings.slots[self.name]

    def take_secrets(self) -> None:
        """Learn the values that must never be shown, so that a server that prints one does not leak it.

        Again before each launch, for that is when the server reads them, and a key may have been changed since. Those on
        another host are learned anew by the next `learn_secrets`.
        """
        if not self.host.here:
            self.learned.clear()
            return
        values = set(self.store.secrets)
        for path in self.slot.secret_files.values():
            try:
                values.add(Path(path).read_text(encoding="utf-8").strip())
            except (OSError, ValueError):
                log.get().warning("a secret file cannot be read", slot=self.name, path=path)
        self.store.secrets = frozenset(v for v in values if v)
        log.hide(self.store.secrets)

    def engine(self, candidate: Candidate) -> Engine:
        """The reader of a candidate's engine."""
        return engine_for(candidate.engine)

    def objective(self, benchmark: Benchmark) -> Objective:
        """The slot's objective under a benchmark; one for a level the benchmark lacks falls back to its busiest.

        A single stream is a concurrency of 1, which a benchmark of rates does not have.
        """
        objective = self.settings.objective_of(self.name)
        if not benchmark.concurrencies and objective.constraints.single_stream_ratio_min is not None:
            constraints = objective.constraints.model_copy(update={"single_stream_ratio_min": None})
            objective = objective.model_copy(update={"constraints": constraints})
        if objective.level is not None and objective.level not in benchmark.levels:
            return objective.model_copy(update={"level": max(benchmark.levels)})
        return objective

    def log(self, launch_id: str, engine: Engine) -> LogReader:
        """The reader of a launch's log; one a launch, so that no line is read twice."""
        if launch_id not in self.logs:
            self.logs[launch_id] = LogReader(self.host, launch_id, engine, ranks=len(self.slot.members))
        return self.logs[launch_id]

    async def seen(self, launch_id: str) -> ServerSeen:
        """Look at a launch; where one of its ranks has ended, once the others have, too. Raise HostError if one stays."""
        until_s = clock.monotonic_s() + self.slot.stop_grace_s + RANKS_END_S
        while (seen := await self.host.inspect(launch_id)).failing:
            if clock.monotonic_s() > until_s:
                raise HostError(f"{seen.failing}, but not all can be: {seen.error or 'processes of them still live'}")
            await clock.sleep(RANKS_POLL_S)
        return seen

    def argv(self, candidate: Candidate, rank: int = 0) -> tuple[str, ...]:
        """The command of a candidate's server in this slot, or of one of its ranks."""
        place = Place(self.slot.place.host, self.slot.ports[rank])
        return self.engine(candidate).argv(candidate, place, self.settings.rank_of(self.name, rank))

    async def reach(self) -> Place:
        """Where we reach the slot's server: where it listens, or this end of a forwarded port."""
        return Place(*await self.host.reach(self.slot.place.host, self.slot.place.port))

    @asynccontextmanager
    async def probe(self, candidate: Candidate) -> AsyncIterator[Probe]:
        """A client for the slot's server."""
        async with Probe(await self.reach(), self.engine(candidate).endpoints(candidate)) as probe:
            yield probe

    def uncut(self, cuts: int) -> None:
        """Given how many connections had been lost before, raise HostUnreachable if one was lost since.

        What the server did not answer meanwhile is then no news of the server.
        """
        if self.host.cuts != cuts:
            names = " or ".join(dict.fromkeys(node.host for node in self.slot.members))
            raise HostUnreachable(f"the connection to host {names} was lost meanwhile: it is done again")

    def command(self, candidate: Candidate) -> str:
        """The candidate's command line as a person would type it, secrets hidden."""
        return command_line(redact_argv(self.argv(candidate), self.store.secrets), dict(candidate.launch.env))


def pulse(activity: Activity) -> Pulse:
    """Given a launch's signs of life, return them as the core counts them."""
    return Pulse(activity.read_bytes, activity.cpu_s, activity.rss_bytes, activity.log_bytes)
