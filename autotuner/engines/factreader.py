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
from typing import Any

from autotuner.engines.base import Engine, LogFact, Prefill, Window
from autotuner.engines.logtext import LineSplitter, clean_line

SHAPES_MAX = 2048  # then all are forgotten: texts that never repeat must not fill the memory
PLAIN_MAX = 1024  # bytes; dumps of arguments are longer, come once, and are not worth copies
TRIALS = 4

_DIGITS = b"0123456789"
_NUMBER = re.compile(rb"\d+(?:\.\d+)?")
_NUMBER_IN_TEXT = re.compile(r"\d+")

Value = float | int | str | bool | None


@dataclass(frozen=True)
class _Field:
    """Where one field of a fact comes from: a constant, or number `index` of the line through `convert`."""

    constant: Value = None
    index: int | None = None
    convert: type[int] | type[float] = float


@dataclass(frozen=True)
class _Plan:
    """How the lines of one shape are read: nothing at all, or one window or prefill from the groups of a pattern.

    `template` holds the constants; `moves` says which position takes which group, through which conversion.
    """

    pattern: re.Pattern[bytes] | None = None
    kind: type[Window] | type[Prefill] = Window
    template: tuple[Value, ...] = ()
    moves: tuple[tuple[int, int, type[int] | type[float]], ...] = ()

    def read(self, raw: bytes) -> LogFact | None:
        """The fact on this line; None where the line is not of the pattern after all."""
        match = self.pattern.fullmatch(raw) if self.pattern is not None else None
        if match is None:
            return None
        groups = match.groups()
        values = list(self.template)
        for position, group, convert in self.moves:
            values[position] = convert(groups[group])
        return tuple.__new__(self.kind, values)


_SLOW = _Plan()
_NOTHING = _Plan()


class FactReader:
    """Reads a log of one engine piece by piece; keeps the last `tail` lines for a diagnosis."""

    def __init__(self, engine: Engine, tail: int = 0) -> None:
        self._engine = engine
        self._splitter = LineSplitter()
        self._plans: dict[bytes, _Plan] = {}
        self._tail: deque[bytes] = deque(maxlen=tail)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last complete lines, clean, blank ones left out."""
        return tuple(text for raw in self._tail if (text := clean_line(raw)))

    def feed(self, data: bytes) -> list[LogFact]:
        """Given the next bytes of the log, return the facts on the lines that are now complete."""
        return self._facts(self._splitter.cut(data))

    def flush(self) -> list[LogFact]:
        """Return the facts on the unfinished last line: the log has ended."""
        return self._facts(self._splitter.rest())

    def _facts(self, lines: list[bytes]) -> list[LogFact]:
        self._tail.extend(lines)
        found: list[LogFact] = []
        plans = self._plans
        for raw in lines:
            plan = plans.get(raw.translate(None, _DIGITS))
            if plan is _NOTHING:
                continue
            fact = plan.read(raw) if plan is not None else None
            if fact is not None:
                found.append(fact)
            else:
                found += self._slowly(raw, learn=plan is None)
        return found

    def _slowly(self, raw: bytes, *, learn: bool) -> Iterable[LogFact]:
        text = clean_line(raw)
        facts = self._engine.read_line(text) if text else ()
        if learn and len(raw) <= PLAIN_MAX:
            if len(self._plans) >= SHAPES_MAX:
                self._plans.clear()
            self._plans[raw.translate(None, _DIGITS)] = _plan(self._engine.read_line, raw, facts)
        return facts


def _plan(read: Callable[[str], tuple[LogFact, ...]], raw: bytes, facts: tuple[LogFact, ...]) -> _Plan:
    """Given a line and its facts, return how further lines of its shape are read."""
    numbers = _NUMBER.findall(raw)
    copies = [_copy(raw, trial) for trial in range(TRIALS + 1)]
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
    needed = sorted({f.index for f in known if f.index is not None})
    place = {index: group for group, index in enumerate(needed)}
    moves = tuple((at, place[f.index], f.convert) for at, f in enumerate(known) if f.index is not None)
    plan = _Plan(_pattern(raw, frozenset(needed)), kind, tuple(f.constant for f in known), moves)
    return plan if plan.read(raw) == facts[0] else _SLOW


def _field(rows: list[tuple[list[bytes], Any]]) -> _Field | None:
    """Given the numbers of each copy and what one field became there, return where it comes from; None if unclear."""
    values = [value for _, value in rows]
    if all(value == values[0] and type(value) is type(values[0]) for value in values):
        return _Field(constant=values[0])
    kinds = {type(value) for value in values}
    if kinds not in ({int}, {float}):
        return None
    convert = int if kinds == {int} else float
    counts = {len(numbers) for numbers, _ in rows}
    for index in range(min(counts)) if len(counts) == 1 else ():
        if all(_same(convert, numbers[index], value) for numbers, value in rows):
            return _Field(index=index, convert=convert)
    return None


def _same(convert: type[int] | type[float], number: bytes, value: Any) -> bool:
    try:
        return bool(convert(number) == value)
    except ValueError:  # a whole number was read out of a fraction: that is more than a conversion
        return False


def _copy(raw: bytes, trial: int) -> bytes:
    """The line with other digits, as many as before; in trial 0 all of them are zero."""

    def other(match: re.Match[bytes]) -> bytes:
        seed = zlib.crc32(b"%d %d" % (trial, match.start()))
        return b"%d" % (0 if trial == 0 else seed % 9 + 1)

    return re.sub(rb"\d", other, raw)


def _pattern(raw: bytes, needed: frozenset[int]) -> re.Pattern[bytes]:
    """An expression for lines of this shape whose groups are the needed numbers."""
    pieces, at = [], 0
    for index, match in enumerate(_NUMBER.finditer(raw)):
        digits = rb"\d+\.\d+" if b"." in match.group() else rb"\d+"
        pieces += [re.escape(raw[at : match.start()]), b"(" + digits + b")" if index in needed else digits]
        at = match.end()
    return re.compile(b"".join((*pieces, re.escape(raw[at:]))))
