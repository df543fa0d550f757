"""The client's promises, held against a server whose truth is known."""

import asyncio
import contextlib
import functools
import itertools
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from fakes.fake_openai import Behaviour, FakeOpenAI, Seen
from unit.bench.asking import request_body

from autotuner.bench import client
from autotuner.bench.benchmark import Benchmark, Level
from autotuner.bench.client import LevelRun
from autotuner.bench.hotloop import HotLoop
from autotuner.bench.measurement import Figures, LevelSamples, Progress, figures
from autotuner.bench.target import Target
from autotuner.bench.workload import Workload

SHORT = Benchmark(levels=(1,), prompt_tokens=16, output_tokens=20, seconds=1.0, request_timeout_s=60.0)
LONG = SHORT.model_copy(update={"seconds": 600.0})  # to be stopped


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses after failures are short, where a test is not about them."""
    monkeypatch.setattr(client, "PAUSE_S", (0.01, 0.02))


def level_run(
    url: str,
    benchmark: Benchmark,
    level: Level,
    on_progress: Callable[[Progress], None] = lambda _: None,
    model: str | None = None,
    api_key: str | None = None,
) -> LevelRun:
    target = Target(url, api_key, benchmark.endpoint)
    return LevelRun(target, Workload(benchmark, level, model), level, on_progress)


def run_in_a_hot_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """As the worker does."""
    with asyncio.Runner(loop_factory=HotLoop) as runner:
        return runner.run(work)


async def stopped(run: LevelRun, when: Callable[[], bool]) -> None:
    """Stop a level as soon as something is true of it, however long that takes on this machine."""
    while not when():
        await asyncio.sleep(0.02)
    run.stop()


def level(
    behaviour: Behaviour,
    concurrency: int = 2,
    benchmark: Benchmark = SHORT,
    enough: int | None = None,
    progress: list[Progress] | None = None,
    api_key: str | None = None,
) -> tuple[LevelSamples, Seen]:
    async def go() -> tuple[LevelSamples, Seen]:
        heard = progress if progress is not None else []
        async with FakeOpenAI(behaviour) as server:
            run = level_run(server.url, benchmark, concurrency, heard.append, "m", api_key)
            doing = asyncio.create_task(stopped(run, lambda: enough is not None and server.seen.answered >= enough))
            try:
                return await run.run(), server.seen
            finally:
                doing.cancel()

    return run_in_a_hot_loop(go())


def against(
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], enough: int = 3
) -> Figures:
    """Run one stream against a server whose every connection is `handler`, until so many requests have ended."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await handler(reader, writer)
        writer.close()

    async def go() -> LevelSamples:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            port = server.sockets[0].getsockname()[1]
            run = level_run(f"http://127.0.0.1:{port}", LONG, 1)
            doing = asyncio.create_task(stopped(run, lambda: run._good + run._failed >= enough))
            return await run.run()
        finally:
            doing.cancel()
            server.close()

    return figures(run_in_a_hot_loop(go()))


@functools.cache
def ordinary() -> tuple[LevelSamples, Seen, tuple[Progress, ...]]:
    """One level of three streams against a server without faults, run once for all tests that look at it."""
    heard: list[Progress] = []
    benchmark = SHORT.model_copy(update={"warmup_requests": 2})
    samples, seen = level(Behaviour(), 3, benchmark, progress=heard, api_key="k-123")
    return samples, seen, tuple(heard)


