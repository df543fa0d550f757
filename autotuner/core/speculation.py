"""Break-even of speculative decoding: step times, needed accept length, ceiling, verdict per level.

Speculation pays at a level only if the accept length is above R = t_spec / t_base, the ratio of the step times at the
same number of running requests. Pure; every formula says where it comes from. Accept lengths include the bonus token.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from autotuner.core.statistics import (
    LAUNCH_NOISE_PRIOR,
    Z95,
    Interval,
    between_launches,
    confidence_sequence,
    median,
    relative_half_width,
    z_of,
)
from autotuner.engines.base import Speculation, Window

BROKEN_WITHIN = 0.02  # accept length within this of 1.00: nothing drafted is ever accepted
SUSPECT_STEPS = 50  # none accepted in so many verify steps bounds the chance of one at 0.06 (rule of three)
CLEAN_MIN = 3  # windows without a prefill; fewer are a matter of luck
STEADY_RATIO = 0.9  # a window counts only with this share of what can run running
# How far a plain step time can be off where it was not measured, as a 95 % relative half width. Between two levels the step
# is nearly linear in the batch: a dense 8B on an H200 is met within 1 %, a small mixture of experts at the low end of 4 to 64
# within 14 %; taken half way, and less close to a measured level. Outside them it is anybody's guess.
INTERPOLATION_ERROR = 0.10
EXTRAPOLATION_ERROR = 0.30
# The step time ratio where no baseline was measured: a fixed part and a part a draft token at batch 1, and its growth with
# each doubling of the batch. Fitted to the published rows of dense 8B models (EAGLE 1.09 + 0.105 k, EAGLE-3 1.18 + 0.143 k;
# chains of 3 from 1.5 at batch 2 to 2.3 at 64); engines differ from it by up to a third.
PRIOR_FIXED, PRIOR_PER_DRAFT, PRIOR_PER_DOUBLING = 1.13, 0.125, 0.10
PRIOR_ERROR = 0.35


class Pays(StrEnum):
    """What the evidence says about speculation at one level."""

    YES = "pays"
    NO = "below break-even"
    HOPELESS = "no drafter can pay here"
    BROKEN = "drafter broken"
    UNKNOWN = "undecided"


@dataclass(frozen=True)
class StepTime:
    """A step time in seconds, and how it is known: `measured`, `interpolated`, `extrapolated` or `prior`.

    `error` is the 95 % relative half width that comes of its not being measured.
    """

    seconds: float
    known: str
    between: tuple[float, float] | None = None
    error: float = 0.0


@dataclass(frozen=True)
class Doubt:
    """What makes a comparison with the baseline unsure.

    `alpha` is the probability with which a bound may be wrong, however often it is looked at; `launch_noise` the relative
    standard deviation between launches, `launches` of how many each side is the mean; `baseline` the baseline's own 95 %
    relative half width.
    """

    alpha: float = 0.05
    launch_noise: float = LAUNCH_NOISE_PRIOR
    baseline: float = 0.0
    launches: tuple[int, int] = (1, 1)

    def against(self, step: StepTime) -> float:
        """Given the plain step time compared with, return the relative half width that comes from the other side."""
        between = math.sqrt(between_launches(self.launch_noise, self.launches))
        sources = (between, self.baseline / Z95, step.error / Z95)
        return z_of(self.alpha) * math.hypot(*sources)


USUAL_DOUBT = Doubt()


@dataclass(frozen=True)
class SpeculationAtLevel:
    """What the windows of one level say about speculation there; None where it cannot be known.

    `needed` is the break-even accept length, `needed_bounds` the same with bounds, `ceiling` the best possible one,
    `speedup` the accept length over the needed one (the rate against a plain server that runs as many requests), `drafts`
    the verify steps counted, `capped` that the server runs fewer requests than the level offers while some wait.
    Bounds hold however often they are looked at.
    """

    running: float | None = None
    capped: bool = False
    accept_len: Interval | None = None
    needed: float | None = None
    baseline_step: StepTime | None = None
    step_s: float | None = None
    ceiling: float | None = None
    drafts: int = 0
    windows: int = 0
    speedup: Interval | None = None
    needed_bounds: Interval | None = None

    @property
    def pays(self) -> Pays:
        """The reading of these figures, without regard to how much evidence a rule asks for."""
        return _pays(self)  # apart, because `make mutate` leaves the bodies of properties alone

    @property
    def nothing_accepted(self) -> bool:
        """Whether no drafted token was accepted in all that was seen, which is enough to name a drafter and not to stop it."""
        return _nothing_accepted(self)

    def __str__(self) -> str:
        """The finding in a sentence: measured, needed, best possible, how sure."""
        if self.accept_len is None:
            return "no accept length was reported"
        best = f", {self.ceiling:.2f} the best possible" if self.ceiling is not None else ""
        text = f"accept length {_bounds(self.accept_len)} measured"
        if self.needed is None or self.needed_bounds is None or self.speedup is None:
            return f"{text}{best}; what is needed is not known"
        text += f", {_bounds(self.needed_bounds)} needed{best}"
        if self.baseline_step is not None and self.baseline_step.known == "prior":
            return f"{text}: {self.pays}; the needed one is a prior, since no baseline was measured"
        return f"{text}: {self.pays}, {_bounds(self.speedup)} of the rate of a plain server that runs as many requests"


def _pays(found: SpeculationAtLevel) -> Pays:
    if found.accept_len is None:
        return Pays.UNKNOWN
    if found.accept_len.high < 1 + BROKEN_WITHIN:
        return Pays.BROKEN
    if found.speedup is None or found.needed_bounds is None:
        return Pays.UNKNOWN
    if found.ceiling is not None and found.needed_bounds.low > found.ceiling:
        return Pays.HOPELESS
    if found.speedup.high < 1:
        return Pays.NO
    return Pays.YES if found.speedup.low > 1 else Pays.UNKNOWN


def _nothing_accepted(found: SpeculationAtLevel) -> bool:
    accepted = found.accept_len
    return accepted is not None and accepted.mean < 1 + BROKEN_WITHIN and found.drafts >= SUSPECT_STEPS


def step_time_s(running: float, accept_len: float, gen_tok_s: float) -> float:
    """Given running requests, accept length (1 without speculation) and output tok/s, return seconds a step.

    Each running request emits `accept_len` tokens a step, so rate = running x accept_len / step.
    """
    return running * accept_len / gen_tok_s


def baseline_step(points: dict[float, float], running: float) -> StepTime | None:
    """Given measured plain step times by running requests, return the one at `running`.

    Between measured points the step time is taken as linear in the batch, which it nearly is; outside them the nearest
    segment is extended, never below the nearest measured time of a smaller batch. None without any point.
    """
    if not points:
        return None
    known = sorted(points)
    exact = next((x for x in known if abs(x - running) <= 0.05 * max(1.0, running)), None)
    if exact is not None:
        return StepTime(points[exact], "measured")
    # Levels that run as many requests (a cap) differ by noise alone, and a line through two such points points anywhere.
    known = [x for x, above in pairwise(known) if above - x > 0.05 * max(1.0, above)] + known[-1:]
    if len(known) == 1:
        return StepTime(points[known[0]], "extrapolated", (known[0], known[0]), EXTRAPOLATION_ERROR)
    above = next((i for i, x in enumerate(known) if x > running), len(known) - 1)
    right = max(1, above)
    a, b = known[right - 1], known[right]
    slope = (points[b] - points[a]) / (b - a)
    seconds = points[a] + slope * (running - a)
    if a <= running <= b:
        share = (running - a) / (b - a)
        return StepTime(seconds, "interpolated", (a, b), INTERPOLATION_ERROR * 4 * share * (1 - share))
    nearest = points[a] if running < a else points[b]
    seconds = max(nearest, seconds) if running > b else max(seconds, nearest * 0.5)
    return StepTime(seconds, "extrapolated", (a, b), EXTRAPOLATION_ERROR)


def prior_needed(num_steps: float, running: float) -> float:
    """Given the depth of a draft and the running requests, return the break-even accept length that published rows suggest.

    For a server whose plain step was never measured. Right within PRIOR_ERROR for dense models on one GPU, and of no use
    for a small mixture of experts (2.1 to 4 at batch 1) or a tiny target (5 and more).
    """
    growth = 1 + PRIOR_PER_DOUBLING * math.log2(max(1.0, running))
    return (PRIOR_FIXED + PRIOR_PER_DRAFT * num_steps) * growth


def needed_accept_len(spec_step_s: float, base_step_s: float) -> float:
    """Given both step times at the same running requests, return the break-even accept length R."""
    return spec_step_s / base_step_s


def steady_windows(windows: tuple[Window, ...], concurrency: int | None, cap: int | None) -> tuple[Window, ...]:
    """Given a level's windows, return those that tell the time of a step best: the busy ones without a prefill.

    Under a load of short requests nearly every window holds a prefill: with less than CLEAN_MIN without one all busy ones
    count. A server's steps compare with another's only where both are told with prefills or both without (`assess`).
    """
    busy = busy_windows(windows, concurrency, cap)
    clean = tuple(w for w in busy if not w.prefill)
    telling = [w for w in clean if w.gen_tok_s is not None or w.drafts]
    return clean if len(telling) >= min(CLEAN_MIN, len(busy)) else busy


def busy_windows(windows: tuple[Window, ...], concurrency: int | None, cap: int | None) -> tuple[Window, ...]:
    """Given a level's windows, return those in steady state: not after idling, enough running.

    What can run is the level's concurrency or the server's cap, whichever is less; where no window says how many run,
    all count, since nothing contradicts them. All do as well where requests are sent at a rate and none are kept in flight
    (`concurrency` None): how many run is then what comes of the rate and of the server's speed.
    """
    target = 0 if concurrency is None else min(concurrency, cap) if cap else concurrency
    seen_busy = max((w.running for w in windows if w.running is not None), default=None)
    if seen_busy is not None and any((w.queued or 0) > 0 for w in windows):
        target = min(target, round(seen_busy))
    # A gauge read between two requests of a stream misses one of them: at small levels that is more than the ratio.
    enough = min(STEADY_RATIO * target, target - 0.5)
    return tuple(w for w in windows if not w.after_idle and (w.running is None or w.running >= enough))


def decode_rate(windows: tuple[Window, ...]) -> tuple[float, float] | None:
    """Given steady windows, return (running, output tok/s) over those that state both; None if none does.

    Windows of known length are weighted by it, which makes the rate tokens over time. Log lines give their medians, so
    that one line that spans a stall does not count more than the others; but with prefills among them they are of two
    kinds, of which a median picks one, and then they count as the equal numbers of steps that they are (SGLang prints a line
    each 40): on an H200 that meets the client's rate within some 5 %, where the median was off by 13 %.
    """
    both = [(w.running, w.gen_tok_s, w.seconds) for w in windows if w.running and w.gen_tok_s is not None]
    total_s = sum(s for _, _, s in both if s)
    if both and all(s for _, _, s in both):
        running = sum(r * s for r, _, s in both if s) / total_s
        rate = sum(g * s for _, g, s in both if s) / total_s
    elif both and any(w.prefill for w in windows) and all(g for _, g, _ in both):
        tokens = [w.running * (w.accept_len or 1.0) for w in windows if w.running and w.gen_tok_s]
        running = median([r for r, _, _ in both])
        rate = sum(tokens) / sum(made / g for made, (_, g, _) in zip(tokens, both, strict=True))
    elif both:
        running, rate = median([r for r, _, _ in both]), median([g for _, g, _ in both])
    else:
        return None
    return (running, rate) if rate > 0 else None


def assess(
    windows: tuple[Window, ...],
    concurrency: int | None,
    cap: int | None,
    speculation: Speculation,
    baseline_steps_s: dict[float, float],
    doubt: Doubt = USUAL_DOUBT,
    busy_steps_s: Mapping[float, float] | None = None,
    *,
    baseline_clean: bool = True,
) -> SpeculationAtLevel:
    """Given a level's windows and the baseline's step times, return what they say about speculation there.

    `baseline_steps_s` maps running requests to seconds a step of the plain server; empty if it was never measured, and
    then the needed accept length is a prior. `busy_steps_s` are the same with the prefills between its steps, where they are
    known; they count where this server's own windows hold prefills, or the baseline has no others (`baseline_clean`).
    """
    steady = (steady_windows if baseline_clean else busy_windows)(windows, concurrency, cap)
    if busy_steps_s and any(w.prefill for w in steady):
        baseline_steps_s = dict(busy_steps_s)
    accept_len, drafts = accept_length(steady, speculation.ceiling, doubt.alpha)
    found = SpeculationAtLevel(accept_len=accept_len, ceiling=speculation.ceiling, drafts=drafts, windows=len(steady))
    rate = decode_rate(steady)
    if rate is None or accept_len is None:
        return found
    running, tok_s = rate
    step = step_time_s(running, accept_len.mean, tok_s)
    waiting = any((w.queued or 0) >= 1 for w in windows)
    capped = concurrency is not None and running < STEADY_RATIO * concurrency and waiting
    found = replace(found, running=running, capped=capped, step_s=step)
    base = baseline_step(baseline_steps_s, running) or _prior_step(speculation, running, step)
    if base is None:
        return found
    within, other = _rate_error(steady, doubt.alpha), doubt.against(base)
    step_error = _step_error(steady, accept_len, within, doubt.alpha)
    return replace(
        found,
        needed=needed_accept_len(step, base.seconds),
        baseline_step=base,
        speedup=_widened(tok_s * base.seconds / running, math.hypot(within, other)),
        needed_bounds=_widened(step / base.seconds, math.hypot(step_error, other)),
    )


def _prior_step(speculation: Speculation, running: float, spec_step_s: float) -> StepTime | None:
    """The plain step time at which the measured one would be what published rows suggest; None for an unknown depth."""
    if speculation.num_steps is None:
        return None
    return StepTime(spec_step_s / prior_needed(speculation.num_steps, running), "prior", None, PRIOR_ERROR)


def _rate_error(windows: tuple[Window, ...], alpha: float) -> float:
    """The relative half width of the output rate of one running request over the windows."""
    return relative_half_width(
        confidence_sequence([w.gen_tok_s / w.running for w in windows if w.running and w.gen_tok_s is not None], alpha)
    )


def _step_error(windows: tuple[Window, ...], accept_len: Interval, rate_error: float, alpha: float) -> float:
    """The relative half width of the step time.

    Where one window states accept length and rate, its step time is known, and the luck of its prompts cancels out;
    where no window states both, the two errors add up.
    """
    steps = [
        w.running * w.accept_len / w.gen_tok_s
        for w in windows
        if w.running and w.gen_tok_s and w.accept_len is not None
    ]
    if len(steps) >= CLEAN_MIN:
        return relative_half_width(confidence_sequence(steps, alpha))
    return math.hypot(rate_error, relative_half_width(accept_len))


def _widened(mean: float, error: float) -> Interval:
    return Interval(mean, max(0.0, mean * (1 - error)), mean * (1 + error))


def _bounds(interval: Interval) -> str:
    if not math.isfinite(interval.high):
        return f"{interval.mean:.2f}"
    return f"{interval.mean:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def accept_length(
    windows: tuple[Window, ...], ceiling: float | None = None, alpha: float = 0.05
) -> tuple[Interval | None, int]:
    """Given steady windows, return the accept length with bounds, and the verify steps it rests on.

    Where counters give verify steps, the mean is 1 + accepted/steps over all of them, which is exact; otherwise it is the
    mean of the printed values. The bounds come from the spread between windows, hold at every look with probability
    1 - alpha, and lie between 1 and the ceiling.
    """
    stated = [w for w in windows if w.accept_len is not None]
    drafts = sum(w.drafts for w in windows if w.drafts)
    if not stated:
        return None, drafts
    spread = confidence_sequence([w.accept_len for w in stated if w.accept_len is not None], alpha)
    counted = [(w.drafts, w.accepted) for w in stated if w.drafts and w.accepted is not None]
    mean = spread.mean
    if counted:
        mean = 1 + sum(accepted for _, accepted in counted) / sum(steps for steps, _ in counted)
    half = (spread.high - spread.low) / 2
    if not drafts:
        # SGLang prints no count: a window covers 40 steps of each running request (--decode-log-interval).
        drafts = round(sum(40 * (w.running or 1) for w in stated))
    most = max(mean, ceiling) if ceiling is not None else math.inf
    return Interval(mean, max(1.0, mean - half), min(most, mean + half)), drafts
