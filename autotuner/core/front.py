"""The Pareto front: which servers no other beats at every level, what each is best for, and how that is said. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autotuner.bench.benchmark import Level
from autotuner.core.objective import unusable, violations
from autotuner.core.report import rate
from autotuner.core.verdict import TrialSoFar, disagreement


@dataclass(frozen=True)
class OnFront:
    """A server on the front: its output tok/s by level, and the levels at which it is the fastest of all."""

    name: str
    output_tok_s: dict[Level, float]
    best_at: tuple[Level, ...]


def front(rates: Mapping[str, Mapping[Level, float]]) -> tuple[OnFront, ...]:
    """Given output tok/s by name and level, return the front: those that no other dominates.

    One server dominates another if it was measured at every level at which the other was, is nowhere slower there and
    faster at one. So a level that the other lacks (skipped, void, ended early) speaks neither for it nor against it, and
    a level that the one lacks is never counted as a loss: at a level that it was not measured at, it beats nobody.
    Comparing over any shared levels instead would be no order: three servers could each knock another out, and the front
    be empty. The fastest at a level is on the front, unless one as fast there is faster elsewhere.
    """
    measured = {name: mine for name, mine in rates.items() if mine}
    best: dict[Level, float] = {}
    for mine in measured.values():
        for level, tok_s in mine.items():
            best[level] = max(tok_s, best.get(level, 0.0))
    return tuple(
        OnFront(name, dict(mine), tuple(sorted(level for level, tok_s in mine.items() if tok_s >= best[level])))
        for name, mine in measured.items()
        if not any(_dominates(other, mine) for other in measured.values())
    )


def front_of(trials: Iterable[tuple[str, str, TrialSoFar]]) -> tuple[OnFront, ...]:
    """Given (candidate id, name, what it was judged by) of trials under one benchmark, oldest first, return the front.

    The trials are concluded; a candidate stands on the front by its newest one with a figure that may.
    """
    return front(dict(rates_of(trials).values()))


def rates_of(trials: Iterable[tuple[str, str, TrialSoFar]]) -> dict[str, tuple[str, dict[Level, float]]]:
    """Given trials as `front_of` has them, return name and output tok/s of each candidate's newest that has a figure."""
    return {candidate: (name, found) for candidate, name, trial in trials if (found := valid_rates(trial))}


def _dominates(one: Mapping[Level, float], other: Mapping[Level, float]) -> bool:
    return all(level in one and one[level] >= tok_s for level, tok_s in other.items()) and any(
        one[level] > tok_s for level, tok_s in other.items()
    )


def valid_rates(trial: TrialSoFar) -> dict[Level, float]:
    """Given a concluded trial, return output tok/s of the levels that may stand on a front; empty if none may.

    None of a trial that was abandoned or whose server violates a constraint: it is no choice, however fast. Of any other
    the levels that ran to their end and are not void. Where requests are sent at a rate the output is what was asked for, and
    the fastest is nobody's merit: then there is no front.
    """
    if trial.load != "concurrency":
        return {}
    figures = {result.concurrency: result.figures for result in trial.results}
    baseline = {level: result.figures for level, result in trial.baseline.items()}
    given_up = any(r.fired is not None and r.fired.action in {"abandon", "quarantine"} for r in trial.results)
    broken = not trial.is_baseline and (violations(trial.objective, figures, baseline) or disagreement(trial))
    if trial.ended is not None or given_up or broken:
        return {}
    return {level: f.output_tok_s for level, f in figures.items() if not unusable(f) and not f.stopped_early}


def described(found: Iterable[OnFront]) -> list[str]:
    """Given the front, return a line for each level with the fastest there, and one for each that is fastest nowhere."""
    rows = list(found)
    levels = sorted({level for row in rows for level in row.best_at})
    lines = []
    for level in levels:
        fastest = [row for row in rows if level in row.best_at]
        names = " and ".join(row.name for row in fastest)
        lines.append(f"best at {level}: {names} {rate(fastest[0].output_tok_s[level])} tok/s")
    for row in rows:
        if not row.best_at:
            shown = ", ".join(f"{rate(tok_s)} at {level}" for level, tok_s in sorted(row.output_tok_s.items()))
            lines.append(f"between them: {row.name} ({shown} tok/s)")
    return lines
