"""The daemon's own settings, autotuner.toml: slots, benchmarks, objective, budgets, windows, and where things live.

Reads a file and validates it; an error names file, line, key and the nearest right one. A slot may override the
objective, since two models seldom want the same one.
"""

import datetime as dt
import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from autotuner.bench.benchmark import Benchmark, level_name
from autotuner.bench.placement import AUTO, checked
from autotuner.bench.records import ACCEPTED
from autotuner.core.confirm import Noise
from autotuner.core.objective import Objective
from autotuner.core.policy import Policy, load_policy
from autotuner.core.source import Source, problem_at, validate, wrong_at
from autotuner.edge.datasets import CHECKED, RECORDS_MAX, with_dataset
from autotuner.edge.destination import LOCAL, NAME_PATTERN, Destination, HostName, Word
from autotuner.engines.base import Place, Rank
from autotuner.errors import InvalidInput, NotFound, Problem
from autotuner.nodes import Node, from_first_node, meeting_address, meeting_port, ports, taken_gpus, taken_ports
from autotuner.shipped import folder

ENV_VAR = "AUTOTUNER_SETTINGS"
PLACES = ("autotuner.toml", "~/.config/autotuner/autotuner.toml", "/etc/autotuner/autotuner.toml")
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = get_args(Day)
FOLDERS = {"state_dir": "state_dir", "journal_dir": "journal", "log_dir": "launches"}  # key -> where that comes to lie
PLACE = ("host", "listen", "port", "gpus", "nodes", "dist_addr", "dist_port")
REQUESTS_MIN = 30  # a level with fewer has one or none beyond its 97th percentile

