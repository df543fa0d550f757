"""What another benchmark client left -> a level's samples, and why they must not be used. Pure.

Where a client tells when it sent each request, the level has a steady part as with our own: from the end of the last warm-up
request to the sending of the last request of all, after which streams fall idle. Where it does not, see `_placed`.
"""

import heapq
import json
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from autotuner.bench.benchmark import Benchmark, Level, level_name
from autotuner.bench.foreign import TITLES, Client, Order
from autotuner.bench.measurement import BIN_S, LevelSamples, RequestSample
from autotuner.bench.samples import GAP_US_MAX, METHOD, pack_gaps
from autotuner.bench.selfcheck import MERGED_RATIO_MAX
from autotuner.core.redact import one_line
from autotuner.core.statistics import quantile

ERROR_CHARS_MAX = 120
# Two events of one stream that are closer than this came out of one read: no server makes 10,000 tokens a second a stream,
# and clients that were the limit in measurements had median gaps of 0.00 to 0.02 ms.
MERGED_GAP_S = 0.0001
MERGED_VOID_RATIO = 0.5  # with more than half of the gaps gone, the median gap is nothing
PLACED_ERROR_MAX = 0.05  # how far the end that was worked out may be from the client's own duration
IN_FLIGHT_MIN = 0.8  # clients that could not keep up had 0.3 and 0.7 of the level in flight; all others above 0.9
RATE_ERROR_MAX = 0.1
DUE_BEFORE_MAX_S = 86_400.0
OTHER_LENGTH_MAX = 0.01
RETOKENISED_MIN = 0.5


class Imported(NamedTuple):
    """A level's samples, and why they must not be used; empty if they may."""

    samples: LevelSamples
    void: str


class _Request(NamedTuple):
    """One request: `times` are its token events', seconds like all else; `sent` is None where the client does not tell."""

    sent: float | None
    times: tuple[float, ...]  # from `sent` on
    end: float | None  # from `sent` on
    due: float | None = None
    prompt: int | None = None
    cached: int | None = None
    tokens: int | None = None
    error: str = ""
    cut: bool = False
    spread: bool = False  # only the first and the last event's time is known


class _Run(NamedTuple):
    requests: list[_Request]
    duration: float | None = None
    retokenised: int | None = None


def imported(benchmark: Benchmark, level: Level, order: Order, text: str) -> Imported:
    """Given a benchmark, a level, what was ordered and the text of the result, return the samples.

    Raise ValueError, which says what is wrong with the text, if it is no result of this client.
    """
    try:
        run = _READERS[order.client](text)
    except (KeyError, IndexError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{TITLES[order.client]} left a result of another form: {type(error).__name__} {error}"
        ) from None
    if not run.requests:
        raise ValueError(f"{TITLES[order.client]} left a result without requests; it must write each request's times")
    told = all(r.sent is not None for r in run.requests)
    requests = run.requests if told else _placed(benchmark, level, run)
    zero = min((r.sent for r in requests if r.sent is not None), default=0.0)
    requests = sorted((_from(r, zero, benchmark.load) for r in requests), key=lambda r: r.sent or 0.0)
    known = told or requests[-1].sent != 0.0 or len(requests) == 1
    steady = _steady(benchmark, order.warmup, requests) if known else _whole(run)
    samples = _samples(level, requests, steady, known=known)
    return Imported(samples, _void(benchmark, level, order, run, requests, samples, known=known))


def _from(r: _Request, zero: float, load: str) -> _Request:
    """A request with its times from the level's begin; what a client calls due is that in an open loop alone."""
    due = r.due - zero if r.due is not None and load == "request-rate" else None
    return r._replace(sent=(r.sent or 0.0) - zero, due=due)


# Each client's own file.


def _vllm(text: str) -> _Run:
    """`--save-result --save-detailed`: one JSON object with a list for each column; times are a monotonic clock's."""
    found = json.loads(text)
    starts, queued = found.get("start_times"), found.get("queue_times")
    requests = []
    for i, request in enumerate(_columns(found)):
        sent = starts[i] if starts else None
        due = sent - queued[i] if sent is not None and queued else None
        requests.append(request._replace(sent=sent, due=due))
    return _Run(requests, found.get("duration"))


