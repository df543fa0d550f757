"""Processes that carry a level together begin and end together, and none is left, whatever becomes of one of them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_openai import Behaviour, FakeOpenAI
from patience import PATIENCE_S, soon

from autotuner.bench import worker
from autotuner.bench.conductor import Conductor
from autotuner.bench.measurement import LevelSamples, Progress

ROOT = Path(__file__).parents[3]

# A process of a level as the conductor sees it; `fate` is what becomes of it.
PART = """
import json, os, sys, time
order = json.loads(sys.stdin.readline())
me, fate = order["shard"], order["fates"][order["shard"]]
def say(**said): print(json.dumps(said), flush=True)
def progress(**more): say(**{"kind": "progress", "at_s": 1.0, "phase": "warm-up", "events": 5, "in_flight": 1, "done": 1, "failed": 0, **more})
def samples(**more):
    say(kind="samples", concurrency=order["concurrency"], steady_from_s=1.0, steady_to_s=1.2, bins=[me + 1, 10], **more)
    sys.exit(0)
progress()
if fate == "killed in its warm-up": os.kill(os.getpid(), 9)
if fate == "ends in half a line": os.write(1, b'{"kind": "samples", "concur'); sys.exit(0)
if fate == "says nonsense": print("hello", flush=True)
if fate == "ends early": samples()
if fate == "late": time.sleep(0.4)
if fate != "never warm": progress(waits=True, busy_ratio=0.9 if fate == "busy" else 0.1)
line = sys.stdin.readline()
if not line: samples(stopped_early=True)
assert json.loads(line)["begin_at"] > 0
progress(phase="steady", events=7)
if fate == "killed in its steady part": os.kill(os.getpid(), 9)
if fate == "runs on" and not sys.stdin.readline(): samples(stopped_early=True)
samples()
"""


def conduct(
    *fates: str,
    busy_max: float = 0.6,
    during: Callable[[Conductor], None] | None = None,
    after_s: float = 0.0,
    when: Callable[[list[Progress]], bool] = lambda _: True,
) -> tuple[LevelSamples | None, Conductor, list[Progress]]:
    heard: list[Progress] = []
    command = (sys.executable, "-I", "-S", "-c", PART)
    made = Conductor(command, {"fates": fates, "concurrency": 4}, len(fates), busy_max, heard.append)

    async def go() -> LevelSamples | None:
        async def meanwhile() -> None:
            await asyncio.sleep(after_s)
            await soon(lambda: when(heard))
            if during is not None:
                during(made)

        doing = asyncio.create_task(meanwhile())
        try:
            return await asyncio.wait_for(made.run(), PATIENCE_S)
        finally:
            doing.cancel()

    try:
        return asyncio.run(go()), made, heard
    finally:
        assert all(part.process.returncode is not None for part in made._parts), "none is left"


def test_what_all_measured_becomes_one_level() -> None:
    samples, _, _ = conduct("", "", "")
    assert samples is not None
    assert samples.bins == (1 + 2 + 3, 30)
    assert samples.processes == 3


def test_all_begin_when_the_last_is_warm() -> None:
    samples, _, _ = conduct("", "late", "")
    assert samples is not None
    assert not samples.stopped_early


@pytest.mark.parametrize(
    "fate", ["killed in its warm-up", "killed in its steady part", "ends in half a line", "says nonsense"]
)
def test_one_that_is_lost_is_a_clear_error_and_takes_the_others_with_it(fate: str) -> None:
    with pytest.raises(RuntimeError, match="one of the benchmark's processes ended without a result"):
        conduct("runs on", fate, "" if "steady" in fate else "never warm")


def test_one_that_ends_in_its_warm_up_ends_all() -> None:
    samples, _, _ = conduct("never warm", "ends early", "")
    assert samples is not None
    assert samples.stopped_early


def test_too_busy_processes_are_stopped_before_their_steady_part_to_have_more() -> None:
    assert conduct("busy", "runs on")[0] is None
    samples, _, _ = conduct("busy", "", busy_max=float("inf"))
    assert samples is not None, "more are not to be had"


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05, 0.3])
def test_a_stop_at_any_instant_brings_what_was_measured(after_s: float) -> None:
    samples, _, _ = conduct("never warm", "runs on", "late", during=Conductor.stop, after_s=after_s)
    assert samples is not None
    assert samples.stopped_early
    assert samples.processes == 3


def test_progress_adds_the_parts_up_and_goes_on_while_nothing_comes() -> None:
    def all_said(heard: list[Progress]) -> bool:
        return sum(p.events for p in heard) >= 15 and heard[-1].events == 0

    _, _, heard = conduct("never warm", "", during=Conductor.stop, when=all_said)
    assert len(heard) >= 2
    assert heard[-1].in_flight == 2
    assert heard[-1].events == 0
    assert sum(p.events for p in heard if p.phase == "warm-up") == 15


# Real processes


def order(url: str, **more: Any) -> bytes:
    benchmark = {"levels": [4], "prompt_tokens": 16, "output_tokens": 6, "seconds": 1.0, **more.pop("benchmark", {})}
    fields = {"url": url, "benchmark": benchmark, "concurrency": 4, "processes_max": 2, "busy_max": 0.0, **more}
    return json.dumps(fields).encode() + b"\n"


async def carried(line: bytes) -> tuple[LevelSamples, list[Progress]]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*worker.command(), stdin=pipe, stdout=pipe, limit=1 << 24, cwd=ROOT)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    lines = [found async for found in process.stdout]
    process.stdin.close()
    assert await process.wait() == 0
    return LevelSamples.model_validate_json(lines[-1]), [Progress.model_validate_json(x) for x in lines[:-1]]


def test_a_level_grows_to_more_processes_and_is_whole() -> None:
    async def go() -> tuple[LevelSamples, int]:
        async with FakeOpenAI(Behaviour(tok_s=500.0)) as server:
            samples, _ = await carried(order(server.url))
            return samples, server.seen.requests

    samples, seen = asyncio.run(go())
    assert samples.processes == 2
    assert len(samples.gaps_us()) == len(samples.requests) < seen
    assert {r.error for r in samples.requests} == {""}
    assert sum(samples.bins) > 0
    assert samples.itl_ms


@pytest.mark.parametrize(
    ("more", "processes"),
    [({"concurrency": 1}, 1), ({"benchmark": {"requests": 1}}, 1), ({"processes_max": 1}, 1)],
)
def test_no_process_is_started_that_would_have_nothing_to_do(more: dict[str, Any], processes: int) -> None:
    made = worker._Level(worker._order(order("http://127.0.0.1:1", **more)), lambda _: None)
    assert made._processes_max == processes


def test_no_process_of_a_level_outlives_the_worker_however_that_ends() -> None:
    async def go() -> list[int]:
        async with FakeOpenAI(Behaviour()) as server:
            line = order(server.url, processes=2, busy_max=1.0, benchmark={"seconds": 600})
            process = await asyncio.create_subprocess_exec(
                *worker.command(), stdin=asyncio.subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=ROOT
            )
            assert process.stdin is not None
            process.stdin.write(line)
            children: list[int] = []
            while len(children) < 2 or server.seen.requests < 4:
                await asyncio.sleep(0.02)
                children = _children(process.pid)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await soon(lambda: not any(map(_runs, children)))
            return [pid for pid in children if _runs(pid)]

    assert asyncio.run(go()) == []


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_stopped_while_it_starts_still_says_so() -> None:
    argv = worker.command()
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ}) as process:
        said, _ = process.communicate(order("http://127.0.0.1:1", processes_max=1), timeout=PATIENCE_S)
    samples = LevelSamples.model_validate_json(said.splitlines()[-1])
    assert samples.stopped_early
    assert process.returncode == 0
