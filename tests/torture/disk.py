"""A disk in memory that forgets like a real one: what the product's own code writes through it, and what power loss leaves.

Each file has its content as programs see it, and what is durable: the content at its last fsync, and the operations since then.
Names are durable only once their folder was fsynced. `after_power_loss` makes one of the many disks that may be found afterwards:
of what was not synced anything may be there, in any order, torn, as zeros, or damaged. Operations can be told to fail, as a full
or a failing disk does; after a failed fsync the pages are clean for the kernel, and what they held is never written (fsyncgate).
"""

import errno
import os
import posixpath
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any

SECTOR = 512
Change = tuple[str, int, bytes]  # ("write", offset, data) or ("size", length, b"")
Naming = tuple[
    str, str, Any
]  # ("name", path, file), ("unname", path, None), ("folder", path, None), ("renamed", to, (from, file))


@dataclass
class File:
    """A file: its content now, its content at the last fsync, and what was done since."""

    data: bytes = b""
    durable: bytes = b""
    since: tuple[Change, ...] = ()

    def change(self, change: Change) -> None:
        self.data = changed(self.data, change)
        self.since += (change,)


def changed(data: bytes, change: Change) -> bytes:
    """Given a content and a change, return the content after it; a gap is zeros."""
    kind, at, new = change
    if kind == "size":
        return data[:at] + bytes(max(0, at - len(data)))
    return data[:at] + bytes(max(0, at - len(data))) + new + data[at + len(new) :]


@dataclass
class Disk:
    """Files by path, folders, and what of their names is not durable yet. `fault` may raise for an operation, before it is done."""

    names: dict[str, File] = field(default_factory=dict)
    folders: set[str] = field(default_factory=lambda: {"/"})
    durable_names: dict[str, File] = field(default_factory=dict)
    durable_folders: set[str] = field(default_factory=lambda: {"/"})
    since: tuple[Naming, ...] = ()
    fault: Callable[[str], None] | None = None
    after: Callable[[], None] | None = None

    def copy(self) -> "Disk":
        """The disk as it is now, for somebody who looks at it later. Files are shared until they change, so they are copied."""
        twins: dict[int, File] = {}

        def twin(file: File) -> File:
            if id(file) not in twins:
                twins[id(file)] = File(file.data, file.durable, file.since)
            return twins[id(file)]

        return Disk(
            {path: twin(file) for path, file in self.names.items()},
            set(self.folders),
            {path: twin(file) for path, file in self.durable_names.items()},
            set(self.durable_folders),
            tuple((kind, path, _twinned(what, twin)) for kind, path, what in self.since),
        )

    def do(self, what: str) -> None:
        """Ask whether an operation fails. It is called before each."""
        if self.fault is not None:
            self.fault(what)

    def done(self) -> None:
        """An operation is done."""
        if self.after is not None:
            self.after()

    def name(self, change: Naming) -> None:
        """Change a name, as programs see it; durable only with its folder."""
        _apply([change], self.names, self.folders)
        self.since += (change,)

    def sync_names(self, folder: str) -> None:
        """Make the names in a folder durable."""
        mine = [change for change in self.since if posixpath.dirname(change[1]) == folder]
        self.since = tuple(change for change in self.since if posixpath.dirname(change[1]) != folder)
        _apply(mine, self.durable_names, self.durable_folders)

    def contents(self) -> dict[str, bytes]:
        """Every file's content, as programs see it."""
        return {path: file.data for path, file in self.names.items()}

    def after_kill(self) -> "Disk":
        """The disk that the next process finds if this one is killed: all that was done is there, and nothing more is durable."""
        return self.copy()

    def after_power_loss(self, rng: random.Random, how: "Loss") -> "Disk":
        """One of the disks that may be found after power loss."""
        names, folders = dict(self.durable_names), set(self.durable_folders)
        _apply(how.chosen(rng, self.since), names, folders)
        reachable = {path: file for path, file in names.items() if _has_folders(path, folders)}
        made: dict[int, File] = {}
        for file in reachable.values():
            if id(file) not in made:
                data = how.content(rng, file)
                made[id(file)] = File(data, data)
        found = {path: made[id(file)] for path, file in reachable.items()}
        folders = {folder for folder in folders if _has_folders(folder, folders)}
        return Disk(found, folders, dict(found), set(folders))


def _apply(changes: list[Naming], names: dict[str, File], folders: set[str]) -> None:
    for kind, path, file in changes:
        if kind == "name":
            names[path] = file
        elif kind == "folder":
            folders.add(path)
        elif kind == "renamed":
            names.pop(file[0], None)
            names[path] = file[1]
        else:
            names.pop(path, None)


