"""Prompts are exact wherever a server lets itself be asked; what they rest on is said; nothing a server does is an error."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fakes.fake_openai import Behaviour, FakeOpenAI

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.words import WORDS, Words
from autotuner.bench.workload import Workload
from autotuner.edge import tokenizer
from autotuner.edge.tokenizer import COUNTS_MAX, OPENERS, words_for

Handler = Callable[[httpx.Request], httpx.Response]
REQUESTS_MAX = COUNTS_MAX + OPENERS + 8


@dataclass
class Model:
    """A server with a tokenizer of its own: words of two tokens, words that are two only where a text begins, and so on."""

    engine: str = "vllm"
    long: frozenset[str] = frozenset()
    long_first: frozenset[str] = frozenset()
    bos: int = 0
    template: int = 0
    usage: bool = True
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def tokens(self, text: str) -> int:
        words = text.split(" ")
        return len(words) + sum(word in self.long for word in words) + (words[0] in self.long_first) + self.bos

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content)
        self.asked.append((path, body))
        if path == "/tokenize" and self.engine != "plain":
            if self.engine == "strict" and set(body) - {"model", "prompt", "add_special_tokens"}:
                return httpx.Response(400, json={"error": {"message": "Extra inputs are not permitted"}})
            if self.engine == "llamacpp":
                count = self.tokens(body["content"]) - (0 if body["add_special"] else self.bos)
                return httpx.Response(200, json={"tokens": list(range(count))})
            assert body["add_special_tokens"] is True
            return httpx.Response(200, json={"count": self.tokens(body["prompt"]), "max_model_len": 4096, "tokens": []})
        if path in {"/v1/completions", "/v1/chat/completions"}:
            usage = {"prompt_tokens": self.prompt_tokens(body), "completion_tokens": 1}
            return httpx.Response(200, json={"choices": [], "usage": usage if self.usage else None})
        return httpx.Response(404, json={"detail": "Not Found"})

    def prompt_tokens(self, body: dict[str, Any]) -> int:
        if "messages" in body:
            return sum(self.tokens(m["content"]) + self.template for m in body["messages"])
        return self.tokens(body["prompt"])


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Words]:
    real = httpx.AsyncClient

    def ask(handler: Handler, benchmark: Benchmark | None = None, api_key: str | None = None) -> Words:
        def client(**keys: Any) -> httpx.AsyncClient:
            return real(**(keys | {"transport": httpx.MockTransport(handler)}))

        monkeypatch.setattr(tokenizer.httpx, "AsyncClient", client)
        return asyncio.run(words_for("http://127.0.0.1:1", benchmark or Benchmark(), "m", api_key))

    return ask


def sent(model: Model, words: Words, benchmark: Benchmark, count: int = 60) -> set[int]:
    """The prompt tokens of a workload's requests as the server counts them."""
    workload = Workload(benchmark, 32, "m", words)
    return {model.prompt_tokens(asked.body) for i in range(count) if (asked := workload.ask(i))}


ODD = Model(long=frozenset(WORDS[7::9]), long_first=frozenset(WORDS[:20:3]), bos=1)


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "strict"])
@pytest.mark.parametrize("changes", [{}, {"bos": 2}, {"long": ODD.long, "bos": 1}, {"long_first": ODD.long_first}])
def test_every_prompt_has_exactly_its_tokens_on_a_server_with_a_tokenizer(
    against: Callable[..., Words], engine: str, changes: dict[str, Any]
) -> None:
    model, benchmark = Model(engine=engine, **changes), Benchmark(prompt_tokens=100, prefix_tokens=40, prefixes=3)
    words = against(model, benchmark)
    assert words.how == "exact"
    assert "exactly 100 tokens" in words.said
    assert {path for path, _ in model.asked} == {"/tokenize"}  # nothing is generated
    assert sent(model, words, benchmark) == {100}
    assert len(model.asked) <= 2 * REQUESTS_MAX


@pytest.mark.parametrize("engine", ["vllm", "plain"])
def test_a_chats_template_is_part_of_its_prompts_tokens(against: Callable[..., Words], engine: str) -> None:
    model, benchmark = Model(engine=engine, template=23, bos=1), Benchmark(prompt_tokens=90, endpoint="chat")
    words = against(model, benchmark)
    assert (words.how, words.overhead) == ("exact", 24)
    assert sent(model, words, benchmark) == {90}
    assert "24 of them added by the server itself" in words.said


def test_without_a_tokenizer_two_requests_tell_and_prove_it_where_every_word_is_one_token(
    against: Callable[..., Words],
) -> None:
    model, benchmark = Model(engine="plain", bos=1), Benchmark(prompt_tokens=100)
    words = against(model, benchmark)
    assert words.how == "exact"
    assert sent(model, words, benchmark) == {100}
    assert len([path for path, _ in model.asked if path == "/v1/completions"]) == 2
    assert all(body["max_tokens"] == 1 for path, body in model.asked if path == "/v1/completions")


def test_without_a_tokenizer_longer_words_are_calibrated_and_said_to_be(against: Callable[..., Words]) -> None:
    model, benchmark = Model(engine="plain", long=frozenset(WORDS[::3]), bos=1), Benchmark(prompt_tokens=400)
    words = against(model, benchmark)
    assert words.how == "calibrated"
    assert words.tokens_per_word == pytest.approx(4 / 3, abs=0.02)
    assert "calibrated" in words.said
    found = sent(model, words, benchmark)
    assert sum(found) / len(found) == pytest.approx(400, rel=0.03)
    assert (min(found), max(found)) == pytest.approx((400, 400), rel=0.1)


