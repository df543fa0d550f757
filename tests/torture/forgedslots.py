"""P8 where there are several journals: what is forged by moving, swapping, dropping and beginning whole journals must be found.

The house is real: the daemon's own publishing writes journals of three slots to a folder, half of the time going on from one of all
slots, and seals them. The attackers are those of `forgeries`: who has the files (the chains and the database find him), who has the
database too, and who has the host's keys as well (a checkpoint, and the first key, each by itself).
"""

import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autotuner import publishing
from autotuner.cli.journal import chains
from autotuner.cli.sealing import Sealing
from autotuner.core.entry import Draft, Entry, file_header, file_title, render
from autotuner.core.seal import (
    checkpoints,
    journal_key,
    journal_line,
    key_after,
    read_checkpoints,
    seal_line,
    since_checkpoints,
)
from autotuner.edge.journal import journal_files, journal_folder
from autotuner.edge.outbox import COMMON
from autotuner.edge.seals import begin, read_key
from autotuner.edge.store import Store
from autotuner.publishing import Publishing, checked
from torture.crashrecord import Quiet

SLOTS = ("a", "b", "c")
AT = "2026-02-23 00:14:07Z"


@dataclass
class House:
    """A state folder with its journals, and what was kept elsewhere: the first key and a checkpoint."""

    folder: Path
    first_key: bytes = b""
    point: str = ""

    @property
    def settings(self) -> Any:
        return SimpleNamespace(
            slots=dict.fromkeys(SLOTS),
            journal=self.folder / "journal",
            journal_file_mib=1,
            seal_key=self.folder / "seal.key",
            seal_key_of=lambda slot: self.folder / "seal.keys" / slot,
        )

    def copy(self, where: Path) -> "House":
        shutil.copytree(self.folder, where)
        return House(where, self.first_key, self.point)

    def file(self, slot: str) -> Path:
        return journal_files(journal_folder(self.folder / "journal", slot))[-1]

    def sql(self, statement: str, *values: object) -> list[Any]:
        with closing(sqlite3.connect(self.folder / "state.db")) as db, db:
            return db.execute(statement, values).fetchall()

    def found(self) -> tuple[int, int, int]:
        """How many flaws the files show, the first key, and the checkpoint, each by itself."""
        sealing, store = Sealing(self.settings, self.first_key), Store(self.folder / "state.db")
        with closing(store):
            journals = checked(self.settings, store)
        points = read_checkpoints(self.point)
        assert points is not None
        by_files = sum(len(read.flaws) for read in journals)
        return by_files, len(sealing.check(journals).flaws), len(since_checkpoints(points, chains(journals)))


def built(rng: random.Random, folder: Path) -> House:
    """A house in which each slot has decided something, sealed from the beginning or from somewhere on."""
    house = House(folder, rng.randbytes(32))
    with closing(Store(folder / "state.db")) as store:
        if rng.random() < 0.5:  # of an earlier version, which published it as well
            for number in range(rng.randrange(1, 4)):
                store.add_entry(Draft(rng.choice(SLOTS), f"tried {number}", "It was tried."), AT)
            _as_one(store)
        daemon = Publishing(house.settings, store)
        sealed_at = rng.randrange(2)
        for number in range(3):
            if number == sealed_at:
                common = store.outbox(COMMON).last_entry()
                begin(house.settings.seal_key, max(1, common), house.first_key)
            for slot in SLOTS * rng.randrange(1, 3):
                store.add_entry(Draft(slot, f"tried {number}", rng.choice(("faster", "slower", "## no"))), AT)
            daemon.publish()
        heads = {slot: (store.outbox(slot).last_entry(), store.outbox(slot).committed()[-1][1]) for slot in SLOTS}
    house.point = checkpoints(heads)
    return house


def _as_one(store: Store) -> None:
    """Make one journal of all entries, as earlier versions had it."""
    made, last = store.entries(), (0, "0" * 64)
    store.db.run("DELETE FROM entries")
    for entry in made:
        last_made = render(Draft(entry.slot, entry.title, "It was tried."), last[0] + 1, AT, last[1])
        _insert(store.db.run, COMMON, last_made)
        last = (last_made.number, last_made.sha256)
    store.db.run("UPDATE entries SET published = 0")


def _insert(run: Callable[..., Any], journal: str, entry: Entry) -> None:
    run(
        "INSERT INTO entries (journal, number, slot, title, at, prev, sha256, text, published)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1)",
        *(journal, entry.number, entry.slot, entry.title, entry.at, entry.prev, entry.sha256, entry.text),
    )


# --- one who has the files


def swapped(house: House, one: str, other: str) -> None:
    """Two slots' files change places."""
    mine, theirs = house.file(one).read_bytes(), house.file(other).read_bytes()
    house.file(one).write_bytes(theirs)
    house.file(other).write_bytes(mine)


def swapped_with_headers(house: House, one: str, other: str) -> None:
    """The same, with the first lines of the files put right."""
    mine, theirs = house.file(one).read_text(), house.file(other).read_text()
    house.file(one).write_text(theirs.replace(f"slot {other}\n", f"slot {one}\n", 1))
    house.file(other).write_text(mine.replace(f"slot {one}\n", f"slot {other}\n", 1))


