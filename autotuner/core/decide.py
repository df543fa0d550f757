"""Decide the next action of a slot from what is recorded and what is observed: THE function of this product.

Owns the promise that a slot never has two servers: no branch returns Launch unless the observation says that no server
of ours lives and nobody else holds the port. Pure; the daemon calls it once a cycle, and start-up is just another cycle.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from autotuner.bench.benchmark import Level, LoadKind, level_name
from autotuner.core.actions import (
    Action,
    AwaitServing,
    BeginTrial,
    Conclude,
    Decision,
    Degrade,
    GiveUp,
    GoOn,
    Interrupt,
    Launch,
    QueueBaseline,
    RecordEnd,
    Requeue,
    RestoreDone,
    RunLevel,
    Stop,
    Verify,
    Wait,
)
from autotuner.core.backoff import pause_left_s, recent_failures
from autotuner.core.gpumemory import is_held
from autotuner.core.state import LaunchState, Purpose

__all__ = [
    "Action",
    "AwaitServing",
    "BeginTrial",
    "Conclude",
    "Decision",
    "Degrade",
    "Doing",
    "GiveUp",
    "GoOn",
    "IncumbentRecord",
    "Interrupt",
    "Launch",
    "LaunchRecord",
    "Observed",
    "QueueBaseline",
    "RecordEnd",
    "Recorded",
    "Requeue",
    "RestoreDone",
    "RunLevel",
    "Stop",
    "TrialRecord",
    "Verify",
    "Wait",
    "decide",
]

RESTORE_FAILURES_MAX = (
    3  # launches of one best-known that ended by themselves within the window: then the next older one
)
RESTORE_WINDOW_S = 900.0
INTERRUPTIONS_MAX = 2  # a trial during which the daemon ended more often than this may be what ends it


@dataclass(frozen=True)
class LaunchRecord:
    """One start of a server as the store knows it; not yet ended."""

    id: str
    candidate_id: str
    name: str
    purpose: Purpose
    state: LaunchState
    trial_id: int | None = None
    end_asked: bool = False


@dataclass(frozen=True)
class TrialRecord:
    """The trial in hand or the next in the queue.

    `next_level` is the one to measure next, None if none is left; `concluded` says why the trial is over already.
    """

    id: int
    candidate_id: str
    name: str
    interruptions: int = 0
    next_level: Level | None = None
    concluded: str = ""
    load: LoadKind = "concurrency"


@dataclass(frozen=True)
class IncumbentRecord:
    """A rung of the ladder: a candidate that was best-known, and how many of its launches ended badly in one window."""

    candidate_id: str
    name: str
    failures: int = 0


@dataclass(frozen=True)
class Recorded:
    """What the store says about one slot. Empty texts mean "no"; the others are the reason, for a person to read.

    `failed_s` is when the launches of the ladder began that ended by themselves, `failed_end_s` when the last of them ended as
    far as that is known, `last_failure` why; `window_s` is the window of the restart budget.
    """

    slot: str
    launches: tuple[LaunchRecord, ...] = ()
    trial: TrialRecord | None = None
    queued: TrialRecord | None = None
    ladder: tuple[IncumbentRecord, ...] = ()
    paused: str = ""
    hands_off: str = ""
    restore_wanted: str = ""
    degraded: str = ""
    no_new_trials: str = ""
    interrupt_trial: str = ""
    restore_always: bool = False
    baseline_missing: bool = False
    stopped: str = ""
    failed_s: tuple[float, ...] = ()
    failed_end_s: float = 0.0
    last_failure: str = ""
    window_s: float = RESTORE_WINDOW_S


@dataclass(frozen=True)
class Doing:
    """The long action that this daemon is carrying out now; `starts` is set while it brings a server up."""

    what: str
    trial_id: int | None = None
    starts: bool = False


@dataclass(frozen=True)
class Observed:
    """What the world says about one slot, looked at just now. `living` and `verified` hold launch ids.

    `strangers`, `freeing` and `held` (what the driver still holds of a server that has ended, for now or for good) and
    `traffic` are texts: the first three are looked at only before a launch and while memory is held, the last one only before
    a trial begins. `now_s` is on the clock of `Recorded.failed_s`.
    """

    living: frozenset[str] = frozenset()
    verified: frozenset[str] = frozenset()
    strangers: str = ""
    doing: Doing | None = None
    freeing: str = ""
    traffic: str = ""
    held: str = ""
    now_s: float = 0.0


def decide(recorded: Recorded, observed: Observed) -> Decision:
    """Given the durable record and a fresh observation of one slot, return the one next action and why."""
    for situation in _SITUATIONS:
        decision = situation(recorded, observed)
        if decision is not None:
            return decision
    return Decision(Wait(), "nothing to do: the queue is empty and no best-known is recorded yet")


def _in_progress(recorded: Recorded, observed: Observed) -> Decision | None:
    doing = observed.doing
    if doing is None:
        return None
    reason = _trial_must_yield(recorded)
    if reason and (doing.trial_id is not None or (doing.starts and _stop_wanted(recorded))):
        return Decision(Interrupt(), f"{doing.what}: interrupted, {reason}")
    return Decision(Wait(), doing.what)


def _hands_off(recorded: Recorded, observed: Observed) -> Decision | None:
    if recorded.hands_off and not recorded.restore_wanted:
        return Decision(Wait(), f"hands off: {recorded.hands_off}")
    return None


def _ended(recorded: Recorded, observed: Observed) -> Decision | None:
    gone = next((launch for launch in recorded.launches if launch.id not in observed.living), None)
    if gone is None:
        return None
    if gone.end_asked:
        return Decision(Stop(gone.id), f"the stop of {gone.name} was cut short: what is left of it is looked for")
    return Decision(RecordEnd(gone.id), f"the server of {gone.name} has ended by itself")


def _one_server(recorded: Recorded, observed: Observed) -> Decision | None:
    """More than one can live only after a bug or a tampered store; the one least wanted goes first."""
    living = _living(recorded, observed)
    if len(living) < 2:
        return None
    trial = recorded.trial.id if recorded.trial else None
    best = recorded.ladder[0].candidate_id if recorded.ladder else None

    def worth(launch: LaunchRecord) -> tuple[bool, bool, bool]:
        of_trial = trial is not None and launch.trial_id == trial
        return of_trial, launch.candidate_id == best, launch.state is LaunchState.SERVING

    extra = min(living, key=worth)
    return Decision(Stop(extra.id), f"the slot holds {len(living)} servers; {extra.name} is not the one wanted")


def _memory_held(recorded: Recorded, observed: Observed) -> Decision | None:
    """GPU memory of a server that has ended did not come back: nothing is launched on top of it, and nobody is asked again."""
    trial = recorded.trial
    if not is_held(recorded.degraded) or recorded.restore_wanted or _living(recorded, observed):
        return None
    if trial is not None and trial.concluded:
        return None
    if trial is not None:
        return Decision(Requeue(trial.id), f"{trial.name} goes back to the queue: {recorded.degraded}")
    if observed.strangers or observed.freeing or observed.held:
        return Decision(Wait(), f"degraded: {recorded.degraded}")
    return Decision(GoOn(), "the GPU memory that the slot waited for is free")


def _trial_yields(recorded: Recorded, observed: Observed) -> Decision | None:
    trial = recorded.trial
    if trial is None:
        return None
    reason = _trial_must_yield(recorded)
    if not reason or trial.concluded:
        return None
    if trial.interruptions > INTERRUPTIONS_MAX:
        return Decision(
            GiveUp(trial.id),
            f"the daemon or the server ended {trial.interruptions} times during the trial of {trial.name}, "
            "which may be the cause",
        )
    return Decision(Requeue(trial.id), f"{trial.name} goes back to the queue: {reason}")


def _stopped(recorded: Recorded, observed: Observed) -> Decision | None:
    """A person wants no server here; whatever wants one waits."""
    why = _stop_wanted(recorded)
    if not why or (recorded.trial is not None and recorded.trial.concluded):
        return None
    living = _living(recorded, observed)
    if living:
        return Decision(Stop(living[0].id), f"stopping {living[0].name}: {why}")
    return Decision(Wait(), f"{why}; go on with: autotuner resume, or restore-best")


def _trial_in_hand(recorded: Recorded, observed: Observed) -> Decision | None:
    trial = recorded.trial
    if trial is None:
        return None
    if trial.concluded:
        return Decision(Conclude(trial.id), trial.concluded)
    mine = next((launch for launch in _living(recorded, observed) if launch.trial_id == trial.id), None)
    if mine is None:
        launch = Launch(trial.candidate_id, trial.name, Purpose.TRIAL, trial.id)
        return _launch_into_free_slot(recorded, observed, launch, f"the trial of {trial.name} begins")
    if mine.state is not LaunchState.SERVING:
        return Decision(AwaitServing(mine.id, trial.id), f"waiting until {trial.name} serves")
    if trial.next_level is not None:
        action = RunLevel(trial.id, mine.id, trial.next_level)
        return Decision(action, f"measuring {trial.name} at {level_name(trial.load, trial.next_level)}")
    return Decision(Conclude(trial.id), f"{trial.name} was measured at every level")


def _degraded(recorded: Recorded, observed: Observed) -> Decision | None:
    if recorded.degraded and not recorded.restore_wanted:
        return Decision(Wait(), f"degraded: {recorded.degraded}")
    return None


def _restore(recorded: Recorded, observed: Observed) -> Decision | None:
    """The best-known must serve: asked for, at start-up, after each trial if so set, or because nothing else is to run."""
    idle = recorded.queued is None or bool(recorded.no_new_trials or recorded.paused)
    if not (recorded.restore_wanted or recorded.restore_always or idle):
        return None
    if not recorded.ladder:
        if recorded.restore_wanted:
            return Decision(RestoreDone(None), "there is no best-known yet, so there is nothing to restore")
        return None
    target = _rung(recorded, observed)
    if target is None:
        return Decision(
            Degrade(),
            f"every best-known failed {RESTORE_FAILURES_MAX} times in short succession: "
            + ", ".join(rung.name for rung in recorded.ladder),
        )
    return _towards(recorded, observed, target)


def _rung(recorded: Recorded, observed: Observed) -> IncumbentRecord | None:
    """The best-known to serve: the newest whose budget is not spent; None if every one's is.

    What lives costs no launch, whatever its budget.
    """
    living = _living(recorded, observed)
    lives = {launch.candidate_id for launch in living}
    rungs = (r for r in recorded.ladder if r.failures < RESTORE_FAILURES_MAX or r.candidate_id in lives)
    return next(rungs, None)


def _towards(recorded: Recorded, observed: Observed, target: IncumbentRecord) -> Decision | None:
    """The next step from whatever is there to the target serving; None once it serves and nobody asked for more."""
    living = _living(recorded, observed)
    mine = next((launch for launch in living if launch.candidate_id == target.candidate_id), None)
    why = recorded.restore_wanted or "nothing else is to run"
    if mine is None:
        if pause := _pause(recorded, observed):
            return Decision(Wait(), f"restoring the best-known, {target.name}: {pause}")
        launch = Launch(target.candidate_id, target.name, Purpose.RESTORE)
        return _launch_into_free_slot(recorded, observed, launch, f"restoring the best-known, {target.name}: {why}")
    if mine.state is not LaunchState.SERVING:
        return Decision(AwaitServing(mine.id), f"waiting until the best-known, {target.name}, serves again")
    if mine.id not in observed.verified:
        return Decision(Verify(mine.id), f"checking that the best-known, {target.name}, generates tokens")
    if recorded.restore_wanted:
        return Decision(RestoreDone(target.candidate_id), f"the best-known, {target.name}, serves: {why}")
    if recorded.queued is not None and not (recorded.no_new_trials or recorded.paused):
        return None
    return Decision(Wait(), f"serving the best-known, {target.name}; {_why_idle(recorded)}")


def _pause(recorded: Recorded, observed: Observed) -> str:
    """Why the next try to restore is not made yet; empty if it is. In steps of ten seconds: each change is logged."""
    left_s = pause_left_s(recorded.failed_s, recorded.failed_end_s, observed.now_s, recorded.window_s)
    if left_s <= 0:
        return ""
    failed = recent_failures(recorded.failed_s, observed.now_s, recorded.window_s)
    last = f", the last one: {recorded.last_failure}" if recorded.last_failure else ""
    within = f"{failed} launches ended by themselves within {recorded.window_s / 60:.0f} min"
    return f"next try in {10 * ceil(left_s / 10)} s, because {within}{last}"


def _next_trial(recorded: Recorded, observed: Observed) -> Decision | None:
    queued = recorded.queued
    if queued is None:
        return None
    hold = recorded.no_new_trials or (f"paused: {recorded.paused}" if recorded.paused else "")
    if hold:
        return _unwanted(recorded, observed) or Decision(Wait(), f"nothing new is started: {hold}")
    if recorded.baseline_missing and recorded.ladder and queued.candidate_id != recorded.ladder[0].candidate_id:
        best = recorded.ladder[0]
        return Decision(
            QueueBaseline(best.candidate_id),
            f"the best-known, {best.name}, has no measurement under this benchmark yet",
        )
    if observed.traffic:
        return Decision(Wait(), f"{queued.name} begins when nothing runs on the best-known: {observed.traffic}")
    return Decision(BeginTrial(queued.id), f"{queued.name} is next in the queue")


def _unwanted(recorded: Recorded, observed: Observed) -> Decision | None:
    """Nothing is to run and there is no best-known: a server that lost its trial must not hold the GPUs for nobody."""
    living = _living(recorded, observed)
    if not living or recorded.ladder:
        return None
    return Decision(Stop(living[0].id), f"{living[0].name} is not wanted any more, and no best-known is recorded")


_SITUATIONS: tuple[Callable[[Recorded, Observed], Decision | None], ...] = (
    _in_progress,
    _hands_off,
    _ended,
    _one_server,
    _memory_held,
    _trial_yields,
    _stopped,
    _trial_in_hand,
    _degraded,
    _restore,
    _next_trial,
    _unwanted,
)


def _launch_into_free_slot(recorded: Recorded, observed: Observed, launch: Launch, reason: str) -> Decision:
    """Launch only into an empty slot: first stop what is ours, and wait for what is not."""
    living = _living(recorded, observed)
    if living:
        return Decision(Stop(living[0].id), f"{living[0].name} makes room: {reason}")
    if observed.living:
        return Decision(
            Wait(), f"cannot launch {launch.name}: launch {min(observed.living)} lives, but is recorded as ended"
        )
    if observed.strangers:
        return Decision(Wait(), f"cannot launch {launch.name}: {observed.strangers}")
    if observed.freeing:
        return Decision(Wait(), f"{launch.name} waits: {observed.freeing}")
    if observed.held:
        return Decision(Degrade(), observed.held)
    return Decision(launch, reason)


def _living(recorded: Recorded, observed: Observed) -> list[LaunchRecord]:
    return [launch for launch in recorded.launches if launch.id in observed.living]


def _trial_must_yield(recorded: Recorded) -> str:
    return recorded.restore_wanted or _stop_wanted(recorded) or recorded.interrupt_trial


def _stop_wanted(recorded: Recorded) -> str:
    """Why a person wants the slot without a server; whoever asks for the best-known afterwards wants it with one."""
    return f"stopped on purpose, {recorded.stopped}" if recorded.stopped and not recorded.restore_wanted else ""


def _why_idle(recorded: Recorded) -> str:
    if recorded.paused:
        return f"paused: {recorded.paused}"
    if recorded.queued is not None:
        return recorded.no_new_trials
    return "the queue is empty"
