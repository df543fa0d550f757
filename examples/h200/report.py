"""What the stop rules saved, and whether a verdict was wrong: the run with them held against the run without.

    python examples/h200/report.py KEPT                                   tables, as text
    python examples/h200/report.py KEPT --markdown FILE --chart FILE.svg  the frame of a case study, and its chart

KEPT is a folder that examples/h200/keep.py made, with `rules` and `exhaustive` in it. Benchmark time is the seconds under load,
warm-ups included; loads of a server are apart, since no rule saves those. Everything is read from what is kept.
"""

import argparse
import datetime as dt
import gzip
import html
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from autotuner.core.report import duration, rate
from autotuner.core.state import Purpose, TrialState
from autotuner.core.verdict import LevelResult
from autotuner.edge.rows import LaunchRow, Trial
from autotuner.edge.store import Store

MISSED_RATIO = 1.03  # what would have won by less than the noise between launches is no wrong stop
ROW, LEFT, WIDTH = 22, 210, 900  # of the chart, in pixels


@dataclass(frozen=True)
class Worked:
    """One candidate's trial in one run."""

    trial: Trial
    results: tuple[LevelResult, ...]
    load_s: float | None
    benchmark_s: float
    rule: str
    cause: str
    text: str

    @property
    def verdict(self) -> str:
        """The verdict in a word or two."""
        if self.trial.promoted:
            return "promoted"
        return f"{self.trial.verdict}, {self.rule}" if self.rule else str(self.trial.verdict)

    @property
    def ratio(self) -> float | None:
        """Its score against the best-known of then."""
        return self.trial.score.mean if self.trial.score else None

    def tok_s(self, level: int) -> float | None:
        """Output tok/s at a level that is not void."""
        return next(
            (r.figures.output_tok_s for r in self.results if r.concurrency == level and not r.figures.void), None
        )


@dataclass(frozen=True)
class Restored:
    """One restore of a best-known: its own load in a trial, and its load when it was put back."""

    slot: str
    name: str
    own_load_s: float | None
    load_s: float | None
    why: str


@dataclass
class RunRead:
    """One run: its trials by candidate in their order, who was best in the end, and its restores."""

    name: str
    worked: dict[str, Worked] = field(default_factory=dict)
    best: dict[str, str] = field(default_factory=dict)
    restores: list[Restored] = field(default_factory=list)
    voids: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def benchmark_s(self) -> float:
        """Seconds under load in all."""
        return sum(one.benchmark_s for one in self.worked.values())

    @property
    def loads_s(self) -> float:
        """Seconds that servers took to come up, restores included."""
        loads = [one.load_s for one in self.worked.values()] + [one.load_s for one in self.restores]
        return sum(load or 0.0 for load in loads)


def main() -> None:
    """Print the comparison, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path)
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--chart", type=Path, metavar="FILE.svg")
    given = parser.parse_args()
    rules, full = (read_run(given.kept / name) for name in ("rules", "exhaustive"))
    print("\n".join(as_text(rules, full)))
    if given.chart:
        given.chart.write_text(chart(rules, full), encoding="utf-8")
    if given.markdown:
        image = given.chart.name if given.chart else ""
        given.markdown.write_text("\n".join(as_markdown(rules, full, image)) + "\n", encoding="utf-8")


@contextmanager
def opened(kept: Path) -> Iterator[Store]:
    """A kept state, unpacked for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as temporary:
        database = Path(temporary, "state.db")
        database.write_bytes(gzip.decompress((kept / "state.db.gz").read_bytes()))
        store = Store(database)
        try:
            yield store
        finally:
            store.close()


def read_run(kept: Path) -> RunRead:
    """Given the folder of a kept run, return what is told of it."""
    found = RunRead(kept.name)
    with opened(kept) as store:
        entries = {(entry.slot, entry.number): entry.text for entry in store.entries()}
        trials = [trial for trial in store.trials() if trial.state is TrialState.DONE]
        for trial in trials:
            one = worked(store, trial, entries.get((trial.slot, trial.entry or 0), ""))
            found.worked[trial.name] = one
            found.voids += [
                f"{trial.name} at {r.figures.level_name}: {r.figures.void}" for r in one.results if r.figures.void
            ]
        for slot in dict.fromkeys(trial.slot for trial in trials):
            found.best[slot] = store.ladder(slot)[0][1] if store.ladder(slot) else "none"
        restored = [row for row in store.launches() if row.purpose is Purpose.RESTORE]
        for row in restored:
            if row.ready_s is not None:
                found.restores.append(restore(row, found, entries))
        times = [moment(at) for trial in trials for at in (trial.begun_at, trial.ended_at) if at]
        found.took_s = (max(times) - min(times)).total_seconds() if times else 0.0
    return found


