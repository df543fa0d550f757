"""P7 for the database: what SQLite acknowledged is there after power loss, and nothing half.

A store is worked while its files are copied at every acknowledged commit. From a copy come the files that power loss may leave: of
the log (`-wal`) everything that was synced at that commit, and of what was written after it any prefix, torn at any byte, zeros, or
turned bits; the database file as it was then, or with any of the pages that a checkpoint was writing back. Each is opened by the real
store: every acknowledged change must be there, SQLite's own check must pass, and the next commit must work. That a commit syncs the
log is SQLite's promise under `synchronous=FULL`, which the store is asked for; it is not tried here.
"""

import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from autotuner.core.entry import Draft
from autotuner.edge.store import Store
from autotuner.errors import AutotunerError
from torture.tally import Tally

AT = "2026-02-23 00:14:07Z"
COMMITS = 12
OF_ONE_COMMIT = 40
FULL = 2
PAGE = 4096


@dataclass(frozen=True)
class Acknowledged:
    """The files right after a commit returned, and how many entries were committed by then."""

    database: bytes
    wal: bytes
    entries: int


def commit(store: Store, rng: random.Random) -> None:
    """Two changes that belong together."""
    with store.transaction():
        entry = store.add_entry(Draft("s", "t", "word " * rng.randrange(1, 200)), AT)
        store.update_slot("s", paused=f"entry {entry.number}")


def reference(folder: Path, rng: random.Random) -> list[Acknowledged]:
    """Work a store and copy its files at each commit; now and then the log is written back into the database."""
    store, kept = Store(folder / "state.db"), list[Acknowledged]()
    assert store.db.one("PRAGMA synchronous")[0] == FULL  # type: ignore[index]
    assert store.db.one("PRAGMA journal_mode")[0] == "wal"  # type: ignore[index]
    for number in range(1, COMMITS + 1):
        commit(store, rng)
        if rng.random() < 0.15:
            store.db.run("PRAGMA wal_checkpoint(PASSIVE)")
        wal = folder / "state.db-wal"
        kept.append(Acknowledged((folder / "state.db").read_bytes(), wal.read_bytes(), number))
    store.close()
    return kept


def after_power_loss(rng: random.Random, now: Acknowledged, later: Acknowledged) -> tuple[bytes, bytes]:
    """The database and the log as they may be found: what was synced, and any part of what was written afterwards."""
    same = next(
        (i for i, (a, b) in enumerate(zip(now.wal, later.wal, strict=False)) if a != b),
        min(len(now.wal), len(later.wal)),
    )
    if same < len(now.wal):
        return now.database, now.wal  # the log was begun anew, which happens only once the database is synced
    if now.database != later.database:  # a checkpoint was under way, which begins once the log is synced
        pages = [(now, later)[rng.randrange(2)].database[at : at + PAGE] for at in range(0, len(later.database), PAGE)]
        return b"".join(pages), later.wal
    fresh = bytearray(later.wal[len(now.wal) :])
    for _ in range(rng.randrange(3)):
        if fresh:
            start = rng.randrange(len(fresh))
            if rng.random() < 0.5:
                end = min(len(fresh), start + rng.choice((1, 512, 4096)))
                fresh[start:end] = bytes(end - start)
            else:
                fresh[start] ^= 1 << rng.randrange(8)
    if rng.random() < 0.8:
        del fresh[rng.randrange(len(fresh) + 1) :]
    return now.database, now.wal + bytes(fresh)


def wrong(folder: Path, now: Acknowledged, most: int) -> str:
    """Open what was found; return what is wrong with it."""
    store = None
    try:
        store = Store(folder / "state.db")
        store.db.require_intact()
        entries = store.entries()
        if not now.entries <= len(entries) <= most:
            return f"{now.entries} commits were acknowledged, {len(entries)} are there"
        if store.slot("s").paused != f"entry {len(entries)}":
            return f"half of commit {len(entries)} is there: {store.slot('s').paused}"
        commit(store, random.Random(0))
        if len(store.entries()) != len(entries) + 1:
            return "the next commit is not there"
    except AutotunerError as error:
        return f"it cannot be used: {error}"
    finally:
        if store is not None:
            store.close()
    return ""


def round_of(tally: Tally, rng: random.Random, how: str, until: float) -> None:
    """One reference run and states of every commit of it."""
    place = Path(tempfile.mkdtemp(prefix="torture-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        (place / "real").mkdir()
        kept = reference(place / "real", rng)
        for now, later in zip(kept, [*kept[1:], kept[-1]], strict=True):
            for _ in range(OF_ONE_COMMIT):
                found = place / "found"
                found.mkdir()
                database, wal = after_power_loss(rng, now, later)
                (found / "state.db").write_bytes(database)
                (found / "state.db-wal").write_bytes(wal)
                said = wrong(found, now, later.entries)
                shutil.rmtree(found)
                tally.counts["crash states of the database"] += 1
                tally.check("P7", kept=not said, how=f"{said} (commit {now.entries}, {how})")
            if time.monotonic() > until:
                return
    finally:
        shutil.rmtree(place)


def run(seed: int, seconds: float) -> Tally:
    """Rounds until the time is over."""
    tally, until, number = Tally(), time.monotonic() + seconds, 0
    while number == 0 or time.monotonic() < until:
        how = f"round {number}: python -m torture --part databases --seed {seed}"
        round_of(tally, random.Random(f"databases {seed}/{number}"), how, until)
        number += 1
    return tally
