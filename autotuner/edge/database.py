"""The SQLite connection: durability pragmas, one transaction at a time, errors translated.

WAL with synchronous=FULL: NORMAL would lose acknowledged commits on power loss, and at tens of commits an hour the cost
is nothing.
"""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any

from autotuner.core.redact import hide_values, one_line
from autotuner.edge.files import make_folder, write_over_itself
from autotuner.errors import DiskFull, StoreError

SCHEMA_VERSION = "9"
# What turns a database of one schema into one of the next; a step is never changed once it was released.
MIGRATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "1": (
        "2",
        (
            "ALTER TABLE launches ADD COLUMN engine_version TEXT",
            "ALTER TABLE launches ADD COLUMN configuration TEXT",
            "ALTER TABLE trials ADD COLUMN basis TEXT",
            "CREATE TABLE IF NOT EXISTS policies (sha256 TEXT PRIMARY KEY, file TEXT NOT NULL, text TEXT NOT NULL)",
        ),
    ),
    "2": (
        "3",
        (
            "ALTER TABLE trials ADD COLUMN confirms INTEGER",
            "ALTER TABLE trials ADD COLUMN parent INTEGER",
            "ALTER TABLE trials ADD COLUMN answers TEXT NOT NULL DEFAULT '[]'",
        ),
    ),
    "3": (
        "4",
        (
            """CREATE TABLE IF NOT EXISTS proposals (
                id INTEGER PRIMARY KEY AUTOINCREMENT, trial_id INTEGER NOT NULL, slot TEXT NOT NULL, state TEXT NOT NULL,
                fired TEXT NOT NULL, level INTEGER, known TEXT, at TEXT NOT NULL, name TEXT NOT NULL DEFAULT '', body TEXT,
                file TEXT NOT NULL DEFAULT '', said TEXT NOT NULL DEFAULT '', gain REAL, gpu_s REAL,
                why TEXT NOT NULL DEFAULT '', queued_as INTEGER)""",
        ),
    ),
    "4": ("5", ("ALTER TABLE trials ADD COLUMN alpha REAL",)),
    "5": ("6", ("ALTER TABLE results ADD COLUMN gaps BLOB",)),
    "6": (
        "7",
        (
            "ALTER TABLE trials ADD COLUMN force INTEGER NOT NULL DEFAULT 0",
            "ALTER TABLE slots ADD COLUMN stopped TEXT NOT NULL DEFAULT ''",
            "ALTER TABLE slots ADD COLUMN force INTEGER NOT NULL DEFAULT 0",
        ),
    ),
    "7": (
        "8",
        (
            "ALTER TABLE entries RENAME TO common_entries",
            """CREATE TABLE entries (
                id INTEGER PRIMARY KEY, journal TEXT NOT NULL, number INTEGER NOT NULL, slot TEXT NOT NULL,
                title TEXT NOT NULL, at TEXT NOT NULL, prev TEXT NOT NULL, sha256 TEXT NOT NULL, text TEXT NOT NULL,
                trial_id INTEGER, published INTEGER NOT NULL DEFAULT 0, UNIQUE (journal, number))""",
            """INSERT INTO entries SELECT number, '', number, slot, title, at, prev, sha256, text, trial_id, published
                FROM common_entries ORDER BY number""",
            "DROP TABLE common_entries",
        ),
    ),
    "8": ("9", ("ALTER TABLE launches ADD COLUMN gpu_pids TEXT NOT NULL DEFAULT '[]'",)),
}
BUSY_TIMEOUT_S = 10.0


