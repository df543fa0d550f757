r"""Bytes of a server's log -> facts, fast enough for any log: what a line says is read once for each of its shapes.

A server under load prints a few kinds of lines over and over, alike but for their numbers. The first line of a shape
is read by the engine's own reader, and so are copies of it with other numbers; if every fact is then a constant or one
of the numbers, the shape's further lines are read by one regular expression. Whatever does not bear that out (a value
that decides what is said, a sum, a quotient) goes to the engine's reader line by line. So the fast way can say nothing
that the slow way would not.
"""

import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from autotuner.engines.base import Engine, LogFact, Prefill, Window
from autotuner.engines.logtext import LineSplitter, clean_line

SHAPES_MAX = 2048  # then all are forgotten: texts that never repeat must not fill the memory
PLAIN_MAX = 1024  # bytes; dumps of arguments are longer, come once, and are not worth copies
PLANS_MAX = 64  # of one shape: one for each rank that prints such lines
TRIALS = 4

_DIGITS = b"0123456789"
_NUMBER = re.compile(rb"\d+(?:\.\d+)?")
_NAMED = re.compile(rb"(?:[A-Za-z]|Engine )\d+")  # TP0, DP12, Engine 003: a name of the line's, not a figure on it

Value = float | int | str | bool | None


Convert = Callable[[bytes], float]


def _percent(number: bytes) -> float:
    return float(number) / 100


_CONVERSIONS: tuple[Convert, ...] = (int, float, _percent)


@dataclass(frozen=True)
class _Field:
    """Where one field of a fact comes from: a constant, or number `index` of the line through `convert`."""

    constant: Value = None
    index: int | None = None
    convert: Convert = float


_Plan = Callable[[bytes], LogFact | None]
"""How the lines of one shape are read; None for a line that is not of the shape after all."""


def _reader(
    pattern: re.Pattern[bytes],
    kind: type[Window | Prefill],
    constants: tuple[Value, ...],
    converts: tuple[Convert, ...],
    ordered: Callable[[tuple[Value, ...]], tuple[Value, ...]],
) -> _Plan:
    """A plan for a window or prefill: its constants and the pattern's converted groups, put into the order of its fields.

    A closure, and one call for all groups where all are plain numbers: this is what every line of a busy log costs.
    """
    match = pattern.fullmatch
    new = tuple.__new__
    plain = all(convert is float for convert in converts)

    def read(raw: bytes) -> LogFact | None:
        found = match(raw)
        if found is None:
            return None
        groups = found.groups()
        figures = map(float, groups) if plain else [convert(g) for convert, g in zip(converts, groups, strict=True)]
        return new(kind, ordered((*constants, *figures)))

    return read


_SLOW: list[_Plan] = []  # these three are told apart by identity
_NOTHING: list[_Plan] = []
_NEW: list[_Plan] = []


class FactReader:
    """Reads a log of one engine piece by piece; counts its `lines` and keeps the last `tail` of them for a diagnosis."""

    def __init__(self, engine: Engine, tail: int = 0) -> None:
        self._engine = engine
        self._splitter = LineSplitter()
        self._plans: dict[bytes, list[_Plan]] = {}
        self._once: set[bytes] = set()
        self._tail: deque[bytes] = deque(maxlen=tail)
        self.lines = 0

    @property
    def tail(self) -> tuple[str, ...]:
        """The last complete lines, clean, blank ones left out."""
        return self.since(0)

    def since(self, line: int) -> tuple[str, ...]:
        """The kept lines after this many, clean, blank ones left out."""
        kept = list(self._tail)[max(0, len(self._tail) - (self.lines - line)) :]
        return tuple(text for raw in kept if (text := clean_line(raw)))

    def feed(self, data: bytes) -> list[LogFact]:
        """Given the next bytes of the log, return the facts on the lines that are now complete."""
        return self._facts(self._splitter.cut(data))

    def flush(self) -> list[LogFact]:
        """Return the facts on the unfinished last line: the log has ended."""
        return self._facts(self._splitter.rest())

    def _facts(self, lines: list[bytes]) -> list[LogFact]:
        self._tail.extend(lines)
        self.lines += len(lines)
        found: list[LogFact] = []
        plans = self._plans
        for raw in lines:
            shape = raw.translate(None, _DIGITS)
            known = plans.get(shape, _NEW)
            if known is _NOTHING:
                continue
            for plan in known:
                fact = plan(raw)
                if fact is not None:
                    found.append(fact)
                    break
            else:
                found += self._slowly(raw, shape)
        return found

    def _slowly(self, raw: bytes, shape: bytes) -> Iterable[LogFact]:
        """Read a line by the engine's own reader, and learn from it unless its shape is known to teach nothing."""
        text = clean_line(raw)
        facts = self._engine.read_line(text) if text else ()
        known = self._plans.get(shape)
        if known is _SLOW or len(raw) > PLAIN_MAX:
            return facts
        if known is None and len(self._plans) >= SHAPES_MAX:
            self._plans.clear()
        if known is None and shape not in self._once:
            if len(self._once) >= SHAPES_MAX:
                self._once.clear()
            self._once.add(shape)
            return facts  # most lines of a start come once, and texts of users never twice
        plan = _plan(self._engine.read_line, raw, facts)
        if isinstance(plan, list):
            self._plans[shape] = plan
        else:
            self._plans[shape] = [*(known or ()), plan] if len(known or ()) < PLANS_MAX else _SLOW
        return facts


