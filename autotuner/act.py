"""One async function per action: record the intent, do it, record the outcome. Decides nothing.

Each may be cancelled or killed at any await: what is committed is true, and the next cycle goes on from there.
"""

import uuid
from dataclasses import dataclass, field

from autotuner import freeing, outcome, resolve
from autotuner.context import Live, SlotContext, pulse
from autotuner.core import decide
from autotuner.core.candidate import Candidate
from autotuner.core.effective import Configuration
from autotuner.core.estimate import History, learn, remaining
from autotuner.core.facts import server_facts, start_facts
from autotuner.core.policy import Facts, Fired, Watch
from autotuner.core.report import duration, ended_entry
from autotuner.core.starting import Start, follow, so_far
from autotuner.core.state import LaunchState, Purpose
from autotuner.core.watching import server_ended
from autotuner.edge import clock, starts
from autotuner.edge.host import ServerSeen
from autotuner.edge.probes import Probe
from autotuner.edge.rows import LaunchRow
from autotuner.engines import nccl, situation
from autotuner.engines.base import Diagnosis, Stage
from autotuner.engines.diagnosis import never_started, own_stop
from autotuner.engines.reading import read
from autotuner.engines.vocabulary import State
from autotuner.errors import DiskFull, HostDiskFull, HostError, HostUnreachable
from autotuner.installed import engine_version
from autotuner.launching import spec_of
from autotuner.serverlog import LogReader

START_POLL_S = 0.25
DRAIN_POLL_S = 0.5
PORT_WAIT_S = 10.0
DYING_S = 5.0
SEEN_LATE_S = 15.0  # what passes between a launch and the first look at it, the question for its version included


async def launch(ctx: SlotContext, action: decide.Launch) -> None:
    """Start a server: the intent is committed before anything runs, so that no crash can lose track of it."""
    candidate = ctx.store.candidate(action.candidate_id)
    launch_id = uuid.uuid4().hex[:16]
    ctx.live = Live(stage=Stage.PROCESS.value, since_s=clock.monotonic_s())
    ctx.starting.add(launch_id)
    try:
        levels = await freeing.levels(ctx)
        if levels is None:
            return  # the next cycle says why, and waits
        row = LaunchRow(
            id=launch_id,
            slot=ctx.name,
            candidate_id=candidate.id,
            name=action.name,
            purpose=action.purpose,
            trial_id=action.trial_id,
            state=LaunchState.INTENDED,
            intended_at=clock.utc_label(),
            boot_id=clock.boot_id(),
            mono_s=clock.monotonic_s(),
            ready_s=None,
            gpu_used_mib=levels,
            ended_at=None,
            exit_code=None,
            end_asked=False,
            diagnosis=None,
        )
        ctx.take_secrets()
        await ctx.learn_secrets()
        spec = spec_of(ctx, candidate, launch_id)
        ctx.store.add_launch(row)
        try:
            await ctx.host.start(spec)
        except (DiskFull, HostDiskFull):
            # nothing runs, and the server is not to blame: this launch must not count against it
            ctx.store.update_launch(launch_id, end_asked=True)
            raise
        ctx.store.move_launch(launch_id, LaunchState.STARTING)
    except HostUnreachable:  # the order may have come through: what became of it is seen once the host answers
        raise
    except HostError:
        ctx.refused.add(launch_id)
        raise
    finally:
        ctx.starting.discard(launch_id)


async def await_serving(ctx: SlotContext, action: decide.AwaitServing) -> None:
    """Follow a start by its stages until the server generates tokens, ends, or a rule gives it up."""
    row = ctx.store.launch(action.launch_id)
    if row.state is LaunchState.INTENDED:  # the daemon was killed between the start and its record
        ctx.store.move_launch(row.id, LaunchState.STARTING)
    candidate = ctx.store.candidate(row.candidate_id)
    following = _Following(ctx, row, candidate, await engine_version(ctx.host, candidate))
    async with ctx.probe(following.candidate) as probe:
        while True:
            seen = await ctx.seen(row.id)
            await following.look()
            if not seen.alive:
                await _start_failed(following, seen)
                return
            cuts = ctx.host.cuts
            if await _serves(ctx, probe, row.id):
                ready_s = following.elapsed_s
                resolved = await resolve.configuration(ctx, row, following.candidate, probe)
                await freeing.note_own(ctx, row)
                ctx.uncut(cuts)
                _now_serving(following, ready_s, resolved)
                return
            fired = following.fired(server_facts(alive=True, exit_code=None, diagnosis=None))
            if fired is not None:
                await _start_given_up(following, fired)
                return
            await clock.sleep(START_POLL_S)