def worked(store: Store, trial: Trial, text: str) -> Worked:
    """Given a concluded trial and its entry, return what is told of it."""
    results = store.results(trial.id)
    launches = store.launches(trial_id=trial.id)
    samples = [store.evidence(trial.id, result.concurrency).get("samples") or {} for result in results]
    seconds = sum(float(kept.get("steady_to_s") or 0.0) for kept in samples)
    rules = [result.fired for result in results if result.fired is not None]
    ended = trial.ended or (rules[-1] if rules else None)
    said = re.search(r"^- Causes?: (.*)$", text, re.MULTILINE)
    load = launches[-1].ready_s if launches else None
    return Worked(trial, results, load, seconds, ended.rule if ended else "", said.group(1) if said else "", text)


def restore(row: LaunchRow, run: RunRead, entries: dict[int, str]) -> Restored:
    """Given the launch of a restore, return it beside the same server's load in its own trial."""
    own = run.worked.get(row.name)
    heading = f"· slot {row.slot} · restored {row.name}\n"
    told = [text for text in entries.values() if heading in text]
    why = [found.group(1) for text in told if (found := re.search(r"^- Why: (.*)$", text, re.MULTILINE))]
    before = sum(one.slot == row.slot for one in run.restores)
    return Restored(
        row.slot, row.name, own.load_s if own else None, row.ready_s, why[before] if before < len(why) else ""
    )


def moment(at: str) -> dt.datetime:
    """A time as the state writes it."""
    return dt.datetime.fromisoformat(at)


def table(rules: RunRead, full: RunRead) -> list[tuple[str, ...]]:
    """A row for each candidate: both verdicts, the rate against the best-known's, and both benchmark times."""
    rows: list[tuple[str, ...]] = [
        ("candidate", "with rules", "without", "of the best-known's", "load", "benchmark with", "without")
    ]
    for name, one in rules.worked.items():
        other = full.worked.get(name)
        ratio = "-" if other is None or other.ratio is None else f"{other.ratio:.2f}"
        verdict = "not reached" if other is None else other.verdict
        without = "-" if other is None else duration(other.benchmark_s)
        load = "-" if one.load_s is None else duration(one.load_s)
        rows.append((name, one.verdict, verdict, ratio, load, duration(one.benchmark_s), without))
    return rows


def findings(rules: RunRead, full: RunRead) -> list[str]:
    """What the comparison must show, a sentence each."""
    both = [name for name in rules.worked if name in full.worked]
    with_, without = (sum(run.worked[name].benchmark_s for name in both) for run in (rules, full))
    share = f"{100 * with_ / without:.0f} %" if without else "nothing to compare"
    load = f"Benchmark time of the {len(both)} candidates that both runs worked: {duration(with_)} with rules, "
    load += f"{duration(without)} without: {share}. Loads: {duration(rules.loads_s)} and {duration(full.loads_s)}. From the "
    load += f"first trial's begin to the last one's end: {duration(rules.took_s)} and {duration(full.took_s)}."
    found = [load]
    for slot, best in rules.best.items():
        same = "the same" if full.best.get(slot) == best else f"another: {full.best.get(slot, 'none')}"
        found.append(f"Best-known of {slot} at the end: {best}; the exhaustive run finds {same}.")
    wrong = [name for name in both if stopped_wrongly(rules.worked[name], full.worked[name])]
    found.append(f"Stopped and would have won: {', '.join(wrong) or 'none'}.")
    for one in rules.restores:
        more = "" if one.own_load_s is None or one.load_s is None else f" ({one.load_s - one.own_load_s:+.1f} s)"
        own = duration(one.own_load_s)
        found.append(f"Restore of {one.name} ({one.why}): {duration(one.load_s)}, its own load {own}{more}.")
    voids = [*(f"with rules, {v}" for v in rules.voids), *(f"without, {v}" for v in full.voids)]
    return [*found, f"Void levels: {'; '.join(voids) or 'none'}."]


