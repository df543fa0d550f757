"""The local host: servers under a shim each, found again by identity, whatever happened to the daemon meanwhile."""

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from autotuner.edge import clock, files, gpu, procfs
from autotuner.edge.host import Activity, GpuUse, LaunchSpec, PortHolder, Ran, ServerSeen
from autotuner.errors import HostError

SHIM = Path(__file__).with_name("shim.py")
START_WAIT_S = 15.0  # an isolated interpreter starts in about 20 ms; more than this means that the host is stuck
POLL_S = 0.02
AFTER_GRACE_S = 75.0  # what the shim may take beyond the grace to clear what a server left behind


class LocalHost:
    """Runs servers on this machine; `folder` keeps one subfolder a launch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def start(self, spec: LaunchSpec) -> None:
        """Write down what to start, start the shim, and wait until it reports the server's identity or its end."""
        where = self._folder / spec.launch_id
        where.mkdir(parents=True, exist_ok=True, mode=0o750)
        locks = self._folder / "slots"
        locks.mkdir(exist_ok=True)
        body = {
            "argv": spec.argv,
            "env": {**_clean_environment(), **spec.env, procfs.LAUNCH_VARIABLE: spec.launch_id},
            "secret_files": spec.secret_files,
            "cwd": str(where),
            "stop_grace_s": spec.stop_grace_s,
            "slot_lock": str(locks / f"{spec.slot}.lock"),
        }
        files.write_atomically(where / "launch.json", json.dumps(body).encode(), 0o600)
        await self._run_shim(where, spec.launch_id)
        deadline = clock.monotonic_s() + START_WAIT_S
        while clock.monotonic_s() < deadline:
            if (where / "identity.json").exists() or (where / "exit.json").exists():
                return
            await clock.sleep(POLL_S)
        if not procfs.of_launch(spec.launch_id):
            raise HostError(f"the shim of launch {spec.launch_id} reported nothing within {START_WAIT_S:.0f} s")

    async def inspect(self, launch_id: str) -> ServerSeen:
        """Read what the shim recorded, and believe it only as far as /proc agrees."""
        where = self._folder / launch_id
        if self._revoke(where):
            return ServerSeen(launch_id, alive=False, error="it was never started")
        identity, ended = _read(where / "identity.json"), _read(where / "exit.json")
        if ended is not None:
            return ServerSeen(launch_id, alive=False, exit_code=ended.get("code"), error=str(ended.get("error") or ""))
        if identity is not None and identity["boot_id"] != clock.boot_id():
            return ServerSeen(launch_id, alive=False, error="the host was booted since")
        if identity is not None and procfs.lives(**_process(identity, "shim")):
            return ServerSeen(launch_id, alive=True)
        if procfs.of_launch(launch_id):
            return ServerSeen(launch_id, alive=True, error="its shim is gone or has recorded nothing")
        late = _read(where / "exit.json")  # the shim may have written it and ended between the two looks
        if late is not None:
            return ServerSeen(launch_id, alive=False, exit_code=late.get("code"), error=str(late.get("error") or ""))
        return ServerSeen(launch_id, alive=False, error="its end was not recorded")

    async def stop(self, launch_id: str, grace_s: float) -> ServerSeen:
        """Ask the shim, which stops and clears the whole tree; then look for what may have slipped away from it."""
        where = self._folder / launch_id
        if self._revoke(where):
            return ServerSeen(launch_id, alive=False, error="it was never started")
        identity = _read(where / "identity.json")
        if identity is not None and identity["boot_id"] == clock.boot_id():
            shim = _process(identity, "shim")
            if procfs.signal_exactly(shim["pid"], shim["start_ticks"], signal.SIGTERM):
                deadline = clock.monotonic_s() + grace_s + AFTER_GRACE_S
                while procfs.lives(**shim) and clock.monotonic_s() < deadline:
                    await clock.sleep(POLL_S)
        await self._kill_strays(launch_id, grace_s if identity is None else 0.0)
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
        """Sum bytes read, CPU time and memory over the shim's tree, and the size of the log."""
        where = self._folder / launch_id
        try:
            log_bytes = (where / "server.log").stat().st_size
        except OSError:
            log_bytes = 0
        identity = _read(where / "identity.json")
        pids = procfs.descendants(identity["server"]["pid"]) if identity else procfs.of_launch(launch_id)
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
        ours = next((launch for pid in holders if (launch := procfs.launch_id_of(pid))), None)
        return PortHolder(holders[0], procfs.name_of(holders[0]), ours)

    async def gpus(self, indices: tuple[int, ...]) -> tuple[GpuUse, ...]:
        """Ask nvidia-smi; a host without it has no GPUs to report."""
        if not indices or shutil.which("nvidia-smi") is None:
            return ()
        memory = await self.run(gpu.MEMORY_QUERY, 30.0)
        processes = await self.run(gpu.PROCESS_QUERY, 30.0)
        return gpu.parse(memory.output, processes.output, indices) if memory.code == 0 else ()

    async def free_disk_mib(self) -> float:
        """Free space where the launches live."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self._folder).free / 2**20

    async def run(self, argv: tuple[str, ...], timeout_s: float) -> Ran:
        """Run a command with a deadline; what it started itself goes with it."""
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise HostError(f"{argv[0]} cannot be run: {error.strerror}") from None
        try:
            output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise HostError(f"{argv[0]} did not end within {timeout_s:.0f} s") from None
        return Ran(process.returncode or 0, output.decode("utf-8", "replace"))

    async def _run_shim(self, where: Path, launch_id: str) -> None:
        """The shim forks at once and its parent ends, so nothing of ours stays as a zombie."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", str(SHIM), str(where)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", os.defpath), procfs.LAUNCH_VARIABLE: launch_id},
                start_new_session=True,
                close_fds=True,
            )
        except OSError as error:
            raise HostError(f"the shim cannot be run: {error.strerror}") from None
        await process.wait()

    async def _kill_strays(self, launch_id: str, grace_s: float) -> None:
        deadline = clock.monotonic_s() + grace_s
        number = signal.SIGTERM if grace_s else signal.SIGKILL
        for _ in range(200):
            strays = procfs.of_launch(launch_id)
            if not strays:
                return
            for pid in strays:
                ticks = procfs.start_ticks(pid)
                if ticks is not None:
                    procfs.signal_exactly(pid, ticks, number)
            await clock.sleep(0.05)
            number = signal.SIGKILL if clock.monotonic_s() >= deadline else signal.SIGTERM

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
        return True


def _clean_environment() -> dict[str, str]:
    """The daemon's environment without what would configure a server behind the candidate's back or name our manager."""
    dropped = ("LLAMA_ARG_", "NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_", "INVOCATION_ID", "JOURNAL_STREAM", "AUTOTUNER_")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _process(identity: dict[str, Any], which: str) -> dict[str, int]:
    return {"pid": int(identity[which]["pid"]), "start_ticks": int(identity[which]["start_ticks"])}
