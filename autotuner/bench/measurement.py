"""A level's raw samples -> its figures, with intervals; and the lines in which the worker reports them. Pure.

Times are seconds since the level's load began, on the client's monotonic clock. Tokens come from `usage` where the
server sends it; an SSE event may carry several tokens, so events alone are never reported as tokens.
"""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from autotuner.bench.benchmark import Level, LoadKind, level_name
from autotuner.core.statistics import Interval, confidence_sequence, mean_interval, quantile, t95

BIN_S = 0.1  # width of the bins in which the worker counts token events


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RequestSample(_Record):
    """One request: when it was sent, its first token and its end; `cut` if the level's end cut it off.

    `due_s` is when an open loop meant to send it: its latencies count from there, so that a client or a cap that holds
    requests back cannot hide a slow server. `asked_tokens` is the output length that was asked for, `turn` its place in a
    conversation, `retried` tells that an idle connection was closed under it and it went out once more.
    """

    sent_s: float
    due_s: float | None = None
    first_s: float | None = None
    end_s: float | None = None
    events: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    asked_tokens: int | None = None
    turn: int = 0
    retried: bool = False
    error: str = ""
    cut: bool = False

    @property
    def began_s(self) -> float:
        """From when its latencies count."""
        return self.sent_s if self.due_s is None else self.due_s


class Progress(_Record):
    """What the worker says about twice a second while the load runs; `events` are those since the line before."""

    kind: Literal["progress"] = "progress"
    at_s: float
    phase: Literal["warm-up", "steady"]
    events: int
    in_flight: int
    done: int
    failed: int
    tokens_per_event: float = 1.0
    busy_ratio: float = 0.0  # of the busiest worker process's core: what it used and what it waited for


class LevelSamples(_Record):
    """Everything one level measured. `bins` counts token events per BIN_S from steady_from_s on.

    `itl_ms` is quantiles of the gaps between events in one stream, as {"mean": …, "p50": …, "p90": …, "p99": …}. `gaps` has the
    gaps themselves, in whole microseconds: for each request in turn, one for each of its events but the first, 0 for events
    that shared a read; unsigned 32 bit little endian, zlib, base64. So any figure can be computed again.

    About the client itself, in the steady part and of the worst of its `processes`: `cpu_ratio` is its share of a core,
    `waited_ratio` the share of time it was ready to run and something else ran instead, `lag_p99_ms` how late its loop ran,
    `merged_ratio` the share of events that shared one socket read with another, `read_delay_ms` how long bytes lay in the
    kernel before they were read (quantiles; empty where the kernel gave no times), `send_delay_ms` how late requests went out,
    `unread_bytes_max` the most that was seen waiting in its sockets, `kernel_stamps` tells that TTFT and gaps are the
    kernel's receive times, `capacity_tok_s` how many events a second one process can take, as calibrated on this host.
    """

    kind: Literal["samples"] = "samples"
    concurrency: Level
    load: LoadKind = "concurrency"
    steady_from_s: float | None = None
    steady_to_s: float | None = None
    stopped_early: bool = False
    requests: tuple[RequestSample, ...] = ()
    bins: tuple[int, ...] = ()
    itl_ms: dict[str, float] = Field(default_factory=dict)
    gaps: str = ""
    merged_ratio: float = 0.0
    lag_p99_ms: float = 0.0
    cpu_ratio: float = 0.0
    waited_ratio: float = 0.0
    read_delay_ms: dict[str, float] = Field(default_factory=dict)
    send_delay_ms: dict[str, float] = Field(default_factory=dict)
    unread_bytes_max: int = 0
    kernel_stamps: bool = False
    processes: int = 1
    capacity_tok_s: float | None = None


class GoodputLimits(_Record):
    """What makes a request good: the longest TTFT and TPOT, in milliseconds; None where that does not matter."""

    ttft_ms_max: float | None = None
    tpot_ms_max: float | None = None

    def __str__(self) -> str:
        pairs = (("TTFT", self.ttft_ms_max), ("TPOT", self.tpot_ms_max))
        return " and ".join(f"{name} up to {limit:g} ms" for name, limit in pairs if limit is not None)


