"""A trial's verdict computed again from what was recorded: the looks of the rules, the figures, the judgement. Pure.

It must come out as it did. Where it does not, somebody changed the record or the program judges otherwise by now, and
either is worth knowing before the entry is believed.
"""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from autotuner.bench.benchmark import Level, LoadKind, level_name
from autotuner.bench.goodput import figures_under
from autotuner.bench.measurement import LevelSamples
from autotuner.core.policy import Policy, Watch
from autotuner.core.verdict import Judgement, LevelResult, TrialSoFar, judge

# Given to the figures after they were computed: what a rule decided about the level.
_DECIDED = {"void", "stopped_early"}
_BOUNDS = ("_low", "_high")
# Sums of floats come out otherwise in their last digits from one release of Python to the next (3.12 compensates its sum), and
# a journal may be replayed by another than it was written with.
_SAME_WITHIN = 1e-9


@dataclass(frozen=True)
class Replayed:
    """What was computed again for one trial: how many looks and levels, and every point that came out otherwise."""

    levels: int
    looks: int
    differences: tuple[str, ...]


def replay(
    basis: TrialSoFar | None,
    recorded: Judgement,
    evidence: Mapping[Level, Mapping[str, Any]],
    policies: Mapping[str, Policy],
    load: LoadKind = "concurrency",
) -> Replayed:
    """Given what a verdict was made from, the verdict, each level's evidence and policies by hash, compute it again."""
    found: list[str] = []
    looks = 0
    for level, kept in sorted(evidence.items()):
        said, count = _looks(kept, policies)
        found += [f"{level_name(load, level)}: {sentence}" for sentence in said]
        looks += count
    if basis is None:
        return Replayed(len(evidence), looks, (*found, "what its verdict was made from was not recorded"))
    for result in basis.results:
        if samples := evidence.get(result.concurrency, {}).get("samples"):
            found += [f"{level_name(load, result.concurrency)}: {sentence}" for sentence in _figures(samples, result)]
    return Replayed(len(evidence), looks, (*found, *_verdict(judge(basis), recorded)))


def _looks(kept: Mapping[str, Any], policies: Mapping[str, Policy]) -> tuple[list[str], int]:
    """The rules over the facts of each look, in order: each must fire where it fired, and nowhere else."""
    named = kept["policies"]
    missing = [file for file, sha256 in named.items() if sha256 not in policies]
    if missing:
        return [f"the text of {', '.join(sorted(missing))} as it was then is not kept"], 0
    watch = Watch(tuple(policies[sha256] for sha256 in named.values()))
    found = []
    for number, look in enumerate(kept["looks"], 1):
        fired = [
            f"{f.file}/{f.rule}" + (" (dry run)" if f.dry_run else "") for f in watch.look(look["on"], look["facts"])
        ]
        if fired != look["fired"]:
            found.append(f"look {number}: {_listed(look['fired'])} fired then, {_listed(fired)} now")
    return found, len(kept["looks"])


def _figures(samples: Any, result: LevelResult) -> list[str]:
    """What a level's samples yield otherwise now; a figure that was not recorded yet at that time is not compared."""
    recorded = result.figures
    measured = figures_under(
        LevelSamples.model_validate(samples), recorded.goodput_limits, ignore_eos=recorded.ignore_eos
    )
    again = measured.model_dump(exclude=_DECIDED)
    then = recorded.model_dump(exclude=_DECIDED)
    return [
        f"{name} was {then[name]}, from its samples it is {value}"
        for name, value in again.items()
        if name in recorded.model_fields_set and not _same(_without_later_bounds(value, then[name]), then[name])
    ]


def _same(value: Any, then: Any) -> bool:
    """Whether two figures, or tables of them, are the same but for what another order of summing changes."""
    if isinstance(value, float) and isinstance(then, float):
        return value == then or math.isclose(value, then, rel_tol=_SAME_WITHIN)
    if isinstance(value, dict) and isinstance(then, dict):
        return value.keys() == then.keys() and all(_same(value[key], then[key]) for key in value)
    if isinstance(value, tuple | list) and isinstance(then, tuple | list):
        return len(value) == len(then) and all(_same(*pair) for pair in zip(value, then, strict=True))
    return bool(value == then)


def _without_later_bounds(value: Any, then: Any) -> Any:
    """A table of latencies without the bounds that the recorded one has none of: tables had none at first."""
    if not isinstance(value, dict) or any(key.endswith(_BOUNDS) for key in then):
        return value
    return {key: figure for key, figure in value.items() if not key.endswith(_BOUNDS)}


def _verdict(again: Judgement, recorded: Judgement) -> tuple[str, ...]:
    pairs = (
        ("verdict", recorded.verdict, again.verdict),
        ("promoted", recorded.promote, again.promote),
        ("score", recorded.score and astuple(recorded.score), again.score and astuple(again.score)),
        ("reasons", recorded.reasons, again.reasons),
    )
    return tuple(f"{what} was {then}, now {now}" for what, then, now in pairs if not _same(now, then))


def _listed(rules: list[str]) -> str:
    return ", ".join(rules) or "nothing"
