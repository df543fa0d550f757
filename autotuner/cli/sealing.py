"""What `journal` does about seals: begin them in every journal, and check them with the first key."""

from dataclasses import dataclass, field
from pathlib import Path

from autotuner.cli.common import State
from autotuner.core.entry import Flaw
from autotuner.core.seal import KeyState, SealsRead, check_seals, journal_keys
from autotuner.edge.files import FolderLock
from autotuner.edge.journal import Read, journal_folder, journal_slots
from autotuner.edge.outbox import COMMON
from autotuner.edge.seals import NAME, Seals, give_to_owner, read_all, read_key
from autotuner.errors import Locked
from autotuner.settings import Settings


@dataclass
class Sealed:
    """What the first key says: to which entry each journal is sealed, by slot, and what does not agree."""

    last: dict[str, int] = field(default_factory=dict)
    flaws: list[Flaw] = field(default_factory=list)

    def said(self, read: Read | None) -> str:
        """Given a journal, return how far it is sealed, to be put behind what is said of it."""
        if read is None:
            return ", nothing sealed yet"
        last = self.last.get(read.slot, 0)
        waiting = len([entry for entry in read.entries if entry.number > last])
        return f", sealed to {last:04d}" + (f"; {waiting} not sealed yet" if waiting else "")


class Sealing:
    """What keys and seals say, read in the order that a working daemon asks for: a key, its seals, and then the journal."""

    def __init__(self, settings: Settings, first_key: bytes) -> None:
        self._first_key = first_key
        self._key = read_key(settings.seal_key)
        self._seals = read_all(settings.journal)
        names = [seal.journal for seal in self._seals.seals if seal.journal]
        self._of: dict[str, tuple[KeyState | None, SealsRead]] = {}
        for slot in names:
            key = read_key(settings.seal_key_of(slot))
            self._of[slot] = (key, read_all(journal_folder(settings.journal, slot)))

    def check(self, journals: list[Read], slot: str | None = None) -> Sealed:
        """Given what the journals hold, return how far they are sealed; of one slot alone if it is given."""
        hashes = {read.slot: {entry.number: entry.sha256 for entry in read.entries} for read in journals}
        found = Sealed()
        found.flaws, last = check_seals(self._first_key, self._seals, hashes.get(COMMON, {}), self._key)
        if COMMON in hashes:
            found.last[COMMON] = min(last, max(hashes[COMMON], default=0))
        if found.flaws:
            return found
        for name, first_key in journal_keys(self._first_key, self._seals, last).items():
            if slot not in {None, name}:
                continue
            key, seals = self._of[name]
            flaws, found.last[name] = check_seals(first_key, seals, hashes.get(name, {}), key)
            found.flaws += [Flaw(f"slot {name}, {flaw.place}", flaw.message) for flaw in flaws]
        return found


def seal_paths(settings: Settings) -> list[Path]:
    """Return every file and folder of seals and their keys that is there."""
    folders = [settings.journal, *(journal_folder(settings.journal, slot) for slot in journal_slots(settings.journal))]
    paths = [settings.seal_key, settings.seal_key_of("x").parent, *(folder / NAME for folder in folders)]
    return [path for path in paths if path.is_file() or (path.is_dir() and any(path.iterdir()))]


def seal_now(state: State, journals: list[Read]) -> None:
    """Seal each journal's last entry at once, so that the first key is forgotten here; a running daemon does it itself."""
    lock = FolderLock(state.settings.lock_file)
    try:
        lock.acquire()
    except Locked:
        return
    try:
        base = state.settings.journal
        root = Seals(state.settings.seal_key, base)
        for read in [read for read in journals if read.entries]:  # the daemon begins the others with their first
            number, folder = read.head[0], journal_folder(base, read.slot)
            outbox, seals = state.store.outbox(read.slot), root
            if read.slot != COMMON:
                key_file = state.settings.seal_key_of(read.slot)
                root.begin_journal(read.slot, key_file, number)
                seals = Seals(key_file, folder)
            seals.keep_up(number, outbox.entries_after)
            give_to_owner(folder / NAME)
        give_to_owner(base / NAME)
    finally:
        lock.release()
