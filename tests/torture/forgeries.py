"""P8: a journal of 200 entries is forged in every way that fits into the time; each forgery must be found, and no good one doubted.

Three attackers, each with what he can change and what is left to find him by: one who has the files alone (chain and database),
one who has files and database (a checkpoint or the first key, kept elsewhere), and one who has the whole host and with it the
key of the next seal (the same two). Edits inside an entry are read from the entry before on, by the real reader with the number and
hash that it would have there: it stops at the first flaw, so that what stands further up cannot matter.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autotuner.core.entry import GENESIS, Draft, Entry, Flaw, file_header, read_journal, render
from autotuner.core.seal import (
    KeyState,
    check_seals,
    checkpoint,
    key_after,
    read_checkpoint,
    read_seals,
    seal_line,
    since_checkpoint,
)
from autotuner.edge.journal import compare_with_store
from torture import forgedslots
from torture.tally import Tally

ENTRIES = 200
NAME = "2026-02"
AT = "2026-02-23 00:14:07Z"
FIRST_SEALED = 20
AGAIN = "cd tests && python -m torture.forgeries {seed} {kind}"


@dataclass(frozen=True)
class House:
    """What an attacker finds: the journal's entries, what the database knows, the seals and the host's key."""

    texts: tuple[str, ...]
    known: tuple[tuple[int, str], ...]
    seals: bytes
    key: KeyState

    @property
    def data(self) -> bytes:
        """The journal's file."""
        return (file_header(NAME) + "".join(self.texts)).encode()


@dataclass(frozen=True)
class Truth:
    """What was kept elsewhere, where no attacker gets at it."""

    first_key: bytes
    point: str


def draft(rng: random.Random, number: int) -> Draft:
    """Something that an entry may say."""
    words = ["slower", "faster", "|", "`x`", "é", "accept length 1.9", "## no", "-->", "<!-- autotuner entry=1"]
    said = " ".join(rng.choices(words, k=rng.randrange(1, 8)))
    bullets = tuple(("Rule", said) for _ in range(rng.randrange(3)))
    table = (("level", "rate"), ("8", f"{rng.random():.3f}")) if rng.random() < 0.4 else ()
    return Draft("kimi", f"tried {number}", said, bullets, table, quote=("a line", said) if rng.random() < 0.5 else ())


def chain(drafts: list[Draft], after: Entry | None = None) -> list[Entry]:
    """Entries that follow one another, as the store makes them."""
    made: list[Entry] = []
    for one in drafts:
        last = made[-1] if made else after
        made.append(render(one, last.number + 1 if last else 1, AT, last.sha256 if last else GENESIS))
    return made


def sealed(entries: list[Entry], first_key: bytes, first: int) -> tuple[bytes, KeyState]:
    """The seals of entries from `first` on, and the host's key after them."""
    key, lines = first_key, b""
    for entry in entries[first - 1 :]:
        lines += seal_line(key, entry.number, entry.sha256)
        key = key_after(key)
    return lines, KeyState(first, max(first, len(entries) + 1), key)


def house_of(entries: list[Entry], first_key: bytes, first: int = FIRST_SEALED) -> House:
    """A host on which nobody has changed anything."""
    seals, key = sealed(entries, first_key, first)
    return House(tuple(e.text for e in entries), tuple((e.number, e.sha256) for e in entries), seals, key)


def found_by_files(house: House, start: int = 0) -> list[Flaw]:
    """What `journal verify` says: chain and database; of the entries from `start` on, those before being as they were."""
    number, prev = (start + 1, house.known[start - 1][1]) if start else (1, GENESIS)
    data = house.data if not start else (file_header(NAME) + "".join(house.texts[start:])).encode()
    reading = read_journal(NAME, data, prev, number)
    known = list(house.known[start:])
    return list(reading.flaws) or compare_with_store(list(reading.entries), known, known)


def found_elsewhere(house: House, truth: Truth) -> tuple[list[Flaw], list[Flaw]]:
    """What `verify --key` and `verify --since` say beyond that."""
    entries = read_journal(NAME, house.data, GENESIS, 1).entries
    heads = [(entry.number, entry.sha256) for entry in entries]
    by_key, _ = check_seals(truth.first_key, read_seals(house.seals), dict(heads), house.key)
    point = read_checkpoint(truth.point)
    assert point is not None
    return by_key, since_checkpoint(point, heads)


