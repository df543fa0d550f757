"""What "best" means: the objective over levels, its constraints, and the order in which levels are best measured. Pure."""

import math
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from autotuner.bench.benchmark import Benchmark, Level, LoadKind, level_name, whole
from autotuner.bench.measurement import Figures, GoodputLimits
from autotuner.core.source import wrong_at
from autotuner.core.statistics import Z95, Interval, between_launches, ratio_interval, z_of

_Level = TypeVar("_Level", bound=Level)  # recorded campaigns and the simulation have whole ones alone


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Constraints(_Strict):
    """What a winner must not violate, whatever it gains.

    `answers_agree_min` is the least agreement with the best-known's answers (core/answers.py). Another kernel or batch
    shape flips near-ties between two tokens, so honest servers of one model agree to 0.5 to 1.0; one that corrupts what it
    computes agrees to about 0. The default lies between the two.
    """

    single_stream_ratio_min: float | None = Field(default=None, gt=0)
    ttft_p99_ms_max: float | None = Field(default=None, gt=0)
    tpot_p99_ms_max: float | None = Field(default=None, gt=0)
    failed_requests_max: int = Field(default=0, ge=0)
    answers_agree_min: float = Field(default=0.25, ge=0, le=1)


class Objective(_Strict):
    """What to maximise: one level's output tok/s or goodput, or the weighted geometric mean of ratios to the best-known's.

    `level` None means the benchmark's busiest. `weights` maps a level to its weight; levels not named weigh nothing.
    Goodput is the requests per second that meet `ttft_ms_max` and `tpot_ms_max`, of which one is needed.
    A promotion needs a gain above `min_gain_ratio` with confidence.
    """

    maximise: Literal["output_tok_s", "goodput", "geometric_mean"] = "output_tok_s"
    level: Level | None = Field(default=None, gt=0)
    ttft_ms_max: float | None = Field(default=None, gt=0)
    tpot_ms_max: float | None = Field(default=None, gt=0)
    weights: dict[Level, float] = Field(default_factory=dict)
    min_gain_ratio: float = Field(default=0.0, ge=0)
    constraints: Constraints = Constraints()

    @field_validator("level")
    @classmethod
    def _level_is_whole(cls, level: Level | None) -> Level | None:
        return level if level is None else whole(level)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        named = {key: getattr(self, key) for key in ("ttft_ms_max", "tpot_ms_max")}
        limits = [key for key, value in named.items() if value is not None]
        if self.maximise == "geometric_mean" and self.level is not None:
            raise wrong_at(("level",), 'is for "output_tok_s" and "goodput"; use weights with "geometric_mean"')
        if self.maximise != "geometric_mean" and self.weights:
            raise wrong_at(("weights",), 'are for maximise = "geometric_mean"')
        if any(weight < 0 for weight in self.weights.values()):
            raise wrong_at(("weights",), "must not be negative")
        if self.maximise == "goodput" and not limits:
            raise wrong_at(
                ("maximise",), '"goodput" needs ttft_ms_max or tpot_ms_max, in ms: what makes a request good'
            )
        if self.maximise != "goodput" and limits:
            message = f'is for maximise = "goodput"; a limit that a winner must keep is constraints.{_P99[limits[0]]}'
            raise wrong_at((limits[0],), message)
        return self

    @property
    def limits(self) -> GoodputLimits | None:
        """What makes a request good; None where goodput is not what is maximised."""
        if self.maximise != "goodput":
            return None
        return GoodputLimits(ttft_ms_max=self.ttft_ms_max, tpot_ms_max=self.tpot_ms_max)

    def warnings(self, name: str, benchmark: Benchmark) -> tuple[str, ...]:
        """Given a benchmark and its name, return what the objective says of it otherwise than one would think."""
        found = []
        if benchmark.load == "concurrency":
            return ()
        if self.limits is None:
            found.append(
                f"benchmark {name} sends requests at fixed rates, at which output tok/s says only whether the server keeps up: "
                'maximise "goodput", or use concurrency levels'
            )
        if self.constraints.single_stream_ratio_min is not None:
            found.append(
                f"single_stream_ratio_min needs concurrency 1, which benchmark {name} does not have: it is left out"
            )
        return tuple(found)

    @property
    def named_levels(self) -> tuple[tuple[tuple[str, ...], Level], ...]:
        """Each level that the objective names or needs, with its key: one that is never measured would decide nothing."""
        named: list[tuple[tuple[str, ...], Level]] = [(("weights", str(level)), level) for level in self.weights]
        if self.level is not None:
            named.append((("level",), self.level))
        if self.constraints.single_stream_ratio_min is not None:
            named.append((("constraints", "single_stream_ratio_min"), 1))
        return tuple(named)

    @property
    def unit(self) -> str:
        """The figure that is compared at a level."""
        return "goodput" if self.maximise == "goodput" else "output tok/s"

    @property
    def counts_latency(self) -> bool:
        """Whether latencies of single requests decide, so that a level needs its requests and not its rate alone."""
        c = self.constraints
        return self.limits is not None or c.ttft_p99_ms_max is not None or c.tpot_p99_ms_max is not None

    def described(self, load: LoadKind) -> str:
        """Return it in words, its level named as what the benchmark's levels are."""
        if self.maximise == "geometric_mean":
            shown = ", ".join(f"{level}: {weight:g}" for level, weight in sorted(self.weights.items())) or "all equal"
            return f"geometric mean of output tok/s ratios over the levels (weights {shown})"
        text = f"{self.unit} at {level_name(load, self.level)}" if self.level else f"{self.unit} at the busiest level"
        return f"{text} (requests per second with {self.limits})" if self.limits else text

    def __str__(self) -> str:
        return self.described("concurrency")


