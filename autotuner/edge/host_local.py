"""The local host: servers under a shim each, found again by identity, whatever happened to the daemon meanwhile."""

import asyncio
import json
import shutil
import signal
import uuid
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from autotuner.edge import clock, commands, files, gpu, housekeeping, ladder, procfs, readings
from autotuner.edge.commands import OUTPUT_BYTES_MAX
from autotuner.edge.host import Activity, GpuUse, LaunchSpec, PortHolder, Ran, Readings, ServerSeen
from autotuner.edge.rungs import LOOKS, POLL_S, Rung, Unit, rung_of
from autotuner.errors import HostError

START_WAIT_S = 15.0  # an isolated interpreter starts in about 20 ms; more than this means that the host is stuck
GPU_ASK_S = 12.0  # of each question: nvidia-smi takes seconds where no persistence daemon runs, a cycle has 30
READ_S = 20.0  # what reading GPUs and host may take; a driver that hangs takes longer
AFTER_GRACE_S = 75.0  # what the shim may take beyond the grace to clear what a server left behind


class LocalHost:
    """Runs servers on this machine; `folder` keeps one subfolder a launch."""

    cuts = 0
    here = True
    can_bench = False

    def __init__(self, folder: Path, launcher: str = "auto", shim: Path | None = None) -> None:
        """Launches live on the rung called `launcher`; `auto` is the highest that works here. `shim` is for the lowest rung."""
        self._folder = folder
        self._wanted = launcher
        self._shim = shim
        self._rung: Rung | None = None

    async def start(self, spec: LaunchSpec) -> None:
        """Write down what to start, start the shim, and wait until it reports the server's identity or its end."""
        rung = await self.rung()
        where = self._write_down(spec, rung)
        await rung.start(where, spec.launch_id)
        await self._reported(spec.launch_id, rung)

    async def inspect(self, launch_id: str) -> ServerSeen:
        """Read what the shim recorded, and believe it only as far as /proc agrees."""
        where = self._folder / launch_id
        if self._revoke(where):
            return _never_started(launch_id)
        identity, ended = _read(where / "identity.json"), _read(where / "exit.json")
        rung = _rung_of(where)
        if ended is not None:
            return _ended(launch_id, ended, identity, rung)
        if identity is not None and identity["boot_id"] != clock.boot_id():
            return ServerSeen(launch_id, alive=False, error="the host was booted since")
        if identity is not None and procfs.lives(**_process(identity["shim"])):
            return ServerSeen(launch_id, alive=True)
        if rung.occupied(launch_id) or any(procfs.of_launch(launch_id) for _ in range(LOOKS)):
            return ServerSeen(launch_id, alive=True, error="its shim is gone or has recorded nothing")
        late = _read(where / "exit.json")  # the shim may have written it and ended between the two looks
        if late is not None:
            return _ended(launch_id, late, identity, rung)
        return ServerSeen(launch_id, alive=False, error="its end was not recorded")

    async def stop(self, launch_id: str, grace_s: float) -> ServerSeen:
        """Ask the shim, which stops and clears the whole tree; then clear its place, and what slipped away from both."""
        where = self._folder / launch_id
        if self._revoke(where):
            return _never_started(launch_id)
        identity = _read(where / "identity.json")
        if identity is not None and identity["boot_id"] == clock.boot_id():
            shim = _process(identity["shim"])
            if procfs.signal_exactly(shim["pid"], shim["start_ticks"], signal.SIGTERM):
                deadline = clock.monotonic_s() + grace_s + AFTER_GRACE_S
                while procfs.lives(**shim) and clock.monotonic_s() < deadline:
                    await clock.sleep(POLL_S)
        if identity is None:  # there was no shim to ask
            await self._kill_strays(launch_id, grace_s)
        await _rung_of(where).clear(launch_id)
        await self._kill_strays(launch_id, 0.0)
        return await self.inspect(launch_id)

    async def read_log(self, launch_id: str, offset: int, limit: int = 1 << 20) -> bytes:
        """Return bytes of the server's log."""
        try:
            with (self._folder / launch_id / "server.log").open("rb") as f:
                f.seek(offset)
                return f.read(limit)
        except FileNotFoundError:
            return b""

    async def activity(self, launch_id: str) -> Activity:
        """Sum bytes read, CPU time and memory over what the shim started, and the size of the log."""
        where = self._folder / launch_id
        try:
            log_bytes = (where / "server.log").stat().st_size
        except OSError:
            log_bytes = 0
        identity = _read(where / "identity.json")
        shim = _process(identity["shim"]) if identity else None
        # What detached itself from the server is still below the shim; the shim's own signs of life are none.
        below = procfs.descendants(shim["pid"])[1:] if shim and procfs.lives(**shim) else None
        pids = procfs.of_launch(launch_id) if below is None else below
        used = [procfs.usage(pid) for pid in pids]
        return Activity(sum(u[0] for u in used), sum(u[1] for u in used), sum(u[2] for u in used), log_bytes)

    async def port_holder(self, port: int) -> PortHolder | None:
        """Find the listener on a port; ours is known by its environment or by descending from one of our servers."""
        inodes = procfs.listening_inodes(port)
        if not inodes:
            return None
        holders = procfs.socket_holders(inodes)
        if not holders:
            return PortHolder(None, "a process of another user", None)
        launches = {pid: procfs.launch_above(pid) for pid in holders}
        # Where a stranger shares the port with one of ours, the stranger is the news: it gets part of the requests.
        strangers = [pid for pid in holders if launches[pid] is None and procfs.start_ticks(pid) is not None]
        pid = (strangers or holders)[0]
        return PortHolder(pid, procfs.name_of(pid), launches[pid])

    async def gpus(self, indices: tuple[int, ...]) -> tuple[GpuUse, ...]:
        """Ask nvidia-smi; a host without it has no GPUs to report. Raise HostError where it fails."""
        if not indices or shutil.which("nvidia-smi") is None:
            return ()
        memory = await commands.run(gpu.MEMORY_QUERY, GPU_ASK_S)
        if memory.code != 0:
            raise HostError(gpu.failed(memory))
        processes = await commands.run(gpu.PROCESS_QUERY, GPU_ASK_S)
        if processes.code != 0:
            raise HostError(gpu.failed(processes))
        return gpu.parse(memory.output, processes.output, indices)

    async def free_disk_mib(self) -> float:
        """Free space where the launches live."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return files.free_mib(self._folder)

    async def readings(self, gpus: tuple[int, ...]) -> Readings:
        """Read GPUs and host in a thread: a driver may hang."""
        return await asyncio.wait_for(asyncio.to_thread(readings.read, gpus), READ_S)

    async def cut_logs(self, launch_ids: Sequence[str], most_bytes: int) -> dict[str, str]:
        """Cut the logs that are too long."""
        found: dict[str, str] = {}
        for launch_id in launch_ids:
            try:
                if housekeeping.cut_log(self._folder / launch_id / housekeeping.LOG, most_bytes):
                    found[launch_id] = ""
            except FileNotFoundError:
                continue
            except OSError as error:
                found[launch_id] = error.strerror or str(error)
        return found

    async def old_launches(self, protected: AbstractSet[str]) -> list[str]:
        """List the folders of launches that are not protected."""
        return housekeeping.unprotected(self._folder, protected)

    async def remove_launches(self, launch_ids: Sequence[str]) -> int:
        """Remove folders of launches, not many at a time, and of none that lives."""
        gone = 0
        for launch_id in launch_ids:
            if gone >= housekeeping.REMOVED_MAX:
                break
            if not (await self.inspect(launch_id)).alive:
                gone += housekeeping.remove(self._folder, launch_id)
        return gone

    async def forget_programs(self) -> int:
        """Nothing is copied to this machine."""
        return 0

    async def run(self, argv: tuple[str, ...], timeout_s: float) -> Ran:
        """Run a command with a deadline; what it started itself goes with it.

        Where servers have units of their own it runs in one, too: an engine asked for its flags needs what its servers need.
        """
        if isinstance(self._rung, Unit):
            return await self._run_apart(argv, timeout_s, self._rung)
        return await commands.run(argv, timeout_s)

    async def reach(self, address: str, port: int) -> tuple[str, int]:
        """What listens on this machine is reached where it listens."""
        return address, port

    async def start_bench(self) -> tuple[Any, int]:
        """The daemon's own load client is on this machine."""
        raise HostError("the load client is started by the daemon on its own machine")

    def close(self) -> None:
        """Nothing is held open."""

    async def launch_of(self, pid: int) -> str | None:
        """Read it from the process's environment, or from its ancestors'."""
        return procfs.launch_above(pid)

    async def rung(self) -> Rung:
        """The rung on which the next launches live; found out once. Raise HostError if the wanted one cannot be used."""
        if self._rung is None:
            self._rung = await ladder.choose(self._wanted, self._folder, self._shim)
        return self._rung

    async def _run_apart(self, argv: tuple[str, ...], timeout_s: float, rung: Unit) -> Ran:
        """Run a command as a launch that is nobody's server, and leave nothing of it behind."""
        launch_id = uuid.uuid4().hex[:16]
        where = ladder.write_down(self._folder, LaunchSpec(launch_id, launch_id, argv, {}, stop_grace_s=1.0), rung)
        deadline = clock.monotonic_s() + timeout_s
        try:
            await rung.start(where, launch_id)
            while (ended := _read(where / "exit.json")) is None:
                if clock.monotonic_s() > deadline:
                    raise HostError(f"{argv[0]} did not end within {timeout_s:.0f} s")
                await clock.sleep(POLL_S)
            said = await self.read_log(launch_id, 0, OUTPUT_BYTES_MAX)
        finally:
            await self.stop(launch_id, 1.0)
            shutil.rmtree(where, ignore_errors=True)
            (self._folder / "slots" / f"{launch_id}.lock").unlink(missing_ok=True)
        if ended.get("error"):
            raise HostError(f"{argv[0]} cannot be run: {ended['error']}")
        return Ran(int(ended.get("code") or 0), said.decode("utf-8", "replace"))

    def _write_down(self, spec: LaunchSpec, rung: Rung) -> Path:
        return ladder.write_down(self._folder, spec, rung)

    async def _reported(self, launch_id: str, rung: Rung) -> None:
        """Wait until a shim reports its server's identity or its end. Raise HostError where there is no sign of it."""
        where = self._folder / launch_id
        deadline = clock.monotonic_s() + START_WAIT_S
        while clock.monotonic_s() < deadline:
            if (where / "identity.json").exists() or (where / "exit.json").exists():
                return
            await clock.sleep(POLL_S)
        if not procfs.of_launch(launch_id) and not rung.occupied(launch_id):
            raise HostError(f"the shim of launch {launch_id} reported nothing within {START_WAIT_S:.0f} s")

    async def _kill_strays(self, launch_id: str, grace_s: float) -> None:
        """End what carries the launch id: asked first, for as long as the grace, then killed until none is seen."""
        kill_at = clock.monotonic_s() + grace_s
        told: set[tuple[int, int]] = set()
        clean = 0
        while clean < LOOKS and clock.monotonic_s() < kill_at + AFTER_GRACE_S:
            found = {(pid, procfs.start_ticks(pid) or 0) for pid in procfs.of_launch(launch_id)}
            # A process loses its environment early in its end, its port and its GPU memory late.
            living = {process for process in found | told if procfs.lives(*process)}
            clean = 0 if living else clean + 1
            patient = clock.monotonic_s() < kill_at
            for pid, ticks in living - told if patient else living:
                procfs.signal_exactly(pid, ticks, signal.SIGTERM if patient else signal.SIGKILL)
            told |= living
            await clock.sleep(POLL_S)

    def _revoke(self, where: Path) -> bool:
        """Take back a launch that no shim has claimed; of this rename and the shim's, exactly one succeeds."""
        if not where.exists():
            return True
        try:
            (where / "launch.json").rename(where / "revoked.json")
        except FileNotFoundError:
            return (where / "revoked.json").exists() or not any(
                (where / name).exists() for name in ("claimed.json", "identity.json", "exit.json")
            )
        except OSError as error:
            raise ladder.cannot(f"the launch in {where} cannot be revoked", error) from None
        return True


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _process(identity: dict[str, Any]) -> dict[str, int]:
    return {"pid": int(identity["pid"]), "start_ticks": int(identity["start_ticks"])}


def _rung_of(where: Path) -> Rung:
    """The rung that a launch lives on, as its shim was told, whatever would be chosen today."""
    return rung_of(_read(where / "claimed.json"))


def _never_started(launch_id: str) -> ServerSeen:
    return ServerSeen(launch_id, alive=False, error="it was never started", started=False)


def _ended(launch_id: str, ended: dict[str, Any], identity: dict[str, Any] | None, rung: Rung) -> ServerSeen:
    """What a shim recorded at its end; what is left of a launch all the same keeps it alive for as long as that lives."""
    same_boot = identity is not None and identity["boot_id"] == clock.boot_id()
    left = [p["pid"] for p in ended.get("left", []) if same_boot and procfs.lives(**_process(p))]
    if left:
        shown = ", ".join(map(str, left))
        return ServerSeen(launch_id, alive=True, error=f"SIGKILL does not end it: pid {shown} hangs in the kernel")
    if rung.occupied(launch_id):  # the shim itself for an instant
        return ServerSeen(launch_id, alive=True, error="its server has ended, and something of it is left")
    rung.leave(launch_id)
    return ServerSeen(launch_id, alive=False, exit_code=ended.get("code"), error=str(ended.get("error") or ""))
