"""Brings the journals' files up to what is committed: each slot's by itself, so that none holds up another.

An entry is in the record before it is here, and is marked there once it is in the files and sealed: exactly once, however often
that is interrupted. A journal that cannot be written is opened and checked again before the next entry goes to it.
"""

from dataclasses import replace
from pathlib import Path

from autotuner import log
from autotuner.core.entry import Draft, Flaw
from autotuner.edge import clock
from autotuner.edge.journal import (
    BEGIN,
    Journal,
    Read,
    Recovered,
    compare_with_store,
    journal_files,
    journal_folder,
    journal_slots,
    read_one,
)
from autotuner.edge.outbox import COMMON
from autotuner.edge.seals import Seals
from autotuner.edge.store import Store
from autotuner.errors import AutotunerError, JournalBroken, StoreError
from autotuner.settings import Settings


class Publishing:
    """The journals of all slots, of those that were removed from the settings, and the common one of earlier versions."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings, self._store = settings, store
        self._root = Seals(settings.seal_key, settings.journal)
        self._publishers: tuple[Publisher, ...] = ()

    def publish(self) -> None:
        """Publish what is committed, in each journal as far as it goes. Raise what kept one from it."""
        publishers = self._publishers or self._begun()
        errors: list[AutotunerError] = []
        sealed = True  # the slots' journals are sealed once the common one is, which they go on from
        for publisher in publishers:
            try:
                publisher.publish(sealing=sealed)
            except (StoreError, JournalBroken) as error:
                publisher.close()
                errors.append(error)
                sealed = sealed and publisher.slot != COMMON
        if errors:
            raise min(errors, key=lambda error: not isinstance(error, StoreError))

    def take_over(self, settings: Settings) -> None:
        """Go on with other settings, in which the slots and the places of files are the same."""
        self._settings = settings
        for publisher in self._publishers:
            publisher.journal.file_bytes = settings.journal_file_mib << 20

    def check_again(self) -> None:
        """Something could not be recorded: look at all files anew before anything is added to them."""
        for publisher in self._publishers:
            publisher.close()

    def _begun(self) -> tuple["Publisher", ...]:
        self._store.close_common(clock.utc_label())
        names = dict.fromkeys([*self._store.journals(), *self._settings.slots])
        if COMMON in names or journal_files(self._settings.journal):  # of the latter the record may know nothing
            names = dict.fromkeys([COMMON, *names])
        self._publishers = tuple(Publisher(name, self._settings, self._store, self._root) for name in names)
        return self._publishers


class Publisher:
    """One journal: its files, its seals and its part of the record. `root` seals that the journal is sealed at all."""

    def __init__(self, slot: str, settings: Settings, store: Store, root: Seals) -> None:
        self.slot = slot
        folder = journal_folder(settings.journal, slot)
        self.journal = Journal(folder, settings.journal_file_mib << 20, slot)
        self._store, self._outbox = store, store.outbox(slot)
        self._root, self._key_file = root, settings.seal_key_of(slot)
        self._seals = Seals(self._key_file, folder) if slot != COMMON else root
        self._told = (slot,) if slot != COMMON else tuple(settings.slots)  # in whose journals what happens here is told
        self._open = False
        self._unsealed = ""
        self._log = log.get()

    def publish(self, *, sealing: bool = True) -> None:
        """Append what is committed, seal it and mark it. Raise DiskFull, StoreError or JournalBroken."""
        if not self._open:
            self.open()
        before = self.journal.last_number
        waiting = self._outbox.entries_after(before)
        for entry in waiting:
            self.journal.append(entry)
            # The third place that whoever forges an entry must change, besides the files and the database.
            self._log.info("entry", number=entry.number, title=entry.title, slot=entry.slot, sha256=entry.sha256)
        if sealing and self._root.wanted:
            self._seal(before)
        if waiting or self._outbox.last_published() < self.journal.last_number:
            self._outbox.mark_published(self.journal.last_number)

    def close(self) -> None:
        """Have the files opened and checked again before anything is added to them."""
        self._open = False

    def open(self) -> None:
        """Open the files and say in an entry what was found wrong. Raise DiskFull or StoreError."""
        label = clock.utc_label().replace(" ", "T").replace(":", "")
        origin, published = self._outbox.origin, self._outbox.last_published()
        try:
            found = self.journal.open(label, published, origin)
            self._check_known(found, origin)
        except JournalBroken as error:
            kept = self.journal.set_aside(label)
            self._log.error("the journal was altered", error=str(error), kept=[str(path) for path in kept])
            self.journal.open(label, origin=origin)
            sentence = f"The journal's files had been altered ({error}); they were kept aside and written anew from the record."
            self._note("journal altered", sentence, kept)
        else:
            if found.torn is not None:
                self._note("journal mended", "The end of the journal was torn and was kept aside.", [found.torn])
            if found.number < published:
                sentence = (
                    f"Entries after {found.number:04d} were missing from the journal's files and were written again."
                )
                self._note("journal mended", sentence, [])
        self._open = True

    def _check_known(self, found: Recovered, origin: tuple[int, str]) -> None:
        """A journal whose end the record does not know was rewritten as a whole, or its database was lost."""
        if found.number != origin[0] and self._outbox.entry_hash(found.number) != found.sha256:
            raise JournalBroken(f"entry {found.number} is not the one in the state database")

    def _seal(self, before: int) -> None:
        """Seal what is in the journal now; a key that cannot be used keeps nothing else from work.

        Of what was there `before` sealing was set up, the last entry alone is sealed.
        """
        try:
            if self.slot != COMMON:
                self._root.begin_journal(self.slot, self._key_file, max(before, self._outbox.origin[0] + 1))
            self._seals.keep_up(self.journal.last_number, self._outbox.entries_after)
        except JournalBroken as error:
            if str(error) == self._unsealed:
                return
            self._unsealed = str(error)
            self._log.error("entries are not sealed", error=str(error), slot=self.slot)
            if self.slot != COMMON:  # whose key the slots' journals need as well, and say so
                self._note("not sealed", f"Entries from here on are not sealed: {error}.", [])

    def _note(self, title: str, sentence: str, kept: list[Path]) -> None:
        bullets = tuple(("Kept", path.name) for path in kept)
        for slot in self._told:
            self._store.add_entry(Draft(slot, title, sentence, bullets), clock.utc_label())


def checked(settings: Settings, store: Store) -> list[Read]:
    """Read every journal's files and return what they hold with everything that is wrong with them, compared with the record.

    What the record calls published is asked for first: a running daemon may publish more while the files are read.
    """
    published = {name: store.outbox(name).published() for name in store.journals()}
    common = _compared(read_one(settings.journal, COMMON, BEGIN), store, published)
    found = [common] if common.files or common.flaws else []
    for slot in dict.fromkeys([*journal_slots(settings.journal), *(name for name in published if name != COMMON)]):
        origin = store.outbox(slot).origin if slot in published else common.head
        read = _compared(read_one(settings.journal, slot, origin), store, published)
        if not common.flaws and origin != common.head:
            flaw = Flaw(f"slot {slot}", "its journal does not go on from the end of the one of all slots")
            read = replace(read, flaws=(*read.flaws, flaw))
        found.append(read)
    return found


def _compared(read: Read, store: Store, published: dict[str, list[tuple[int, str]]]) -> Read:
    flaws = compare_with_store(read.entries, published.get(read.slot, []), store.outbox(read.slot).committed())
    where = f"slot {read.slot}, " if read.slot else ""
    return replace(read, flaws=(*read.flaws, *(Flaw(where + flaw.place, flaw.message) for flaw in flaws)))
