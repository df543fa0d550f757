"""What is really on the disk, from the trace of `faultlib.c`: a file is what was written and synced, not what is read back.

After a failed fsync the kernel takes the pages for clean: what was written before is still read from memory, no later fsync
writes it, and it is gone when the power fails. So of each file there are two images here: the one in memory and the one on the
disk, and a list of what is dirty. Folders are not modelled: that a new file's name is durable is another part's question.
"""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class File:
    """One inode."""

    memory: bytearray = field(default_factory=bytearray)
    disk: bytearray = field(default_factory=bytearray)
    dirty: list[tuple[int, int]] = field(default_factory=list)

    def write(self, at: int, data: bytes) -> None:
        """Bytes go to memory and are dirty."""
        _put(self.memory, at, data)
        self.dirty.append((at, len(data)))

    def truncate(self, size: int) -> None:
        """The end goes at once, in both images; what is added reads as zeros."""
        for image in (self.memory, self.disk):
            del image[size:]
        self.memory.extend(bytes(size - len(self.memory)))
        self.dirty = [(at, min(length, size - at)) for at, length in self.dirty if at < size]

    def synced(self) -> None:
        """What is dirty is written."""
        for at, length in self.dirty:
            _put(self.disk, at, bytes(self.memory[at : at + length]))
        self.dirty = []

    def sync_failed(self) -> None:
        """What is dirty is taken for clean, and is not on the disk."""
        self.dirty = []


class Platter:
    """Every traced file by inode; reads on in the trace where it stopped."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace
        self._offset = 0
        self._files: dict[int, File] = {}
        self._places: dict[str, int] = {}
        self.failed: list[str] = []  # the files whose sync failed, in order

    def read_on(self) -> None:
        """Take in what was traced since."""
        with self._trace.open("rb") as f:
            f.seek(self._offset)
            while head := f.readline():
                what, at, size, inode, path = head.decode().rstrip("\n").split(" ", 4)
                data = f.read(int(size)) if what == "w" else b""
                self._take(what, int(at), int(size), int(inode), path, data)
            self._offset = f.tell()

    def _take(self, what: str, at: int, size: int, inode: int, path: str, data: bytes) -> None:
        self._places[path.removesuffix(" (deleted)")] = inode
        if what == "n":
            self._files[inode] = File()
        file = self._files.setdefault(inode, File())
        if what == "w":
            file.write(at, data)
        elif what == "t":
            file.truncate(size)
        elif what == "s":
            file.synced()
        elif what == "f":
            self.failed.append(path)
            file.sync_failed()

    def cut_power(self, folder: Path, *, flushed: bool) -> None:
        """Leave in a folder's traced files what is on the disk; with `flushed`, the kernel had written what was dirty."""
        self.read_on()
        for place, inode in self._places.items():
            path, file = Path(place), self._files[inode]
            if folder not in path.parents or not path.exists() or path.stat().st_ino != inode:
                continue
            if flushed:
                file.synced()
            file.memory, file.dirty = bytearray(file.disk), []
            with path.open("r+b") as f:
                f.truncate(0)
                f.write(file.disk)
        for shared in folder.glob("*-shm"):
            shared.unlink()


def _put(image: bytearray, at: int, data: bytes) -> None:
    if at > len(image):
        image.extend(bytes(at - len(image)))
    image[at : at + len(data)] = data
