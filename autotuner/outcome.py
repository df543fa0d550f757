"""What is recorded once something has happened: ends of launches, verdicts, restores, and the entries that explain them.

Every function runs without an await, and writes an outcome and its entry in one transaction.
"""

from pydantic import TypeAdapter

from autotuner.bench.goodput import with_goodput
from autotuner.bench.measurement import GoodputLimits, LevelSamples
from autotuner.bench.workload import Benchmark
from autotuner.context import Live, SlotContext
from autotuner.core import report
from autotuner.core.candidate import derive, to_toml
from autotuner.core.entry import Draft
from autotuner.core.front import described, front_of
from autotuner.core.objective import Objective, weights_of
from autotuner.core.policy import Fired
from autotuner.core.state import LaunchState, TrialState, Verdict
from autotuner.core.statistics import launch_noise
from autotuner.core.verdict import Judgement, LevelResult, TrialSoFar, agreed, judge
from autotuner.edge import clock
from autotuner.edge.host import ServerSeen
from autotuner.edge.rows import BASIS, LaunchRow, Trial, judgement_columns
from autotuner.engines.base import Diagnosis

_DIAGNOSIS = TypeAdapter(Diagnosis)
WARMUP_SHARE = 0.3  # of a level's measured time, for the plan that `enqueue` and entries show
START_GUESS_S = 60.0  # for a candidate that was never started


def launch_ended(ctx: SlotContext, row: LaunchRow, seen: ServerSeen, diagnosis: Diagnosis, *, asked: bool) -> None:
    """Record the end of a launch."""
    ctx.verified.discard(row.id)
    ctx.logs.pop(row.id, None)
    ctx.generated.pop(row.id, None)
    ctx.store.move_launch(
        row.id,
        LaunchState.ENDED,
        ended_at=clock.utc_label(),
        exit_code=seen.exit_code,
        end_asked=asked,
        diagnosis=_DIAGNOSIS.dump_json(diagnosis).decode(),
    )


def restored(ctx: SlotContext, row: LaunchRow, ready_s: float | None) -> None:
    """Write the entry of a best-known that serves again, and forget what was wrong before."""
    slot = ctx.store.slot(ctx.name)
    why = slot.restore_wanted or "nothing else was to run"
    draft = report.restored_entry(ctx.name, row.name, why, ready_s, ctx.generated.get(row.id, 0), ctx.slot.place.url)
    ctx.store.add_entry(draft, clock.utc_label())
    ctx.store.update_slot(ctx.name, degraded="")
    ctx.announced = row.id


def conclude(ctx: SlotContext, trial_id: int) -> Judgement:
    """Give a trial its verdict, promote it if it won, queue what it proposes, and write its entry."""
    trial = ctx.store.trial(trial_id)
    so_far = trial_so_far(ctx, trial)
    judgement = judge(so_far)
    with ctx.store.transaction():
        proposed = _proposals(ctx, trial, so_far)
        entry = ctx.store.add_entry(_trial_draft(ctx, trial, so_far, judgement, proposed), clock.utc_label(), trial.id)
        ctx.store.move_trial(
            trial.id,
            TrialState.DONE,
            entry=entry.number,
            ended_at=clock.utc_label(),
            busy_s=took_s(trial),
            basis=BASIS.dump_json(so_far).decode(),
            **judgement_columns(judgement),
        )
        if judgement.promote:
            ctx.store.promote(ctx.name, trial.candidate_id, trial.name, trial.id, clock.utc_label())
            ctx.store.update_slot(ctx.name, degraded="")
    return judgement


def requeue(ctx: SlotContext, trial_id: int, why: str) -> None:
    """Put a trial back to the head of the queue and forget what it measured: a half measured level compares with nothing."""
    trial = ctx.store.trial(trial_id)
    with ctx.store.transaction():
        ctx.store.drop_results(trial_id)
        ctx.store.move_trial(trial_id, TrialState.QUEUED, ended=None, answers="[]", busy_s=took_s(trial))
        ctx.store.put_first(trial_id)
        note(
            ctx,
            f"put back {trial.name}",
            f"The trial of {trial.name} was interrupted and is first in the queue again: {why}.",
        )


def give_up(ctx: SlotContext, trial_id: int, why: str) -> None:
    """Conclude a trial that may itself be what ends the daemon."""
    ended = Fired(
        rule="interrupted-too-often",
        file="(built in)",
        sha256="",
        condition="",
        action="abandon",
        verdict=Verdict.ERROR,
        sentence=why,
        advice="look at the host's kernel log: a candidate that exhausts the host's memory takes the daemon with it",
    )
    ctx.store.update_trial(trial_id, ended=ended.model_dump_json())
    conclude(ctx, trial_id)


def begin_trial(ctx: SlotContext, trial_id: int) -> None:
    """Take a trial in hand."""
    ctx.live = Live()
    ctx.store.move_trial(
        trial_id,
        TrialState.RUNNING,
        begun_at=clock.utc_label(),
        begun_boot=clock.boot_id(),
        begun_mono_s=clock.monotonic_s(),
    )


