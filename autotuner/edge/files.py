"""Files that survive a crash: atomic replacement, durable appending and folders, the lock of a state folder."""

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from autotuner.edge import clock, procfs
from autotuner.errors import Locked, StoreError

_CHUNK_BYTES = 1 << 20
LOCK_PATIENCE_S = 0.5  # somebody who only looks whether the lock is held holds it for an instant


class Unsure(OSError):
    """What was appended may be on the disk, in part or as a whole, or not: the file must be read again."""


def append(path: Path, data: bytes, header: bytes = b"", mode: int = 0o644) -> None:
    """Given a path and bytes, add them durably, after `header` in a new file; return once that would survive power loss.

    Raise OSError if nothing was added, and Unsure if that is not known: then nothing may be appended, and no fsync
    tried again, before the file was read, since after a failed fsync the kernel takes the pages for clean.
    """
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        size = os.fstat(fd).st_size
        try:
            write_all(fd, data if size else header + data)
        except OSError as error:
            _take_back(fd, size, error)
            raise
        try:
            os.fsync(fd)
            if size == 0:
                sync_folder(path.parent)
        except OSError as error:
            _take_back(fd, size, error)
            raise Unsure(error.errno, f"fsync failed: {error.strerror}") from None
    finally:
        os.close(fd)


def settle(path: Path, last_bytes: int) -> None:
    """Make sure that what was read of a file is on the disk: who was killed before its fsync left it in memory alone.

    After a failed fsync the kernel takes the pages for clean, so the last bytes are written over themselves first.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        write_over_itself(fd, os.fstat(fd).st_size - last_bytes, last_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_folder(path.parent)


def _take_back(fd: int, size: int, cause: OSError) -> None:
    """Remove what was written of an addition; where that fails, the next one must not be glued to it."""
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        raise Unsure(cause.errno, f"a part of an entry could not be taken back: {error.strerror}") from None


def free_mib(path: Path) -> float:
    """The room in MiB that we may still use on the disk of a folder. Raise OSError."""
    seen = os.statvfs(path)
    return seen.f_bavail * seen.f_frsize / 2**20


def is_full(error: OSError) -> bool:
    """Whether an error says that there is no room left: of the disk, or of what we may use of it."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT}


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder, with those above it, that is still there after power loss.

    One that exists may come from somebody who was killed before it was durable, so it is made so, where that is allowed.
    """
    if path.is_dir():
        with contextlib.suppress(PermissionError):
            sync_folder(path.parent)
        return
    make_folder(path.parent)
    path.mkdir(mode=mode, exist_ok=True)
    sync_folder(path.parent)


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Given a path and bytes, replace the file as a whole: a reader sees the old or the new, also after power loss."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_all(fd: int, data: bytes) -> None:
    """Write every byte or raise OSError: a full disk makes a short write first and an error only with the next."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_over_itself(fd: int, start: int, size: int) -> None:
    """Write `size` bytes of a file from `start` on over themselves, so that the next fsync does write them.

    After a failed fsync the kernel takes the pages for clean: they are read back, and are not on the disk.
    """
    end = start + size
    while start < end:
        data = os.pread(fd, min(_CHUNK_BYTES, end - start), start)
        if not data:
            return
        os.lseek(fd, start, os.SEEK_SET)
        write_all(fd, data)
        start += len(data)


def sync_folder(path: Path) -> None:
    """Make the folder's own list of files durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class FolderLock:
    """The right to work the slots of a state folder; held for life, released by the kernel, never inherited."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def acquire(self) -> None:
        """Take the lock. Raise Locked, naming the holder, if another process has it; StoreError if there can be none."""
        try:
            make_folder(self._path.parent)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"the state folder cannot be used: {self._path}: {error.strerror}") from None
        if not _lock(fd, fcntl.LOCK_EX, LOCK_PATIENCE_S):
            holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise Locked(
                f"another autotuner daemon (pid {holder}) works {self._path.parent}; stop it, or use another state_dir"
            )
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass  # the disk is full: the lock holds all the same, only its label is missing
        self._fd = fd

    def release(self) -> None:
        """Give the lock back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def lock_holder(path: Path) -> int | None:
    """Given a lock file, return the pid of the process that holds the lock, 0 if its label is missing, None if free."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Shared, so that two who only look do not take each other for a daemon.
        if _lock(fd, fcntl.LOCK_SH, 0.0):
            return None
        label = os.read(fd, 32).decode("ascii", "replace").strip()
        # A holder that has only just taken it has not written its own label yet.
        return int(label) if label.isdecimal() and procfs.start_ticks(int(label)) is not None else 0
    finally:
        os.close(fd)


def _lock(fd: int, kind: int, patience_s: float) -> bool:
    deadline = clock.monotonic_s() + patience_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except OSError:
            if clock.monotonic_s() >= deadline:
                return False
            clock.pause(0.02)
        else:
            return True
