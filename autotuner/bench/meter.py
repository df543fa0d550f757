"""What a level counts while it runs: a record a request, token events per bin, gaps in a histogram. Pure."""

import json
import math
from dataclasses import dataclass, field

from autotuner.bench.measurement import BIN_S, RequestSample

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(slots=True, eq=False)
class Record:
    """One request as it happens; times on the clock of the load."""

    sent: float
    first: float | None = None
    last: float = 0.0  # of the latest token event
    end: float | None = None
    events: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""
    detail: str = ""  # what the server said about the error
    cut: bool = False

    def read_usage(self, event: bytes) -> None:
        """Given the data of an event with token counts, take them over; what makes no sense stays unknown."""
        try:
            usage = json.loads(event)["usage"]
            details = usage.get("prompt_tokens_details") or {}
            self.prompt_tokens = _count(usage.get("prompt_tokens"))
            self.output_tokens = _count(usage.get("completion_tokens"))
            self.cached_tokens = _count(details.get("cached_tokens"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return

    def sample(self, zero: float) -> RequestSample:
        """Given the instant when the load began, return the record as it is reported."""
        return RequestSample(
            sent_s=_us(self.sent - zero),
            first_s=None if self.first is None else _us(self.first - zero),
            end_s=None if self.end is None else _us(self.end - zero),
            events=self.events,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            error=self.error,
            cut=self.cut,
        )


class Histogram:
    """Durations in buckets, so that a day of load needs no more memory than a second of it.

    Buckets are 2 us wide up to 0.2 s and 0.2 % wide above: exact enough for a client that is late by more than that.
    """

    _FINE = 100_000
    _FINE_PER_S = 500_000
    _FINE_END_S = _FINE / _FINE_PER_S
    _COARSE = 0.002

    def __init__(self) -> None:
        self._fine = [0] * self._FINE
        self._coarse: dict[int, int] = {}

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a duration."""
        index = int(seconds * self._FINE_PER_S)
        if index < self._FINE:
            self._fine[index] += times
            return
        index = int(math.log(seconds / self._FINE_END_S) / self._COARSE)
        self._coarse[index] = self._coarse.get(index, 0) + times

    def quantiles(self) -> dict[str, float]:
        """Return p50, p90 and p99 in milliseconds; empty if nothing was counted."""
        total = sum(self._fine) + sum(self._coarse.values())
        if not total:
            return {}
        return {name: round(1000 * self._at(q * (total - 1)), 4) for name, q in _QUANTILES.items()}

    def _at(self, rank: float) -> float:
        seen = 0
        for index, count in enumerate(self._fine):
            seen += count
            if seen > rank:
                return (index + 0.5) / self._FINE_PER_S if index else 0.0
        for index in sorted(self._coarse):
            seen += self._coarse[index]
            if seen > rank:
                break
        return self._FINE_END_S * math.exp((index + 0.5) * self._COARSE)


@dataclass(slots=True)
class Meter:
    """The counters of one level. Only what comes from `steady_from` on goes into bins, gaps and `merged`."""

    events: int = 0
    steady_from: float | None = None
    bins: list[int] = field(default_factory=list)
    gaps: Histogram = field(default_factory=Histogram)
    merged: int = 0  # events that came in one read with another of the same stream
    usage_tokens: int = 0
    usage_events: int = 0
    _bin_end: float = 0.0

    def tokens(self, record: Record, now: float, count: int) -> None:
        """Given a request and the instant of a read, count the token events that the read brought."""
        self.events += count
        record.events += count
        before, record.last = record.last, now
        if record.first is None:
            record.first = now
        elif self.steady_from is not None:
            self.gaps.add(now - before)
        if self.steady_from is not None:
            if now >= self._bin_end:
                self._open_bin(now, self.steady_from)
            self.bins[-1] += count
            if count > 1:
                self.merged += count
                self.gaps.add(0.0, count - 1)

    def _open_bin(self, now: float, start: float) -> None:
        count = int((now - start) / BIN_S) + 1
        self.bins.extend([0] * (count - len(self.bins)))
        self._bin_end = start + count * BIN_S

    def finished(self, record: Record) -> None:
        """Given a request that ended well, learn from it how many tokens an event carries."""
        if record.output_tokens is not None and record.events:
            self.usage_tokens += record.output_tokens
            self.usage_events += record.events

    @property
    def tokens_per_event(self) -> float:
        """The average so far; 1 as long as no server told."""
        return self.usage_tokens / self.usage_events if self.usage_events else 1.0

    @property
    def merged_ratio(self) -> float:
        """The share of the steady part's events that shared a read."""
        total = sum(self.bins)
        return self.merged / total if total else 0.0

    def whole_bins(self, now: float) -> tuple[int, ...]:
        """Given the end of the steady part, return its whole bins: one cut short would look like a slump."""
        if self.steady_from is None:
            return ()
        # A timer may fire a little early; a bin that lacks less than a twentieth is whole.
        count = int((now - self.steady_from) / BIN_S + 0.05)
        return tuple((self.bins + [0] * (count - len(self.bins)))[:count])


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _us(seconds: float) -> float:
    return round(seconds, 6)
