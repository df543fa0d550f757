"""Whether break-evens can be told from elsewhere: from a bad drafter to a better one, and from other rows of a group.

    python benchmarks/break_even.py         both checks, as tables
    python benchmarks/break_even.py --all   every published row, not the misses and close calls alone

Recordings: R (the break-even accept length) seen with a drafter of accept length 1.65 or 1.00 against R seen with a better
one, on the same GPU, model and depth. By the log is as the daemon sees it, from steady decode lines; by TPOT is from the
client's median time per token, prefills of others included.

Published rows: whether speculation gains or loses is told for each row from its accept length and an R that is fitted to the
OTHER rows of its group (model, hardware, engine, version). A row alone in its group has nothing but the prior.
"""

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotuner.core.gather import LevelPlan, baseline_steps, level_result
from autotuner.core.recorded import Campaign, RecordedTrial
from autotuner.core.stepfit import KnownRatio, predicted_needed
from autotuner.core.verdict import LevelResult
from autotuner.edge.campaigns import read_campaign

ROOT = Path(__file__).resolve().parent.parent
CAMPAIGNS = ROOT / "examples" / "campaigns" / "sglang-0.5.12-h200"
PUBLISHED = ROOT / "tests" / "unit" / "core" / "data" / "speculation-numbers.csv"
CLOSE = 0.03  # of a speedup of 1: the noise between launches, where the sign says little
# R of a drafter with accept length 3.0 on the recordings' GPU, model shape and depth.
BETTER_BIG = {1: 1.76, 32: 2.6, 128: 4.8}


@dataclass(frozen=True)
class Carried:
    """R at one level as one drafter shows it, and as a better one does; `by` says from what."""

    drafter: str
    by: str
    level: int
    seen: float
    better: float

    @property
    def error(self) -> float:
        """The relative error of taking one for the other."""
        return self.seen / self.better - 1


@dataclass(frozen=True)
class Row:
    """One published row: its group, its point, and what was measured."""

    group: tuple[str, ...]
    known: KnownRatio
    accept_len: float
    speedup: float


@dataclass(frozen=True)
class Told:
    """One row with the R that the others of its group give."""

    row: Row
    others: int
    needed: float

    @property
    def speedup(self) -> float:
        """The speedup foretold."""
        return self.row.accept_len / self.needed

    @property
    def right(self) -> bool:
        """Whether gain or loss was told right; no gain and no loss counts as a gain."""
        return (self.speedup >= 1) == (self.row.speedup >= 1)

    @property
    def close(self) -> bool:
        """Whether what was measured is within the noise of no difference."""
        return abs(self.row.speedup - 1) <= CLOSE


def carried() -> list[Carried]:
    """R of the recorded drafters against R of better ones."""
    big, smol = read_campaign(CAMPAIGNS / "big"), read_campaign(CAMPAIGNS / "smol")
    found = []
    for name in ("big-eagle3-sim1.65-capped", "big-eagle3-sim1.65-uncapped"):
        for by, ratios in (("log", by_log(big, "big-base", name)), ("TPOT", by_tpot(big, "big-base", name))):
            # Under the cap 48 run at 128, so its R there is of another batch.
            known = {
                level: r
                for level, r in ratios.items()
                if level in BETTER_BIG and not ("-capped" in name and level == 128)
            }
            found += [Carried(name, by, level, r, BETTER_BIG[level]) for level, r in sorted(known.items())]
    for by, ratios_of in (("log", by_log), ("TPOT", by_tpot)):
        bad = ratios_of(smol, "smol-base-cg", "smol-eagle3-random")
        good = ratios_of(smol, "smol-base-cg", "smol-eagle3-sim2.0")
        # At 128 the baseline is void, and the random drafter capped.
        found += [Carried("smol-eagle3-random", by, level, bad[level], good[level]) for level in (1, 8, 32)]
    return found


def by_log(campaign: Campaign, base: str, name: str) -> dict[int, float]:
    """R by level as the daemon computes it from the whole levels."""
    plain = {r.concurrency: r for r in _results(_trial(campaign, base), {})}
    found = {r.concurrency: r.speculation for r in _results(_trial(campaign, name), baseline_steps(plain))}
    return {level: spec.needed for level, spec in found.items() if spec is not None and spec.needed is not None}