class Figures(_Record):
    """The figures of one level. Rates in tokens per second, latencies in milliseconds, ratios 0..1.

    `concurrency` is the level, which is a number of requests in flight or, by its `load`, a rate. Latency tables hold mean,
    p50, p90 and p99 of the requests sent in the steady part. `void` says why a level must not
    be used, and is empty when it may. `drift_ratio` is by how much the rate changed from the first third of the steady part
    to its last (-0.1 is 10 % slower), None where it kept its rate as far as can be told. Goodput is in requests per second,
    under the limits that stand beside it; it is None where there were no limits, or no request ended in the steady part.
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
    void: str = ""
    drift_ratio: float | None = None
    goodput_limits: GoodputLimits | None = None
    goodput_req_s: float | None = None
    goodput_req_s_low: float | None = None
    goodput_req_s_high: float | None = None

    @property
    def level_name(self) -> str:
        """How a sentence names the level."""
        return level_name(self.load, self.concurrency)


# A level is void where the client was the limit. Fitted on runs against a null server: a saturated client's loop lag
# was above 20 ms at its 99th percentile in every run whose median ITL was wrong, and its core was full. Gaps between
# tokens are left out as soon as more than one event in twenty shared its read with another: their times are then the
# read's and not the tokens'. That happens well before the client limits the rate.
LAG_MS_MAX = 50.0
CPU_RATIO_MAX = 0.95
MERGED_RATIO_MAX = 0.05
# A smaller change within a level is not worth another launch: launches of one server differ by about as much.
DRIFT_MIN = 0.05
DRIFT_STRETCHES_MIN = 3  # a third; two would hardly have a variance


def figures(samples: LevelSamples) -> Figures:
    """Given a level's samples, return its figures; output tok/s counts the steady part alone, with a 95 % interval."""
    start, end = samples.steady_from_s, samples.steady_to_s
    seconds = max(0.0, end - start) if start is not None and end is not None else 0.0
    finished = [r for r in samples.requests if not r.cut]
    good = [r for r in finished if not r.error]
    failed = [r for r in finished if r.error]
    steady = [r for r in good if start is not None and r.sent_s >= start] or good
    per_event, counted = tokens_per_event(tuple(steady))
    if not counted:
        per_event, counted = tokens_per_event(samples.requests)
    latencies = _summary([1000 * (r.end_s - r.sent_s) for r in steady if r.end_s is not None])
    rate = _rate_interval(samples.bins, seconds, per_event, latencies.get("p50", 0.0) / 1000)
    prompts = [r.prompt_tokens for r in good if r.prompt_tokens is not None]
    cached = [r.cached_tokens for r in good if r.cached_tokens is not None]
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
        cache_hit_ratio=sum(cached) / sum(prompts) if cached and sum(prompts) else None,
        ttft_ms=_summary([1000 * (r.first_s - r.sent_s) for r in steady if r.first_s is not None]),
        tpot_ms=_summary([tpot for r in steady if (tpot := tpot_ms(r)) is not None]),
        e2e_ms=latencies,
        itl_ms=samples.itl_ms if samples.merged_ratio <= MERGED_RATIO_MAX else {},
        stopped_early=samples.stopped_early,
        client_lag_p99_ms=samples.lag_p99_ms,
        client_cpu_ratio=samples.cpu_ratio,
        client_limited=_client_limited(samples),
        void=_void(samples, seconds),
        drift_ratio=_drift(samples, seconds, per_event, latencies.get("p50", 0.0) / 1000),
    )


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
    two means with a pooled variance allows. With fewer than three stretches a third nothing can be told.
    """
    size = len(rates) // 3
    if size < DRIFT_STRETCHES_MIN:
        return None
    first, last = rates[:size], rates[-size:]
    before, after = sum(first) / size, sum(last) / size
    if before <= 0:
        return None
    squares = sum((r - before) ** 2 for r in first) + sum((r - after) ** 2 for r in last)
    band = t95(2 * size - 2) * math.sqrt(squares / (2 * size - 2) * 2 / size)
    change = after / before - 1
    return change if abs(change) >= DRIFT_MIN and abs(after - before) > band else None


def _drift(samples: LevelSamples, seconds: float, per_event: float, request_s: float) -> float | None:
    """Where the load is not kept in flight, its arrivals come and go, and the output with them: that is no drift."""
    if samples.load != "concurrency":
        return None
    return drift(_stretch_rates(samples.bins, seconds, per_event, request_s))


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


def _summary(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    names = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {"mean": sum(values) / len(values), **{name: quantile(ordered, q) for name, q in names.items()}}


def _counts(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}


def _client_limited(samples: LevelSamples) -> bool:
    return samples.lag_p99_ms > LAG_MS_MAX and samples.cpu_ratio > CPU_RATIO_MAX


def _void(samples: LevelSamples, seconds: float) -> str:
    if seconds <= 0:
        return "the load ended before its steady part began"
    if _client_limited(samples):
        return (
            f"the benchmark client was the limit: its event loop ran {samples.lag_p99_ms:.0f} ms late (p99) "
            f"and its core was {100 * samples.cpu_ratio:.0f} % busy"
        )
    return ""


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
