"""What is recorded once something has happened: ends of launches, verdicts, restores, and the entries that explain them.

Every function runs without an await, and writes an outcome and its entry in one transaction.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import TypeAdapter

from autotuner import confirming, known
from autotuner.bench.benchmark import Level
from autotuner.context import Live, SlotContext
from autotuner.core import gpumemory, report
from autotuner.core.candidate import to_toml
from autotuner.core.decide import INTERRUPTIONS_MAX
from autotuner.core.entry import Draft
from autotuner.core.followups import PURPOSE
from autotuner.core.front import OnFront, described, front, rates_of
from autotuner.core.policy import Fired, built_in
from autotuner.core.state import LaunchState, ProposalState, TrialState, Verdict
from autotuner.core.topology import joined
from autotuner.core.verdict import Judgement, TrialSoFar, agreed, judge
from autotuner.edge import clock
from autotuner.edge.families import family
from autotuner.edge.host import ServerSeen
from autotuner.edge.rows import LaunchRow, Trial, basis_json, judgement_columns
from autotuner.engines.base import Diagnosis, Effective
from autotuner.engines.diagnosis import TOLD_TO_STOP

_DIAGNOSIS = TypeAdapter(Diagnosis)
NOT_WORKED_OUT = "it could not be worked out; the daemon's log says why"


@dataclass(frozen=True)
class Proposed:
    """What an entry says of a trial's proposals: those that are queued or to be enqueued, and those that are not and why."""

    next_steps: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def launch_ended(ctx: SlotContext, row: LaunchRow, seen: ServerSeen, diagnosis: Diagnosis, *, asked: bool) -> None:
    """Record the end of a launch."""
    if not asked:
        ctx.failed_end_s = clock.monotonic_s()
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
    newest = next((name for candidate, name, _ in ctx.store.ladder(ctx.name)[:1] if candidate != row.candidate_id), "")
    seen = (ready_s, ctx.generated.get(row.id, 0), ctx.settings.url_of(ctx.name))
    draft = report.restored_entry(ctx.name, row.name, why, *seen, instead_of=newest)
    ctx.store.add_entry(draft, clock.utc_label())
    ctx.store.update_slot(ctx.name, degraded="")
    ctx.announced = row.id


def conclude(ctx: SlotContext, trial_id: int) -> Judgement:
    """Give a trial its verdict, promote it or queue what must confirm it, queue what it proposes, and write its entry."""
    trial = ctx.store.trial(trial_id)
    so_far = known.trial_so_far(ctx, trial)
    judgement = judge(so_far)
    with ctx.store.transaction():
        proposed = _queue_proposals(ctx, trial)
        if judgement.promote:
            next_up = confirming.drop_obsolete(ctx, trial.candidate_id)
        else:
            next_up = confirming.queue_owed(ctx, trial, known.benchmark_of(trial), judgement.follows)
        draft = _trial_draft(ctx, trial, so_far, judgement, proposed, next_up)
        entry = ctx.store.add_entry(draft, clock.utc_label(), trial.id)
        ctx.store.move_trial(
            trial.id,
            TrialState.DONE,
            entry=entry.number,
            ended_at=clock.utc_label(),
            busy_s=known.took_s(trial),
            basis=basis_json(so_far),
            **judgement_columns(judgement),
        )
        ctx.settled.discard(trial.id)
        if judgement.promote:
            ctx.store.promote(ctx.name, trial.candidate_id, trial.name, trial.id, clock.utc_label())
            ctx.store.update_slot(ctx.name, degraded="")
    return judgement


def want(
    ctx: SlotContext, trial_id: int, proposed: Iterable[Fired], level: Level | None, resolved: Effective | None
) -> None:
    """Note what rules propose on a trial; it is worked out and queued when the trial is over."""
    if ctx.settings.propose != "off":
        ctx.store.proposals.want(ctx.name, trial_id, proposed, level, resolved, clock.utc_label())


def requeue(ctx: SlotContext, trial_id: int, why: str) -> None:
    """Put a trial back to the head of the queue and forget what it measured: a half measured level compares with nothing."""
    trial = ctx.store.trial(trial_id)
    with ctx.store.transaction():
        ctx.store.drop_results(trial_id)
        ctx.store.proposals.drop_of_trial(trial_id)
        ctx.store.move_trial(trial_id, TrialState.QUEUED, ended=None, answers="[]", busy_s=known.took_s(trial))
        ctx.store.put_first(trial_id)
        note(
            ctx,
            f"put back {trial.name}",
            f"The trial of {trial.name} was interrupted and is first in the queue again: {why}.",
        )


