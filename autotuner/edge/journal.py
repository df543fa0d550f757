"""The journal's files: recover the tail, append, fsync, read, verify. Append-only, one file a month.

Owns the promise that an acknowledged entry is never lost: one write for the whole entry, its length checked, fsynced,
and only then reported. A failed fsync is never retried: the file is left alone until it is opened again and checked.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from autotuner.core.entry import GENESIS, Entry, Flaw, file_header, read_journal
from autotuner.edge import files
from autotuner.errors import DiskFull, JournalBroken, StoreError


@dataclass(frozen=True)
class Recovered:
    """What was found when the journal was opened: its last entry's number and hash, and where a torn tail was kept."""

    number: int
    sha256: str
    torn: Path | None = None


class Journal:
    """Appends entries that are already numbered and linked; refuses one that does not follow the last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._sha256 = GENESIS
        self._poisoned = ""

    def open(self, torn_label: str) -> Recovered:
        """Read what is there, cut a torn tail off and keep it aside under `torn_label`; return where the journal stands.

        Raise JournalBroken if anything but a half-written last entry is wrong: that is no crash, but tampering.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number, self._sha256, self._poisoned = 0, GENESIS, ""
        torn: Path | None = None
        paths = journal_files(self._folder)
        for path in paths:
            data = path.read_bytes()
            reading = read_journal(path.stem, data, self._sha256, self._number + 1)
            if reading.flaws and (path != paths[-1] or not _half_written(data[reading.good_bytes :])):
                raise JournalBroken(f"{path}: {reading.flaws[0]}")
            if reading.flaws:
                torn = self._cut(path, data, reading.good_bytes, torn_label)
            if reading.entries:
                self._number, self._sha256 = reading.entries[-1].number, reading.entries[-1].sha256
        return Recovered(self._number, self._sha256, torn)

    @property
    def last_number(self) -> int:
        """The number of the last entry in the files."""
        return self._number

    def append(self, entry: Entry) -> None:
        """Write one entry durably; one that is already there is passed over. Raise DiskFull or StoreError."""
        if self._poisoned:
            raise StoreError(f"the journal is not written until it is opened again: {self._poisoned}")
        if entry.number <= self._number:
            return
        if entry.number != self._number + 1 or entry.prev != self._sha256:
            raise JournalBroken(f"entry {entry.number} does not follow entry {self._number} of the journal's files")
        path = self._folder / f"{entry.at[:7]}.md"
        existing = journal_files(self._folder)
        if existing and path < existing[-1]:
            path = existing[-1]  # the wall clock went back: entries stay in one order whatever the clock says
        self._write(path, entry.text.encode())
        self._number, self._sha256 = entry.number, entry.sha256

    def _write(self, path: Path, data: bytes) -> None:
        new = not path.exists() or path.stat().st_size == 0
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o644)
        except OSError as error:
            raise _store_error(error) from None
        try:
            size = os.fstat(fd).st_size
            whole = file_header(path.stem).encode() + data if new else data
            try:
                written = os.write(fd, whole)
            except OSError as error:
                raise _store_error(error) from None
            if written != len(whole):
                os.ftruncate(fd, size)
                raise DiskFull(f"no room for an entry in {path}")
            try:
                os.fsync(fd)
                if new:
                    files.sync_folder(self._folder)
            except OSError as error:
                # The kernel may have dropped the pages and a second fsync would claim success.
                self._poisoned = f"{path}: fsync failed: {error.strerror}"
                raise StoreError(self._poisoned) from None
        finally:
            os.close(fd)

    def _cut(self, path: Path, data: bytes, good: int, label: str) -> Path | None:
        """Remove what follows the last whole entry and keep it beside the journal."""
        torn = self._folder / f"{path.name}.torn-{label}"
        files.write_atomically(torn, data[good:])
        if good == 0:
            path.unlink()
        else:
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.ftruncate(fd, good)
                os.fsync(fd)
            finally:
                os.close(fd)
        files.sync_folder(self._folder)
        return torn

    def set_aside(self, label: str) -> list[Path]:
        """Rename every file of a journal that was altered, so that it can be written anew; return their new names."""
        kept = []
        for path in journal_files(self._folder):
            aside = path.with_name(f"{path.name}.altered-{label}")
            path.rename(aside)
            kept.append(aside)
        files.sync_folder(self._folder)
        return kept


def _half_written(rest: bytes) -> bool:
    """A crash leaves part of one entry; a whole hash line after the flaw means that somebody edited."""
    return b"\n<!-- autotuner entry=" not in rest or not rest.rstrip(b"\n").endswith(b"-->")


def journal_files(folder: Path) -> list[Path]:
    """Given the journal's folder, return its files, oldest first."""
    return sorted(folder.glob("[0-9]*-[0-9][0-9].md"))


def read_entries(folder: Path) -> tuple[list[Entry], list[Flaw]]:
    """Given the journal's folder, return every entry up to the first flaw of each file, and the flaws. Changes nothing."""
    entries: list[Entry] = []
    flaws: list[Flaw] = []
    prev, number = GENESIS, 1
    for path in journal_files(folder):
        reading = read_journal(path.stem, path.read_bytes(), prev, number)
        entries += reading.entries
        flaws += reading.flaws
        if reading.entries:
            prev, number = reading.entries[-1].sha256, reading.entries[-1].number + 1
    return entries, flaws


def compare_with_store(entries: list[Entry], published: list[tuple[int, str]]) -> list[Flaw]:
    """Given the files' entries and the store's (number, hash) of published ones, return where they disagree.

    A chain alone cannot tell that its tail was cut or that all of it was written anew; the store can.
    """
    by_number = {entry.number: entry.sha256 for entry in entries}
    flaws = []
    for number, sha256 in published:
        if number not in by_number:
            flaws.append(Flaw(f"entry {number:04d}", "was published and is missing from the files"))
        elif by_number[number] != sha256:
            flaws.append(Flaw(f"entry {number:04d}", "is not the one that was published"))
    extra = sorted(set(by_number) - {number for number, _ in published})
    flaws += [Flaw(f"entry {number:04d}", "is unknown to the state database") for number in extra]
    return flaws


def _store_error(error: OSError) -> StoreError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DiskFull(f"the disk that holds the journal is full: {error.strerror}")
    return StoreError(f"the journal cannot be written: {error.strerror}")
