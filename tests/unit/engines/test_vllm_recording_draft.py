"""A recorded server that drafts with a model of its own (vLLM 0.32.0 on the CPU): what is read from its log and counters.

Recorded by tests/e2e/test_real_vllm.py: SmolLM2-135M drafts for itself, two tokens a step, until our own SIGTERM.
"""

from pathlib import Path
from typing import Any

import pytest

from autotuner.engines.base import Effective, ServerExit, Stage, StageSeen, Window
from autotuner.engines.vllm import VLLM

ENGINE = VLLM()
RECORDINGS = Path(__file__).parent / "recordings"
LINES = tuple((RECORDINGS / "vllm-0.32-draft-model.log").read_text().splitlines())
COUNTERS = ENGINE.read_metrics((RECORDINGS / "vllm-0.32-draft-model.metrics").read_text())
FACTS: list[Any] = [fact for line in LINES for fact in ENGINE.read_line(line)]
