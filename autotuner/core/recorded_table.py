"""A table of figures (CSV) -> what was recorded of each candidate. Pure.

A table has one figure where a recording has many windows. A row is spread over equal windows, so within a launch nothing
varies, and the only doubt left is the noise between launches: verdicts on a table are as sure as its figures are.
"""

import csv
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autotuner.core.candidate import NAME, Candidate
from autotuner.core.recorded import BenchmarkUsed, RecordedLevel, RecordedTrial, progress_of
from autotuner.core.source import Source, nearest
from autotuner.engines.base import Effective, Speculation, Window
from autotuner.errors import InvalidInput, Problem

COLUMNS = (
    "config", "engine", "level", "output_tok_s", "accept_len", "num_steps", "running", "queued", "requests_failed",
    "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "void", "note",
)  # fmt: skip
REQUIRED = ("config", "level", "output_tok_s")
REST = "more cells than columns"


@dataclass(frozen=True)
class Row:
    """One row: figures of one level of one configuration, None where the table leaves them out."""

    line: int
    config: str
    engine: str
    level: int
    output_tok_s: float
    figures: Mapping[str, float]
    void: str = ""
    note: str = ""


def parse_table(source: Source) -> tuple[Row, ...]:
    """Given a CSV text with a header, return its rows. Raise InvalidInput naming every problem with its line."""
    reader = csv.DictReader(source.text.splitlines(keepends=True), restkey=REST)
    header = [name.strip() for name in reader.fieldnames or ()]
    problems = [Problem(source.name, f"the column {name} is missing", 1) for name in REQUIRED if name not in header]
    problems += [
        Problem(source.name, f"there is no column called {name}", 1, hint=nearest(name, list(COLUMNS)))
        for name in header
        if name not in COLUMNS
    ]
    if problems:
        raise InvalidInput(problems)
    reader.fieldnames = header
    rows: list[Row] = []
    for cells in reader:
        if cells.pop(REST, None):
            message = f"has more cells than the header's {len(header)}; a number or note with a comma goes in quotes"
            problems.append(Problem(source.name, message, reader.line_num))
            continue
        texts = {k: (v or "").strip() for k, v in cells.items()}
        row = _row(source, reader.line_num, texts, problems) if any(texts.values()) else None
        if row is not None:
            _against(source, row, rows, problems)
            rows.append(row)
    if not rows and not problems:
        problems.append(Problem(source.name, "has no rows"))
    if problems:
        raise InvalidInput(problems)
    return tuple(rows)


def _against(source: Source, row: Row, before: list[Row], problems: list[Problem]) -> None:
    """What a row says otherwise than those before it."""
    same = [other for other in before if other.config == row.config]
    if any(other.level == row.level for other in same):
        problems.append(Problem(source.name, f"a second row for {row.config} at level {row.level}", row.line))
    other = next((other.engine for other in same if other.engine and row.engine and other.engine != row.engine), None)
    if other is not None:
        message = f"{row.config} is of engine {other} above, and of {row.engine} here"
        problems.append(Problem(source.name, message, row.line, "engine"))


