"""The variants of one sweep, told together: how many were tried, which lead, what still waits. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotuner.core.state import TrialState, Verdict

LEADING = 3  # named with their scores


@dataclass(frozen=True)
class Variant:
    """One variant's own trial: its name, how far it is, its verdict, and its score against the best-known of then."""

    name: str
    state: TrialState
    verdict: Verdict | None = None
    score: float | None = None


def told(file: str, variants: Sequence[Variant]) -> str:
    """Given the name of a sweep's file and its variants' trials, return where the family stands; empty for a single one."""
    if len(variants) < 2:
        return ""
    tried = [variant for variant in variants if variant.verdict is not None]
    scored = sorted((v for v in tried if v.score is not None), key=lambda v: -(v.score or 0.0))
    waiting = sum(variant.state in {TrialState.QUEUED, TrialState.RUNNING} for variant in variants)
    parts = [f"{len(tried)} of {len(variants)} variants of {file} are tried"]
    if scored:
        shown = ", ".join(f"{variant.name} ({variant.score:.3f})" for variant in scored[:LEADING])
        parts.append(f"best against the best-known: {shown}")
    if len(tried) > len(scored):
        parts.append(f"{len(tried) - len(scored)} without a score")
    if waiting:
        parts.append(f"{waiting} {'waits' if waiting == 1 else 'wait'}")
    return "; ".join(parts)
