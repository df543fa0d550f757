"""Several ranks of one server read as one: their logs' lines in one order, their windows as the server's. Pure.

Windows of several ranks -> windows of the server: data-parallel ranks added, copies of one rank counted once.
Each data-parallel rank prints its own lines, interleaved with the others'; a tensor- or pipeline-parallel copy of a rank
says the same thing again. A sum is complete when every rank has spoken, or when one speaks a second time: ranks that
have nothing to do print nothing.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from autotuner.engines.base import Window

_DATA_PARALLEL = re.compile(r"\bDP\d+\b")
# `[2026-11-29 15:02:38 TP0]` of SGLang, `INFO 11-29 15:02:38` of vLLM.
_STAMP = re.compile(rb"(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)")
STAMP_WITHIN = 80  # bytes from the start of a line
SAME_CLOCK_S = 60.0  # ranks are launched at once, and no import of an engine takes so much longer on one host


@dataclass
class RankJoiner:
    """Takes windows one by one and hands out those of the whole server."""

    _speaker: dict[str, str] = field(default_factory=dict)
    _pending: dict[str, Window] = field(default_factory=dict)
    _complete: bool = False

    def add(self, window: Window) -> tuple[Window, ...]:
        """Given the next window of the log, return the windows of the server that are now complete, if any."""
        found = _DATA_PARALLEL.search(window.rank)
        group = found.group() if found else ""
        if self._speaker.setdefault(group, window.rank) != window.rank:
            return ()  # a copy
        if not group:
            return (window,)
        again = group in self._pending
        joined = (join(tuple(self._pending.values())),) if again else ()
        if again:
            self._complete = True  # every rank that works has spoken at least once by now
            self._pending = {}
        self._pending[group] = window
        if self._complete and len(self._pending) == len(self._speaker):
            joined = (*joined, join(tuple(self._pending.values())))
            self._pending = {}
        return joined


@dataclass
class LineOrder:
    """Puts what is new in the logs of several ranks, each on a host of its own, into one order by the lines' own stamps.

    Clocks and time zones of hosts differ: a log's clock is taken to be ahead of ours by the most that any line was when it was
    read. Stamps have whole seconds, so the lines of one second are spread evenly over it; a line without a stamp goes with
    the one before it.
    """

    _ahead_s: dict[int, float] = field(default_factory=dict)
    _last_s: dict[int, float] = field(default_factory=dict)

    def order(self, pieces: Sequence[bytes], now_s: float) -> list[tuple[int, bytes]]:
        """Given the new bytes of each rank's log and the time, return them in pieces, each with its rank; no byte is lost."""
        timed: list[tuple[float, int, bytes]] = []
        for rank, piece in enumerate(pieces):
            timed += [(at_s, rank, line) for at_s, line in self._timed(rank, piece, now_s)]
        timed.sort(key=lambda item: item[:2])  # stable: each rank's own order stays
        return [(rank, b"".join(line for _, _, line in run)) for rank, run in groupby(timed, key=lambda item: item[1])]

    def _timed(self, rank: int, piece: bytes, now_s: float) -> list[tuple[float, bytes]]:
        stamped: list[tuple[float, bytes]] = []
        last_s = self._last_s.get(rank, -math.inf)
        for line in piece.splitlines(keepends=True):
            last_s = max(last_s, _stamp_s(line))
            stamped.append((last_s, line))
        self._last_s[rank] = last_s
        if math.isfinite(last_s):
            self._ahead_s[rank] = max(last_s - now_s, self._ahead_s.get(rank, -math.inf))
        ahead_s = self._ahead_s.get(rank, 0.0)
        found: list[tuple[float, bytes]] = []
        for at_s, run in groupby(stamped, key=lambda item: item[0]):
            lines = [line for _, line in run]
            found += [(at_s - ahead_s + number / len(lines), line) for number, line in enumerate(lines)]
        return found


def whole_logs(logs: Sequence[bytes]) -> list[tuple[int, bytes]]:
    """Given the whole logs of ranks that were launched at once, return them in pieces in one order, each with its rank.

    Clocks are believed, unless the first lines say that they are in different time zones.
    """
    begun_s = [next((at_s for line in log.splitlines() if math.isfinite(at_s := _stamp_s(line))), None) for log in logs]
    zero_s = next((at_s for at_s in begun_s if at_s is not None), 0.0)
    ahead_s = [(at_s if at_s is not None else zero_s) - zero_s for at_s in begun_s]
    order = LineOrder({rank: off_s if abs(off_s) > SAME_CLOCK_S else 0.0 for rank, off_s in enumerate(ahead_s)})
    return order.order(logs, math.inf)


def _stamp_s(line: bytes) -> float:
    """When a line says that it was written, in seconds that only compare; -inf where it does not say."""
    found = _STAMP.search(line, 0, STAMP_WITHIN)
    if found is None:
        return -math.inf
    month, day, hour, minute, second = map(int, found.groups())
    return (((month * 31 + day) * 24 + hour) * 60 + minute) * 60.0 + second


def join(windows: tuple[Window, ...]) -> Window:
    """Given windows of different ranks over the same time, return the server's: loads and rates added.

    The accept length is the mean over verify steps, of which each running request makes one a step.
    """
    if len(windows) == 1:
        return windows[0]
    graphs = {w.graph for w in windows if w.graph is not None}
    return windows[-1]._replace(
        running=_sum([w.running for w in windows]),
        queued=_sum([w.queued for w in windows]),
        gen_tok_s=_sum([w.gen_tok_s for w in windows]),
        prompt_tok_s=_sum([w.prompt_tok_s for w in windows]),
        accept_len=_weighted([(w.accept_len, w.drafts or w.running or 0) for w in windows]),
        printed_rate=_weighted([(w.printed_rate, w.drafts or w.running or 0) for w in windows]),
        cache_hit=_weighted([(w.cache_hit, w.running or 1) for w in windows]),
        accept_rate=None,
        drafts=_whole([w.drafts for w in windows]),
        drafted=_whole([w.drafted for w in windows]),
        accepted=_whole([w.accepted for w in windows]),
        graph=False not in graphs if graphs else None,
        prefill=any(w.prefill for w in windows),
        after_idle=any(w.after_idle for w in windows),
        preemptions=sum(w.preemptions for w in windows),
        rank="",
    )


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _whole(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _weighted(values: list[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None and weight > 0]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None
