"""Break-even of speculative decoding: step times, needed accept length, ceiling, verdict per level, shares of a loss.

Speculation pays at a level only if the accept length is above R = t_spec / t_base, the ratio of the step times at the
same number of running requests. Pure; every formula says where it comes from. Accept lengths include the bonus token.
"""

from dataclasses import dataclass
from enum import StrEnum

from autotuner.core.statistics import Interval, mean_interval, median
from autotuner.engines.base import Speculation, Window

BROKEN_WITHIN = 0.02  # accept length within this of 1.00: nothing drafted is ever accepted
CLEAN_MIN = 3  # windows without a prefill; fewer are a matter of luck
STEADY_RATIO = 0.9  # a window counts only with this share of what can run running
PRIOR_ACCEPT_RATIO = 0.70  # accepted/drafted asked for where no baseline was measured; a prior, not a break-even


class Pays(StrEnum):
    """What the evidence says about speculation at one level."""

    YES = "pays"
    NO = "below break-even"
    HOPELESS = "no drafter can pay here"
    BROKEN = "drafter broken"
    UNKNOWN = "undecided"


@dataclass(frozen=True)
class StepTime:
    """A step time in seconds, and how it is known: `measured`, `interpolated` or `extrapolated`."""

    seconds: float
    known: str
    between: tuple[float, float] | None = None