_P99 = {"ttft_ms_max": "ttft_p99_ms_max", "tpot_ms_max": "tpot_p99_ms_max"}


def weights_of(objective: Objective, levels: tuple[_Level, ...]) -> dict[_Level, float]:
    """Given the benchmark's levels, return the weight of each in the objective; they sum to 1."""
    if objective.maximise != "geometric_mean":
        deciding = objective.level if objective.level in levels else max(levels)
        return {level: 1.0 if level == deciding else 0.0 for level in levels}
    raw = {level: objective.weights.get(level, 0.0 if objective.weights else 1.0) for level in levels}
    total = sum(raw.values())
    return {level: weight / total for level, weight in raw.items()} if total else dict.fromkeys(levels, 1 / len(levels))


def deciding_levels(objective: Objective, levels: tuple[_Level, ...]) -> tuple[_Level, ...]:
    """Given the benchmark's levels, return those that carry weight, and level 1 where its rate is a constraint.

    Limits on latencies and failures hold at whatever levels are measured, so they need none of their own.
    """
    needed = {level for level, weight in weights_of(objective, levels).items() if weight > 0}
    if objective.constraints.single_stream_ratio_min is not None:
        needed |= {level for level in levels if level == 1}
    return tuple(sorted(needed))


def level_order(objective: Objective, levels: tuple[_Level, ...]) -> tuple[_Level, ...]:
    """Given the levels, return them in the order that decides soonest: the heaviest first, then the busiest."""
    weights = weights_of(objective, levels)
    return tuple(sorted(levels, key=lambda level: (-weights[level], -level)))


