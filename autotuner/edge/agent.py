"""The agent: our hands on a host over SSH. JSON lines in, JSON lines out, each the question of one method of `Host`.

Run there as `python3 -I agent.pyz FOLDER CONTROLLER`, from one file that holds this module and what it imports; standard
library only, Python 3.10. It holds no state: at the end of its stdin it ends, and the servers live on under their shims.
So a connection may be lost at any moment, and the next agent goes on from what is on the disk and in /proc.

CONTROLLER is the id of the daemon that works the folder, or empty: then the agent only looks. One daemon at a time may work
a folder: its agent holds the lock of `controller.lock`, in which it is named.
"""

import asyncio
import base64
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pkgutil
import platform
import signal
import sys
import threading
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from autotuner.edge import clock, files, procfs, shim
from autotuner.edge.host import LaunchSpec
from autotuner.edge.host_local import LocalHost
from autotuner.edge.rungs import POLL_S, Rung
from autotuner.errors import AutotunerError, HostError

LAUNCHER = "shim"  # units need an installed autotuner, and a session's control groups end with it
TAKE_OVER_S = 10.0  # an agent that SIGKILL does not end in this time hangs in the kernel
LOOKS = frozenset({"port_holder", "gpus", "free_disk_mib", "readings", "run", "launch_of", "facts", "read_log"})
TIDIES = frozenset({"cut_logs", "old_launches", "remove_launches", "forget_programs"})
# What was copied here or written beside it by some version of us, and pieces of copies that a lost connection left.
PROGRAMS = ("agent-*.pyz*", "bench-*.pyz*", "shim-*.py")
FORGET_AFTER_S = 86_400.0  # an agent of another version may just have been copied by somebody who only looks


def main() -> int:
    """Say who we are, or why not; then answer until our stdin ends. Return the exit code."""
    folder = Path.home() / sys.argv[1]
    controller = sys.argv[2] if len(sys.argv) > 2 else ""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of stdin says the same, and says it always
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o750)
        refused = take_control(folder, controller) if controller else ""
        host = AgentHost(folder / "launches", LAUNCHER, extract_shim(folder))
    except OSError as error:
        if files.is_full(error):
            _say({"autotuner": "full", "why": f"{folder}: {error.strerror}"})
            return 1
        advice = "name a folder that the user may write to with [hosts.NAME] folder"
        refused = f"{folder} cannot be used: {error.strerror}; {advice}"
    if refused:
        _say({"autotuner": "refused", "why": refused})
        return 1
    _say({"autotuner": "ready", "folder": str(folder), "pid": os.getpid()})
    asyncio.run(_serve(host, looks_only=not controller))
    return 0


class AgentHost(LocalHost):
    """The local host, but a launch may be asked for again: whoever asked may not have heard the answer.

    The agent that was asked first is dead when the next one is asked, for the next one has the folder's lock. But a shim
    that it started may be about to claim the launch, so a launch that is written down is never written again.
    """

    async def start(self, spec: LaunchSpec) -> None:
        """Start a launch, unless that was done already; then wait for its identity or its end."""
        where = self._folder / spec.launch_id
        if (where / "launch.json").exists() or not _taken(where):
            await super().start(spec)
            return
        if (where / "revoked.json").exists():
            raise HostError(f"launch {spec.launch_id} was given up before it was started")
        await self._reported(spec.launch_id, await self.rung())

    async def forget_others(self, but: AbstractSet[str]) -> int:
        """Remove programs of ours that are neither these, nor in use by this agent, nor of today; return how many are gone."""
        known = {*but, Path(sys.argv[0]).name, self._shim.name if self._shim is not None else ""}
        now_s = clock.monotonic_s() + clock.realtime_ahead_s()
        gone = 0
        for path in (path for pattern in PROGRAMS for path in self._folder.parent.glob(pattern)):
            with contextlib.suppress(OSError):
                if path.name not in known and abs(now_s - path.stat().st_mtime) > FORGET_AFTER_S:
                    path.unlink()
                    gone += 1
        return gone

    def _write_down(self, spec: LaunchSpec, rung: Rung) -> Path:
        where = self._folder / spec.launch_id
        return where if (where / "launch.json").exists() else super()._write_down(spec, rung)


