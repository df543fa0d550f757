"""SGLang's flags for the follow-ups: which flag a wish comes to, by release. Pure."""

from autotuner.core.candidate import Candidate, Scalar
from autotuner.engines.answers import flag_count
from autotuner.engines.sglang_flags import ADAPTIVE, STEPPED, method_of
from autotuner.engines.version import within
from autotuner.engines.wishes import (
    Answer,
    CannotChange,
    Changed,
    DraftSteps,
    GraphBatch,
    GraphsOn,
    MemoryShare,
    RunAtOnce,
    SpeculateUpTo,
    Wish,
    memory_share,
)

_GRAPHS_OFF = ("disable-cuda-graph", "disable-decode-cuda-graph")
_ADAPTIVE_STEPS = {1, 3, 5, 7}  # num-steps must be one of its built-in table's (server_args.py of 0.5.23)


def change(candidate: Candidate, wish: Wish, version: str | None) -> Answer:
    """Given a candidate, a wish and SGLang's release, None if unknown, return the settings it comes to."""
    match wish:
        case RunAtOnce():
            return Changed({"args.max-running-requests": wish.requests})  # of the whole server, whatever its ranks
        case GraphBatch():
            return _graph_batch(candidate, wish.requests, version)
        case GraphsOn():
            return _graphs_on(candidate)
        case DraftSteps():
            return _draft_steps(candidate, wish.steps)
        case SpeculateUpTo():
            return _adaptive(candidate, version)
        case MemoryShare():
            return memory_share(candidate, "mem-fraction-static", wish)


def _graph_batch(candidate: Candidate, requests: int, version: str | None) -> Answer:
    """Rounded up to the ladder of sizes: a largest size that is not on it was dropped before March 2026."""
    step = 8 if requests <= 256 else 16
    size = -(-requests // step) * step
    newer = within(version, "0.5.15", "")
    name, other = ("cuda-graph-max-bs-decode", "cuda-graph-max-bs") if newer else ("cuda-graph-max-bs", "")
    # The other name and a list of sizes would contradict it.
    stale = (other, "cuda-graph-bs", "cuda-graph-bs-decode")
    gone: dict[str, Scalar] = {f"args.{flag}": False for flag in stale if flag and candidate.arg(flag) is not None}
    return Changed({**gone, f"args.{name}": size}, {f"args.{name}": size})


def _graphs_on(candidate: Candidate) -> Answer:
    found: dict[str, Scalar] = {f"args.{flag}": False for flag in _GRAPHS_OFF if candidate.arg(flag)}
    if candidate.arg("cuda-graph-backend-decode") == "disabled":
        found["args.cuda-graph-backend-decode"] = False
    if not found:
        return CannotChange("no flag of the candidate turns CUDA graphs off; the server's log says why it has none")
    return Changed(found, {"cuda-graphs": "on"})


def _draft_steps(candidate: Candidate, steps: int) -> Answer:
    method = method_of(candidate)
    if method == "NGRAM":
        return CannotChange(
            "NGRAM drafts in one go what it finds in the text; speculative-num-draft-tokens says how much"
        )
    if method not in STEPPED:
        return CannotChange(f"{method} drafts a block of a size that it was trained for")
    settings: dict[str, Scalar] = {
        "args.speculative-num-steps": steps,
        "args.speculative-eagle-topk": 1,
        "args.speculative-num-draft-tokens": steps + 1,
    }
    label: dict[str, Scalar] = {"args.speculative-num-steps": steps}
    if (flag_count(candidate, "speculative-eagle-topk") or 1) > 1:
        label["args.speculative-eagle-topk"] = 1
    return Changed(settings, label)


def _adaptive(candidate: Candidate, version: str | None) -> Answer:
    """No release turns speculation off by batch; the adaptive depth comes down to nothing at busy batches (0.5.11)."""
    method, steps = method_of(candidate), flag_count(candidate, "speculative-num-steps")
    if not within(version, "0.5.11", ""):
        return CannotChange(f"SGLang {version} cannot speculate by batch size; --speculative-adaptive came with 0.5.11")
    if method not in ADAPTIVE or flag_count(candidate, "speculative-eagle-topk") not in {None, 1}:
        return CannotChange("--speculative-adaptive works with EAGLE and EAGLE3 and top-k 1 only")
    if candidate.arg("enable-dp-attention"):
        return CannotChange("--speculative-adaptive does not work with data-parallel attention")
    if candidate.arg("speculative-adaptive"):
        return CannotChange("its depth is adaptive already")
    if steps is not None and steps not in _ADAPTIVE_STEPS:
        return CannotChange(f"--speculative-adaptive wants 1, 3, 5 or 7 steps, not {steps}")
    note = "SGLang has no limit by batch size; its adaptive depth comes down to none at busy ones"
    return Changed({"args.speculative-adaptive": True}, note=note)