def _sglang(text: str) -> _Run:
    """`--output-details`: one line of JSON a run, the newest last, with a list for each column; no send times."""
    found = json.loads(text.strip().splitlines()[-1])
    return _Run(_columns(found), found.get("duration"), found.get("total_output_tokens_retokenized"))


def _columns(found: dict[str, Any]) -> list[_Request]:
    """The requests of lists that vLLM and SGLang name alike; when each was sent is not among them."""
    requests = []
    for i, ttft in enumerate(found["ttfts"]):
        error = _last_line(found["errors"][i])
        tokens = found["output_lens"][i] or None
        failed = bool(error) or not ttft
        times = _times(ttft, found["itls"][i], tokens)
        requests.append(
            _Request(
                sent=None,
                times=times,
                end=None if failed else times[-1],
                prompt=found["input_lens"][i],
                tokens=None if failed else tokens,
                error=error or ("no token" if failed else ""),
            )
        )
    return requests


def _guidellm(text: str) -> _Run:
    """`kind=json`: each request's first and last token and their number; times are the wall clock's."""
    found = json.loads(text)["benchmarks"][0]["requests"]
    requests = []
    for r in (r for name in ("successful", "errored", "incomplete") for r in found.get(name) or []):
        at, cut = r["info"]["timings"], r["info"]["status"] == "cancelled"
        sent = at["request_start"] or at["resolve_start"]
        if sent is None:
            continue  # it was never sent
        first, last, count = at["first_token_iteration"], at["last_token_iteration"], at["token_iterations"]
        error = "" if cut else _last_line(r["info"]["error"] or "")
        end = at["request_end"] or at["resolve_end"]
        # Trap: its own figures divide by n tokens, not n - 1 gaps. Only its times are used.
        requests.append(
            _Request(
                sent=sent,
                due=_due(at["targeted_start"], sent),
                times=_evenly(first - sent, last - sent, count) if first is not None and count else (),
                end=None if cut or end is None else end - sent,
                prompt=r["input_metrics"]["total_tokens"],
                cached=r["input_metrics"]["cached_tokens"],
                tokens=None if cut or error else r["output_metrics"]["total_tokens"],
                error=error or ("no token" if first is None and not cut else ""),
                cut=cut,
                spread=True,
            )
        )
    return _Run(requests)


_READERS: dict[Client, Callable[[str], _Run]] = {"vllm": _vllm, "sglang": _sglang, "guidellm": _guidellm}


def _due(due: float | None, sent: float) -> float | None:
    """Trap: guidellm 0.8.1 counts requests that it queued before the start as due at the beginning of 1970."""
    return due if due is not None and sent - due < DUE_BEFORE_MAX_S else None


def _last_line(error: str) -> str:
    """The last line of a traceback says what happened; the lines above say where in the client."""
    lines = [line for line in error.splitlines() if line.strip()]
    return one_line(lines[-1])[:ERROR_CHARS_MAX] if lines else ""


def _times(ttft: float, gaps: list[float], tokens: int | None) -> tuple[float, ...]:
    """When each event came. An answer's last event may carry no token but its end: there are no more events than tokens."""
    if not ttft:
        return ()
    times = [ttft]
    for gap in gaps[: tokens - 1 if tokens else None]:
        times.append(times[-1] + gap)
    return tuple(times)


def _evenly(first: float, last: float, count: int) -> tuple[float, ...]:
    step = (last - first) / (count - 1) if count > 1 else 0.0
    return tuple(first + i * step for i in range(count))


# When.


