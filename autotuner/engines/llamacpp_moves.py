"""llama-server's flags for the follow-ups: which flag a wish comes to. Pure."""

from autotuner.core.candidate import Candidate, Scalar
from autotuner.engines.answers import flag_count
from autotuner.engines.wishes import Answer, CannotChange, Changed, DraftSteps, RunAtOnce, Wish, spelt

_PARALLEL, _CONTEXT = ("parallel", "np"), ("ctx-size", "c")
_ROUND = 256  # contexts are padded to a multiple of it
_SLACK = 1.25  # a prompt's length in tokens is known only about


def change(candidate: Candidate, wish: Wish) -> Answer:
    """Given a candidate and a wish, return the settings it comes to; builds differ in no flag that is named here."""
    match wish:
        case RunAtOnce():
            return _slots(candidate, wish)
        case DraftSteps():
            key = spelt(candidate, "spec-draft-n-max", "draft-max")
            return Changed({key: wish.steps})
        case _:
            return CannotChange("llama.cpp has no such switch")


def _slots(candidate: Candidate, wish: RunAtOnce) -> Answer:
    """More slots need more context: each has its part of it, or takes what it needs from one that all share."""
    slots = spelt(candidate, *_PARALLEL)
    before, context = flag_count(candidate, *_PARALLEL), flag_count(candidate, *_CONTEXT)
    each = round(_SLACK * wish.request_tokens)
    if not candidate.arg("kv-unified", "kvu"):
        own = context // before if context and before else wish.slot_tokens if context else None
        each = max(each, own or 0)
    needed = -(-each // _ROUND) * _ROUND * wish.requests
    settings: dict[str, Scalar] = {slots: wish.requests}
    if needed > (context or 0):
        settings[spelt(candidate, *_CONTEXT)] = needed
    return Changed(settings, {slots: wish.requests})
