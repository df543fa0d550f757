"""Pairs of neighbouring rounds of two clients -> ratios with intervals, verdicts, a table. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from clientbench.report import table

from autotuner.bench.latency import order_ranks

WITHIN = 0.02
Figures = dict[str, float]  # of one round: a figure's name, with its unit, to its value


@dataclass(frozen=True)
class Pair:
    """Two rounds of the same requests, one right after the other: what our client reported, and the other."""

    ours: Figures
    theirs: Figures


@dataclass(frozen=True)
class Agreement:
    """How a figure compares over the pairs: medians of each side, the median ratio ours / theirs and its 95 % bounds.

    The bounds are ranks of the ratios, as a sign test gives them: no shape is assumed, only that the pairs are independent.
    None where there are too few pairs for them.
    """

    figure: str
    pairs: int
    ours: float
    theirs: float
    ratio: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """Whether the ratio is within WITHIN of 1, beyond it, or not known well enough."""
        least, most, percent = 1 - WITHIN, 1 + WITHIN, f"{WITHIN:.0%}".replace("%", " %")
        if self.low is None or self.high is None:
            return "too few pairs"
        if least <= self.low and self.high <= most:
            return f"within {percent}"
        if self.high < least or self.low > most:
            return f"more than {percent} apart"
        inside = "within" if least <= self.ratio <= most else "beyond"
        return f"median {inside} {percent}, interval wider"


def agreements(pairs: Sequence[Pair]) -> list[Agreement]:
    """Given pairs, return how each figure that both clients always reported compares."""
    names = [name for name in pairs[0].ours if all(pair.ours.get(name) and pair.theirs.get(name) for pair in pairs)]
    return [_agreement(name, pairs) for name in names]


def _agreement(name: str, pairs: Sequence[Pair]) -> Agreement:
    ratios = sorted(pair.ours[name] / pair.theirs[name] for pair in pairs)
    low, high = order_ranks(len(ratios), 0.5)
    return Agreement(
        name,
        len(pairs),
        statistics.median(pair.ours[name] for pair in pairs),
        statistics.median(pair.theirs[name] for pair in pairs),
        statistics.median(ratios),
        None if low is None else ratios[low],
        None if high is None else ratios[high],
    )


def agreement_table(found: dict[str, list[Agreement]]) -> str:
    """Given agreements by load, return their table."""
    rows = []
    for load, ones in found.items():
        for one in ones:
            bounds = "-" if one.low is None or one.high is None else f"{one.low:.4f} to {one.high:.4f}"
            numbers = f"{one.ours:,.2f}", f"{one.theirs:,.2f}", f"{one.ours - one.theirs:+.2f}"
            rows.append((load, str(one.pairs), one.figure, *numbers, f"{one.ratio:.4f}", bounds, one.verdict))
    head = ("load", "pairs", "figure", "autotuner", "vllm bench serve", "difference", "ratio", "95 %", "")
    return table(head, rows)