# --- one who has the files


def flipped_bytes(rng: random.Random, entries: list[Entry], stride: int) -> Iterator[tuple[str, int, str]]:
    """(where, entry from which to read, its new text): bytes of all entries, one of `stride`, from a random one on."""
    position = rng.randrange(stride)
    for index, entry in enumerate(entries):
        raw = entry.text.encode()
        while position < len(raw):
            changed = bytearray(raw)
            changed[position] ^= rng.randrange(1, 256)
            yield f"entry {index + 1}, byte {position}", index, bytes(changed).decode("utf-8", "surrogateescape")
            position += stride
        position -= len(raw)


def edited_lines(rng: random.Random, entries: list[Entry]) -> Iterator[tuple[str, int, str]]:
    """Each line of an entry deleted, doubled, swapped with the next, given a blank, or a character of it taken away."""
    for index in rng.sample(range(len(entries)), len(entries)):
        lines = entries[index].text.split("\n")
        for at in range(len(lines)):
            rest = lines[at + 1 :]
            edits = [lines[:at] + rest, [*lines[: at + 1], lines[at], *rest], [*lines[:at], lines[at] + " ", *rest]]
            edits += [[*lines[:at], *rest[:1], lines[at], *rest[1:]]] if rest else []
            edits += [[*lines[:at], lines[at][1:], *rest]] if lines[at] else []
            for kind, edit in enumerate(edits):
                text = "\n".join(edit)
                if text != entries[index].text:
                    yield f"entry {index + 1}, line {at + 1}, edit {kind}", index, text


def moved_entries(rng: random.Random, house: House) -> Iterator[tuple[str, House]]:
    """Entries removed, doubled, swapped and moved, and the tail cut off at each."""
    texts = house.texts
    for at in rng.sample(range(len(texts)), len(texts)):
        other = rng.choice([i for i in range(len(texts)) if i != at])
        rest = texts[:at] + texts[at + 1 :]
        swapped = list(texts)
        swapped[at], swapped[other] = texts[other], texts[at]
        yield f"entry {at + 1} removed", replace(house, texts=rest)
        yield f"entry {at + 1} doubled", replace(house, texts=texts[: at + 1] + texts[at:])
        yield f"entries {at + 1} and {other + 1} swapped", replace(house, texts=tuple(swapped))
        yield f"entry {at + 1} moved to {other + 1}", replace(house, texts=(*rest[:other], texts[at], *rest[other:]))
        yield f"cut off after entry {at}", replace(house, texts=texts[:at])
        inside = rng.randrange(1, len(texts[at]))
        yield f"cut off in entry {at + 1}", replace(house, texts=(*texts[:at], texts[at][:inside]))


def rewritten(rng: random.Random, entries: list[Entry]) -> tuple[str, list[Entry]]:
    """A journal whose hashes are all right, from some entry on another one than was written."""
    at = rng.randrange(len(entries))
    story = chain([draft(rng, 1000 + i) for i in range(rng.randrange(1, 12))], entries[at - 1] if at else None)
    return f"written anew from entry {at + 1}, {len(story)} entries", entries[:at] + story


# --- one who has the database too, and one who has the key of the next seal


def with_database(rng: random.Random, house: House, entries: list[Entry]) -> tuple[str, House]:
    """Files and database changed alike; the seals are left, cut to fit, or taken away."""
    how, forged = rewritten(rng, entries)
    if rng.random() < 0.3:
        cut = rng.randrange(len(entries))
        how, forged = f"cut off after entry {cut}", entries[:cut]
    lines = house.seals.splitlines(keepends=True)
    seals = rng.choice((house.seals, b"".join(lines[: max(0, len(forged) - FIRST_SEALED + 1)]), b""))
    known = tuple((e.number, e.sha256) for e in forged)
    return how, replace(house, texts=tuple(e.text for e in forged), known=known, seals=seals)


