"""An engine whose launches go to the rehearsed server instead; all else is the engine's own.

The server gets the engine's argv as it is, behind its own. Times of a start are compressed, and so is the patience with it.
"""

import sys
from dataclasses import dataclass
from typing import Any, cast

from autotuner.core.candidate import Candidate
from autotuner.engines import ENGINES
from autotuner.engines.base import Engine, Place, Rank, Stage

LOAD_SCALE = 20.0  # a minute of loading takes three seconds
REHEARSED = ("sglang", "vllm", "llamacpp")  # a command of its own is run as it is, so it cannot be rehearsed
SILENCE_MIN_S = 10.0
SERVING_SILENCE_MIN_S = 30.0


@dataclass(frozen=True)
class RehearsalEngine:
    """One engine in rehearsal."""

    inner: Engine

    def __getattr__(self, name: str) -> Any:
        """Everything that is not redirected here."""
        return getattr(self.inner, name)

    def argv(self, candidate: Candidate, place: Place, rank: Rank | None = None) -> tuple[str, ...]:
        """The rehearsed server, told what the engine would have been told."""
        return (*self._server(), *self.inner.argv(candidate, place, rank))

    def help_argv(self, candidate: Candidate) -> tuple[str, ...] | None:
        """The rehearsed server's list of common flags stands in for the help of an engine that need not be installed."""
        asked = self.inner.help_argv(candidate)
        return (*self._server(), *asked) if asked is not None else None

    def silence_limit_s(self, stage: Stage) -> float:
        """As much shorter as the load is; but decoding runs at its own speed, on whatever machine this is."""
        least_s = SERVING_SILENCE_MIN_S if stage is Stage.GENERATING else SILENCE_MIN_S
        return max(least_s, self.inner.silence_limit_s(stage) / LOAD_SCALE)

    def _server(self) -> tuple[str, ...]:
        scale = f"{LOAD_SCALE:g}"
        # "-u" in front: a program given by -m is asked for its version, and the rehearsal has none of the engine's.
        program = (sys.executable, "-u", "-m", "autotuner.rehearsal.server")
        return (*program, "--as", self.inner.name, "--time-scale", scale, "--")


def install() -> None:
    """Put the engines of this process into rehearsal."""
    for name in REHEARSED:
        if not isinstance(ENGINES[name], RehearsalEngine):
            ENGINES[name] = cast(Engine, RehearsalEngine(ENGINES[name]))