def by_tpot(campaign: Campaign, base: str, name: str) -> dict[int, float]:
    """R by level from the client's median times per token, and the log's accept length."""
    plain, drafted = _trial(campaign, base), _trial(campaign, name)
    found = {}
    for result in _results(drafted, {}):
        a, b = plain.level(result.concurrency), drafted.level(result.concurrency)
        spec = result.speculation
        if a is not None and b is not None and spec is not None and spec.accept_len is not None:
            found[result.concurrency] = b.tpot_ms["p50"] * spec.accept_len.mean / a.tpot_ms["p50"]
    return found


def _trial(campaign: Campaign, name: str) -> RecordedTrial:
    return next(trial for trial in campaign.trials if trial.candidate.name == name)


def _results(trial: RecordedTrial, steps: dict[float, float]) -> Iterator[LevelResult]:
    for level in trial.levels:
        plan = LevelPlan(
            level=level.concurrency,
            decides=True,
            cap=trial.effective.running_cap,
            speculation=trial.speculation,
            baseline_steps_s=steps,
            best=None,
        )
        yield level_result(plan, level.windows, level.figures())


def published() -> list[Row]:
    """The published rows that give accept length, depth and speedup."""
    with PUBLISHED.open() as file:
        table = list(csv.DictReader(file))
    return [
        Row(
            group=(row["model"], row["hardware"], row["engine"], row["version"]),
            known=KnownRatio(
                float(row["num_steps"]),
                float(row["concurrency"]),
                float(row["accept_len"]) / float(row["speedup"]),
                row["method"],
            ),
            accept_len=float(row["accept_len"]),
            speedup=float(row["speedup"]),
        )
        for row in table
    ]


def left_out(rows: list[Row]) -> list[Told]:
    """Each row with the R that the other rows of its group give."""
    told = []
    for index, row in enumerate(rows):
        others = [other.known for at, other in enumerate(rows) if at != index and other.group == row.group]
        needed = predicted_needed(others, row.known.num_steps, row.known.running, row.known.method)
        told.append(Told(row, len(others), needed))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every published row")
    every = parser.parse_args().all
    print("R of a bad drafter against that of a better one, on recordings")
    print(f"{'drafter':<28} {'by':<5} {'level':>5} {'R seen':>7} {'better':>7} {'error':>7}")
    for one in carried():
        print(f"{one.drafter:<28} {one.by:<5} {one.level:>5} {one.seen:>7.2f} {one.better:>7.2f} {one.error:>+7.1%}")
    told = left_out(published())
    print("\nPublished rows, each told from the others of its group")
    print(f"{'model':<24} {'method':<22} {'k':>3} {'C':>4} {'others':>6} {'R':>5} {'told':>5} {'gain':>5} {'told':>5}")
    for one in told:
        if every or not one.right or one.close:
            row, known = one.row, one.row.known
            print(
                f"{row.group[0][:24]:<24} {known.method[:22]:<22} {known.num_steps:>3.0f} {known.running:>4.0f} "
                f"{one.others:>6} {known.needed:>5.2f} {one.needed:>5.2f} {row.speedup:>5.2f} {one.speedup:>5.2f} "
                f"{'' if one.right else 'MISS'}{' (close)' if one.close else ''}"
            )
    right = sum(one.right for one in told)
    grouped = [one for one in told if one.others]
    errors = sorted(abs(one.needed / one.row.known.needed - 1) for one in grouped)
    print(f"\ngain or loss told right: {right} of {len(told)} ({right / len(told):.1%})")
    print(f"of rows that are not alone in their group: {sum(o.right for o in grouped)} of {len(grouped)}")
    close = [one for one in told if one.close]
    print(f"close calls (measured within {CLOSE:.0%} of 1): {len(close)}, of which {sum(o.right for o in close)} right")
    print(f"median error of R where the group has other rows: {errors[len(errors) // 2]:.1%}")


if __name__ == "__main__":
    main()
