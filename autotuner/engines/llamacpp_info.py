"""What a serving llama-server says of itself at /props and /slots, and what a candidate asks of it."""

from autotuner.core.candidate import Candidate
from autotuner.engines.answers import count, document, flag_count, rows, table, word
from autotuner.engines.base import Effective

PATHS = ("/props", "/slots")


def read(path: str, text: str) -> Effective:
    """Given an answer at one of the paths, return what it says; an error of either has neither field."""
    answer = document(text)
    if path == "/slots":
        slots = rows(answer)
        told = [slot["speculative"] for slot in slots if isinstance(slot.get("speculative"), bool)]
        return Effective(
            running_cap=len(slots) or None,
            context_len=count(slots[0].get("n_ctx")) if slots else None,
            speculating=any(told) if told else None,
            source="server",
        )
    props = table(answer)
    return Effective(
        running_cap=count(props.get("total_slots")) or None,
        context_len=count(table(props.get("default_generation_settings")).get("n_ctx")),
        version=word(props.get("build_info")),
        source="server",
    )


def asked(candidate: Candidate, *, speculating: bool, steps: int | None) -> Effective:
    """Given a candidate and what it asks of speculation, return what its flags ask for, the context as one slot's.

    The context is divided by the number of slots, unless they share it; 0 leaves it to the model. Without a number of
    slots it depends on the build whether they share it, so then nothing is asked of one slot.
    """
    slots, context = flag_count(candidate, "parallel", "np"), flag_count(candidate, "ctx-size", "c")
    parts = 1 if candidate.arg("kv-unified", "kvu") else slots
    return Effective(
        running_cap=slots or None,
        context_len=context // parts if context and parts else None,
        speculating=speculating,
        spec_steps=steps,
        source="arguments",
    )
