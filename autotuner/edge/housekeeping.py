"""Keeps what is written again and again from filling the disk: folders of launches, long logs, what can be made again.

Decides nothing but what is old. Nothing here may fail loudly: a folder that cannot be removed today is there tomorrow.
"""

import contextlib
import ctypes
import os
import shutil
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from autotuner.edge.host import launch_of_rank

LOG = "server.log"
HEAD_BYTES = 4 << 20  # of a log that is cut: its start, with the command line and what the server resolved
CUT = b"\n=== the middle of this log was cut out by autotuner, for it had become too long (log_mib_max) ===\n"
PIECE_BYTES = 64 << 20
REMOVED_MAX = 20  # folders at a time, so that a cycle stays short
CANDIDATES_MAX, ANSWERS_MAX = 200, 64  # files of proposed candidates, and of what can be asked again
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


@dataclass(frozen=True)
class Room:
    """What the launches take: how many folders there are, and the bytes that the disk has given them."""

    folders: int
    bytes: int


def unprotected(folder: Path, protected: AbstractSet[str]) -> list[str]:
    """Given the folder of the launches, return the ids of those that are not protected, oldest first.

    A rank of a server over several nodes is protected with its launch.
    """
    found = []
    for path in _launches(folder):
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path.name))
    return [name for _, name in sorted(found) if launch_of_rank(name) not in protected]


def remove(folder: Path, launch_id: str) -> bool:
    """Remove the folder of a launch; tell whether it is gone."""
    shutil.rmtree(folder / launch_id, ignore_errors=True)
    return not (folder / launch_id).exists()


def cut_log(path: Path, most_bytes: int) -> bool:
    """Given a log that somebody still writes, give the disk blocks of its middle back if it holds more than `most_bytes`.

    Head and tail stay, and so does every offset: who appends or reads at one goes on undisturbed and finds zeros in the
    middle. Return whether it was cut. Raise OSError where the file system cannot do this.
    """
    seen = path.stat()
    if seen.st_blocks * 512 <= most_bytes:
        return False
    begin = min(HEAD_BYTES, most_bytes // 4)
    tail = (most_bytes - begin) // 2  # half of what it may hold, so that it is not cut again at once
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _punch(fd, begin, seen.st_size - tail - begin)
        os.pwrite(fd, CUT, begin)
    finally:
        os.close(fd)
    return True


def read_log(path: Path) -> bytes:
    """Given a log that may have been cut, return what is left of it. Raise OSError."""
    parts = []
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        at, size = 0, os.fstat(fd).st_size
        while at < size:
            try:
                begin = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # nothing but a hole is left
                break
            piece = os.pread(fd, min(os.lseek(fd, begin, os.SEEK_HOLE) - begin, PIECE_BYTES), begin)
            parts.append(piece.replace(b"\0", b""))
            at = begin + max(1, len(piece))
    finally:
        os.close(fd)
    return b"".join(parts)


def bound(folder: Path, pattern: str, most: int) -> int:
    """Given a folder of files that nothing reads to decide, remove the oldest beyond `most`; return how many went."""
    with contextlib.suppress(OSError):
        found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in found[most:]:
            path.unlink(missing_ok=True)
        return max(0, len(found) - most)
    return 0


def room(folder: Path) -> Room:
    """Given the folder of the launches, return what they take; a log that was cut counts by what is left of it."""
    total, count = 0, 0
    for launch in _launches(folder):
        count += 1
        for where, _, names in os.walk(launch):
            for name in names:
                with contextlib.suppress(OSError):
                    total += (Path(where) / name).lstat().st_blocks * 512
    return Room(count, total)


def _launches(folder: Path) -> list[Path]:
    """The folders of launches: `slots`, where the locks are, is none."""
    try:
        names = [path for path in folder.iterdir() if path.name != "slots" and path.is_dir() and not path.is_symlink()]
    except OSError:
        return []
    return names


def _punch(fd: int, offset: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    punched = libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(length))
    if punched != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
