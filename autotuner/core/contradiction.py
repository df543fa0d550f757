"""A level's log against its metrics and its client: where two witnesses of one thing disagree, in sentences. Pure.

A contradiction decides nothing, but a person must know of it: it says that a figure is not what it seems, or that
somebody else uses the server.
"""

from autotuner.bench.measurement import Figures
from autotuner.core.speculation import accept_length
from autotuner.core.statistics import Interval, mean_interval
from autotuner.engines.base import Window

ACCEPT_RATIO = 0.05  # accept lengths further apart than this, and than their own noise, are not one
VERIFY_STEPS_MIN = 200  # on either side; below that an accept length is noise
RUNNING_RATIO = 0.10
RATE_RATIO = 0.10
WINDOWS_MIN = 3  # on either side, or a mean has no noise that is worth its name
EAGER_RATIO = 0.5  # of the decode lines; single ones fall off a graph at the edges of a level


def contradictions(
    log: list[Window], metrics: list[Window], figures: Figures, graph_max_batch: int | None
) -> tuple[str, ...]:
    """Given a level's steady windows from both sources and its figures, return what contradicts itself, a sentence each."""
    decode = [window for window in log if not window.prefill]
    found = (
        _accept_length(decode, metrics, figures),
        _running(decode, metrics),
        _rate(metrics, figures),
        _graphs(decode, graph_max_batch),
    )
    return tuple(sentence for sentence in found if sentence)


def _accept_length(log: list[Window], metrics: list[Window], figures: Figures) -> str:
    said, said_steps = accept_length(tuple(log))
    counted, counted_steps = _counted_length(metrics, figures)
    if said is None or counted is None or min(said_steps, counted_steps) < VERIFY_STEPS_MIN:
        return ""
    apart = abs(said.mean - counted.mean)
    if apart <= ACCEPT_RATIO * max(said.mean, counted.mean) or apart <= _half(said) + _half(counted):
        return ""
    return (
        f"the log says an accept length of {said.mean:.2f} over {said_steps} verify steps, the counters {counted.mean:.2f} "
        f"over {counted_steps}"
    )


def _counted_length(metrics: list[Window], figures: Figures) -> tuple[Interval | None, int]:
    """From counters of accepted tokens; or of all tokens, of which the first of each request comes from its prompt."""
    if any(window.accepted is not None for window in metrics):
        return accept_length(tuple(metrics))
    steps = sum(window.drafts or 0 for window in metrics)
    tokens = sum(window.counted or 0 for window in metrics)
    if not steps or not tokens:
        return None, 0
    mean = tokens * (1 - 1 / _tokens_per_request(figures)) / steps
    return Interval(mean, mean, mean), steps


def _running(log: list[Window], metrics: list[Window]) -> str:
    """Data-parallel ranks print a line each, of their own requests alone."""
    by_rank: dict[str, list[float]] = {}
    for window in log:
        if window.running is not None:
            by_rank.setdefault(window.rank, []).append(window.running)
    scraped = [window.running for window in metrics if window.running is not None]
    if not by_rank or min(len(scraped), *map(len, by_rank.values())) < WINDOWS_MIN:
        return ""
    means = [mean_interval(values) for values in by_rank.values()]
    said, counted = sum(mean.mean for mean in means), mean_interval(scraped)
    apart, noise = abs(said - counted.mean), sum(map(_half, means)) + _half(counted)
    if apart <= max(1.0, RUNNING_RATIO * max(said, counted.mean), noise):
        return ""
    return f"the log says that {said:.0f} requests run, the metrics {counted.mean:.0f}"


def _rate(metrics: list[Window], figures: Figures) -> str:
    """Some servers raise their counter when a request ends: then as many requests as run are at the edges of the time.

    While a level runs the client counts events and guesses how many tokens each carries, from the few requests that have
    ended; where the finished level's `usage` tells, that is what it saw, if it is less far off than the guess.
    """
    timed = [w for w in metrics if w.counted is not None and w.gen_tok_s is not None and w.seconds]
    seconds = sum(w.seconds or 0.0 for w in timed)
    seen = sum((w.gen_tok_s or 0.0) * (w.seconds or 0.0) for w in timed)
    counted = sum(w.counted or 0 for w in timed)
    if len(timed) < WINDOWS_MIN or seen <= 0 or counted <= 0:
        return ""
    told = figures.output_tok_s * seconds
    if figures.tokens_counted and abs(counted - told) < abs(counted - seen):
        seen = told
    edges = _in_flight(metrics, figures) * _tokens_per_request(figures) / seen
    if abs(counted - seen) <= max(RATE_RATIO, edges) * max(counted, seen):
        return ""
    other = "somebody else may use the server" if counted > seen else "its counter or the client's count is wrong"
    return f"the server counted {counted / seconds:.0f} generated tokens a second, the client {seen / seconds:.0f}: {other}"


def _in_flight(metrics: list[Window], figures: Figures) -> float:
    """The requests in flight at once: the concurrency, and at a rate the most that the server told of, or very many."""
    if figures.load == "concurrency":
        return figures.concurrency
    return max(((w.running or 0.0) + (w.queued or 0.0) for w in metrics if w.running is not None), default=1e9)


def _graphs(log: list[Window], graph_max_batch: int | None) -> str:
    """Only where the batch fits: larger ones, and graphs that are off, are a difference to what was asked."""
    if not graph_max_batch:
        return ""
    fits = [w for w in log if w.graph is not None and w.running is not None and w.running <= graph_max_batch]
    eager = [w for w in fits if not w.graph]
    if len(fits) < WINDOWS_MIN or len(eager) < EAGER_RATIO * len(fits):
        return ""
    return (
        f"{len(eager)} of {len(fits)} decode lines say that no CUDA graph was used, although graphs for up to "
        f"{graph_max_batch} requests were captured"
    )


def _tokens_per_request(figures: Figures) -> float:
    """Output tokens of one request, at least two; very many where none was answered, so that nothing is concluded."""
    if not figures.requests_ok or figures.output_tok_s <= 0:
        return 1e9
    return max(2.0, figures.output_tok_s * figures.seconds / figures.requests_ok)


def _half(interval: Interval) -> float:
    return (interval.high - interval.low) / 2