def _placed(benchmark: Benchmark, level: Level, run: _Run) -> list[_Request]:
    """Work out when requests were sent that come without a time; return them without times where that cannot be.

    At a concurrency a client sends the next request, in order, when one of its streams is free: so each is put at the end of
    whichever earlier one ended first. That is believed only if it then ends when the client said that it did.
    """
    unknown = [r._replace(sent=0.0) for r in run.requests]
    if benchmark.load != "concurrency" or run.duration is None:
        return unknown
    free = [0.0] * min(int(level), len(run.requests))
    placed = []
    for request in run.requests:
        sent = heapq.heappop(free)
        heapq.heappush(free, sent + (request.end or 0.0))
        placed.append(request._replace(sent=sent))
    return placed if abs(max(free) - run.duration) <= PLACED_ERROR_MAX * run.duration else unknown


def _steady(benchmark: Benchmark, warmup: int, requests: list[_Request]) -> tuple[float, float] | None:
    """From when every warm-up request had ended to when the last request was sent; None if there is nothing between."""
    cold, counted = requests[:warmup], requests[warmup:]
    if not counted or any(r.cut for r in cold):
        return None
    start = max(((r.sent or 0.0) + (r.end or 0.0) for r in cold), default=0.0)
    start = max(start, benchmark.ramp_s)
    whole = math.floor(((counted[-1].sent or 0.0) - start) / BIN_S + 1e-9)
    return (start, start + whole * BIN_S) if whole > 0 else None


def _whole(run: _Run) -> tuple[float, float] | None:
    """Where nobody knows when, all of the run counts: with its start, in which all prompts come at once, and its end."""
    return (0.0, run.duration) if run.duration else None


def _samples(
    level: Level, requests: list[_Request], steady: tuple[float, float] | None, *, known: bool
) -> LevelSamples:
    start, end = steady or (math.inf, math.inf)
    moments = sorted((r.sent or 0.0) + at for r in requests for at in r.times)
    gaps = [(r, later - earlier) for r in requests if not r.spread for earlier, later in pairwise(r.times)]
    inside = [gap for r, gap in gaps if not known or start <= (r.sent or 0.0)]
    merged = _merged(inside)
    told = (
        merged <= MERGED_RATIO_MAX
    )  # another client does not say whether it was late, so merged gaps are never believed
    return LevelSamples(
        concurrency=level,
        steady_from_s=None if steady is None else round(start, 6),
        steady_to_s=None if steady is None else round(end, 6),
        requests=tuple(_sample(r) for r in requests),
        bins=_bins(moments, start, end, known=known) if steady else (),
        itl_ms=_quantiles_ms(inside) if told else {},
        gaps=pack_gaps([[min(GAP_US_MAX, round(1e6 * gap)) for _, gap in gaps]]) if told and gaps else "",
        merged_ratio=round(merged, 5),
        method=METHOD,
    )


def _sample(r: _Request) -> RequestSample:
    sent = r.sent or 0.0
    return RequestSample(
        sent_s=round(sent, 6),
        due_s=None if r.due is None else round(r.due, 6),
        first_s=round(sent + r.times[0], 6) if r.times else None,
        end_s=None if r.end is None else round(sent + r.end, 6),
        events=len(r.times),
        prompt_tokens=r.prompt,
        cached_tokens=r.cached,
        output_tokens=r.tokens,
        error=r.error,
        cut=r.cut,
    )


def _bins(moments: list[float], start: float, end: float, *, known: bool) -> tuple[int, ...]:
    bins = [0] * max(1, round((end - start) / BIN_S))
    if not known:
        # All in the first one: the rate of the whole run is right then, and its interval as wide as ignorance makes it.
        bins[0] = len(moments)
        return tuple(bins)
    for moment in moments:
        if start <= moment < end:
            bins[min(len(bins) - 1, int((moment - start) / BIN_S))] += 1
    return tuple(bins)


