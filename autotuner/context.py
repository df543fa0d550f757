"""What the actions of one slot share: its settings, store and host, and what this daemon knows of its servers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from autotuner import log
from autotuner.bench.benchmark import Benchmark, Level
from autotuner.core.candidate import Candidate
from autotuner.core.effective import merge, overlay
from autotuner.core.nccl import Nccl, absorb
from autotuner.core.objective import Objective
from autotuner.core.policy import Policy
from autotuner.core.redact import redact_argv
from autotuner.core.shell import command_line
from autotuner.core.starting import Pulse
from autotuner.core.topology import Topology
from autotuner.edge.host import Activity, Host
from autotuner.edge.probes import Probe
from autotuner.edge.store import Store
from autotuner.engines import engine_for
from autotuner.engines.base import Effective, Engine, LogFact, NcclSaid, Place
from autotuner.engines.factreader import FactReader
from autotuner.errors import HostUnreachable
from autotuner.settings import Settings, Slot

SECRET_TIMEOUT_S = 10.0
TAIL_LINES = 400  # kept of each log for a diagnosis; the whole log stays in the launch's folder


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
    else's. `own` are pids that were seen on the GPUs as its processes. `unread` is why the GPUs cannot be read, since
    `unread_s`; `failed` if that was an error, `told` once an entry says so.
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
class LogReader:
    """Reads a launch's log from where it stopped; keeps the last lines and what the server and NCCL said they resolved."""

    host: Host
    launch_id: str
    engine: Engine
    offset: int = 0
    said: dict[tuple[str, str], Effective] = field(default_factory=dict)  # by source and rank, later over earlier
    nccl: Nccl = field(default_factory=Nccl)
    _reader: FactReader = field(init=False)

    def __post_init__(self) -> None:
        self._reader = FactReader(self.engine, TAIL_LINES)

    @property
    def running_cap(self) -> int | None:
        """The requests that the whole server runs at once, as far as its log says."""
        return self.effective.running_cap

    @property
    def effective(self) -> Effective:
        """What the server resolved, as far as its log says."""
        return merge(self.said.values())

    async def facts(self) -> tuple[LogFact, ...]:
        """Return the facts of the lines that are new since the last call."""
        found: list[LogFact] = []
        while data := await self.host.read_log(self.launch_id, self.offset):
            self.offset += len(data)
            found += self._reader.feed(data.replace(b"\0", b""))  # zeros are the middle of a log that was cut
        self._keep(found)
        return tuple(found)

    async def rest(self) -> tuple[str, ...]:
        """Read to the end and return the last lines: the server has ended."""
        await self.facts()
        self._keep(self._reader.flush())
        return self._reader.tail

    @property
    def lines(self) -> int:
        """How many lines were read so far."""
        return self._reader.lines

    def since(self, line: int) -> tuple[str, ...]:
        """The lines after this many, as far as they are kept."""
        return self._reader.since(line)

    def _keep(self, facts: list[LogFact]) -> None:
        for fact in facts:
            if isinstance(fact, Effective):
                key = (fact.source, fact.rank)
                self.said[key] = overlay(self.said[key], fact) if key in self.said else fact
        self.nccl = absorb(self.nccl, (fact for fact in facts if isinstance(fact, NcclSaid)))


@dataclass
class SlotContext:
    """One slot's world. `living` holds the launches seen alive last, `verified` those that generated tokens for this daemon.

    `settled` are the trials whose proposals it has tried to work out, `refused` the launches that the host could not start
    when this daemon told it to, `learned` the secret files of another host that were read;
    `measured` has, by benchmark, the last entry that was looked at and what each candidate's newest trial came to by then.
    `blocked` is what the record says of a slot that cannot go on, once known. `topology` is how its host's GPUs are joined,
    with the number of connections that had been lost when it was asked: a host that was booted anew may have other GPUs.
    `failed_end_s` is when the last launch ended that was not asked to.
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
    measured: dict[str, tuple[int, dict[str, tuple[str, dict[Level, float]]]]] = field(default_factory=dict)
    topology: tuple[int, Topology | None] | None = None

    async def learn_secrets(self) -> None:
        """Learn what must never be shown of a slot on another host, where its secret files are; kept in memory alone."""
        paths = set() if self.host.here else set(self.slot.secret_files.values()) - self.learned
        for path in paths:
            ran = await self.host.run(("cat", path), SECRET_TIMEOUT_S)
            if ran.code == 0 and (value := ran.output.strip()):
                self.store.secrets |= {value}
                log.hide(self.store.secrets)
            else:
                log.get().warning("a secret file cannot be read", slot=self.name, path=path, host=self.slot.host)
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
            self.logs[launch_id] = LogReader(self.host, launch_id, engine)
        return self.logs[launch_id]

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
            raise HostUnreachable(f"the connection to host {self.slot.host} was lost meanwhile: it is done again")

    def command(self, candidate: Candidate) -> str:
        """The candidate's command line as a person would type it, secrets hidden."""
        argv = self.engine(candidate).argv(candidate, self.slot.place)
        return command_line(redact_argv(argv, self.store.secrets), dict(candidate.launch.env))


def pulse(activity: Activity) -> Pulse:
    """Given a launch's signs of life, return them as the core counts them."""
    return Pulse(activity.read_bytes, activity.cpu_s, activity.rss_bytes, activity.log_bytes)
