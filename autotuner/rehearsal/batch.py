"""The batch of a server in its own time: who waits, who runs, what each step emits. Pure but for its own lists.

Owns the truth that log lines, metrics and usage are all taken from, so that they cannot disagree.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from autotuner.rehearsal.speeds import Costs


@dataclass(eq=False)
class Work:
    """One request: what it wants, what it has got; times are seconds of the batch."""

    prompt_tokens: int
    wanted: int
    arrived_s: float = 0.0
    ready_s: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0
    made: int = 0
    verified: int = 0  # verify steps
    accepted: int = 0  # drafted tokens that were right
    drafted: int = 0

    @property
    def done(self) -> bool:
        """Whether it has all it wanted."""
        return self.made >= self.wanted


@dataclass(frozen=True)
class Acceptance:
    """How many drafted tokens are right: `mean_len` as simulated, else a chance a position; the bonus token counts.

    `half_life_s` is how fast acceptance decays; 0 means that it does not.
    """

    drafted: int
    mean_len: float | None = None
    chance: float = 0.6
    half_life_s: float = 0.0

    def draw(self, source: random.Random, now_s: float) -> int:
        """Given the time, return how many drafted tokens one verify step accepts."""
        fade = 0.5 ** (now_s / self.half_life_s) if self.half_life_s else 1.0
        if self.mean_len is not None:
            extra = max(0.0, min(self.mean_len - 1.0, self.drafted)) * fade
            return int(extra) + (source.random() < extra - int(extra))
        right = 0
        while right < self.drafted and source.random() < self.chance * fade:
            right += 1
        return right


@dataclass(frozen=True)
class Step:
    """One thing that a server did: a prefill of new requests or a decode step of those that run."""

    kind: Literal["prefill", "decode"]
    at_s: float
    took_s: float
    running: int
    queued: int
    requests: int  # in this very step
    tokens: int  # prompt tokens of a prefill, emitted tokens of a decode step
    accepted: tuple[int, ...] = ()  # per request, where drafts were verified
    graph: bool = True
    ended: tuple[Work, ...] = ()


@dataclass
class Batch:
    """Requests on their way through one server; `now_s` is the end of what was done last."""

    costs: Costs
    cap: int
    acceptance: Acceptance | None = None
    seed: int = 1
    now_s: float = 0.0
    waiting: deque[Work] = field(default_factory=deque)
    running: list[Work] = field(default_factory=list)
    _front_s: float = 0.0
    _busy: tuple[list[Work], float] | None = None  # what is being prefilled (none: a decode step), and until when

    def __post_init__(self) -> None:
        self._source = random.Random(self.seed)  # noqa: S311 - reproducible, not secret

    def add(self, work: Work, at_s: float) -> None:
        """Take in a request that arrives now."""
        shape = self.costs.shape
        work.arrived_s = at_s
        self._front_s = max(self._front_s, at_s) + shape.admit_ms / 1000
        work.ready_s = self._front_s + shape.latency_ms / 1000
        self.waiting.append(work)

    def drop(self, work: Work) -> None:
        """Forget a request whose client has gone."""
        if work in self.waiting:
            self.waiting.remove(work)
        if work in self.running:
            self.running.remove(work)
        if self._busy is not None and work in self._busy[0]:
            self._busy[0].remove(work)

    @property
    def next_s(self) -> float | None:
        """When something is done next; None while there is nothing to do."""
        if self._busy is not None:
            return self._busy[1]
        if self.running:
            return self.now_s
        return self.waiting[0].ready_s if self.waiting else None

    @property
    def queued(self) -> int:
        """How many wait for a place although they could run."""
        return sum(work.ready_s <= self.now_s for work in self.waiting)

    def advance(self, until_s: float) -> list[Step]:
        """Do all that is done by then, and return it step by step."""
        steps = []
        while (self._busy is not None or self._begin(until_s)) and self._busy is not None:
            if self._busy[1] > until_s:
                break
            steps.append(self._finish())
        return steps

    def _begin(self, until_s: float) -> bool:
        """Begin the next prefill or step; prefills go first, as engines do it."""
        if not self.running:
            start = self.waiting[0].ready_s if self.waiting else until_s
            self.now_s = max(self.now_s, min(start, until_s))
        new: list[Work] = []
        while self.waiting and self.waiting[0].ready_s <= self.now_s and len(self.running) + len(new) < self.cap:
            new.append(self.waiting.popleft())
        if new:
            tokens = sum(work.prompt_tokens for work in new)
            self._busy = (new, self.now_s + self.costs.prefill_s(tokens))
        elif self.running:
            self._busy = ([], self.now_s + self.costs.step_s(len(self.running)))
        return self._busy is not None

    def _finish(self) -> Step:
        new, end_s = self._busy or ([], self.now_s)
        took_s, self.now_s, self._busy = end_s - self.now_s, end_s, None
        before = len(self.running)
        if new:
            for work in new:
                work.began_s, work.made = end_s, 1
            self.running += new
            tokens = sum(work.prompt_tokens for work in new)
            return Step("prefill", end_s, took_s, before, self.queued, len(new), tokens, graph=False, ended=self._end())
        if not self.running:  # all of a prefill's clients have gone
            return Step("decode", end_s, took_s, 0, self.queued, 0, 0)
        accepted, emitted = self._emit()
        graph = self.costs.graphed(before)
        return Step("decode", end_s, took_s, before, self.queued, before, emitted, accepted, graph, self._end())

    def _emit(self) -> tuple[tuple[int, ...], int]:
        """Every running request gets its tokens; what was accepted beyond the end of an answer is thrown away."""
        acceptance, emitted = self.acceptance, 0
        if acceptance is None:
            for work in self.running:
                work.made += 1
            return (), len(self.running)
        accepted = []
        for work in self.running:
            right = acceptance.draw(self._source, self.now_s)
            got = min(1 + right, work.wanted - work.made)
            work.made += got
            work.verified += 1
            work.accepted += right
            work.drafted += acceptance.drafted
            accepted.append(right)
            emitted += got
        return tuple(accepted), emitted

    def _end(self) -> tuple[Work, ...]:
        ended = tuple(work for work in self.running if work.done)
        if ended:
            self.running = [work for work in self.running if not work.done]
            for work in ended:
                work.ended_s = self.now_s
        return ended
