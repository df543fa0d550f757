"""A recorded campaign told again under given stop rules: each candidate's verdict, why, and what it cost; who is best. Pure.

Candidates go in their recorded order through what the daemon decides by: `LevelRules` over the windows, one more at each
look, `lost` between levels, `judge` at the end, promotion. What cannot be told again is what was never recorded: a level goes
on no longer than it did, and a winner is not launched a second time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotuner.bench.measurement import Figures, interim_figures
from autotuner.core.candidate import derive
from autotuner.core.causes import Share, level_of, split_loss
from autotuner.core.facts import level_facts, server_facts
from autotuner.core.gather import LevelPlan, baseline_steps, level_result, so_far
from autotuner.core.objective import Objective, level_order, score, violations, weights_of
from autotuner.core.policy import Facts, Fired, Policy
from autotuner.core.recorded import Campaign, RecordedLevel, RecordedTrial
from autotuner.core.speculation import Doubt
from autotuner.core.state import Verdict
from autotuner.core.statistics import Interval, budget_share, launch_noise, relative_half_width
from autotuner.core.verdict import Judgement, LevelResult, TrialSoFar, judge, next_level
from autotuner.core.watching import LevelRules, server_ended

WRONG_STOP_GAIN = 0.03  # a stopped candidate that would have won by less is no loss that anybody would notice


@dataclass(frozen=True)
class LevelTold:
    """One level told again: its result, the seconds of load used of those on record, and the causes of its loss."""

    result: LevelResult
    used_s: float
    full_s: float
    causes: tuple[Share, ...] = ()

    @property
    def rule(self) -> Fired | None:
        """The rule that ended the level, or found it measured well enough."""
        return self.result.fired or self.result.settled


@dataclass(frozen=True)
class Proposal:
    """A candidate that a rule proposed, why, and under which name it is on record itself, empty if it is not."""

    name: str
    why: str
    recorded_as: str = ""


@dataclass(frozen=True)
class Told:
    """One candidate told again. `best` is the best-known it was compared with, empty if there was none.

    `full_ratio` is the objective by the whole recorded figures of both sides, None where they do not give one; `wrong_stop`
    that a rule stopped it although by those it would have won by 3 % or more, or served when nothing else did.
    """

    name: str
    best: str
    judgement: Judgement
    levels: tuple[LevelTold, ...]
    full_s: float
    proposals: tuple[Proposal, ...] = ()
    full_ratio: float | None = None
    wrong_stop: bool = False
    not_recorded: tuple[int, ...] = ()

    @property
    def used_s(self) -> float:
        """Seconds of load used."""
        return sum(level.used_s for level in self.levels)


@dataclass(frozen=True)
class Story:
    """A campaign told again; `best` is the best-known at its end, empty if nothing ever served."""

    campaign: str
    objective: str
    gpus: int
    told: tuple[Told, ...]
    best: str

    @property
    def wrong_stops(self) -> tuple[str, ...]:
        """The candidates that were stopped although they would have won."""
        return tuple(told.name for told in self.told if told.wrong_stop)


@dataclass(frozen=True)
class Change:
    """One candidate that other rules decide otherwise, or at another time. `saved_gpu_s` is below 0 where it costs more."""

    name: str
    then: str
    now: str
    saved_gpu_s: float
    decision: bool


def tell(campaign: Campaign, policies: tuple[Policy, ...], error_budget: float) -> Story:
    """Given a recorded campaign, the stop rules and the campaign's error budget, return what the daemon would have done."""
    teller = _Teller(campaign, policies, error_budget)
    told = [teller.tell(index) for index in range(len(campaign.trials))]
    best = teller.best.candidate.name if teller.best else ""
    judged = tuple(
        replace(one, wrong_stop=teller.wrongly_stopped(trial, one))
        for trial, one in zip(campaign.trials, told, strict=True)
    )
    return Story(campaign.name, str(teller.objective), campaign.gpus, judged, best)


def changes(then: Story, now: Story) -> tuple[Change, ...]:
    """Given one campaign told under two sets of rules, return each candidate that ends otherwise or at another time."""
    found = []
    for before, after in zip(then.told, now.told, strict=True):
        a, b = ending(before), ending(after)
        saved = (before.used_s - after.used_s) * now.gpus
        if a != b or abs(saved) > 1e-9:
            found.append(Change(before.name, a, b, saved, a != b))
    return tuple(found)


