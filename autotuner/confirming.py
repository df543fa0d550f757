"""What the store knows of launches that a verdict compares, and the trials that are queued so that a win can be confirmed.

Reads rows and writes rows, without an await; what counts and what is owed is decided in `core/confirm.py`.
"""

from autotuner.bench.benchmark import Benchmark, Level
from autotuner.bench.goodput import with_goodput
from autotuner.bench.measurement import GoodputLimits, LevelSamples
from autotuner.context import SlotContext
from autotuner.core.confirm import Owed, Record, Run, complete, first_leg, on_record, owed, owed_if_open, pool
from autotuner.core.objective import weights_of
from autotuner.core.state import TrialState, Verdict
from autotuner.core.verdict import LevelResult, Win
from autotuner.edge import clock
from autotuner.edge.rows import Trial, read_benchmark


def record_of(ctx: SlotContext, trial: Trial, levels: tuple[Level, ...]) -> Record:
    """Given a trial and the levels that decide, return the best-known's launches that count, but for the trial's own."""
    return on_record(_runs(ctx, trial), levels)


def record_with(ctx: SlotContext, trial: Trial, levels: tuple[Level, ...]) -> Record:
    """Given a measurement of the best-known, return the record with it."""
    own = Run(trial.id, {r.concurrency: r.figures for r in results_of(ctx, trial)})
    return on_record((*_runs(ctx, trial), own), levels)


def baseline_of(ctx: SlotContext, trial: Trial, record: Record) -> dict[Level, LevelResult]:
    """Given a trial and the record, return the best-known's results by level, with the mean rates of the record.

    A level that no launch on record has is that of its newest trial which has it: enough to know its step times.
    """
    ladder = ctx.store.ladder(ctx.name)
    if not ladder:
        return {}
    measured = ctx.store.measured(ctx.name, ladder[0][0], trial.benchmark_hash)
    counted = {run.trial for run in record.runs}
    found: dict[Level, LevelResult] = {}
    for other in sorted((t for t in measured if t.id != trial.id), key=lambda t: (t.id not in counted, -t.id)):
        for result in results_of(ctx, other):
            found.setdefault(result.concurrency, result)
    means = pool(tuple(run.figures for run in record.runs))
    return {
        level: result.model_copy(update={"figures": means[level]}) if level in means else result
        for level, result in found.items()
    }


def baseline_missing(ctx: SlotContext, queued: Trial, levels: tuple[Level, ...]) -> bool:
    """Tell whether the best-known must be measured before the next trial: nothing of it counts, and nobody has tried yet."""
    ladder = ctx.store.ladder(ctx.name)
    if not ladder or any(complete(run.figures, levels) for run in _runs(ctx, queued)):
        return False
    earlier = ctx.store.same_trials(ctx.name, ladder[0][0], queued.benchmark_hash)
    return not any(t.is_baseline and t.confirms is None for t in earlier)


def win_of(ctx: SlotContext, trial: Trial) -> Win | None:
    """Given a trial, return the win that it confirms; None if it confirms none."""
    if trial.confirms is None or trial.is_baseline:
        return None
    before = ctx.store.trial(trial.confirms)
    return Win(trial.confirms, before.score, proven=before.verdict is Verdict.PASS)


def confirmed_runs(ctx: SlotContext, trial: Trial) -> tuple[Run, ...]:
    """Given a trial, return the other launches on which its win was measured again, oldest first."""
    if trial.confirms is None or trial.is_baseline:
        return ()
    measured = ctx.store.measured(ctx.name, trial.candidate_id, trial.benchmark_hash)
    mine = [t for t in measured if t.confirms == trial.confirms and not t.is_baseline and t.id != trial.id]
    return tuple(_run(ctx, t) for t in reversed(mine))


def owed_by(ctx: SlotContext, trial: Trial, record: Record) -> tuple[tuple[Owed, ...], tuple[Owed, ...]]:
    """Given a trial of a candidate, return what must be measured before it may promote, and what may be if it only leads."""
    ladder = ctx.store.ladder(ctx.name)
    if not ladder or ladder[0][0] == trial.candidate_id:
        return (), ()
    cost = [t for t in ctx.store.confirming(trial.confirms or trial.id) if t.is_baseline]
    tries = sum(t.candidate_id == ladder[0][0] and t.state is not TrialState.QUEUED for t in cost)
    confirmed = len(confirmed_runs(ctx, trial)) + 1 if trial.confirms is not None else 0
    noise = ctx.settings.noise
    return owed(noise, record, tries, confirmed), owed_if_open(noise, tries, confirmed)


