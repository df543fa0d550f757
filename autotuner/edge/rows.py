"""The rows of the state database as objects, and the columns that hold JSON."""

import json
import math
import sqlite3
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter

from autotuner.bench.benchmark import Benchmark
from autotuner.core.candidate import Candidate
from autotuner.core.effective import Configuration
from autotuner.core.policy import Fired
from autotuner.core.state import LaunchState, Purpose, TrialState, Verdict
from autotuner.core.statistics import Interval
from autotuner.core.verdict import Judgement, LevelResult, TrialSoFar
from autotuner.engines.base import Diagnosis


@dataclass(frozen=True)
class Trial:
    """A row of the queue or of the history."""

    id: int
    slot: str
    candidate_id: str
    name: str
    hypothesis: str
    benchmark: str
    benchmark_hash: str
    benchmark_body: str
    state: TrialState
    priority: int
    is_baseline: bool
    interruptions: int
    ended: Fired | None
    verdict: Verdict | None
    promoted: bool
    reasons: tuple[str, ...]
    score: Interval | None
    entry: int | None
    enqueued_at: str
    begun_at: str | None
    begun_boot: str | None
    begun_mono_s: float | None
    ended_at: str | None
    busy_s: float
    confirms: int | None = None
    parent: int | None = None
    answers: tuple[str, ...] = ()
    alpha: float | None = None
    force: bool = False

    @property
    def aim(self) -> str:
        """What it is for, where it is not a candidate's own trial; empty where it is."""
        if self.is_baseline:
            return f"best-known again (A/A), for trial {self.confirms}" if self.confirms else "baseline"
        return f"confirms trial {self.confirms}" if self.confirms else ""


@dataclass(frozen=True)
class LaunchRow:
    """One start of a server, its whole life."""

    id: str
    slot: str
    candidate_id: str
    name: str
    purpose: Purpose
    trial_id: int | None
    state: LaunchState
    intended_at: str
    boot_id: str
    mono_s: float
    ready_s: float | None
    gpu_used_mib: dict[int, float]
    ended_at: str | None
    exit_code: int | None
    end_asked: bool
    diagnosis: Diagnosis | None
    stages: tuple[tuple[str, float], ...] = ()
    engine_version: str | None = None
    configuration: Configuration | None = None
    gpu_pids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SlotRow:
    """What operators and the daemon have said about a slot."""

    name: str
    paused: str = ""
    hands_off: str = ""
    restore_wanted: str = ""
    restore_hold: bool = False
    degraded: str = ""
    blocked: str = ""
    campaign_from: int = 0
    failures_from: int = 0
    stopped: str = ""
    force: bool = False


def judgement_columns(judgement: Judgement) -> dict[str, Any]:
    """Given a verdict, return the columns of its trial."""
    return {
        "verdict": judgement.verdict,
        "promoted": judgement.promote,
        "reasons": json.dumps(judgement.reasons),
        "score": json.dumps(asdict(judgement.score)) if judgement.score else None,
    }


def configuration_json(configuration: Configuration) -> str:
    """Given what a launch resolved to, return its column."""
    return _CONFIGURATION.dump_json(configuration).decode()


def basis_json(so_far: TrialSoFar) -> str:
    """Given what a verdict is made from, return its column; `read_basis` reads it back."""
    return plain_json(_BASIS.dump_python(so_far, mode="json"))


def read_basis(text: str) -> TrialSoFar:
    """Given that column, return what the verdict was made from. Columns of older versions have null for a bound not known."""
    return _BASIS.validate_python(json.loads(text, object_hook=_bounds_known))


def plain_json(data: Any) -> str:
    """Given data, return JSON that SQLite and pydantic both read: an infinite number, which JSON lacks, as a string."""
    return json.dumps(_no_infinities(data), separators=(",", ":"), allow_nan=False)


def _no_infinities(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _no_infinities(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_no_infinities(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def _bounds_known(found: dict[str, Any]) -> dict[str, Any]:
    unbounded = {"output_tok_s_high": math.inf}
    if found.keys() == {"mean", "low", "high"}:
        unbounded = {"mean": math.inf, "low": -math.inf, "high": math.inf}
    return {key: unbounded[key] if value is None and key in unbounded else value for key, value in found.items()}


_BASIS = TypeAdapter(TrialSoFar)
_CONFIGURATION = TypeAdapter(Configuration)
_FROM_JSON: dict[str, Callable[[str], Any]] = {
    "ended": Fired.model_validate_json,
    "reasons": lambda text: tuple(json.loads(text)),
    "answers": lambda text: tuple(json.loads(text)),
    "score": lambda text: Interval(**json.loads(text)),
    "diagnosis": TypeAdapter(Diagnosis).validate_json,
    "stages": lambda text: tuple((stage, at_s) for stage, at_s in json.loads(text)),
    "configuration": _CONFIGURATION.validate_json,
    "gpu_pids": lambda text: tuple(json.loads(text)),
    "gpu_used_mib": lambda text: {int(k): v for k, v in json.loads(text).items()},
}


# The daemon reads the same few rows each cycle; what they parse to never changes.
@lru_cache(maxsize=64)
def read_candidate(body: str) -> Candidate:
    """Given a candidate's column, return it."""
    return Candidate.model_validate_json(body)


@lru_cache(maxsize=64)
def read_benchmark(body: str) -> Benchmark:
    """Given a trial's column, return the benchmark."""
    return Benchmark.model_validate_json(body)


@lru_cache(maxsize=128)
def read_result(body: str) -> LevelResult:
    """Given a level's column, return its result."""
    return LevelResult.model_validate_json(body)


def read_row(kind: type[Any], row: sqlite3.Row) -> Any:
    """Given a row class and a row of its table, return the object; columns that hold JSON are parsed."""
    values = {name: row[name] for name in kind.__annotations__}
    for name, read in _READS[kind]:
        if values[name] is not None:
            values[name] = read(values[name])
    return kind(**values)


def _reads(kind: type[Any]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """The columns of a row class that are not what SQLite returns, and how each is read."""
    found: dict[str, Callable[[Any], Any]] = {}
    for name, annotation in kind.__annotations__.items():
        if name in {"state", "purpose"} or annotation is bool:
            found[name] = annotation
        elif name == "verdict":
            found[name] = Verdict
        elif name in _FROM_JSON:
            found[name] = _FROM_JSON[name]
    return tuple(found.items())


_READS = {kind: _reads(kind) for kind in (Trial, LaunchRow)}
