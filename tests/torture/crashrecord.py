"""What stands around the journals' own code on a disk in memory: a record in the database's place, the daemon's publishing, settings."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from autotuner import publishing
from autotuner.core.entry import GENESIS, Draft, Entry, render
from autotuner.edge.outbox import CLOSED, COMMON
from autotuner.edge.seals import Seals
from torture.disk import Disk, DiskPath

SLOTS = ("s", "t")
FILE_BYTES = 2600  # a journal file has three or four entries, so that every run goes over several


class Record:
    """What publishing asks of the store, with the store's promise: what was committed is there. `entries` are (journal, entry)."""

    def __init__(self, entries: list[tuple[str, Entry]], published: dict[str, int]) -> None:
        self.entries, self.published_to = entries, published
        self.after: Callable[[], None] = lambda: None
        self.common_only = False  # an earlier version's: whatever it tells is told in the journal of all slots

    def add_entry(self, draft: Draft, at: str, *, journal: str | None = None) -> Entry:
        """Commit an entry of its slot's journal, or of another, with the end of the common one if it is the first of its own."""
        name = COMMON if self.common_only else draft.slot if journal is None else journal
        if name != COMMON and not self.outbox(name).mine:
            self._end_common(at)
        number, prev = self.outbox(name).head
        entry = render(draft, number + 1, at, prev)
        self.entries.append((name, entry))
        self.after()
        return entry

    def close_common(self, at: str) -> None:
        """End the journal of all slots, if there is one that was not ended yet."""
        if self._end_common(at):
            self.after()

    def _end_common(self, at: str) -> bool:
        common = self.outbox(COMMON).mine
        if not common or common[-1].title == CLOSED:
            return False
        last = common[-1]
        self.entries.append((COMMON, render(Draft("-", CLOSED, "It ends."), last.number + 1, at, last.sha256)))
        return True

    def journals(self) -> list[str]:
        """The journals that have entries."""
        return list(dict.fromkeys(name for name, _ in self.entries))

    def outbox(self, journal: str) -> "Outbox":
        """The entries of one journal."""
        return Outbox(self, journal)


@dataclass
class Outbox:
    """One journal's part of a record."""

    record: Record
    journal: str

    @property
    def mine(self) -> list[Entry]:
        """Its entries, in order."""
        return [entry for name, entry in self.record.entries if name == self.journal]

    @property
    def origin(self) -> tuple[int, str]:
        if self.mine:
            return self.mine[0].number - 1, self.mine[0].prev
        return self.record.outbox(COMMON).head if self.journal != COMMON else (0, GENESIS)

    @property
    def head(self) -> tuple[int, str]:
        return (self.mine[-1].number, self.mine[-1].sha256) if self.mine else self.origin

    def entry_hash(self, number: int) -> str:
        return next((entry.sha256 for entry in self.mine if entry.number == number), "")

    def entries_after(self, number: int) -> list[Entry]:
        return [entry for entry in self.mine if entry.number > number]

    def last_published(self) -> int:
        return self.record.published_to.get(self.journal, self.origin[0])

    def mark_published(self, number: int) -> None:
        self.record.published_to[self.journal] = number
        self.record.after()

    def committed(self) -> list[tuple[int, str]]:
        return [(entry.number, entry.sha256) for entry in self.mine]

    def published(self) -> list[tuple[int, str]]:
        return [(number, sha256) for number, sha256 in self.committed() if number <= self.last_published()]


class Quiet:
    """A log that nobody reads."""

    def info(self, *_: Any, **__: Any) -> None: ...

    error = info


class Daemon:
    """The daemon's own publishing, and nothing else of it. `journals` are those that it knows at its start."""

    def __init__(self, disk: Disk, record: Record, *, common_only: bool = False) -> None:
        self.settings: Any = settings_on(disk)
        record.common_only = common_only
        self._publishing = publishing.Publishing(self.settings, record)  # type: ignore[arg-type]
        if common_only:  # as earlier versions did
            root = Seals(self.settings.seal_key, self.settings.journal)
            self._publishing._publishers = (publishing.Publisher(COMMON, self.settings, record, root),)  # type: ignore[arg-type]
            self._bound()

    @property
    def publishers(self) -> tuple[publishing.Publisher, ...]:
        return self._publishing._publishers

    def open(self) -> dict[str, int]:
        """Open the journals as the daemon does; return how far the files of each go."""
        self._publishing._begun()
        self._bound()
        for publisher in self.publishers:
            publisher.open()
        return self.acknowledged

    def publish(self) -> None:
        """What the daemon does each cycle."""
        if not self.publishers:
            self._publishing._begun()
            self._bound()
        self._publishing.publish()

    def _bound(self) -> None:
        for publisher in self.publishers:
            publisher.journal.file_bytes = FILE_BYTES

    @property
    def well(self) -> bool:
        """Whether every journal is open, with nothing in doubt."""
        return bool(self.publishers) and all(publisher._open for publisher in self.publishers)

    @property
    def acknowledged(self) -> dict[str, int]:
        """How far each journal says that entries are durable."""
        return {p.slot: p.journal.last_number for p in self.publishers if p._open and not p.journal._poisoned}


def settings_on(disk: Disk) -> Any:
    """Settings of two slots, with their files on a disk in memory."""
    state: Any = DiskPath("/state").on(disk)
    return SimpleNamespace(
        slots=dict.fromkeys(SLOTS),
        journal=state / "journal",
        journal_file_mib=1,
        seal_key=state / "seal.key",
        seal_key_of=lambda slot: state / "seal.keys" / slot,
    )