def ended_by_its_server(ctx: SlotContext, trial_id: int, diagnosis: Diagnosis, fired: Fired) -> None:
    """Record what the end of a trial's server means for the trial.

    A server that somebody else ended tells nothing of the candidate: the trial begins anew, but not for ever.
    """
    trial = ctx.store.trial(trial_id)
    if diagnosis.cause == TOLD_TO_STOP and trial.interruptions <= INTERRUPTIONS_MAX:
        ctx.store.update_trial(trial_id, interruptions=trial.interruptions + 1)
        requeue(ctx, trial_id, diagnosis.sentence)
        return
    if diagnosis.cause == TOLD_TO_STOP:
        said = f"{diagnosis.sentence}, and the trial was cut short {trial.interruptions} times before"
        fired = built_in("stopped-from-outside", said, Verdict.ERROR, diagnosis.advice)
    ctx.store.update_trial(trial_id, ended=fired.model_dump_json())


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
    with ctx.store.transaction():
        ctx.store.move_trial(
            trial_id,
            TrialState.RUNNING,
            begun_at=clock.utc_label(),
            begun_boot=clock.boot_id(),
            begun_mono_s=clock.monotonic_s(),
        )
        ctx.store.update_trial(trial_id, alpha=known.alpha_of(ctx, ctx.store.trial(trial_id)))


def queue_baseline(ctx: SlotContext, candidate_id: str, why: str) -> None:
    """Put a measurement of the best-known at the head of the queue."""
    candidate = ctx.store.candidate(candidate_id)
    queued = ctx.store.queue(ctx.name)
    with ctx.store.transaction():
        trial_id = ctx.store.add_trial(
            ctx.name,
            candidate,
            (queued[0].benchmark, known.benchmark_of(queued[0])),
            clock.utc_label(),
            priority=queued[0].priority,
            is_baseline=True,
        )
        ctx.store.update_trial(trial_id, force=queued[0].force)
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
        ctx.store.update_slot(ctx.name, restore_wanted="", restore_hold=0, force=False, **hold)


def stopped(ctx: SlotContext, row: LaunchRow) -> None:
    """Write the entry of a server that a person had stopped; a stop that only made room for another has none."""
    slot = ctx.store.slot(ctx.name)
    if not slot.stopped or slot.restore_wanted:
        return
    bullets = (("Next", "no server runs on this slot until `autotuner resume` or `autotuner restore-best`"),)
    with ctx.store.transaction():
        note(ctx, f"stopped {row.name}", f"The server of {row.name} was stopped on purpose, {slot.stopped}.", bullets)
        ctx.store.update_slot(ctx.name, force=False)


def degrade(ctx: SlotContext, why: str) -> None:
    """Stop trying to restore and ask for a person."""
    names = tuple(name for _, name, _ in ctx.store.ladder(ctx.name))
    last = ctx.store.last_diagnosis(ctx.name)
    held = gpumemory.is_held(why)
    draft = gpumemory.held_entry(ctx.name, why) if held else report.degraded_entry(ctx.name, names, last, why)
    hold = {} if held else {"restore_hold": 0}  # the queue is held, if so asked, once the memory is back
    with ctx.store.transaction():
        ctx.store.add_entry(draft, clock.utc_label())
        ctx.store.update_slot(ctx.name, degraded=why, restore_wanted="", force=False, **hold)


def go_on(ctx: SlotContext, why: str) -> None:
    """GPU memory that a slot waited for is free: the best-known comes back first."""
    with ctx.store.transaction():
        note(ctx, "goes on", f"{why[0].upper()}{why[1:]}; nobody needs to come any more.")
        wanted = {"restore_wanted": why} if ctx.store.ladder(ctx.name) and not ctx.store.slot(ctx.name).stopped else {}
        ctx.store.update_slot(ctx.name, degraded="", **wanted)


def blocked(ctx: SlotContext, why: str, *, foreign: bool = True) -> None:
    """Write once, not every cycle, that something outside keeps the slot from going on; and once that it is over.

    Unless it is `foreign`, somebody else's, `why` says itself what is to be done.
    """
    if ctx.blocked is None:
        ctx.blocked = ctx.store.slot(ctx.name).blocked
    if why == ctx.blocked:
        return
    with ctx.store.transaction():
        ctx.store.update_slot(ctx.name, blocked=why)
        if why:
            said = f"{why[0].upper()}{why[1:]}"
            do = (("Do", "free it, or change the slot in the settings; the daemon looks again each cycle"),)
            hands_off = "; autotuner does not touch what it did not launch" if foreign else ""
            note(ctx, "blocked", f"{said}{hands_off}.", do if foreign else ())
        else:
            note(ctx, "unblocked", "What kept the slot from going on is gone.")
    ctx.blocked = why


def note(ctx: SlotContext, title: str, sentence: str, bullets: tuple[tuple[str, str], ...] = ()) -> None:
    """Write an entry of a few words."""
    ctx.store.add_entry(Draft(ctx.name, title, sentence, bullets), clock.utc_label())