def reply(answer: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()

    return handler


def test_throughput_and_latency_of_a_paced_server_are_measured_as_they_are() -> None:
    benchmark = SHORT.model_copy(update={"output_tokens": 30, "seconds": 2.0})
    truth = 4 * 30 / (0.040 + 29 / 100)  # a closed loop: the next request goes out as soon as an answer ends
    for _ in range(20):  # what else runs on the machine can only make server and client slower
        samples, _ = level(Behaviour(tok_s=100.0, ttft_ms=40.0), 4, benchmark)
        found = figures(samples)
        if found.output_tok_s > 0.97 * truth and found.ttft_ms["p50"] < 44.0 and not found.void:
            break
    assert found.output_tok_s == pytest.approx(truth, rel=0.05)
    assert found.ttft_ms["p50"] == pytest.approx(40.0, abs=5.0)
    assert found.tpot_ms["p50"] == pytest.approx(10.0, rel=0.1)
    assert found.requests_failed == 0
    assert found.void == ""


@pytest.mark.parametrize(("mode", "counted", "per_event"), [("normal", True, 20 / 5), ("no-usage", False, 1.0)])
def test_tokens_are_counted_from_usage_and_not_from_events(mode: str, counted: bool, per_event: float) -> None:
    samples, _ = level(Behaviour(mode=mode, tok_s=400.0, tokens_per_event=4), benchmark=LONG, enough=12)
    found = figures(samples)
    assert (found.tokens_counted, found.tokens_per_event) == (counted, pytest.approx(per_event, rel=0.12))
    after_warm_up = [r for r in samples.requests if not r.cut and r.output_tokens in {None, 20}]
    assert after_warm_up
    assert max(r.events for r in after_warm_up) == 5
    assert found.output_tok_s == pytest.approx(sum(samples.bins) * per_event / found.seconds)


def test_the_steady_part_begins_when_every_stream_has_warmed_up_and_excludes_what_was_before() -> None:
    samples, _, heard = ordinary()
    assert samples.steady_from_s is not None
    assert samples.steady_to_s is not None
    warm = [r for r in samples.requests if r.end_s is not None and r.end_s <= samples.steady_from_s]
    assert len(warm) >= 6
    assert sum(samples.bins) <= sum(r.events for r in samples.requests) - sum(r.events for r in warm)
    assert samples.steady_to_s - samples.steady_from_s >= 0.89  # a timer may fire late
    assert len(samples.bins) * 0.1 == pytest.approx(samples.steady_to_s - samples.steady_from_s)
    assert {p.phase for p in heard} == {"warm-up", "steady"}
    later = sum(r.events for r in samples.requests) - sum(r.events for r in warm)
    assert sum(p.events for p in heard if p.phase == "steady") <= later


def test_a_level_too_slow_to_finish_enough_requests_is_extended_to_twice_its_time_at_most() -> None:
    samples, _ = level(Behaviour(ttft_ms=1100, tok_s=1000.0), 1)
    assert samples.steady_from_s is not None
    assert samples.steady_to_s is not None
    assert 1.05 < samples.steady_to_s - samples.steady_from_s < 4.0  # a timer may fire late
    assert sum(not r.cut for r in samples.requests) == 2


def test_requests_in_flight_at_the_end_are_cut_and_their_tokens_still_count() -> None:
    samples, seen, _ = ordinary()
    cut = [r for r in samples.requests if r.cut]
    assert 1 <= len(cut) <= 3  # of three streams; one may just have had its answer, and have asked for nothing yet
    assert all(r.end_s is None and not r.error for r in cut)
    assert len(samples.requests) - 3 <= seen.requests <= len(samples.requests)
    start, end = samples.steady_from_s or 0.0, samples.steady_to_s or 0.0
    at_s = [
        (r.first_s or 0.0) + us / 1e6
        for r, gaps in zip(samples.requests, samples.gaps_us(), strict=True)
        for us in itertools.accumulate(gaps, initial=0)
        if r.events
    ]
    assert sum(start <= at < end for at in at_s) == pytest.approx(sum(samples.bins), abs=3)  # they are rounded


def test_stopping_ends_at_once_and_keeps_what_was_measured() -> None:
    async def go() -> tuple[LevelSamples, float]:
        loop = asyncio.get_running_loop()
        async with FakeOpenAI(Behaviour()) as server:
            run = level_run(server.url, SHORT.model_copy(update={"seconds": 600.0}), 2)
            task = asyncio.create_task(run.run())
            while not server.seen.answered > 4:
                await asyncio.sleep(0.02)
            run.stop()
            asked = loop.time()
            return await task, loop.time() - asked

    samples, took = run_in_a_hot_loop(go())
    assert took < 10.0  # of ten minutes
    assert samples.stopped_early
    assert figures(samples).output_tok_s > 0
    assert samples.requests


def test_stopping_before_the_start_sends_no_load() -> None:
    async def go() -> tuple[LevelSamples, Seen]:
        async with FakeOpenAI(Behaviour()) as server:
            run = level_run(server.url, SHORT, 2)
            run.stop()
            return await run.run(), server.seen

    samples, seen = run_in_a_hot_loop(go())
    assert samples.stopped_early
    assert seen.requests == 0


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("never-ready", "HTTP 503"),
        ("http-500", "HTTP 500"),
        ("error-in-200", "error in a 200 answer"),
        ("empty-stream", "empty stream"),
        ("truncated", "truncated stream"),
        ("health-ok-generate-hangs", "timeout"),
    ],
)
def test_each_failure_has_its_name_and_is_never_averaged_in(mode: str, name: str) -> None:
    samples, _ = level(
        Behaviour(mode=mode), 2, SHORT.model_copy(update={"request_timeout_s": 0.2 if name == "timeout" else 60.0})
    )
    found = figures(samples)
    assert set(found.errors) == {name}
    assert (found.requests_ok, found.output_tok_s, found.ttft_ms) == (0, 0.0, {})


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}", "not SSE"),
        (
            b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"error":{"message":"no such model"}}',
            "error in a 200 answer",
        ),
        (b"", "connection reset"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-st", "connection reset"),
        (b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {"text":"a"}\n\n', "truncated stream"),
    ],
)
def test_each_odd_answer_has_its_name(answer: bytes, name: str) -> None:
    assert set(against(reply(answer)).errors) == {name}