def queue_owed(ctx: SlotContext, trial: Trial, benchmark: Benchmark, follows: tuple[Owed, ...]) -> tuple[str, ...]:
    """Put what is owed for a trial at the head of the queue, in its order; return a sentence for each."""
    added, said = [], []
    best = ctx.store.ladder(ctx.name)[0][0] if follows else ""
    for one in first_leg(follows):
        is_baseline = one.what == "baseline"
        candidate = ctx.store.candidate(best if is_baseline else trial.candidate_id)
        number = ctx.store.add_trial(
            ctx.name,
            candidate,
            (trial.benchmark, benchmark),
            clock.utc_label(),
            priority=trial.priority,
            is_baseline=is_baseline,
            confirms=trial.confirms if trial.is_baseline else trial.confirms or trial.id,
            parent=trial.id if trial.is_baseline else None,
        )
        added.append(number)
        what = f"the best-known, {candidate.name}," if is_baseline else candidate.name
        said.append(f"{what} is launched again as trial {number}: {one.why}")
    for number in reversed(added):
        ctx.store.put_first(number)
    return tuple(said)


def drop_obsolete(ctx: SlotContext, best: str) -> tuple[str, ...]:
    """Cancel what waits for nothing once this candidate is the best-known: launches of the one before, and its own confirming.

    Return a sentence for each.
    """
    said = []
    for trial in ctx.store.queue(ctx.name):
        stale = trial.is_baseline and trial.candidate_id != best
        done = trial.confirms is not None and not trial.is_baseline and trial.candidate_id == best
        if stale or done:
            ctx.store.move_trial(trial.id, TrialState.CANCELLED, ended_at=clock.utc_label())
            said.append(f"trial {trial.id} ({trial.name}, {trial.aim}) is not needed any more and was cancelled")
    return tuple(said)


def _runs(ctx: SlotContext, trial: Trial) -> tuple[Run, ...]:
    """The best-known's launches since it became that, oldest first, but for the trial's own.

    Of those before, only the ones that confirmed it are without the luck that made it win.
    """
    ladder = ctx.store.ladder(ctx.name)
    if not ladder:
        return ()
    best, _, promoted_by = ladder[0]
    win = ctx.store.trial(promoted_by).confirms
    measured = ctx.store.measured(ctx.name, best, trial.benchmark_hash)
    counts = [
        t for t in measured if t.id >= promoted_by or (win is not None and t.confirms == win and not t.is_baseline)
    ]
    return tuple(_run(ctx, t) for t in reversed(counts) if t.id != trial.id)


def results_of(ctx: SlotContext, trial: Trial) -> tuple[LevelResult, ...]:
    """Given a trial, return its levels with the goodput that the objective asks for.

    One that was measured before the objective asked for it gets it from its samples.
    """
    objective = ctx.objective(read_benchmark(trial.benchmark_body))
    results = ctx.store.results(trial.id)
    if objective.limits is None or not results:
        return results
    decides = weights_of(objective, tuple(r.concurrency for r in results))
    return tuple(
        _with_goodput(ctx, trial.id, r, objective.limits)
        if decides[r.concurrency] > 0 and r.figures.goodput_limits != objective.limits
        else r
        for r in results
    )


def _with_goodput(ctx: SlotContext, trial_id: int, result: LevelResult, limits: GoodputLimits) -> LevelResult:
    samples = ctx.store.evidence(trial_id, result.concurrency).get("samples")
    if samples is None:
        return result
    figures = with_goodput(result.figures, LevelSamples.model_validate(samples), limits)
    return result.model_copy(update={"figures": figures})


def _run(ctx: SlotContext, trial: Trial) -> Run:
    same_boot = trial.begun_mono_s is not None and trial.begun_boot == clock.boot_id()
    age_s = clock.monotonic_s() - trial.begun_mono_s if same_boot and trial.begun_mono_s is not None else None
    return Run(trial.id, {r.concurrency: r.figures for r in results_of(ctx, trial)}, age_s)
