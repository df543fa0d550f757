"""What is known of a trial: how far it is, what it is held against, how sure that is, how long it takes. Only reads."""

from autotuner import confirming
from autotuner.bench.benchmark import Benchmark, Level
from autotuner.bench.measurement import Figures
from autotuner.context import SlotContext
from autotuner.core.confirm import Owed, noise_between, owed_again
from autotuner.core.objective import deciding_levels
from autotuner.core.speculation import USUAL_DOUBT, Doubt
from autotuner.core.statistics import Interval, budget_share, relative_half_width
from autotuner.core.verdict import LevelResult, TrialSoFar
from autotuner.edge import clock
from autotuner.edge.rows import Trial, read_benchmark
from autotuner.engines import nccl

WARMUP_SHARE = 0.3  # of a level's measured time, for the plan that `enqueue` and entries show
START_GUESS_S = 60.0  # for a candidate that was never started


def trial_so_far(ctx: SlotContext, trial: Trial) -> TrialSoFar:
    """Given a trial, return everything that its verdict is a function of."""
    benchmark = benchmark_of(trial)
    objective = ctx.objective(benchmark)
    deciding = deciding_levels(objective, benchmark.levels)
    results = confirming.results_of(ctx, trial)
    record = confirming.record_of(ctx, trial, deciding)
    told = confirming.record_with(ctx, trial, deciding) if trial.is_baseline else record
    if trial.is_baseline:
        mine = {r.concurrency: r.figures for r in results}
        owed, if_open = owed_again(mine, deciding, is_repeat=trial.parent is not None), tuple[Owed, ...]()
    else:
        owed, if_open = confirming.owed_by(ctx, trial, record)
    earlier = tuple(run.figures for run in confirming.confirmed_runs(ctx, trial))
    fresh = (*earlier, {r.concurrency: r.figures for r in results}) if trial.confirms is not None else ()
    ladder = ctx.store.ladder(ctx.name)
    return TrialSoFar(
        objective=objective,
        levels=benchmark.levels,
        results=results,
        baseline=confirming.baseline_of(ctx, trial, record),
        ended=trial.ended,
        has_best=bool(ladder),
        is_best=bool(ladder) and ladder[0][0] == trial.candidate_id,
        is_baseline=trial.is_baseline,
        launch_noise=told.noise if trial.is_baseline else noise_between(told, fresh, deciding),
        alpha=alpha_of(ctx, trial),
        measure=deciding if trial.confirms is not None else (),
        baseline_runs=tuple(run.figures for run in record.runs),
        earlier_runs=earlier,
        win=confirming.win_of(ctx, trial),
        owed=owed,
        owed_if_open=if_open,
        remarks=told.said,
        answers=trial.answers,
        best_answers=best_answers_of(ctx, trial),
        load=benchmark.load,
        may_corrupt=nccl.corrupting(ctx.store.candidate(trial.candidate_id).launch.env),
    )


def benchmark_of(trial: Trial) -> Benchmark:
    """Given a trial, return the benchmark it was enqueued under, whatever the settings have become since."""
    return read_benchmark(trial.benchmark_body)


def baseline_of(ctx: SlotContext, trial: Trial) -> dict[Level, LevelResult]:
    """Given a trial, return the best-known's results under the same benchmark; empty if there are none."""
    return confirming.baseline_of(ctx, trial, confirming.record_of(ctx, trial, deciding_of(ctx, trial)))


def best_answers_of(ctx: SlotContext, trial: Trial) -> tuple[str, ...]:
    """Given a trial, return the best-known's latest answers to the fixed prompts; empty if there are none to compare with.

    None for the best-known itself, and none where the two name different models: those differ in what they say.
    """
    ladder = ctx.store.ladder(ctx.name)
    if not ladder or ladder[0][0] == trial.candidate_id:
        return ()
    models = {ctx.store.candidate(candidate).launch.model for candidate in (ladder[0][0], trial.candidate_id)} - {None}
    if len(models) > 1:
        return ()
    return ctx.store.last_answers(ctx.name, ladder[0][0])


def deciding_of(ctx: SlotContext, trial: Trial) -> tuple[Level, ...]:
    """Given a trial, return the levels of its benchmark that its verdict depends on."""
    benchmark = benchmark_of(trial)
    return deciding_levels(ctx.objective(benchmark), benchmark.levels)


def doubt_of(ctx: SlotContext, trial: Trial, best: Figures | None) -> Doubt:
    """Given a trial and the best-known's figures at a level, return what makes their comparison unsure.

    Each level has an equal part of what the campaign's error budget grants the trial, and each of the two questions a
    level is asked, whether its rate can win and whether speculation pays, half of that.
    """
    levels = len(benchmark_of(trial).levels)
    record = confirming.record_of(ctx, trial, deciding_of(ctx, trial))
    return Doubt(
        alpha=alpha_of(ctx, trial) / levels / 2,
        launch_noise=record.noise,
        launches=(1, max(1, len(record.runs))),
        baseline=relative_half_width(Interval(best.output_tok_s, best.output_tok_s_low, best.output_tok_s_high))
        if best is not None
        else 0.0,
    )


def alpha_of(ctx: SlotContext, trial: Trial) -> float:
    """Given a trial, return the probability of a wrong verdict that the campaign's error budget grants it.

    The usual one for the best-known's own launches, which decide nothing and spend nothing. It is settled when the trial
    begins: bounds that hold at all looks at once would not, if it moved with the queue between them.
    """
    if trial.is_baseline:
        return USUAL_DOUBT.alpha
    if trial.alpha is not None:
        return trial.alpha
    spent, before = ctx.store.error_spent(ctx.name, ctx.store.slot(ctx.name).campaign_from)
    return budget_share(ctx.settings.noise.error_budget, spent, 1 + len(ctx.store.queue(ctx.name)), before)


def took_s(trial: Trial) -> float:
    """Given a trial, return the seconds it has kept its slot busy, earlier interrupted tries included."""
    if trial.begun_mono_s is None or trial.begun_boot != clock.boot_id():
        return trial.busy_s
    return trial.busy_s + max(0.0, clock.monotonic_s() - trial.begun_mono_s)


def planned_s(benchmark: Benchmark, usual_ready_s: float | None, measure: tuple[Level, ...] = ()) -> float:
    """Given a benchmark, how long the candidate usually loads and the levels (all if none), return a trial's whole seconds."""
    levels = len(measure or benchmark.levels) * benchmark.seconds * (1 + WARMUP_SHARE)
    return (usual_ready_s if usual_ready_s is not None else START_GUESS_S) + levels
