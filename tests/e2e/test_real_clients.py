"""The real `vllm bench serve` against a server whose truth is known: its figures arrive, and nothing of it is left."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_openai import Behaviour, FakeOpenAI

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.measurement import LevelSamples, figures
from autotuner.edge import procfs
from autotuner.edge.foreign_load import ForeignLoad
from autotuner.errors import HostError

VENV = Path(__file__).parents[2] / ".venv-vllm"
pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (VENV / ".ready").is_file():
        pytest.fail(f"{VENV.name}, the environment with real vLLM, is not there or not finished: run `make test-vllm`")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def benchmark(**more: Any) -> Benchmark:
    given = {"client": "vllm", "client_command": (str(VENV / "bin" / "vllm"), "bench", "serve"), "levels": (4,)}
    given |= {"tokenizer": str(VENV / "smollm2"), "seconds": 3.0, "prompt_tokens": 24, "output_tokens": 16}
    return Benchmark.model_validate(given | more)


async def measured(behaviour: Behaviour, benchmark: Benchmark) -> tuple[LevelSamples, str, FakeOpenAI]:
    async with FakeOpenAI(behaviour) as server, ForeignLoad(server.url, benchmark, benchmark.levels[0], "fake") as load:
        async for message in load.messages():
            if isinstance(message, LevelSamples):
                return message, load.void, server
    raise AssertionError("no samples came")


def test_its_figures_are_the_servers() -> None:
    samples, void, server = asyncio.run(measured(Behaviour(tok_s=100, ttft_ms=30), benchmark()))
    found = figures(samples)
    assert void == ""
    assert (found.requests_ok, found.requests_failed) == (44, 0)
    assert server.seen.requests == 44
    assert {body["max_tokens"] for body in server.seen.bodies} == {16}
    assert all(body["ignore_eos"] for body in server.seen.bodies)
    assert len({body["prompt"] for body in server.seen.bodies}) == 44
    assert found.output_tok_s == pytest.approx(4 * 16 / 0.18, rel=0.15)
    assert found.ttft_ms["p50"] >= 29
    assert found.tpot_ms["p50"] == pytest.approx(10, rel=0.1)


def test_a_rate_is_sent_as_asked_for() -> None:
    rate = benchmark(load="request-rate", levels=(10,), seconds=4.0)
    samples, void, _ = asyncio.run(measured(Behaviour(tok_s=100, ttft_ms=30), rate))
    assert void == ""
    assert len(samples.requests) == 50
    sent = [r.sent_s for r in samples.requests]
    assert (len(sent) - 1) / (sent[-1] - sent[0]) == pytest.approx(10, rel=0.1)


def test_its_exit_code_0_after_failures_alone_is_no_result() -> None:
    samples, void, _ = asyncio.run(measured(Behaviour(mode="http-500"), benchmark()))
    assert "all 44 requests of vllm bench serve failed" in void
    assert figures(samples).requests_failed == 44


def test_without_a_tokenizer_it_says_which_key_to_set() -> None:
    with pytest.raises(HostError, match="set tokenizer in the benchmark"):
        asyncio.run(measured(Behaviour(), benchmark(tokenizer="")))


def test_stopped_early_it_leaves_nothing_behind() -> None:
    async def work() -> tuple[LevelSamples, str]:
        async with FakeOpenAI(Behaviour(tok_s=5)) as server, ForeignLoad(server.url, benchmark(), 4, "fake") as load:
            async for message in load.messages():
                if isinstance(message, LevelSamples):
                    return message, load.void
                if server.seen.requests:
                    load.stop()
        raise AssertionError("no samples came")

    samples, void = asyncio.run(work())
    assert samples.stopped_early
    assert void == "vllm bench serve was stopped early, and keeps nothing when it is stopped"
    assert procfs.descendants(os.getpid()) == [os.getpid()]
