"""Requests written ahead: when many streams end together, none waits until the prompts of others are made."""

import asyncio
from collections import deque
from dataclasses import dataclass

from autotuner.bench.meter import Record
from autotuner.bench.target import Target
from autotuner.bench.workload import Ask, Workload
from autotuner.edge.clock import sleep

POOL_BYTES = 64 * 1024 * 1024
TOGETHER_S = (
    0.03  # streams that began together end together, and so long it may take until all have their next request out
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request as it goes on the wire, and what it asks for; `turn` counts from 0 within a conversation."""

    request: bytes
    ask: Ask
    index: int
    turn: int = 0

    @property
    def asked_tokens(self) -> int | None:
        """The output length that it asks for."""
        asked = self.ask.body.get("max_tokens")
        return asked if isinstance(asked, int) else None


class Pool:
    """The requests of one shard of a level, in their order: those whose number leaves `shard` when divided by `shards`."""

    def __init__(self, target: Target, workload: Workload, shard: int = 0, shards: int = 1) -> None:
        self._target = target
        self._workload = workload
        self._next = shard
        self._step = shards
        self._size = 1
        self._ready: deque[Prepared] = deque()
        self._ended = False  # a dataset that is not repeated is at its end
        self._wanted = asyncio.Event()

    def take(self) -> Prepared | None:
        """Return the next request, None after the last."""
        if not self._ready:
            self._add()
        self._wanted.set()
        return self._ready.popleft() if self._ready else None

    def next_turn(
        self, item: Prepared, record: Record, said: tuple[str, ...]
    ) -> tuple[Prepared | None, tuple[str, ...]]:
        """Given a request, how it went and what was answered before it, return the next turn, if any, and all answers."""
        if not item.ask.more or record.error:
            return None, said
        said = (*said, record.text())
        return self._prepared(self._workload.follow(item.index, said), item.index, item.turn + 1), said

    async def fill(self, size: int) -> None:
        """From now on hold so many requests ready; write them, one a turn of the loop."""
        self._size = size
        while len(self._ready) < self._size and not self._ended:
            self._add()
            await sleep(0)

    async def keep_full(self) -> None:
        """Refill whenever some were taken, for ever; while there are plenty not at once, for others may be about to be sent."""
        while True:
            await self._wanted.wait()
            if len(self._ready) > self._size // 2:
                await sleep(TOGETHER_S)
            self._wanted.clear()
            await self.fill(self._size)

    def _add(self) -> None:
        ask = None if self._ended else self._workload.ask(self._next)
        if ask is None:
            self._ended = True
            return
        made = self._prepared(ask, self._next)
        self._next += self._step
        self._ready.append(made)
        self._size = max(1, min(self._size, POOL_BYTES // len(made.request)))

    def _prepared(self, ask: Ask, index: int, turn: int = 0) -> Prepared:
        return Prepared(self._target.request(ask.body), ask, index, turn)
