"""The cores of this machine as a load client finds them, from /sys and /proc, and binding the client to some. Linux.

Nothing but the calling process is ever bound.
"""

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from autotuner.bench.placement import AUTO, MANY, OFF, Core, Seen, core_numbers, place
from autotuner.bench.samples import Placement
from autotuner.edge import procfs
from autotuner.edge.clock import pause

ELSEWHERE = "the load client was not pinned: the server is on another machine"
SAMPLE_S = 0.1  # how long it is looked where anything runs; ten of the kernel's ticks
_BUSY_RATIO = 0.5
_MAIN_RATIO = 0.02  # of the server's CPU time so far: a thread with more is one of its main ones
_GPU_VENDORS = {"0x10de", "0x1002"}
_GPU_CLASSES = ("0x03", "0x12")  # display and 3D controllers, processing accelerators
_CLAIM = "\0autotuner-load-client-core-{}"  # in the abstract namespace: gone with the process that holds it


class ClientCores:
    """The cores of one level's client, for the process that begins it; the server listens on `port`.

    `wanted` is as of `placement.place`, None where the server is on another machine.
    Cores that were chosen are claimed for as long as this lives, so that the clients of two levels never choose the same.
    """

    def __init__(self, wanted: str | None, port: int) -> None:
        self._wanted = wanted
        self._port = port
        self._before = os.sched_getaffinity(0)
        self._claims: dict[int, socket.socket] = {}

    def take(self, processes: int) -> Placement:
        """Choose cores for so many processes, bind this one to its own, or to all of several; say which."""
        self.release()
        if self._wanted is None:
            return Placement(said=ELSEWHERE)
        seen = look(self._wanted, self._port, self._before)
        while True:
            placement = place(self._wanted, seen, processes)
            refused = self._claim(placement.cores) if placement.one_each else frozenset[int]()
            if not refused:
                break
            seen = replace(seen, taken=seen.taken | refused)
        if not placement.cores:
            return placement
        own = placement.cores_of(0) if processes == 1 else placement.cores
        try:
            bind(own)
        except OSError as error:
            self.release()
            why = f"the load client was not pinned: it may not bind itself to cores here ({error.strerror})"
            return placement.model_copy(update={"cores": (), "shares": _shares(seen), "said": why})
        return placement

    def _claim(self, cores: Iterable[int]) -> frozenset[int]:
        """Claim all of them and return those that another client holds; then none is kept."""
        refused = set()
        for core in cores:
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                claim.bind(_CLAIM.format(core))
            except OSError:
                claim.close()
                refused.add(core)
            else:
                self._claims[core] = claim
        if refused:
            self.release()
        return frozenset(refused)

    def release(self) -> None:
        """Give back what was taken: claims, and the cores that this process had before."""
        for claim in self._claims.values():
            claim.close()
        self._claims.clear()
        if os.sched_getaffinity(0) != self._before:
            with contextlib.suppress(OSError):
                bind(self._before)


def bind(cores: Iterable[int]) -> None:
    """Have this process run on these cores alone, and what it starts from now on. Raise OSError where it may not."""
    os.sched_setaffinity(0, cores)


def look(wanted: str, port: int, allowed: set[int], root: Path = Path("/")) -> Seen:
    """Given what is wanted, the server's port and the cores this process may use, return what there is to choose by."""
    cores = topology(allowed, root)
    if wanted == OFF or (wanted == AUTO and len(cores) < 2):
        return Seen(cores, None)
    processes = server_processes(port)
    if not processes:
        return Seen(cores, None)
    server, main = threads(processes)
    # To look for a while only pays where there is something to choose.
    choice = wanted == AUTO and (len(cores) >= MANY or any(not core.whole & server for core in cores))
    busy = busy_cores(root) if choice else frozenset[int]()
    return Seen(cores, server, main, busy, gpu_nodes(root))


