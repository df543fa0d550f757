"""A journal's files: recover the tail, append, fsync, read, verify. Append-only, a file a month, or several long ones.

Owns the promise that an acknowledged entry is never lost: one write for the whole entry, its length checked, fsynced,
and only then reported. A failed fsync is never retried: the file is left alone until it is opened again and checked.
Each slot's journal has a folder of its own; what lies beside those folders is the journal of all slots of earlier versions.
"""

import errno
import heapq
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from autotuner.core.entry import GENESIS, Entry, Flaw, file_header, file_title, read_journal
from autotuner.edge import files
from autotuner.errors import DiskFull, JournalBroken, StoreError

_ENTRY_START = re.compile(rb"^## ", re.MULTILINE)  # no other line of an entry begins so
_FILE_NAME = re.compile(r"(\d{4,})-(\d\d)(?:\.part-(\d{3,}))?\.md")
FILE_BYTES = 16 << 20
BEGIN = (0, GENESIS)  # what the very first entry follows
_TAKEN = {"seals"}  # what else lies beside the folders, in edge/seals.py; a slot called like that gets a mark
_MARK = "~"  # which no slot's name has
_ENTRY_END = re.compile(rb"\n<!-- autotuner entry=[^\n]* -->\n\n")


@dataclass(frozen=True)
class Recovered:
    """What was found when the journal was opened: its last entry's number and hash, and where a torn tail was kept."""

    number: int
    sha256: str
    torn: Path | None = None


class Journal:
    """Appends entries that are already numbered and linked; refuses one that does not follow the last.

    `slot` is whose journal the folder holds; '' is one of all slots.
    """

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES, slot: str = "") -> None:
        self.file_bytes = file_bytes  # a file that would grow beyond this is followed by another part
        self._folder = folder
        self._slot = slot
        self._number = 0
        self._sha256 = GENESIS
        self._poisoned = ""

    def open(self, torn_label: str, acknowledged: int | None = None, origin: tuple[int, str] = BEGIN) -> Recovered:
        """Read what is there, cut a torn tail off and keep it aside under `torn_label`; return where the journal stands.

        What follows the last entry that is known to be `acknowledged` may be anything: power loss can leave garbage there.
        `origin` is the number and hash that the journal's first entry follows.
        Raise JournalBroken if anything else but a half-written last entry is wrong: that is no crash, but tampering.
        """
        self._number, self._sha256 = origin
        self._poisoned = "it was never opened to its end"
        torn: Path | None = None
        with translated(f"the journal in {self._folder} cannot be opened"):
            files.make_folder(self._folder)
            self._require_own_folder()
            paths = journal_files(self._folder)
            for path in paths:
                data = path.read_bytes()
                reading = read_journal(file_title(path.stem, self._slot), data, self._sha256, self._number + 1)
                if reading.entries:
                    self._number, self._sha256 = reading.entries[-1].number, reading.entries[-1].sha256
                if reading.flaws:
                    all_there = acknowledged is not None and self._number >= acknowledged
                    if path != paths[-1] or not (all_there or _half_written(data[reading.good_bytes :])):
                        raise JournalBroken(f"{path}: {reading.flaws[0]}")
                    torn = self._cut(path, data, reading.good_bytes, torn_label)
                if path == paths[-1] and path.exists():
                    files.settle(path, len(reading.entries[-1].text.encode()) if reading.entries else 0)
        self._poisoned = ""
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
        data = entry.text.encode()
        with translated(f"the journal in {self._folder} cannot be written"):
            path = self._file_for(entry.at[:7], len(data))
        with translated(f"{path} cannot be written"):
            try:
                files.append(path, data, self._header(path))
            except files.Unsure as error:
                self._poisoned = f"{path}: {error.strerror}"
                raise
        self._number, self._sha256 = entry.number, entry.sha256

    def _file_for(self, month: str, size: int) -> Path:
        """The file that the next entry of `size` bytes goes to: the last one, or a new one for a month or for its length.

        An entry is never split, and where the wall clock went back entries stay in one order whatever it says.
        """
        existing = journal_files(self._folder)
        first = self._folder / f"{month}.md"
        if not existing or file_order(first)[:2] > file_order(existing[-1])[:2]:
            return first
        last = existing[-1]
        begun = last.stat().st_size
        if begun + size <= self.file_bytes or begun <= len(self._header(last)):
            return last
        year, month_number, part = file_order(last)
        return self._folder / f"{year:04d}-{month_number:02d}.part-{part + 1:03d}.md"

    def _header(self, path: Path) -> bytes:
        return file_header(file_title(path.stem, self._slot)).encode()

    def _require_own_folder(self) -> None:
        """Raise StoreError where the file system does not tell two slots' names apart: they must not share a folder."""
        names = [path.name for path in self._folder.parent.glob("*")]
        if self._slot and self._folder.name not in names:
            there = next((name for name in names if name.casefold() == self._folder.name.casefold()), "another one")
            raise StoreError(
                f"the journal of slot {self._slot} would come to lie in {there}, since this file system does not tell upper "
                "from lower case: rename the slot, or put journal_dir on another file system"
            )

    def _cut(self, path: Path, data: bytes, good: int, label: str) -> Path:
        """Remove what follows the last whole entry and keep it beside the journal."""
        torn = _unused(self._folder / f"{path.name}.torn-{label}")
        files.write_atomically(torn, data[good:])
        if good == 0:
            path.unlink()
        else:
            os.truncate(path, good)
        return torn

    def set_aside(self, label: str) -> list[Path]:
        """Rename every file of a journal that was altered, so that it can be written anew; return their new names."""
        kept = []
        with translated(f"the journal in {self._folder} cannot be set aside"):
            for path in journal_files(self._folder):
                aside = _unused(path.with_name(f"{path.name}.altered-{label}"))
                path.rename(aside)
                kept.append(aside)
            files.sync_folder(self._folder)
        return kept


