"""Pieces that several engines' log lines share: `key: value` pairs, progress bars, raised exceptions."""

import re
from dataclasses import dataclass

NOTE_MAX = 400  # characters of a server's own words kept as evidence; some lines run to many thousands

# Digits are counted: a number of a thousand of them is infinite as a float and an error as an int.
_NUMBER = re.compile(r"\s*(-?[0-9][0-9,]{0,20}(?:\.[0-9]{1,20})?)")
_BAR = re.compile(r"([0-9]{1,3})%(?: Completed )?\s*\|(?:[^|]*\|)?\s*([0-9]{1,9})/([0-9]{1,9})\b")
_PREFIX = r"^(?:\([^()]*\) |\[[^\]]*\] |[A-Z]+ \d\d-\d\d [\d:]{8} )*"
_RAISED = re.compile(_PREFIX + r"((?:\w+\.)*[A-Z]\w*(?:Error|Exception)(?:: |$))")


@dataclass(frozen=True)
class Bar:
    """A progress bar: what it counts, as the engine words it (may be empty), and how far it is."""

    label: str
    done: int
    total: int


def pairs(text: str) -> dict[str, str]:
    """Given `key: value, key: value`, return the pairs; never by position: the order changes by version."""
    found = {}
    for piece in text.split(", "):
        key, colon, value = piece.partition(": ")
        if colon:
            found[key.strip(" .,")] = value.strip(" .,")
    return found


def number(text: str | None) -> float | None:
    """Given the value of a pair, return the number it begins with; None if there is none, as for `nan`."""
    match = _NUMBER.match(text or "")
    if match is None:
        return None
    digits = match.group(1)
    return float(digits.replace(",", "") if "," in digits else digits)


def whole(text: str | None) -> int | None:
    """Given the value of a pair, return the whole number it begins with, or None."""
    value = number(text)
    return int(value) if value is not None else None


def bar(line: str) -> Bar | None:
    """Given a log line, return the last progress bar on it; it may be glued in front of a line or a bar."""
    if "%" not in line or "|" not in line:
        return None
    start, found = 0, None
    for match in _BAR.finditer(line):
        label = line[start : match.start()].rpartition("]")[2].strip(" :")
        found = Bar(label, int(match.group(2)), int(match.group(3)))
        start = match.end()
    return found


def group_of(pattern: re.Pattern[str], line: str) -> str | None:
    """Given a pattern with groups, return the group that matched in the line, or None."""
    match = pattern.search(line)
    return next((group for group in match.groups() if group is not None), None) if match else None


def raised(line: str) -> str:
    """Given a log line, return the exception that it names as the last line of a traceback, '' if it names none."""
    match = _RAISED.match(line)
    return line[match.start(1) :].strip() if match else ""


def is_raised(line: str) -> bool:
    """Given a log line, tell whether it is the last line of a traceback: `torch.OutOfMemoryError: ...`."""
    return bool(_RAISED.match(line))
