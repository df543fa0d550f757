"""The simulated host: servers that go wrong in every known way, strangers, GPU memory, and calls that fail. It tells the truth to
the checker alone.

It has the rules of the real one: a launch that was written down is claimed by its shim or revoked by the daemon, never both; what a
server leaves behind lives until it is killed; GPU memory comes back when the driver pleases.
"""

import asyncio
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Protocol

from autotuner.edge.host import Activity, GpuUse, LaunchSpec, PortHolder, Ran, Readings, ServerSeen
from autotuner.errors import DiskFull, HostError
from torture.simworld import World

FIRST_PID = 10_000
GPU_MIB, LOADED_MIB, IDLE_MIB = 80_000.0, 60_000.0, 400.0
NEVER = float("inf")
LATE_S = (3.0, 15.0, 40.0, 150.0, 700.0)
UNREAD_S = (1.0, 20.0, 200.0)
VERSION = "0.10.1"
ENGINE_LINES = (
    "INFO 03-01 12:00:00 [api_utils.py:286] non-default args: {'model': 'org/model'}\n",
    "INFO 03-01 12:00:01 [core.py:133] Initializing a V1 LLM engine (v0.10.1) with config: model='org/model', dtype=torch.bfloat16\n",
    "INFO 03-01 12:00:02 [gpu_model_runner.py:3021] Starting to load model org/model...\n",
    "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.00s/it]\n",
    "INFO 03-01 12:00:04 [default_loader.py:501] Loading weights took 2.02 seconds\n",
    "INFO 03-01 12:00:05 [backends.py:612] Dynamo bytecode transform time: 4.10 s\n",
    "INFO 03-01 12:00:06 [gpu_worker.py:298] Available KV cache memory: 83.60 GiB\n",
    "INFO 03-01 12:00:07 [kv_cache_utils.py:2327] GPU KV cache size: 684,832 tokens\n",
    "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE): 100%|##########| 20/20 [00:02<00:00,  9.00it/s]\n",
    "INFO 03-01 12:00:09 [core.py:402] init engine (profile, create kv cache, warmup model) took 5.41 s\n",
    "INFO:     Application startup complete.\n",
)
DEATHS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
    "RuntimeError: NCCL error: unhandled cuda error\n",
    "EngineDeadError: EngineCore encountered an issue. See stack trace above for the root cause.\n",
    "Segmentation fault (core dumped)\n",
)


@dataclass
class Nature:
    """What a candidate's servers are like: how fast, and what is wrong with all of them until it is mended."""

    name: str
    argv: tuple[str, ...]
    real_lines: bool
    tok_s: float
    start_s: float
    broken: str = ""  # "", "exits", "hangs", "crashes": every launch of it, until `mended`
    mended: bool = True


@dataclass
class Server:
    """One launch as it really is."""

    spec: LaunchSpec
    nature: Nature
    port: int
    gpus: tuple[int, ...]
    state: str = "written"  # then "claimed" or "revoked"
    boot: int = 0
    claimed_at: float = 0.0
    ready_at: float = NEVER
    hangs_at: float = NEVER
    main: bool = False
    workers: bool = False
    workers_have_port: bool = False
    shim: bool = True
    exit_code: int | None = None
    error: str = ""
    lies: bool = False
    mute: bool = False
    unkillable_until: float = 0.0
    stop_s: float = 0.2
    gpu_late_s: float = 0.0
    gpu_listed: bool = False
    pid: int = 0
    gpu_until: float = 0.0
    gone_at: float = 0.0
    given_up: bool = False  # something was started beside its memory, because nobody could read the GPUs
    blind: bool = False  # it was started while nobody could, so that nobody knows what it must give back
    dying: bool = False
    gone: bool = False
    generated_at: float = -NEVER
    log: bytes = b""
    said: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether any process of it lives."""
        return self.main or self.workers


class Truth(Protocol):
    """What the checker wants to hear from the host."""

    def starting(self, server: Server) -> None: ...


@dataclass
class Stranger:
    """A process that is not ours, on a slot's port or GPUs."""

    port: bool
    gpu: bool
    since: float