def score(
    objective: Objective,
    figures: dict[Level, Figures],
    baseline: dict[Level, Figures],
    noise: float,
    levels: tuple[Level, ...] = (),
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
        within = _ratio(objective, figures[level], baseline[level], alpha)
        if within is None:
            return None
        log_mean += weight * math.log(max(within.mean, 1e-9))
        variance += (weight * (within.high - within.mean) / max(within.mean, 1e-9)) ** 2
    half = z_of(alpha) * math.sqrt(variance / Z95**2 + between_launches(noise, launches))
    mean = math.exp(log_mean)
    return Interval(mean, max(0.0, mean * (1 - half)), mean * (1 + half))


@dataclass(frozen=True)
class Standing:
    """What a level in progress is scored within: the levels done so far, and the best-known's figures by level."""

    objective: Objective
    levels: tuple[Level, ...]
    done: dict[Level, Figures]
    baseline: dict[Level, Figures]
    noise: float
    launches: tuple[int, int] = (1, 1)
    alpha: float = 0.05


def score_bound(standing: Standing, now: Figures, *, over: bool = True) -> float | None:
    """Given where a trial stands and a level's figures so far, return the upper bound of the whole score.

    It is of confidence 1 - `alpha`, as the bounds of figures are while the level is not `over`; later they are of 95 %.

    None until every other level that weighs something is measured: what it would bring is not known, so nothing bounds
    the score. With a single deciding level this is the upper bound of its own ratio. Goodput is known at a level's end.
    """
    if not over:  # as wide as it is, once `score` has widened it to the confidence asked for
        half = (now.output_tok_s_high - now.output_tok_s) * Z95 / z_of(standing.alpha)
        now = now.model_copy(
            update={"output_tok_s_low": now.output_tok_s - half, "output_tok_s_high": now.output_tok_s + half}
        )
    figures = {**standing.done, now.concurrency: now}
    sides = standing.objective, figures, standing.baseline
    found = score(*sides, standing.noise, standing.levels, standing.launches, standing.alpha)
    return found.high if found is not None and math.isfinite(found.high) else None


def violations(objective: Objective, figures: dict[Level, Figures], baseline: dict[Level, Figures]) -> tuple[str, ...]:
    """Given figures by level, return a sentence for each constraint that they violate.

    Failed requests count whatever else went wrong; a void level says nothing about latencies and rates.
    """
    c = objective.constraints
    found = []
    for _, f in sorted(figures.items()):
        if f.requests_failed > c.failed_requests_max:
            found.append(f"{f.requests_failed} requests failed at {f.level_name} ({_errors(f)})")
        found += too_late(objective, f)
    single, base = figures.get(1), baseline.get(1)
    if c.single_stream_ratio_min is not None and single and base and not single.void and not unusable(base):
        ratio = single.output_tok_s / base.output_tok_s
        if ratio < c.single_stream_ratio_min:
            found.append(
                f"single-stream speed is {ratio:.2f} of the best-known's, at least {c.single_stream_ratio_min:g} is asked"
            )
    return tuple(found)


def too_late(objective: Objective, f: Figures, margin: float = 0.0) -> list[str]:
    """Given a level's figures, return a sentence for each limit on latencies that they violate; none for a void level.

    `margin` is the share of the limit that may be exceeded besides.
    """
    c = objective.constraints
    return [
        f"{name} p99 at {f.level_name} is {table['p99']:.1f} ms, the limit is {limit:g} ms"
        for name, limit, table in (("TTFT", c.ttft_p99_ms_max, f.ttft_ms), ("TPOT", c.tpot_p99_ms_max, f.tpot_ms))
        if limit is not None and not f.void and table.get("p99", 0.0) > limit * (1 + margin)
    ]


def unusable(figures: Figures | None) -> bool:
    """Tell whether a level's figures are missing, void, or without a single token."""
    return figures is None or bool(figures.void) or figures.output_tok_s <= 0


def _ratio(objective: Objective, mine: Figures, best: Figures, alpha: float) -> Interval | None:
    """One level's ratio to the best-known's, without the noise between launches."""
    if objective.limits is None:
        return ratio_interval(_rate(mine), _rate(best), 0.0)
    good, base = _goodput(mine, objective.limits), _goodput(best, objective.limits)
    if good is None or base is None:
        return None
    if good.mean > 0 and base.mean > 0:
        return ratio_interval(good, base, 0.0)
    # Not one good request on a side: the most that this allows stands in for it, so the ratio is the least that was
    # gained, or the most that is left. Where even that points the other way, too few requests were good to tell.
    most = -math.log(alpha / 2)  # a Poisson count that is 0 with less than this probability, two-sided
    found = ratio_interval(_at_most(good, most / mine.seconds), _at_most(base, most / best.seconds), 0.0)
    return found if (good.mean > 0 and found.mean > 1) or (base.mean > 0 and found.mean < 1) else None


def _at_most(rate: Interval, most: float) -> Interval:
    return rate if rate.mean > 0 else Interval(most, most, most)


def _goodput(f: Figures, limits: GoodputLimits) -> Interval | None:
    if f.goodput_limits != limits or f.goodput_req_s is None:
        return None
    return Interval(f.goodput_req_s, f.goodput_req_s_low or 0.0, f.goodput_req_s_high or 0.0)


def _rate(figures: Figures) -> Interval:
    return Interval(figures.output_tok_s, figures.output_tok_s_low, figures.output_tok_s_high)


def _errors(figures: Figures) -> str:
    return ", ".join(f"{count} x {name}" for name, count in figures.errors.items())
