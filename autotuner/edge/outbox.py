"""The outbox of the journals: entries are numbered, linked and committed with what they explain, and published later.

Each slot has a journal of its own, which nothing of another slot can hold up. Earlier versions had one of all slots, COMMON
here: it is closed once, and the slots' journals go on from its end. Stores and outbox are one: it shares the transactions. What
is asked each cycle is answered from an index, however many entries there are.
"""

import sqlite3
from dataclasses import replace

from autotuner.core.entry import GENESIS, Draft, Entry, render, slot_word
from autotuner.edge.database import Database

COMMON = ""
NO_SLOT = "-"  # in the heading of an entry that is about none; settings allow no such name
CLOSED = "journal closed"


class Outbox:
    """The entries of one journal in the state database."""

    def __init__(self, db: Database, journal: str) -> None:
        self._db, self._journal = db, journal

    @property
    def origin(self) -> tuple[int, str]:
        """The number and hash that the first entry follows: those of the common journal's last entry, if there was one."""
        first = "SELECT number - 1, prev FROM entries WHERE journal = ? ORDER BY number LIMIT 1"
        last = "SELECT number, sha256 FROM entries WHERE journal = ? ORDER BY number DESC LIMIT 1"
        row = self._db.one(first, self._journal) or (self._db.one(last, COMMON) if self._journal != COMMON else None)
        return (int(row[0]), str(row[1])) if row else (0, GENESIS)

    def entry_hash(self, number: int) -> str:
        """Return an entry's hash; empty if there is no such entry."""
        row = self._db.one("SELECT sha256 FROM entries WHERE journal = ? AND number = ?", self._journal, number)
        return str(row["sha256"]) if row else ""

    def last_entry(self) -> int:
        """Return the number of the last entry, published or not; if there is none, that of the one it will follow, or 0."""
        row = self._db.one("SELECT MAX(number) FROM entries WHERE journal = ?", self._journal)
        return int(row[0]) if row and row[0] is not None else self.origin[0]

    def entries_after(self, number: int) -> list[Entry]:
        """Return the entries after a number, in order."""
        rows = self._db.all(
            "SELECT * FROM entries WHERE journal = ? AND number > ? ORDER BY number", self._journal, number
        )
        return [_entry(row) for row in rows]

    def last_published(self) -> int:
        """Return the number of the last entry known to be in the journal's files; if none is, as `last_entry` does."""
        row = self._db.one(
            "SELECT number FROM entries WHERE journal = ? AND published = 1 ORDER BY number DESC LIMIT 1", self._journal
        )
        return int(row[0]) if row else self.origin[0]

    def mark_published(self, number: int) -> None:
        """Record that every entry up to this number is in the journal's files, durably."""
        last = self.last_published()
        self._db.run(
            "UPDATE entries SET published = 1 WHERE journal = ? AND number > ? AND number <= ?",
            *(self._journal, last, number),
        )

    def published(self) -> list[tuple[int, str]]:
        """Return (number, hash) of the published entries."""
        return self._hashes("AND published = 1")

    def committed(self) -> list[tuple[int, str]]:
        """Return (number, hash) of every entry, published or not yet."""
        return self._hashes()

    def _hashes(self, which: str = "") -> list[tuple[int, str]]:
        rows = self._db.all(
            f"SELECT number, sha256 FROM entries WHERE journal = ? {which} ORDER BY number",  # noqa: S608
            self._journal,
        )
        return [(row["number"], row["sha256"]) for row in rows]


class Outboxes:
    """The entries of every journal. `secrets` are the values that must never get into one."""

    def __init__(self, db: Database) -> None:
        self.db = db

    @property
    def secrets(self) -> frozenset[str]:
        """The values that are hidden in whatever is kept."""
        return self.db.secrets

    @secrets.setter
    def secrets(self, values: frozenset[str]) -> None:
        self.db.secrets = values

    def outbox(self, journal: str) -> Outbox:
        """Return the entries of one journal: a slot's, by the slot's name, or COMMON."""
        return Outbox(self.db, journal)

    def journals(self) -> list[str]:
        """Return the names of all journals that have entries, in the order in which they were begun."""
        rows = self.db.all("SELECT journal FROM entries GROUP BY journal ORDER BY MIN(id)")
        return [row["journal"] for row in rows]

    def add_entry(self, draft: Draft, at: str, trial_id: int | None = None) -> Entry:
        """Number, link and commit an entry of its slot's journal; it is published later, however often that takes."""
        journal = slot_word(draft.slot, self.secrets)
        with self.db.transaction():  # no other process may take the same number
            last = self._last(journal)
            if last is None and (last := self._end_of_common(at)) is not None:
                before = f"the journal of all slots, which ended with entry {last[0]:04d}"
                draft = replace(draft, bullets=(*draft.bullets, ("Before this journal", before)))
            return self._add(journal, draft, last or (0, GENESIS), at, trial_id)

    def close_common(self, at: str) -> None:
        """End the journal that all slots had in common in earlier versions, if there is one that was not ended yet."""
        with self.db.transaction():
            self._end_of_common(at)

    def entries(self) -> list[Entry]:
        """Return the entries of all journals in the order of the decisions."""
        return [entry for _, entry in self.decided_after(0)]

    def decided_after(self, row_id: int) -> list[tuple[int, Entry]]:
        """Return (row, entry) of all journals after this row, in the order of the decisions."""
        return [
            (row["id"], _entry(row)) for row in self.db.all("SELECT * FROM entries WHERE id > ? ORDER BY id", row_id)
        ]

    def _last(self, journal: str) -> tuple[int, str] | None:
        row = self.db.one("SELECT number, sha256 FROM entries WHERE journal = ? ORDER BY number DESC LIMIT 1", journal)
        return (int(row["number"]), str(row["sha256"])) if row else None

    def _end_of_common(self, at: str) -> tuple[int, str] | None:
        """The number and hash of the common journal's last entry, which says that it is the last; None without one."""
        last = self._last(COMMON)
        if last is None or self.db.one("SELECT 1 FROM entries WHERE journal > '' LIMIT 1") is not None:
            return last
        row = self.db.one("SELECT title FROM entries WHERE journal = ? AND number = ?", COMMON, last[0])
        if row is not None and row["title"] == CLOSED:
            return last
        slots = self.db.all("SELECT slot FROM entries GROUP BY slot ORDER BY MIN(id)")
        ended = self._add(COMMON, _closing([row["slot"] for row in slots], last[0] + 1), last, at, None)
        return ended.number, ended.sha256

    def _add(self, journal: str, draft: Draft, last: tuple[int, str], at: str, trial_id: int | None) -> Entry:
        entry = render(draft, last[0] + 1, at, last[1], self.secrets)
        self.db.run(
            "INSERT INTO entries (journal, number, slot, title, at, prev, sha256, text, trial_id)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(journal, entry.number, entry.slot, entry.title, entry.at, entry.prev, entry.sha256, entry.text, trial_id),
        )
        return entry


def _closing(slots: list[str], number: int) -> Draft:
    sentence = (
        f"This journal of all slots ends with entry {number:04d}: each slot has its own now, which goes on from there."
    )
    named = ", ".join(slot for slot in slots if slot != NO_SLOT)
    return Draft(NO_SLOT, CLOSED, sentence, (("Told of so far", named), ("Next", "a folder a slot beside this file")))


def _entry(row: sqlite3.Row) -> Entry:
    return Entry(row["number"], row["at"], row["slot"], row["title"], row["prev"], row["sha256"], row["text"])
