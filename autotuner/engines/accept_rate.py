"""SGLang's `accept rate`, which three definitions share one name: to the share of drafts accepted, or to nothing.

A rate of 0.25 with four draft tokens is nothing accepted in one release and a quarter in another; the accept length
never changed its meaning. Read in the sources of 0.5.3 to 0.5.23 (pull requests 13212 and 23530).
"""

import re
from enum import StrEnum

FIT_LINES = 3  # two-decimal roundings of two definitions may coincide on one line
ROUNDING = 0.0051


class Definition(StrEnum):
    """What is divided by what; L is the accept length with the bonus token, N the draft tokens, S the steps."""

    OVER_STEPS = "L / (S + 1)"  # 0.5.3 and 0.5.4
    OVER_DRAFT_TOKENS = "L / N"  # 0.5.5 to 0.5.10
    WITHOUT_BONUS = "(L - 1) / (N - 1)"  # 0.5.11 on


_SINCE = (
    ((0, 5, 11), Definition.WITHOUT_BONUS),
    ((0, 5, 5), Definition.OVER_DRAFT_TOKENS),
    ((0, 5, 3), Definition.OVER_STEPS),
)


def definition_of(version: str) -> Definition | None:
    """Given an SGLang version such as `0.5.12.post1`, return its definition; None before 0.5.3 or if unreadable."""
    parts = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    if parts is None:
        return None
    release = tuple(int(part) for part in parts.groups())
    return next((definition for since, definition in _SINCE if release >= since), None)


def definition_by_fit(lines: list[tuple[float, float]], steps: int, draft_tokens: int) -> Definition | None:
    """Given (accept length, accept rate) of lines and the launch's figures, return the only definition that fits all.

    None for fewer than three lines, and where none fits or more than one does.
    """
    if len(lines) < FIT_LINES:
        return None
    fitting = [
        definition
        for definition in Definition
        if all(abs(rate - printed(definition, length, steps, draft_tokens)) <= ROUNDING for length, rate in lines)
    ]
    return fitting[0] if len(fitting) == 1 else None


def printed(definition: Definition, accept_len: float, steps: int, draft_tokens: int) -> float:
    """Given a definition and an accept length, return the rate that such a release prints."""
    if definition is Definition.OVER_STEPS:
        return accept_len / (steps + 1)
    if definition is Definition.OVER_DRAFT_TOKENS:
        return accept_len / draft_tokens
    return (accept_len - 1) / (draft_tokens - 1) if draft_tokens > 1 else 0.0


def accepted_share(rate: float, definition: Definition | None, steps: int, draft_tokens: int) -> float | None:
    """Given a printed rate, return accepted / drafted in 0..1; None where the definition is not known.

    All three are turned back into the accept length first, of which (L - 1) / (N - 1) is the share of the drafts.
    """
    if definition is None or draft_tokens < 2:
        return None
    if definition is Definition.WITHOUT_BONUS:
        return rate
    length = rate * (steps + 1 if definition is Definition.OVER_STEPS else draft_tokens)
    return max(0.0, (length - 1) / (draft_tokens - 1))
