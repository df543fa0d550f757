"""The requests that a benchmark sends: pure, seeded, the same for both sides of a comparison."""

import random
import zlib
from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from autotuner.bench.benchmark import Benchmark, Level
from autotuner.bench.records import BLOCK_TOKENS, Record, Records
from autotuner.bench.words import SharedTexts, Texts, Words

ESTIMATED = Words()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its JSON body for the benchmark's endpoint.

    `at_s` is when a trace's request is due, in seconds after the load's start at the level's speed; `more` says that the
    conversation goes on after its answer.
    """

    body: dict[str, Any]
    at_s: float | None = None
    more: bool = False


class Workload:
    """The requests of one level, by number.

    Synthetic prompts have `prompt_tokens` tokens with all that the server adds, the shared prefix included; each later turn of
    a conversation adds a text of `prompt_tokens` less `prefix_tokens`. A dataset's requests come in an order of the level's
    own, and again from the start, in another order, when all were sent; with `load = "trace"` they come once, as recorded.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        level: Level,
        model: str | None,
        words: Words | None = None,
        records: Records | None = None,
    ) -> None:
        self.benchmark = benchmark
        self._level = level
        self._model = model
        self._words = words or ESTIMATED
        self._records = records
        self._chat = benchmark.endpoint == "chat"
        self._key = f"{benchmark.seed}/{level}"
        self._texts = Texts(self._words, self._key)
        # Where a prompt is text alone, what the server adds stands before it, and so belongs to the part that is shared.
        self._before = 0 if self._chat else self._words.overhead
        self._prefixes = SharedTexts(self._texts, "prefix", benchmark.prefix_tokens)
        self._blocks = SharedTexts(self._texts, "block", BLOCK_TOKENS)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def ask(self, index: int) -> Ask | None:
        """Given the number of a request or conversation, return its first request; None behind the end of a trace.

        In a closed loop the first request of each stream, which belongs to the warm-up, asks for a share of the output tokens
        that differs from stream to stream: requests of one length that begin together would end together for ever, and a
        server's rate would come in waves of prompts and answers instead of the mix that users make.
        """
        b = self.benchmark
        staggered = b.load == "concurrency" and b.warmup_requests and index < self._level
        share = (index + 1) / self._level if staggered else 1.0
        if self._records is None:
            return Ask(self._body(self._talk([self._prompt(index)], ()), b.output_tokens, share), more=b.turns > 1)
        at_s = None
        if b.load == "trace":
            if index >= len(self._records):
                return None
            at_s = self._records.at_s(index) / self._level
        record = self._record(self._records, index)
        content = self._whole(record) if record.messages else self._talk(self._said(record, index)[:1], ())
        body = self._body(content, record.output_tokens or b.output_tokens, share)
        return Ask(body, at_s, more=self._turns(record) > 1)

    def follow(self, index: int, said: tuple[str, ...]) -> Ask:
        """Given a conversation's number and the answers so far, return its next request. Raise IndexError behind its end.

        With completions the answers stand between the user's texts as they came, so that a prefix cache has them already.
        """
        b = self.benchmark
        turn = len(said)
        if self._records is None:
            new = max(1, b.prompt_tokens - b.prefix_tokens)
            users = [self._prompt(index), *(self._turn(index, t, new) for t in range(1, turn + 1))]
            turns, tokens = b.turns, b.output_tokens
        else:
            record = self._record(self._records, index)
            users, turns = self._said(record, index)[: turn + 1], self._turns(record)
            tokens = record.output_tokens or b.output_tokens
        if turn >= turns:
            raise IndexError(f"conversation {index} has {turns} turns")
        return Ask(self._body(self._talk(users, said), tokens, 1.0), more=turn + 1 < turns)

    # Synthetic text.

    def _prompt(self, index: int) -> str:
        b, words = self.benchmark, self._words
        total = words.count(b.prompt_tokens - words.overhead)
        shared = min(total - 1, words.count(b.prefix_tokens - self._before)) if b.prefix_tokens else 0
        if not shared:
            return self._texts.text("prompt", index, total, opens=True)
        which = zlib.crc32(f"{self._key}/{index}".encode()) % b.prefixes
        own = self._texts.text("prompt", index, total - shared, opens=False)
        return f"{self._prefixes.text(which, shared, True)} {own}"

    def _turn(self, index: int, turn: int, tokens: int) -> str:
        return self._texts.text(f"turn {turn}", index, self._words.count(tokens), opens=self._chat)

    def _recorded_length(self, record: Record, index: int) -> str:
        """Text as long as a trace says, of its blocks as far as they go; what is behind them is the request's own."""
        words = self._words
        left = words.count(record.prompt_tokens - words.overhead)
        size, parts = words.count(BLOCK_TOKENS), []
        for place, block in enumerate(record.blocks):
            length = min(left, words.count(BLOCK_TOKENS - self._before) if not place else size)
            if length < 1:
                break
            parts.append(self._blocks.text(block, length, not place))
            left -= length
        if left > 0:
            parts.append(self._texts.text("prompt", index, left, opens=not parts))
        return " ".join(parts)

    # A dataset's requests.

    def _record(self, records: Records, index: int) -> Record:
        if self.benchmark.load == "trace":
            return records.timed(index)
        pass_number, place = divmod(index, len(records))
        return records[self._order(pass_number)[place]]

    def _shuffled(self, pass_number: int) -> "array[int]":
        order = array("L", range(len(self._records or ())))
        random.Random(f"{self._key}/order/{pass_number}").shuffle(order)  # noqa: S311 - reproducible, not secret
        return order

    def _said(self, record: Record, index: int) -> list[str]:
        """The user's texts of a record, in turn."""
        return list(record.texts) or [self._recorded_length(record, index)]

    def _turns(self, record: Record) -> int:
        return min(self.benchmark.turns, max(1, len(record.texts)))

    def _whole(self, record: Record) -> dict[str, Any]:
        if self._chat:
            return {"messages": [{"role": role, "content": content} for role, content in record.messages]}
        return {"prompt": "\n".join(content for _, content in record.messages)}

    # The body of a request.

    def _talk(self, users: list[str], said: tuple[str, ...]) -> dict[str, Any]:
        """What the user said, with the answers between."""
        if self._chat:
            messages = [{"role": "user", "content": users[0]}]
            for answer, user in zip(said, users[1:], strict=True):
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": user}]
            return {"messages": messages}
        between = " " if self._records is None else "\n"
        later = (f"{answer}{between}{user}" for answer, user in zip(said, users[1:], strict=True))
        return {"prompt": "".join([users[0], *later])}

    def _body(self, content: dict[str, Any], tokens: int, share: float) -> dict[str, Any]:
        body = {
            **content,
            "max_tokens": max(min(2, tokens), round(tokens * share)),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.benchmark.ignore_eos:
            body["ignore_eos"] = True
        if self._model:
            body["model"] = self._model
        return body
