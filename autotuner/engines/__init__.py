"""Engines: one pure module each, and the table that finds them by name."""

from autotuner.engines.base import Engine
from autotuner.engines.command import Command
from autotuner.engines.llamacpp import LlamaCpp
from autotuner.engines.sglang import SGLang
from autotuner.engines.vllm import VLLM

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (SGLang(), VLLM(), LlamaCpp(), Command())}


def engine_for(name: str) -> Engine:
    """Given an engine's name as candidate files write it, return its reader; KeyError if unknown."""
    return ENGINES[name]
