"""Builds the values that the core's tests are about, with everything that does not matter filled in."""

from typing import Any

from autotuner.bench.measurement import Figures
from autotuner.core.policy import Fired
from autotuner.core.speculation import SpeculationAtLevel
from autotuner.core.state import Verdict
from autotuner.core.verdict import LevelResult
from autotuner.engines.base import Window


def figures(concurrency: int, rate: float, half: float = 0.0, **more: Any) -> Figures:
    """A level's figures at `rate` ± `half` tok/s."""
    table: dict[str, Any] = {
        "concurrency": concurrency,
        "seconds": 60.0,
        "requests_ok": 100,
        "requests_failed": 0,
        "output_tok_s": rate,
        "output_tok_s_low": max(0.0, rate - half),
        "output_tok_s_high": rate + half,
        "tokens_per_event": 1.0,
        "tokens_counted": True,
    }
    return Figures(**{**table, **more})


def level(
    concurrency: int,
    rate: float,
    half: float = 0.0,
    fired: Fired | None = None,
    speculation: SpeculationAtLevel | None = None,
    running: float | None = None,
    **more: Any,
) -> LevelResult:
    """A measured level."""
    return LevelResult(
        concurrency=concurrency,
        figures=figures(concurrency, rate, half, **more),
        running=running,
        decode_tok_s=rate if running else None,
        fired=fired,
        speculation=speculation,
    )


def fired(action: Any = "skip-level", verdict: Verdict = Verdict.FAIL, **more: Any) -> Fired:
    """A rule that fired."""
    table: dict[str, Any] = {
        "rule": "a-rule",
        "file": "house.toml",
        "sha256": "ab" * 32,
        "condition": "level.running > 1",
        "action": action,
        "verdict": verdict,
        "sentence": "It is too slow",
        "facts": {"level.running": 2.0},
    }
    return Fired(**{**table, **more})


def windows(
    running: float, gen_tok_s: float, accept_len: float | None, count: int = 10, **more: Any
) -> tuple[Window, ...]:
    """Log windows that all say the same."""
    one = Window(
        "log", running=running, queued=more.pop("queued", 0.0), gen_tok_s=gen_tok_s, accept_len=accept_len, **more
    )
    return (one,) * count
