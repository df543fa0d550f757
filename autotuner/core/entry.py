"""A decision and its evidence -> one Markdown entry; parse and verify entries; the hash that links them. Pure.

Owns the promise that no entry can be changed, lost or reordered unnoticed, and that no text a server wrote can pass for
a part of the journal. The format is written down in journal/FORMAT.md.
"""

import hashlib
import re
from dataclasses import dataclass, field

from autotuner.core.redact import hide, one_line, plain

GENESIS = "0" * 64
QUOTE_LIMIT = 4096  # characters of a server's own words in one entry

_MARKUP = re.compile(r"<(?=[A-Za-z/!?])")  # what HTML could begin with; `a < b` stays readable
_BOLD = re.compile(r"(?<!\*)\*\*(?!\*)")  # would end the bold sentence; three are a hidden secret
_HEADING = re.compile(r"^## (\d{4,}) · (\d{4,}-\d\d-\d\d \d\d:\d\d:\d\dZ) · slot (\S+) · (.+)$")
_TRAILER = re.compile(r"^<!-- autotuner entry=(\d+) prev=([0-9a-f]{64}) sha256=([0-9a-f]{64}) -->$")


@dataclass(frozen=True)
class Draft:
    """What an entry is to say. `bullets` are (label, text); `quote` is the server's own words, line by line."""

    slot: str
    title: str
    sentence: str
    bullets: tuple[tuple[str, str], ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    quote: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """An entry as it stands in the journal."""

    number: int
    at: str
    slot: str
    title: str
    prev: str
    sha256: str
    text: str

    @property
    def sentence(self) -> str:
        """The one bold sentence that says what was decided."""
        lines = self.text.split("\n")
        return lines[2].strip("*") if len(lines) > 2 else ""


@dataclass(frozen=True)
class Flaw:
    """Something wrong in a journal: where, and what."""

    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


@dataclass(frozen=True)
class Reading:
    """A journal file taken apart: its entries in order, the flaws, and how many bytes are good from its start."""

    entries: tuple[Entry, ...] = ()
    flaws: tuple[Flaw, ...] = ()
    good_bytes: int = field(default=0)


def render(draft: Draft, number: int, at: str, prev: str, secrets: frozenset[str] = frozenset()) -> Entry:
    """Given a draft, its number, its time (UTC, `YYYY-MM-DD HH:MM:SSZ`) and the hash before it, return the entry."""

    def hidden(text: str) -> str:
        return hide(text, secrets)

    def safe(text: str, limit: int = 2000) -> str:
        return _safe(hidden(text), limit)

    slot = slot_word(draft.slot, secrets)
    title = safe(draft.title, 200) or "untitled"
    lines = [f"## {number:04d} · {at} · slot {slot} · {title}", "", f"**{safe(draft.sentence)}**", ""]
    if draft.table:
        lines += [*_table([[safe(cell, 200).replace("|", "\\|") for cell in row] for row in draft.table]), ""]
    for note in draft.notes:
        lines += [f"\\* {safe(note)}", ""]
    lines += [f"- {safe(label, 80)}: {safe(text)}" for label, text in draft.bullets]
    if draft.bullets:
        lines.append("")
    if draft.quote:
        quoted = plain(hidden("\n".join(draft.quote)), QUOTE_LIMIT)
        # A line of text ends the list above: indented lines right after a list would be read as a part of it.
        lines += ["The server's own words:", ""]
        lines += [f"    {line.rstrip()}" for line in quoted.split("\n") if line.strip()]
        lines.append("")
    body = "\n".join(lines) + "\n"
    sha256 = link(prev, body)
    text = f"{body}<!-- autotuner entry={number} prev={prev} sha256={sha256} -->\n\n"
    return Entry(number, at, slot, title, prev, sha256, text)


def slot_word(slot: str, secrets: frozenset[str] = frozenset()) -> str:
    """Given a slot's name, return it as it stands in headings: one word; settings allow no name that this would change."""
    return re.sub(r"\s+", "-", one_line(_safe(hide(slot, secrets), 2000), 64)) or "-"


def link(prev: str, body: str) -> str:
    """Given the hash of the entry before and an entry's text down to its last line, return the entry's hash."""
    return hashlib.sha256(f"{prev}\n{body}".encode()).hexdigest()


def file_title(stem: str, slot: str) -> str:
    """Given a journal file's name without its ending and whose journal it is ('' for one of all slots), return its title."""
    return f"{stem} · slot {slot}" if slot else stem


def file_header(name: str) -> str:
    """Given a journal file's title, return the fixed lines it begins with."""
    return (
        f"# autotuner journal {name}\n\n"
        "Append-only; each entry ends with a line that carries the hash of the one before. Check it: "
        "`autotuner journal verify`.\n\n"
    )


def read_journal(name: str, data: bytes, prev: str, number: int) -> Reading:
    """Given a file's title and bytes, the hash and number expected before its first entry, return what it holds.

    Stops at the first flaw: nothing after it can be trusted. Bytes after the last whole entry are a flaw as well.
    """
    header = file_header(name).encode()
    if not data.startswith(header):
        return Reading(flaws=(Flaw(name, "the header was changed"),))
    entries: list[Entry] = []
    position = len(header)
    while position < len(data):
        end = _entry_end(data, position)
        entry = _entry(data[position:end], prev, number + len(entries)) if end else None
        if not isinstance(entry, Entry):
            place = f"{name}, entry {number + len(entries):04d}"
            message = entry or "cut short: its last line is missing"
            return Reading(tuple(entries), (Flaw(place, message),), position)
        entries.append(entry)
        prev = entry.sha256
        position = end
    return Reading(tuple(entries), (), position)


def _entry_end(data: bytes, position: int) -> int:
    """Where the entry that starts at `position` ends; 0 if it does not. No quoted line can begin like a hash line."""
    trailer = data.find(b"\n<!-- autotuner ", position)
    stop = data.find(b"\n\n", trailer + 1) if trailer >= 0 else -1
    return stop + 2 if stop >= 0 else 0


def _entry(data: bytes, prev: str, number: int) -> Entry | str:
    """One entry's bytes -> the entry, or what is wrong with it."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "contains bytes that are no text"
    lines = text.split("\n")
    heading, trailer = _HEADING.match(lines[0]), _TRAILER.match(lines[-3]) if len(lines) > 3 else None
    if heading is None:
        return "does not begin with a heading"
    if trailer is None:
        return "does not end with its hash line"
    if int(trailer.group(1)) != number or int(heading.group(1)) != number or heading.group(1) != f"{number:04d}":
        return f"is numbered {heading.group(1)}, expected {number:04d}: an entry is missing, moved or doubled"
    if trailer.group(2) != prev:
        return "does not follow the entry before it: something was changed, removed or moved"
    if trailer.group(1) != str(number):
        return "its hash line was changed"
    body = "\n".join(lines[:-3]) + "\n"
    if link(prev, body) != trailer.group(3):
        return "its text was changed after it was written"
    return Entry(number, heading.group(2), heading.group(3), heading.group(4), prev, trailer.group(3), text)


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    shown = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return [shown[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *shown[1:]]


def _safe(text: str, limit: int) -> str:
    return _MARKUP.sub("&lt;", _BOLD.sub("* *", one_line(text, limit)))
