"""What a slot may do next: the actions among which `core/decide.py` chooses, and a choice with its reason."""

from dataclasses import dataclass

from autotuner.bench.benchmark import Level
from autotuner.core.state import Purpose


@dataclass(frozen=True)
class Wait:
    """Do nothing this cycle."""


@dataclass(frozen=True)
class Interrupt:
    """Cancel the long action in progress."""


@dataclass(frozen=True)
class RecordEnd:
    """Record that a launch has ended without being asked to."""

    launch_id: str


@dataclass(frozen=True)
class Stop:
    """Stop a server and prove that it is stopped."""

    launch_id: str


@dataclass(frozen=True)
class Launch:
    """Start a server: for a trial, or to restore."""

    candidate_id: str
    name: str
    purpose: Purpose
    trial_id: int | None = None


@dataclass(frozen=True)
class AwaitServing:
    """Follow a start by its stages until the server generates tokens, fails or hangs."""

    launch_id: str
    trial_id: int | None = None


@dataclass(frozen=True)
class Verify:
    """Have a server that should be serving generate tokens."""

    launch_id: str


@dataclass(frozen=True)
class RunLevel:
    """Measure one level of a trial's benchmark."""

    trial_id: int
    launch_id: str
    level: Level


@dataclass(frozen=True)
class Conclude:
    """Give the trial its verdict and write its entry."""

    trial_id: int


@dataclass(frozen=True)
class Requeue:
    """Put the trial in hand back to the head of the queue; what it measured is dropped."""

    trial_id: int


@dataclass(frozen=True)
class GiveUp:
    """Conclude a trial as an error because the daemon ended too often during it."""

    trial_id: int


@dataclass(frozen=True)
class BeginTrial:
    """Take the next trial in hand."""

    trial_id: int


@dataclass(frozen=True)
class QueueBaseline:
    """Put a measurement of the best-known itself at the head of the queue: nothing can be compared without it."""

    candidate_id: str


@dataclass(frozen=True)
class RestoreDone:
    """Record that the restore which was asked for is complete (or that there is nothing to restore)."""

    candidate_id: str | None


@dataclass(frozen=True)
class Degrade:
    """Stop trying to restore and ask for a person."""


@dataclass(frozen=True)
class GoOn:
    """Record that the GPU memory for which a slot was degraded is free, and go on."""


Action = (
    Wait
    | Interrupt
    | RecordEnd
    | Stop
    | Launch
    | AwaitServing
    | Verify
    | RunLevel
    | Conclude
    | Requeue
    | GiveUp
    | BeginTrial
    | QueueBaseline
    | RestoreDone
    | Degrade
    | GoOn
)


@dataclass(frozen=True)
class Decision:
    """One action and one sentence that says why; the sentence goes to the log, the status line and the journal."""

    action: Action
    reason: str
