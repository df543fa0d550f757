"""A level's raw samples -> its figures, with intervals. Pure.

Times are seconds since the level's load began, on the client's monotonic clock. Tokens come from `usage` where the
server sends it; an SSE event may carry several tokens, so events alone are never reported as tokens.
"""

import math
from collections.abc import Callable

from pydantic import Field

from autotuner.bench.benchmark import Level, LoadKind, level_name
from autotuner.bench.latency import clustered, summary
from autotuner.bench.samples import BIN_S, LevelSamples, Progress, RequestSample, Values, steady_gaps_us
from autotuner.bench.selfcheck import blurred, client_limit, shared
from autotuner.core.statistics import Interval, confidence_sequence, mean_interval, quantile, t95

__all__ = [
    "BIN_S",
    "TOO_FEW",
    "TOO_MANY",
    "USAGE_MISSING",
    "Figures",
    "GoodputLimits",
    "LevelSamples",
    "Progress",
    "RequestSample",
    "drift",
    "figures",
    "interim_figures",
    "request_rate",
    "steady_rates",
    "stretches",
    "tokens_per_event",
    "tpot_ms",
]


class GoodputLimits(Values):
    """What makes a request good: the longest TTFT and TPOT, in milliseconds; None where that does not matter."""

    ttft_ms_max: float | None = None
    tpot_ms_max: float | None = None

    def __str__(self) -> str:
        pairs = (("TTFT", self.ttft_ms_max), ("TPOT", self.tpot_ms_max))
        return " and ".join(f"{name} up to {limit:g} ms" for name, limit in pairs if limit is not None)


class Figures(Values):
    """The figures of one level. Rates in tokens or requests per second, latencies in milliseconds, ratios 0..1.

    `concurrency` is the level, which is a number of requests in flight or, by its `load`, a rate. Latency tables hold mean,
    p50, p90 and p99 of the requests that began in the steady part, each with its 95 % interval as
    `p50_low` and `p50_high`; a bound that so few requests cannot give is left out. `void` says why a level must not be used,
    and is empty when it may. `drift_ratio` is by how much the rate changed from the first third of the steady part
    to its last (-0.1 is 10 % slower), None where it kept its rate as far as can be told. Goodput is in requests per second,
    under the limits that stand beside it; it is None where there were no limits, or no request ended in the steady part.

    `answered_req_s` counts the requests that ended well in the steady part. `total_tok_s` is the output rate and these
    requests' whole prompts, cached tokens included, a prompt where its request ended; None where `usage` did not tell
    all of them. `usage_problems` counts requests whose `usage` is missing, has more tokens than were asked for, or fewer
    although `ignore_eos` was; what came out longer or shorter is in no TPOT and no E2E. `send_late_ms` is how long after
    their intended time an open loop's requests went out. `client_note` says what is left out because the client was late,
    `prompts_said` what the lengths of synthetic prompts rest on. `load_from` says which way the load came to a server on
    another machine than the daemon's. `unsettled_s` is what was left out of the steady part because the rate rose after it.
    `client_cores` are those that the client was bound to, `client_placed` says why these,
    `client_shared` what it took of the cores that the server may use; that is empty where it was next to nothing.
    """

    concurrency: Level
    load: LoadKind = "concurrency"
    seconds: float
    requests_ok: int
    requests_failed: int
    errors: dict[str, int] = Field(default_factory=dict)
    output_tok_s: float
    output_tok_s_low: float
    output_tok_s_high: float
    tokens_per_event: float
    tokens_counted: bool
    prompt_tokens_mean: float | None = None
    cache_hit_ratio: float | None = None
    ttft_ms: dict[str, float] = Field(default_factory=dict)
    tpot_ms: dict[str, float] = Field(default_factory=dict)
    e2e_ms: dict[str, float] = Field(default_factory=dict)
    itl_ms: dict[str, float] = Field(default_factory=dict)
    stopped_early: bool = False
    client_lag_p99_ms: float = 0.0
    client_cpu_ratio: float = 0.0
    client_limited: bool = False
    client_note: str = ""
    prompts_said: str = ""
    load_from: str = ""
    unsettled_s: float = 0.0
    client_cores: tuple[int, ...] = ()
    client_placed: str = ""
    client_shared: str = ""
    void: str = ""
    drift_ratio: float | None = None
    goodput_limits: GoodputLimits | None = None
    goodput_req_s: float | None = None
    goodput_req_s_low: float | None = None
    goodput_req_s_high: float | None = None
    answered_req_s: float | None = None
    answered_req_s_low: float | None = None
    answered_req_s_high: float | None = None
    total_tok_s: float | None = None
    prompt_tokens_min: int | None = None
    prompt_tokens_max: int | None = None
    ignore_eos: bool = False
    usage_problems: dict[str, int] = Field(default_factory=dict)
    requests_retried: int = 0
    send_late_ms: dict[str, float] = Field(default_factory=dict)

    @property
    def level_name(self) -> str:
        """How a sentence names the level."""
        return level_name(self.load, self.concurrency)


