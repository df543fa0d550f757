"""Checks a candidate before it may take a slot, in seconds and before anything is stopped.

Flags against the installed program's own help, contradictions, environment, GPUs, and who holds the slot's port. What is
a problem refuses the candidate; what is a warning is said and let through.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autotuner.core import topology as joining
from autotuner.core.candidate import Candidate
from autotuner.core.topology import Topology
from autotuner.edge import gpu
from autotuner.edge.helpcache import HelpCache, identity_of
from autotuner.edge.host import GpuUse, Host, PortHolder, launch_of_rank
from autotuner.edge.host_nodes import NodesHost, members_of
from autotuner.engines import engine_for, environment, llamacpp_flags, nccl, nodes, sglang_flags, vllm_flags
from autotuner.engines.flags import Findings, Help, against_help, read_help, without_help
from autotuner.errors import HostError, HostUnreachable
from autotuner.installed import engine_version
from autotuner.settings import Slot

PARALLEL_FLAGS = (("tp-size", "tp", "tensor-parallel-size"), ("pp-size", "pp", "pipeline-parallel-size"))
HELP_TIMEOUT_S = 180.0  # importing an engine takes half a minute on a cold disk
NVLINK_TIMEOUT_S = 10.0

_WARNINGS = {"sglang": sglang_flags.warnings, "vllm": vllm_flags.warnings, "llamacpp": llamacpp_flags.warnings}


def slot_problems(candidate: Candidate, slot: Slot) -> tuple[str, ...]:
    """Given a candidate and the slot it is for, return where it asks for GPUs that are not the slot's."""
    problems = []
    visible = candidate.launch.env.get("CUDA_VISIBLE_DEVICES")
    own = [node for node in slot.members if node.gpus]
    if visible is not None and own:
        shown = "; ".join(",".join(map(str, node.gpus)) + (f" on {node.host}" if slot.nodes else "") for node in own)
        problems.append(
            f"env.CUDA_VISIBLE_DEVICES = {visible!r} is not the candidate's to choose: the slot's GPUs are {shown}"
        )
    if slot.nodes:
        return (*problems, *_node_problems(candidate, slot))
    ranks = _gpu_ranks(candidate)
    if slot.gpus and ranks > len(slot.gpus):
        problems.append(f"it asks for {ranks} GPUs (tensor times pipeline parallel), the slot has {len(slot.gpus)}")
    return tuple(problems)


def _node_problems(candidate: Candidate, slot: Slot) -> tuple[str, ...]:
    """Where a candidate cannot be one server over the slot's nodes, which share its GPU ranks evenly."""
    count = len(slot.nodes)
    found = [*engine_for(candidate.engine).check_nodes(candidate, count)]
    each = nodes.ranks_of(candidate) // count if candidate.engine in {"sglang", "vllm"} else 0
    few = [node for node in slot.nodes if node.gpus and each > len(node.gpus)]
    found += [f"it asks for {each} GPUs on each node, node {node.host} has {len(node.gpus)}" for node in few]
    return tuple(found)


def _gpu_ranks(candidate: Candidate) -> int:
    ranks = 1
    for names in PARALLEL_FLAGS:
        asked = candidate.arg(*names)
        ranks *= asked if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0 else 1
    return ranks


def by_itself(
    candidate: Candidate,
    version: str | None = None,
    nvlink: bool | None = None,
    topology: Topology | None = None,
    gpus: tuple[int, ...] = (),
) -> Findings:
    """Given a candidate and what is known of the host, return what shows without asking its program."""
    problems = engine_for(candidate.engine).check(candidate)
    if candidate.engine == "llamacpp":
        problems += llamacpp_flags.problems(candidate)
    more = _WARNINGS.get(candidate.engine)
    found = Findings(problems, more(candidate) if more else ()) + environment.check(candidate, version, nvlink)
    return found + nccl.check(candidate, topology, gpus)


async def place_warnings(host: Host, slot: Slot, ours: Collection[str] | None = None) -> tuple[str, ...]:
    """Given a slot, return who else holds its port or its GPUs: named, never touched.

    `ours` tells which launches are this state's; None takes every launch for ours. Where the host hides a process while a
    server of ours is up, it is taken for that server. Of a slot over several nodes each is looked at.
    """
    if slot.nodes:
        found = list[str]()
        for rank, member in enumerate(members_of(host)):
            own = slot.on(rank)
            found += [f"{said} (node {own.host})" for said in await place_warnings(member, own, ours)]
        return tuple(found)
    try:
        holder = await host.port_holder(slot.port)
        gpus = await host.gpus(slot.gpus)
        launches = {pid: await host.launch_of(pid) for use in gpus for pid, _, _ in use.processes}
    except HostError as error:
        return (f"the slot's port and GPUs could not be looked at: {error}",)
    return _strangers(slot, holder, gpus, launches, ours)


def _strangers(
    slot: Slot,
    holder: PortHolder | None,
    gpus: tuple[GpuUse, ...],
    launches: Mapping[int, str | None],
    ours: Collection[str] | None,
) -> tuple[str, ...]:
    """Who of those that hold the port and the GPUs of one host is none of ours; `launches` has the launch of each process."""

    def mine(launch_id: str | None) -> bool:
        return launch_id is not None and (ours is None or launch_of_rank(launch_id) in ours)

    found = []
    if holder is not None:
        hidden = holder.pid is None and (ours is None or bool(ours))
        if not mine(holder.launch_id) and not hidden:
            pid = "" if holder.pid is None else f"pid {holder.pid} "
            launch = f", launch {holder.launch_id} of another state folder" if holder.launch_id else ""
            who = f"{pid}({holder.name}{launch})"
            found.append(f"port {slot.port} of the slot is held by {who}: nothing can be launched until it is free")
    for use in gpus:
        for pid_, name, mib in use.processes:
            if not mine(launches[pid_]):
                found.append(f"GPU {use.index} of the slot is used by pid {pid_} ({name}, {mib:.0f} MiB)")
    return tuple(found)


