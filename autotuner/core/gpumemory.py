"""GPU memory that a server must give back: its GPUs' levels before the launch, against what is found after its end. Pure.

SIGKILL only marks a process: its memory comes back when the dying task closes its device files; where the driver hangs, never.
Levels are in MiB, processes are (pid, name, MiB) as nvidia-smi tells them, where a container or a driver may tell 0 for a MiB.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from autotuner.core.entry import Draft

GPU_WAIT_S = 60.0  # after that long it is not coming back by itself
GPU_SLACK_MIB = 256.0  # a driver's own bookkeeping moves by about this much
HELD = "GPU memory did not come back"  # by these words a slot is known that is degraded until it does

_RESET = (
    "the driver has not let go of a process that is gone or hangs (state D in `ps`); as root, with nothing else on that GPU: "
    "`nvidia-smi --gpu-reset -i INDEX`, else reboot. autotuner resets no GPU"
)

Process = tuple[int, str, float]


class Use(Protocol):
    """One GPU as it is found."""

    @property
    def index(self) -> int:
        """As nvidia-smi counts."""
        ...

    @property
    def name(self) -> str:
        """As people call it."""
        ...

    @property
    def used_mib(self) -> float:
        """Memory in use, whoever uses it."""
        ...

    @property
    def processes(self) -> tuple[Process, ...]:
        """Those that can be seen."""
        ...


@dataclass(frozen=True)
class Left:
    """What one GPU still holds of a server: the level expected and the one found, and the processes that can be seen there."""

    name: str
    expected_mib: float
    found_mib: float
    processes: tuple[Process, ...]


def not_back(before: Mapping[int, float], now: Iterable[Use], own: Collection[int] = ()) -> tuple[Left, ...]:
    """Given the levels before a launch and the GPUs after its end, return those that still hold more than is explained.

    `own` are pids that were seen to be the server's. What other processes hold is theirs: it is no part of what is waited
    for, and where one does not tell how much that is, nothing can be said of the rest.
    """
    found = []
    for gpu in now:
        others = [process for process in gpu.processes if process[0] not in own]
        if any(mib <= 0 for _, _, mib in others):
            continue
        explained_mib = before.get(gpu.index, gpu.used_mib) + sum(mib for _, _, mib in others)
        if gpu.used_mib > explained_mib + GPU_SLACK_MIB:
            found.append(Left(gpu.name, before[gpu.index], gpu.used_mib, gpu.processes))
    return tuple(found)


def figures(left: Iterable[Left]) -> str:
    """Given GPUs that hold too much, say how much: `GPU 0: 60400 MiB, 400 before`."""
    return ", ".join(f"GPU {gpu.name}: {gpu.found_mib:.0f} MiB, {gpu.expected_mib:.0f} before" for gpu in left)


def waiting(name: str, left: Iterable[Left]) -> str:
    """Given a server's name and what its GPUs still hold, say that it is waited for."""
    return f"the GPU memory of {name}, which has ended, is not free yet ({figures(left)})"


def held(name: str, left: Iterable[Left]) -> str:
    """Given a server's name and what its GPUs hold after GPU_WAIT_S, say so, with who holds it as far as that shows."""
    told = []
    for gpu in left:
        who = ", ".join(f"pid {pid} ({name_}, {mib:.0f} MiB)" for pid, name_, mib in gpu.processes)
        shown = f"held by {who}" if who else "no process is shown on it"
        told.append(f"GPU {gpu.name} has {gpu.found_mib:.0f} MiB in use, {gpu.expected_mib:.0f} were expected; {shown}")
    return f"{HELD} within {GPU_WAIT_S:.0f} s after {name} had ended: " + ". ".join(told)


def is_held(degraded: str) -> bool:
    """Given why a slot is degraded, tell whether that is memory that did not come back: then it goes on by itself."""
    return degraded.startswith(HELD)


def held_entry(slot: str, why: str) -> Draft:
    """Given a slot and `held`'s sentence, return the entry that asks for a person."""
    return Draft(
        slot=slot,
        title="degraded",
        sentence=f"{why}. Nothing is launched on top of it, and a person is needed.",
        bullets=(
            ("Do", "look who holds it: `nvidia-smi`, `fuser -v /dev/nvidia*`; end that process if nobody needs it"),
            ("If nobody does", _RESET),
            (
                "If it stays",
                "`autotuner restore-best --force` takes that memory for somebody else's, and launches beside it",
            ),
            ("Until then", "nothing is launched on this slot; once the memory is free it goes on by itself"),
        ),
    )
