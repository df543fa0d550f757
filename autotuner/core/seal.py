"""Seals: each entry's hash authenticated with a key of its own, of which the next is made and the old forgotten. Pure.

Owns the promise that whoever takes over the host cannot rewrite what was decided before: the keys of old entries are not
there any more, and only who kept the first key can make them again. Which key an entry is sealed with follows from its
number, so that an old entry sealed with a newer key is found. The idea is that of forward-secure logs, as in journald.

One first key is enough for all journals: its chain of keys seals, beside the entries of a common journal of earlier versions,
the beginnings of the slots' journals, and each of those gets its own first key from the key that its beginning is sealed with.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotuner.core.entry import GENESIS, Flaw

KEY_BYTES = 32
_LINE = re.compile(rb"(\d+) ([0-9a-f]{64})(?: ([A-Za-z0-9][A-Za-z0-9_-]*))?")


@dataclass(frozen=True)
class Seal:
    """One line of the seals: an entry's number and the code over its number and hash; or that a slot's journal is sealed."""

    number: int
    code: str
    journal: str = ""


@dataclass(frozen=True)
class KeyState:
    """What the host keeps: the numbers of the first line of the seals and of the next one, and the key for that."""

    first: int
    number: int
    key: bytes


@dataclass(frozen=True)
class SealsRead:
    """The seals of a file, in order; how many of its bytes they take; what is wrong with it, but for a torn end."""

    seals: tuple[Seal, ...]
    good_bytes: int
    flaw: str = ""


def key_after(key: bytes, steps: int = 1) -> bytes:
    """Given a key, return the one that follows it after so many entries; there is no way back."""
    for _ in range(steps):
        key = hashlib.sha256(b"autotuner seal: the next key\n" + key).digest()
    return key


def seal_line(key: bytes, number: int, sha256: str) -> bytes:
    """Given an entry's key, its number and its hash, return its line of the seals. Always the same for the same entry."""
    return f"{number} {_code(key, number, sha256)}\n".encode()


def journal_line(key: bytes, number: int, journal: str) -> bytes:
    """Given the key for a line of the seals, return the line which says that a slot's journal is sealed from now on."""
    return f"{number} {_journal_code(key, number, journal)} {journal}\n".encode()


def journal_key(key: bytes, journal: str) -> bytes:
    """Given the key that `journal_line` was made with, return the first key of that journal; there is no way back."""
    return hashlib.sha256(f"autotuner seal: the first key of journal {journal}\n".encode() + key).digest()


def journal_keys(first_key: bytes, read: SealsRead, last: int) -> dict[str, bytes]:
    """Given the first key and seals that are right up to number `last`, return the first key of each journal that those begin.

    What follows may be on its way, and after power loss it may name any journal.
    """
    keys, key = {}, first_key
    right = last - read.seals[0].number + 1 if last else 0
    for seal in read.seals[:right]:
        if seal.journal:
            keys[seal.journal] = journal_key(key, seal.journal)
        key = key_after(key)
    return keys


def read_seals(data: bytes) -> SealsRead:
    """Given the bytes of the seals, return them; a line that a crash left half written is no flaw, and not counted."""
    seals: list[Seal] = []
    position = 0
    while position < len(data):
        line, end, _ = data[position:].partition(b"\n")
        match = _LINE.fullmatch(line)
        if not end or (match is None and b"\0" in line):
            break
        if match is None:
            return SealsRead(tuple(seals), position, f"line {len(seals) + 1} is no seal")
        seals.append(Seal(int(match[1]), match[2].decode(), (match[3] or b"").decode()))
        position += len(line) + 1
    return SealsRead(tuple(seals), position)


def check_seals(
    first_key: bytes, read: SealsRead, entries: Mapping[int, str], state: KeyState | None
) -> tuple[list[Flaw], int]:
    """Given the first key, the seals, hashes of entries by number and the host's key, return flaws and the last sealed.

    The host's key must be read before the seals, and the seals before the journal: a daemon may work meanwhile. What comes
    after the last seal was not sealed yet; that none was cut off is what the host's key proves, which cannot be wound back.
    A seal that is not older than the host's key is on its way, and may be half written.
    """
    if state is not None and hmac.compare_digest(state.key, first_key):
        return [], 0  # nothing was sealed for good so far: afterwards nobody can know the first key
    first, key, last = (read.seals[0].number if read.seals else 0), first_key, 0
    begun: set[str] = set()
    for due, seal in enumerate(read.seals, first):
        if wrong := _wrong(seal, due, key, entries):
            if state is None or due < state.number:
                return [wrong], last
            break
        if seal.journal in begun:
            return [Flaw("seals", f"begin the journal of slot {seal.journal} more than once")], last
        begun |= {seal.journal} - {""}
        key, last = key_after(key), due
    if read.flaw and (state is None or last + 1 < state.number):
        return [Flaw("seals", read.flaw)], last
    return _state_flaws(first_key, state, first, last), last