@dataclass(frozen=True)
class SpeculationAtLevel:
    """What the windows of one level say about speculation there; None where it cannot be known.

    `needed` is the break-even accept length, `ceiling` the best possible one, `drafts` the verify steps counted,
    `capped` that the server runs fewer requests than the level offers while some wait.
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

    @property
    def pays(self) -> Pays:
        """The reading of these figures, without regard to how much evidence a rule asks for."""
        if self.accept_len is None:
            return Pays.UNKNOWN
        if self.accept_len.high < 1 + BROKEN_WITHIN:
            return Pays.BROKEN
        if self.needed is None:
            return Pays.UNKNOWN
        if self.accept_len.high < self.needed:
            hopeless = self.ceiling is not None and self.needed > self.ceiling
            return Pays.HOPELESS if hopeless else Pays.NO
        return Pays.YES if self.accept_len.low > self.needed else Pays.UNKNOWN


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
    if len(known) == 1:
        return StepTime(points[known[0]], "extrapolated", (known[0], known[0]))
    above = next((i for i, x in enumerate(known) if x > running), len(known) - 1)
    right = max(1, above)
    a, b = known[right - 1], known[right]
    slope = (points[b] - points[a]) / (b - a)
    seconds = points[a] + slope * (running - a)
    if a <= running <= b:
        return StepTime(seconds, "interpolated", (a, b))
    nearest = points[a] if running < a else points[b]
    seconds = max(nearest, seconds) if running > b else max(seconds, nearest * 0.5)
    return StepTime(seconds, "extrapolated", (a, b))


def needed_accept_len(spec_step_s: float, base_step_s: float) -> float:
    """Given both step times at the same running requests, return the break-even accept length R."""
    return spec_step_s / base_step_s


def steady_windows(windows: tuple[Window, ...], concurrency: int, cap: int | None) -> tuple[Window, ...]:
    """Given a level's windows, return those in steady state: no prefill, not after idling, enough running.

    What can run is the level's concurrency or the server's cap, whichever is less; where no window says how many run,
    all count, since nothing contradicts them. Under a load of short requests nearly every window holds a prefill: with
    less than CLEAN_MIN without one all count, for the candidate as for the baseline, since it costs both the same.
    """
    target = min(concurrency, cap) if cap else concurrency
    seen_busy = max((w.running for w in windows if w.running is not None), default=None)
    if seen_busy is not None and any((w.queued or 0) > 0 for w in windows):
        target = min(target, round(seen_busy))
    # A gauge read between two requests of a stream misses one of them: at small levels that is more than the ratio.
    enough = min(STEADY_RATIO * target, target - 0.5)
    busy = [w for w in windows if not w.after_idle and (w.running is None or w.running >= enough)]
    clean = tuple(w for w in busy if not w.prefill)
    telling = [w for w in clean if w.gen_tok_s is not None or w.drafts]
    return clean if len(telling) >= min(CLEAN_MIN, len(busy)) else tuple(busy)


def decode_rate(windows: tuple[Window, ...]) -> tuple[float, float] | None:
    """Given steady windows, return (running, output tok/s) over those that state both; None if none does.

    Windows of known length are weighted by it, which makes the rate tokens over time; log lines give their medians, so
    that one line that spans a stall does not count more than the others.
    """
    both = [(w.running, w.gen_tok_s, w.seconds) for w in windows if w.running and w.gen_tok_s is not None]
    total_s = sum(s for _, _, s in both if s)
    if both and all(s for _, _, s in both):
        running = sum(r * s for r, _, s in both if s) / total_s
        rate = sum(g * s for _, g, s in both if s) / total_s
    elif both:
        running, rate = median([r for r, _, _ in both]), median([g for _, g, _ in both])
    else:
        return None
    return (running, rate) if rate > 0 else None


def assess(
    windows: tuple[Window, ...],
    concurrency: int,
    cap: int | None,
    speculation: Speculation,
    baseline_steps_s: dict[float, float],
) -> SpeculationAtLevel:
    """Given a level's windows and the baseline's step times, return what they say about speculation there.

    `baseline_steps_s` maps running requests to seconds a step of the plain server; empty if it was never measured.
    """
    steady = steady_windows(windows, concurrency, cap)
    accept_len, drafts = accept_length(steady)
    rate = decode_rate(steady)
    if rate is None or accept_len is None:
        return SpeculationAtLevel(
            accept_len=accept_len, ceiling=speculation.ceiling, drafts=drafts, windows=len(steady)
        )
    running, tok_s = rate
    step = step_time_s(running, accept_len.mean, tok_s)
    base = baseline_step(baseline_steps_s, running)
    return SpeculationAtLevel(
        running=running,
        capped=running < STEADY_RATIO * concurrency and any((w.queued or 0) >= 1 for w in windows),
        accept_len=accept_len,
        needed=needed_accept_len(step, base.seconds) if base else None,
        baseline_step=base,
        step_s=step,
        ceiling=speculation.ceiling,
        drafts=drafts,
        windows=len(steady),
    )


def accept_length(windows: tuple[Window, ...]) -> tuple[Interval | None, int]:
    """Given steady windows, return the accept length with a 95 % interval, and the verify steps it rests on.

    Where counters give verify steps, the mean is 1 + accepted/steps over all of them, which is exact; the interval
    comes from the spread between windows. Otherwise it is the mean of the printed values.
    """
    stated = [w for w in windows if w.accept_len is not None]
    drafts = sum(w.drafts for w in windows if w.drafts)
    if not stated:
        return None, drafts
    spread = mean_interval([w.accept_len for w in stated if w.accept_len is not None])
    counted = [w for w in stated if w.drafts and w.accepted is not None]
    mean = spread.mean
    if counted:
        mean = 1 + sum(w.accepted or 0 for w in counted) / sum(w.drafts or 0 for w in counted)
    half = (spread.high - spread.low) / 2
    if not drafts:
        # SGLang prints no count: a window covers 40 steps of each running request (--decode-log-interval).
        drafts = round(sum(40 * (w.running or 1) for w in stated))
    return Interval(mean, max(1.0, mean - half), mean + half), drafts


@dataclass(frozen=True)
class LossShares:
    """How the loss against the baseline at a level splits, in tok/s: the running cap's part and speculation's own."""

    total_tok_s: float
    cap_tok_s: float
    speculation_tok_s: float
    plain_at_cap_tok_s: float


def loss_shares(
    baseline_tok_s: float, measured_tok_s: float, running: float, base_step_at_running_s: float
) -> LossShares:
    """Given both rates at a level and the plain step time at what really ran, return the shares of the loss.

    A plain server held at the same running requests would give running / step; what lies between that and the baseline
    is the cap's share, the rest is speculation's. A faster level has negative shares, which say what was gained.
    """
    at_cap = min(running / base_step_at_running_s, baseline_tok_s)
    return LossShares(baseline_tok_s - measured_tok_s, baseline_tok_s - at_cap, at_cap - measured_tok_s, at_cap)
