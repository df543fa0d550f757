"""What "best" means: the objective over levels, its constraints, and the order in which levels are best measured. Pure."""

import math
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from autotuner.bench.measurement import Figures
from autotuner.core.statistics import Z95, Interval, between_launches, ratio_interval, z_of


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Constraints(_Strict):
    """What a winner must not violate, whatever it gains."""

    single_stream_ratio_min: float | None = Field(default=None, gt=0)
    ttft_p99_ms_max: float | None = Field(default=None, gt=0)
    tpot_p99_ms_max: float | None = Field(default=None, gt=0)
    failed_requests_max: int = Field(default=0, ge=0)


class Objective(_Strict):
    """What to maximise: one level's output tok/s, or the weighted geometric mean of ratios to the best-known's.

    `level` None means the benchmark's busiest. `weights` maps a level to its weight; levels not named weigh nothing.
    A promotion needs a gain above `min_gain_ratio` with confidence.
    """

    maximise: Literal["output_tok_s", "geometric_mean"] = "output_tok_s"
    level: int | None = Field(default=None, ge=1)
    weights: dict[int, float] = Field(default_factory=dict)
    min_gain_ratio: float = Field(default=0.0, ge=0)
    constraints: Constraints = Constraints()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.maximise == "geometric_mean" and self.level is not None:
            raise ValueError('level is for maximise = "output_tok_s"; use weights with "geometric_mean"')
        if self.maximise == "output_tok_s" and self.weights:
            raise ValueError('weights are for maximise = "geometric_mean"')
        if any(weight < 0 for weight in self.weights.values()):
            raise ValueError("weights must not be negative")
        return self

    def __str__(self) -> str:
        if self.maximise == "output_tok_s":
            return f"output tok/s at concurrency {self.level}" if self.level else "output tok/s at the busiest level"
        shown = ", ".join(f"{level}: {weight:g}" for level, weight in sorted(self.weights.items())) or "all equal"
        return f"geometric mean of output tok/s ratios over the levels (weights {shown})"


def weights_of(objective: Objective, levels: tuple[int, ...]) -> dict[int, float]:
    """Given the benchmark's levels, return the weight of each in the objective; they sum to 1."""
    if objective.maximise == "output_tok_s":
        deciding = objective.level if objective.level in levels else max(levels)
        return {level: 1.0 if level == deciding else 0.0 for level in levels}
    raw = {level: objective.weights.get(level, 0.0 if objective.weights else 1.0) for level in levels}
    total = sum(raw.values())
    return {level: weight / total for level, weight in raw.items()} if total else dict.fromkeys(levels, 1 / len(levels))


def deciding_levels(objective: Objective, levels: tuple[int, ...]) -> tuple[int, ...]:
    """Given the benchmark's levels, return those that carry weight, and level 1 where its rate is a constraint.

    Limits on latencies and failures hold at whatever levels are measured, so they need none of their own.
    """
    needed = {level for level, weight in weights_of(objective, levels).items() if weight > 0}
    if objective.constraints.single_stream_ratio_min is not None:
        needed |= {1} & set(levels)
    return tuple(sorted(needed))


def level_order(objective: Objective, levels: tuple[int, ...]) -> tuple[int, ...]:
    """Given the levels, return them in the order that decides soonest: the heaviest first, then the busiest."""
    weights = weights_of(objective, levels)
    return tuple(sorted(levels, key=lambda level: (-weights[level], -level)))


def score(
    objective: Objective,
    figures: dict[int, Figures],
    baseline: dict[int, Figures],
    noise: float,
    levels: tuple[int, ...] = (),
    launches: tuple[int, int] = (1, 1),
    alpha: float = 0.05,
) -> Interval | None:
    """Given both sides' figures by level, return the objective as a ratio to the baseline with bounds of confidence 1 - alpha.

    `levels` are the benchmark's, those of both sides if not given: a level that is missing must not hand its weight to
    another. None if a level that weighs something is missing or void on either side. `noise` is the relative standard deviation
    between launches, `launches` of how many launches each side is the mean: it counts once for the whole score and not
    once a level, since all levels of a launch share it.
    """
    levels = levels or tuple({**baseline, **figures})
    weights = {level: w for level, w in weights_of(objective, levels).items() if w > 0} if levels else {}
    if not weights or any(unusable(side.get(level)) for level in weights for side in (figures, baseline)):
        return None
    log_mean, variance = 0.0, 0.0
    for level, weight in weights.items():
        within = ratio_interval(_rate(figures[level]), _rate(baseline[level]), 0.0)
        log_mean += weight * math.log(max(within.mean, 1e-9))
        variance += (weight * (within.high - within.low) / 2 / max(within.mean, 1e-9)) ** 2
    half = z_of(alpha) * math.sqrt(variance / Z95**2 + between_launches(noise, launches))
    mean = math.exp(log_mean)
    return Interval(mean, max(0.0, mean * (1 - half)), mean * (1 + half))


def violations(objective: Objective, figures: dict[int, Figures], baseline: dict[int, Figures]) -> tuple[str, ...]:
    """Given figures by level, return a sentence for each constraint that they violate.

    Failed requests count whatever else went wrong; a void level says nothing about latencies and rates.
    """
    c = objective.constraints
    found = []
    for level, f in sorted(figures.items()):
        if f.requests_failed > c.failed_requests_max:
            found.append(f"{f.requests_failed} requests failed at concurrency {level} ({_errors(f)})")
        for name, limit, table in (
            ("TTFT", c.ttft_p99_ms_max, f.ttft_ms),
            ("TPOT", c.tpot_p99_ms_max, f.tpot_ms),
        ):
            if limit is not None and not f.void and table.get("p99", 0.0) > limit:
                found.append(f"{name} p99 at concurrency {level} is {table['p99']:.1f} ms, the limit is {limit:g} ms")
    single, base = figures.get(1), baseline.get(1)
    if c.single_stream_ratio_min is not None and single and base and not single.void and not unusable(base):
        ratio = single.output_tok_s / base.output_tok_s
        if ratio < c.single_stream_ratio_min:
            found.append(
                f"single-stream speed is {ratio:.2f} of the best-known's, at least {c.single_stream_ratio_min:g} is asked"
            )
    return tuple(found)


def pareto_front(rates: dict[str, dict[int, float]]) -> tuple[str, ...]:
    """Given output tok/s by name and level, return the names that no other beats or equals at every level."""
    front = []
    for name, mine in rates.items():
        dominated = any(
            other is not mine
            and all(other.get(level, 0.0) >= rate for level, rate in mine.items())
            and any(other.get(level, 0.0) > rate for level, rate in mine.items())
            for other in rates.values()
        )
        if not dominated:
            front.append(name)
    return tuple(front)


def unusable(figures: Figures | None) -> bool:
    """Tell whether a level's figures are missing, void, or without a single token."""
    return figures is None or bool(figures.void) or figures.output_tok_s <= 0


def _rate(figures: Figures) -> Interval:
    return Interval(figures.output_tok_s, figures.output_tok_s_low, figures.output_tok_s_high)


def _errors(figures: Figures) -> str:
    return ", ".join(f"{count} x {name}" for name, count in figures.errors.items())