def _quantiles_ms(gaps: list[float]) -> dict[str, float]:
    if not gaps:
        return {}
    ordered = sorted(1000 * gap for gap in gaps)
    found = {"mean": sum(ordered) / len(ordered)}
    found |= {name: quantile(ordered, q) for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    return {name: round(value, 4) for name, value in found.items()}


def _merged(gaps: list[float]) -> float:
    return sum(gap < MERGED_GAP_S for gap in gaps) / len(gaps) if gaps else 0.0


# Whether it may be used.


def _void(
    benchmark: Benchmark,
    level: Level,
    order: Order,
    run: _Run,
    requests: list[_Request],
    samples: LevelSamples,
    *,
    known: bool,
) -> str:
    """Why the level must not be used; empty if it may."""
    title = TITLES[order.client]
    ended = [r for r in requests if not r.cut]
    good = [r for r in ended if not r.error]
    if not good:
        # Trap: these clients end with exit code 0 all the same, and print zeros.
        why = next((r.error for r in ended), "none ended")
        return f"all {len(requests)} requests of {title} failed: {why}"
    if samples.steady_from_s is None or samples.steady_to_s is None:
        return (
            f"{title} had sent all of its {len(requests)} requests before the {order.warmup} of the warm-up were answered, so "
            "nothing was steady: raise requests or seconds"
        )
    if samples.merged_ratio > MERGED_VOID_RATIO:
        # Trap: saturated clients print a median ITL of 0.00 as if it were a result, and their TTFT is wrong, too.
        return (
            f"the benchmark client was the limit: {100 * samples.merged_ratio:.0f} % of the gaps that {title} saw between "
            f"tokens are below {1000 * MERGED_GAP_S:g} ms, so several came out of one read"
        )
    steady = (samples.steady_from_s, samples.steady_to_s)
    failed_share = 1 - len(good) / len(ended)
    return (
        (
            _too_idle(level, title, requests, steady)
            if known and benchmark.load == "concurrency" and failed_share < 0.1
            else ""
        )
        or (_other_rate(level, title, requests) if known and benchmark.load == "request-rate" else "")
        or (_other_tokens(benchmark, title, run, good) if benchmark.ignore_eos else "")
    )


def _too_idle(level: Level, title: str, requests: list[_Request], steady: tuple[float, float]) -> str:
    """Trap: a client that starts requests too slowly never has as many in flight as it was told to, and does not say so."""
    start, end = steady
    busy = 0.0
    for r in requests:
        sent = r.sent or 0.0
        until = sent + r.end if r.end is not None else end
        busy += max(0.0, min(end, until) - max(start, sent))
    in_flight = busy / (end - start)
    if in_flight >= IN_FLIGHT_MIN * level:
        return ""
    return f"the benchmark client was the limit: {title} kept {in_flight:.0f} requests in flight, not {level:g}"


def _other_rate(level: Level, title: str, requests: list[_Request]) -> str:
    """Trap: guidellm 0.8.1 sent 131 requests in 3 s where 20 a second were asked for, arrivals poisson."""
    due = sorted(r.due if r.due is not None else r.sent or 0.0 for r in requests)
    if len(due) < 3 or due[-1] <= due[0]:
        return ""
    rate = (len(due) - 1) / (due[-1] - due[0])
    if abs(rate / level - 1) <= RATE_ERROR_MAX + 2 / math.sqrt(len(due)):
        return ""
    return f"{title} sent {rate:.1f} req/s where {level_name('request-rate', level)} were asked for"


def _other_tokens(benchmark: Benchmark, title: str, run: _Run, good: list[_Request]) -> str:
    """Trap: without a server's `usage` clients tokenise the text again, or count what was asked for."""
    asked = benchmark.output_tokens
    other = [r for r in good if r.tokens != asked]
    if len(other) > OTHER_LENGTH_MAX * len(good):
        return (
            f"{len(other)} of {len(good)} answers have other than the {asked} tokens asked for with ignore_eos: either "
            f"the server sends no usage and {title} counted by tokenising the text again, or it does not heed ignore_eos"
        )
    total = asked * len(good)
    if run.retokenised is not None and 0 < run.retokenised < RETOKENISED_MIN * total:
        return (
            f"{title} counts {total} output tokens because they were asked for, but the text that came has only "
            f"{run.retokenised}: the server seems not to heed ignore_eos"
        )
    return ""