# A smaller change within a level is not worth another launch: launches of one server differ by about as much.
DRIFT_MIN = 0.05
DRIFT_STRETCHES_MIN = 3  # a third; two would hardly have a variance
# Kendall's S (1938), which 5 to 8 values in random order reach, either way, with a probability of at most 0.05.
TREND_MIN = {5: 10, 6: 13, 7: 15, 8: 18}


USAGE_MISSING = "usage is missing"
TOO_MANY = "more tokens than asked for"
TOO_FEW = "fewer tokens than asked for, although ignore_eos"


def figures(samples: LevelSamples, *, ignore_eos: bool = False) -> Figures:
    """Given a level's samples, return its figures; output tok/s counts the steady part alone, with a 95 % interval.

    `ignore_eos` says that answers had to have the length that was asked for.
    """
    seconds = _steady_s(samples)
    finished = [r for r in samples.requests if not r.cut]
    good = [r for r in finished if not r.error]
    failed = [r for r in finished if r.error]
    steady = [r for r in good if _began_steady(r, samples)] or good
    per_event, counted = tokens_per_event(tuple(steady))
    if not counted:
        per_event, counted = tokens_per_event(samples.requests)
    as_asked = [r for r in steady if _problem(r, ignore_eos=ignore_eos) not in {TOO_MANY, TOO_FEW}]
    latencies = summary([1000 * (r.end_s - r.began_s) for r in as_asked if r.end_s is not None])
    request_s = latencies.get("p50", 0.0) / 1000
    rate = _rate_interval(samples.bins, seconds, per_event, request_s)
    prompts = [r.prompt_tokens for r in good if r.prompt_tokens is not None]
    cached = [r.cached_tokens for r in good if r.cached_tokens is not None]
    answered = request_rate(samples, lambda _: True)
    limit = client_limit(samples)
    return Figures(
        concurrency=samples.concurrency,
        load=samples.load,
        seconds=round(seconds, 3),
        requests_ok=len(good),
        requests_failed=len(failed),
        errors=_counts([r.error for r in failed]),
        output_tok_s=rate.mean,
        output_tok_s_low=rate.low,
        output_tok_s_high=rate.high,
        tokens_per_event=per_event,
        tokens_counted=counted,
        prompt_tokens_mean=sum(prompts) / len(prompts) if prompts else None,
        prompt_tokens_min=min(prompts, default=None),
        prompt_tokens_max=max(prompts, default=None),
        cache_hit_ratio=sum(cached) / sum(prompts) if cached and sum(prompts) else None,
        ttft_ms=summary([1000 * (r.first_s - r.began_s) for r in steady if r.first_s is not None]),
        tpot_ms=summary([tpot for r in as_asked if (tpot := tpot_ms(r)) is not None]),
        e2e_ms=latencies,
        itl_ms=_itl(samples),
        stopped_early=samples.stopped_early,
        client_lag_p99_ms=samples.lag_p99_ms,
        client_cpu_ratio=samples.cpu_ratio,
        client_limited=bool(limit),
        client_note=blurred(samples),
        prompts_said=samples.prompts_said,
        unsettled_s=samples.unsettled_s,
        client_cores=samples.placed.cores if samples.placed else (),
        client_placed=samples.placed.said if samples.placed else "",
        client_shared=shared(samples),
        void=limit if seconds > 0 else "the load ended before its steady part began",
        drift_ratio=_drift(samples, seconds, per_event, request_s),
        answered_req_s=answered.mean if answered else None,
        answered_req_s_low=answered.low if answered else None,
        answered_req_s_high=answered.high if answered else None,
        total_tok_s=_total(samples, rate.mean),
        ignore_eos=ignore_eos,
        usage_problems=_counts([p for r in good if (p := _problem(r, ignore_eos=ignore_eos))]),
        requests_retried=sum(r.retried for r in finished),
        send_late_ms=summary([1000 * (r.sent_s - r.due_s) for r in steady if r.due_s is not None]),
    )


