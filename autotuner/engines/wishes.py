"""What a follow-up wants changed, in words that no engine owns; and the change, or why an engine cannot do it. Pure.

Each engine says in its own `*_moves.py` which flags a wish comes to in which release.
"""

from dataclasses import dataclass, field

from autotuner.core.candidate import Candidate, Scalar

LEAST_SHARE = 0.1  # of a GPU's memory: less holds no model that is worth a trial


@dataclass(frozen=True)
class RunAtOnce:
    """Let so many requests run at once. `request_tokens` is what one holds, `slot_tokens` what one may hold now."""

    requests: int
    request_tokens: int
    slot_tokens: int | None = None


@dataclass(frozen=True)
class GraphBatch:
    """Have CUDA graphs up to this batch of requests, a data-parallel rank."""

    requests: int


@dataclass(frozen=True)
class GraphsOn:
    """Undo what turned CUDA graphs off."""


@dataclass(frozen=True)
class DraftSteps:
    """Draft so many tokens a verify step, in a chain."""

    steps: int


@dataclass(frozen=True)
class SpeculateUpTo:
    """Speculate at batches up to `batch` and not above; `most` is the largest batch there is."""

    batch: int
    most: int


@dataclass(frozen=True)
class MemoryShare:
    """Give the server another share of the GPU's memory. `known` is the share in force where nothing was set."""

    step: float
    known: float | None = None
    most: float = 0.95


Wish = RunAtOnce | GraphBatch | GraphsOn | DraftSteps | SpeculateUpTo | MemoryShare


@dataclass(frozen=True)
class Changed:
    """Dotted settings to apply; `label` names the change where they would not read well, `note` is worth saying."""

    settings: dict[str, Scalar]
    label: dict[str, Scalar] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class CannotChange:
    """Why a wish cannot be met, in words."""

    why: str


Answer = Changed | CannotChange


def spelt(candidate: Candidate, *names: str) -> str:
    """Given the spellings of a flag, return the setting of the one that a candidate uses, else of the first."""
    return f"args.{next((name for name in names if candidate.arg(name) is not None), names[0])}"


def memory_share(candidate: Candidate, flag: str, wish: MemoryShare) -> Answer:
    """Given the flag of an engine's memory share, return it moved by the wish's step, in hundredths, within its bounds."""
    said = candidate.arg(flag)
    try:
        now = float(str(said)) if said is not None else wish.known
    except ValueError:
        now = None
    if now is None:
        return CannotChange(f"which {flag} is in force is not known; set it in the candidate")
    share = round(min(wish.most, now + wish.step), 2)
    if share < LEAST_SHARE or (share - now) * wish.step <= 0 or abs(share - now) < 0.005:
        return CannotChange(f"{flag} is {now:g} already, and goes no further")
    return Changed({f"args.{flag}": share})
