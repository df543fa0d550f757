"""The local host: servers under a shim each, found again by identity, whatever happened to the daemon meanwhile."""

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from autotuner.edge import clock, files, gpu, procfs
from autotuner.edge.host import Activity, GpuUse, LaunchSpec, PortHolder, Ran, ServerSeen
from autotuner.errors import AutotunerError, DiskFull, HostError

SHIM = Path(__file__).with_name("shim.py")
START_WAIT_S = 15.0  # an isolated interpreter starts in about 20 ms; more than this means that the host is stuck
POLL_S = 0.02
AFTER_GRACE_S = 75.0  # what the shim may take beyond the grace to clear what a server left behind
OUTPUT_BYTES_MAX = 16 << 20
LOOKS = 3  # a process that forks, ends or execs just then can slip through one look at /proc, hardly through three


class LocalHost:
    """Runs servers on this machine; `folder` keeps one subfolder a launch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def start(self, spec: LaunchSpec) -> None:
        """Write down what to start, start the shim, and wait until it reports the server's identity or its end."""
        where = self._write_down(spec)
        await self._run_shim(where, spec)
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
            return _never_started(launch_id)
        identity, ended = _read(where / "identity.json"), _read(where / "exit.json")
        if ended is not None:
            return _ended(launch_id, ended, identity)
        if identity is not None and identity["boot_id"] != clock.boot_id():
            return ServerSeen(launch_id, alive=False, error="the host was booted since")
        if identity is not None and procfs.lives(**_process(identity["shim"])):
            return ServerSeen(launch_id, alive=True)
        if any(procfs.of_launch(launch_id) for _ in range(LOOKS)):
            return ServerSeen(launch_id, alive=True, error="its shim is gone or has recorded nothing")
        late = _read(where / "exit.json")  # the shim may have written it and ended between the two looks
        if late is not None:
            return _ended(launch_id, late, identity)
        return ServerSeen(launch_id, alive=False, error="its end was not recorded")

    async def stop(self, launch_id: str, grace_s: float) -> ServerSeen:
        """Ask the shim, which stops and clears the whole tree; then look for what may have slipped away from it."""
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
        """Run a command with a deadline; what it started itself goes with it.

        Its output goes to memory and not through a pipe, whose end would be waited for as long as any process that the
        command left behind holds it.
        """
        output = os.memfd_create("output")
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
            await _end_of(process, timeout_s)
            said = os.pread(output, OUTPUT_BYTES_MAX, 0).decode("utf-8", "replace")
        except TimeoutError:
            raise HostError(f"{argv[0]} did not end within {timeout_s:.0f} s") from None
        except (OSError, ValueError) as error:
            raise HostError(f"{argv[0]} cannot be run: {getattr(error, 'strerror', None) or error}") from None
        finally:
            os.close(output)
        return Ran(process.returncode or 0, said)

    def _write_down(self, spec: LaunchSpec) -> Path:
        """Write what to start; without the daemon's own environment, which may hold secrets and goes with the shim."""
        where, locks = self._folder / spec.launch_id, self._folder / "slots"
        body = {
            "argv": spec.argv,
            "env": spec.env,
            "secret_files": spec.secret_files,
            "cwd": str(where),
            "stop_grace_s": spec.stop_grace_s,
            "slot_lock": str(locks / f"{spec.slot}.lock"),
        }
        try:
            where.mkdir(parents=True, exist_ok=True, mode=0o750)
            locks.mkdir(exist_ok=True)
            files.write_atomically(where / "launch.json", json.dumps(body).encode(), 0o600)
        except OSError as error:
            raise _cannot(f"launch {spec.launch_id} cannot be written down", error) from None
        return where

    async def _run_shim(self, where: Path, spec: LaunchSpec) -> None:
        """The shim forks at once and its parent ends, so nothing of ours stays as a zombie."""
        env = {**_clean_environment(), **spec.env, procfs.LAUNCH_VARIABLE: spec.launch_id}
        try:
            with (where / "server.log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", str(SHIM), str(where)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=log,
                    env=env,
                    start_new_session=True,
                    close_fds=True,
                )
        except (OSError, ValueError) as error:
            raise _cannot("the shim cannot be run", error) from None
        code = await process.wait()
        if code != 0:
            said = (where / "server.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = f": {said[-1]}" if said else ""
            raise HostError(f"the shim of launch {spec.launch_id} ended with exit code {code}{last}")

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
            raise _cannot(f"the launch in {where} cannot be revoked", error) from None
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


def _process(identity: dict[str, Any]) -> dict[str, int]:
    return {"pid": int(identity["pid"]), "start_ticks": int(identity["start_ticks"])}


def _never_started(launch_id: str) -> ServerSeen:
    return ServerSeen(launch_id, alive=False, error="it was never started", started=False)


def _ended(launch_id: str, ended: dict[str, Any], identity: dict[str, Any] | None) -> ServerSeen:
    """What a shim recorded at its end; what it could not kill keeps the launch alive for as long as that lives."""
    same_boot = identity is not None and identity["boot_id"] == clock.boot_id()
    left = [p["pid"] for p in ended.get("left", []) if same_boot and procfs.lives(**_process(p))]
    if left:
        shown = ", ".join(map(str, left))
        return ServerSeen(launch_id, alive=True, error=f"SIGKILL does not end it: pid {shown} hangs in the kernel")
    return ServerSeen(launch_id, alive=False, exit_code=ended.get("code"), error=str(ended.get("error") or ""))


async def _end_of(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    """Wait for a command's end; one that is late, or that nobody waits for any more, is killed with its session."""
    try:
        await asyncio.wait_for(process.wait(), timeout_s)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _cannot(what: str, error: Exception) -> AutotunerError:
    """A full disk has its own error, for there is something the daemon can do about it."""
    full = isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}
    message = f"{what}: {getattr(error, 'strerror', None) or error}"
    return DiskFull(message) if full else HostError(message)
