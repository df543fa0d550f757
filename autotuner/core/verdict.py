"""A trial's levels -> what is next, and in the end its verdict with reasons. Pure.

Owns three promises: only a pass under the same benchmark as a measured best-known is promoted; it is promoted on launches
that did not select it; and a candidate is stopped as soon as it cannot win under the objective any more, and not before.
"""

from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from autotuner.bench.benchmark import Level, LoadKind
from autotuner.bench.machine import MachineFigures
from autotuner.bench.measurement import Figures
from autotuner.core.answers import Agreement, agreement
from autotuner.core.confirm import PROMISING, Owed, complete, pool
from autotuner.core.objective import (
    Objective,
    deciding_levels,
    level_order,
    score,
    too_late,
    unusable,
    violations,
    weights_of,
)
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
    """One measured level as the store keeps it: figures, what ran, what speculation did, the rule that ended it.

    `running` and `decode_tok_s` are of windows without a prefill if `clean`, `busy_running` and `busy_tok_s` the same over all
    windows in steady state; None in records of before, which are taken to be clean.
    `graph_ratio` is the share of the steady windows that decoded with a CUDA graph, `graph_max_batch` the largest batch
    that has one, `preemptions` how often a request was put back for want of KV memory. `machine` is what GPUs and host did
    meanwhile, where that could be read. `answered_ratio` is the answered / sent requests of its later half, where they are
    sent at a rate.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    concurrency: Level
    figures: Figures
    running: float | None = None
    decode_tok_s: float | None = None
    busy_running: float | None = None
    busy_tok_s: float | None = None
    clean: bool = True
    speculation: SpeculationAtLevel | None = None
    fired: Fired | None = None
    proposal: Fired | None = None  # of levels that were measured before schema 4; the table of proposals has them now
    settled: Fired | None = None
    contradictions: tuple[str, ...] = ()
    reading: LevelReading | None = None
    graph_ratio: float | None = None
    graph_max_batch: int | None = None
    preemptions: int = 0
    machine: MachineFigures | None = None
    answered_ratio: float | None = None

    @property
    def step_s(self) -> float | None:
        """Seconds a step of a plain server; None where speculation makes a step yield more than one token."""
        if self.speculation is not None or not self.running or not self.decode_tok_s:
            return None
        return self.running / self.decode_tok_s

    @property
    def busy_step(self) -> tuple[float, float] | None:
        """Running requests and seconds a step, prefills included; of a record of before, as `step_s` has it."""
        if self.speculation is None and self.busy_running and self.busy_tok_s:
            return self.busy_running, self.busy_running / self.busy_tok_s
        return (self.running, self.step_s) if self.running and self.step_s is not None else None


@dataclass(frozen=True)
class Judgement:
    """The verdict, whether the candidate becomes the best-known, the score against it, and the reasons in words.

    `follows` is what must be measured before this win may promote.
    """

    verdict: Verdict
    promote: bool
    reasons: tuple[str, ...]
    score: Interval | None = None
    rule: Fired | None = None
    follows: tuple[Owed, ...] = ()


@dataclass(frozen=True)
class Win:
    """The win that a trial confirms: the trial that won, and its score against the best-known of then.

    Not `proven` where that trial only led.
    """

    trial: int
    score: Interval | None = None
    proven: bool = True

    def __str__(self) -> str:
        return f"the {'win' if self.proven else 'lead'} of trial {self.trial}"


@dataclass(frozen=True)
class TrialSoFar:
    """Everything a verdict is a function of. `baseline` is empty where no best-known was measured.

    `has_best` says that there is a best-known all the same: then a candidate without a baseline is compared with nothing.
    `is_best` says that the candidate is that best-known itself. `measure` are the levels that this trial measures; () is all.
    `alpha` is the probability of a wrong verdict that the campaign's error budget grants it. `answers` are the server's to
    the fixed prompts, `best_answers` the best-known's; either is empty where it is not known. `load` says what the levels are,
    `may_corrupt` which of the candidate's settings can make answers wrong, if any.

    A verdict compares the mean of `baseline_runs`, the best-known's launches on record, oldest first (where none is given,
    `baseline` is the one), with the mean of this launch and of `earlier_runs`, the launches that confirmed `win` before it.
    `owed` is what must still be measured if this trial wins, or, of a measurement of the best-known, because it is no good;
    `owed_if_open` what may be measured once more if it leads without being proven better; `remarks` is what else is to be
    said of the launches compared.
    """

    objective: Objective
    levels: tuple[Level, ...]
    results: tuple[LevelResult, ...] = ()
    baseline: dict[Level, LevelResult] = field(default_factory=dict)
    ended: Fired | None = None
    is_baseline: bool = False
    launch_noise: float = 0.0
    has_best: bool = False
    alpha: float = 0.05
    is_best: bool = False
    measure: tuple[Level, ...] = ()
    baseline_runs: tuple[dict[Level, Figures], ...] = ()
    earlier_runs: tuple[dict[Level, Figures], ...] = ()
    win: Win | None = None
    owed: tuple[Owed, ...] = ()
    owed_if_open: tuple[Owed, ...] = ()
    remarks: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    best_answers: tuple[str, ...] = ()
    load: LoadKind = "concurrency"
    may_corrupt: str = ""


def next_level(trial: TrialSoFar) -> Level | None:
    """Given a trial so far, return the level to measure next; None if all are done or the rest cannot matter."""
    if trial.ended is not None or lost(trial) or disagreement(trial):
        return None
    left = set(trial.measure or trial.levels) - {result.concurrency for result in trial.results}
    return next((level for level in level_order(trial.objective, trial.levels) if level in left), None)


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
        return Judgement(rule.verdict, promote=False, reasons=(rule.sentence, *_unconfirmed(trial)), rule=rule)
    figures = {r.concurrency: r.figures for r in trial.results}
    runs = trial.baseline_runs
    if not runs and trial.baseline:
        runs = ({level: r.figures for level, r in trial.baseline.items()},)
    # The best-known is held against no launch of its own: a host that became slower must show in its record.
    held = {} if trial.is_baseline else pool(runs)
    broken = (*disagreement(trial), *violations(trial.objective, figures, held))
    if trial.is_baseline:  # a best-known that is too slow to answer is what the others are to be better than
        broken = tuple(reason for reason in broken if reason not in _late(trial.objective, figures))
    if broken:
        return Judgement(Verdict.FAIL, promote=False, reasons=(*broken, *_unconfirmed(trial)))
    deciding = deciding_levels(trial.objective, trial.levels)
    voids = tuple(f"{f.level_name}: {f.void}" for level, f in sorted(figures.items()) if f.void and level in deciding)
    if voids:
        return Judgement(Verdict.INCONCLUSIVE, promote=False, reasons=(*voids, *_unconfirmed(trial)))
    if (open_ := _unproven(trial)) and not trial.is_baseline:
        return Judgement(Verdict.INCONCLUSIVE, promote=False, reasons=(open_, *_unconfirmed(trial)))
    if trial.is_baseline:
        reasons = (_of_the_best_known(trial, figures), *_late(trial.objective, figures))
        return Judgement(Verdict.PASS, False, reasons, follows=trial.owed)
    if runs:
        return _compare(trial, figures, runs)
    if trial.has_best:
        reason = "the best-known has no measurement under this benchmark, so there is nothing to compare with"
        return Judgement(Verdict.INCONCLUSIVE, promote=False, reasons=(reason,))
    if any(unusable(figures.get(level)) for level in deciding):
        reason = "no token was measured at a level that the objective weighs"
        return Judgement(Verdict.INCONCLUSIVE, promote=False, reasons=(reason,))
    return Judgement(Verdict.PASS, promote=True, reasons=("it is the first one that was measured here",))


def _compare(trial: TrialSoFar, figures: dict[Level, Figures], runs: tuple[dict[Level, Figures], ...]) -> Judgement:
    """Hold the mean of the candidate's launches against the mean of the best-known's, at the levels that weigh."""
    result, launches = _score(trial, (*trial.earlier_runs, figures), runs)
    if result is None:
        reason = "a level that the objective weighs was not measured on both sides"
        if trial.objective.limits is not None:
            reason += ", or too few of its requests met the limits of the goodput"
        return Judgement(Verdict.INCONCLUSIVE, promote=False, reasons=(reason, *_unconfirmed(trial)))
    if (late := too_late_best(trial)) and not trial.is_best:
        reason = f"it keeps the limits on latency, which the best-known does not: {late[0]}"
        return Judgement(Verdict.PASS, not trial.owed, reasons=(reason,), score=result, follows=trial.owed)
    asked = 1 + trial.objective.min_gain_ratio
    interval = f"{100 * (1 - trial.alpha):.4g} % interval {result.low:.3f} to {result.high:.3f}"
    shown = f"the objective is {result.mean:.3f} of the best-known's ({interval}"
    shown += f", {launches[0]} against {launches[1]} launches)" if sum(launches) > 2 else ")"
    noise = f"with {100 * trial.launch_noise:.1f} % noise between launches"
    won, fresh = "", "a fresh launch" if launches[0] == 1 else f"{launches[0]} fresh launches"
    if trial.win is not None:
        before = f", {trial.win.score.mean:.3f} then," if trial.win.score else ""
        won = f"{trial.win}{before}"
    if result.low > asked and not trial.is_best:
        reason = f"{shown}, above {asked:g} {noise}"
        if won:
            reason = f"{won} {'holds so far' if trial.owed else 'is confirmed'} on {fresh}: {reason}"
        if trial.owed:
            reason += "; it is promoted once fresh launches have confirmed that"
        return Judgement(Verdict.PASS, not trial.owed, reasons=(reason,), score=result, follows=trial.owed)
    if result.high < asked and not trial.is_best:
        reason = f"{shown}, below {asked:g} {noise}"
        reason = f"{won} is not confirmed on {fresh}: {reason}" if won else reason
        return Judgement(Verdict.FAIL, promote=False, reasons=(reason,), score=result)
    act = (
        "it is the best-known itself, which cannot beat itself" if trial.is_best else "that is no difference to act on"
    )
    reason = f"{shown}; {noise} {act}"
    leads = result.mean >= asked * PROMISING and not trial.is_best
    follows = (trial.owed if won else ()) or (trial.owed_if_open if leads else ())
    if won:
        reason = f"{won} {'is still open' if follows else 'is not confirmed'} on {fresh}: {reason}"
    elif follows:
        reason += ", but a lead worth another launch of each side"
    return Judgement(Verdict.INCONCLUSIVE, promote=False, reasons=(reason,), score=result, follows=follows)


def _score(
    trial: TrialSoFar, mine: tuple[dict[Level, Figures], ...], runs: tuple[dict[Level, Figures], ...]
) -> tuple[Interval | None, tuple[int, int]]:
    """The score of the mean of some launches, and how many of each side have every level that weighs."""
    heavy = tuple(level for level, weight in weights_of(trial.objective, trial.levels).items() if weight > 0)
    sides = [tuple(run for run in side if complete(run, heavy)) for side in (mine, runs)]
    launches = (max(1, len(sides[0])), max(1, len(sides[1])))
    pools = pool(sides[0]), pool(sides[1])
    return score(trial.objective, *pools, trial.launch_noise, trial.levels, launches, trial.alpha), launches


def _of_the_best_known(trial: TrialSoFar, figures: dict[Level, Figures]) -> str:
    result, launches = _score(trial, (figures,), trial.baseline_runs)
    if result is None:
        return "the best-known itself, measured under this benchmark"
    before = "the launch before" if launches[1] == 1 else f"the mean of the {launches[1]} launches before"
    return (
        f"the best-known itself, launched again, gave {result.mean:.3f} of {before}; "
        f"the noise between launches is taken to be {100 * trial.launch_noise:.1f} %"
    )


def _unconfirmed(trial: TrialSoFar) -> tuple[str, ...]:
    return (f"{trial.win} is not confirmed",) if trial.win is not None else ()


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


def _unproven(trial: TrialSoFar) -> str:
    """Why a server that may compute something else is not promoted, however fast it is; empty if its answers were compared."""
    if not trial.may_corrupt or trial.is_best or agreed(trial) is not None:
        return ""
    return (
        f"{trial.may_corrupt} can corrupt answers, and its answers were compared with nothing: set "
        "constraints.answers_agree_min, and measure the best-known, which has none on record, before it"
    )


def too_late_best(trial: TrialSoFar) -> tuple[str, ...]:
    """Given a trial so far, return a sentence for each limit on latency that the best-known violates by more than noise.

    Then a slower candidate that keeps them replaces it, and no rule may end one for being slower.
    """
    runs = trial.baseline_runs or ({level: r.figures for level, r in trial.baseline.items()},)
    return _late(trial.objective, pool(runs), Z95 * trial.launch_noise)


def _late(objective: Objective, figures: dict[Level, Figures], margin: float = 0.0) -> tuple[str, ...]:
    return tuple(reason for _, f in sorted(figures.items()) for reason in too_late(objective, f, margin))
