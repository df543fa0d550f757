"""A server that speaks the OpenAI API and generates nothing: tokens on a schedule, and every way to fail, on purpose.

In a test:     async with FakeOpenAI(Behaviour(tok_s=500)) as server: ... server.url ...
As a program:  python tests/fakes/fake_openai.py --port 8080 --mode truncated

It listens on 127.0.0.1 alone, and ends by itself after --max-seconds.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

MODES = (
    "normal",
    "slow-start",  # 503 on everything for start_s seconds
    "never-ready",  # 503 on everything, for ever
    "health-ok-generate-hangs",
    "error-in-200",
    "http-500",  # on completions alone
    "truncated",  # closes in the middle of the stream
    "empty-stream",
    "no-usage",
    "no-tokenizer",  # has no /tokenize
    "closes-idle",  # closes the connection after each answer, unannounced
    "die-after",  # exits once `die_after` completions were answered
    "corrupt",  # answers every prompt with the same nonsense
    "ignore-term",  # as a program: SIGTERM changes nothing
)
WORDS = (" the", " light", "house", " keeper", " watched", " over", " cold", " sea")
JSON = "application/json"


@dataclass(frozen=True)
class Behaviour:
    """How the server behaves; `tok_s` is the rate of each stream, `max_running` 0 means no limit.

    As a program it is lucky once: the start that finds no file `lucky_mark` makes it and runs at `lucky_tok_s`.
    """

    mode: str = "normal"
    tok_s: float = 200.0
    ttft_ms: float = 20.0
    tokens_per_event: int = 1
    max_running: int = 0
    start_s: float = 3.0
    die_after: int = 3
    model: str = "fake"
    lucky_tok_s: float = 0.0
    lucky_mark: str = ""


@dataclass
class Seen:
    """What the server counted: the truth that a client's figures are held against."""

    connections: int = 0
    requests: int = 0
    answered: int = 0
    processing: int = 0
    deferred: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