def _began_steady(request: RequestSample, samples: LevelSamples) -> bool:
    """Whether a request's latencies count: of those that began after the steady part only the short ones are over yet."""
    start, end = samples.steady_from_s, samples.steady_to_s
    return start is not None and start <= request.began_s and (end is None or request.began_s <= end)


def request_rate(samples: LevelSamples, counts: Callable[[RequestSample], bool]) -> Interval | None:
    """Given a level's samples and which requests count, return how many a second were answered, with a 95 % interval.

    A request counts where it ended, so that long ones are not lost at the level's end, and never one that failed. None where
    no request ended in the steady part. The interval is of batch means over stretches as for output tok/s, and never
    narrower than one request more or less, since a count is not known better than that at its edges.
    """
    start, seconds = samples.steady_from_s, _steady_s(samples)
    ended = _ended(samples)
    if start is None or not ended:
        return None
    lasted = quantile(sorted(end_s - r.began_s for r, end_s in ended), 0.5)
    count = stretches(seconds, lasted)
    at = [end_s - start for r, end_s in ended if not r.error and counts(r)]
    per_stretch = [0] * count
    for at_s in at:
        per_stretch[min(count - 1, math.floor(at_s / seconds * count))] += 1
    spread = mean_interval([n * count / seconds for n in per_stretch])
    half = max((spread.high - spread.low) / 2, 1 / seconds)
    rate = len(at) / seconds
    return Interval(rate, max(0.0, rate - half), rate + half)


def _steady_s(samples: LevelSamples) -> float:
    start, end = samples.steady_from_s, samples.steady_to_s
    return max(0.0, end - start) if start is not None and end is not None else 0.0


def _ended(samples: LevelSamples) -> list[tuple[RequestSample, float]]:
    """The requests that ended in the steady part, well or not, each with its end."""
    start, end = samples.steady_from_s, samples.steady_to_s
    if start is None or end is None or end <= start:
        return []
    return [(r, r.end_s) for r in samples.requests if not r.cut and r.end_s is not None and start <= r.end_s <= end]


def _total(samples: LevelSamples, output_tok_s: float) -> float | None:
    prompts = [r.prompt_tokens for r, _ in _ended(samples) if not r.error]
    known = [tokens for tokens in prompts if tokens is not None]
    if not known or len(known) < len(prompts):
        return None
    return output_tok_s + sum(known) / _steady_s(samples)


def _itl(samples: LevelSamples) -> dict[str, float]:
    if blurred(samples):
        return {}
    return samples.itl_ms or itl_table(samples)


def itl_table(samples: LevelSamples) -> dict[str, float]:
    """Given a level's samples, return the table of the gaps between a stream's events in its steady part, in milliseconds.

    The worker does this once, in its own process: it takes about a second for a million gaps.
    """
    return clustered(steady_gaps_us(samples), 0.001)


def _problem(request: RequestSample, *, ignore_eos: bool) -> str:
    """What is wrong with the token count of an answered request; empty where nothing is, or nobody can tell."""
    if request.output_tokens is None:
        return USAGE_MISSING
    if request.asked_tokens is None:
        return ""
    if request.output_tokens > request.asked_tokens:
        return TOO_MANY
    return TOO_FEW if ignore_eos and request.output_tokens < request.asked_tokens else ""


def tokens_per_event(requests: tuple[RequestSample, ...]) -> tuple[float, bool]:
    """Given the requests, return how many tokens an event carried on average, and whether `usage` was there to tell."""
    counted = [r for r in requests if r.output_tokens is not None and r.events and not r.error]
    events = sum(r.events for r in counted)
    return (sum(r.output_tokens or 0 for r in counted) / events, True) if events else (1.0, False)


def _rate_interval(bins: tuple[int, ...], seconds: float, per_event: float, request_s: float) -> Interval:
    """Batch means: neighbouring tokens are not independent, but stretches as long as a request nearly are."""
    rates = _stretch_rates(bins, seconds, per_event, request_s)
    if not rates:
        return Interval(0.0, 0.0, 0.0)
    total = sum(bins) * per_event / seconds
    interval = mean_interval(rates)
    half = (interval.high - interval.low) / 2
    return Interval(total, max(0.0, total - half), total + half)


def _stretch_rates(bins: tuple[int, ...], seconds: float, per_event: float, request_s: float) -> list[float]:
    if not bins or seconds <= 0:
        return []
    batches = stretches(seconds, request_s)
    size = len(bins) / batches
    rates = []
    for i in range(batches):
        piece = bins[math.floor(i * size) : math.floor((i + 1) * size)]
        if piece:
            rates.append(sum(piece) * per_event / (len(piece) * BIN_S))
    return rates


