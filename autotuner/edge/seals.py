"""The seals' files: `seals` beside a journal, a line an entry, and the key for the next one, which replaces the last.

Owns an order that survives a crash anywhere: the entry is in the journal, then its seal, then the next key. Sealing an entry
twice gives the same line, so that what a crash interrupted is simply done again, and nothing looks forged because of it.
The seals that one first key is enough for begin above the slots' journals: a line for each journal that is sealed.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from autotuner.core.entry import Entry
from autotuner.core.seal import (
    KEY_BYTES,
    KeyState,
    SealsRead,
    journal_key,
    journal_line,
    key_after,
    read_seals,
    seal_line,
)
from autotuner.edge import files
from autotuner.edge.journal import translated
from autotuner.errors import JournalBroken

NAME = "seals"


class Seals:
    """Seals entries once they are in the journal; does nothing where sealing was never set up."""

    def __init__(self, key_file: Path, folder: Path) -> None:
        self._key_file = key_file
        self._path = folder / NAME
        self._state: KeyState | None = None
        self._journals: set[str] = set()

    @property
    def wanted(self) -> bool:
        """Whether sealing was set up with this key."""
        return self._state is not None or self._key_file.exists()

    def begin_journal(self, slot: str, key_file: Path, first_number: int) -> None:
        """Have a slot's journal sealed, from entry `first_number` on and with a key of its own; once is enough.

        That key is of no use before the line that names it is there for good: until then it is made again.
        Raise as `keep_up` does.
        """
        with self._safely():
            state = self._state or self._open()
            if slot not in self._journals:
                files.make_folder(key_file.parent, 0o700)
                give_to_owner(key_file.parent)
                begin(key_file, first_number, journal_key(state.key, slot))
                state = self._add(state, journal_line(state.key, state.number, slot))
                self._journals.add(slot)
            self._state = state

    def keep_up(self, last_number: int, entries_after: Callable[[int], Iterable[Entry]]) -> None:
        """Given the journal's last number and a way to get entries after a number, seal what is not sealed yet.

        Raise DiskFull or StoreError; then it is done again at the next call, from what the files say. Raise JournalBroken
        for a key that cannot be used: entries go on without seals, which `verify` will say.
        """
        if not self.wanted:
            return
        with self._safely():
            state = self._state or self._open()
            for entry in entries_after(state.number - 1) if state.number <= last_number else ():
                if entry.number > last_number:
                    break
                state = self._add(state, seal_line(state.key, entry.number, entry.sha256))
            self._state = state

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        with translated(f"{self._path} cannot be written"):
            try:
                yield
            except BaseException:
                self._state = None  # what was written is read again, never trusted
                raise

    def _open(self) -> KeyState:
        """Read the key, and cut off what follows the seals before it: the next one is made again, the same or whole."""
        _remove_leftovers(self._key_file)
        try:
            state = read_key(self._key_file)
        except PermissionError:
            raise JournalBroken(f"{self._key_file} cannot be read; it must belong to the daemon's user") from None
        if state is None:
            raise JournalBroken(f"{self._key_file} is no key of seals: it was changed, or written by something else")
        files.sync_folder(self._key_file.parent)  # who was killed before that left the key's name in memory alone
        data = self._path.read_bytes() if self._path.exists() else b""
        good = _acknowledged(data, state)
        if good < len(data):
            os.truncate(self._path, good)
        if data:
            files.settle(self._path, min(good, 128))
        self._journals = {seal.journal for seal in read_seals(data[:good]).seals if seal.journal}
        return state

    def _add(self, state: KeyState, line: bytes) -> KeyState:
        files.append(self._path, line)
        return self._turn(state)

    def _turn(self, state: KeyState) -> KeyState:
        """Replace the key by the next one, and write over the old one where it stood."""
        following = KeyState(state.first, state.number + 1, key_after(state.key))
        old = os.open(self._key_file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _write_key(self._key_file, following)
            with contextlib.suppress(OSError):  # it is unlinked in any case
                os.pwrite(old, bytes(os.fstat(old).st_size), 0)
                os.fsync(old)
        finally:
            os.close(old)
        return following


def begin(key_file: Path, first_number: int, key: bytes) -> None:
    """Set sealing up: entry `first_number` is the first to be sealed, with this key. Raise DiskFull or StoreError."""
    with translated(f"{key_file} cannot be written"):
        _write_key(key_file, KeyState(first_number, first_number, key))
        give_to_owner(key_file)


def give_to_owner(path: Path) -> None:
    """A file or folder that root made goes to the owner of its folder: the daemon, which goes on with it, may be another."""
    if os.geteuid() == 0 and path.exists():
        owner = path.parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid)


def read_key(key_file: Path) -> KeyState | None:
    """Return what the host keeps of the key; None if there is none, or nothing that is one."""
    try:
        first, number, key = key_file.read_text(encoding="ascii").split()
        state = KeyState(int(first), int(number), bytes.fromhex(key))
    except (FileNotFoundError, ValueError):
        return None
    return state if 0 < state.first <= state.number and len(state.key) == KEY_BYTES else None


def read_all(folder: Path) -> SealsRead:
    """Return the seals beside the journal in this folder; none if there is no such file."""
    try:
        return read_seals((folder / NAME).read_bytes())
    except FileNotFoundError:
        return read_seals(b"")


def _acknowledged(data: bytes, state: KeyState) -> int:
    """How many bytes of the seals to leave: the lines that the key has gone beyond; all, if somebody has changed one of those.

    They are counted: what follows them was never there for good, so that the number it bears may be any, also one of theirs.
    """
    due = state.number - state.first
    numbers = [seal.number for seal in read_seals(data).seals[:due]]
    if numbers != list(range(state.first, state.number)):
        return len(data)
    return sum(len(line) for line in data.splitlines(keepends=True)[:due])


def _write_key(path: Path, state: KeyState) -> None:
    files.write_atomically(path, f"{state.first} {state.number} {state.key.hex()}\n".encode(), 0o600)


def _remove_leftovers(key_file: Path) -> None:
    """A crash before a rename leaves the next key under another name, where it would be the key of old entries one day."""
    for path in key_file.parent.glob(f".{key_file.name}.*"):
        with contextlib.suppress(OSError):
            path.write_bytes(bytes(path.stat().st_size))
            path.unlink()
