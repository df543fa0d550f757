"""Stages of a start as any engine's lines show them, and how long each may be silent."""

from functools import lru_cache

from autotuner.engines import engine_for
from autotuner.engines.base import Stage, StageSeen
from autotuner.engines.evidence import Evidence

_NAMES = {"llama.cpp": "llamacpp"}


@lru_cache(maxsize=4)  # many rules ask, of one evidence
def stages_of(evidence: Evidence) -> tuple[StageSeen, ...]:
    """Given the evidence, return the stages its lines prove, in order; a line may be of another engine than the case."""
    own = _NAMES.get(evidence.engine, evidence.engine)
    readers = [engine_for(name) for name in dict.fromkeys((own, "sglang", "vllm", "llamacpp")) if name in _KNOWN]
    found = []
    for line in evidence.lines:
        for reader in readers:
            seen = [fact for fact in reader.read_line(line.text) if isinstance(fact, StageSeen)]
            if seen:
                found += seen
                break
    return tuple(found)


def silence_limit_s(engine: str, stage: Stage) -> float:
    """Given an engine's name and a stage, return how long it may show no progress, in seconds."""
    name = _NAMES.get(engine, engine)
    return engine_for(name if name in _KNOWN else "command").silence_limit_s(stage)


_KNOWN = {"sglang", "vllm", "llamacpp", "command"}