async def verify(ctx: SlotContext, action: decide.Verify) -> None:
    """Have a server generate tokens; one that cannot is stopped, and counts as one that ended by itself."""
    row = ctx.store.launch(action.launch_id)
    candidate = ctx.store.candidate(row.candidate_id)
    cuts = ctx.host.cuts
    async with ctx.probe(candidate) as probe:
        if await _serves(ctx, probe, row.id):
            if ctx.given.launch != row.id:  # it was started by a daemon before this one
                await freeing.note_own(ctx, row)
            ctx.verified.add(row.id)
            return
    seen = await _silent(ctx, row.id)  # a connection that is lost and not known to be shows here, too
    ctx.uncut(cuts)
    if not seen.alive:
        return  # it, or a rank of it, ended meanwhile: that is recorded with its own cause
    tail = await ctx.log(row.id, ctx.engine(candidate)).rest()
    diagnosis = Diagnosis(
        "no-output", "its process lives but it generates no tokens", "read its log: autotuner show --log", tail[-6:]
    )
    seen = await ctx.host.stop(row.id, ctx.slot.stop_grace_s)
    _must_be_stopped(seen, row)
    outcome.launch_ended(ctx, row, seen, diagnosis, asked=False)
    ctx.store.add_entry(
        ended_entry(ctx.name, row.name, diagnosis, seen.exit_code, "the best-known server is restored"),
        clock.utc_label(),
    )


async def _silent(ctx: SlotContext, launch_id: str) -> ServerSeen:
    """Look at a launch that does not answer, until it has ended or DYING_S have passed.

    The port of a process that is killed is closed at once, and its end is on record only when its shim has cleared up.
    """
    until_s = clock.monotonic_s() + DYING_S
    while (seen := await ctx.seen(launch_id)).alive and clock.monotonic_s() < until_s:
        await clock.sleep(START_POLL_S)
    return seen


async def stop(ctx: SlotContext, action: decide.Stop) -> None:
    """Drain, stop, and prove it: no process left, the port closed, GPU memory back at its level before the launch.

    Raise HostError if something lives or holds the port. Memory that does not come back is no reason to stop anything again:
    the launch has ended, and the slot waits for its memory and for a person.
    """
    row = ctx.store.launch(action.launch_id)
    if not row.end_asked:
        await _drain(ctx, row)
        ctx.store.update_launch(row.id, end_asked=True)
    ctx.live = Live(stage="stopping", since_s=clock.monotonic_s())
    await freeing.note_own(ctx, row)
    seen = await ctx.host.stop(row.id, ctx.slot.stop_grace_s)
    _must_be_stopped(seen, row)
    await _wait_for_port(ctx)
    held = await freeing.wait(ctx, row)
    with ctx.store.transaction():
        outcome.launch_ended(ctx, row, seen, own_stop() if seen.started else never_started(), asked=True)
        outcome.stopped(ctx, row)
        if held:
            outcome.degrade(ctx, held)


async def record_end(ctx: SlotContext, action: decide.RecordEnd) -> None:
    """Record that a server ended by itself, why, and what that means for its trial."""
    row = ctx.store.launch(action.launch_id)
    candidate = ctx.store.candidate(row.candidate_id)
    engine = ctx.engine(candidate)
    seen = await ctx.host.inspect(row.id)
    if not seen.started and row.id not in ctx.refused:
        # The daemon died, the host was lost, or the disk was full, between the intent and the start: that is nobody's failure.
        outcome.launch_ended(ctx, row, seen, never_started(), asked=True)
        return
    was_ready = row.state is LaunchState.SERVING
    diagnosis = await ctx.log(row.id, engine).why_ended(seen, asked=row.end_asked, became_ready=was_ready)
    if not row.end_asked:
        diagnosis = nccl.blame(diagnosis, candidate, ctx.log(row.id, engine).since(0))
    with ctx.store.transaction():
        known = ctx.log(row.id, engine).effective
        outcome.launch_ended(ctx, row, seen, diagnosis, asked=row.end_asked)
        trial = ctx.store.trial_in_hand(ctx.name)
        told = row.id in ctx.refused and trial is not None and trial.ended is not None  # why the host did not start it
        if trial is not None and trial.id == row.trial_id and not row.end_asked and not told:
            facts = server_facts(alive=False, exit_code=seen.exit_code, diagnosis=diagnosis)
            ends, proposed = _look(Watch(ctx.policies), facts)
            fired = ends or server_ended(diagnosis)
            outcome.want(ctx, trial.id, proposed, None, row.configuration.effective if row.configuration else known)
            outcome.ended_by_its_server(ctx, trial.id, diagnosis, fired)
        elif not row.end_asked and was_ready:
            ctx.store.add_entry(
                ended_entry(ctx.name, row.name, diagnosis, seen.exit_code, "the best-known server is restored"),
                clock.utc_label(),
            )