def queue_baseline(ctx: SlotContext, candidate_id: str, why: str) -> None:
    """Put a measurement of the best-known at the head of the queue."""
    candidate = ctx.store.candidate(candidate_id)
    queued = ctx.store.queue(ctx.name)
    with ctx.store.transaction():
        trial_id = ctx.store.add_trial(
            ctx.name,
            candidate,
            (queued[0].benchmark, benchmark_of(queued[0])),
            clock.utc_label(),
            priority=queued[0].priority,
            is_baseline=True,
        )
        ctx.store.put_first(trial_id)
        note(ctx, f"queued baseline {candidate.name}", f"{why[0].upper()}{why[1:]}, so it is measured first.")


def restore_done(ctx: SlotContext, candidate_id: str | None, why: str) -> None:
    """Close the request for a restore; hold the queue if the operator asked for the best-known to stay."""
    slot = ctx.store.slot(ctx.name)
    row = next((r for r in ctx.store.open_launches(ctx.name) if r.candidate_id == candidate_id), None)
    with ctx.store.transaction():
        if row is None:
            note(ctx, "nothing to restore", f"{why[0].upper()}{why[1:]}.")
        elif ctx.announced != row.id:
            restored(ctx, row, None)
        hold = {"paused": slot.restore_wanted} if slot.restore_hold and row is not None else {}
        ctx.store.update_slot(ctx.name, restore_wanted="", restore_hold=0, **hold)


def degrade(ctx: SlotContext, why: str) -> None:
    """Stop trying to restore and ask for a person."""
    names = tuple(name for _, name, _ in ctx.store.ladder(ctx.name))
    failed = [r for r in ctx.store.launches(ctx.name) if r.state is LaunchState.ENDED and r.diagnosis is not None]
    last = failed[-1].diagnosis if failed else None
    with ctx.store.transaction():
        ctx.store.add_entry(report.degraded_entry(ctx.name, names, last, why), clock.utc_label())
        ctx.store.update_slot(ctx.name, degraded=why, restore_wanted="", restore_hold=0)


def blocked(ctx: SlotContext, why: str) -> None:
    """Write once, not every cycle, that something outside keeps the slot from going on; and once that it is over."""
    before = ctx.store.slot(ctx.name).blocked
    if why == before:
        return
    with ctx.store.transaction():
        ctx.store.update_slot(ctx.name, blocked=why)
        if why:
            bullets = (("Do", "free it, or change the slot in the settings; the daemon looks again each cycle"),)
            note(
                ctx, "blocked", f"{why[0].upper()}{why[1:]}; autotuner does not touch what it did not launch.", bullets
            )
        else:
            note(ctx, "unblocked", "What kept the slot from going on is gone.")


def note(ctx: SlotContext, title: str, sentence: str, bullets: tuple[tuple[str, str], ...] = ()) -> None:
    """Write an entry of a few words."""
    ctx.store.add_entry(Draft(ctx.name, title, sentence, bullets), clock.utc_label())


def trial_so_far(ctx: SlotContext, trial: Trial) -> TrialSoFar:
    """Given a trial, return everything that its verdict is a function of."""
    benchmark = benchmark_of(trial)
    objective = objective_of(ctx, benchmark)
    return TrialSoFar(
        objective=objective,
        levels=benchmark.levels,
        results=_under(ctx, trial.id, objective, ctx.store.results(trial.id)),
        baseline=baseline_of(ctx, trial),
        ended=trial.ended,
        has_best=bool(ctx.store.ladder(ctx.name)),
        is_baseline=trial.is_baseline,
        launch_noise=noise_of(ctx, trial.benchmark_hash),
        answers=trial.answers,
        best_answers=best_answers_of(ctx, trial),
    )


def benchmark_of(trial: Trial) -> Benchmark:
    """Given a trial, return the benchmark it was enqueued under, whatever the settings have become since."""
    return Benchmark.model_validate_json(trial.benchmark_body)


def objective_of(ctx: SlotContext, benchmark: Benchmark) -> Objective:
    """Given a benchmark, return the slot's objective; one for a level the benchmark lacks falls back to its busiest."""
    objective = ctx.settings.objective_of(ctx.name)
    if objective.level is not None and objective.level not in benchmark.levels:
        return objective.model_copy(update={"level": max(benchmark.levels)})
    return objective


def baseline_of(ctx: SlotContext, trial: Trial) -> dict[int, LevelResult]:
    """Given a trial, return the best-known's latest results under the same benchmark; empty if there are none."""
    ladder = ctx.store.ladder(ctx.name)
    if not ladder:
        return {}
    measured = [t for t in ctx.store.measured(ctx.name, ladder[0][0], trial.benchmark_hash) if t.id != trial.id]
    if not measured:
        return {}
    objective = objective_of(ctx, benchmark_of(trial))
    found = _under(ctx, measured[0].id, objective, ctx.store.results(measured[0].id))
    return {r.concurrency: r for r in found}