def drift(rates: list[float]) -> float | None:
    """Given the rates of a level's stretches in order, return by how much the last third differs from the first.

    None unless that is at least DRIFT_MIN of the first third's mean and more than Student's 95 % band for the difference of
    two means with a pooled variance allows. Where a third has fewer than three stretches, their order must tell (Mann 1945);
    with fewer than five nothing does.
    """
    size = len(rates) // 3
    if not size or not sum(rates[:size]):
        return None
    first, last = rates[:size], rates[-size:]
    before, after = sum(first) / size, sum(last) / size
    if size < DRIFT_STRETCHES_MIN:
        sure = abs(_order(rates)) >= TREND_MIN.get(len(rates), math.inf)
    else:
        squares = sum((r - before) ** 2 for r in first) + sum((r - after) ** 2 for r in last)
        sure = abs(after - before) > t95(2 * size - 2) * math.sqrt(squares / (2 * size - 2) * 2 / size)
    change = after / before - 1
    return change if sure and abs(change) >= DRIFT_MIN else None


def _order(values: list[float]) -> int:
    """Kendall's S: the pairs that rise less those that fall."""
    return sum((b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :])


def _drift(samples: LevelSamples, seconds: float, per_event: float, request_s: float) -> float | None:
    """Where the load is not kept in flight, its arrivals come and go, and the output with them: that is no drift."""
    if samples.load != "concurrency":
        return None
    rates = _stretch_rates(samples.bins, seconds, per_event, request_s)
    return drift(rates) if samples.method or len(rates) >= 3 * DRIFT_STRETCHES_MIN else None


def stretches(seconds: float, request_s: float) -> int:
    """Given a level's steady time and a request's median duration, return into how many stretches to cut it for a spread.

    A stretch is at least a second and at least a request, so that each holds prompts and answers in their usual mix; at
    least 3 and at most 30 are made.
    """
    return max(3, min(30, int(seconds / max(1.0, request_s))))


def tpot_ms(r: RequestSample) -> float | None:
    """Given a request, return the mean time between its tokens after the first; None where it has fewer than two."""
    tokens = r.output_tokens or r.events
    if r.first_s is None or r.end_s is None or tokens < 2:
        return None
    return 1000 * (r.end_s - r.first_s) / (tokens - 1)


def _counts(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}


def interim_figures(
    concurrency: Level, progress: list[Progress], alpha: float = 0.05, load: LoadKind = "concurrency"
) -> Figures:
    """Given what the worker has said so far, return figures good enough to decide on while the load runs.

    Rates are over the steady part; their bounds come from stretches of at least a second, hold at every look with
    probability 1 - alpha, and are infinite before there are enough of them. Latencies are left to the end.
    """
    steady, start = _steady(progress)
    last = progress[-1] if progress else None
    per_event = last.tokens_per_event if last else 1.0
    seconds = max(0.0, steady[-1].at_s - start) if steady else 0.0
    interval = confidence_sequence(steady_rates(progress), alpha)
    total = sum(p.events for p in steady) * per_event / seconds if seconds > 0 else 0.0
    half = (interval.high - interval.low) / 2
    return Figures(
        concurrency=concurrency,
        load=load,
        seconds=seconds,
        requests_ok=last.done if last else 0,
        requests_failed=last.failed if last else 0,
        output_tok_s=total,
        output_tok_s_low=max(0.0, total - half),
        output_tok_s_high=total + half,
        tokens_per_event=per_event,
        tokens_counted=per_event != 1.0,
    )


def steady_rates(progress: list[Progress]) -> list[float]:
    """Given what the worker has said so far, return output tok/s over consecutive stretches of a second or more."""
    steady, since = _steady(progress)
    per_event = progress[-1].tokens_per_event if progress else 1.0
    rates, events = [], 0
    for p in steady:
        events += p.events
        if p.at_s - since >= 1.0:
            rates.append(events * per_event / (p.at_s - since))
            events, since = 0, p.at_s
    return rates


def _steady(progress: list[Progress]) -> tuple[list[Progress], float]:
    """The lines of the steady part, and the second at which it began."""
    steady = [p for p in progress if p.phase == "steady"]
    before = next((p for p in reversed(progress) if p.phase == "warm-up"), None)
    return steady, before.at_s if before else (steady[0].at_s if steady else 0.0)