def test_a_server_that_tells_nothing_gets_an_estimate_and_it_is_said(against: Callable[..., Words]) -> None:
    words = against(Model(engine="plain", usage=False))
    assert words == Words(said=words.said)
    assert "estimate" in words.said


def test_a_tokenizer_without_a_known_template_is_not_called_exact(against: Callable[..., Words]) -> None:
    words = against(Model(template=9, usage=False), Benchmark(endpoint="chat"))
    assert (words.how, words.tokens_per_word) == ("calibrated", 1.0)
    assert "chat template" in words.said


def test_a_prompt_shorter_than_what_the_server_adds_is_said_to_be_longer(against: Callable[..., Words]) -> None:
    model, benchmark = Model(template=30), Benchmark(prompt_tokens=16, endpoint="chat")
    words = against(model, benchmark)
    assert sent(model, words, benchmark) == {31}
    assert words.said == "prompts have 31 tokens, since the server itself adds 30 to each: more than prompt_tokens"


def test_words_that_hardly_any_tokenizer_knows_end_the_search(against: Callable[..., Words]) -> None:
    model = Model(long=frozenset(WORDS))
    words = against(model)
    assert (words.how, words.tokens_per_word) == ("calibrated", 2.0)
    assert len(model.asked) <= REQUESTS_MAX


ANSWERS: list[tuple[int, Any]] = [
    (200, b"{"), (200, b"[" * 100_000), (200, b"[]"), (200, b"null"), (200, b"{}"), (200, b'{"count": true}'), (200, b'{"count": -1}'),
    (200, b'{"count": "9"}'), (200, b'{"count": 1}'), (200, b'{"tokens": 7}'), (200, b'{"tokens": []}'), (200, b"\xff\xfe"),
    (200, b'{"usage": 7}'), (200, b'{"usage": {"prompt_tokens": 1e999}}'), (200, b'{"usage": {"prompt_tokens": 5}}'),
    (204, b""), (301, b""), (400, b"no"), (401, b"no"), (404, b"no"), (422, b"no"), (500, b"no"),
]  # fmt: skip


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize(("status", "body"), ANSWERS)
def test_whatever_a_server_answers_is_no_error(
    against: Callable[..., Words], status: int, body: bytes, endpoint: str
) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(status, content=body)

    assert against(answer, Benchmark.model_validate({"endpoint": endpoint})).how == "estimated"
    assert len(asked) < 8


@pytest.mark.parametrize("error", [httpx.ConnectError("no"), httpx.ReadTimeout("no"), httpx.RemoteProtocolError("no")])
def test_a_server_that_does_not_answer_is_no_error(against: Callable[..., Words], error: httpx.HTTPError) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise error

    assert against(fail).how == "estimated"


def test_the_api_key_is_sent_along(against: Callable[..., Words]) -> None:
    seen = set()

    def answer(request: httpx.Request) -> httpx.Response:
        seen.add(request.headers.get("authorization"))
        return Model()(request)

    assert against(answer, api_key="k").how == "exact"
    assert seen == {"Bearer k"}
    assert against(answer, api_key="ключ").how == "estimated"


def test_asking_takes_a_moment_on_loopback() -> None:
    async def ask() -> tuple[Words, float, int]:
        async with FakeOpenAI() as server:
            began = time.monotonic()
            return await words_for(server.url, Benchmark(), "m"), time.monotonic() - began, server.seen.requests

    words, took_s, generated = asyncio.run(ask())
    assert (words.how, generated) == ("exact", 0)
    assert took_s < 10.0  # 0.05 s on an idle core; a loaded machine must not fail it


def test_a_fake_without_a_tokenizer_is_asked_by_its_usage() -> None:
    async def ask() -> tuple[Words, int]:
        async with FakeOpenAI(Behaviour(mode="no-tokenizer", ttft_ms=1)) as server:
            return await words_for(server.url, Benchmark(), "m"), server.seen.requests

    assert [asyncio.run(ask())[0].how, asyncio.run(ask())[1]] == ["exact", 2]


def test_a_connection_that_the_server_closes_after_an_error_of_its_own_is_not_its_last_word() -> None:
    """SGLang's /tokenize fails on a tokenizer without a longest prompt, and uvicorn then closes the connection unannounced.

    The next request goes out on it and is lost; it must not decide whether prompts are exact.
    """

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        broken = False
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next(int(x.split(":")[1]) for x in head.split("\r\n") if x.startswith("content-length"))
                body = json.loads(await reader.readexactly(length))
                if broken:
                    return
                broken = "/tokenize" in head
                said = {"choices": [], "usage": {"prompt_tokens": 0 if broken else len(body["prompt"].split())}}
                content = json.dumps(said)
                status = "500 Internal Server Error" if broken else "200 OK"
                writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode())

    async def ask() -> Words:
        async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await words_for(f"http://127.0.0.1:{port}", Benchmark(prompt_tokens=128), "m")

    assert asyncio.run(ask()).how == "exact"