def _half_written(rest: bytes) -> bool:
    """A crash leaves part of one entry: without its end, or with zeros for pages that were not written."""
    end = _ENTRY_END.search(rest)
    one = len(_ENTRY_START.findall(rest)) <= 1 and (end is None or end.end() == len(rest))
    return one and (not rest.endswith(b" -->\n\n") or b"\0" in rest)


def _unused(path: Path) -> Path:
    """What was kept aside is not written over by what is kept within the same second."""
    number = 1
    kept = path
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}-{number}")
    return kept


def journal_files(folder: Path) -> list[Path]:
    """Given the journal's folder, return its files, oldest first."""
    return sorted((path for path in folder.glob("*.md") if _FILE_NAME.fullmatch(path.name)), key=file_order)


def file_order(path: Path) -> tuple[int, int, int]:
    """Given a journal file's path, return its year, its month and which part of the month it is, from 1."""
    match = _FILE_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path.name} is no journal file")
    year, month, part = match.groups(default="1")
    return int(year), int(month), int(part)


def journal_folder(base: Path, slot: str) -> Path:
    """Given `journal_dir` and a slot, return the folder of its journal; of the common one of earlier versions for ''."""
    return base / (slot + _MARK if slot in _TAKEN else slot) if slot else base


@dataclass(frozen=True)
class Read:
    """What was read of one journal: its slot ('' for the common one), its files, its entries, and what is wrong with it.

    `origin` is the number and hash that its first entry follows.
    """

    slot: str
    files: tuple[Path, ...]
    entries: tuple[Entry, ...]
    flaws: tuple[Flaw, ...]
    origin: tuple[int, str] = BEGIN

    @property
    def head(self) -> tuple[int, str]:
        """Its last entry's number and hash; without one, what its first will follow."""
        return (self.entries[-1].number, self.entries[-1].sha256) if self.entries else self.origin


def read_journals(base: Path) -> list[Read]:
    """Given `journal_dir`, read every journal there up to the first flaw of each file, by name. Changes nothing.

    The common journal of earlier versions comes first, if there was one: the others go on from its end.
    """
    common = read_one(base, "", BEGIN)
    found = [common] if common.files else []
    return found + [read_one(base, slot, common.head) for slot in journal_slots(base)]


def journal_slots(base: Path) -> list[str]:
    """Given `journal_dir`, return the slots whose journals have files there, sorted."""
    return sorted(path.name.rstrip(_MARK) for path in base.glob("*") if path.is_dir() and journal_files(path))


def read_one(base: Path, slot: str, origin: tuple[int, str]) -> Read:
    """Given `journal_dir`, a slot and what its journal's first entry follows, read that journal. Changes nothing."""
    entries: list[Entry] = []
    flaws: list[Flaw] = []
    number, sha256 = origin
    paths = journal_files(journal_folder(base, slot))
    for path in paths:
        reading = read_journal(file_title(path.stem, slot), path.read_bytes(), sha256, number + 1)
        entries += reading.entries
        flaws += reading.flaws
        if reading.entries:
            number, sha256 = reading.entries[-1].number, reading.entries[-1].sha256
    return Read(slot, tuple(paths), tuple(entries), tuple(flaws), origin)


def read_entries(base: Path) -> tuple[list[Entry], list[Flaw]]:
    """Given `journal_dir`, return the entries of all journals as they were written, by their times, and all flaws.

    Of one journal they stay in its own order, whatever the clock said.
    """
    found = read_journals(base)
    rising = [_rising(read.entries) for read in found]
    entries = [entry for _, entry in heapq.merge(*rising, key=lambda one: one[0])]
    return entries, [flaw for read in found for flaw in read.flaws]


def _rising(entries: tuple[Entry, ...]) -> list[tuple[str, Entry]]:
    """Each entry with its time, or the latest of those before it where the clock was set back."""
    times = accumulate((entry.at for entry in entries), max)
    return list(zip(times, entries, strict=True))


def compare_with_store(
    entries: Sequence[Entry], published: list[tuple[int, str]], committed: list[tuple[int, str]] | None = None
) -> list[Flaw]:
    """Given a journal's entries in the files and the store's (number, hash) of published ones, return where they disagree.

    A chain alone cannot tell that its tail was cut or that all of it was written anew; the store can. While a daemon
    works, ask the store for `published` before the files are read, and for every entry `committed` to it afterwards.
    """
    by_number = {entry.number: entry.sha256 for entry in entries}
    known = dict(published if committed is None else committed)
    flaws = [
        Flaw(f"entry {number:04d}", "was published and is missing from the files")
        for number, _ in published
        if number not in by_number
    ]
    for number, sha256 in sorted(by_number.items()):
        if number not in known:
            flaws.append(Flaw(f"entry {number:04d}", "is unknown to the state database"))
        elif known[number] != sha256:
            flaws.append(Flaw(f"entry {number:04d}", "is not the one that was published"))
    return flaws


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn the file system's errors into ours, so that the loop can tell a full disk from a bug."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DiskFull(f"{what}: the disk is full: {error.strerror}") from None
        raise StoreError(f"{what}: {error.strerror}") from None