@dataclass
class Preflight:
    """Checks candidates against what is installed on a host; a program is asked for its flags once, over commands too."""

    host: Host
    cache: HelpCache = field(default_factory=lambda: HelpCache(None))
    _help: dict[tuple[str, ...], Help] = field(default_factory=dict)
    _versions: dict[tuple[str, ...], str | None] = field(default_factory=dict)
    _nvlink: list[bool | None] = field(default_factory=list)
    _topology: list[Topology | None] = field(default_factory=list)

    async def check(self, candidate: Candidate, *, strict: bool = True, gpus: tuple[int, ...] = ()) -> Findings:
        """Given a candidate and its slot's GPUs, return what would keep it from running, with the nearest right flag.

        And what to know. `strict` makes a program that cannot be asked a problem; else that is a warning.
        """
        argv = engine_for(candidate.engine).help_argv(candidate)
        version = await self._version(argv, candidate) if argv else None
        nvlink = await self._joined() if environment.wants_nvlink(candidate) else None
        topology = await self._how_joined() if nccl.wants_topology(candidate) else None
        found = by_itself(candidate, version, nvlink, topology, gpus) + Findings(
            await self._other_versions(candidate, version)
        )
        if argv is None:
            return found
        known = await self._known(argv, candidate.engine, version, installed_only=not strict)
        if isinstance(known, str):
            failed = Findings((known,)) if strict else Findings(warnings=(known,))
            return found + without_help(candidate, version) + failed
        said = against_help(candidate, known, version, _called(argv, candidate.engine, version))
        # What the engine's own check names is said once.
        named = tuple(problem.split(" ", 1)[0].rstrip(":") for problem in found.problems)
        fresh = tuple(p for p in said.problems if p.split(" ", 1)[0].rstrip(":") not in named)
        return found + Findings(fresh, said.warnings)

    async def _version(self, argv: tuple[str, ...], candidate: Candidate) -> str | None:
        if argv not in self._versions:
            self._versions[argv] = await engine_version(self.host, candidate)
        return self._versions[argv]

    async def _other_versions(self, candidate: Candidate, version: str | None) -> tuple[str, ...]:
        """The nodes on which another release of the engine is installed: ranks of one server talk to one another."""
        members = self.host.members if isinstance(self.host, NodesHost) and version else ()
        found = []
        for rank, member in enumerate(members[1:], 1):
            other = await engine_version(member.host, candidate)
            if other is not None and other != version:
                found.append(
                    f"rank {rank} would be {candidate.engine} {other} on {member.name}, and rank 0 is {version}: "
                    "install one release on all nodes"
                )
        return tuple(found)

    async def _known(
        self, argv: tuple[str, ...], engine: str, version: str | None, *, installed_only: bool
    ) -> Help | str:
        if argv in self._help:
            return self._help[argv]
        module = _module(argv)
        # What a program on another host depends on is not looked up, so it is asked each time.
        identity = identity_of(argv[0], version) if self.host.here else ""
        if installed_only and self.host.here and (not identity or (module and version is None)):
            what = (
                f"{module.partition('.')[0]} is not installed for {argv[0]}" if identity else f"there is no {argv[0]}"
            )
            return f"flags were not checked against the program: {what} on this host"
        if module and version is None:
            identity = ""  # an upgrade would go unnoticed
        found = self.cache.read(argv, identity) or await self._ask(argv, engine)
        if isinstance(found, str):
            return found  # it may have been the host's bad moment: the next candidate asks again
        self.cache.write(argv, identity, found)
        self._help[argv] = found
        return found

    async def _ask(self, argv: tuple[str, ...], engine: str) -> Help | str:
        try:
            ran = await self.host.run(argv, HELP_TIMEOUT_S)
        except HostUnreachable:
            raise
        except HostError as error:
            return str(error)
        if ran.code != 0:
            last = ran.output.strip().splitlines()[-1:] or ["no output"]
            return f"{' '.join(argv)} failed with exit code {ran.code}: {last[0]}"
        return read_help(engine, ran.output)

    async def _joined(self) -> bool | None:
        """Whether the host's GPUs are joined by NVLink; None if nvidia-smi does not say."""
        if not self._nvlink:
            try:
                ran = await self.host.run(gpu.NVLINK_QUERY, NVLINK_TIMEOUT_S)
            except HostError:
                self._nvlink.append(None)
            else:
                self._nvlink.append(gpu.has_nvlink(ran.output) if ran.code == 0 else None)
        return self._nvlink[0]

    async def _how_joined(self) -> Topology | None:
        """How the host's GPUs are joined; None if nvidia-smi does not say."""
        if not self._topology:
            try:
                ran = await self.host.run(joining.QUERY, NVLINK_TIMEOUT_S)
            except HostError:
                self._topology.append(None)
            else:
                self._topology.append(joining.parse(ran.output) if ran.code == 0 else None)
        return self._topology[0]


def _module(argv: tuple[str, ...]) -> str:
    return argv[2] if argv[1:2] == ("-m",) else ""


def _called(argv: tuple[str, ...], engine: str, version: str | None) -> str:
    """The program in words: `sglang 0.5.12`, the path of a binary, `the embedded llama-server`."""
    if not _module(argv):
        return argv[0]
    if engine == "llamacpp":
        return "the embedded llama-server"
    return f"{engine} {version}" if version else engine