def with_host(rng: random.Random, house: House, entries: list[Entry]) -> tuple[str, House]:
    """The same by one who has the host's key: he seals what he can, sets numbers back, or says that sealing began later."""
    how, forged = with_database(rng, house, entries)
    count, key = len(forged.texts), house.key.key
    lines = house.seals.splitlines(keepends=True)
    kept = min(len(lines), max(0, rng.randrange(count + 1) - FIRST_SEALED + 1))
    trick = rng.randrange(5)
    if trick == 0:  # old entries sealed with the newest key
        made = [seal_line(key, n, h) for n, h in forged.known[FIRST_SEALED - 1 + kept :]]
        return how, replace(
            forged, seals=b"".join(lines[:kept]) + b"".join(made), key=KeyState(FIRST_SEALED, count + 1, key)
        )
    if trick == 1:  # and with keys that follow from it
        made = [seal_line(key_after(key, i), n, h) for i, (n, h) in enumerate(forged.known[FIRST_SEALED - 1 + kept :])]
        state = KeyState(FIRST_SEALED, count + 1, key_after(key, len(made)))
        return how, replace(forged, seals=b"".join(lines[:kept]) + b"".join(made), key=state)
    if trick == 2:  # the number set back, so that the last seals look as if they had never been made
        number = FIRST_SEALED + kept
        return how, replace(forged, seals=b"".join(lines[:kept]), key=KeyState(FIRST_SEALED, number, key))
    if trick == 3:  # sealing said to have begun with the last entry
        number, sha256 = forged.known[-1] if forged.known else (1, GENESIS)
        state = KeyState(number, number + 1, key_after(key))
        return how, replace(forged, seals=seal_line(key, number, sha256), key=state)
    state = KeyState(FIRST_SEALED, FIRST_SEALED, key)  # nothing sealed yet, it seems
    return how, replace(forged, seals=b"", key=state)


# --- the part


