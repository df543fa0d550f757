"""One simulated campaign, worked as the daemon works it, and the same one with everything run to its end. Seeded, no clock.

Every decision is the product's own: the rules, the verdict, what a win still owes, which launches count, the share of the
error budget. Only the servers are made up.
"""

import random
from dataclasses import dataclass, field, replace

from autotuner.bench.benchmark import Level
from autotuner.core.confirm import Noise, Record, Run, first_leg, noise_between, on_record, owed, owed_if_open, pool
from autotuner.core.gather import LevelPlan, baseline_steps, busy_steps, told_clean
from autotuner.core.objective import Objective, Standing, deciding_levels, weights_of
from autotuner.core.policy import Facts, Policy
from autotuner.core.speculation import USUAL_DOUBT, Doubt
from autotuner.core.state import Verdict
from autotuner.core.statistics import Interval, budget_share, relative_half_width
from autotuner.core.verdict import Judgement, LevelResult, TrialSoFar, Win, judge, lost, next_level
from autotuner.simulation.level import launched, measure, speculation_of, steady_s, warm_up_s
from autotuner.simulation.world import LEVELS, Server, World

WINNING = 1.03  # a candidate that is better by less may be stopped: nobody changes a server for it


@dataclass(frozen=True)
class TrialEnd:
    """How one candidate fared. `true_ratio` is its true objective over that of the best-known of its time.

    `seconds` is the benchmark time of its first trial, `full_s` that of all its levels to their ends, `rule` what ended
    it, empty if nothing did; `hopeless` that no drafter of its depth could pay at any level that weighs.
    """

    server: Server
    true_ratio: float
    seconds: float
    full_s: float
    rule: str
    promoted: bool
    hopeless: bool

    @property
    def wrongly_stopped(self) -> bool:
        """Whether a rule ended a candidate that would have won by 3 % or more."""
        return bool(self.rule) and self.true_ratio >= WINNING

    @property
    def wrongly_promoted(self) -> bool:
        """Whether a candidate became the best-known that is truly worse."""
        return self.promoted and self.true_ratio < 1


@dataclass(frozen=True)
class CampaignEnd:
    """How a campaign ended. Times are benchmark seconds, loads apart; `best` is the best-known at its end.

    `full_s` and `full_launches` are what the best-known and every candidate, each launched once and run to its end, cost.
    """

    trials: tuple[TrialEnd, ...]
    best: Server
    best_ratio: float
    seconds: float
    launches: int
    full_s: float
    full_launches: int
    at_random: float

    @property
    def missed(self) -> bool:
        """Whether a candidate that is better by 3 % or more than the best-known at the end was there."""
        return self.best_ratio < 1 / WINNING


def true_score(objective: Objective, server: Server, base: Server) -> float:
    """Given an objective, return the true ratio of two servers, over all launches."""
    ratio = 1.0
    for level, weight in weights_of(objective, LEVELS).items():
        ratio *= (server.tok_s(level) / base.tok_s(level)) ** weight
    return ratio


def run_campaign(world: World, objective: Objective, policies: tuple[Policy, ...], seed: int) -> CampaignEnd:
    """Given a world, work its queue as the daemon does; and for comparison everything to its end."""
    work = _Work(world, objective, policies, random.Random(f"campaign/{seed}"))  # noqa: S311 - reproducible, not secret
    work.begin()
    trials = tuple(work.candidate(server, left) for left, server in _countdown(world.candidates))
    full = {server: full_s(server) for server in (world.base, *world.candidates)}
    truth = {server: true_score(objective, server, world.base) for server in full}
    top = max(truth.values())
    return CampaignEnd(
        trials=trials,
        best=work.best,
        best_ratio=truth[work.best] / top,
        seconds=work.seconds,
        launches=work.launches,
        full_s=sum(full.values()),
        full_launches=len(full),
        at_random=_at_random(world, truth, full, work.seconds, seed) / top,
    )


def full_s(server: Server) -> float:
    """Given a server, return the benchmark seconds of all its levels, each to its end."""
    return sum(warm_up_s(server, level) + steady_s(server, level) for level in LEVELS)


def _countdown(servers: tuple[Server, ...]) -> list[tuple[int, Server]]:
    return [(len(servers) - number, server) for number, server in enumerate(servers)]


def _at_random(world: World, truth: dict[Server, float], full: dict[Server, float], seconds: float, seed: int) -> float:
    """The true objective of the best that running in random order, each to its end, finds in the same time."""
    order = list(world.candidates)
    random.Random(f"order/{seed}").shuffle(order)  # noqa: S311 - reproducible, not secret
    spent, found = full[world.base], truth[world.base]
    for server in order:
        spent += full[server]
        if spent > seconds:
            break
        found = max(found, truth[server])
    return found


