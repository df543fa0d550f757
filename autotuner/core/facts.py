"""What was read -> the named facts that policies see. Pure.

A fact that is not known is left out, never filled with a zero: a rule on it then cannot fire.
"""

import math
from dataclasses import dataclass

from autotuner.bench.benchmark import Level
from autotuner.bench.measurement import Figures
from autotuner.core.depth import best_depth
from autotuner.core.objective import Constraints
from autotuner.core.policy import Facts
from autotuner.core.speculation import USUAL_DOUBT, Doubt, SpeculationAtLevel
from autotuner.core.statistics import Interval, confidence_sequence, ratio_interval, relative_half_width
from autotuner.engines.base import Diagnosis, Stage

SETTLE_ALPHA = 0.05  # that a figure is known well enough decides nothing, so it spends nothing of the error budget


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

    `prompts` counts the requests begun in the steady part, `rates` are output tok/s over consecutive stretches of it. The
    bounds of `figures` are of confidence 1 - `doubt.alpha` while it is in progress. `score_high` bounds the whole score
    (objective.score_bound); `constraints` are those that the trial is held to. `answered_ratio` tells whether the server
    keeps up with a rate (core/keeping_up.py). `silent_s` is the time without a token or a word of work while requests wait,
    `silence_limit_s` the longest that may be.
    """

    figures: Figures
    load_s: float
    decides: bool
    running: float | None
    speculates: bool
    speculation: SpeculationAtLevel | None
    accept_ratio: float | None
    best: Figures | None
    doubt: Doubt = USUAL_DOUBT
    prompts: int = 0
    rates: tuple[float, ...] = ()
    over: bool = False
    running_cap: int | None = None
    graph_max_batch: int | None = None
    preempted: int | None = None
    tree: bool = False
    depth: int | None = None
    pays_up_to: Level | None = None
    loses_from: Level | None = None
    score_high: float | None = None
    constraints: Constraints | None = None
    latency_counts: bool = False
    in_flight: int | None = None
    queued: float | None = None
    answered_ratio: Interval | None = None
    best_answered_ratio: float | None = None
    silent_s: float | None = None
    silence_limit_s: float | None = None


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
        "level.name": f.level_name,
        "level.elapsed_s": f.seconds,
        "level.load_s": level.load_s,
        "level.decides": level.decides,
        "level.requests_ok": float(f.requests_ok),
        "level.requests_failed": float(f.requests_failed),
        "level.prompts": float(level.prompts),
        "level.launch_noise": level.doubt.launch_noise,
        "spec.on": level.speculates,
    }
    counts = {
        "level.concurrency": f.concurrency if f.load == "concurrency" else None,
        "level.request_rate": f.concurrency if f.load == "request-rate" else None,
        "level.in_flight": level.in_flight,
        "level.queued": level.queued,
        "level.running": level.running,
        "level.running_cap": level.running_cap,
        "level.graph_max_batch": level.graph_max_batch,
        "level.preempted": level.preempted,
        "spec.pays_up_to": level.pays_up_to,
        "spec.loses_from": level.loses_from,
        "best.answered_ratio": level.best_answered_ratio,
    }
    facts |= {name: float(count) for name, count in counts.items() if count is not None}
    if level.silent_s is not None and level.silence_limit_s is not None:
        facts |= {"level.silent_s": level.silent_s, "level.silence_limit_s": level.silence_limit_s}
    if f.requests_ok + f.requests_failed:
        facts["level.failed_ratio"] = f.requests_failed / (f.requests_ok + f.requests_failed)
    if f.seconds > 0 and f.output_tok_s > 0:
        facts["level.output_tok_s"] = f.output_tok_s
        if math.isfinite(f.output_tok_s_high):
            facts["level.output_tok_s_high"] = f.output_tok_s_high
    error = relative_half_width(confidence_sequence(list(level.rates), SETTLE_ALPHA))
    if math.isfinite(error) and f.load == "concurrency":
        facts["level.rate_error"] = error
    if level.answered_ratio is not None:
        facts["level.answered_ratio"] = level.answered_ratio.mean
        facts["level.answered_ratio_high"] = level.answered_ratio.high
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
    # At a rate the output is what was sent, and until the level's end the two sides have not been sent the same.
    if f.seconds > 0 and f.output_tok_s > 0 and (level.over or f.load == "concurrency"):
        doubt = level.doubt
        ratio = ratio_interval(_rate(f), _rate(best), doubt.launch_noise, doubt.launches, doubt.alpha)
        facts |= _bounded("best.ratio", ratio)
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
    facts: Facts = {name: float(value) for name, value in known.items() if value is not None}
    return {**facts, "objective.latency_counts": level.latency_counts}


def _speculation_facts(level: LevelSoFar) -> Facts:
    spec = level.speculation
    if spec is None:
        return {}
    facts: Facts = {
        "spec.verify_steps": float(spec.drafts),
        "spec.windows": float(spec.windows),
        "spec.tree": level.tree,
    }
    if spec.running is not None:
        facts["spec.capped"] = spec.capped
    if spec.accept_len is not None:
        facts |= _bounded("spec.accept_len", spec.accept_len)
    if level.accept_ratio is not None:
        facts["spec.accept_ratio"] = level.accept_ratio
    if spec.needed is not None and spec.baseline_step is not None:
        if spec.baseline_step.known == "prior":
            facts["spec.needed_prior"] = spec.needed
        elif spec.needed_bounds is not None and spec.speedup is not None:
            facts |= _bounded("spec.needed", spec.needed_bounds) | _bounded("spec.speedup", spec.speedup)
    if spec.ceiling is not None:
        facts["spec.ceiling"] = spec.ceiling
    return {**facts, **_depth_facts(level)}


def _depth_facts(level: LevelSoFar) -> Facts:
    spec = level.speculation
    if spec is None or spec.accept_len is None or spec.needed is None or level.depth is None or level.tree:
        return {}
    best = best_depth(spec.accept_len.mean, level.depth, {level.depth: spec.needed})
    if best is None:
        return {}
    return {
        "spec.best_depth": float(best.steps),
        "spec.predicted_gain": best.gain,
        "spec.predicted_ratio": best.ratio,
    }


def _bounded(name: str, value: Interval) -> Facts:
    """A fact and its two bounds; a bound that is not known yet is left out."""
    bounds = {f"{name}_low": value.low, f"{name}_high": value.high}
    known = {key: bound for key, bound in bounds.items() if math.isfinite(bound) and math.isfinite(value.high)}
    return {name: value.mean, **known}


def _rate(figures: Figures) -> Interval:
    return Interval(figures.output_tok_s, figures.output_tok_s_low, figures.output_tok_s_high)
