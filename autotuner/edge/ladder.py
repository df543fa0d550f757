"""The ladder of launch rungs: which one this host gets and why, and what is written down for a launch on it."""

import json
import os
import shutil
import uuid
from pathlib import Path

from autotuner.edge import clock, files, rungs
from autotuner.edge.host import LaunchSpec
from autotuner.edge.procfs import LAUNCH_VARIABLE
from autotuner.edge.rungs import ControlGroup, Rung, ShimAlone, Unit
from autotuner.errors import AutotunerError, DiskFull, HostError

BOOTED = Path("/run/systemd/system")  # there is one exactly where systemd runs the host: sd_booted(3)
AUTO_VARIABLE = "AUTOTUNER_LAUNCHER"  # what `auto` means to a daemon in a unit whose sandbox is not for servers
TRIAL_WAIT_S = 20.0  # an isolated interpreter starts in about 20 ms; more than this means that the host is stuck
# What would configure a server behind the candidate's back, or is between a service manager and its service.
DROPPED = (
    *("LLAMA_ARG_", "NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_", "INVOCATION_ID", "JOURNAL_STREAM", "AUTOTUNER_"),
    *("SYSTEMD_EXEC_PID", "MEMORY_PRESSURE_"),
)


async def choose(wanted: str, launches: Path, shim: Path | None = None) -> Rung:
    """Given the rung from the settings and the folder of launches, return the rung to use, with its reason.

    A rung is tried, not guessed; `auto` takes the highest that works. `shim` is the program for the shim alone, where that is
    not this package's own. Raise HostError if the wanted rung does not work.
    """
    if wanted == "auto":
        wanted = os.environ.get(AUTO_VARIABLE) or "auto"
    if wanted == "shim":
        return ShimAlone("the settings ask for it", shim)
    passed = []
    if wanted in {"auto", "systemd"}:
        why_not = await _cannot_start_units(launches, asked_for=wanted == "systemd")
        if not why_not:
            return Unit("a unit for a launch could be started")
        if wanted == "systemd":
            raise HostError(f"servers cannot be started in units of their own: {why_not}")
        passed.append(f"systemd: {why_not}")
    group = rungs.own_group()
    why_not = rungs.cannot_group(group)
    if group is not None and not why_not:
        rungs.sweep(group)
        return ControlGroup(group, "; ".join([*passed, f"control groups can be made below {group}"]))
    if wanted == "cgroup":
        raise HostError(f"servers cannot be started in control groups of their own: {why_not}")
    return ShimAlone("; ".join([*passed, f"cgroup: {why_not}"]), shim)


def write_down(folder: Path, spec: LaunchSpec, rung: Rung) -> Path:
    """Write what to start into a folder of its own below `folder`, and return that. Raise DiskFull or HostError.

    The daemon's own environment is not in it, since it may hold secrets: it goes with the shim, or the unit has its own.
    """
    where, locks = folder / spec.launch_id, folder / "slots"
    body = {
        "argv": spec.argv,
        "env": {**spec.env, LAUNCH_VARIABLE: spec.launch_id},
        "dropped": DROPPED,
        "secret_files": spec.secret_files,
        "cwd": str(where),
        "stop_grace_s": spec.stop_grace_s,
        "slot_lock": str(locks / f"{spec.slot}.lock"),
        **rung.record(spec.launch_id),
    }
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o750)
        locks.mkdir(exist_ok=True)
        files.write_atomically(where / "launch.json", json.dumps(body).encode(), 0o600)
    except OSError as error:
        raise cannot(f"launch {spec.launch_id} cannot be written down", error) from None
    return where


async def _cannot_start_units(launches: Path, *, asked_for: bool) -> str:
    """Why no unit can be started for a launch; empty if one can.

    It is tried with a launch of `true`: the unit must be installed, we must be allowed to start it, and it must work the
    very folder that our launches are in.
    """
    if not asked_for and not _booted():
        return "systemd does not run this host"
    if shutil.which("systemctl") is None:
        return "there is no systemctl"
    trial = uuid.uuid4().hex[:16]
    spec = LaunchSpec(trial, f"trial-{trial}", ("/bin/true",), {}, stop_grace_s=1.0)
    where = write_down(launches, spec, Unit())
    try:
        return await _tried(where, rungs.unit_of(trial))
    except HostError as error:
        return str(error)
    finally:
        shutil.rmtree(where, ignore_errors=True)
        (launches / "slots" / f"trial-{trial}.lock").unlink(missing_ok=True)


async def _tried(where: Path, unit: str) -> str:
    """Start a unit on a launch that is written down; return why it did not work, empty if it did."""
    ran = await rungs.systemctl("start", unit)
    if ran.code:
        return f"systemctl start {unit}: {rungs.last_line(ran.output)} (systemd/install.sh installs it)"
    deadline = clock.monotonic_s() + TRIAL_WAIT_S
    while clock.monotonic_s() < deadline:
        idle = await rungs.state_of(unit) in rungs.ENDED
        if _has_ended(where):
            return ""
        if idle:
            return f"{unit} left nothing in {where.parent}: it is for the launches of another folder"
        await clock.sleep(rungs.POLL_S)
    return f"{unit} did not end within {TRIAL_WAIT_S:.0f} s"


def _has_ended(where: Path) -> bool:
    return (where / "exit.json").exists()


def _booted() -> bool:
    return BOOTED.is_dir()


def cannot(what: str, error: OSError) -> AutotunerError:
    """A full disk has its own error, for there is something the daemon can do about it."""
    message = f"{what}: {error.strerror or error}"
    return DiskFull(message) if files.is_full(error) else HostError(message)