def ending(told: Told) -> str:
    """Given a candidate told again, return its verdict and the rule and level it ended by, in a few words."""
    judgement = told.judgement
    verdict = "promoted" if judgement.promote else str(judgement.verdict)
    if judgement.rule is None:
        return verdict
    at = next((f" at {t.result.concurrency}" for t in told.levels if t.result.fired == judgement.rule), "")
    return f"{verdict} by {judgement.rule.rule}{at}"


class _Teller:
    """The state of a campaign told again: the best-known, its measurements, and what is left of the error budget."""

    def __init__(self, campaign: Campaign, policies: tuple[Policy, ...], error_budget: float) -> None:
        self.campaign = campaign
        self.policies = policies
        self.error_budget = error_budget
        self.best: RecordedTrial | None = None
        self.objective = _fitting(campaign.objective, campaign.levels)
        self._spent = 0.0
        self._measured: dict[str, list[dict[int, LevelResult]]] = {}  # by candidate, the newest last

    def tell(self, index: int) -> Told:
        """Work one trial through its levels to its verdict."""
        trial = self.campaign.trials[index]
        alpha = budget_share(self.error_budget, self._spent, len(self.campaign.trials) - index)
        self._spent += alpha
        runs = self._measured.get(self.best.candidate.id, []) if self.best else []
        so_far_ = TrialSoFar(
            objective=self.objective,
            levels=self.campaign.levels,
            baseline=runs[-1] if runs else {},
            ended=self._start(trial),
            launch_noise=_noise(runs),
            has_best=self.best is not None,
            alpha=alpha,
        )
        levels: list[LevelTold] = []
        missing = []
        for level in level_order(self.objective, self.campaign.levels):
            if next_level(so_far_) is None:
                break
            recorded = trial.level(level)
            if recorded is None:
                missing.append(level)
                continue
            levels.append(self._level(trial, recorded, so_far_, sum(told.used_s for told in levels)))
            so_far_ = replace(so_far_, results=(*so_far_.results, levels[-1].result))
        told = Told(
            name=trial.candidate.name,
            best=self.best.candidate.name if self.best else "",
            judgement=judge(so_far_),
            levels=tuple(levels),
            full_s=sum(level.seconds for level in trial.levels),
            proposals=self._proposals(trial, so_far_.results),
            full_ratio=self._full_ratio(trial, self.best),
            not_recorded=tuple(missing),
        )
        self._keep(trial, told)
        return told

    def _start(self, trial: RecordedTrial) -> Fired | None:
        """What a trial ends by whose server did not come up."""
        if trial.diagnosis is None:
            return None
        facts = server_facts(alive=False, exit_code=trial.exit_code, diagnosis=trial.diagnosis)
        return LevelRules(self.policies).look("start", facts) or server_ended(trial.diagnosis)

    def _level(self, trial: RecordedTrial, recorded: RecordedLevel, so_far_: TrialSoFar, load_s: float) -> LevelTold:
        """Have the rules look at a level, one window more each time, until one ends it or the record ends."""
        plan = self._plan(trial, recorded, so_far_)
        rules, count = LevelRules(self.policies), 0
        while count < len(recorded.windows) and not rules.over:
            count += 1
            elapsed_s = (trial.ready_s or 0.0) + load_s + recorded.progress[count].at_s
            rules.look("window", {**_alive(trial, so_far_, elapsed_s), **_facts(plan, recorded, count)})
        figures = recorded.figures(count).model_copy(update={"stopped_early": rules.ended is not None})
        if rules.ended is None:
            elapsed_s = (trial.ready_s or 0.0) + load_s + recorded.progress[count].at_s
            rules.look("level", {**_alive(trial, so_far_, elapsed_s), **_facts(plan, recorded, count, figures)})
        ended = rules.ended
        if ended is not None and ended.action == "void":
            figures, ended = figures.model_copy(update={"void": ended.sentence}), None
        result = level_result(plan, recorded.windows[:count], figures).model_copy(
            update={"fired": ended, "proposal": rules.proposal, "settled": rules.settled}
        )
        level = level_of(result, so_far_.baseline)
        causes = split_loss(level) if level is not None else ()
        if result.speculation is None and [share.cause for share in causes] == ["slower-step"]:
            causes = ()  # which says no more than the rate does
        return LevelTold(result, recorded.progress[count].at_s, recorded.seconds, causes)

    def _plan(self, trial: RecordedTrial, recorded: RecordedLevel, so_far_: TrialSoFar) -> LevelPlan:
        best = so_far_.baseline.get(recorded.concurrency)
        width = _width(best.figures) if best is not None else 0.0
        # As in the daemon: each level has an equal part, and each of its two questions half of that.
        alpha = (so_far_.alpha or 0.05) / len(self.campaign.levels) / 2
        return LevelPlan(
            concurrency=recorded.concurrency,
            decides=weights_of(self.objective, self.campaign.levels).get(recorded.concurrency, 0.0) > 0,
            cap=trial.effective.running_cap,
            speculation=trial.speculation,
            baseline_steps_s=baseline_steps(so_far_.baseline),
            best=best.figures if best else None,
            doubt=Doubt(alpha, so_far_.launch_noise, width),
            graph_max_batch=trial.effective.graph_max_batch,
            engine_version=trial.effective.version,
        )

    def _proposals(self, trial: RecordedTrial, results: Sequence[LevelResult]) -> tuple[Proposal, ...]:
        """The candidates that rules propose, each once, with the name under which the campaign has them."""
        fired = {f.rule: f for result in results if (f := result.proposal) is not None}
        found = []
        for rule in fired.values():
            changed = derive(trial.candidate, dict(rule.set), rule.sentence)
            twin = next((t for t in self.campaign.trials if t.candidate.id == changed.id), None)
            if changed.id != trial.candidate.id:
                found.append(Proposal(changed.name, rule.sentence, twin.candidate.name if twin else ""))
        return tuple(found)

    def wrongly_stopped(self, trial: RecordedTrial, told: Told) -> bool:
        """Whether a rule stopped what would have won; against the last best-known where there was none at its time."""
        if told.judgement.rule is None or trial.diagnosis is not None:
            return False
        if told.best:
            ratio = told.full_ratio
        elif self.best is not None:
            ratio = self._full_ratio(trial, self.best)
        else:
            return bool(trial.levels)
        return ratio is not None and ratio >= 1 + WRONG_STOP_GAIN

    def _full_ratio(self, trial: RecordedTrial, best: RecordedTrial | None) -> float | None:
        """The objective over the best-known's by everything on record; None where a limit is broken or it cannot be told."""
        if best is None or violations(self.objective, _full(trial), _full(best)):
            return None
        found = score(self.objective, _full(trial), _full(best), 0.0, self.campaign.levels)
        return found.mean if found is not None else None

    def _keep(self, trial: RecordedTrial, told: Told) -> None:
        """Remember what a candidate measured, as the daemon's store would: only what was measured to its end compares."""
        if told.judgement.verdict not in {Verdict.PASS, Verdict.INCONCLUSIVE}:
            return
        self._measured.setdefault(trial.candidate.id, []).append({t.result.concurrency: t.result for t in told.levels})
        if told.judgement.promote:
            self.best = trial


