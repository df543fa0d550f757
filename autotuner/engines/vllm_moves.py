"""vLLM's flags for the follow-ups: which flag a wish comes to, by release. Pure."""

import json

from autotuner.core.candidate import Candidate, Scalar, flag_name, merged_json
from autotuner.engines.answers import flag_count
from autotuner.engines.version import within
from autotuner.engines.vllm_flags import CONFIG, SCHEDULE, config_of, speculation
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
    spelt,
)

_TOKENS = "num_speculative_tokens"
_COMPILATION = ("compilation-config", "cc")


def change(candidate: Candidate, wish: Wish, version: str | None) -> Answer:
    """Given a candidate, a wish and vLLM's release, None if unknown, return the settings it comes to."""
    match wish:
        case RunAtOnce():
            ranks = flag_count(candidate, "data-parallel-size", "dp") or 1
            return Changed({"args.max-num-seqs": -(-wish.requests // ranks)})  # it holds for each rank
        case GraphBatch():
            return _graph_batch(candidate, wish.requests)
        case GraphsOn():
            return _graphs_on(candidate)
        case DraftSteps():
            return _speculative(candidate, _TOKENS, wish.steps, {_TOKENS.replace("_", "-"): wish.steps})
        case SpeculateUpTo():
            return _schedule(candidate, wish, version)
        case MemoryShare():
            # 0.90 in release 0.19, 0.92 in 0.33; the log does not tell it, and a step is more than that.
            usual = 0.92 if within(version, "0.20", "") else 0.90
            return memory_share(candidate, "gpu-memory-utilization", MemoryShare(wish.step, wish.known or usual))


def _graph_batch(candidate: Candidate, requests: int) -> Answer:
    """Sized in tokens: a verify step takes 1 + K of them a request."""
    spec = speculation(candidate)
    tokens = requests * (1 + ((spec.num_steps or 0) if spec else 0))
    gone: dict[str, Scalar] = (
        {"args.cudagraph-capture-sizes": False} if candidate.arg("cudagraph-capture-sizes") is not None else {}
    )
    key = "args.max-cudagraph-capture-size"
    return Changed({**gone, key: tokens}, {key: tokens})


def _graphs_on(candidate: Candidate) -> Answer:
    found: dict[str, Scalar] = {}
    for flag in ("enforce-eager", "cc.cudagraph-mode", "compilation-config.cudagraph-mode"):
        value = candidate.arg(flag)
        if value is True or _is_none(value):
            found[f"args.{flag}"] = False
    config = candidate.arg(*_COMPILATION)
    merged = merged_json(str(config), {"cudagraph_mode": None}) if config is not None else None
    if merged is not None and _is_none(json.loads(str(config)).get("cudagraph_mode")):
        found[spelt(candidate, *_COMPILATION)] = merged if merged != "{}" else False
    if not found:
        return CannotChange("no flag of the candidate turns CUDA graphs off; the server's log says why it has none")
    return Changed(found, {"cuda-graphs": "on"})


def _is_none(mode: object) -> bool:
    """The graph mode called NONE; no mode at all is not it."""
    return isinstance(mode, str) and mode.upper() == "NONE"


def _schedule(candidate: Candidate, wish: SpeculateUpTo, version: str | None) -> Answer:
    if not within(version, "0.26", ""):
        return CannotChange(f"vLLM {version} cannot speculate by batch size; {SCHEDULE} came with 0.26")
    if (flag_count(candidate, "data-parallel-size", "dp") or 1) > 1:
        return CannotChange(f"vLLM drops {SCHEDULE} where there are data-parallel ranks")
    spec, config = speculation(candidate), config_of(candidate)
    if spec is None or not spec.num_steps:
        return CannotChange("the number of draft tokens is the drafter's own, so no schedule can name it")
    if isinstance(config, dict) and SCHEDULE in config:
        return CannotChange("it speculates by batch size already")
    rows = [[1, wish.batch, spec.num_steps], [wish.batch + 1, max(wish.most, wish.batch + 1), 0]]
    return _speculative(candidate, SCHEDULE, rows, {"speculate-up-to": wish.batch})


def _speculative(candidate: Candidate, key: str, value: object, label: dict[str, Scalar]) -> Answer:
    """Set a key of the speculative configuration in the spelling that the candidate uses for it."""
    if key == _TOKENS and isinstance(value, int):
        if candidate.arg("spec-tokens") is not None:
            return Changed({"args.spec-tokens": value}, label)
        for name in candidate.launch.args:
            group, dot, rest = flag_name(name).partition(".")
            if group in CONFIG and dot and rest.replace("-", "_") == key:
                return Changed({f"args.{name}": value}, label)
    config = candidate.arg(*CONFIG)
    merged = merged_json(str(config), {key: value}) if config is not None else None
    if merged is None:
        return CannotChange(f"its speculative configuration is not one JSON object, so {key} cannot be put into it")
    return Changed({spelt(candidate, *CONFIG): merged}, label)