def take_control(folder: Path, controller: str) -> str:
    """Take the lock of a folder for this controller's agent, for life; return why not, empty if it is ours.

    Another agent of the same controller lost its connection and is ended. A folder of another controller can be taken over
    once no agent works it and no server lives in it.
    """
    fd = os.open(folder / "controller.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = clock.monotonic_s() + TAKE_OVER_S
    while not _locked(fd):
        holder = _holder(fd)
        alive = procfs.lives(int(holder.get("pid", 0)), int(holder.get("start_ticks", 0)))
        if alive and holder.get("controller") != controller:
            return _other(folder, holder)
        if alive:
            procfs.signal_exactly(int(holder["pid"]), int(holder["start_ticks"]), signal.SIGKILL)
        if clock.monotonic_s() > deadline:
            return f"an earlier agent (pid {holder.get('pid', 'unknown')}) holds {folder} and cannot be ended"
        clock.pause(POLL_S)
    holder = _holder(fd)
    if holder.get("controller", controller) != controller and _any_lives(folder / "launches"):
        os.close(fd)
        return _other(folder, holder)
    own = {"controller": controller, "pid": os.getpid(), "start_ticks": procfs.start_ticks(os.getpid())}
    text = json.dumps(own).encode()
    os.pwrite(fd, text, 0)  # in place first: on a full disk the last holder's name must not be lost
    os.ftruncate(fd, len(text))
    return ""  # the descriptor stays open, and the lock with it, until we end


def extract_shim(folder: Path) -> Path:
    """Write the shim that we carry next to us, and return where; one that is there is used if it is the same."""
    data = pkgutil.get_data(shim.__package__ or "", "shim.py") or b""
    path = folder / f"shim-{hashlib.sha256(data).hexdigest()[:16]}.py"
    try:
        same = path.read_bytes() == data
    except OSError:
        same = False
    if not same:
        files.write_atomically(path, data)
    return path


async def _serve(host: AgentHost, *, looks_only: bool) -> None:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def take(line: bytes) -> None:
        task = loop.create_task(_answer(host, line, looks_only=looks_only))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def listen() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(take, line)
        os._exit(0)  # nobody asks any more, and what is in hand is done again by the next agent

    threading.Thread(target=listen, daemon=True).start()
    await asyncio.Event().wait()


async def _answer(host: AgentHost, line: bytes, *, looks_only: bool) -> None:
    question = json.loads(line)
    reply: dict[str, Any] = {"id": question["id"]}
    try:
        if looks_only and question["do"] not in LOOKS:
            raise HostError(f"this agent only looks, it does not {question['do']}")
        reply["gives"] = await _do(host, question["do"], question["with"])
    except AutotunerError as error:
        reply |= {"error": str(error), "kind": type(error).__name__}
    except asyncio.TimeoutError:  # noqa: UP041 - Python 3.10 has two
        reply |= {"error": f"{question['do']} did not end in time", "kind": "HostError"}
    except OSError as error:
        kind = "DiskFull" if files.is_full(error) else "HostError"
        reply |= {"error": f"{question['do']} failed: {error}", "kind": kind}
    except (ValueError, KeyError, TypeError) as error:
        reply |= {"error": f"{question['do']} failed: {type(error).__name__}: {error}", "kind": "HostError"}
    _say(reply)


async def _do(host: AgentHost, what: str, given: dict[str, Any]) -> Any:
    """Call the method of the host; return its answer as JSON can hold it."""
    ask = _look if what in LOOKS else _tidy if what in TIDIES else _work
    found = await ask(host, what, given)
    return dataclasses.asdict(found) if dataclasses.is_dataclass(found) and not isinstance(found, type) else found


async def _work(host: AgentHost, what: str, given: dict[str, Any]) -> Any:
    match what:
        case "start":
            return await host.start(LaunchSpec(**{**given, "argv": tuple(given["argv"])}))
        case "inspect":
            return await host.inspect(given["launch_id"])
        case "stop":
            return await host.stop(given["launch_id"], given["grace_s"])
        case "activity":
            return await host.activity(given["launch_id"])
        case _:
            raise HostError(f"the agent does not know how to {what}")


async def _look(host: AgentHost, what: str, given: dict[str, Any]) -> Any:
    match what:
        case "port_holder":
            return await host.port_holder(given["port"])
        case "gpus":
            return [dataclasses.asdict(gpu) for gpu in await host.gpus(tuple(given["indices"]))]
        case "free_disk_mib":
            return await host.free_disk_mib()
        case "readings":
            return await host.readings(tuple(given["gpus"]))
        case "run":
            return await host.run(tuple(given["argv"]), given["timeout_s"])
        case "launch_of":
            return await host.launch_of(given["pid"])
        case "read_log":
            data = await host.read_log(given["launch_id"], given["offset"], given["limit"])
            return base64.b64encode(data).decode()
    time_s = clock.monotonic_s() + clock.realtime_ahead_s()
    return {"python": platform.python_version(), "time_s": time_s, "cores": len(os.sched_getaffinity(0))}


async def _tidy(host: AgentHost, what: str, given: dict[str, Any]) -> Any:
    match what:
        case "cut_logs":
            return await host.cut_logs(given["launch_ids"], given["most_bytes"])
        case "old_launches":
            return await host.old_launches(frozenset(given["protected"]))
        case "remove_launches":
            return await host.remove_launches(given["launch_ids"])
    return await host.forget_others(frozenset(given["but"]))


def _taken(where: Path) -> bool:
    return any((where / name).exists() for name in ("claimed.json", "revoked.json", "identity.json", "exit.json"))


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _holder(fd: int) -> dict[str, Any]:
    try:
        value = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _any_lives(launches: Path) -> bool:
    known = set(os.listdir(launches)) if launches.is_dir() else set()  # noqa: PTH208 - names are all that is wanted
    return bool(known) and any(procfs.launch_id_of(pid) in known for pid in procfs.pids())


def _other(folder: Path, holder: dict[str, Any]) -> str:
    return (
        f"another autotuner daemon (controller {holder.get('controller')}) works {folder} on this host; "
        "give each daemon a folder of its own ([hosts.NAME] folder), or end that daemon and its servers first"
    )


def _say(value: dict[str, Any]) -> None:
    """Write one line; whoever no longer listens has ended our stdin too."""
    try:
        sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
        sys.stdout.buffer.flush()
    except OSError:
        os._exit(0)
