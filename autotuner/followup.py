"""Works out what rules proposed on a trial that is over: the candidates, what speaks against them, their files.

It asks the host (versions, flags), so it runs as an action of its own before the trial is concluded; outcome.py then queues
what is ready, together with the verdict.
"""

import dataclasses

from autotuner import known
from autotuner.context import SlotContext
from autotuner.core.candidate import Candidate, to_toml
from autotuner.core.followups import (
    Limits,
    NotProposed,
    Proposal,
    Situation,
    Tried,
    depths_measured,
    objection,
    ordered,
    work_out,
)
from autotuner.core.state import ProposalState
from autotuner.edge.files import write_atomically
from autotuner.edge.helpcache import HelpCache
from autotuner.edge.proposals import ProposalRow
from autotuner.edge.rows import LaunchRow, Trial
from autotuner.edge.starts import usual_ready_s
from autotuner.engines.nccl import unchecked
from autotuner.installed import engine_version
from autotuner.preflight import Preflight, slot_problems


def unsettled(ctx: SlotContext, trial_id: int) -> bool:
    """Whether something was proposed on a trial that this daemon has not yet tried to work out."""
    rows = ctx.store.proposals.of_trial(trial_id) if trial_id not in ctx.settled else []
    return any(row.state is ProposalState.WANTED for row in rows)


async def settle(ctx: SlotContext, trial_id: int) -> None:
    """Work out what was proposed on a trial, and note of each whether it is ready to be queued, suggested or refused."""
    ctx.settled.add(trial_id)  # once a daemon: whatever goes wrong here must not keep a trial from its verdict
    trial = ctx.store.trial(trial_id)
    wanted = [row for row in ctx.store.proposals.of_trial(trial_id) if row.state is ProposalState.WANTED]
    history = _history(ctx, trial)
    found: list[tuple[ProposalRow, Proposal]] = []
    for row in wanted:
        came = work_out(row.fired, await _situation(ctx, trial, row))
        if isinstance(came, Proposal):
            found.append((row, dataclasses.replace(came, gpu_s=_gpu_s(ctx, trial, came.candidate))))
        elif isinstance(came, NotProposed):
            ctx.store.proposals.update(row.id, state=ProposalState.REFUSED, why=came.why)
        else:
            ctx.store.proposals.drop(row.id)
    left = ctx.settings.budget.proposals - _queued_so_far(ctx)
    preflight = Preflight(ctx.host, HelpCache(ctx.settings.cache))
    rows = {id(proposal): row for row, proposal in found}
    taken: set[str] = set()
    for proposal in ordered([proposal for _, proposal in found]):
        row = rows[id(proposal)]
        if proposal.candidate.id in taken:
            ctx.store.proposals.drop(row.id)  # another rule of this trial came to the same candidate
            continue
        taken.add(proposal.candidate.id)
        why = await _against(ctx, trial, proposal, history, left, preflight)
        file = "" if why else _write(ctx, proposal.candidate)
        queues = ctx.settings.propose == "queue"
        left -= not why and queues
        state = ProposalState.REFUSED if why else ProposalState.READY if queues else ProposalState.SUGGESTED
        columns = {"state": state, "why": why, "file": file, "said": proposal.said}
        ctx.store.proposals.update(row.id, proposal.candidate, **columns, gain=proposal.gain, gpu_s=proposal.gpu_s)


async def _against(
    ctx: SlotContext, trial: Trial, proposal: Proposal, history: list[Tried], left: int, preflight: Preflight
) -> str:
    """What speaks against a proposal: what was tried, the campaign's limits, and what preflight finds."""
    parent = next(tried for tried in history if tried.id == trial.id)
    others = [tried for tried in history if tried.id != trial.id]
    said = objection(proposal, parent, others, Limits(left, ctx.settings.budget.proposal_depth))
    if said:
        return said
    # Its program was started a moment ago; where it cannot be asked for its flags now, that is no reason against it.
    found = await preflight.check(proposal.candidate, strict=False, gpus=ctx.slot.gpus)
    agree_min = ctx.settings.objective_of(ctx.name).constraints.answers_agree_min
    risks = unchecked(proposal.candidate, agree_min)
    problems = [*slot_problems(proposal.candidate, ctx.slot), *risks, *found.problems]
    return f"it does not pass preflight: {'; '.join(problems)}" if problems else ""


async def _situation(ctx: SlotContext, trial: Trial, row: ProposalRow) -> Situation:
    candidate = ctx.store.candidate(trial.candidate_id)
    launch = next(iter(reversed(ctx.store.launches(ctx.name, trial.id))), None)
    effective = row.known or (launch.configuration.effective if launch and launch.configuration else None)
    version = (effective.version if effective else None) or await engine_version(ctx.host, candidate)
    benchmark = known.benchmark_of(trial)
    situation = Situation(
        candidate=candidate,
        engine=ctx.engine(candidate),
        levels=benchmark.concurrencies,
        request_tokens=benchmark.request_tokens,
        level=row.level,
        effective=effective,
        version=version,
        results=ctx.store.results(trial.id),
        baseline=known.baseline_of(ctx, trial),
        refused=launch.diagnosis.evidence if launch and launch.diagnosis else (),
    )
    measured = [
        (ctx.store.candidate(t.candidate_id), ctx.store.results(t.id))
        for t in ctx.store.trials_under(ctx.name, trial.benchmark_hash)
        if t.id != trial.id and t.ended_at is not None
    ]
    return dataclasses.replace(situation, depths=depths_measured(situation, measured))


def _history(ctx: SlotContext, trial: Trial) -> list[Tried]:
    """Every trial of the slot, as far as it matters to a follow-up; a candidate that is tried again keeps its parent."""
    by_trial: dict[int, list[LaunchRow]] = {}
    for launch in ctx.store.launches(ctx.name):
        if launch.trial_id is not None:
            by_trial.setdefault(launch.trial_id, []).append(launch)
    parents: dict[str, int] = {}
    found = []
    for t in ctx.store.trials(ctx.name):
        if t.state == "cancelled":
            continue
        if t.parent is not None:
            parents.setdefault(t.candidate_id, t.parent)
        launches = by_trial.get(t.id, [])
        causes = [row.diagnosis.cause for row in launches if row.diagnosis and row.diagnosis.cause != "own-stop"]
        found.append(
            Tried(
                id=t.id,
                candidate=ctx.store.candidate(t.candidate_id),
                parent=parents.get(t.candidate_id),
                same_benchmark=t.benchmark_hash == trial.benchmark_hash,
                verdict=t.verdict,
                started=any(row.ready_s is not None for row in launches),
                cause=causes[-1] if causes else "",
            )
        )
    return found


def _queued_so_far(ctx: SlotContext) -> int:
    """The follow-ups of this campaign, those that were cancelled included: their place in the budget was spent."""
    since = ctx.store.slot(ctx.name).campaign_from
    return sum(t.parent is not None and t.confirms is None and t.id > since for t in ctx.store.trials(ctx.name))


def _gpu_s(ctx: SlotContext, trial: Trial, candidate: Candidate) -> float:
    planned = known.planned_s(known.benchmark_of(trial), usual_ready_s(ctx.store, candidate))
    return planned * ctx.slot.gpu_count


def _write(ctx: SlotContext, candidate: Candidate) -> str:
    """Write a candidate as a file to read, change and enqueue; a name that another one has gets the id."""
    folder = ctx.settings.proposals
    text = to_toml(candidate).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{candidate.name}.toml"
    if path.exists() and path.read_bytes() != text:
        path = folder / f"{candidate.name}-{candidate.id[:8]}.toml"
    write_atomically(path, text)
    return str(path)
