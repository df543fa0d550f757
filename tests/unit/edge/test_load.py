"""The load ends when its block ends, however that ends, and its worker's failure is one clear error."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_openai import Behaviour, FakeOpenAI
from patience import FOR_EVER_S, PATIENCE_S, soon

from autotuner.bench import deadline, worker
from autotuner.bench.benchmark import Benchmark
from autotuner.bench.measurement import LevelSamples, Progress
from autotuner.edge import load as load_module
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


# --- a worker that hangs


def line(**said: Any) -> str:
    told = {
        "kind": "progress",
        "at_s": 0.5,
        "phase": "warm-up",
        "events": 0,
        "in_flight": 1,
        "done": 0,
        "failed": 0,
        **said,
    }
    return f"print({json.dumps(json.dumps(told))}, flush=True)"


HUNG = f"import sys, time; sys.stdin.readline(); {line()}; time.sleep(600)"


async def hung(load: Load) -> str:
    """Have a load tell what it does; it hangs, is gone when that is told, and why its level must not be used is returned."""
    async with load:
        found = await messages(load)
        assert load._process is not None
        assert procfs.start_ticks(load._process.pid) is None
    assert isinstance(found[-1], LevelSamples)
    assert not found[-1].requests
    assert load.hung
    return load.void


def test_a_worker_that_falls_silent_is_killed_and_its_level_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HUNG)
    monkeypatch.setattr(deadline, "SILENT_S", 1.0)
    monkeypatch.setattr(load_module, "LAST_LOOK_S", 0.1)
    said = asyncio.run(asyncio.wait_for(hung(Load("http://127.0.0.1:9", BENCHMARK, 1, None)), PATIENCE_S))
    assert said == "the benchmark's client hung: it said nothing for 1 s, and was killed"


def test_a_worker_that_talks_for_ever_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, f"import sys, time\nsys.stdin.readline()\nwhile True:\n  {line()}\n  time.sleep(0.2)")
    monkeypatch.setattr(deadline, "level_s", lambda _benchmark, _processes: 2.0)
    said = asyncio.run(asyncio.wait_for(hung(Load("http://127.0.0.1:9", BENCHMARK, 1, None)), PATIENCE_S))
    assert "had no samples when any level is over" in said


def test_a_worker_that_does_not_obey_a_stop_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, f"import sys, time\nsys.stdin.readline()\nwhile True:\n  {line()}\n  time.sleep(0.2)")
    monkeypatch.setattr(deadline, "tail_s", lambda _benchmark: 1.0)

    async def work() -> None:
        async with Load("http://127.0.0.1:9", BENCHMARK, 1, None) as load:
            async for _ in load.messages():
                load.stop()
            assert load.hung

    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


def test_a_worker_that_takes_no_order_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = Benchmark(levels=tuple(range(1, 60_000)), seconds=1)
    pretend(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(load_module, "ORDER_S", 0.5)
    with pytest.raises(HostError, match="did not take its order"):
        asyncio.run(asyncio.wait_for(hung(Load("http://127.0.0.1:9", huge, 1, None)), PATIENCE_S))


def test_a_workers_own_processes_end_with_it_although_they_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They hold the pipe on which it complains: while one lives, asyncio does not take the worker for ended."""
    pid_file = tmp_path / "pid"
    child = f"import os, signal, time; signal.signal(15, signal.SIG_IGN); open({str(pid_file)!r}, 'w').write(str(os.getpid()))"
    program = f"{child}; time.sleep(600)"
    start = f"import subprocess, sys, time; sys.stdin.readline(); subprocess.Popen([sys.executable, '-c', {program!r}])"
    pretend(monkeypatch, f"{start}; {line()}; time.sleep(600)")

    async def work() -> None:
        async with Load("http://127.0.0.1:9", BENCHMARK, 1, None) as load:
            async for _ in load.messages():
                await soon(lambda: pid_file.exists() and pid_file.read_text())
                break
        pid = int(pid_file.read_text())
        await soon(lambda: procfs.start_ticks(pid) is None)

    asyncio.run(asyncio.wait_for(work(), 2 * PATIENCE_S))


def test_a_deadline_holds_all_that_a_level_may_take() -> None:
    level = Benchmark(levels=(64,), seconds=30)
    assert deadline.level_s(level, 1) > 120 + 2 * 30 + deadline.tail_s(level)
    assert deadline.level_s(level, 8) > deadline.level_s(level, 1) + 3 * 120, "each doubling warms up anew"
    assert deadline.level_s(level.model_copy(update={"seconds": 600}), 1) > 4 * 600 + 2 * 600 + 600
