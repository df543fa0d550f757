"""What a server's output amounts to: one reading of state, cause and action from all that is known. Pure.

The rules are lists in order of precedence; the first that applies speaks. Whether the server died comes before whether
it is slow, a figure that may not be used before what it would say, and arithmetic over measured rows before rules of
thumb.
"""

from collections.abc import Callable

from autotuner.engines.context import Context
from autotuner.engines.evidence import Evidence, Reading, gather, reading
from autotuner.engines.reading_arms import COMPARING
from autotuner.engines.reading_client import CLIENT
from autotuner.engines.reading_serving import SERVING
from autotuner.engines.reading_speculation import baseline
from autotuner.engines.reading_start import ENDED, RESOLVED, STARTING, starting
from autotuner.engines.vocabulary import State

Rule = Callable[[Evidence], Reading | None]


def read(engine: str, version: str, log: str, context: Context) -> Reading:
    """Given an engine's name and version, its log or metrics as text, and what is known, return what it amounts to."""
    return judge(gather(engine, version, log, context))


def judge(evidence: Evidence) -> Reading:
    """Given the evidence, return its reading: the first rule that applies."""
    if not evidence.observed:
        found = _first((*CLIENT, *COMPARING, baseline), evidence)
        return found or reading(State.UNOBSERVED, "none", "nothing here speaks against the figures")
    ended = _first(ENDED, evidence)
    if ended is not None:
        return ended
    if starting(evidence):
        found = _first(STARTING, evidence)
        if found is not None:
            return found
    found = _first(SERVING, evidence)
    if found is None and evidence.context.phase is None:
        found = _first(RESOLVED, evidence)  # a piece of a start, of which nobody said that it is one
    return found or reading(State.SERVING, "none", "nothing here speaks against the figures")


def _first(rules: tuple[Rule, ...], evidence: Evidence) -> Reading | None:
    return next((found for rule in rules if (found := rule(evidence)) is not None), None)