@dataclass
class _Following:
    """A start being followed."""

    ctx: SlotContext
    row: LaunchRow
    candidate: Candidate
    engine_version: str | None = None
    start: Start = field(default_factory=Start)

    def __post_init__(self) -> None:
        # A start that the daemon did not see from its beginning has reached its stages at times that nobody knows.
        self.from_the_beginning = self.elapsed_s <= SEEN_LATE_S
        earlier = starts.earlier_starts(self.ctx.store, self.candidate, self.engine_version)
        self.stages_usual_s = learn(History(row.stages, row.ready_s or 0.0) for row in earlier)
        engine = self.ctx.engine(self.candidate)
        self.log: LogReader = self.ctx.log(self.row.id, engine)
        self.watch = Watch(self.ctx.policies)
        self.proposed: list[Fired] = []
        self.usual_s = starts.usual_ready_s(self.ctx.store, self.candidate)
        self.limit_s = self.candidate.launch.start_timeout_s or self.ctx.slot.start_timeout_s

    @property
    def elapsed_s(self) -> float:
        return clock.monotonic_s() - self.row.mono_s

    async def look(self) -> None:
        """Read what is new and show it."""
        facts = await self.log.facts()
        activity = await self.ctx.host.activity(self.row.id)
        self.start = follow(self.start, facts, pulse(activity), self.elapsed_s)
        since = clock.monotonic_s() - self.elapsed_s
        stage, in_stage_s = self.start.stage, self.elapsed_s - self.start.reached[-1][1]
        left = remaining(self.stages_usual_s, stage, in_stage_s, self.start.done, self.start.total)
        self.ctx.live = Live(
            stage.value,
            self.start.progress,
            since_s=since,
            usual_s=self.usual_s,
            stage_s=round(in_stage_s, 1),
            stage_usual_s=left.stage_usual_s,
            remaining_s=left.remaining_s,
            overdue=left.overdue,
        )

    def fired(self, server: Facts) -> Fired | None:
        silence = self.log.engine.silence_limit_s(self.start.stage)
        facts = {**server, **start_facts(so_far(self.start, self.elapsed_s, self.limit_s, silence))}
        ends, proposed = _look(self.watch, facts)
        self.proposed += proposed
        return ends


def _look(watch: Watch, facts: Facts) -> tuple[Fired | None, list[Fired]]:
    """The first rule that ends a start, and all that propose a candidate."""
    fired = [f for f in watch.look("start", facts) if not f.dry_run]
    ends = next((f for f in fired if f.action in {"abandon", "quarantine"}), None)
    return ends, [f for f in fired if f.action == "propose"]


async def _serves(ctx: SlotContext, probe: Probe, launch_id: str) -> bool:
    """Health, then tokens, and that the port is held by this very launch before and after them: a stranger may answer there."""
    if not await probe.healthy() or not await _holds_port(ctx, launch_id):
        return False
    generated = await probe.generate(await probe.model())
    if not generated.ok or not await _holds_port(ctx, launch_id):
        return False
    ctx.generated[launch_id] = generated.tokens  # the entry of a restore says what was really seen
    return True


async def _holds_port(ctx: SlotContext, launch_id: str) -> bool:
    holder = await ctx.host.port_holder(ctx.slot.port)
    return holder is not None and holder.launch_id == launch_id


def _now_serving(following: _Following, ready_s: float, resolved: Configuration) -> None:
    ctx, row = following.ctx, following.row
    with ctx.store.transaction():
        stages = following.start.reached if following.from_the_beginning else ()
        version = resolved.effective.version or following.engine_version
        ctx.store.launch_served(row.id, ready_s, stages, version, resolved)
        if row.trial_id is not None and (fired := resolve.twin(ctx, row, resolved)) is not None:
            ctx.store.update_trial(row.trial_id, ended=fired.model_dump_json())
        if row.purpose is Purpose.RESTORE:
            outcome.restored(ctx, row, ready_s)
        elif row.trial_id is not None:
            outcome.want(ctx, row.trial_id, following.proposed, None, resolved.effective)
    ctx.verified.add(row.id)
    ctx.live = Live(stage=Stage.GENERATING.value)


async def _start_failed(following: _Following, seen: ServerSeen) -> None:
    diagnosis = await following.log.why_ended(seen, asked=False, became_ready=False)
    if seen.error and diagnosis.cause == "unknown":
        diagnosis = Diagnosis(
            "unknown", f"the server did not start: {seen.error}", diagnosis.advice, diagnosis.evidence
        )
    diagnosis = nccl.blame(diagnosis, following.candidate, following.log.since(0))
    facts = server_facts(alive=False, exit_code=seen.exit_code, diagnosis=diagnosis)
    _did_not_start(following, seen, diagnosis, following.fired(facts) or server_ended(diagnosis))