SlotName = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Clock = Annotated[str, StringConstraints(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Slot(_Strict):
    """A host, a GPU set and a port: it holds at most one server. `host` is `local`, or one of the settings' hosts.

    With `nodes` its server is over several hosts, and `host` and `gpus` are those of the first; the ranks meet there, at
    `dist_addr` and `dist_port`.
    `secret_files` maps a variable to a file whose content the server gets as that variable; the value itself never
    enters the store, the journal or an argv. `drain_s` is how long requests on a server may take to end before it stops.
    `client_cores` are the host's cores that the load client is bound to.
    """

    host: HostName = LOCAL
    listen: str = "127.0.0.1"
    port: int = Field(ge=1, le=65535)
    gpus: tuple[int, ...] = ()
    benchmark: str = ""
    objective: Objective | None = None
    secret_files: dict[str, str] = Field(default_factory=dict)
    start_timeout_s: float = Field(default=1800.0, gt=0)
    stop_grace_s: float = Field(default=30.0, gt=0)
    drain_s: float = Field(default=30.0, ge=0)
    client_cores: Annotated[str, AfterValidator(checked)] = AUTO
    nodes: tuple[Node, ...] = ()
    dist_addr: Word | None = None
    dist_port: int | None = Field(default=None, ge=1, le=65535)

    @model_validator(mode="before")
    @classmethod
    def _serves_from_its_first_node(cls, value: Any) -> Any:
        return from_first_node(value)

    @property
    def members(self) -> tuple[Node, ...]:
        """Where its server runs, rank 0 first: one host, unless it has nodes."""
        return self.nodes or (Node(host=self.host, gpus=self.gpus),)

    def on(self, rank: int) -> "Slot":
        """The part of the slot that is on one of its nodes, as a slot on that host alone."""
        node = self.members[rank]
        return self.model_copy(update={"host": node.host, "gpus": node.gpus, "port": self.ports[rank], "nodes": ()})

    @property
    def gpu_indices(self) -> tuple[int, ...]:
        """The GPUs as its host names them: its own numbers, or over several nodes counted on from node to node."""
        return tuple(range(sum(len(node.gpus) for node in self.nodes))) if self.nodes else self.gpus

    @property
    def gpu_count(self) -> int:
        """How many GPUs its server takes, over all nodes; 1 where none is named."""
        return max(1, sum(len(node.gpus) for node in self.members))

    @property
    def ports(self) -> tuple[int, ...]:
        """The port of each rank on its node."""
        return ports(self.members, self.port)

    @property
    def place(self) -> Place:
        """Where the slot's server listens, as its own host reaches it."""
        return Place("127.0.0.1" if self.listen in {"0.0.0.0", ""} else self.listen, self.port)  # noqa: S104


class Budget(_Strict):
    """What a campaign may cost. None means without limit.

    `proposals` is the number of follow-ups it may queue by itself, `proposal_depth` how many may follow from one another.
    """

    gpu_hours: float | None = Field(default=None, gt=0)
    trials: int | None = Field(default=None, gt=0)
    deadline: dt.datetime | None = None
    proposals: int = Field(default=8, ge=0)
    proposal_depth: int = Field(default=2, ge=1)

    @field_validator("deadline")
    @classmethod
    def _in_utc(cls, value: dt.datetime | None) -> dt.datetime | None:
        """A time without a zone is the host's local time, which is what an operator means by it."""
        return value.astimezone(dt.UTC) if value is not None else None


class Window(_Strict):
    """Trials run only inside one of the windows. Local time; `until` not after `from` runs past midnight."""

    days: tuple[Day, ...] = DAYS
    from_: Clock = Field(alias="from")
    until: Clock

    def contains(self, moment: dt.datetime) -> bool:
        """Given a local time, tell whether it is inside; a window past midnight belongs to the day it began on."""
        clock = f"{moment:%H:%M}"
        today, yesterday = DAYS[moment.weekday()], DAYS[moment.weekday() - 1]
        if self.from_ < self.until:
            return today in self.days and self.from_ <= clock < self.until
        return (today in self.days and clock >= self.from_) or (yesterday in self.days and clock < self.until)


class Settings(_Strict):
    """Everything the daemon is told."""

    state_dir: Path
    journal_dir: Path | None = None
    journal_file_mib: int = Field(default=16, ge=1)
    log_dir: Path | None = None
    policies_dir: Path | None = None
    launcher: Literal["auto", "systemd", "cgroup", "shim"] = "auto"
    restore: Literal["idle", "always"] = "idle"
    propose: Literal["queue", "suggest", "off"] = "queue"
    cycle_s: float = Field(default=1.0, ge=0.05, le=30)
    serving_probe_every_s: float = Field(default=60.0, ge=0)
    disk_free_min_mib: int = Field(default=64, ge=0)
    keep_launches: int = Field(default=50, ge=1)
    log_mib_max: int = Field(default=64, ge=1)
    slots: dict[SlotName, Slot] = Field(min_length=1)
    hosts: dict[HostName, Destination] = Field(default_factory=dict)
    benchmarks: dict[str, Benchmark] = Field(default_factory=lambda: {"default": Benchmark()}, min_length=1)
    objective: Objective = Objective()
    noise: Noise = Noise()
    budget: Budget = Budget()
    window: tuple[Window, ...] = ()

    @model_validator(mode="after")
    def _slots_do_not_overlap(self) -> Self:
        held: dict[tuple[str, str, int], str] = {}
        for name, slot in self.slots.items():
            taken = [("port", t) for t in taken_ports(slot.members, slot.port, slot.dist_port)]
            taken += [("GPU", t) for t in taken_gpus(slot.members)]
            for what, (host, number, key) in taken:
                if other := held.get((what, host, number)):
                    both = f"slots {other} and {name} share" if other != name else "is taken twice on one host:"
                    raise wrong_at(("slots", name, *key), f"{both} {what} {number}")
                held[what, host, number] = name
        return self

    @model_validator(mode="after")
    def _hosts_lead_somewhere(self) -> Self:
        if LOCAL in self.hosts:
            raise wrong_at(("hosts", LOCAL), "local is this machine, and no name for another host")
        for name in self.hosts:
            seen, at = [name], self.hosts[name].jump
            while at:
                if at not in self.hosts or at in seen:
                    why = "leads back to it" if at in seen else f"names {at}, which is no host of these settings"
                    raise wrong_at(("hosts", seen[-1], "jump"), why)
                seen.append(at)
                at = self.hosts[at].jump
        return self

    @property
    def database(self) -> Path:
        """The state database."""
        return self.state_dir / "state.db"

    @property
    def lock_file(self) -> Path:
        """Held by whoever works the slots: the daemon, or `restore-best` without one."""
        return self.state_dir / "daemon.lock"

    @property
    def journal(self) -> Path:
        """The folder with a folder a slot, which holds the slot's journal."""
        return self.journal_dir or self.state_dir / "journal"

    @property
    def seal_key(self) -> Path:
        """The key from which the next journal that is sealed gets its own; there only once sealing was set up."""
        return self.state_dir / "seal.key"

    def seal_key_of(self, slot: str) -> Path:
        """Given a slot, return the key that its journal's next entry is sealed with."""
        return self.state_dir / "seal.keys" / slot

    @property
    def launches(self) -> Path:
        """The folder with one folder a launch: its log, its identity, its exit status."""
        return self.log_dir or self.state_dir / "launches"

    @property
    def cache(self) -> Path:
        """What can be found out again: the flags that installed programs have."""
        return self.state_dir / "cache"

    @property
    def proposals(self) -> Path:
        """The folder with the candidates that rules proposed."""
        return self.state_dir / "proposals"

    def way_to(self, host: str) -> tuple[tuple[str, Destination], ...]:
        """Given a host over SSH, return the way there: each jump host by name, the host itself last. Raise NotFound."""
        if host not in self.hosts:
            raise NotFound(f"there is no host called {host}; known: {', '.join(self.hosts) or 'none'}")
        destination = self.hosts[host]
        return (*(self.way_to(destination.jump) if destination.jump else ()), (host, destination))

    def rank_of(self, slot: str, number: int) -> Rank | None:
        """Given a slot over several nodes, return one of its server's ranks; None where one process is the whole server."""
        own = self.slots[slot]
        address = meeting_address(own.members, own.dist_addr, self.hosts)
        if not own.nodes or address is None:
            return None
        return Rank(number, len(own.nodes), Place(address, meeting_port(own.port, own.dist_port)))

    def url_of(self, slot: str) -> str:
        """Given a slot, return where its server is, for people: the address, and the host where it is not this one."""
        own = self.slots[slot]
        return own.place.url if own.host == LOCAL else f"{own.place.url} on host {own.host}"

    def benchmark_name(self, slot: str, wanted: str | None = None) -> str:
        """Given a slot and perhaps the benchmark a candidate asks for, return its name. Raise NotFound if there is none."""
        name = wanted or self.slots[slot].benchmark or next(iter(self.benchmarks))
        if name not in self.benchmarks:
            raise NotFound(f"there is no benchmark called {name}; known: {', '.join(self.benchmarks)}")
        return name

    def objective_of(self, slot: str) -> Objective:
        """Given a slot, return its own objective, or the common one."""
        return self.slots[slot].objective or self.objective

    def objective_in_words(self, slot: str) -> str:
        """Given a slot, return its objective as people read it."""
        return self.objective_of(slot).described(self.benchmarks[self.benchmark_name(slot)].load)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed, and yet hardly what was meant; each once."""
        found: list[str] = []
        for slot in self.slots:
            name = self.benchmark_name(slot)
            found += self.objective_of(slot).warnings(name, self.benchmarks[name])
        for name, benchmark in self.benchmarks.items():
            found += _few_requests(name, benchmark)
        return tuple(dict.fromkeys(found))

    def window_closed(self, moment: dt.datetime) -> str:
        """Given a local time, return why no trial may run then; empty if it may."""
        if not self.window or any(window.contains(moment) for window in self.window):
            return ""
        shown = "; ".join(f"{'/'.join(w.days)} {w.from_} to {w.until}" for w in self.window)
        return f"outside the maintenance windows ({shown})"


def needs_restart(old: Settings, new: Settings) -> tuple[str, ...]:
    """Given the settings in force and new ones, return the keys that cannot change while servers and files depend on them.

    Of a slot that is its place: a server that runs now was started for it. What is used at the next start, stop or trial can.
    """
    changed = [key for key in FOLDERS if getattr(old, FOLDERS[key]) != getattr(new, FOLDERS[key])]
    changed += ["launcher"] if old.launcher != new.launcher else []
    changed += [f"[slots.{name}] (removed)" for name in old.slots if name not in new.slots]
    changed += [f"[slots.{name}] (added)" for name in new.slots if name not in old.slots]
    names = sorted(old.hosts.keys() | new.hosts.keys())
    changed += [f"[hosts.{name}]" for name in names if old.hosts.get(name) != new.hosts.get(name)]
    for name in old.slots.keys() & new.slots.keys():
        before, after = old.slots[name], new.slots[name]
        changed += [f"slots.{name}.{key}" for key in PLACE if getattr(before, key) != getattr(after, key)]
    return tuple(changed)


def find_settings(given: str | None) -> Path:
    """Given the path from the command line or None, return the settings file to use. Raise NotFound naming the places."""
    wanted = given or os.environ.get(ENV_VAR)
    if wanted:
        path = Path(wanted).expanduser()
        if not path.is_file():
            raise NotFound(f"there is no settings file at {path}")
        return path
    for place in PLACES:
        path = Path(place).expanduser()
        if path.is_file():
            return path
    raise NotFound(
        f"no settings file found; looked for {', '.join(PLACES)}. Name one with --settings or ${ENV_VAR}; "
        "examples/kimi-k2.5/autotuner.toml is a start"
    )


def load_settings(path: Path, *, whole: bool = False) -> Settings:
    """Given a settings file, return the settings, relative paths taken from its folder. Raise InvalidInput.

    The beginning of each dataset that it names is checked; with `whole` all that is used of it.
    """
    source = read_source(path)
    settings = validate(Settings, source)
    problems = _cross_problems(source, settings)
    if problems:
        raise InvalidInput(problems)
    base = path.resolve().parent
    settings = settings.model_copy(
        update={"benchmarks": _with_datasets(source, settings.benchmarks, base, whole=whole)}
    )
    keys = ("state_dir", "journal_dir", "log_dir", "policies_dir")
    paths = {key: base / value.expanduser() for key in keys if (value := getattr(settings, key)) is not None}
    hosts = {name: _from_folder(host, base) for name, host in settings.hosts.items()}
    return settings.model_copy(update={**paths, "hosts": hosts})


def load_policies(settings: Settings) -> tuple[Policy, ...]:
    """Given the settings, return the policies of their folder, the shipped ones unless another is named."""
    return policies_in(settings.policies_dir or folder("policies"))


def policies_in(where: Path) -> tuple[Policy, ...]:
    """Given a folder, return the policies of its files in the order of their names. Raise NotFound or InvalidInput."""
    if not where.is_dir():
        raise NotFound(f"there is no policies folder at {where}")
    paths = sorted(where.glob("*.toml"))
    if not paths:
        raise NotFound(f"{where} has no rules (*.toml); such a folder replaces the shipped rules, so copy those first")
    policies: list[Policy] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            source = read_source(path)
            policies.append(load_policy(Source(path.name, source.text)))
        except InvalidInput as error:
            problems += error.problems
    if problems:
        raise InvalidInput(problems)
    return tuple(policies)


def read_source(path: Path) -> Source:
    """Given a path, return its text under its own name. Raise InvalidInput if it cannot be read or is no UTF-8 text."""
    try:
        return Source(str(path), path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InvalidInput([Problem(str(path), "is not UTF-8 text", line)]) from None
    except OSError as error:
        raise InvalidInput([Problem(str(path), f"cannot be read: {error.strerror}")]) from None


def _from_folder(host: Destination, base: Path) -> Destination:
    """Take the paths of our own keys from the settings' folder, as all others."""
    paths = {"identity_file": host.identity_file, "agent": host.agent}
    return host.model_copy(update={key: base / path.expanduser() for key, path in paths.items() if path is not None})


def _with_datasets(
    source: Source, benchmarks: dict[str, Benchmark], base: Path, *, whole: bool
) -> dict[str, Benchmark]:
    """Given the benchmarks, return them with what their datasets are. Raise InvalidInput for any that is wrong."""
    found, problems = dict(benchmarks), list[Problem]()
    for name, benchmark in benchmarks.items():
        if not benchmark.dataset:
            continue
        if not (file := base / Path(benchmark.dataset).expanduser()).is_file():
            problems.append(problem_at(source, ("benchmarks", name, "dataset"), f"there is no file {file}", ACCEPTED))
            continue
        try:
            found[name] = with_dataset(benchmark, base, RECORDS_MAX if whole else CHECKED)
        except InvalidInput as error:
            problems += error.problems
    if problems:
        raise InvalidInput(problems)
    return found


def _cross_problems(source: Source, settings: Settings) -> list[Problem]:
    problems = []
    for name, slot in settings.slots.items():
        problems += _host_problems(source, settings, name)
        if slot.benchmark and slot.benchmark not in settings.benchmarks:
            hint = f"known: {', '.join(settings.benchmarks)}"
            problems.append(
                problem_at(source, ("slots", name, "benchmark"), f"there is no benchmark {slot.benchmark}", hint)
            )
        bad = [v for v in slot.secret_files if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", v)]
        problems += [problem_at(source, ("slots", name, "secret_files", v), "is no variable name") for v in bad]
        if not problems:
            problems += _level_problems(source, settings, name)
    return problems


def _host_problems(source: Source, settings: Settings, name: str) -> list[Problem]:
    slot, known = settings.slots[name], {LOCAL, *settings.hosts}
    hint = f"known: {', '.join([LOCAL, *settings.hosts])}; set one up with: autotuner hosts add"
    found = [
        problem_at(source, ("slots", name, *key), f"there is no host {node.host}", hint)
        for rank, node in enumerate(slot.members)
        if node.host not in known
        for key in [("nodes", rank, "host") if slot.nodes else ("host",)]
    ]
    if not found and meeting_address(slot.members, slot.dist_addr, settings.hosts) is None and slot.nodes:
        message = "needs dist_addr, the address at which its other nodes reach this machine"
        found.append(problem_at(source, ("slots", name, "nodes"), message, "where rank 0 is, the ranks meet"))
    return found


def _level_problems(source: Source, settings: Settings, name: str) -> list[Problem]:
    """An objective or a constraint on a level that is never measured would silently decide otherwise than it says."""
    objective, own = settings.objective_of(name), settings.slots[name].objective
    benchmark = settings.benchmarks[settings.benchmark_name(name)]
    levels = benchmark.levels
    table = ("slots", name, "objective") if own else ("objective",)
    single = ("constraints", "single_stream_ratio_min")
    if not benchmark.concurrencies and objective.constraints.single_stream_ratio_min is not None:
        message = f"needs concurrency 1, and the benchmark of slot {name} sends requests at rates"
        return [problem_at(source, (*table, *single), message, "limit ttft_p99_ms_max or tpot_p99_ms_max instead")]
    hint = f"levels: {', '.join(map(str, levels))}"
    return [
        problem_at(source, (*table, *key), f"the benchmark of slot {name} has no level {level}", hint)
        for key, level in objective.named_levels
        if level not in levels
    ]


def _few_requests(name: str, benchmark: Benchmark) -> list[str]:
    """A rate so low that its level has too few requests to tell percentiles or goodput of two servers apart."""
    least = min(benchmark.levels)
    sent = least * benchmark.seconds
    if benchmark.load != "request-rate" or sent >= REQUESTS_MIN:
        return []
    at = level_name(benchmark.load, least)
    few = f"benchmark {name} sends about {sent:.0f} requests in its {benchmark.seconds:g} s at {at}, too few to compare two"
    return [f"{few} servers by: set seconds to {math.ceil(REQUESTS_MIN / least)} or more, or take faster rates"]