@dataclass
class _Work:
    """The campaign in hand: the best-known, its launches on record, what it cost, what of the error budget is spent."""

    world: World
    objective: Objective
    policies: tuple[Policy, ...]
    rng: random.Random
    noise: Noise = field(default_factory=Noise)
    seconds: float = 0.0
    launches: int = 0
    spent: float = 0.0
    shares: int = 0
    runs: list[Run] = field(default_factory=list)
    known: dict[Level, LevelResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.best = self.world.base

    def begin(self) -> None:
        """Measure the server that serves: the first baseline, to its end."""
        self._baseline(LEVELS)

    @property
    def deciding(self) -> tuple[int, ...]:
        return deciding_levels(self.objective, LEVELS)

    def candidate(self, server: Server, left: int) -> TrialEnd:
        """Work one candidate: its trial, and if it wins what must be measured before it is promoted."""
        alpha = self._share(left)
        before, best = self.seconds, self.best
        so_far = self._trial(server, alpha, LEVELS, is_baseline=False)
        took_s = self.seconds - before
        judgement = judge(so_far)
        rule = judgement.rule.rule if judgement.rule else ""
        if judgement.follows:
            judgement = self._confirm(server, so_far, judgement, left)
        return TrialEnd(
            server=server,
            true_ratio=true_score(self.objective, server, best),
            seconds=took_s,
            full_s=full_s(server),
            rule=rule,
            promoted=judgement.promote,
            hopeless=all(server.hopeless(level) for level in self.deciding),
        )

    def _confirm(self, server: Server, won: TrialSoFar, judgement: Judgement, left: int) -> Judgement:
        """Launch what is owed until the win is promoted or does not hold."""
        win = Win(1, judgement.score, proven=judgement.verdict is Verdict.PASS)
        tries, confirmed, fresh = 0, list[Run](), won
        while judgement.follows:
            for one in first_leg(judgement.follows):
                if one.what == "baseline":
                    tries += 1
                    self._baseline(self.deciding)
                    continue
                fresh = self._trial(server, self._share(left), self.deciding, is_baseline=False)
                confirmed.append(self._run(fresh))
                runs = tuple(run.figures for run in confirmed)
                fresh = replace(
                    fresh,
                    win=win,
                    owed=owed(self.noise, self._record(), tries, len(confirmed)),
                    owed_if_open=owed_if_open(self.noise, tries, len(confirmed)),
                    earlier_runs=runs[:-1],
                    launch_noise=noise_between(self._record(), runs, self.deciding),
                )
                judgement = judge(fresh)
        if judgement.promote:
            self.best, self.runs = server, confirmed
            self.known = {r.concurrency: r for r in (*won.results, *fresh.results)}
        return judgement

    def _share(self, left: int) -> float:
        """What the next trial has of the error budget, which is spent with that."""
        alpha = budget_share(self.noise.error_budget, self.spent, left, self.shares)
        self.spent, self.shares = self.spent + alpha, self.shares + 1
        return alpha

    def _baseline(self, levels: tuple[Level, ...]) -> None:
        so_far = self._trial(self.best, USUAL_DOUBT.alpha, levels, is_baseline=True)
        self.runs.append(self._run(so_far))
        self.known |= {r.concurrency: r for r in so_far.results}

    def _run(self, so_far: TrialSoFar) -> Run:
        return Run(len(self.runs) + 1, {r.concurrency: r.figures for r in so_far.results}, 0.0)

    def _record(self) -> Record:
        return on_record(tuple(self.runs), self.deciding)

    def _trial(self, server: Server, alpha: float, levels: tuple[Level, ...], *, is_baseline: bool) -> TrialSoFar:
        """Launch a server and measure its levels as the daemon would, in its order, until nothing is left to measure."""
        self.launches += 1
        launch = launched(server, self.world.host, self.rng)
        record = self._record()
        means = pool(tuple(run.figures for run in record.runs))
        baseline = {
            level: r.model_copy(update={"figures": means[level]}) if level in means else r
            for level, r in self.known.items()
        }
        so_far = TrialSoFar(
            objective=self.objective,
            levels=LEVELS,
            baseline=baseline,
            is_baseline=is_baseline,
            launch_noise=record.noise,
            has_best=bool(self.known),
            alpha=alpha,
            measure=levels,
            baseline_runs=tuple(run.figures for run in record.runs),
            owed=() if is_baseline or server is self.best else owed(self.noise, record, 0, 0),
            owed_if_open=() if is_baseline or server is self.best else owed_if_open(self.noise, 0, 0),
        )
        while (level := next_level(so_far)) is not None:
            plan = self._plan(server, int(level), so_far, max(1, len(record.runs)))
            result, took_s = measure(launch, self.world.host, plan, self.policies, self._facts(so_far), self.rng)
            self.seconds += took_s
            so_far = replace(so_far, results=(*so_far.results, result))
            if lost(so_far) is not None:
                break
        return so_far

    def _plan(self, server: Server, level: int, so_far: TrialSoFar, launches: int) -> LevelPlan:
        best = so_far.baseline.get(level)
        doubt = Doubt(
            alpha=so_far.alpha / len(LEVELS) / 2,
            launch_noise=so_far.launch_noise,
            baseline=relative_half_width(_rate(best)) if best else 0.0,
            launches=(1, launches),
        )
        done = {r.concurrency: r.figures for r in so_far.results}
        held = {at: r.figures for at, r in so_far.baseline.items()}
        standing = Standing(self.objective, LEVELS, done, held, doubt.launch_noise, doubt.launches, doubt.alpha)
        return LevelPlan(
            level=level,
            decides=weights_of(self.objective, LEVELS)[level] > 0,
            cap=server.cap,
            speculation=speculation_of(server),
            baseline_steps_s=baseline_steps(so_far.baseline),
            busy_steps_s=busy_steps(so_far.baseline),
            baseline_clean=told_clean(so_far.baseline, level),
            best=best.figures if best and not so_far.is_baseline else None,
            doubt=doubt,
            standing=standing if so_far.baseline and not so_far.is_baseline else None,
        )

    @staticmethod
    def _facts(so_far: TrialSoFar) -> Facts:
        return {
            "trial.elapsed_s": 0.0,
            "trial.levels_done": float(len(so_far.results)),
            "trial.baseline": so_far.is_baseline,
            "candidate.engine": "sglang",
        }


def _rate(result: LevelResult) -> Interval:
    f = result.figures
    return Interval(f.output_tok_s, f.output_tok_s_low, f.output_tok_s_high)