def _facts(plan: LevelPlan, recorded: RecordedLevel, count: int, final: Figures | None = None) -> Facts:
    """What the rules see of a level after so many windows."""
    seen = recorded.progress[: count + 1]
    level = so_far(
        plan,
        recorded.windows[:count],
        final or interim_figures(plan.concurrency, list(seen), plan.doubt.alpha),
        load_s=seen[-1].at_s,
        prompts=seen[-1].done + seen[-1].in_flight,
        over=final is not None,
    )
    return level_facts(level)


def _alive(trial: RecordedTrial, so_far_: TrialSoFar, elapsed_s: float) -> Facts:
    return {
        **server_facts(alive=True, exit_code=None, diagnosis=None),
        "trial.elapsed_s": elapsed_s,
        "trial.levels_done": float(len(so_far_.results)),
        "trial.baseline": so_far_.is_baseline,
        "candidate.engine": trial.candidate.engine,
    }


def _fitting(objective: Objective, levels: Sequence[int]) -> Objective:
    """The objective, of the busiest level where the campaign lacks the one it names."""
    if objective.level is not None and objective.level not in levels:
        return objective.model_copy(update={"level": max(levels)})
    return objective


def _noise(runs: Sequence[dict[int, LevelResult]]) -> float:
    """The noise between launches: of the best-known's own measurements where it has several, else the prior."""
    by_level: dict[int, list[float]] = {}
    for run in runs:
        for level, result in run.items():
            if not result.figures.void:
                by_level.setdefault(level, []).append(result.figures.output_tok_s)
    return max((launch_noise(rates) for rates in by_level.values()), default=launch_noise([]))


def _width(f: Figures) -> float:
    return relative_half_width(Interval(f.output_tok_s, f.output_tok_s_low, f.output_tok_s_high))


def _full(trial: RecordedTrial) -> dict[int, Figures]:
    return {level.concurrency: level.figures() for level in trial.levels}