def _under(
    ctx: SlotContext, trial_id: int, objective: Objective, results: tuple[LevelResult, ...]
) -> tuple[LevelResult, ...]:
    """Results with the goodput that the objective asks for: one measured before it did gets it from its samples."""
    if objective.limits is None:
        return results
    decides = weights_of(objective, tuple(r.concurrency for r in results)) if results else {}
    return tuple(
        _with_goodput(ctx, trial_id, r, objective.limits)
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
    asked = (t.answers for t in reversed(ctx.store.trials(ctx.name)) if t.candidate_id == ladder[0][0])
    return next((answers for answers in asked if answers), ())


def noise_of(ctx: SlotContext, benchmark_hash: str) -> float:
    """Given a benchmark, return the noise between launches: the best-known's own if it was measured more than once."""
    ladder = ctx.store.ladder(ctx.name)
    if not ladder:
        return launch_noise([])
    by_level: dict[int, list[float]] = {}
    for trial in ctx.store.measured(ctx.name, ladder[0][0], benchmark_hash):
        for result in ctx.store.results(trial.id):
            if not result.figures.void:
                by_level.setdefault(result.concurrency, []).append(result.figures.output_tok_s)
    return max((launch_noise(rates) for rates in by_level.values()), default=launch_noise([]))


def took_s(trial: Trial) -> float:
    """Given a trial, return the seconds it has kept its slot busy, earlier interrupted tries included."""
    if trial.begun_mono_s is None or trial.begun_boot != clock.boot_id():
        return trial.busy_s
    return trial.busy_s + max(0.0, clock.monotonic_s() - trial.begun_mono_s)


def planned_s(benchmark: Benchmark, usual_ready_s: float | None) -> float:
    """Given a benchmark and how long the candidate usually loads, return how long a whole trial takes, in seconds."""
    levels = len(benchmark.levels) * benchmark.seconds * (1 + WARMUP_SHARE)
    return (usual_ready_s if usual_ready_s is not None else START_GUESS_S) + levels


def _trial_draft(
    ctx: SlotContext, trial: Trial, so_far: TrialSoFar, judgement: Judgement, proposed: tuple[str, ...]
) -> Draft:
    candidate = ctx.store.candidate(trial.candidate_id)
    launches = ctx.store.launches(ctx.name, trial.id)
    last = launches[-1] if launches else None
    ladder = ctx.store.ladder(ctx.name)
    measured = ctx.store.bases(ctx.name, trial.benchmark_hash)
    found = front_of((*measured, (trial.candidate_id, trial.name, so_far)))
    natural = last is not None and last.diagnosis is not None and last.diagnosis.cause != "own-stop"
    return report.trial_entry(
        report.TrialReport(
            trial_id=trial.id,
            slot=ctx.name,
            name=trial.name,
            hypothesis=trial.hypothesis,
            objective=str(so_far.objective),
            judgement=judgement,
            results=so_far.results,
            levels=so_far.levels,
            best_name=ladder[0][1] if ladder and so_far.baseline else None,
            baseline=so_far.baseline,
            command=ctx.command(candidate),
            benchmark=f"{trial.benchmark} ({trial.benchmark_hash[:8]})",
            took_s=took_s(trial),
            planned_s=planned_s(benchmark_of(trial), last.ready_s if last else None),
            ready_s=last.ready_s if last else None,
            diagnosis=last.diagnosis if last and natural else None,
            next_step=_next_step(ctx, judgement, ladder, proposed),
            differences=last.configuration.differences if last and last.configuration else (),
            answers=agreed(so_far),
            front=tuple(described(found)) if len(found) > 1 else (),
        )
    )


def _next_step(
    ctx: SlotContext, judgement: Judgement, ladder: list[tuple[str, str, int]], proposed: tuple[str, ...]
) -> str:
    waiting = ctx.store.queue(ctx.name)
    parts = [f"queued {name} to isolate the cause" for name in proposed]
    if waiting:
        parts.append(f"{waiting[0].name} is next of {len(waiting)} in the queue")
    elif judgement.promote:
        parts.append("it stays serving")
    elif ladder:
        parts.append(f"the best-known, {ladder[0][1]}, is put back")
    else:
        parts.append("there is no best-known yet; enqueue a server that works")
    return "; ".join(parts)


def _proposals(ctx: SlotContext, trial: Trial, so_far: TrialSoFar) -> tuple[str, ...]:
    """Queue the candidates that rules propose, each once: a candidate that isolates a cause beside acceptance."""
    names = []
    candidate = ctx.store.candidate(trial.candidate_id)
    for fired in {f.rule: f for r in so_far.results if (f := r.proposal) is not None}.values():
        changed = derive(candidate, dict(fired.set), f"proposed by {fired.file} / {fired.rule}: {fired.sentence}")
        if changed.id == candidate.id or ctx.store.same_trials(ctx.name, changed.id, trial.benchmark_hash):
            continue
        ctx.store.put_candidate(changed, to_toml(changed), f"{changed.name}.toml")
        ctx.store.add_trial(ctx.name, changed, (trial.benchmark, benchmark_of(trial)), clock.utc_label())
        names.append(changed.name)
    return tuple(names)
