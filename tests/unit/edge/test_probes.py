"""Only generated tokens prove that a server serves; a server can answer anything, at any pace, and is never waited for."""

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from patience import FOR_EVER_S, PATIENCE_S

from autotuner.edge import probes
from autotuner.edge.probes import Generated, Probe
from autotuner.engines.base import Counters, Endpoints, Place

ENDPOINTS = Endpoints(health="/health", flush_cache="/flush")


def answer(body: bytes | str, status: int = 200, headers: str = "") -> bytes:
    data = body.encode() if isinstance(body, str) else body
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n{headers}\r\n".encode() + data


def completion(text: Any = " Paris", tokens: Any = 3) -> str:
    return json.dumps({"choices": [{"text": text}], "usage": {"completion_tokens": tokens}})


@asynccontextmanager
async def server(
    *pieces: bytes, every_s: float = 0.0, forever: bytes = b"", hang: bool = False
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Answers whatever is asked with the pieces; then goes on for ever with one, or hangs, or closes."""
    asked: list[bytes] = []
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")), 0
            )
            asked.append(head + await reader.readexactly(length))
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(every_s)
            while forever:
                writer.write(forever)
                await writer.drain()
                await asyncio.sleep(every_s)
            if hang:
                await asyncio.sleep(FOR_EVER_S)
        except (OSError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1], asked
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def probed(what: Callable[[Probe], Any], *pieces: bytes, endpoints: Endpoints = ENDPOINTS, **how: Any) -> Any:
    async def work() -> Any:
        async with server(*pieces, **how) as (port, _), Probe(Place("127.0.0.1", port), endpoints) as probe:
            return await what(probe)

    return asyncio.run(work())


def generated(*pieces: bytes, **how: Any) -> Generated:
    found: Generated = probed(lambda p: p.generate("m"), *pieces, **how)
    return found


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "GENERATE_TIMEOUT_S", 0.4)
    monkeypatch.setattr(probes, "LOOK_TIMEOUT_S", 0.4)


def test_a_server_that_generates_serves() -> None:
    assert generated(answer(completion())) == Generated(ok=True, tokens=3, text="Paris")
    assert generated(answer(completion(tokens=None))) == Generated(ok=True, tokens=1, text="Paris")
    packed = answer(gzip.compress(completion().encode()), headers="Content-Encoding: gzip\r\n")
    assert generated(packed).ok


def test_the_question_is_short_and_fixed() -> None:
    async def work() -> None:
        async with server(answer(completion())) as (port, asked):
            async with Probe(Place("127.0.0.1", port), ENDPOINTS) as probe:
                await probe.generate("m")
                await probe.generate(None)
            first, second = (json.loads(a.split(b"\r\n\r\n", 1)[1]) for a in asked)
            assert first == {"prompt": probes.PROMPT, "max_tokens": 8, "temperature": 0, "model": "m"}
            assert "model" not in second

    asyncio.run(work())


def test_a_fixed_prompt_is_answered_greedily_and_the_text_comes_whole_however_short() -> None:
    text = " Tokyo.\n" + "x" * 300
    said: Generated = probed(lambda p: p.complete("Q", 48, "m"), answer(completion(text)))
    assert said.text == text
    empty: Generated = probed(lambda p: p.complete("Q", 48, "m"), answer(completion("", tokens=0)))
    assert (empty.ok, empty.text) == (True, "")
    assert not probed(lambda p: p.complete("Q", 48, "m"), answer("no", 500)).ok

    async def work() -> None:
        async with server(answer(completion())) as (port, asked):
            async with Probe(Place("127.0.0.1", port), ENDPOINTS) as probe:
                await probe.complete("Q", 48, "m")
            body = json.loads(asked[0].split(b"\r\n\r\n", 1)[1])
            assert body == {"prompt": "Q", "max_tokens": 48, "temperature": 0, "model": "m"}

    asyncio.run(work())


def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert generated(answer(completion())).ok


@pytest.mark.parametrize("body", [completion("", 0), completion("", None), completion(None, None), completion("x", -1)])
def test_a_200_without_a_token_is_not_serving(body: str) -> None:
    assert generated(answer(body)) == Generated(ok=False, error="an answer without a single token")


@pytest.mark.parametrize(
    "body",
    ["", "OK", "{}", "[]", "null", "1", '"x"', '{"choices": []}', '{"choices": [1]}', '{"choices": {}}', '{"choices": null}',
     '{"choices": [{"text": "x"}], "usage": 3}', '{"choices": [{"text": "x"}], "usage": {"completion_tokens": 1e999}}',
     '{"choices": [{"text": "x"}], "usage": {"completion_tokens": NaN}}', "[" * 200_000, b"\xff\xfe\x00", b"\0" * 100,
     '{"choices": [{"text": "x"}], "usage": {"completion_tokens": "many"}}', '{"choices": [{"text": "x"}], "usage": [1]}',
     "9" * 10_000],
)  # fmt: skip
def test_an_answer_that_is_no_completion_is_not_serving(body: bytes | str) -> None:
    found = generated(answer(body))
    assert not found.ok
    assert "no completion" in found.error
    assert len(found.error) < 300
    assert probed(lambda p: p.model(), answer(body)) is None


def test_an_error_is_named_and_tamed() -> None:
    assert generated(answer("loading\x1b[31m\nmodel", 503)).error == "HTTP 503: loading model"
    assert generated(answer("x" * 5000, 500)).error.startswith("HTTP 500: xxx")
    assert "Location" not in generated(answer("", 307, "Location: http://127.0.0.1:9/\r\n")).error


@pytest.mark.parametrize("garbage", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",
                                     b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
                                     b"HTTP/9.9 x\r\n\r\n", b"\0" * 100])  # fmt: skip
def test_what_is_no_http_is_no_server(garbage: bytes) -> None:
    assert not generated(garbage).ok
    assert generated(garbage).error
    assert probed(lambda p: p.healthy(), garbage) is False
    assert probed(lambda p: p.scrape(), garbage) is None


def test_nobody_there_is_no_server() -> None:
    async def work() -> None:
        async with server() as (port, _):
            pass
        async with Probe(Place("127.0.0.1", port), ENDPOINTS) as probe:
            assert await probe.healthy() is False
            assert await probe.model() is None
            assert await probe.scrape() is None
            assert await probe.info("/info|/old") is None
            await probe.flush_cache()
            assert (await probe.generate(None)).error.startswith("ConnectError")

    asyncio.run(work())


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize(
    ("pieces", "how"),
    [
        ((), {"hang": True}),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n",), {"hang": True}),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",), {"forever": b"x", "every_s": 0.05}),  # never silent
        ((b"HTTP/1.1 200 OK\r\n",), {"forever": b"X: y\r\n", "every_s": 0.05}),
    ],
)
def test_a_server_that_never_comes_to_an_end_is_not_waited_for(pieces: tuple[bytes, ...], how: dict[str, Any]) -> None:
    async def work() -> list[Any]:
        async with server(*pieces, **how) as (port, _), Probe(Place("127.0.0.1", port), ENDPOINTS) as p:
            return await asyncio.gather(p.generate("m"), p.healthy(), p.scrape(), p.model())

    begun = time.monotonic()
    found, *others = asyncio.run(work())
    assert time.monotonic() - begun < PATIENCE_S
    assert found == Generated(ok=False, error="no whole answer within 0.4 s")
    assert others == [False, None, None]


def test_an_answer_without_end_is_cut_off() -> None:
    begun = time.monotonic()
    found = generated(b"HTTP/1.1 200 OK\r\n\r\n", forever=b"x" * 100_000)
    assert found.error == "an answer without end: more than 8 MiB"
    assert time.monotonic() - begun < PATIENCE_S


def test_an_answer_that_unpacks_without_end_is_cut_off() -> None:
    bomb = gzip.compress(b"x" * (64 << 20))
    assert "without end" in generated(answer(bomb, headers="Content-Encoding: gzip\r\n")).error


def test_health_metrics_model_and_info() -> None:
    assert probed(lambda p: p.healthy(), answer("")) is True
    assert probed(lambda p: p.healthy(), answer("", 503)) is False
    assert probed(lambda p: p.healthy(), answer("{}"), endpoints=Endpoints(health=None)) is True
    assert probed(lambda p: p.scrape(), answer("a 1\n")) == "a 1\n"
    assert probed(lambda p: p.scrape(), answer("a 1\n", 404)) is None
    assert probed(lambda p: p.scrape(), answer(""), endpoints=Endpoints(health=None, metrics=None)) is None
    assert probed(lambda p: p.info("/info|/old"), answer("{}")) == ("/info", "{}")
    assert probed(lambda p: p.info("/info|/old"), answer("{}", 404)) is None
    assert probed(lambda p: p.model(), answer('{"data": [{"id": "smol"}]}')) == "smol"
    assert probed(lambda p: p.flush_cache(), answer("", 500)) is None


def test_a_probe_that_is_cancelled_lets_go() -> None:
    async def work() -> None:
        async with server(hang=True) as (port, _), Probe(Place("127.0.0.1", port), ENDPOINTS) as probe:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await probe.generate(None)

    asyncio.run(work())


def test_a_connection_that_the_server_closed_while_idle_is_asked_again_and_only_once() -> None:
    asked = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.append(1)
        if len(asked) > drops:
            writer.write(answer("m 1"))
        writer.close()

    async def scraped() -> str | None:
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            async with Probe(Place("127.0.0.1", port), ENDPOINTS) as probe:
                return await probe.scrape()

    drops = 1
    assert asyncio.run(scraped()) == "m 1"
    asked.clear()
    drops = 9
    assert asyncio.run(scraped()) is None
    assert len(asked) == 2


@pytest.mark.parametrize(("after", "found"), [(0, 0.0), (3, 3.0)])
def test_gauges_that_stand_still_are_set_anew_by_a_request_of_our_own(after: int, found: float) -> None:
    """As SGLang's: they tell of the last batch that ran, however long ago; a request makes them tell of now."""
    generated = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            generated.append(1)
            writer.write(answer(json.dumps({"choices": [{"text": " Paris"}], "usage": {"completion_tokens": 1}})))
        else:
            writer.write(answer(str(after if generated else 128)))
        writer.close()

    async def work() -> float:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            place = Place("127.0.0.1", listening.sockets[0].getsockname()[1])
            async with Probe(place, ENDPOINTS) as probe:
                return await probe.requests(lambda text: Counters(running=float(text)))

    assert asyncio.run(work()) == found
    assert generated