async def _start_given_up(following: _Following, fired: Fired) -> None:
    ctx, row = following.ctx, following.row
    seen = await ctx.host.stop(row.id, ctx.slot.stop_grace_s)
    lines = await following.log.rest()
    diagnosis = _why_silent(following, fired, lines)
    fired = fired.model_copy(update={"advice": diagnosis.advice})
    _must_be_stopped(seen, row)
    _did_not_start(following, seen, diagnosis, fired)


def _why_silent(following: _Following, fired: Fired, lines: tuple[str, ...]) -> Diagnosis:
    """What a start that was given up was waiting for, as far as its lines tell."""
    silence_s = following.elapsed_s - following.start.moved_at_s
    known = situation.starting(following.candidate, silence_s)
    said = read(following.candidate.engine, following.engine_version or "", "\n".join(lines), known)
    found = Diagnosis("silent-stage", fired.sentence, fired.advice, lines[-6:])
    if said.state is State.HUNG:
        found = Diagnosis(said.cause, f"{fired.sentence}; {said.sentence}", said.advice or fired.advice, lines[-6:])
    return nccl.blame(found, following.candidate, lines)


def _did_not_start(following: _Following, seen: ServerSeen, diagnosis: Diagnosis, fired: Fired) -> None:
    ctx, row = following.ctx, following.row
    with ctx.store.transaction():
        outcome.launch_ended(ctx, row, seen, diagnosis, asked=False)
        if row.trial_id is not None:
            outcome.want(ctx, row.trial_id, following.proposed, None, following.log.effective)
            outcome.ended_by_its_server(ctx, row.trial_id, diagnosis, fired)
        else:
            ctx.store.add_entry(
                ended_entry(
                    ctx.name, row.name, diagnosis, seen.exit_code, "it is tried again within its restart budget"
                ),
                clock.utc_label(),
            )


def _must_be_stopped(seen: ServerSeen, row: LaunchRow) -> None:
    if seen.alive:
        raise HostError(f"the server of {row.name} could not be stopped: processes of launch {row.id} still live")


async def traffic(ctx: SlotContext, trial_id: int) -> str:
    """Say what runs on a best-known that would have to make room for a trial; empty if nothing does, or if it is forced."""
    ladder = {candidate for candidate, _, _ in ctx.store.ladder(ctx.name)}
    serving = next((r for r in ctx.store.open_launches(ctx.name) if r.state is LaunchState.SERVING), None)
    if (
        serving is None
        or serving.candidate_id not in ladder
        or ctx.slot.drain_s <= 0
        or ctx.store.trial(trial_id).force
    ):
        return ""
    candidate = ctx.store.candidate(serving.candidate_id)
    async with ctx.probe(candidate) as probe:
        busy = await _requests(ctx, serving, candidate, probe)
    return f"{busy:.0f} requests run on {serving.name}" if busy > 0 else ""


async def _requests(ctx: SlotContext, row: LaunchRow, candidate: Candidate, probe: Probe) -> float:
    """How many requests run on a server. Raise HostUnreachable rather than take a lost connection for none."""
    cuts = ctx.host.cuts
    busy = await probe.requests(ctx.engine(candidate).read_metrics)
    if busy <= 0 and not ctx.host.here:
        await ctx.host.inspect(row.id)  # a connection that is lost and not known to be shows here
        ctx.uncut(cuts)
    return busy


async def _drain(ctx: SlotContext, row: LaunchRow) -> None:
    """Let requests that run on a serving server end, for as long as the settings allow; not if somebody forces the stop."""
    trial = ctx.store.trial_in_hand(ctx.name)
    forced = ctx.store.slot(ctx.name).force or (trial is not None and trial.force)
    if row.state is not LaunchState.SERVING or ctx.slot.drain_s <= 0 or forced:
        return
    candidate = ctx.store.candidate(row.candidate_id)
    deadline = clock.monotonic_s() + ctx.slot.drain_s
    async with ctx.probe(candidate) as probe:
        while clock.monotonic_s() < deadline and not ctx.store.slot(ctx.name).force:
            busy = await _requests(ctx, row, candidate, probe)
            if busy <= 0:
                return
            left = duration(deadline - clock.monotonic_s())
            ctx.live = Live(stage="draining", progress=f"{busy:.0f} requests still run, at most {left} more")
            await clock.sleep(DRAIN_POLL_S)


async def _wait_for_port(ctx: SlotContext) -> None:
    deadline = clock.monotonic_s() + PORT_WAIT_S
    while clock.monotonic_s() < deadline:
        holder = await ctx.host.port_holder(ctx.slot.port)
        if holder is None or holder.launch_id is None:
            return  # free, or a stranger's: the next decision names it
        await clock.sleep(0.1)
    raise HostError(f"port {ctx.slot.port} is still held by a process of ours although its launch was stopped")
