#!/usr/bin/env python3
"""A systemctl with a manager behind it, for hosts that systemd does not run: starts the template unit of a server for real.

In front of PATH under the name `systemctl`. It knows $FAKE_SYSTEMD/autotuner-server@.service and does with it what systemd would:
ExecStart in a session and a control group of its own, with the unit's environment and none of the caller's; once the main process
has ended, or at a stop, nothing in the control group lives on (KillMode=control-group). A file $FAKE_SYSTEMD/refused refuses all
but `show`, as polkit does. Needs to be root, for the control groups.
"""

import contextlib
import os
import shlex
import signal
import sys
import time
from pathlib import Path

HOME = Path(os.environ.get("FAKE_SYSTEMD", "/nonexistent"))
GROUPS = Path("/sys/fs/cgroup/unified" if Path("/sys/fs/cgroup/unified").is_dir() else "/sys/fs/cgroup")
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "USER": "autotuner"}
STOP_S, POLL_S = 20.0, 0.01


def main(words: list[str]) -> int:
    """Carry out one command, as far as the product uses it."""
    options = [word for word in words if word.startswith("--")]
    verb, unit = (word for word in words if not word.startswith("--"))
    if verb == "show":
        print(state(unit))
        return 0
    if (HOME / "refused").exists():
        print(f"Failed to {verb} {unit}: Access denied", file=sys.stderr)
        return 4
    if verb == "start":
        return start(unit)
    if state(unit) == "inactive":
        return 0 if verb == "stop" else 1
    for pid in members(unit):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if "--signal=KILL" in options else signal.SIGTERM)
    if verb == "stop":
        wait_inactive(unit)
    return 0


def start(unit: str) -> int:
    """Type=exec: return as soon as the program runs."""
    template = HOME / "autotuner-server@.service"
    if not template.exists():
        print(f"Failed to start {unit}: Unit {unit} not found.", file=sys.stderr)
        return 5
    service = settings(template, unit.partition("@")[2].removesuffix(".service"))
    group(unit).mkdir(parents=True)
    ready, told = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.close(ready)
        os.set_inheritable(told, False)
        manage(unit, service, told)
    os.close(told)
    os.read(ready, 1)
    return 0


def manage(unit: str, service: dict[str, str], told: int) -> None:
    """The manager's part of one unit's life; it ends when the control group is empty and gone."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    main_pid = os.fork()
    if main_pid == 0:
        os.setsid()
        (group(unit) / "cgroup.procs").write_text(str(os.getpid()))
        argv = shlex.split(service["ExecStart"])
        os.execve(argv[0], argv, {**ENVIRONMENT, **environment(service), "INVOCATION_ID": "0" * 32})
    os.close(told)
    os.waitpid(main_pid, 0)
    while "populated 1" in (group(unit) / "cgroup.events").read_text():
        (group(unit) / "cgroup.kill").write_text("1")
        time.sleep(POLL_S)
    group(unit).rmdir()
    os._exit(0)


def settings(template: Path, instance: str) -> dict[str, str]:
    """The directives of the unit's file; of several with one name the last, but for Environment, which adds up."""
    found: dict[str, str] = {}
    for line in template.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            value = value.replace("%i", instance)
            found[name] = f"{found[name]} {value}" if name == "Environment" and name in found else value
    return found


def environment(service: dict[str, str]) -> dict[str, str]:
    """Environment= and EnvironmentFile=, whose `-` says that it need not be there."""
    words = shlex.split(service.get("Environment", ""))
    file = Path(service.get("EnvironmentFile", "").removeprefix("-") or "/nonexistent")
    if file.exists():
        words += shlex.split(file.read_text(), comments=True)
    return dict(word.split("=", 1) for word in words)


def group(unit: str) -> Path:
    """The unit's control group, in the slice of its manager."""
    return GROUPS / f"fake-{HOME.stat().st_ino}.slice" / unit


def members(unit: str) -> list[int]:
    """The processes of a unit."""
    with contextlib.suppress(OSError):
        return [int(pid) for pid in (group(unit) / "cgroup.procs").read_text().split()]
    return []


def state(unit: str) -> str:
    """`active` as long as there is a control group."""
    return "active" if group(unit).exists() else "inactive"


def wait_inactive(unit: str) -> None:
    """Wait as long as TimeoutStopSec would, then kill."""
    kill_at = time.monotonic() + STOP_S
    while state(unit) != "inactive":
        if time.monotonic() > kill_at:
            with contextlib.suppress(OSError):
                (group(unit) / "cgroup.kill").write_text("1")
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