class Database:
    """One connection to the state database; opens and creates it."""

    def __init__(self, path: Path) -> None:
        self.secrets: frozenset[str] = frozenset()  # values that must never get into a column
        with translated(path):
            make_folder(path.parent)
            self._connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        self._path = path
        self._settled = False
        try:
            with translated(path):
                self._connection.row_factory = sqlite3.Row
                for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                    self._connection.execute(f"PRAGMA {pragma}")
                self._create()
        except StoreError:
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside is committed together or not at all; one inside another is a part of it.

        Raise DiskFull or StoreError.
        """
        if self._connection.in_transaction:
            yield
            return
        # IMMEDIATE: a deferred transaction that turns into a writer fails at once in spite of the busy timeout.
        self.run("BEGIN IMMEDIATE")
        try:
            self._settle()
            yield
            self.run("COMMIT")
        except BaseException:
            # SQLite may have rolled back by itself, as it does where the disk is full.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def run(self, sql: str, *values: Any) -> sqlite3.Cursor:
        """Run one statement."""
        with translated(self._path):
            return self._connection.execute(sql, values)

    def one(self, sql: str, *values: Any) -> sqlite3.Row | None:
        """Run a query and return its first row, or None."""
        with translated(self._path):
            row: sqlite3.Row | None = self._connection.execute(sql, values).fetchone()
            return row

    def all(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """Run a query and return its rows."""
        with translated(self._path):
            return self._connection.execute(sql, values).fetchall()

    def hidden(self, value: Any) -> Any:
        """Given a value for a column, texts and JSON alike, return it with known secrets hidden."""
        return hide_values(value, self.secrets)

    def data_version(self) -> int:
        """A number that changes when another process has committed."""
        row = self.one("PRAGMA data_version")
        return int(row[0]) if row else 0

    @property
    def changes(self) -> int:
        """How many rows this connection has changed; a change that was taken back counts, too."""
        return self._connection.total_changes

    def check(self) -> str:
        """Return what SQLite's own quick check finds; `ok` if nothing."""
        row = self.one("PRAGMA quick_check")
        return str(row[0]) if row else "no answer"

    def require_intact(self) -> None:
        """Raise StoreError with what SQLite's own quick check finds, if it finds anything."""
        found = self.check()
        if found != "ok":
            raise StoreError(
                f"the state database {self._path} is damaged: {one_line(found, 200)}; stop the daemon, and put a backup in its "
                "place or move it away"
            )

    def _settle(self) -> None:
        """Before this process's first change: make durable what an earlier one left in the write-ahead log.

        A commit whose sync failed was reported as failed. But its frames are in the kernel's memory, taken for clean: who
        opens the log after a crash finds them committed, builds on them, and no later sync would write them. The write lock
        is held, so the log does not change meanwhile.
        """
        if self._settled:
            return
        with translated(self._path):
            try:
                fd = os.open(f"{self._path}-wal", os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return
            try:
                write_over_itself(fd, 0, os.fstat(fd).st_size)
                os.fsync(fd)
            finally:
                os.close(fd)
        self._settled = True

    def _create(self) -> None:
        row = self._connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
        if row is not None:
            found = self._connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
            if found is not None:
                if found[0] != SCHEMA_VERSION:
                    self._migrate()
                return
        schema = (files("autotuner.edge") / "schema.sql").read_text(encoding="utf-8")
        self._connection.executescript(
            f"BEGIN IMMEDIATE; {schema} INSERT OR IGNORE INTO meta VALUES ('schema', '{SCHEMA_VERSION}'); COMMIT;"  # noqa: S608
        )

    def _migrate(self) -> None:
        """Bring an older database up to date, all steps in one transaction. Raise StoreError for an unknown schema."""
        with self.transaction():  # of two programs that open it at once, the second finds it done
            found = self._connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()[0]
            while found != SCHEMA_VERSION:
                if found not in MIGRATIONS:
                    raise StoreError(
                        f"the state database {self._path} has schema {found}; this autotuner knows {SCHEMA_VERSION}"
                    )
                found, statements = MIGRATIONS[found]
                for statement in statements:
                    self._connection.execute(statement)
                self._connection.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (found,))


class translated:  # noqa: N801 - it reads as a function where it is used
    """Turn SQLite's and the file system's errors into ours, so that the loop can tell a full disk from a bug.

    A class, since it is entered for every statement, and one made of a generator takes longer than most of these.
    """

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if isinstance(error, sqlite3.OperationalError | sqlite3.IntegrityError):
            text = str(error)
            if "full" in text or "disk I/O error" in text:
                raise DiskFull(f"the state database {self._path} cannot be written: {text}") from error
            raise StoreError(f"the state database {self._path}: {text}") from error
        if isinstance(error, sqlite3.DatabaseError):
            raise StoreError(f"the state database {self._path} is damaged: {error}") from error
        if isinstance(error, OSError):
            full = error.errno in {errno.ENOSPC, errno.EDQUOT}
            raise (DiskFull if full else StoreError)(f"the state database {self._path}: {error.strerror}") from error
