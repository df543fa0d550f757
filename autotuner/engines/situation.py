"""What the daemon knows of a start or a level, as the context that a reading of its lines is given."""

from autotuner.core.candidate import Candidate, flag_argv
from autotuner.engines.base import Effective, Speculation
from autotuner.engines.context import BaselinePoint, Context

# What a level's figures and the rules on them say by themselves; a reading that says it again adds nothing.
_SAID_BY_FIGURES = {
    "none",
    "baseline-mismatch",
    "benign-noise",
    "by-design",
    "draft-broken",
    "near-break-even",
    "no-sample",
    "sample-too-small",
    "speculation-inactive",
    "step-cost",
    "window-spans-gap",
    "metric-scope",
}
_METHODS = {"eagle", "eagle3", "mtp", "ngram", "draft-model", "medusa", "dflash", "dspark"}


def adds_something(cause: str) -> bool:
    """Given a reading's cause, tell whether it says more than the level's own figures do."""
    return cause not in _SAID_BY_FIGURES


def starting(candidate: Candidate, silence_s: float, ranks: int | None = None) -> Context:
    """Given a candidate whose start is being followed and how long nothing has moved, return what is known."""
    return Context(
        phase="starting",
        seconds_since_output=silence_s,
        args=tuple(flag_argv(candidate.launch.args)),
        env=dict(candidate.launch.env),
        model=candidate.launch.model,
        tp_size=ranks,
    )


def level(
    candidate: Candidate,
    concurrency: int | None,
    speculation: Speculation | None,
    baseline: dict[int, float],
    effective: Effective | None,
) -> Context:
    """Given a level that was measured, the plain server's output tok/s by level and what is in force, return the context."""
    return Context(
        phase="level",
        became_ready=True,
        concurrency=concurrency,
        args=tuple(flag_argv(candidate.launch.args)),
        env=dict(candidate.launch.env),
        model=candidate.launch.model,
        speculation=_method(speculation),
        num_steps=speculation.num_steps if speculation else None,
        draft_tokens=speculation.draft_tokens if speculation else None,
        baseline={str(level): BaselinePoint(tok_s=rate) for level, rate in baseline.items()} or None,
        dp_size=None if effective is None else _ranks(effective),
    )


def _method(speculation: Speculation | None) -> str:
    if speculation is None:
        return "none"
    name = speculation.method.lower().replace("_", "-")
    return name if name in _METHODS else "on"


def _ranks(effective: Effective) -> int | None:
    """Data-parallel ranks are already added up in what is in force."""
    return None if effective.running_cap is None else 1