def _wrong(seal: Seal, due: int, key: bytes, entries: Mapping[int, str]) -> Flaw | None:
    if seal.number != due:
        return Flaw("seals", f"have {seal.number} where {due} is due: one is missing, moved or doubled")
    if seal.journal:
        right = hmac.compare_digest(seal.code, _journal_code(key, due, seal.journal))
        return None if right else Flaw("seals", f"{due}: the journal of slot {seal.journal} was begun with another key")
    if due not in entries:
        return Flaw(f"entry {due:04d}", "was sealed and is missing from the files")
    if not hmac.compare_digest(seal.code, _code(key, due, entries[due])):
        return Flaw(f"entry {due:04d}", "is not the one that was sealed, or it was sealed with another key")
    return None


def _state_flaws(first_key: bytes, state: KeyState | None, first: int, last: int) -> list[Flaw]:
    if state is None:
        return [Flaw("seal key", "is missing: whether the last entries were cut off cannot be told")]
    if not last:
        return [Flaw("seals", "are missing, or they were begun with another key than the one given")]
    if state.number > last + 1:
        return [Flaw("seals", f"end at {last}, and were written to {state.number - 1}: their end was cut off")]
    if state.number < first or not hmac.compare_digest(state.key, key_after(first_key, state.number - first)):
        return [Flaw("seal key", "does not follow from the key given: it was changed, or another one is meant")]
    return []


def _journal_code(key: bytes, number: int, journal: str) -> str:
    return hmac.new(key, f"autotuner journal {number} {journal}".encode(), hashlib.sha256).hexdigest()


def _code(key: bytes, number: int, sha256: str) -> str:
    return hmac.new(key, f"autotuner entry {number} {sha256}".encode(), hashlib.sha256).hexdigest()


# --- what a person keeps elsewhere


def checkpoint(number: int, sha256: str) -> str:
    """Given the last entry's number and hash, return a line short enough to be pasted into a chat or a ticket."""
    return f"{number}:{sha256[:32]}"


def checkpoints(heads: Mapping[str, tuple[int, str]]) -> str:
    """Given the number and hash of each journal's last entry by slot, return one checkpoint; one alone has no name."""
    if len(heads) == 1:
        return checkpoint(*next(iter(heads.values())))
    return ",".join(f"{slot}={checkpoint(*head)}" for slot, head in heads.items()) or checkpoint(0, GENESIS)


def read_checkpoint(text: str) -> tuple[int, str] | None:
    """Given what `checkpoint` made (or more of the hash), return the number and the hash's beginning; None if it is none."""
    match = re.fullmatch(r"(\d{1,12}):([0-9a-f]{32,64})", text.strip().lower())
    return (int(match[1]), match[2]) if match else None


def read_checkpoints(text: str) -> dict[str, tuple[int, str]] | None:
    """Given what `checkpoints` made, return each point by its slot, '' where none is named; None if it is no checkpoint."""
    found: dict[str, tuple[int, str]] = {}
    for part in text.strip().split(","):
        slot, named, point = part.strip().rpartition("=")
        read = read_checkpoint(point)
        if read is None or slot in found or bool(named) != bool(slot):
            return None
        found[slot] = read
    return found


def since_checkpoint(point: tuple[int, str], entries: Sequence[tuple[int, str]]) -> list[Flaw]:
    """Given a checkpoint and (number, hash) of a chain that verifies, return a flaw unless the chain extends it."""
    number, begins = point
    if number == 0:
        return []
    sha256 = dict(entries).get(number)
    if sha256 is None:
        return [Flaw(f"entry {number:04d}", "was in the journal when the checkpoint was made, and is missing")]
    if not sha256.startswith(begins):
        return [
            Flaw(f"entry {number:04d}", "is another than when the checkpoint was made: the journal was written anew")
        ]
    return []


def since_checkpoints(
    points: Mapping[str, tuple[int, str]], chains: Mapping[str, Sequence[tuple[int, str]]]
) -> list[Flaw]:
    """Given checkpoints by slot and the chain of each slot's journal from its very beginning, return what does not extend them.

    A point without a slot was made where there was one journal: one of those that there are now must extend it.
    """
    flaws: list[Flaw] = []
    for slot, point in points.items():
        if slot and slot not in chains:
            flaws.append(Flaw(f"slot {slot}", "had a journal when the checkpoint was made, and has none"))
        tried = [since_checkpoint(point, chain) for name, chain in chains.items() if slot in {"", name}]
        tried = tried or ([] if slot else [since_checkpoint(point, ())])
        if tried and all(tried):
            flaws += [Flaw(f"slot {slot}, {flaw.place}" if slot else flaw.place, flaw.message) for flaw in tried[0]]
    return flaws