def _twinned(what: Any, twin: Callable[[File], File]) -> Any:
    """What a change of names is about, with its file's twin."""
    if isinstance(what, File):
        return twin(what)
    return (what[0], twin(what[1])) if what else what


def _has_folders(path: str, folders: set[str]) -> bool:
    above = posixpath.dirname(path)
    return path == "/" or (above in folders and _has_folders(above, folders))


@dataclass(frozen=True)
class Loss:
    """What power loss does to what was not synced. `names` and `data` are "all", "none", "first" or "some".

    `torn` is how many bytes of the last write that arrived are there (None: all of them), `zeros` and `flips` how many sectors
    of what was not synced are zeros, and how many of its bits are turned over.
    """

    names: str = "all"
    data: str = "all"
    torn: int | None = None
    zeros: int = 0
    flips: int = 0

    def chosen(self, rng: random.Random, changes: tuple[Any, ...], which: str = "") -> list[Any]:
        """Which of the changes that were not synced have arrived, in their order."""
        which = which or self.names
        if which == "all":
            return list(changes)
        if which == "none":
            return []
        if which == "first":
            return list(changes[: rng.randrange(len(changes) + 1)])
        return [change for change in changes if rng.random() < 0.5]

    def content(self, rng: random.Random, file: File) -> bytes:
        """What is found in a file."""
        arrived = self.chosen(rng, file.since, self.data)
        if self.torn is not None and arrived and arrived[-1][0] == "write":
            kind, at, new = arrived[-1]
            arrived[-1] = (kind, at, new[: min(self.torn, len(new))])
        data = file.durable
        touched: list[tuple[int, int]] = []
        for change in arrived:
            data = changed(data, change)
            if change[0] == "write":
                touched.append((change[1], change[1] + len(change[2])))
        return self._damaged(
            rng, data, [_differing(start, min(end, len(data)), data, file.durable) for start, end in touched]
        )

    def _damaged(self, rng: random.Random, data: bytes, touched: list[tuple[int, int]]) -> bytes:
        touched = [(start, end) for start, end in touched if start < end]
        if not touched or not (self.zeros or self.flips):
            return data
        found = bytearray(data)
        for _ in range(self.zeros):
            start, end = rng.choice(touched)
            sector = rng.randrange(start, end) // SECTOR * SECTOR
            low, high = max(start, sector), min(end, sector + SECTOR)
            found[low:high] = bytes(high - low)
        for _ in range(self.flips):
            start, end = rng.choice(touched)
            found[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
        return bytes(found)


def _differing(start: int, end: int, data: bytes, durable: bytes) -> tuple[int, int]:
    """The part of a write that changes what is durable: a sector written over by what it holds already cannot be torn."""
    while start < min(end, len(durable)) and data[start] == durable[start]:
        start += 1
    return start, end


# --- what the product's code sees: paths and the `os` module


class DiskPath(PurePosixPath):
    """A path on a disk in memory; does what the product asks of a `Path`, and nothing else."""

    disk: Disk

    def on(self, disk: Disk) -> "DiskPath":
        self.disk = disk
        return self

    def _of(self, other: PurePosixPath) -> "DiskPath":
        return (other if isinstance(other, DiskPath) else type(self)(other)).on(self.disk)

    def __truediv__(self, key: Any) -> "DiskPath":
        return self._of(super().__truediv__(key))

    @property
    def parent(self) -> "DiskPath":
        return self._of(super().parent)

    def with_name(self, name: str) -> "DiskPath":
        return self._of(super().with_name(name))

    def exists(self) -> bool:
        return str(self) in self.disk.names or self.is_dir()

    def is_dir(self) -> bool:
        return str(self) in self.disk.folders

    def is_file(self) -> bool:
        return str(self) in self.disk.names

    def _file(self) -> File:
        if str(self) not in self.disk.names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))
        return self.disk.names[str(self)]

    def stat(self) -> os.stat_result:
        size = 0 if self.is_dir() else len(self._file().data)
        return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, size, 0, 0, 0))

    def read_bytes(self) -> bytes:
        return self._file().data

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        system = System(self.disk)
        fd = system.open(self, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        system.write(fd, data)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def glob(self, pattern: str) -> Iterator["DiskPath"]:
        here = str(self).rstrip("/") + "/"
        below = [path[len(here) :] for path in (*self.disk.names, *self.disk.folders) if path.startswith(here)]
        for name in sorted(name for name in set(below) if name and "/" not in name and fnmatch(name, pattern)):
            yield self / name

    def mkdir(self, mode: int = 0o777, *, parents: bool = False, exist_ok: bool = False) -> None:
        self.disk.do("mkdir")
        if self.is_dir():
            if not exist_ok:
                raise FileExistsError(errno.EEXIST, "File exists", str(self))
            return
        if parents and not self.parent.is_dir():
            self.parent.mkdir(mode, parents=True, exist_ok=True)
        self.disk.name(("folder", str(self), None))
        self.disk.done()

    def unlink(self, *, missing_ok: bool = False) -> None:
        if missing_ok and not self.exists():
            return
        self._file()
        self.disk.do("unlink")
        self.disk.name(("unname", str(self), None))
        self.disk.done()

    def rename(self, target: "DiskPath") -> "DiskPath":
        file = self._file()
        self.disk.do("rename")
        # Within a folder a rename is one change of its names: after it, or before it, but never neither nor both.
        self.disk.name(("renamed", str(target), (str(self), file)))
        self.disk.done()
        return target

    replace = rename


class System:
    """The part of the `os` module that the product writes files with, on a disk in memory; all else is the real one's."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._open: dict[int, tuple[str, File | None, int]] = {}  # descriptor -> (path, file or folder, flags)
        self._at: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _file(self, fd: int) -> File:
        file = self._open[fd][1]
        assert file is not None
        return file

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        disk, where = self._disk, str(path)
        if flags & os.O_DIRECTORY:
            if where not in disk.folders:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", where)
            return self._take(where, None, flags)
        if where not in disk.names:
            if not flags & os.O_CREAT or posixpath.dirname(where) not in disk.folders:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", where)
            disk.do("create")
            disk.name(("name", where, File()))
            disk.done()
        elif flags & os.O_TRUNC and disk.names[where].data:
            disk.do("ftruncate")
            disk.names[where].change(("size", 0, b""))
            disk.done()
        return self._take(where, disk.names[where], flags)

    def _take(self, where: str, file: File | None, flags: int) -> int:
        fd = 1000 + len(self._at)
        self._open[fd], self._at[fd] = (where, file, flags), 0
        return fd

    def close(self, fd: int) -> None:
        del self._open[fd]

    def fstat(self, fd: int) -> os.stat_result:
        return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, len(self._file(fd).data), 0, 0, 0))

    def write(self, fd: int, data: Any) -> int:
        file, whole = self._file(fd), bytes(data)
        try:
            self._disk.do("write")
        except ShortWriteError as short:  # what a full disk does first: a part, and no error
            whole = whole[: short.part(len(whole))]
            if not whole:
                raise OSError(errno.ENOSPC, "No space left on device") from None
        at = len(file.data) if self._open[fd][2] & os.O_APPEND else self._at[fd]
        file.change(("write", at, whole))
        self._at[fd] = at + len(whole)
        self._disk.done()
        return len(whole)

    def pread(self, fd: int, size: int, at: int) -> bytes:
        return self._file(fd).data[at : at + size]

    def pwrite(self, fd: int, data: bytes, at: int) -> int:
        self._disk.do("pwrite")
        self._file(fd).change(("write", at, bytes(data)))
        self._disk.done()
        return len(data)

    def lseek(self, fd: int, at: int, whence: int) -> int:
        assert whence == os.SEEK_SET
        self._at[fd] = at
        return at

    def ftruncate(self, fd: int, size: int) -> None:
        self._disk.do("ftruncate")
        self._file(fd).change(("size", size, b""))
        self._disk.done()

    def truncate(self, path: Any, size: int) -> None:
        self._disk.do("ftruncate")
        self._disk.names[str(path)].change(("size", size, b""))
        self._disk.done()

    def posix_fallocate(self, fd: int, at: int, size: int) -> None:
        file = self._file(fd)
        self._disk.do("write")
        file.change(("size", max(len(file.data), at + size), b""))
        self._disk.done()

    def fsync(self, fd: int) -> None:
        where, file, _ = self._open[fd]
        try:
            self._disk.do("fsync")
        except OSError:
            if file is not None:  # the pages are clean for the kernel now, and what they held is lost
                file.since = tuple(change for change in file.since if change[0] == "size")
            raise
        if file is None:
            self._disk.sync_names(where)
        else:
            for change in file.since:  # not simply what programs see: what a failed fsync lost stays lost
                file.durable = changed(file.durable, change)
            file.since = ()
        self._disk.done()

    def replace(self, source: Any, target: Any) -> None:
        source.rename(target)

    def geteuid(self) -> int:
        return 1000


class ShortWriteError(Exception):
    """Told to a write: only a part of it goes to the disk, `share` of it."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def part(self, size: int) -> int:
        return int(size * self._share)