def topology(allowed: Iterable[int], root: Path = Path("/")) -> tuple[Core, ...]:
    """Given numbers of cores, return them with their hardware threads and memory nodes; what is not told is one each."""
    system = root / "sys/devices/system"
    node_of = {}
    for folder in system.glob("node/node[0-9]*"):
        for number in _numbers(folder / "cpulist"):
            node_of[number] = int(folder.name.removeprefix("node"))
    found = []
    for number in sorted(allowed):
        siblings = _numbers(system / f"cpu/cpu{number}/topology/thread_siblings_list")
        found.append(Core(number, siblings | {number}, node_of.get(number, 0)))
    return tuple(found)


def gpu_nodes(root: Path = Path("/")) -> frozenset[int]:
    """Return the memory nodes that GPUs are attached to."""
    found = set()
    for device in (root / "sys/bus/pci/devices").glob("*"):
        if _text(device / "vendor") in _GPU_VENDORS and _text(device / "class").startswith(_GPU_CLASSES):
            with contextlib.suppress(ValueError):
                found.add(int(_text(device / "numa_node")))
    return frozenset(node for node in found if node >= 0)


def busy_cores(root: Path = Path("/")) -> frozenset[int]:
    """Look for SAMPLE_S, and return the cores on which something ran for half of that or more."""
    before = _ticks(root)
    pause(SAMPLE_S)
    found = set()
    for core, (ran, passed) in _ticks(root).items():
        ran_before, passed_before = before.get(core, (ran, passed))
        if ran - ran_before >= _BUSY_RATIO * max(1, passed - passed_before):
            found.add(core)
    return frozenset(found)


def server_processes(port: int) -> set[int]:
    """Given a port, return the processes of the server that listens on it, without this one.

    They are those that hold the socket, what is below them or in their group, and all of their launch.
    """
    own = {os.getpid()}
    found: set[int] = set()
    groups: set[int] = set()
    for pid in procfs.socket_holders(procfs.listening_inodes(port)):
        if pid in own:
            continue
        found |= set(procfs.descendants(pid))
        if (launch := procfs.launch_above(pid)) is not None:
            found |= set(procfs.of_launch(launch))
        with contextlib.suppress(OSError):
            groups.add(os.getpgid(pid))
    groups.discard(os.getpgid(0))  # a script that started both
    for pid in procfs.pids() if groups else ():
        with contextlib.suppress(OSError):
            if os.getpgid(pid) in groups:
                found.add(pid)
    return found - own


def threads(processes: Iterable[int]) -> tuple[frozenset[int], frozenset[int]]:
    """Given processes, return the cores that any of their threads may use, and those that their main threads used last."""
    allowed: set[int] = set()
    ran: list[tuple[int, int]] = []
    for thread in _threads(processes):
        with contextlib.suppress(OSError, ValueError, IndexError):
            allowed |= os.sched_getaffinity(int(thread.name))
            fields = (thread / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            ran.append((int(fields[11]) + int(fields[12]), int(fields[36])))
    least = max(1.0, _MAIN_RATIO * sum(ticks for ticks, _ in ran))
    return frozenset(allowed), frozenset(core for ticks, core in ran if ticks >= least)


def _threads(processes: Iterable[int]) -> Iterator[Path]:
    for pid in processes:
        with contextlib.suppress(OSError):
            yield from Path(f"/proc/{pid}/task").iterdir()


def _shares(seen: Seen) -> bool | None:
    return None if seen.server is None else bool(seen.ours & seen.server)


def _ticks(root: Path) -> dict[int, tuple[int, int]]:
    """By core: for how many ticks something ran on it, and how many have passed, since the machine started."""
    found = {}
    for line in _text(root / "proc/stat").splitlines():
        name, *counts = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(count) for count in counts[:8]]  # user nice system idle iowait irq softirq steal
            found[int(name.removeprefix("cpu"))] = (sum(ticks) - sum(ticks[3:5]), sum(ticks))
    return found


def _numbers(path: Path) -> frozenset[int]:
    try:
        return core_numbers(path.read_text())
    except (OSError, ValueError):
        return frozenset()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