def stopped_wrongly(one: Worked, full: Worked) -> bool:
    """Whether a rule ended what the exhaustive run shows to be better."""
    better = full.trial.promoted or (full.ratio or 0.0) > MISSED_RATIO
    return bool(one.rule) and not one.trial.promoted and better


def as_text(rules: RunRead, full: RunRead) -> Iterator[str]:
    """Everything, in lines."""
    rows = table(rules, full)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    yield from findings(rules, full)
    yield ""
    for name, one in rules.worked.items():
        if one.rule:
            yield f"{name}: {one.rule}; {one.cause or 'no cause is named'}"


def as_markdown(rules: RunRead, full: RunRead, image: str) -> Iterator[str]:
    """The frame of a case study: the figures, and each entry's own sentence in its order. What they mean a person writes."""
    yield from (
        f"# A campaign on {'an H200' if len(rules.best) == 1 else 'two H200'}",
        "",
        *([f"![tok/s at 128, and seconds under load]({image})", ""] if image else []),
    )
    rows = table(rules, full)
    yield f"| {' | '.join(rows[0])} |"
    yield "|---" * len(rows[0]) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows[1:])
    yield from ("", *(f"- {sentence}" for sentence in findings(rules, full)), "", "## Told from the journal", "")
    for name, one in rules.worked.items():
        said = re.search(r"^\*\*(.*)\*\*$", one.text, re.MULTILINE)
        yield f"**{name}.** {said.group(1) if said else ''}"
        if one.cause:
            yield f"{one.cause[0].upper()}{one.cause[1:]}."
        yield ""
    yield from ("## What surprised", "", "## What was misread, and how that was mended", "")


def chart(rules: RunRead, full: RunRead) -> str:
    """An SVG: for each candidate its rate at 128 in the exhaustive run, and its seconds under load in both."""
    shown = [(name, one, full.worked.get(name)) for name, one in rules.worked.items() if one.results]
    half = (WIDTH - LEFT) // 2 - 90
    most = {slot: max((rate_of(o) for _, o, f in shown for o in (f or o,) if o.trial.slot == slot), default=1.0) or 1.0
            for slot in rules.best}  # fmt: skip
    longest = max((f.benchmark_s for _, _, f in shown if f), default=1.0) or 1.0
    height, right = ROW * (len(shown) + 2), LEFT + half + 100
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _words(LEFT, 15, "output tok/s at 128, every level worked to its end"),
        _words(right, 15, "seconds under load: with rules, without"),
    ]
    for number, (name, one, other) in enumerate(shown, 1):
        y, best = ROW * number + 8, rules.best.get(one.trial.slot) == name
        measured = rate_of(other or one)
        wide = half * measured / most[one.trial.slot]
        aside = "" if other else " (with rules)"
        parts += [_words(LEFT - 8, y + 11, name, "end"), _bar(LEFT, y, wide, 14, "#2b6" if best else "#89a")]
        parts.append(_words(LEFT + wide + 5, y + 11, f"{rate(measured)}{aside}" if measured else "not measured"))
        full_s = other.benchmark_s if other else 0.0
        parts += [_bar(right, y, half * full_s / longest, 14, "#ccd")] if other else []
        parts += [_bar(right, y + 3, half * one.benchmark_s / longest, 8, "#247")]
        ends = right + half * max(full_s, one.benchmark_s) / longest
        without = f"{full_s:.0f}" if other else "not finished"
        parts.append(_words(ends + 5, y + 11, f"{one.benchmark_s:.0f}, {without}"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def rate_of(one: Worked) -> float:
    """Output tok/s at 128, 0 where it was not measured or is void."""
    return one.tok_s(128) or 0.0


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.0f}" y="{y:.0f}" width="{max(width, 1):.1f}" height="{height}" fill="{colour}"/>'


def _words(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{html.escape(text)}</text>'


if __name__ == "__main__":
    main()