def folder_renamed(house: House, one: str, _other: str) -> None:
    """A journal is said to be that of a slot that never was."""
    house.file(one).parent.rename(house.file(one).parent.with_name("d"))


def removed(house: House, one: str, _other: str) -> None:
    """A slot's files are gone."""
    house.file(one).unlink()


def entry_of_another(house: House, one: str, other: str) -> None:
    """The last entry of one journal is added to another."""
    [(text,)] = house.sql("SELECT text FROM entries WHERE journal = ? ORDER BY number DESC LIMIT 1", other)
    house.file(one).write_text(house.file(one).read_text() + text)


def a_journal_more(house: House, one: str, _other: str) -> None:
    """A journal of a slot that never was, copied from one that is."""
    shutil.copytree(house.file(one).parent, house.folder / "journal" / "d")


# --- one who has the database too


def gone(house: House, one: str, _other: str) -> None:
    """A slot's journal is gone with all that belongs to it."""
    shutil.rmtree(house.file(one).parent)
    house.settings.seal_key_of(one).unlink()
    house.sql("DELETE FROM entries WHERE journal = ?", one)


def written_anew(house: House, one: str, _other: str) -> None:
    """A slot's journal is another one than was written, from its first entry on, with hashes that are right."""
    number, prev = house.sql("SELECT number, prev FROM entries WHERE journal = ? ORDER BY number", one)[0]
    path, texts = house.file(one), []
    house.sql("DELETE FROM entries WHERE journal = ?", one)
    for at in range(number, number + 9):
        entry = render(Draft(one, "forged", "It never was."), at, AT, prev)
        _insert(house.sql, one, entry)
        texts.append(entry.text)
        prev = entry.sha256
    path.write_text(file_header(file_title(path.stem, one)) + "".join(texts))


# --- one who has the host's keys as well


def begun_again(house: House, one: str, _other: str) -> None:
    """Written anew, and sealed as if its journal had only now begun; the line that says when it did is kept."""
    written_anew(house, one, _other)
    _seal_from_now(house, one, (house.folder / "journal" / "seals").read_bytes())


def begun_later(house: House, one: str, _other: str) -> None:
    """The same, and the old line is taken away."""
    written_anew(house, one, _other)
    lines = (house.folder / "journal" / "seals").read_bytes().splitlines(keepends=True)
    _seal_from_now(house, one, b"".join(line for line in lines if not line.endswith(f" {one}\n".encode())))


def never_begun(house: House, one: str, _other: str) -> None:
    """Gone, and the line that it was begun is gone, too; the lines behind it are made anew with the key that is there."""
    gone(house, one, _other)
    state = read_key(house.settings.seal_key)
    assert state is not None
    path = house.folder / "journal" / "seals"
    lines = path.read_bytes().splitlines(keepends=True)
    cut = next(at for at, line in enumerate(lines) if line.endswith(f" {one}\n".encode()))
    key, kept = state.key, lines[:cut]
    for line in lines[cut + 1 :]:
        kept.append(journal_line(key, state.first + len(kept), line.split()[-1].decode()))
        key = key_after(key)
    path.write_bytes(b"".join(kept))
    house.settings.seal_key.write_text(f"{state.first} {state.first + len(kept)} {key.hex()}\n")


def _seal_from_now(house: House, slot: str, lines: bytes) -> None:
    state = read_key(house.settings.seal_key)
    assert state is not None
    path = house.folder / "journal" / "seals"
    path.write_bytes(lines + journal_line(state.key, state.number, slot))
    house.settings.seal_key.write_text(f"{state.first} {state.number + 1} {key_after(state.key).hex()}\n")
    key, seals = journal_key(state.key, slot), b""
    entries = house.sql("SELECT number, sha256 FROM entries WHERE journal = ? ORDER BY number", slot)
    for number, sha256 in entries:
        seals += seal_line(key, number, sha256)
        key = key_after(key)
    (house.file(slot).parent / "seals").write_bytes(seals)
    house.settings.seal_key_of(slot).write_text(f"{entries[0][0]} {entries[-1][0] + 1} {key.hex()}\n")


@contextmanager
def without_a_log() -> Iterator[None]:
    """What is published is not printed."""
    before = publishing.log
    publishing.log = SimpleNamespace(get=Quiet)  # type: ignore[assignment]
    try:
        yield
    finally:
        publishing.log = before


OF_FILES = (swapped, swapped_with_headers, folder_renamed, removed, entry_of_another, a_journal_more)
OF_HOSTS = (gone, written_anew, begun_again, begun_later, never_begun)
Told = Callable[[str, bool], None]


def forge(rng: random.Random, check: Told, good: Told) -> None:
    """Build a house and forge it in every way; `check` hears of each forgery whether it was found, `good` of the real one."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="torture-", dir=memory) as where, without_a_log():
        real = built(rng, Path(where, "real"))
        good("journals of several slots that nobody touched", not any(real.found()))
        for number, attack in enumerate((*OF_FILES, *OF_HOSTS)):
            forged = real.copy(Path(where, str(number)))
            one, other = rng.sample(SLOTS, 2)
            attack(forged, one, other)
            by_files, by_key, by_point = forged.found()
            if attack in OF_FILES:
                check(attack.__name__, by_files > 0)
            else:
                check(f"{attack.__name__}, by the first key", by_key > 0)
                check(f"{attack.__name__}, by the checkpoint", by_point > 0)
