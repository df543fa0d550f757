"""Where a launch lives: one of three rungs, the highest that the host has, and how it is made sure that nothing of it is left.

  systemd   a unit of its own, autotuner-server@LAUNCH.service: a sandbox for servers, and systemd clears up behind the shim
  cgroup    a control group of its own (version 2): for root, where no systemd runs, as in many containers
  shim      the shim alone, which is a subreaper: anywhere

On each, the shim starts the server and clears up after it; the two higher rungs hold also when the shim itself is killed. The
rung is part of what is written down for a launch, so that any later daemon looks for it and stops it in the right place.
"""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any, Protocol

from autotuner.edge import clock, commands, procfs
from autotuner.edge.host import Ran
from autotuner.errors import HostError

SHIM = Path(__file__).with_name("shim.py")
POLL_S = 0.02
EMPTY_WAIT_S = 75.0  # what SIGKILL does not end in this time hangs in the kernel
START_S = 20.0  # systemd has started a unit as soon as its program runs
STOP_S = 100.0  # more than the unit's TimeoutStopSec, so that systemd is the one to lose its patience
ENDED = {"inactive", "failed"}
LOOKS = 3  # a process that forks, ends or execs just then can slip through one look at /proc, hardly through three


class Rung(Protocol):
    """A kind of place for launches. `why` says, for people, why this one was chosen."""

    name: str
    why: str

    def record(self, launch_id: str) -> dict[str, str]:
        """What is written down of the place of a launch."""
        ...

    async def start(self, where: Path, launch_id: str) -> None:
        """Run the shim of a launch that is written down in a folder. Raise HostError."""
        ...

    def occupied(self, launch_id: str) -> bool:
        """Tell whether anything lives in the place of a launch; False where a rung cannot tell."""
        ...

    async def clear(self, launch_id: str) -> None:
        """Kill whatever lives in the place of a launch, wait until it is empty, and remove it."""
        ...

    def leave(self, launch_id: str) -> None:
        """Remove the place of a launch that has ended, if it is empty."""
        ...


