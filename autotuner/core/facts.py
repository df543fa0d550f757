"""What was read -> the named facts that policies see. Pure.

A fact that is not known is left out, never filled with a zero: a rule on it then cannot fire.
"""

from dataclasses import dataclass

from autotuner.bench.measurement import Figures
from autotuner.core.objective import Constraints
from autotuner.core.policy import Facts
from autotuner.core.speculation import SpeculationAtLevel
from autotuner.core.statistics import Interval, ratio_interval
from autotuner.engines.base import Diagnosis, Stage


@dataclass(frozen=True)
class StartSoFar:
    """A start in progress, times in seconds."""

    stage: Stage
    elapsed_s: float
    limit_s: float
    silent_s: float
    silence_limit_s: float


@dataclass(frozen=True)
class LevelSoFar:
    """A level in progress or at its end (`over`). `best` is the best-known's figures at this level, if it was measured.

    `score_high` bounds the whole score (objective.score_bound); `constraints` are those that the trial is held to.
    """

    figures: Figures
    load_s: float
    decides: bool
    running: float | None
    speculates: bool
    speculation: SpeculationAtLevel | None
    accept_ratio: float | None
    best: Figures | None
    launch_noise: float
    over: bool = False
    score_high: float | None = None
    constraints: Constraints | None = None


def server_facts(alive: bool, exit_code: int | None, diagnosis: Diagnosis | None) -> Facts:
    """Given how the server is, return the `server.*` facts."""
    facts: Facts = {"server.alive": alive}
    if exit_code is not None:
        facts["server.exit_code"] = float(exit_code)
    if diagnosis is not None:
        facts["server.cause"] = diagnosis.cause
        facts["server.sentence"] = diagnosis.sentence
    return facts


def start_facts(start: StartSoFar) -> Facts:
    """Given a start in progress, return the `start.*` facts."""
    return {
        "start.stage": start.stage.value,
        "start.elapsed_s": start.elapsed_s,
        "start.limit_s": start.limit_s,
        "start.silent_s": start.silent_s,
        "start.silence_limit_s": start.silence_limit_s,
    }


def level_facts(level: LevelSoFar) -> Facts:
    """Given a level so far, return the `level.*`, `best.*`, `objective.*` and `spec.*` facts."""
    f = level.figures
    facts: Facts = {
        "level.concurrency": float(f.concurrency),
        "level.elapsed_s": f.seconds,
        "level.load_s": level.load_s,
        "level.decides": level.decides,
        "level.requests_ok": float(f.requests_ok),
        "level.requests_failed": float(f.requests_failed),
        "spec.on": level.speculates,
    }
    if level.running is not None:
        facts["level.running"] = level.running
    if f.requests_ok + f.requests_failed:
        facts["level.failed_ratio"] = f.requests_failed / (f.requests_ok + f.requests_failed)
    if f.seconds > 0 and f.output_tok_s > 0:
        facts["level.output_tok_s"] = f.output_tok_s
        facts["level.output_tok_s_high"] = f.output_tok_s_high
    if level.over:
        facts["level.client_limited"] = f.client_limited
        late = {"level.ttft_p99_ms": f.ttft_ms, "level.tpot_p99_ms": f.tpot_ms}
        facts |= {name: table["p99"] for name, table in late.items() if "p99" in table and not f.void}
    return {**facts, **_best_facts(level), **_objective_facts(level), **_speculation_facts(level)}


def _best_facts(level: LevelSoFar) -> Facts:
    best, f = level.best, level.figures
    if best is None or best.void or best.output_tok_s <= 0:
        return {"best.measured": False}
    facts: Facts = {"best.measured": True, "best.output_tok_s": best.output_tok_s}
    if f.seconds > 0 and f.output_tok_s > 0:
        ratio = ratio_interval(_rate(f), _rate(best), level.launch_noise)
        facts["best.ratio"] = ratio.mean
        facts["best.ratio_high"] = ratio.high
    return facts


def _objective_facts(level: LevelSoFar) -> Facts:
    c = level.constraints
    known: dict[str, float | None] = {"objective.score_high": level.score_high}
    if c is not None:
        known |= {
            "objective.failed_requests_max": c.failed_requests_max,
            "objective.ttft_p99_ms_max": c.ttft_p99_ms_max,
            "objective.tpot_p99_ms_max": c.tpot_p99_ms_max,
            "objective.single_stream_ratio_min": c.single_stream_ratio_min,
        }
    return {name: float(value) for name, value in known.items() if value is not None}


def _speculation_facts(level: LevelSoFar) -> Facts:
    spec = level.speculation
    if spec is None:
        return {}
    facts: Facts = {"spec.verify_steps": float(spec.drafts), "spec.windows": float(spec.windows)}
    if spec.running is not None:
        facts["spec.capped"] = spec.capped
    if spec.accept_len is not None:
        facts["spec.accept_len"] = spec.accept_len.mean
        facts["spec.accept_len_low"] = spec.accept_len.low
        facts["spec.accept_len_high"] = spec.accept_len.high
    if level.accept_ratio is not None:
        facts["spec.accept_ratio"] = level.accept_ratio
    if spec.needed is not None:
        facts["spec.needed"] = spec.needed
    if spec.ceiling is not None:
        facts["spec.ceiling"] = spec.ceiling
    return facts


def _rate(figures: Figures) -> Interval:
    return Interval(figures.output_tok_s, figures.output_tok_s_low, figures.output_tok_s_high)
