"""What a level reports: its requests, its progress while it runs, its raw samples, and the form that gaps are kept in. Pure.

Times are seconds since the level's load began, on the client's monotonic clock. Tokens come from `usage` where the
server sends it; an SSE event may carry several tokens, so events alone are never reported as tokens.
"""

import base64
import binascii
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from autotuner.bench.benchmark import Level, LoadKind

GAP_US_MAX = 0xFFFF_FFFF  # what a gap's 32 bits hold: more than an hour
BIG_ENDIAN = array("H", [1]).tobytes() == b"\0\1"  # then numbers are swapped on their way in and out
_PIECE = 1 << 14  # characters; whole groups of base64, so that each can be decoded by itself
BIN_S = 0.1  # width of the bins in which the worker counts token events
METHOD = 1  # of samples taken now


class Values(BaseModel):
    """What is only values: an unknown one is an error, and none changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RequestSample(Values):
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


class Progress(Values):
    """What the worker says about twice a second while the load runs; `events` are those since the line before."""

    kind: Literal["progress"] = "progress"
    at_s: float
    phase: Literal["warm-up", "steady", "tail"]
    events: int
    in_flight: int
    done: int
    failed: int
    tokens_per_event: float = 1.0
    busy_ratio: float = 0.0  # of the busiest worker process's core: what it used and what it waited for
    waits: bool = False  # warm, and waiting to be told when the steady part begins


class Placement(Values):
    """Where a load client ran: the cores it was bound to, none if it was not bound, and why, in a sentence.

    With `one_each` every process of it had one of them, in their order; else all had all. `shares` tells whether the server may
    use a core that the client may use, None where that is not known; `server_cores` is how many the server may use.
    """

    cores: tuple[int, ...] = ()
    one_each: bool = True
    shares: bool | None = None
    server_cores: int | None = None
    said: str

    def cores_of(self, number: int) -> tuple[int, ...]:
        """Given which process of the client it is, return its cores; none if it is not bound."""
        return self.cores[number : number + 1] if self.one_each else self.cores


class LevelSamples(Values):
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
    `held_back` tells that requests of an open loop did not always go out when due, because as many as allowed were in flight.
    `prompts_said` tells in a sentence what the lengths of synthetic prompts rest on. `unsettled_s` is how much of
    what was taken for the steady part is not in it any more, because the rate rose after it; its events are in `gaps` alone.
    `placed` tells on which cores the client ran. `method` is how figures are made of this, so that those of a recorded level
    come out again: METHOD since five stretches can tell a drift, 0 before.
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
    held_back: bool = False
    prompts_said: str = ""
    unsettled_s: float = 0.0
    placed: Placement | None = None
    method: int = 0

    @property
    def open_loop(self) -> bool:
        """Whether requests went out when they were due, answered or not."""
        return self.load != "concurrency"

    @property
    def busy_ratio(self) -> float:
        """The share of the steady part in which the client could have done nothing more."""
        return min(1.0, self.cpu_ratio + self.waited_ratio)

    @model_validator(mode="after")
    def _gaps_fit(self) -> Self:
        """What does not fit would be handed to the wrong requests, and every figure made of it would be false."""
        if self.gaps and _length(self.gaps) != sum(_gap_counts(self.requests)):
            raise ValueError("gaps do not fit the requests: one is needed for each event but a request's first")
        return self

    def gaps_us(self) -> tuple[Sequence[int], ...]:
        """Return each request's gaps in microseconds, in the order of `requests`; () where gaps were not kept."""
        if not self.gaps:
            return ()
        every, found, at = _microseconds(self.gaps), [], 0
        for count in _gap_counts(self.requests):
            found.append(every[at : at + count])
            at += count
        return tuple(found)


def pack_gaps(gaps_us: Iterable[Iterable[int]]) -> str:
    """Given each request's gaps in microseconds, return them as `LevelSamples.gaps` has them."""
    numbers = array("I", (gap for gaps in gaps_us for gap in gaps))
    if BIG_ENDIAN:
        numbers.byteswap()
    return pack_numbers(numbers.tobytes())


def pack_numbers(numbers: bytes) -> str:
    """Given gaps as 32 bit little-endian numbers, return them as `LevelSamples.gaps` has them."""
    return base64.b64encode(zlib.compress(numbers, 1)).decode("ascii")


def steady_gaps_us(samples: LevelSamples) -> tuple[Sequence[int], ...]:
    """Given a level's samples, return by request the gaps that ended in its steady part, in microseconds.

    Of requests that failed none counts; of those that the level's end cut off what came before it does.
    """
    start, end = samples.steady_from_s, samples.steady_to_s
    if start is None or end is None:
        return ()
    found = []
    for request, gaps in zip(samples.requests, samples.gaps_us(), strict=False):
        if request.error or request.first_s is None or not gaps:
            continue
        first_us = round(1e6 * request.first_s)
        if request.first_s < start or first_us + sum(gaps) > 1e6 * end:
            at_us = list(accumulate(gaps, initial=first_us))[1:]
            gaps = gaps[bisect_left(at_us, 1e6 * start) : bisect_right(at_us, 1e6 * end)]  # noqa: PLW2901 - the part
        if gaps:
            found.append(gaps)
    return tuple(found)


def _gap_counts(requests: tuple[RequestSample, ...]) -> list[int]:
    return [max(0, r.events - 1) for r in requests]


def _length(gaps: str) -> int:
    """How many gaps there are, without holding them: a level has millions."""
    return sum(map(len, unpacked(gaps))) // 4


def _microseconds(gaps: str) -> "memoryview[int]":
    numbers = bytearray()
    for piece in unpacked(gaps):
        numbers += piece
    if BIG_ENDIAN:
        swapped = array("I", bytes(numbers))
        swapped.byteswap()
        numbers = bytearray(swapped.tobytes())
    return memoryview(numbers).cast("I")


def unpacked(gaps: str) -> Iterator[bytes]:
    """Yield the packed numbers in pieces; raise ValueError where they cannot be read or end within a number."""
    if not gaps:
        return
    unpacker, length = zlib.decompressobj(), 0
    try:
        for at in range(0, len(gaps), _PIECE):
            piece = unpacker.decompress(base64.b64decode(gaps[at : at + _PIECE], validate=True))
            length += len(piece)
            yield piece
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"gaps cannot be read: {error}") from None
    if length % 4 or not unpacker.eof:
        raise ValueError("gaps cannot be read: they are cut short")


_MESSAGE: TypeAdapter[Progress | LevelSamples] = TypeAdapter(Progress | LevelSamples)


def read_message(line: bytes) -> Progress | LevelSamples:
    """Given a line of a worker, return what it says. Raise ValidationError, a ValueError, for anything else."""
    return _MESSAGE.validate_json(line)