class SimHost:
    """The Host that the simulated daemon has, as if it were its own machine; `slots` maps a name to its port and GPUs."""

    here, can_bench, cuts = True, False, 0

    def __init__(self, world: World, slots: dict[str, tuple[int, tuple[int, ...]]], natures: list[Nature]) -> None:
        self.world = world
        self.slots = slots
        self.natures = {nature.argv: nature for nature in natures}
        self.servers: dict[str, Server] = {}
        self.by_slot: dict[str, list[Server]] = {name: [] for name in slots}
        self.strangers: dict[str, Stranger] = {}
        self.truth: Truth | None = None
        self.port_seen: dict[int, PortHolder | None] = {}
        self.gpu_seen: dict[int, GpuUse] = {}
        self.unread_until_s = 0.0
        self.unread_since: dict[int, float] = {}  # by GPU: the first of the reads that failed in a row
        self.disk_full = False
        self.on_death: Callable[[], None] = lambda: None
        self._rng = world.rng("host")
        self._count = 0

    # --- what is really there

    def alive_in(self, slot: str) -> list[Server]:
        """The launches of a slot of which anything lives."""
        return [server for server in self.by_slot[slot] if server.alive]

    def on_port(self, port: int) -> Server | Stranger | None:
        """Who listens."""
        slot = next(name for name, (its, _) in self.slots.items() if its == port)
        stranger = self.strangers.get(slot)
        if stranger is not None and stranger.port:
            return stranger
        for server in self.by_slot[slot]:
            if (server.main and self.world.now >= server.ready_at) or (server.workers and server.workers_have_port):
                return server
        return None

    def gpu_held(self, server: Server) -> bool:
        """Whether memory of it is still taken, by what lives or by what the driver has not given back."""
        return bool(server.gpus) and server.state == "claimed" and (server.alive or self.world.now < server.gpu_until)

    # --- what happens to servers

    def claim(self, server: Server) -> None:
        """The shim takes the launch, unless the daemon took it back before."""
        if server.state != "written" or server.boot != self.world.boots:
            return
        server.state = "claimed"
        server.claimed_at = self.world.now
        if self.truth is not None:
            self.truth.starting(server)
        slot = server.spec.slot
        if self.alive_in(slot):
            server.error = "another server holds the slot"
            return
        server.main = True
        blocked = self.on_port(server.port) is not None
        short = any(self.gpu_held(other) for other in self.by_slot[slot] if other is not server)
        short = short or (bool(server.gpus) and slot in self.strangers and self.strangers[slot].gpu)
        self._fate(server, doomed=blocked or short)

    def _fate(self, server: Server, *, doomed: bool) -> None:
        """Decide now what will become of a launch; it comes by the clock, whoever watches."""
        world, strike, rng, nature = self.world, self.world.faults.strike, self._rng, server.nature
        broken = "" if nature.mended else nature.broken
        start_s = nature.start_s * rng.uniform(0.9, 1.3)
        if strike("server starts slowly"):
            start_s *= rng.uniform(2, 6)
        self._talk(server, start_s)
        server.stop_s = rng.uniform(1.0, 4.0) if strike("stop takes long") else 0.2
        server.gpu_late_s = rng.choice(LATE_S) if strike("GPU memory comes back late") else 0.0
        server.gpu_late_s = NEVER if strike("GPU memory never comes back") else server.gpu_late_s
        server.gpu_listed = rng.random() < 0.3
        server.workers_have_port = strike("workers hold the port")
        server.mute = strike("server generates nothing")
        if strike("stop fails"):
            server.unkillable_until = world.now + rng.uniform(10, 200)
        if strike("shim is killed"):
            world.after(rng.uniform(0.5, 40), lambda: self._lose_shim(server))
        if doomed or broken == "exits" or strike("server exits early"):
            self._die_at(server, world.now + rng.uniform(0.0, 1.0), rng.choice((1, 2, 127)))
        elif broken == "crashes" or strike("server crashes in its start"):
            self._die_at(server, world.now + rng.uniform(0.1, 0.99) * start_s, rng.choice((1, -9, -11)))
        elif broken == "hangs" or strike("server hangs in its start") or strike("server never starts"):
            server.hangs_at = world.now + rng.uniform(0.1, 0.9) * start_s
        else:
            server.ready_at = world.now + start_s
            server.lies = strike("server lies about its health")
            if strike("server crashes while it serves"):
                self._die_at(server, server.ready_at + rng.choice((0.5, 5.0, 30.0, 200.0)) * rng.random(), -6)
            if strike("server hangs while it serves"):
                server.hangs_at = server.ready_at + rng.uniform(0.0, 40.0)

    def _talk(self, server: Server, start_s: float) -> None:
        if server.nature.real_lines:
            step_s = start_s / len(ENGINE_LINES)
            server.said = [(self.world.now + i * step_s, line.encode()) for i, line in enumerate(ENGINE_LINES)]

    def _die_at(self, server: Server, when: float, code: int) -> None:
        self.world.at(when, lambda: self.die(server, code))

    def die(self, server: Server, code: int) -> None:
        """The server's main process ends by itself; its workers may outlive it."""
        if not server.main:
            return
        server.main = False
        server.exit_code = code
        self.on_death()
        if server.nature.real_lines:
            server.said.append((self.world.now, self._rng.choice(DEATHS).encode()))
        if self.world.faults.strike("workers outlive their server"):
            server.workers = True
            linger_s = self._rng.choice((2.0, 2.0, 20.0, 120.0)) if not server.shim else 2.0
            self.world.after(linger_s * self._rng.random(), lambda: self.clear(server))
        else:
            self.clear(server)

    def clear(self, server: Server) -> None:
        """Nothing of the launch lives any more."""
        if server.gone:
            return
        server.gone = True
        server.main = server.workers = False
        server.gone_at = self.world.now
        server.gpu_until = self.world.now + server.gpu_late_s

    def _lose_shim(self, server: Server) -> None:
        """The shim is killed: the server goes with it, its workers may not, and no end is recorded."""
        if server.main:
            server.shim = False
            server.error = "its end was not recorded"
            self.die(server, -9)
            server.exit_code = None

    def reboot(self) -> None:
        """Everything dies, and the monotonic clock begins anew."""
        world = self.world
        world.boots += 1
        world.booted_at = world.now
        for server in self.servers.values():
            server.main = server.workers = False
            server.gone = True
            server.gpu_until = 0.0
        self.strangers.clear()

    # --- what the daemon sees; each call may fail, or be the last thing it does

    async def _call(self, name: str) -> None:
        world = self.world
        world.kill_here()
        if world.faults.strike("host error"):
            raise HostError(f"the host did not answer ({name})")
        await asyncio.sleep(self._rng.choice((0.0, 0.001, 0.02)))

    async def start(self, spec: LaunchSpec) -> None:
        await self._call("start")
        world = self.world
        if self.disk_full or world.faults.strike("host disk full"):
            raise DiskFull(f"launch {spec.launch_id} cannot be written down: No space left on device")
        port, gpus = self.slots[spec.slot]
        self._count += 1
        pid = FIRST_PID + self._count
        server = Server(spec, self.natures[spec.argv], port, gpus, boot=world.boots, pid=pid)
        self.servers[spec.launch_id] = server
        self.by_slot[spec.slot].append(server)
        world.kill_here()  # before its shim runs
        world.after(self._rng.uniform(0.01, 0.3), lambda: self.claim(server))
        world.kill_here()  # after its shim runs
        if world.faults.strike("host error after the deed"):
            raise HostError(f"the shim of launch {spec.launch_id} reported nothing within 15 s")
        while server.state == "written":
            await asyncio.sleep(0.02)

    async def inspect(self, launch_id: str) -> ServerSeen:
        await self._call("inspect")
        return self._look(launch_id)

    def _look(self, launch_id: str) -> ServerSeen:
        server = self.servers.get(launch_id)
        if server is not None and server.state == "written":
            server.state = "revoked"
        if server is None or server.state == "revoked":
            return ServerSeen(launch_id, alive=False, error="it was never started", started=False)
        if server.boot != self.world.boots:
            return ServerSeen(launch_id, alive=False, error="the host was booted since")
        if server.alive:
            said = "" if server.shim else "its shim is gone or has recorded nothing"
            return ServerSeen(launch_id, alive=True, error=said)
        return ServerSeen(launch_id, alive=False, exit_code=server.exit_code, error=server.error)

    async def stop(self, launch_id: str, grace_s: float) -> ServerSeen:
        await self._call("stop")
        world, server = self.world, self.servers.get(launch_id)
        if server is None or not server.alive:
            return self._look(launch_id)
        if not server.dying:
            server.dying = True
            stop_s = min(server.stop_s, grace_s + 1.0)
            end = max(world.now + stop_s, server.unkillable_until if server.unkillable_until > world.now else 0.0)
            world.at(end, lambda: self._stopped(server))
        world.kill_here()
        if world.faults.strike("host error after the deed"):
            raise HostError(f"launch {launch_id} could not be looked at after its stop")
        patience = world.now + grace_s + 30.0
        while server.alive and world.now < patience:
            await asyncio.sleep(0.1 if server.unkillable_until < world.now else 2.0)
        return self._look(launch_id)

    def _stopped(self, server: Server) -> None:
        if server.main:
            server.exit_code = -15
        self.clear(server)

    async def read_log(self, launch_id: str, offset: int, limit: int = 1 << 20) -> bytes:
        self.world.kill_here()
        server = self.servers.get(launch_id)
        if server is None:
            return b""
        while server.said and server.said[0][0] <= min(self.world.now, server.hangs_at):
            server.log += server.said.pop(0)[1]
        return server.log[offset : offset + limit]

    async def activity(self, launch_id: str) -> Activity:
        await self._call("activity")
        server = self.servers.get(launch_id)
        if server is None or not server.alive:
            return Activity()
        age_s = min(self.world.now, server.hangs_at, server.ready_at) - server.claimed_at
        return Activity(int(age_s * 1e9), age_s, int(age_s * 1e8), len(server.log))

    async def port_holder(self, port: int) -> PortHolder | None:
        await self._call("port_holder")
        who = self.on_port(port)
        holder = None
        if isinstance(who, Stranger):
            holder = PortHolder(4711, "nginx", None)
        elif who is not None:
            holder = PortHolder(1000 + len(self.servers), "python3", who.spec.launch_id)
        self.port_seen[port] = holder
        return holder

    async def gpus(self, indices: tuple[int, ...]) -> tuple[GpuUse, ...]:
        try:
            await self._call("gpus")
            self._nvidia_smi(indices)
        except HostError:
            for index in indices:
                self.unread_since.setdefault(index, self.world.now)
            raise
        found = tuple(self._gpu(index) for index in indices)
        self.gpu_seen.update({use.index: use for use in found})
        for index in indices:
            self.unread_since.pop(index, None)
        return found

    def _nvidia_smi(self, indices: tuple[int, ...]) -> None:
        """It may fail for a while; not before its first answer, without which nobody knows what is free."""
        world = self.world
        if self.gpu_seen.keys() >= set(indices) and world.faults.strike("GPUs cannot be read"):
            self.unread_until_s = world.now + self._rng.choice(UNREAD_S)
        if world.now < self.unread_until_s:
            raise HostError("nvidia-smi failed with exit code 9: Unable to determine the device handle")

    def _gpu(self, index: int) -> GpuUse:
        slot = next(name for name, (_, gpus) in self.slots.items() if index in gpus)
        used, processes = IDLE_MIB, list[tuple[int, str, float]]()
        for server in self.by_slot[slot]:
            if self.gpu_held(server):
                used += LOADED_MIB
                if server.alive or server.gpu_listed:
                    processes.append((server.pid, "VLLM::EngineCore", LOADED_MIB))
        stranger = self.strangers.get(slot)
        if stranger is not None and stranger.gpu:
            used += 10_000.0
            processes.append((4712, "jupyter", 10_000.0))
        return GpuUse(index, used, GPU_MIB, tuple(processes))

    async def free_disk_mib(self) -> float:
        await self._call("free_disk_mib")
        return 3.0 if self.disk_full or self.world.faults.strike("host disk low") else 5000.0

    async def readings(self, gpus: tuple[int, ...]) -> Readings:
        return Readings()

    async def cut_logs(self, launch_ids: Sequence[str], most_bytes: int) -> dict[str, str]:
        return {}

    async def old_launches(self, protected: AbstractSet[str]) -> list[str]:
        return []

    async def remove_launches(self, launch_ids: Sequence[str]) -> int:
        return 0

    async def forget_programs(self) -> int:
        return 0

    async def run(self, argv: tuple[str, ...], timeout_s: float) -> Ran:
        await self._call("run")
        return Ran(0, f"{VERSION}\n") if argv else Ran(1, "")

    async def reach(self, address: str, port: int) -> tuple[str, int]:
        return address, port

    async def start_bench(self) -> tuple[Any, int]:
        raise HostError("the load client is started by the daemon on its own machine")

    async def launch_of(self, pid: int) -> str | None:
        return next((i for i, server in self.servers.items() if server.pid == pid and server.alive), None)

    def close(self) -> None: ...
