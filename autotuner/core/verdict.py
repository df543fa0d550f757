"""A trial's levels -> what is next, and in the end its verdict with reasons. Pure.

Owns two promises: only a pass under the same benchmark as a measured best-known is promoted, and a candidate is
stopped as soon as it cannot win under the objective any more, and not before.
"""

from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from autotuner.bench.measurement import Figures
from autotuner.core.answers import Agreement, agreement
from autotuner.core.objective import Objective, level_order, score, too_late, unusable, violations, weights_of
from autotuner.core.policy import Fired
from autotuner.core.redact import one_line
from autotuner.core.speculation import SpeculationAtLevel
from autotuner.core.state import Verdict
from autotuner.core.statistics import Z95, Interval


class LevelReading(BaseModel):
    """What the server's own lines amount to during a level, where that is more than its figures say."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cause: str
    action: str
    sentence: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.sentence} ({self.cause}, {self.action}{advice})"


class LevelResult(BaseModel):
    """One measured level as the store keeps it: figures, what ran, what speculation did, the rule that ended it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    concurrency: int
    figures: Figures
    running: float | None = None
    decode_tok_s: float | None = None
    speculation: SpeculationAtLevel | None = None
    fired: Fired | None = None
    proposal: Fired | None = None
    contradictions: tuple[str, ...] = ()
    reading: LevelReading | None = None

    @property
    def step_s(self) -> float | None:
        """Seconds a step of a plain server; None where speculation makes a step yield more than one token."""
        if self.speculation is not None or not self.running or not self.decode_tok_s:
            return None
        return self.running / self.decode_tok_s


@dataclass(frozen=True)
class Judgement:
    """The verdict, whether the candidate becomes the best-known, the score against it, and the reasons in words."""

    verdict: Verdict
    promote: bool
    reasons: tuple[str, ...]
    score: Interval | None = None
    rule: Fired | None = None


@dataclass(frozen=True)
class TrialSoFar:
    """Everything a verdict is a function of. `baseline` is empty where no best-known was measured.

    `has_best` says that there is a best-known all the same: then a candidate without a baseline is compared with nothing.
    `answers` are the server's to the fixed prompts, `best_answers` the best-known's; either is empty where it is not known.
    """

    objective: Objective
    levels: tuple[int, ...]
    results: tuple[LevelResult, ...] = ()
    baseline: dict[int, LevelResult] = field(default_factory=dict)
    ended: Fired | None = None
    is_baseline: bool = False
    launch_noise: float = 0.0
    has_best: bool = False
    answers: tuple[str, ...] = ()
    best_answers: tuple[str, ...] = ()


def next_level(trial: TrialSoFar) -> int | None:
    """Given a trial so far, return the level to measure next; None if all are done or the rest cannot matter."""
    if trial.ended is not None or lost(trial) or disagreement(trial):
        return None
    done = {result.concurrency for result in trial.results}
    return next((level for level in level_order(trial.objective, trial.levels) if level not in done), None)


def lost(trial: TrialSoFar) -> Fired | None:
    """Given a trial so far, return the rule because of which it cannot win any more, or None while it still can.

    A level lost by a `skip-level` rule costs the trial only if it carries the whole weight of the objective, or if every
    level that weighs anything is lost: no level is pruned on another level's loss alone.
    """
    for result in trial.results:
        if result.fired is not None and result.fired.action in {"abandon", "quarantine"}:
            return result.fired
    skipped = {r.concurrency: r.fired for r in trial.results if r.fired is not None and r.fired.action == "skip-level"}
    heavy = [level for level, weight in weights_of(trial.objective, trial.levels).items() if weight > 0]
    if skipped and all(level in skipped for level in heavy):
        return skipped[heavy[-1]]
    return None