def _row(source: Source, line: int, cells: Mapping[str, str], problems: list[Problem]) -> Row | None:
    numbers: dict[str, float] = {}
    before = len(problems)
    for name in COLUMNS:
        text = cells.get(name, "")
        if name in {"config", "engine", "void", "note"} or not text:
            continue
        try:
            numbers[name] = float(text.replace(",", ""))
        except ValueError:
            numbers[name] = math.nan
        if not math.isfinite(numbers[name]):
            problems.append(Problem(source.name, f"{text!r} is no number", line, name))
            del numbers[name]
        elif numbers[name] < 0 and name not in {"level", "output_tok_s", "accept_len"}:
            problems.append(Problem(source.name, "must not be negative", line, name))
    deepest = numbers.get("num_steps", math.inf) + 1
    checks: tuple[tuple[str, Callable[[float], bool], str], ...] = (
        ("level", lambda x: x >= 1 and x == int(x), "must be a whole number of at least 1"),
        ("output_tok_s", lambda x: x > 0, "must be above 0"),
        ("accept_len", lambda x: x >= 1, "counts the bonus token, so it is at least 1"),
        ("accept_len", lambda x: x <= deepest, f"is at most num_steps + 1 = {deepest:g}"),
    )
    for name, right, message in checks:
        if name in numbers and not right(numbers[name]):
            problems.append(Problem(source.name, message, line, name))
    problems += [Problem(source.name, "is missing", line, name) for name in REQUIRED if not cells.get(name)]
    if cells.get("config") and not re.fullmatch(NAME, cells["config"]):
        message = f"{cells['config']!r} is no name: letters, digits and . _ + = - only, the first a letter or digit"
        problems.append(Problem(source.name, message, line, "config"))
    if len(problems) > before:
        return None
    return Row(
        line=line,
        config=cells["config"],
        engine=cells.get("engine", ""),
        level=int(numbers["level"]),
        output_tok_s=numbers["output_tok_s"],
        figures=numbers,
        void=cells.get("void", ""),
        note=cells.get("note", ""),
    )


def trial_of(
    rows: tuple[Row, ...], candidate: Candidate, asked: Speculation | None, benchmark: BenchmarkUsed
) -> RecordedTrial:
    """Given one candidate's rows and the speculation that its file asks for, return what was recorded of it.

    Where the file asks for none and a row has an accept length, it speculated all the same, to a depth that the column
    `num_steps` may tell.
    """
    speculates = any("accept_len" in row.figures for row in rows)
    depth = next((int(row.figures["num_steps"]) for row in rows if "num_steps" in row.figures), None)
    unknown = Speculation("unknown", depth) if speculates else None
    return RecordedTrial(
        candidate=candidate,
        speculation=asked or unknown,
        levels=tuple(_level(row, benchmark) for row in rows),
        effective=Effective(running_cap=_cap(rows)),
    )


def _cap(rows: tuple[Row, ...]) -> int | None:
    """The most requests that ran while others waited: what the server runs at once, where a row shows it."""
    full = [row.figures["running"] for row in rows if row.figures.get("queued", 0.0) >= 1 and "running" in row.figures]
    return round(max(full)) if full else None


def _level(row: Row, benchmark: BenchmarkUsed) -> RecordedLevel:
    """The row over equal windows; each request of the benchmark's output length, one stream answering after another."""
    count = max(1, round(benchmark.seconds / benchmark.window_s))
    ends_s = [benchmark.seconds * (i + 1) / count for i in range(count)]
    accept_len = row.figures.get("accept_len")
    tokens = row.output_tok_s * benchmark.seconds / count
    steps = round(tokens / accept_len) if accept_len else None
    window = Window(
        source="log",
        certainty="derived",
        running=row.figures.get("running", float(row.level)),
        queued=row.figures.get("queued", 0.0),
        gen_tok_s=row.output_tok_s,
        accept_len=accept_len,
        drafts=steps,
        seconds=benchmark.seconds / count,
    )
    answered = [int(row.output_tok_s * at_s / benchmark.output_tokens) for at_s in ends_s]
    return RecordedLevel(
        concurrency=row.level,
        windows=(window,) * count,
        progress=progress_of(row.level, ends_s, [tokens] * count, answered, [row.level] * count),
        requests_failed=int(row.figures.get("requests_failed", 0)),
        ttft_ms=_latencies(row, "ttft"),
        tpot_ms=_latencies(row, "tpot"),
        void=row.void,
        note=row.note,
    )


def _latencies(row: Row, name: str) -> dict[str, float]:
    return {q: row.figures[f"{name}_{q}_ms"] for q in ("p50", "p99") if f"{name}_{q}_ms" in row.figures}
