"""The control block of `faultlib.c`: arm a kill or a failure in a running daemon, read what it has called.

Without a C compiler there is no library: `compiled` returns None, and daemons are then killed at random moments from outside.
"""

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("faultlib.c")
CALLS = (
    *("write", "pwrite64", "fsync", "fdatasync", "rename", "ftruncate", "unlink", "execve", "sendto", "connect"),
    *("pidfd_send_signal", "create", "fallocate", "mkdir"),
)
PHASES = (
    "none",
    "starting",
    "idle",
    "launching",
    "warm-up",
    "measuring",
    "concluding",
    "stopping",
    "restoring",
    "ending",
)
PHASES_MAX = 12  # as in the library
WHEN = ("before", "after", "half")  # half: of a write, the first half is done; of any other call, all of it
SYNCS = ("fsync", "fdatasync")
SPACE = ("write", "pwrite64", "create", "fallocate", "mkdir")  # what a full disk refuses


class Block(ctypes.Structure):
    """The block as the library has it."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("pid", "phase", "kill_call", "kill_phase", "kill_n", "kill_when")),
        *(
            (name, ctypes.c_int32)
            for name in ("kill_seen", "killed", "fail_mask", "fail_errno", "fail_skip", "fail_times")
        ),
        *((name, ctypes.c_int32) for name in ("fail_seen", "failed")),
        ("visits", ctypes.c_int32 * PHASES_MAX),
        ("counts", (ctypes.c_int32 * len(CALLS)) * PHASES_MAX),
    )


class Control:
    """A control block in a file of its own, mapped; one a daemon."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(ctypes.sizeof(Block)))
        self._map = _mapped(path)
        self.block = Block.from_buffer(self._map)

    @property
    def phase(self) -> str:
        """What the daemon does now."""
        return PHASES[self.block.phase]

    @property
    def killed_at(self) -> str:
        """The call at which the daemon was killed; '' if it was not."""
        return CALLS[self.block.killed - 1] if self.block.killed else ""

    def kill_at(self, phase: str | None, call: str, n: int, when: str = "before") -> None:
        """Kill at the n-th such call from now on, counted in this phase alone or, with None, in all."""
        self.block.kill_n = 0
        self.block.kill_call = CALLS.index(call)
        self.block.kill_phase = PHASES.index(phase) if phase is not None else -1
        self.block.kill_when = WHEN.index(when)
        self.block.kill_seen = 0
        self.block.kill_n = n

    def fail(self, calls: tuple[str, ...], error: int, *, skip: int = 0, times: int = -1) -> None:
        """Let such calls fail: after `skip` good ones, so many times; with -1 until `mend`."""
        self.block.fail_mask = 0
        self.block.fail_seen = self.block.failed = 0
        self.block.fail_errno, self.block.fail_skip, self.block.fail_times = error, skip, times
        self.block.fail_mask = sum(1 << CALLS.index(call) for call in calls)

    def fill_disk(self) -> None:
        """From now on there is no room on any disk."""
        self.fail(SPACE, errno.ENOSPC)

    def mend(self) -> None:
        """Nothing fails any more."""
        self.block.fail_mask = 0

    def count(self, phase: str, call: str) -> int:
        """How often the daemon made this call in this phase."""
        return int(self.block.counts[PHASES.index(phase)][CALLS.index(call)])

    def counted(self) -> dict[tuple[str, str], float]:
        """Every (phase, call) that occurred, and how often in one visit of the phase."""
        pairs = ((phase, call) for phase in PHASES[1:] for call in CALLS)
        return {
            pair: n / max(1, self.block.visits[PHASES.index(pair[0])]) for pair in pairs if (n := self.count(*pair))
        }


class Phase:
    """The daemon's side of a block: it says which phase it is in."""

    def __init__(self, path: Path) -> None:
        self._map = _mapped(path)
        self._block = Block.from_buffer(self._map)

    def enter(self, phase: str) -> None:
        """Say that a phase begins, or goes on."""
        number = PHASES.index(phase)
        self._block.visits[number] += number != self._block.phase
        self._block.phase = number


@cache
def compiled(folder: Path) -> Path | None:
    """Compile the library into this folder and return it; None where there is no C compiler."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    made = folder / "faultlib.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", made, SOURCE, "-ldl"], check=True, capture_output=True)
    return made


def begin(path: str, trace: str) -> None:
    """In a daemon with the library in it: this process is the one that is meant. Does nothing without the library."""
    library = ctypes.CDLL(None)
    if hasattr(library, "fault_begin") and library.fault_begin(os.fsencode(path), os.fsencode(trace)):
        raise OSError(f"the control block {path} cannot be mapped")


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as f:
        return mmap.mmap(f.fileno(), ctypes.sizeof(Block))
