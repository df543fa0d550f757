"""/proc, read: identities of processes, their environment and children, listening sockets.

A process is (boot id, pid, start ticks): pids are used again, and wall-clock start times move when the clock is set.
A zombie does not live: it holds neither port nor memory. But a process whose first thread has ended looks like one
while its other threads hold both, and shows its environment and files only through them.
"""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

LAUNCH_VARIABLE = "AUTOTUNER_LAUNCH_ID"
_TICKS_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# The control groups of launches: `autotuner-LAUNCH` is our own, `autotuner-server@LAUNCH.service` the unit's. Ranks behind
# the first of a server over several nodes have theirs behind a dot.
_GROUP = re.compile(rb"/autotuner-(?:server@)?([0-9a-f]{16}(?:\.[0-9]{1,4})?)(?:\.service)?(?:/|$)", re.MULTILINE)


def stat_fields(pid: int) -> list[str] | None:
    """Given a pid, return the fields of its stat file from the state on, or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split() or None


def alive(fields: list[str]) -> bool:
    """Given the fields of a stat file, tell whether the process lives: any thread of it counts."""
    return fields[0] not in {"Z", "X", "x"} or (fields[0] == "Z" and int(fields[17]) > 1)


def lives(pid: int, start_ticks: int) -> bool:
    """Tell whether the very process with this pid and start lives."""
    fields = stat_fields(pid)
    return fields is not None and alive(fields) and int(fields[19]) == start_ticks


def start_ticks(pid: int) -> int | None:
    """Given a pid, return the tick at which it started, None if it does not live."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields is not None and alive(fields) else None


def launch_id_of(pid: int) -> str | None:
    """Given a pid, return the launch it was started for, from its environment; None if it is not ours or hidden."""
    prefix = f"{LAUNCH_VARIABLE}=".encode()
    environment = next(filter(None, (_bytes(place / "environ") for place in _threads(pid))), b"")
    value = next((e[len(prefix) :] for e in environment.split(b"\0") if e.startswith(prefix)), None)
    return value.decode("ascii", "replace") if value is not None else None


def launch_above(pid: int) -> str | None:
    """Given a pid, return the launch it was started for, also where it wiped its environment.

    It is known by its control group, or by its ancestors: a shim is a subreaper, so even what detached itself from a server is
    below the server's shim.
    """
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        seen.add(pid)
        found = launch_by_group(pid) or launch_id_of(pid)
        if found is not None:
            return found
        fields = stat_fields(pid)
        pid = int(fields[1]) if fields else 0
    return None


def launch_by_group(pid: int) -> str | None:
    """Given a pid, return the launch whose control group it is in; None if it is in none of ours."""
    found = _GROUP.search(_bytes(Path(f"/proc/{pid}/cgroup")))
    return found.group(1).decode() if found else None


def in_group_of(launch_id: str) -> list[int]:
    """Given a launch id, return the living processes in its control group, however they hide otherwise."""
    return [pid for pid in pids() if launch_by_group(pid) == launch_id and start_ticks(pid) is not None]


def pids() -> Iterator[int]:
    """Every process id there is now."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def of_launch(launch_id: str) -> list[int]:
    """Given a launch id, return the living processes that carry it in their environment."""
    return [pid for pid in pids() if launch_id_of(pid) == launch_id and start_ticks(pid) is not None]


def descendants(root: int) -> list[int]:
    """Given a pid, return the living processes below it, itself included."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        fields = stat_fields(pid)
        if fields is not None and alive(fields):
            children.setdefault(int(fields[1]), []).append(pid)
    found, todo = [root], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def signal_exactly(pid: int, ticks: int, number: signal.Signals) -> bool:
    """Signal this very process and no other that may have got its pid since; tell whether it was there."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # The pidfd pins the process, so what is checked now is what gets the signal.
        if not lives(pid, ticks):
            return False
        signal.pidfd_send_signal(fd, number)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def usage(pid: int) -> tuple[int, float, int]:
    """Given a pid, return (bytes read, CPU seconds, resident bytes); zeros for what cannot be read."""
    fields = stat_fields(pid)
    cpu = (int(fields[11]) + int(fields[12])) / _TICKS_S if fields else 0.0
    resident = int(fields[21]) * _PAGE_BYTES if fields else 0
    try:
        text = Path(f"/proc/{pid}/io").read_text()
        read = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("rchar:"))
    except (OSError, StopIteration):
        read = 0
    return read, cpu, resident


def listening_inodes(port: int) -> frozenset[str]:
    """Given a port, return the inodes of the TCP sockets that listen on it, on any address."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return frozenset(found)


def socket_holders(inodes: frozenset[str]) -> list[int]:
    """Given socket inodes, return the processes that hold one; those of other users are hidden without root."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return [pid for pid in pids() if _holds_any(pid, wanted)]


def name_of(pid: int) -> str:
    """Given a pid, return the short name of its program; `?` if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


def _holds_any(pid: int, wanted: set[str]) -> bool:
    return any(_links(place / "fd") & wanted for place in _threads(pid))


def _threads(pid: int) -> Iterator[Path]:
    """Where to read of a process: itself, and if its first thread has ended, its other threads."""
    yield Path(f"/proc/{pid}")
    fields = stat_fields(pid)
    if fields is not None and fields[0] == "Z" and alive(fields):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/task"):
                yield Path(f"/proc/{pid}/task/{name}")


def _links(folder: Path) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                found.add(os.readlink(folder / name))
    return found


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