def judge(trial: TrialSoFar) -> Judgement:
    """Given a trial that is over, return its verdict. Failure outranks success; inconclusive never promotes."""
    rule = trial.ended or lost(trial)
    if rule is not None:
        return Judgement(rule.verdict, promote=False, reasons=(rule.sentence,), rule=rule)
    figures = {r.concurrency: r.figures for r in trial.results}
    baseline = {level: r.figures for level, r in trial.baseline.items()}
    broken = (*disagreement(trial), *violations(trial.objective, figures, baseline))
    if trial.is_baseline:  # a best-known that is too slow to answer is what the others are to be better than
        broken = tuple(reason for reason in broken if reason not in _late(trial.objective, figures))
    if broken:
        return Judgement(Verdict.FAIL, promote=False, reasons=broken)
    voids = [
        f"concurrency {level}: {f.void}" for level, f in sorted(figures.items()) if f.void and _decides(trial, level)
    ]
    if voids:
        return Judgement(Verdict.INCONCLUSIVE, promote=False, reasons=tuple(voids))
    if trial.is_baseline:
        reasons = ("the best-known itself, measured under this benchmark", *_late(trial.objective, figures))
        return Judgement(Verdict.PASS, promote=False, reasons=reasons)
    if baseline:
        return _compare(trial, figures, baseline)
    if trial.has_best:
        reason = "the best-known has no measurement under this benchmark, so there is nothing to compare with"
        return Judgement(Verdict.INCONCLUSIVE, promote=False, reasons=(reason,))
    if any(unusable(figures.get(level)) for level in trial.levels if _decides(trial, level)):
        reason = "no token was measured at a level that the objective weighs"
        return Judgement(Verdict.INCONCLUSIVE, promote=False, reasons=(reason,))
    return Judgement(Verdict.PASS, promote=True, reasons=("it is the first one that was measured here",))


def _compare(trial: TrialSoFar, figures: dict[int, Figures], baseline: dict[int, Figures]) -> Judgement:
    result = score(trial.objective, figures, baseline, trial.launch_noise, trial.levels)
    if result is None:
        reason = "a level that the objective weighs was not measured on both sides"
        if trial.objective.limits is not None:
            reason += ", or too few of its requests met the limits of the goodput"
        return Judgement(Verdict.INCONCLUSIVE, promote=False, reasons=(reason,))
    if late := _late(trial.objective, baseline, Z95 * trial.launch_noise):
        reason = f"it keeps the limits on latency, which the best-known does not: {late[0]}"
        return Judgement(Verdict.PASS, promote=True, reasons=(reason,), score=result)
    asked = 1 + trial.objective.min_gain_ratio
    shown = f"{result.mean:.3f} of the best-known's (95 % interval {result.low:.3f} to {result.high:.3f})"
    noise = f"with {100 * trial.launch_noise:.1f} % noise between launches"
    if result.low > asked:
        reason = f"the objective is {shown}, above {asked:g} {noise}"
        return Judgement(Verdict.PASS, promote=True, reasons=(reason,), score=result)
    if result.high < asked:
        reason = f"the objective is {shown}, below {asked:g} {noise}"
        return Judgement(Verdict.FAIL, promote=False, reasons=(reason,), score=result)
    reason = f"the objective is {shown}; {noise} that is no difference to act on"
    return Judgement(Verdict.INCONCLUSIVE, promote=False, reasons=(reason,), score=result)


def agreed(trial: TrialSoFar) -> Agreement | None:
    """Given a trial so far, return how far its answers agree with the best-known's; None where one side has none."""
    return agreement(trial.answers, trial.best_answers)


def disagreement(trial: TrialSoFar) -> tuple[str, ...]:
    """Given a trial so far, return the sentence that fails it if its answers agree less than is asked; else nothing."""
    found, least = agreed(trial), trial.objective.constraints.answers_agree_min
    if trial.is_baseline or found is None or found.mean >= least:
        return ()
    mine, best = one_line(found.worst_mine, 40), one_line(found.worst_best, 40)
    sentence = (
        f"its answers agree with the best-known's to {found.mean:.2f} over {found.prompts} prompts, at least {least:g} is"
        f" asked: to {one_line(found.worst, 60)!r} it answers {mine!r}, the best-known {best!r}"
    )
    return (sentence,)


def _late(objective: Objective, figures: dict[int, Figures], margin: float = 0.0) -> tuple[str, ...]:
    return tuple(reason for _, f in sorted(figures.items()) for reason in too_late(objective, f, margin))


def _decides(trial: TrialSoFar, level: int) -> bool:
    if level == 1 and trial.objective.constraints.single_stream_ratio_min is not None:
        return True
    return weights_of(trial.objective, trial.levels).get(level, 0.0) > 0