class Forger:
    """A journal and those who would forge it; each method does some of its kind and returns how many."""

    def __init__(self, tally: Tally, seed: int) -> None:
        self.tally, self.seed = tally, seed
        self.rng = random.Random(f"forgeries {seed}")
        self.entries = chain([draft(self.rng, number) for number in range(1, ENTRIES + 1)])
        first_key = self.rng.randbytes(32)
        self.house = house_of(self.entries, first_key)
        last = self.entries[-1]
        self.truth = Truth(first_key, checkpoint(last.number, last.sha256))

    def check(self, kind: str, what: str, *, found: bool) -> None:
        """A forgery was tried; it must be found."""
        self.tally.counts["forgeries"] += 1
        if found:
            self.tally.held("P8")
        else:
            self.tally.broken("P8", f"{what} is not noticed: {AGAIN.format(seed=self.seed, kind=kind)}")

    def near(self, kind: str, edits: Iterator[tuple[str, int, str]], until: float) -> None:
        """Edits inside an entry: read from the entry before it to the one after it."""
        for what, index, text in edits:
            start, end = max(0, index - 1), min(ENTRIES, index + 2)
            texts = (*self.house.texts[start:index], text, *self.house.texts[index + 1 : end])
            number, prev = (start + 1, self.house.known[start - 1][1]) if start else (1, GENESIS)
            data = (file_header(NAME) + "".join(texts)).encode("utf-8", "surrogateescape")
            reading = read_journal(NAME, data, prev, number)
            self.check(kind, what, found=bool(reading.flaws))
            if time.monotonic() > until:
                return

    def bytes_flipped(self, until: float) -> None:
        """One byte in 37 of all entries, and all of the header's."""
        header = file_header(NAME).encode()
        for position in range(0, len(header), 7):
            changed = bytearray(header)
            changed[position] ^= self.rng.randrange(1, 256)
            reading = read_journal(NAME, bytes(changed) + self.house.texts[0].encode(), GENESIS, 1)
            self.check("bytes", f"byte {position} of the header", found=bool(reading.flaws))
        self.near("bytes", flipped_bytes(self.rng, self.entries, 37), until)

    def lines_edited(self, until: float) -> None:
        """Some thousand edits of lines."""
        edits = edited_lines(self.rng, self.entries)
        self.near("lines", (edit for _, edit in zip(range(3000), edits, strict=False)), until)

    def entries_moved(self, until: float) -> None:
        """Entries removed, doubled, moved, cut off, and journals written anew with right hashes, against the database."""
        for at, (what, forged) in enumerate(moved_entries(self.rng, self.house)):
            self.check("entries", what, found=bool(found_by_files(forged)))
            if time.monotonic() > until or at > 120:
                break
        for _ in range(10):
            what, entries = rewritten(self.rng, self.entries)
            forged = replace(self.house, texts=tuple(e.text for e in entries))
            self.check("entries", what, found=bool(found_by_files(forged)))

    def hosts_taken(self, until: float) -> None:
        """Database and key forged as well: what is kept elsewhere must tell, the key and the checkpoint each by itself."""
        attacks: tuple[Callable[..., tuple[str, House]], ...] = (with_database, with_host)
        for at in range(60):
            what, forged = attacks[at % 2](self.rng, self.house, self.entries)
            by_key, by_point = found_elsewhere(forged, self.truth)
            self.check("hosts", f"{what} with {attacks[at % 2].__name__}, by the first key", found=bool(by_key))
            self.check("hosts", f"{what} with {attacks[at % 2].__name__}, by the checkpoint", found=bool(by_point))
            if time.monotonic() > until:
                break

    def good_ones(self, until: float) -> None:
        """Journals that nobody touched, also as a daemon at work or a crash leaves them, must have no flaw."""
        for at in range(200):
            entries = chain([draft(self.rng, number) for number in range(self.rng.randrange(1, 8))])
            first, key = self.rng.randrange(1, len(entries) + 2), self.rng.randbytes(32)
            house = house_of(entries, key, min(first, max(1, len(entries))))
            if self.rng.random() < 0.5 and entries:  # the last seal is on its way
                cut = self.rng.randrange(len(house.seals.splitlines(keepends=True)[-1]) + 1)
                before, _ = sealed(entries[:-1], key, house.key.first)
                state = sealed(entries[:-1], key, house.key.first)[1]
                house = replace(house, seals=before + house.seals[len(before) :][:cut], key=state)
            said = checkpoint(*self.rng.choice(house.known)) if house.known else "0:" + "0" * 32
            by_key, by_point = found_elsewhere(house, Truth(key, said))
            flaws = [*found_by_files(house), *by_key, *by_point]
            self.tally.counts["good journals"] += 1
            how = f"a good journal ({at}) is doubted: {flaws[:1]}: {AGAIN.format(seed=self.seed, kind='good')}"
            self.tally.check("P8", kept=not flaws, how=how)
            if time.monotonic() > until:
                return

    def slots_forged(self, _until: float) -> None:
        """Whole journals of slots moved, swapped, dropped and begun anew."""

        def check(what: str, found: bool) -> None:
            self.check("slots", what, found=found)

        def good(what: str, kept: bool) -> None:
            self.tally.counts["good journals"] += 1
            how = f"{what} are doubted: {AGAIN.format(seed=self.seed, kind='slots')}"
            self.tally.check("P8", kept=kept, how=how)

        forgedslots.forge(self.rng, check, good)

    @property
    def kinds(self) -> dict[str, Callable[[float], None]]:
        """What there is to do, by the word that a violation names it with."""
        return {
            "bytes": self.bytes_flipped,
            "lines": self.lines_edited,
            "entries": self.entries_moved,
            "hosts": self.hosts_taken,
            "good": self.good_ones,
            "slots": self.slots_forged,
        }


def run(seed: int, seconds: float) -> Tally:
    """Forge journal after journal until the time is over; each round does all kinds."""
    tally, until, number = Tally(), time.monotonic() + seconds, 0
    while number == 0 or time.monotonic() < until:
        for kind in Forger(tally, seed * 100_000 + number).kinds:
            Forger(tally, seed * 100_000 + number).kinds[kind](until)
        number += 1
    tally.counts["journals forged"] = number
    return tally


if __name__ == "__main__":
    result = Tally()
    Forger(result, int(sys.argv[1])).kinds[sys.argv[2]](float("inf"))
    print(result.as_json())
