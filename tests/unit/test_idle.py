"""Between two levels nothing may run, and what a server says of that is not always true of this moment."""

import asyncio
import contextlib
import http.client
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.rehearsed import Rehearsed

from autotuner.edge.probes import Probe
from autotuner.engines import ENGINES
from autotuner.engines.base import Endpoints, Place
from autotuner.measure import becomes_idle

SGLANG = Endpoints(health="/health", metrics="/metrics", flush_cache="/flush_cache")
METRICS = "# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{{}} {}\n"
TOKENS = {"choices": [{"text": " Paris"}], "usage": {"completion_tokens": 1}}


def cut_off(server: Rehearsed, count: int) -> None:
    """Begin so many streams and leave in the middle of them, as a level's load does at its end."""
    lines = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=20) for _ in range(count)]
    for line in lines:
        line.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 100_000, "stream": True}))
    answers = [line.getresponse() for line in lines]
    server.wait(lambda: server.text.count("Decode batch, #running-req: 3") >= 2, "decoding them all")
    for answer, line in zip(answers, lines, strict=True):
        answer.close()
        line.close()


def asked(port: int, engine: str, wait_s: float, endpoints: Endpoints = SGLANG) -> bool:
    async def ask() -> bool:
        async with Probe(Place("127.0.0.1", port), endpoints) as probe:
            return await becomes_idle(probe, ENGINES[engine], wait_s)

    return asyncio.run(ask())


def flush(server: Rehearsed) -> int:
    return server.get("/flush_cache")[0]


def test_a_rehearsed_sglangs_gauges_stand_still_after_a_cut_and_a_request_moves_them(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "sglang") as server:
        server.wait_ready()
        cut_off(server, 3)
        server.wait(lambda: flush(server) == 200, "idle")
        assert server.counters.running == 3, "as the last line left it, though nothing runs"
        server.complete(8)
        assert server.counters.running == 0


def test_a_rehearsed_sglang_sets_its_gauges_anew_after_it_was_idle_for_a_while(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "sglang", speed=20) as server:
        server.wait_ready()
        cut_off(server, 3)
        server.wait(lambda: server.counters.running == 0, "looked at again")


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_the_other_rehearsed_engines_gauges_are_of_this_moment(tmp_path: Path, engine: str) -> None:
    with Rehearsed(tmp_path, engine) as server:
        server.wait_ready()
        server.load(3, 30)
        server.wait(lambda: server.counters.running == 0, "idle")


def test_a_level_begins_after_one_that_was_cut_off_although_the_gauges_stand_still(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "sglang") as server:
        server.wait_ready()
        cut_off(server, 3)
        assert asked(server.port, "sglang", 20.0)
        assert server.text.count("POST /flush_cache") == 1, "and not before it would be done"
        assert 'POST /flush_cache HTTP/1.1" 200' in server.text


def test_a_server_that_others_use_never_becomes_idle() -> None:
    assert not asyncio.run(_with_metrics(lambda asked: 2))


def test_a_gauge_that_no_request_moves_is_believed() -> None:
    assert asyncio.run(_with_metrics(lambda asked: 4 if asked == 0 else 0))


async def _with_metrics(running: Callable[[int], int]) -> bool:
    async with _serving(running) as port, Probe(Place("127.0.0.1", port), SGLANG) as probe:
        return await becomes_idle(probe, ENGINES["sglang"], 1.5)


@contextlib.asynccontextmanager
async def _serving(running: Callable[[int], int]) -> AsyncIterator[int]:
    """A server whose gauge is a function of how many requests it has answered."""
    answered = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next((int(x.split(":")[1]) for x in head.split("\r\n") if x.startswith("content-length")), 0)
                await reader.readexactly(length)
                said: Any = {}
                if "/completions" in head:
                    answered += 1
                    said = TOKENS
                body = METRICS.format(running(answered)) if "/metrics" in head else json.dumps(said)
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