class FakeOpenAI:
    """The server as an async context manager; `url` and `seen` are what tests look at."""

    def __init__(self, behaviour: Behaviour | None = None, port: int = 0) -> None:
        self.behaviour = behaviour or Behaviour()
        self.seen = Seen()
        self.port = port
        self._handlers: set[asyncio.Task[None]] = set()
        self._running = asyncio.Semaphore(self.behaviour.max_running or sys.maxsize)
        self._ready_at = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        slow = {"slow-start": self.behaviour.start_s, "never-ready": float("inf")}
        self._ready_at = _now() + slow.get(self.behaviour.mode, 0.0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._serve(reader, writer):
                    pass
        except asyncio.CancelledError:
            pass  # the server ends; asyncio would call a cancelled handler an error
        finally:
            self._handlers.discard(task)
            writer.transport.abort() if writer.transport.is_closing() else writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; tell whether the connection stays open."""
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        method, path, _ = first.split(" ")
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if _now() < self._ready_at:
            await _answer(writer, 503, {"error": {"message": "Loading model", "type": "unavailable_error"}})
        elif method == "POST" and path in {"/v1/completions", "/v1/chat/completions"}:
            self.seen.headers.append(headers)
            return await self._complete(json.loads(body), reader, writer)
        elif method == "POST" and path == "/tokenize" and self.behaviour.mode != "no-tokenizer":
            tokens = list(range(len(json.loads(body)["prompt"].split())))  # a word is a token here, as in `usage`
            await _answer(writer, 200, {"count": len(tokens), "tokens": tokens})
        elif path == "/health":
            await _answer(writer, 200, {"status": "ok"})
        elif path == "/v1/models":
            await _answer(writer, 200, {"object": "list", "data": [{"id": self.behaviour.model}]})
        elif path == "/metrics":
            await _answer(writer, 200, self._metrics(), "text/plain; version=0.0.4")
        else:
            await _answer(writer, 404, {"error": {"message": "no such path"}})
        return True

    def _metrics(self) -> str:
        gauges = {"requests_processing": self.seen.processing, "requests_deferred": self.seen.deferred}
        counters = {
            "tokens_predicted_total": self.seen.output_tokens,
            "prompt_tokens_total": self.seen.prompt_tokens,
        }
        lines = [f"# TYPE llamacpp:{name} gauge\nllamacpp:{name} {value}" for name, value in gauges.items()]
        lines += [f"# TYPE llamacpp:{name} counter\nllamacpp:{name} {value}" for name, value in counters.items()]
        return "\n".join(lines) + "\n"

    async def _complete(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.seen.requests += 1
        self.seen.bodies.append(body)
        self.seen.deferred += 1
        try:
            await self._running.acquire()
        finally:
            self.seen.deferred -= 1
        self.seen.processing += 1
        try:
            return await self._generate(body, reader, writer)
        finally:
            self.seen.processing -= 1
            self._running.release()

    async def _generate(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        mode = self.behaviour.mode
        if mode == "http-500":
            await _answer(writer, 500, {"error": {"message": "CUDA error: an illegal memory access"}})
            return True
        if mode == "health-ok-generate-hangs":
            await reader.read(1)  # until the client gives up
            return False
        if body.get("stream"):
            finished = await self._stream(body, writer)
        else:
            finished = await self._whole(body, writer)
        self.seen.answered += finished
        if mode == "die-after" and self.seen.answered >= self.behaviour.die_after:
            os._exit(1)
        return finished and mode != "closes-idle"

    async def _whole(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        b, tokens = self.behaviour, _max_tokens(body)
        if b.mode == "error-in-200":
            await _answer(writer, 200, {"error": {"message": "out of memory"}})
            return True
        await asyncio.sleep(b.ttft_ms / 1000 + (tokens - 1) / b.tok_s)
        words = (" !",) if b.mode == "corrupt" else WORDS
        text = "".join(words[i % len(words)] for i in range(tokens)) if b.mode != "empty-stream" else ""
        document = _document(b.model, text, "length", chat="messages" in body)
        if b.mode != "no-usage":
            document["usage"] = self._usage(body, tokens if text else 0)
        await _answer(writer, 200, document)
        return True

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Stream an answer; tell whether it came to its end."""
        b, tokens = self.behaviour, _max_tokens(body)
        start = _now()
        writer.write(_head(200, "text/event-stream; charset=utf-8", "Transfer-Encoding: chunked"))
        stop_at = {"empty-stream": 0, "error-in-200": 1, "truncated": max(1, tokens // 2)}.get(b.mode, tokens)
        for sent in range(0, stop_at, b.tokens_per_event):
            await asyncio.sleep(start + b.ttft_ms / 1000 + sent / b.tok_s - _now())
            count = min(b.tokens_per_event, tokens - sent)
            text = "".join(WORDS[i % len(WORDS)] for i in range(sent, sent + count))
            _event(writer, _document(b.model, text, None, chat="messages" in body, streams=True))
            self.seen.output_tokens += count
            await writer.drain()
        if b.mode == "truncated":
            return False
        if b.mode == "error-in-200":
            _event(writer, {"error": {"message": "out of memory", "code": 500}})
        else:
            self._end(body, stop_at, writer)
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _end(self, body: dict[str, Any], tokens: int, writer: asyncio.StreamWriter) -> None:
        _event(writer, _document(self.behaviour.model, "", "length", chat="messages" in body, streams=True))
        if self.behaviour.mode != "no-usage" and body.get("stream_options", {}).get("include_usage"):
            usage = {"id": "cmpl-1", "object": "text_completion", "choices": [], "usage": self._usage(body, tokens)}
            _event(writer, usage)

    def _usage(self, body: dict[str, Any], tokens: int) -> dict[str, Any]:
        said = body.get("prompt") or " ".join(str(m.get("content", "")) for m in body.get("messages", ()))
        prompt = len(str(said).split())
        self.seen.prompt_tokens += prompt
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


def _now() -> float:
    return asyncio.get_running_loop().time()


def _max_tokens(body: dict[str, Any]) -> int:
    return int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)


def _document(
    model: str, text: str, finish: str | None, *, chat: bool = False, streams: bool = False
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
    said = {"role": "assistant", "content": text}
    choice |= {"delta" if streams else "message": said} if chat else {"text": text}
    kind = "text_completion" if not chat else "chat.completion.chunk" if streams else "chat.completion"
    return {"id": "cmpl-1", "object": kind, "model": model, "choices": [choice], "usage": None}


def _head(status: int, kind: str, framing: str) -> bytes:
    return f"HTTP/1.1 {status} Whatever\r\nServer: fake\r\nContent-Type: {kind}\r\n{framing}\r\n\r\n".encode()


async def _answer(writer: asyncio.StreamWriter, status: int, body: dict[str, Any] | str, kind: str = JSON) -> None:
    content = (body if isinstance(body, str) else json.dumps(body)).encode()
    writer.write(_head(status, kind, f"Content-Length: {len(content)}") + content)
    await writer.drain()


def _event(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _options() -> tuple[Behaviour, int, int]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-seconds", type=int, default=300)
    for f in fields(Behaviour):
        choices = MODES if f.name == "mode" else None
        flag = "--" + f.name.replace("_", "-")
        parser.add_argument(flag, type=type(f.default), default=f.default, choices=choices)
    options = vars(parser.parse_args())
    port, seconds = options.pop("port"), options.pop("max_seconds")
    return Behaviour(**options), port, seconds


async def _run(behaviour: Behaviour, port: int) -> None:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, (lambda: None) if behaviour.mode == "ignore-term" else over.set)
    async with FakeOpenAI(behaviour, port) as server:
        print(f"fake server listening on {server.url}", flush=True)
        await over.wait()


def main() -> None:
    behaviour, port, seconds = _options()
    if behaviour.lucky_mark and not os.path.exists(behaviour.lucky_mark):
        with open(behaviour.lucky_mark, "x"):
            behaviour = replace(behaviour, tok_s=behaviour.lucky_tok_s)
    signal.alarm(max(1, seconds))  # its default action ends the process, whatever else it ignores
    asyncio.run(_run(behaviour, port))


if __name__ == "__main__":
    main()
