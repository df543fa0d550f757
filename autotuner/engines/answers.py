"""Pieces that the readers of info endpoints share: JSON of any shape -> numbers and words that are safe to keep.

What a server answers is untrusted: it may be HTML, cut off, nested without end, or hold secrets. Nothing here raises.
"""

import json
from typing import Any

from autotuner.core.candidate import Candidate
from autotuner.core.redact import one_line, redact_text

WORD_MAX = 80  # characters of a name: a version, a backend, a method
COUNT_MAX = 10**12  # more than any server holds of anything
_UNSAID = {"", "none", "null", "auto"}


def document(text: str) -> Any:
    """Given an answer, return its JSON; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def table(value: Any) -> dict[str, Any]:
    """Given a piece of JSON, return it if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def rows(value: Any) -> list[dict[str, Any]]:
    """Given a piece of JSON, return the objects in it if it is a list, else none."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def count(value: Any) -> int | None:
    """Given a piece of JSON, return it if it counts something, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= COUNT_MAX:
        return None
    return int(value)


def share(value: Any) -> float | None:
    """Given a piece of JSON, return it if it is a share of something, 0 to 1, else None."""
    return float(value) if isinstance(value, float) and 0 <= value <= 1 else None


def word(value: Any) -> str | None:
    """Given a piece of JSON, return the name it is, on one line and without secrets; None where it leaves it open."""
    if not isinstance(value, str) or value.strip().lower() in _UNSAID:
        return None
    line = one_line(redact_text(value), WORD_MAX)
    return "".join(letter for letter in line if letter.isprintable()).strip() or None


def dtype(value: Any) -> str | None:
    """Given the name of a number format, return it in one spelling: `torch.float8_e5m2` and `fp8_e5m2` are one."""
    name = word(value)
    if name is None:
        return None
    name = name.lower().removeprefix("torch.").replace("float8", "fp8")
    return {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}.get(name, name)


def flag_count(candidate: Candidate, *names: str) -> int | None:
    """Given the spellings of a flag, return the whole number that a candidate gives it; None where it gives none."""
    value = str(candidate.arg(*names))
    return int(value) if value.isascii() and value.isdigit() and len(value) <= 12 else None


def flag_word(candidate: Candidate, *names: str) -> str | None:
    """Given the spellings of a flag, return the name that a candidate gives it; None where it gives none."""
    return word(candidate.arg(*names))