def _plan(read: Callable[[str], tuple[LogFact, ...]], raw: bytes, facts: tuple[LogFact, ...]) -> _Plan | list[_Plan]:
    """Given a line and its facts, return how further lines of its shape are read: a plan, _NOTHING or _SLOW."""
    numbers = _NUMBER.findall(raw)
    names = frozenset(match.end() for match in _NAMED.finditer(raw)) if facts else frozenset()
    copies = [_copy(raw, trial, names) for trial in range(TRIALS + 1)]
    others = [(copy, read(clean_line(copy))) for copy in copies]
    if not facts:
        return _NOTHING if not any(said for _, said in others) else _SLOW
    kind: type[Window | Prefill] = Window if isinstance(facts[0], Window) else Prefill
    if any([type(fact) for fact in said] != [kind] for said in (facts, *(said for _, said in others))):
        return _SLOW
    rows: list[tuple[list[bytes], tuple[Any, ...]]] = [(numbers, tuple(facts[0]))]  # type: ignore[arg-type]
    rows += [(_NUMBER.findall(copy), tuple(said[0])) for copy, said in others]  # type: ignore[arg-type]
    fields = [_field([(found, fact[position]) for found, fact in rows]) for position in range(len(rows[0][1]))]
    if any(f is None for f in fields):
        return _SLOW
    known = [f for f in fields if f is not None]
    moved = sorted((f.index, at) for at, f in enumerate(known) if f.index is not None)
    if len({index for index, _ in moved}) != len(moved):
        return _SLOW  # one number for two fields: a group can be moved once
    fixed = [at for at, f in enumerate(known) if f.index is None]
    source = {at: place for place, at in enumerate([*fixed, *(at for _, at in moved)])}
    plan = _reader(
        _pattern(raw, frozenset(index for index, _ in moved), names),
        kind,
        tuple(known[at].constant for at in fixed),
        tuple(known[at].convert for _, at in moved),
        itemgetter(*(source[at] for at in range(len(known)))),
    )
    return plan if plan(raw) == facts[0] else _SLOW


def _field(rows: list[tuple[list[bytes], Any]]) -> _Field | None:
    """Given the numbers of each copy and what one field became there, return where it comes from; None if unclear."""
    values = [value for _, value in rows]
    if all(value == values[0] and type(value) is type(values[0]) for value in values):
        return _Field(constant=values[0])
    kinds = {type(value) for value in values}
    counts = {len(numbers) for numbers, _ in rows}
    if kinds not in ({int}, {float}) or len(counts) != 1:
        return None
    for index in range(min(counts)):
        for convert in _CONVERSIONS:
            if all(_same(convert, numbers[index], value) for numbers, value in rows):
                return _Field(index=index, convert=convert)
    return None


def _same(convert: Convert, number: bytes, value: Any) -> bool:
    try:
        made = convert(number)
    except ValueError:  # a whole number was read out of a fraction: that is more than a conversion
        return False
    return bool(made == value) and type(made) is type(value)


def _copy(raw: bytes, trial: int, names: frozenset[int]) -> bytes:
    """The line with other digits, as many as before; in trial 0 all of them are zero. Names keep theirs."""

    def other(match: re.Match[bytes]) -> bytes:
        if match.end() in names:
            return match.group()
        digits = (zlib.crc32(b"%d %d" % (trial, at)) % 9 + 1 for at in range(match.start(), match.end()))
        return b"".join(b"0" if trial == 0 else b"%d" % digit for digit in digits)

    return re.sub(rb"\d+", other, raw)


def _pattern(raw: bytes, needed: frozenset[int], names: frozenset[int]) -> re.Pattern[bytes]:
    """An expression for lines of this shape and these names whose groups are the needed numbers."""
    pieces, at = [], 0
    for index, match in enumerate(_NUMBER.finditer(raw)):
        if match.end() in names:
            continue
        digits = rb"\d+\.\d+" if b"." in match.group() else rb"\d+"
        pieces += [re.escape(raw[at : match.start()]), b"(" + digits + b")" if index in needed else digits]
        at = match.end()
    return re.compile(b"".join((*pieces, re.escape(raw[at:]))))
