"""The states of trials and launches, and the one table of legal transitions. Pure."""

from enum import StrEnum


class TrialState(StrEnum):
    """Where a trial is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


class LaunchState(StrEnum):
    """Where a start of a server is in its life. `intended` means: committed before anything was started."""

    INTENDED = "intended"
    STARTING = "starting"
    SERVING = "serving"
    ENDED = "ended"


class Verdict(StrEnum):
    """What a trial came to; always with reasons."""

    PASS = "pass"  # noqa: S105 - a verdict, no password
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"


class ProposalState(StrEnum):
    """What became of a candidate that a rule proposed."""

    WANTED = "wanted"  # the rule fired, and the trial goes on
    READY = "ready"  # worked out and checked; queued with the trial's verdict
    QUEUED = "queued"
    SUGGESTED = "suggested"  # written as a file, for a person to enqueue
    REFUSED = "refused"


class Purpose(StrEnum):
    """Why a server was launched."""

    TRIAL = "trial"
    RESTORE = "restore"


TRIAL_TRANSITIONS: dict[TrialState, frozenset[TrialState]] = {
    TrialState.QUEUED: frozenset({TrialState.RUNNING, TrialState.CANCELLED}),
    TrialState.RUNNING: frozenset({TrialState.QUEUED, TrialState.DONE, TrialState.CANCELLED}),
    TrialState.DONE: frozenset(),
    TrialState.CANCELLED: frozenset(),
}

LAUNCH_TRANSITIONS: dict[LaunchState, frozenset[LaunchState]] = {
    LaunchState.INTENDED: frozenset({LaunchState.STARTING, LaunchState.ENDED}),
    LaunchState.STARTING: frozenset({LaunchState.SERVING, LaunchState.ENDED}),
    LaunchState.SERVING: frozenset({LaunchState.ENDED}),
    LaunchState.ENDED: frozenset(),
}


def trial_may(old: TrialState, new: TrialState) -> bool:
    """Tell whether a trial may go from one state to another."""
    return new in TRIAL_TRANSITIONS[old]


def launch_may(old: LaunchState, new: LaunchState) -> bool:
    """Tell whether a launch may go from one state to another."""
    return new in LAUNCH_TRANSITIONS[old]