def _trial_draft(
    ctx: SlotContext,
    trial: Trial,
    so_far: TrialSoFar,
    judgement: Judgement,
    proposed: Proposed,
    next_up: tuple[str, ...],
) -> Draft:
    candidate = ctx.store.candidate(trial.candidate_id)
    launches = ctx.store.launches(ctx.name, trial.id)
    last = launches[-1] if launches else None
    resolved = last.configuration if last else None
    ladder = ctx.store.ladder(ctx.name)
    found = _front_with(ctx, trial, so_far)
    natural = last is not None and last.diagnosis is not None and last.diagnosis.cause != "own-stop"
    return report.trial_entry(
        report.TrialReport(
            trial_id=trial.id,
            slot=ctx.name,
            name=trial.name,
            hypothesis=trial.hypothesis,
            objective=so_far.objective.described(so_far.load),
            judgement=judgement,
            results=so_far.results,
            levels=so_far.levels,
            best_name=ladder[0][1] if ladder and so_far.baseline else None,
            aim=trial.aim,
            remarks=so_far.remarks,
            baseline=so_far.baseline,
            command=ctx.command(candidate),
            benchmark=f"{trial.benchmark} ({trial.benchmark_hash[:8]})",
            took_s=known.took_s(trial),
            planned_s=known.planned_s(known.benchmark_of(trial), last.ready_s if last else None, so_far.measure),
            ready_s=last.ready_s if last else None,
            diagnosis=last.diagnosis if last and natural else None,
            next_step=_next_step(ctx, judgement, ladder, proposed, next_up),
            differences=resolved.differences if resolved else (),
            not_proposed=proposed.refused,
            answers=agreed(so_far),
            front=tuple(described(found)) if len(found) > 1 else (),
            nccl=str(resolved.nccl) if resolved and resolved.nccl is not None and resolved.nccl.version else "",
            family=family(ctx.store, trial, judgement),
            topology=joined(resolved.topology, ctx.slot.gpus) if resolved else "",
        )
    )


def _front_with(ctx: SlotContext, trial: Trial, so_far: TrialSoFar) -> tuple[OnFront, ...]:
    """The front of a trial's benchmark with the trial; what the others came to is read once and then remembered."""
    seen, rates = ctx.measured.get(trial.benchmark_hash, (0, {}))
    rates = rates | rates_of(ctx.store.bases(ctx.name, trial.benchmark_hash, seen))
    ctx.measured[trial.benchmark_hash] = (ctx.store.outbox(ctx.name).last_entry(), rates)
    return front(dict((rates | rates_of([(trial.candidate_id, trial.name, so_far)])).values()))


def _next_step(
    ctx: SlotContext,
    judgement: Judgement,
    ladder: list[tuple[str, str, int]],
    proposed: Proposed,
    next_up: tuple[str, ...],
) -> str:
    waiting = ctx.store.queue(ctx.name)
    parts = [*next_up, *proposed.next_steps]
    if waiting:
        parts.append(f"{waiting[0].name} is next of {len(waiting)} in the queue")
    elif judgement.promote:
        parts.append("it stays serving")
    elif ladder:
        parts.append(f"the best-known, {ladder[0][1]}, is put back")
    else:
        parts.append("there is no best-known yet; enqueue a server that works")
    return "; ".join(parts)


def _queue_proposals(ctx: SlotContext, trial: Trial) -> Proposed:
    """Queue the proposals of a trial that are ready; return what the entry says of all of them."""
    queued, suggested, refused = [], [], []
    for row in ctx.store.proposals.of_trial(trial.id):
        purpose = PURPOSE[row.fired.move]
        reasons = [row.said, f"expected {100 * row.gain:+.0f} %" if row.gain is not None else ""]
        reason = "; ".join(part for part in reasons if part)
        waits = row.candidate and ctx.store.same_trials(ctx.name, row.candidate.id, trial.benchmark_hash)
        if row.state is ProposalState.READY and waits:  # somebody queued it since it was worked out
            ctx.store.proposals.update(
                row.id, state=ProposalState.REFUSED, why=f"it waits already: trial {waits[0].id}"
            )
            refused.append(f"{row.name}: it waits already: trial {waits[0].id}")
        elif row.state is ProposalState.READY and row.candidate is not None:
            ctx.store.put_candidate(row.candidate, to_toml(row.candidate), row.file)
            benchmark = (trial.benchmark, known.benchmark_of(trial))
            number = ctx.store.add_trial(ctx.name, row.candidate, benchmark, clock.utc_label(), parent=trial.id)
            ctx.store.proposals.update(row.id, state=ProposalState.QUEUED, queued_as=number)
            queued.append(f"queued {row.name} {purpose} ({reason})")
        elif row.state is ProposalState.SUGGESTED:
            suggested.append(f"`autotuner enqueue {row.file}` tries {row.name} {purpose} ({reason})")
        else:
            why = row.why or NOT_WORKED_OUT
            if row.state is ProposalState.WANTED:
                ctx.store.proposals.update(row.id, state=ProposalState.REFUSED, why=why)
            refused.append(f"{row.name or f'what {row.fired.file} / {row.fired.rule} proposes'}: {why}")
    return Proposed((*queued, *suggested), tuple(refused))
