"""The outbox of the journal: entries are numbered, linked and committed with what they explain, and published later.

Stores and outbox are one: it shares the transactions. Each question is answered from an index, however many entries there are.
"""

from autotuner.core.entry import GENESIS, Draft, Entry, render
from autotuner.edge.database import Database


class Outbox:
    """Entries in the state database. `secrets` are the values that must never get into one."""

    def __init__(self, db: Database) -> None:
        self.db = db

    @property
    def secrets(self) -> frozenset[str]:
        """The values that are hidden in whatever is kept."""
        return self.db.secrets

    @secrets.setter
    def secrets(self, values: frozenset[str]) -> None:
        self.db.secrets = values

    def add_entry(self, draft: Draft, at: str, trial_id: int | None = None) -> Entry:
        """Number, link and commit an entry; it is published to the journal later, however often that takes."""
        with self.db.transaction():  # no other process may take the same number
            last = self.db.one("SELECT number, sha256 FROM entries ORDER BY number DESC LIMIT 1")
            number, prev = (last["number"] + 1, last["sha256"]) if last else (1, GENESIS)
            entry = render(draft, number, at, prev, self.secrets)
            self.db.run(
                "INSERT INTO entries (number, slot, title, at, prev, sha256, text, trial_id)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                *(entry.number, entry.slot, entry.title, entry.at, entry.prev, entry.sha256, entry.text, trial_id),
            )
        return entry

    def entry_hash(self, number: int) -> str:
        """Return an entry's hash; empty if there is no such entry."""
        row = self.db.one("SELECT sha256 FROM entries WHERE number = ?", number)
        return str(row["sha256"]) if row else ""

    def last_entry(self) -> int:
        """Return the number of the last entry, published or not; 0 if there is none."""
        row = self.db.one("SELECT MAX(number) FROM entries")
        return int(row[0] or 0) if row else 0

    def entries_after(self, number: int) -> list[Entry]:
        """Return the entries after a number, in order."""
        rows = self.db.all("SELECT * FROM entries WHERE number > ? ORDER BY number", number)
        return [Entry(r["number"], r["at"], r["slot"], r["title"], r["prev"], r["sha256"], r["text"]) for r in rows]

    def last_published(self) -> int:
        """Return the number of the last entry known to be in the journal; 0 if none is."""
        row = self.db.one("SELECT number FROM entries WHERE published = 1 ORDER BY number DESC LIMIT 1")
        return int(row[0]) if row else 0

    def mark_published(self, number: int) -> None:
        """Record that every entry up to this number is in the journal, durably."""
        last = self.last_published()
        self.db.run("UPDATE entries SET published = 1 WHERE number > ? AND number <= ?", last, number)

    def published(self) -> list[tuple[int, str]]:
        """Return (number, hash) of the published entries."""
        return [
            (r["number"], r["sha256"]) for r in self.db.all("SELECT number, sha256 FROM entries WHERE published = 1")
        ]

    def committed(self) -> list[tuple[int, str]]:
        """Return (number, hash) of every entry, published or not yet."""
        return [(r["number"], r["sha256"]) for r in self.db.all("SELECT number, sha256 FROM entries")]
