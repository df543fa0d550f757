"""Windows of several ranks -> windows of the server: data-parallel ranks added, copies of one rank counted once. Pure.

Each data-parallel rank prints its own lines, interleaved with the others'; a tensor- or pipeline-parallel copy of a rank
says the same thing again. A sum is complete when every rank has spoken, or when one speaks a second time: ranks that
have nothing to do print nothing.
"""

import re
from dataclasses import dataclass, field

from autotuner.engines.base import Window

_DATA_PARALLEL = re.compile(r"\bDP\d+\b")


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
