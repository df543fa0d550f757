"""One completion on its way to its client: events as the engine words them, token counts that are true."""

import asyncio
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

from autotuner.rehearsal import http
from autotuner.rehearsal.batch import Work
from autotuner.rehearsal.http import Request

WORDS = (" the", " light", "house", " keeper", " watched", " over", " cold", " sea")
WRONG = (" !",)  # what a server that computes nonsense often says: one token, again and again
TOKENS_DEFAULT = 16


@dataclass(eq=False)
class Stream:
    """A request of a client, its work in the batch, and what of it was sent; `corrupt` if the answer is nonsense."""

    request: Request
    model: str
    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    corrupt: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    sent: int = 0
    sent_at_s: float = 0.0

    def __post_init__(self) -> None:
        body = self.request.body
        self.chat = self.request.path.endswith("/chat/completions")
        self.streams = bool(body.get("stream"))
        wanted = body.get("max_tokens") or body.get("max_completion_tokens") or body.get("n_predict") or TOKENS_DEFAULT
        self.work = Work(_tokens_of(body), max(1, int(wanted)))
        self._words = WRONG if self.corrupt else _words_of(body)

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        return self.reader.at_eof() or self.writer.transport.is_closing()

    def flush(self, now_s: float) -> None:
        """Send the tokens that were made since the last event, as one event."""
        made = self.work.made
        if self.streams and made > self.sent:
            if not self.sent:
                http.begin_stream(self.writer)
            http.event(self.writer, self._document(self._text(self.sent, made), None))
            self.sent, self.sent_at_s = made, now_s

    async def end(self) -> None:
        """Send what belongs behind the last token, or the whole answer."""
        if not self.streams:
            whole = json.loads(self._document(self._text(0, self.work.made), "length", whole=True))
            await http.answer(self.writer, 200, {**whole, "usage": self.usage()})
            return
        http.event(self.writer, self._document("", "length"))
        if (self.request.body.get("stream_options") or {}).get("include_usage"):
            tail = {**json.loads(self._document("", None)), "choices": [], "usage": self.usage()}
            http.event(self.writer, json.dumps(tail, separators=(",", ":")))
        http.end_stream(self.writer)
        await self.writer.drain()

    def usage(self) -> dict[str, Any]:
        """The counts of this answer."""
        prompt, made = self.work.prompt_tokens, self.work.made
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def _text(self, start: int, stop: int) -> str:
        return "".join(self._words[i % len(self._words)] for i in range(start, stop))

    def _document(self, text: str, finish: str | None, *, whole: bool = False) -> str:
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            choice["message" if whole else "delta"] = {"role": "assistant", "content": text} if text else {}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": finish}
        kind = "text_completion" if not self.chat else "chat.completion" if whole else "chat.completion.chunk"
        document = {"id": f"cmpl-{self.number}", "object": kind, "created": 1795965000, "model": self.model}
        return json.dumps({**document, "choices": [choice], "usage": None}, separators=(",", ":"))


def _words_of(body: dict[str, Any]) -> tuple[str, ...]:
    """The same words for every prompt, begun at one that the prompt decides: greedy answers of one model."""
    messages = body.get("messages")
    said = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    asked = "\n".join(map(str, said)) or str(body.get("prompt", ""))
    first = zlib.crc32(asked.encode()) % len(WORDS)
    return WORDS[first:] + WORDS[:first]


def _tokens_of(body: dict[str, Any]) -> int:
    """A word is a token here; what a template would add is one more a message."""
    messages = body.get("messages")
    if isinstance(messages, list):
        return sum(1 + len(str(m.get("content", "")).split()) for m in messages if isinstance(m, dict))
    prompt = body.get("prompt", "")
    return max(1, len(prompt) if isinstance(prompt, list) else len(str(prompt).split()))