class ShimAlone:
    """The lowest rung: a shim in a session of its own; `shim` is that program, where it is not the one beside this module."""

    name = "shim"

    def __init__(self, why: str = "", shim: Path | None = None) -> None:
        self.why = why
        self._shim = shim

    def record(self, launch_id: str) -> dict[str, str]:
        """Nothing but the rung's name."""
        return {"rung": self.name}

    async def start(self, where: Path, launch_id: str) -> None:
        """The shim forks at once and its parent ends, so nothing of ours stays as a zombie."""
        try:
            with (where / "server.log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", str(self._shim or SHIM), str(where)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=log,
                    env={**os.environ, procfs.LAUNCH_VARIABLE: launch_id},
                    start_new_session=True,
                    close_fds=True,
                )
        except (OSError, ValueError) as error:
            raise HostError(f"the shim cannot be run: {getattr(error, 'strerror', None) or error}") from None
        code = await process.wait()
        if code != 0:
            said = (where / "server.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = f": {said[-1]}" if said else ""
            raise HostError(f"the shim of launch {launch_id} ended with exit code {code}{last}")

    def occupied(self, launch_id: str) -> bool:
        """The shim knows, and nobody else."""
        return False

    async def clear(self, launch_id: str) -> None:
        """Nothing: the shim does it, and what slipped away from it is found by its environment."""

    def leave(self, launch_id: str) -> None:
        """There is no place but the shim's own."""


class ControlGroup(ShimAlone):
    """A control group for each launch, which the shim makes and enters before it starts anything."""

    name = "cgroup"

    def __init__(self, parent: Path, why: str = "") -> None:
        super().__init__(why)
        self._parent = parent

    def record(self, launch_id: str) -> dict[str, str]:
        """The group is named, since the next daemon may run in another one itself."""
        return {"rung": self.name, "group": str(self._group(launch_id))}

    def occupied(self, launch_id: str) -> bool:
        """Ask the kernel, whom nothing escapes; a group that is gone was empty."""
        try:
            return "populated 1" in (self._group(launch_id) / "cgroup.events").read_text().splitlines()
        except OSError:
            return False

    async def clear(self, launch_id: str) -> None:
        """Have the kernel kill all of it at once, whatever it forks meanwhile, and remove the group."""
        group, deadline = self._group(launch_id), clock.monotonic_s() + EMPTY_WAIT_S
        while self.occupied(launch_id) and clock.monotonic_s() < deadline:
            with contextlib.suppress(OSError):
                (group / "cgroup.kill").write_text("1")
            await clock.sleep(POLL_S)
        self.leave(launch_id)

    def leave(self, launch_id: str) -> None:
        """Remove the group; one that holds a process stays."""
        with contextlib.suppress(OSError):
            _remove(self._group(launch_id))

    def _group(self, launch_id: str) -> Path:
        return self._parent / f"autotuner-{launch_id}"


class Unit:
    """A unit for each launch, started from the template that systemd/install.sh put in place."""

    name = "systemd"

    def __init__(self, why: str = "") -> None:
        self.why = why

    def record(self, launch_id: str) -> dict[str, str]:
        """The unit's name follows from the launch."""
        return {"rung": self.name}

    async def start(self, where: Path, launch_id: str) -> None:
        """Have systemd run the shim, as the unit says, on the launch's folder."""
        ran = await systemctl("start", unit_of(launch_id))
        if ran.code:
            raise HostError(f"systemctl start {unit_of(launch_id)} failed: {last_line(ran.output)}")

    def occupied(self, launch_id: str) -> bool:
        """Whether a process is in the unit's control group, on either version of them."""
        return any(procfs.in_group_of(launch_id) for _ in range(LOOKS))

    async def clear(self, launch_id: str) -> None:
        """Have systemd kill and stop the unit; should it refuse, do what its user may do by itself."""
        deadline = clock.monotonic_s() + EMPTY_WAIT_S
        if not self.occupied(launch_id) and await state_of(unit_of(launch_id)) in ENDED:
            return
        for words in (("kill", "--signal=KILL", unit_of(launch_id)), ("stop", unit_of(launch_id))):
            with contextlib.suppress(HostError):
                await systemctl(*words)
        while self.occupied(launch_id) and clock.monotonic_s() < deadline:
            for pid in procfs.in_group_of(launch_id):
                procfs.signal_exactly(pid, procfs.start_ticks(pid) or 0, signal.SIGKILL)
            await clock.sleep(POLL_S)

    def leave(self, launch_id: str) -> None:
        """Systemd forgets a unit that has ended: the template says CollectMode=inactive-or-failed."""


def unit_of(launch_id: str) -> str:
    """The name of a launch's unit."""
    return f"autotuner-server@{launch_id}.service"


async def systemctl(*words: str) -> Ran:
    """Run systemctl, which must never ask anybody for a password. Raise HostError if it cannot be run."""
    within_s = STOP_S if words[0] == "stop" else START_S
    return await commands.run(("systemctl", "--no-ask-password", *words), within_s)


async def state_of(unit: str) -> str:
    """What systemd says that a unit is: `active`, `inactive`, `failed` and so on. Raise HostError."""
    return (await systemctl("show", "--property=ActiveState", "--value", unit)).output.strip()


def last_line(output: str) -> str:
    """What a command said last."""
    return (output.strip().splitlines() or ["it said nothing"])[-1]


def rung_of(record: dict[str, Any] | None) -> Rung:
    """Given what was written down for a launch, return the rung that it lives on; older launches have the shim alone."""
    name = record.get("rung") if record else None
    if record and name == Unit.name:
        return Unit()
    if record and name == ControlGroup.name:
        return ControlGroup(Path(record["group"]).parent)
    return ShimAlone()


def _remove(group: Path) -> None:
    """Remove a group with the groups that a server may have made in it; one that holds a process stays."""
    for below in sorted(group.rglob("*"), reverse=True):
        if below.is_dir():
            below.rmdir()
    group.rmdir()


def sweep(parent: Path) -> None:
    """Remove the empty groups of launches that ended while no daemon looked."""
    for pattern in ("autotuner-????????????????", "autotuner-????????????????.*"):  # a launch, and further ranks of one
        for group in parent.glob(pattern):
            with contextlib.suppress(OSError):
                _remove(group)


def own_group() -> Path | None:
    """The control group (version 2) that this process is in, as a folder; None where there is none."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    places = [(words[3], words[4]) for words in map(str.split, mounts) if words[words.index("-") + 1] == "cgroup2"]
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if not places or own is None:
        return None
    root, mounted = places[0]
    if not Path(own).is_relative_to(root):
        return None  # what is mounted here is another part of the tree than the one that we are in
    return Path(mounted) / Path(own).relative_to(root)


def cannot_group(parent: Path | None) -> str:
    """Why no control group can be made for a launch; empty if one can, which is tried."""
    if parent is None:
        return "no control groups of version 2 are mounted"
    if not os.access(parent / "cgroup.procs", os.W_OK):
        return f"control groups below {parent} are not ours to make"
    trial = parent / f"autotuner-trial-{os.getpid()}"
    try:
        trial.mkdir()
        killable = (trial / "cgroup.kill").exists()
        trial.rmdir()
    except OSError as error:
        return f"no control group can be made below {parent}: {error.strerror}"
    return "" if killable else "this kernel has no cgroup.kill (Linux 5.14 has)"
