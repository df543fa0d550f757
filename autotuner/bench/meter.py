"""What a level counts while it runs: the times of each request's token events, packed as soon as it is over. Pure."""

import base64
import json
import zlib
from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import islice, pairwise
from operator import sub
from typing import Any

from autotuner.bench.samples import BIG_ENDIAN, BIN_S, GAP_US_MAX, RequestSample
from autotuner.core.statistics import quantile

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
DELAY_EVERY = 16  # of so many reads one has its delay kept: enough for a 99th percentile, and cheap
_ENCODED_MIN = 1 << 14


@dataclass(slots=True, eq=False)
class Record:
    """One request as it happens; times on the clock of the load. `times` has one for each token event."""

    sent: float
    due: float | None = None
    times: "array[float]" = field(default_factory=lambda: array("d"))
    first: float | None = None  # with `events` what is kept of `times` once the record is archived
    events: int = 0
    end: float | None = None
    merged_at: "array[float]" = field(default_factory=lambda: array("d"))  # reads that brought several events,
    merged: "array[int]" = field(default_factory=lambda: array("L"))  # and how many
    asked_tokens: int | None = None
    turn: int = 0
    retried: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""
    detail: str = ""  # what the server said about the error
    cut: bool = False
    said: bytes = b""  # the data of the event that has the token counts, until they are read from it
    heard: list[bytes] | None = None  # the events with text, where the answer itself is needed

    def add(self, at: float, count: int) -> None:
        """Given the instant of a read, note the token events that it brought."""
        if count > 1:
            self.times.extend([at] * count)
            self.merged_at.append(at)
            self.merged.append(count)
        elif count:
            self.times.append(at)

    def read_usage(self) -> None:
        """Take over the token counts of what the server said; what makes no sense stays unknown."""
        event, self.said = self.said, b""
        try:
            usage = json.loads(event)["usage"]
            details = usage.get("prompt_tokens_details") or {}
            self.prompt_tokens = _count(usage.get("prompt_tokens"))
            self.output_tokens = _count(usage.get("completion_tokens"))
            self.cached_tokens = _count(details.get("cached_tokens"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return

    def text(self) -> str:
        """Return what the server said, where it was kept."""
        return "".join(_text_of(event) for event in self.heard or ())

    def sample(self, zero: float) -> RequestSample:
        """Given the instant when the load began, return the record, archived, as it is reported.

        All fields are ours, so that nothing needs checking; and samples that share the set of their fields' names take half
        the memory.
        """
        return RequestSample.model_construct(
            _FIELDS,
            sent_s=_us(self.sent - zero),
            due_s=None if self.due is None else _us(self.due - zero),
            first_s=None if self.first is None else _us(self.first - zero),
            end_s=None if self.end is None else _us(self.end - zero),
            events=self.events,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            asked_tokens=self.asked_tokens,
            turn=self.turn,
            retried=self.retried,
            error=self.error,
            cut=self.cut,
        )


_FIELDS = set(RequestSample.model_fields)
_NONE: "array[Any]" = array("d")  # what archived records share


class Meter:
    """The counts of one level. A record comes to `archive` when it is over, and only its gaps are kept, packed.

    Only what comes between `steady_from` and `steady_to` goes into bins and `merged`.
    """

    def __init__(self) -> None:
        self.steady_from: float | None = None
        self.steady_to: float | None = None
        self.events = 0  # of the records archived
        self.bins: list[int] = []
        self.merged = 0  # events that came in one read with another of the same stream
        self.read_delays: array[float] = array("d")
        self.send_delays: array[float] = array("d")
        self.stamped = False  # a read's time was the kernel's
        self.usage_tokens = 0
        self.usage_events = 0
        self._records: deque[Record] = deque()
        self._packer = zlib.compressobj(1)
        self._packed = bytearray()  # not yet base64, which takes three bytes at a time
        self._encoded = bytearray()

    def begin(self, at: float) -> None:
        """Given the instant at which the steady part begins, count from there."""
        self.steady_from = at
        del self.read_delays[:]

    def end(self, at: float) -> None:
        """Given the instant at which the steady part ends, count until there."""
        self.steady_to = at
        self.read_delays = self.read_delays[:]  # connections go on with the one they were given

    def archive(self, record: Record, zero: float) -> None:
        """Given a record that is over, take its counts and pack its times; it has none afterwards."""
        if record.said:
            record.read_usage()  # not as soon as it ends: its stream goes on first
        times = record.times
        record.first, record.events = times[0] if times else None, len(times)
        self._records.append(record)
        self.events += len(times)
        if record.output_tokens is not None and times and not record.error and not record.cut:
            self.usage_tokens += record.output_tokens
            self.usage_events += len(times)
        if self.steady_from is not None:
            self._count(times, self.steady_from)
            start, end = bisect_left(record.merged_at, self.steady_from), len(record.merged)
            if self.steady_to is not None:
                end = bisect_left(record.merged_at, self.steady_to)
            self.merged += sum(record.merged[start:end])
        self._keep(self._packer.compress(_gaps(times, zero)))
        record.times = record.merged_at = record.merged = _NONE

    def samples(self, zero: float) -> tuple[RequestSample, ...]:
        """Return the records archived, as they are reported; to be called once, at the end."""
        found = []
        while self._records:
            found.append(self._records.popleft().sample(zero))
        return tuple(found)

    def is_steady(self, at: float) -> bool:
        """Tell whether an instant is in the steady part, as far as that is known by now."""
        return (
            self.steady_from is not None and at >= self.steady_from and (self.steady_to is None or at < self.steady_to)
        )

    def _count(self, times: "array[float]", start: float) -> None:
        """Count times into bins; they are in order, so that the work is by bin and not by event."""
        at, end = bisect_left(times, start), len(times)
        while at < end:
            number = int((times[at] - start) / BIN_S)
            after = max(at + 1, bisect_left(times, start + (number + 1) * BIN_S, at))
            if number >= len(self.bins):
                self.bins.extend([0] * (number + 1 - len(self.bins)))
            self.bins[number] += after - at
            at = after

    @property
    def tokens_per_event(self) -> float:
        """The average so far; 1 as long as no server told."""
        return self.usage_tokens / self.usage_events if self.usage_events else 1.0

    def merged_ratio(self, bins: tuple[int, ...]) -> float:
        """The share of the steady part's events that shared a read."""
        return min(1.0, self.merged / sum(bins)) if sum(bins) else 0.0

    def gaps(self) -> str:
        """Return all gaps, packed as LevelSamples has them; to be called once, at the end."""
        self._keep(self._packer.flush())
        self._encoded += base64.b64encode(self._packed)
        return self._encoded.decode()

    def _keep(self, packed: bytes) -> None:
        self._packed += packed
        whole = len(self._packed) // 3 * 3
        if whole >= _ENCODED_MIN:
            self._encoded += base64.b64encode(self._packed[:whole])
            del self._packed[:whole]

    def whole_bins(self, now: float) -> tuple[int, ...]:
        """Given the end of the steady part, return its whole bins: one cut short would look like a slump."""
        if self.steady_from is None:
            return ()
        # A timer may fire a little early; a bin that lacks less than a twentieth is whole.
        count = max(0, int((now - self.steady_from) / BIN_S + 0.05))
        return tuple((self.bins + [0] * (count - len(self.bins)))[:count])


def quantiles_ms(seconds: "array[float] | list[float]") -> dict[str, float]:
    """Given durations in seconds, return mean, p50, p90 and p99 in milliseconds; empty if there are none."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    mean = round(1000 * sum(ordered) / len(ordered), 4)
    return {"mean": mean, **{name: round(1000 * quantile(ordered, q), 4) for name, q in _QUANTILES.items()}}


def _gaps(times: "array[float]", zero: float) -> bytes:
    """Given the times of a request's events, return what lies between them in microseconds, as 32 bit numbers.

    Each time is rounded and not each gap, so that their sum is as right as a single one.
    """
    us = [int((at - zero) * 1e6 + 0.5) for at in times]
    try:
        gaps = array("I", map(sub, islice(us, 1, None), us))
    except OverflowError:  # more than an hour, or a clock that went back
        gaps = array("I", (max(0, min(GAP_US_MAX, b - a)) for a, b in pairwise(us)))
    if BIG_ENDIAN:
        gaps.byteswap()
    return gaps.tobytes()


def _text_of(event: bytes) -> str:
    """Given an event with text as it came, return the text."""
    start, end = event.find(b"{"), event.rfind(b"}")
    try:
        choice = json.loads(event[start : end + 1])["choices"][0]
        delta = choice.get("delta") or {}
        return choice.get("text") or delta.get("content") or ""
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return ""


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _us(seconds: float) -> float:
    return round(seconds, 6)
