"""The load ends when its block ends, however that ends, and its worker's failure is one clear error."""

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_openai import Behaviour, FakeOpenAI
from patience import FOR_EVER_S, PATIENCE_S

from autotuner.bench import worker
from autotuner.bench.benchmark import Benchmark
from autotuner.bench.measurement import LevelSamples, Progress
from autotuner.edge import procfs
from autotuner.edge.load import Load
from autotuner.errors import HostError

BENCHMARK = Benchmark(levels=(2,), seconds=1.0, output_tokens=4, prompt_tokens=16, warmup_requests=0)


def pretend(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(worker, "command", lambda: (sys.executable, "-I", "-S", "-c", program))


async def messages(load: Load) -> list[Any]:
    return [m async for m in load.messages()]


def test_a_level_is_driven_and_its_samples_come_last() -> None:
    async def work() -> None:
        async with (
            FakeOpenAI(Behaviour(tok_s=2000, ttft_ms=1)) as server,
            Load(server.url, BENCHMARK, 2, "fake") as load,
        ):
            found = await messages(load)
            assert isinstance(found[-1], LevelSamples)
            assert all(isinstance(m, Progress) for m in found[:-1])
            assert found[-1].concurrency == 2
            assert any(not r.error for r in found[-1].requests)

    asyncio.run(work())


def test_a_stop_still_brings_the_samples() -> None:
    long = BENCHMARK.model_copy(update={"seconds": FOR_EVER_S})

    async def work() -> None:
        async with FakeOpenAI(Behaviour(tok_s=200)) as server, Load(server.url, long, 2, "fake") as load:
            async for message in load.messages():
                if isinstance(message, Progress):
                    load.stop()
                else:
                    assert message.stopped_early

    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


def test_no_load_is_left_when_the_block_ends() -> None:
    long = BENCHMARK.model_copy(update={"seconds": FOR_EVER_S})

    async def work() -> None:
        async with FakeOpenAI(Behaviour()) as server:
            load = Load(server.url, long, 2, "fake")
            with contextlib.suppress(RuntimeError):
                async with load:
                    raise RuntimeError
            assert load._process is not None
            pid = load._process.pid
            assert procfs.start_ticks(pid) is None

    asyncio.run(work())


def test_a_worker_that_says_nothing_or_nonsense_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with Load("http://127.0.0.1:9", BENCHMARK, 1, None) as load:
            await messages(load)

    pretend(monkeypatch, "import sys; sys.stdin.readline(); sys.stderr.write('no sockets'); sys.exit(3)")
    with pytest.raises(HostError, match="ended without a result: no sockets"):
        asyncio.run(work())
    pretend(monkeypatch, 'import sys; sys.stdin.readline(); print(\'{"kind": "x"}\', flush=True)')
    with pytest.raises(HostError, match="said something unknown"):
        asyncio.run(work())
    monkeypatch.setattr(worker, "command", lambda: ("/no/such/python",))
    with pytest.raises(HostError, match="the benchmark worker cannot be run: No such file"):
        asyncio.run(work())


def test_a_worker_that_dies_before_it_reads_its_order_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = Benchmark(levels=tuple(range(1, 60_000)), seconds=1)  # an order longer than a pipe

    async def work() -> None:
        async with Load("http://127.0.0.1:9", huge, 1, None) as load:
            await messages(load)

    pretend(monkeypatch, "import sys; sys.stderr.write('died early'); sys.exit(1)")
    with pytest.raises(HostError, match="ended without a result: died early"):
        asyncio.run(work())


def test_a_start_that_is_cancelled_leaves_no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    huge = Benchmark(levels=tuple(range(1, 60_000)), seconds=1)
    pid_file = tmp_path / "pid"
    pretend(monkeypatch, f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)")

    async def work() -> None:
        load = Load("http://127.0.0.1:9", huge, 1, None)
        task = asyncio.create_task(load.__aenter__())
        while not pid_file.exists() or not pid_file.read_text():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert procfs.start_ticks(int(pid_file.read_text())) is None

    asyncio.run(work())


def test_a_load_that_was_never_started_says_so() -> None:
    load = Load("http://127.0.0.1:9", BENCHMARK, 1, None)
    load.stop()
    with pytest.raises(HostError, match="was not started"):
        asyncio.run(messages(load))
