"""A recorded campaign told again under given stop rules: each candidate's verdict, why, and what it cost; who is best. Pure.

Candidates go in their recorded order through what the daemon decides by: `LevelRules` over the windows, one more at each
look, `lost` between levels, `judge` at the end, promotion. What cannot be told again is what was never recorded: a level goes
on no longer than it did, and a winner is not launched a second time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autotuner.bench.benchmark import Level
from autotuner.bench.measurement import Figures, interim_figures, steady_rates
from autotuner.core.candidate import Scalar, derive
from autotuner.core.causes import Share, level_of, split_loss
from autotuner.core.confirm import Record, Run, on_record, pool
from autotuner.core.facts import level_facts, server_facts
from autotuner.core.followups import Proposal as Worked
from autotuner.core.followups import Situation, speculation_by_level, work_out
from autotuner.core.gather import LevelPlan, baseline_steps, busy_steps, level_result, so_far, told_clean
from autotuner.core.objective import Standing, deciding_levels, level_order, score, violations, weights_of
from autotuner.core.policy import Facts, Fired, Policy
from autotuner.core.recorded import Campaign, RecordedLevel, RecordedTrial
from autotuner.core.speculation import Doubt
from autotuner.core.state import Verdict
from autotuner.core.statistics import Interval, budget_share, relative_half_width
from autotuner.core.verdict import Judgement, LevelResult, TrialSoFar, judge, next_level
from autotuner.core.watching import LevelRules, server_ended
from autotuner.engines.base import Engine

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


def tell(campaign: Campaign, policies: tuple[Policy, ...], error_budget: float, engines: Mapping[str, Engine]) -> Story:
    """Given a recorded campaign, the stop rules, its error budget and the engines, return what the daemon would have done."""
    teller = _Teller(campaign, policies, error_budget, engines)
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

    def __init__(
        self, campaign: Campaign, policies: tuple[Policy, ...], error_budget: float, engines: Mapping[str, Engine]
    ) -> None:
        self.campaign = campaign
        self.engines = engines
        self.policies = policies
        self.error_budget = error_budget
        self.best: RecordedTrial | None = None
        self.objective = campaign.objective
        self._spent = 0.0
        self._proposed: list[tuple[Fired, Level]] = []
        self._measured: dict[str, list[dict[Level, LevelResult]]] = {}  # by candidate, the newest last

    def tell(self, index: int) -> Told:
        """Work one trial through its levels to its verdict."""
        trial = self.campaign.trials[index]
        alpha = budget_share(self.error_budget, self._spent, len(self.campaign.trials) - index, index)
        self._spent += alpha
        self._proposed = []
        runs = self._measured.get(self.best.candidate.id, []) if self.best else []
        launches = tuple(Run(n, {c: r.figures for c, r in run.items()}) for n, run in enumerate(runs, 1))
        record = on_record(launches, deciding_levels(self.objective, self.campaign.levels))
        so_far_ = TrialSoFar(
            objective=self.objective,
            levels=self.campaign.levels,
            baseline=_with_means(runs, record),
            baseline_runs=tuple(run.figures for run in record.runs),
            ended=self._start(trial),
            launch_noise=record.noise,
            has_best=self.best is not None,
            is_best=self.best is not None and trial.candidate.id == self.best.candidate.id,
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
            proposals=self._proposals(trial, so_far_),
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
            update={"fired": ended, "settled": rules.settled}
        )
        self._proposed += [(fired, recorded.concurrency) for fired in rules.proposed]
        level = level_of(result, so_far_.baseline)
        causes = split_loss(level) if level is not None else ()
        if result.speculation is None and [share.cause for share in causes] == ["slower-step"]:
            causes = ()  # which says no more than the rate does
        return LevelTold(result, recorded.progress[count].at_s, recorded.seconds, causes)

    def _plan(self, trial: RecordedTrial, recorded: RecordedLevel, so_far_: TrialSoFar) -> LevelPlan:
        best = so_far_.baseline.get(recorded.concurrency)
        width = _width(best.figures) if best is not None else 0.0
        # As in the daemon: each level has an equal part, and each of its two questions half of that.
        alpha = so_far_.alpha / len(self.campaign.levels) / 2
        doubt = Doubt(alpha, so_far_.launch_noise, width, (1, max(1, len(so_far_.baseline_runs))))
        paid, lost = speculation_by_level(so_far_.results)
        done = {r.concurrency: r.figures for r in so_far_.results}
        held = {level: r.figures for level, r in so_far_.baseline.items()}
        standing = Standing(
            self.objective, self.campaign.levels, done, held, doubt.launch_noise, doubt.launches, doubt.alpha
        )
        return LevelPlan(
            level=recorded.concurrency,
            decides=weights_of(self.objective, self.campaign.levels).get(recorded.concurrency, 0.0) > 0,
            cap=trial.effective.running_cap,
            speculation=trial.speculation,
            baseline_steps_s=baseline_steps(so_far_.baseline),
            busy_steps_s=busy_steps(so_far_.baseline),
            baseline_clean=told_clean(so_far_.baseline, recorded.concurrency),
            best=best.figures if best else None,
            doubt=doubt,
            graph_max_batch=trial.effective.graph_max_batch,
            pays_up_to=max(paid, default=None),
            loses_from=min(lost, default=None),
            ranks=trial.effective.dp or 1,
            engine_version=trial.effective.version,
            constraints=self.objective.constraints,
            latency_counts=self.objective.counts_latency,
            standing=standing if so_far_.baseline else None,
        )

    def _proposals(self, trial: RecordedTrial, so_far_: TrialSoFar) -> tuple[Proposal, ...]:
        """The candidates that rules propose, each once, with the name under which the campaign has them."""
        found: dict[str, Proposal] = {}
        for fired, level in self._proposed:
            situation = Situation(
                candidate=trial.candidate,
                engine=self.engines[trial.candidate.engine],
                levels=self.campaign.levels,
                level=level,
                effective=trial.effective,
                version=trial.effective.version,
                results=so_far_.results,
                baseline=so_far_.baseline,
            )
            came = work_out(fired, situation)
            if isinstance(came, Worked):
                why = f"{fired.sentence} ({came.said})" if came.said else fired.sentence
                twin = self._on_record(came, trial)
                found.setdefault(came.candidate.id, Proposal(came.candidate.name, why, twin))
        return tuple(found.values())

    def _on_record(self, proposed: Worked, trial: RecordedTrial) -> str:
        """The recorded candidate that is the proposed one, but perhaps for the value it gives what was changed."""
        left_out: dict[str, Scalar] = dict.fromkeys(proposed.change, False)
        wanted = derive(proposed.candidate, left_out, "").id
        others = (t.candidate for t in self.campaign.trials if t.candidate.id != trial.candidate.id)
        return next((c.name for c in others if derive(c, left_out, "").id == wanted), "")

    def wrongly_stopped(self, trial: RecordedTrial, told: Told) -> bool:
        """Whether a rule stopped what would have won; against the last best-known where there was none at its time."""
        if told.judgement.rule is None or trial.diagnosis is not None:
            return False
        if told.best:
            ratio = told.full_ratio
        elif self.best is not None:
            ratio = self._full_ratio(trial, self.best)
        else:
            return bool(trial.levels) and not violations(self.objective, _full(trial), {})
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
        final or interim_figures(plan.level, list(seen), plan.doubt.alpha),
        load_s=seen[-1].at_s,
        prompts=seen[-1].done + seen[-1].in_flight,
        rates=tuple(steady_rates(list(seen))),
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


def _with_means(runs: Sequence[dict[Level, LevelResult]], record: Record) -> dict[Level, LevelResult]:
    """The best-known's newest result of each level, with the mean rates of the launches that count."""
    means = pool(tuple(run.figures for run in record.runs))
    newest = {level: result for run in runs for level, result in run.items()}
    return {
        level: result.model_copy(update={"figures": means[level]}) if level in means else result
        for level, result in newest.items()
    }


def _width(f: Figures) -> float:
    return relative_half_width(Interval(f.output_tok_s, f.output_tok_s_low, f.output_tok_s_high))


def _full(trial: RecordedTrial) -> dict[Level, Figures]:
    return {level.concurrency: level.figures() for level in trial.levels}