@pytest.mark.usefixtures("impatient")
def test_a_reset_in_the_middle_of_a_stream_is_called_a_reset() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {"text":"a"}\n\n')
        await writer.drain()
        await asyncio.sleep(0.05)
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    assert set(against(handler).errors) == {"connection reset"}


def test_a_stream_without_done_is_good_if_it_said_why_it_ended() -> None:
    event = b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\n\n'
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + event
    found = against(reply(answer))
    assert found.requests_failed == 0
    assert found.requests_ok > 0


def test_a_port_without_a_server_is_a_refused_connection_and_is_not_hammered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    benchmark = SHORT.model_copy(update={"warmup_requests": 0})

    async def go() -> LevelSamples:
        run = level_run(f"http://127.0.0.1:{port}", benchmark, 1)
        asyncio.get_running_loop().call_later(1.0, run.stop)
        return await run.run()

    samples = run_in_a_hot_loop(go())
    assert set(figures(samples).errors) == {"connect refused"}
    assert len(samples.requests) <= 4  # pauses of 0.1, 0.2, 0.4 and 0.8 s


def test_a_kept_connection_that_the_server_closes_is_no_failure() -> None:
    samples, seen = level(Behaviour(mode="closes-idle"), 4, LONG, enough=20)
    found = figures(samples)
    assert found.requests_failed == 0
    assert found.requests_ok > 8
    assert seen.connections > 8


def test_connections_are_kept_where_the_server_keeps_them() -> None:
    samples, seen, _ = ordinary()
    assert len(samples.requests) > 9
    assert seen.connections == 3


def test_both_sides_of_a_comparison_get_the_same_fresh_prompts() -> None:
    bodies = [level(Behaviour(), 2, LONG, enough=8)[1].bodies for _ in range(2)]
    shared = min(map(len, bodies))
    assert shared >= 6
    # Streams race for the next number, so the order may differ by a place; what is sent may not.
    expected = [request_body(LONG, 2, i, "m") for i in range(shared)]
    for side in bodies:
        assert sorted(b["prompt"] for b in side[:shared]) == sorted(b["prompt"] for b in expected)
        assert all(b in expected for b in side[:shared])
        assert len({b["prompt"] for b in side}) == len(side)


def test_the_api_key_is_sent_and_progress_is_told() -> None:
    _, seen, heard = ordinary()
    assert all(h["authorization"] == "Bearer k-123" for h in seen.headers)
    assert heard[-1].done > 0
    assert heard[-1].in_flight == 3


@pytest.mark.parametrize(
    ("url", "first", "host"),
    [
        ("http://127.0.0.1:8080", b"POST /v1/completions HTTP/1.1", b"Host: 127.0.0.1:8080"),
        ("http://[::1]:8080/", b"POST /v1/completions HTTP/1.1", b"Host: [::1]:8080"),
        ("http://gpu-7/llm", b"POST /llm/v1/completions HTTP/1.1", b"Host: gpu-7:80"),
    ],
)
def test_a_request_goes_to_the_right_host_and_path(url: str, first: bytes, host: bytes) -> None:
    head, _, body = Target(url).request({"a": "é"}).partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert (lines[0], lines[1]) == (first, host)
    assert b"Content-Length: %d" % len(body) in lines


@pytest.mark.parametrize("url", ["ftp://a:1", "127.0.0.1:80", "http://", "unix:/x", "http://a:99999"])
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        Target(url)


def test_a_key_cannot_smuggle_a_header_in() -> None:
    with pytest.raises(ValueError, match="control characters") as caught:
        Target("http://a", "x\r\nHost: evil")
    assert "evil" not in str(caught.value)


def test_an_answer_that_goes_on_after_done_holds_its_stream_up_for_a_moment_only() -> None:
    event = b'data: {"text":"a"}\n\ndata: {"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + event)
        await reader.read()  # the connection stays open for as long as the client wants it

    found = against(handler, enough=2)
    assert (found.requests_failed, found.tokens_per_event) == (0, 3.0)
    assert found.e2e_ms["p50"] < 1000, "what it is waited for is none of its time"
    assert found.requests_ok >= 2, "the next request goes out although the server keeps the answer open"


def test_connections_that_the_server_will_not_reuse_are_closed_by_the_client() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\nContent-Length: 37\r\n\r\n"
    answer += b'data: {"text":"a"}\n\ndata: [DONE]\n\n    '
    closed: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await reader.read()
        closed.append(await reader.read())

    found = against(handler, enough=6)
    assert found.requests_failed == 0
    assert len(closed) >= found.requests_ok - 1 > 3
