"""Other clients' command lines: what a benchmark says reaches each of them, and what it cannot do is refused."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from autotuner.bench import foreign
from autotuner.bench.benchmark import Benchmark
from autotuner.bench.foreign import Order, order, prompts_of, seed_of

CLIENTS = ("vllm", "sglang", "guidellm")
URL, FOLDER = "http://127.0.0.1:8000", "/run/x"


def benchmark(client: str, **more: Any) -> Benchmark:
    given = {"client": client, "levels": (4,), "seconds": 10, "prompt_tokens": 300, "output_tokens": 100}
    return Benchmark.model_validate(given | more)


def ordered(client: str, level: float = 4, **more: Any) -> Order:
    return order(benchmark(client, **more), level, URL, "model", FOLDER)


def said(found: Order, flag: str) -> str:
    return found.argv[found.argv.index(flag) + 1]


def spec(found: Order) -> dict[str, Any]:
    return dict(json.loads(found.files[foreign.CONFIG])["spec"])


def test_vllm_gets_the_load_the_lengths_and_where_the_result_goes() -> None:
    found = ordered("vllm", tokenizer="/models/t")
    assert found.argv[:3] == ("vllm", "bench", "serve")
    expected = {
        "--backend": "openai",
        "--base-url": URL,
        "--endpoint": "/v1/completions",
        "--model": "model",
        "--tokenizer": "/models/t",
        "--dataset-name": "random",
        "--random-input-len": "300",
        "--random-output-len": "100",
        "--max-concurrency": "4",
        "--temperature": "0",
        "--result-dir": FOLDER,
        "--result-filename": found.result,
    }
    assert {flag: said(found, flag) for flag in expected} == expected
    assert {"--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"} <= set(found.argv)
    assert "--request-rate" not in found.argv


def test_sglang_gets_the_load_the_lengths_and_where_the_result_goes() -> None:
    found = ordered("sglang", tokenizer="/models/t")
    assert found.argv[:3] == ("python3", "-m", "sglang.bench_serving")
    expected = {
        "--backend": "sglang-oai",
        "--base-url": URL,
        "--model": "model",
        "--tokenizer": "/models/t",
        "--random-input-len": "300",
        "--random-output-len": "100",
        "--max-concurrency": "4",
        "--output-file": f"{FOLDER}/{found.result}",
    }
    assert {flag: said(found, flag) for flag in expected} == expected
    assert {"--output-details", "--disable-tqdm"} <= set(found.argv)
    assert "--disable-ignore-eos" not in found.argv


def test_guidellm_gets_the_load_the_lengths_and_where_the_result_goes() -> None:
    found = ordered("guidellm", tokenizer="/models/t", prefix_tokens=40, prefixes=3, ramp_s=2)
    assert found.argv == ("guidellm", "run", "--config", f"{FOLDER}/{foreign.CONFIG}", "--disable-console")
    asked = spec(found)
    assert asked["profile"] == {"rampup_duration": 2.0, "kind": "concurrent", "streams": [4]}
    lengths = {"prompt_tokens": 260, "output_tokens": 100, "prefix_tokens": 40, "prefix_count": 3}
    assert asked["data"] == [{"kind": "synthetic_text", **lengths}]
    assert asked["backend"]["target"] == URL
    assert asked["backend"]["request_format"] == "/v1/completions"
    assert asked["tokenizer"]["model"] == "/models/t"
    assert asked["outputs"] == [{"kind": "json", "path": f"{FOLDER}/{found.result}"}]


def test_a_rate_is_an_open_loop_for_each_client() -> None:
    rate: dict[str, Any] = {"load": "request-rate", "levels": (2.5,), "max_concurrency": 64}
    vllm, sglang = ordered("vllm", 2.5, arrivals="constant", **rate), ordered("sglang", 2.5, **rate)
    assert (said(vllm, "--request-rate"), said(vllm, "--burstiness")) == ("2.5", "inf")
    assert said(ordered("vllm", 2.5, **rate), "--burstiness") == "1.0"
    assert (said(sglang, "--request-rate"), said(sglang, "--max-concurrency")) == ("2.5", "64")
    profile = spec(ordered("guidellm", 2.5, arrivals="constant", **rate))["profile"]
    assert profile == {"rampup_duration": 0.0, "kind": "constant", "rate": [2.5], "max_concurrency": 64}
    # Its warm-up cannot be told from the rest later, so it sends one of its own.
    assert said(sglang, "--warmup-requests") == "3"


def test_chat_goes_to_the_chat_endpoint() -> None:
    assert said(ordered("vllm", endpoint="chat"), "--endpoint") == "/v1/chat/completions"
    assert said(ordered("vllm", endpoint="chat"), "--backend") == "openai-chat"
    assert said(ordered("sglang", endpoint="chat"), "--backend") == "sglang-oai-chat"
    assert spec(ordered("guidellm", endpoint="chat"))["backend"]["request_format"] == "/v1/chat/completions"


def test_sharegpt_is_read_from_the_operators_own_file_and_no_prompt_twice() -> None:
    for client in ("vllm", "sglang"):
        found = ordered(client, dataset="/data/sharegpt.json")
        assert (said(found, "--dataset-name"), said(found, "--dataset-path")) == ("sharegpt", "/data/sharegpt.json")
        assert said(found, "--sharegpt-output-len") == "100"
        assert "--random-input-len" not in found.argv
    assert "--no-oversample" in ordered("vllm", dataset="/data/sharegpt.json").argv


@pytest.mark.parametrize("client", CLIENTS)
def test_an_api_key_is_in_the_environment_and_nowhere_else(client: str) -> None:
    found = order(benchmark(client), 4, URL, "model", FOLDER, api_key="secret-key")
    assert "secret-key" in found.env.values()
    assert "secret-key" not in repr((found.argv, found.files))


@pytest.mark.parametrize("client", CLIENTS)
def test_where_the_tool_lives_is_the_operators_to_say(client: str) -> None:
    assert ordered(client, client_command=("/opt/x", "run")).argv[:2] == ("/opt/x", "run")


# Traps, each with its guard.


def test_each_level_and_launch_has_prompts_of_its_own_and_both_sides_the_same() -> None:
    mine, theirs = benchmark("vllm", levels=(1, 8)), benchmark("vllm", levels=(1, 8))
    seeds = [seed_of(mine, level, launch) for level in (1, 8) for launch in (0, 1, 2)]
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds == [seed_of(theirs, level, launch) for level in (1, 8) for launch in (0, 1, 2)]
    assert seed_of(benchmark("vllm", seed=2), 1, 0) != seeds[0]
    assert said(order(mine, 8, URL, "m", FOLDER, launch=1), "--seed") == str(seed_of(mine, 8, 1))
    assert spec(order(benchmark("guidellm"), 4, URL, "m", FOLDER, launch=1))["seed"]["value"] == seed_of(mine, 4, 1)


def test_range_ratios_mean_one_length_to_each_although_they_count_from_opposite_ends() -> None:
    assert said(ordered("vllm"), "--random-range-ratio") == "0.0"
    assert said(ordered("sglang"), "--random-range-ratio") == "1.0"


def test_no_client_warms_up_with_a_prompt_that_it_counts_later() -> None:
    assert said(ordered("vllm"), "--num-warmups") == "0"
    assert said(ordered("sglang"), "--warmup-requests") == "0"
    assert ordered("vllm", warmup_requests=3).warmup == 12


def test_sglang_asks_for_usage_only_where_its_client_survives_the_answer() -> None:
    assert "include_usage" in said(ordered("sglang", endpoint="chat"), "--extra-request-body")
    assert "--extra-request-body" not in ordered("sglang").argv


@pytest.mark.parametrize(
    ("more", "level", "prompts"),
    [
        ({}, 4, 4 + 4 * 5),  # 10 s at 50 tok/s a stream are 5 answers of 100 tokens
        ({"seconds": 60}, 4, 4 + 4 * 30),
        ({"output_tokens": 10_000}, 4, 4 + 4 * 5),  # at least five a stream
        ({"requests": 77, "warmup_requests": 2}, 4, 8 + 77),
        ({"load": "request-rate", "levels": (2.5,)}, 2.5, 3 + 25),
    ],
)
def test_the_number_of_prompts_comes_from_requests_or_else_from_seconds(
    more: dict[str, Any], level: float, prompts: int
) -> None:
    assert prompts_of(benchmark("vllm", **more), level) == prompts
    assert said(ordered("vllm", level, **more), "--num-prompts") == str(prompts)


def test_guidellm_is_given_a_time_since_it_keeps_what_it_has_when_that_is_over() -> None:
    assert spec(ordered("guidellm"))["constraints"] == [{"kind": "max_duration", "seconds": 12.5}]
    both = spec(ordered("guidellm", requests=40))["constraints"]
    assert {c["kind"] for c in both} == {"max_duration", "max_requests"}


@pytest.mark.parametrize(
    ("client", "more", "says"),
    [
        ("vllm", {"turns": 2}, "has no conversations"),
        ("guidellm", {"load": "trace", "dataset": "t.json"}, "cannot play a trace"),
        ("vllm", {"dataset": "d.jsonl"}, "reads ShareGPT files alone"),
        ("vllm", {"prefix_tokens": 10, "prefixes": 2}, "prefixes must be 1"),
        ("vllm", {"ramp_s": 5}, "ramp_s must be 0"),
        ("vllm", {"ignore_eos": False}, "always sets ignore_eos"),
        ("sglang", {"prefix_tokens": 10}, "prefix_tokens must be 0"),
        ("sglang", {"load": "request-rate", "arrivals": "constant"}, '"poisson" arrivals alone'),
        ("sglang", {"ignore_eos": False}, "counts the tokens asked for"),
        ("guidellm", {"dataset": "d.json"}, "has a dataset format of its own"),
        ("guidellm", {"ignore_eos": False}, "always sets ignore_eos"),
        ("autotuner", {"tokenizer": "/models/t"}, "belong to another client"),
    ],
)
def test_what_a_client_cannot_do_is_refused_with_the_way_out(client: str, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        benchmark(client, **more)


def test_the_hash_of_benchmarks_for_our_own_client_is_what_it_was() -> None:
    assert Benchmark(client_command=(), tokenizer="").hash == Benchmark().hash
    assert len({benchmark(c).hash for c in CLIENTS} | {benchmark("vllm", client_command=("x",)).hash}) == 4


@pytest.mark.parametrize(
    ("said_last", "hint"),
    [
        ("ModuleNotFoundError: No module named 'sglang'", "set client_command"),
        ("RuntimeError: cannot find a tokenizer for fake", "set tokenizer"),
        ("vllm: error: unrecognized arguments: --num-warmups 0", "another release"),
        ("IndexError: index -1 is out of bounds for axis 0 with size 0", "when all requests failed"),
        ("something else", ""),
    ],
)
def test_the_last_words_of_a_client_become_advice(said_last: str, hint: str) -> None:
    sentence = foreign.ended_badly("sglang", 1, f"noise\n{said_last}\n")
    assert said_last in sentence
    assert hint in sentence
    assert "signal 9" in foreign.ended_badly("sglang", -9, "")
