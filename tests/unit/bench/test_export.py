"""Files for other programs have those programs' own field names and units, agree with the figures, and invent nothing."""

import csv
import io
import json
import math
from typing import Any

import pytest

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.export import COLUMNS, Measured, exported, sglang_result, vllm_result
from autotuner.bench.measurement import LevelSamples, RequestSample, figures
from autotuner.bench.samples import pack_gaps

# What `vllm bench serve --save-result --save-detailed` of vLLM 0.32 writes for a text model without probes or ramps, with
# --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 90,99.
VLLM = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
    "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls",
    "latencies", "start_times", "queue_times", "generated_texts", "errors", "max_output_tokens_per_s",
    "max_concurrent_requests", "rtfx",
    *(f"{what}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for what in ("mean", "median", "std", "p90", "p99")),
}  # fmt: skip
# What `sglang.bench_serving --output-file … --output-details` of SGLang 0.5 writes.
SGLANG = {
    "tag", "backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len", "random_input_len",
    "random_output_len", "random_range_ratio", "server_info", "duration", "completed", "total_input_tokens",
    "total_input_text_tokens", "total_input_vision_tokens", "total_output_tokens", "total_output_tokens_retokenized",
    "request_throughput", "input_throughput", "output_throughput", "total_throughput", "concurrency", "accept_length",
    "max_output_tokens_per_s", "max_concurrent_requests", "input_lens", "output_lens", "ttfts", "itls", "generated_texts",
    "errors",
    *(
        f"{what}_{name}_ms"
        for name in ("e2e_latency", "ttft", "tpot", "itl")
        for what in ("mean", "median", "std", "p90", "p95", "p99")
    ),
}  # fmt: skip


def request(sent_s: float, **more: Any) -> RequestSample:
    table = {
        "sent_s": sent_s, "first_s": sent_s + 0.1, "end_s": sent_s + 0.5, "events": 5, "output_tokens": 5,
        "prompt_tokens": 32, "cached_tokens": 0, "asked_tokens": 5,
    }  # fmt: skip
    return RequestSample.model_validate(table | more)


def measured(*requests: RequestSample, gaps: bool = True, **more: Any) -> Measured:
    every = requests or (
        request(0.0),
        request(1.0),
        request(1.5),
        request(1.2, error="HTTP 503", events=0, first_s=None),
    )
    kept = pack_gaps([[100_000] * max(0, r.events - 1) for r in every]) if gaps else ""
    samples = LevelSamples(
        concurrency=2, steady_from_s=1.0, steady_to_s=3.0, requests=every, bins=(1,) * 10 + (3,) * 10, gaps=kept
    )
    fields = {"benchmark": Benchmark(levels=(2,)), "model": "m", "at": "2026-11-30 02:44:09Z", **more}
    return Measured(figures=figures(samples), samples=samples, **fields)


def test_a_vllm_file_has_the_fields_of_vllm() -> None:
    found = vllm_result(measured())
    assert set(found) == VLLM
    assert (found["date"], found["model_id"], found["request_rate"]) == ("20261130-024409", "m", "inf")
    assert (found["max_concurrency"], found["num_prompts"], found["completed"], found["failed"]) == (2, 3, 2, 1)
    assert found["ttfts"] == [pytest.approx(0.1), pytest.approx(0.1), None], "seconds; nothing is made up for a failure"
    assert found["itls"][0] == [0.1] * 4
    assert found["errors"] == ["", "", "HTTP 503"]
    assert (found["input_lens"], found["output_lens"]) == ([32, 32, 32], [5, 5, 0])
    assert (found["mean_ttft_ms"], found["median_itl_ms"]) == (pytest.approx(100.0), pytest.approx(100.0))
    assert found["max_output_tokens_per_s"] == 30.0
    assert (found["generated_texts"], found["rtfx"], found["tokenizer_id"]) == (None, None, None)


def test_a_sglang_file_has_the_fields_of_sglang() -> None:
    found = sglang_result(measured(accept_len=2.5))
    assert set(found) == SGLANG
    assert (found["backend"], found["request_rate"], found["accept_length"]) == ("sglang-oai", math.inf, 2.5)
    assert (found["random_input_len"], found["random_output_len"]) == (256, 128)
    assert found["concurrency"] == pytest.approx((0.5 + 0.5 + 0.5) / 2.0), "the mean in flight over the steady part"
    assert found["input_throughput"] == pytest.approx(found["total_throughput"] - found["output_throughput"])


def test_latencies_in_a_file_are_those_of_the_figures() -> None:
    """A closed loop: both count from when a request was sent, so both must come to the same."""
    level = measured(*(request(1.0 + i / 10, first_s=1.05 + i / 9) for i in range(12)))
    for found in (vllm_result(level), sglang_result(level)):
        assert found["median_ttft_ms"] == pytest.approx(level.figures.ttft_ms["p50"])
        assert found["p99_tpot_ms"] == pytest.approx(level.figures.tpot_ms["p99"])
        assert found["output_throughput"] == level.figures.output_tok_s
        assert found["mean_ttft_ms"] == pytest.approx(1000 * sum(found["ttfts"]) / 12)


def test_what_an_open_loop_held_back_stands_apart() -> None:
    rates = Benchmark(levels=(2,), load="request-rate", max_concurrency=8)
    found = vllm_result(measured(request(1.5, due_s=1.1), benchmark=rates))
    assert found["queue_times"] == [pytest.approx(0.4)]
    assert found["ttfts"] == [pytest.approx(0.1)]
    assert (found["request_rate"], found["max_concurrency"], found["burstiness"]) == (2, 8, 1.0)
    assert vllm_result(measured())["queue_times"] == [None] * 3


def test_what_is_not_known_is_null() -> None:
    level = measured(request(1.0, output_tokens=None, prompt_tokens=None), gaps=False)
    found = vllm_result(level)
    assert found["itls"] == [None]
    assert (found["input_lens"], found["output_lens"], found["total_input_tokens"]) == ([None], [None], None)
    assert (found["total_token_throughput"], found["mean_itl_ms"], found["request_goodput"]) == (None, None, None)
    assert sglang_result(level)["input_throughput"] is None
    nothing = measured(request(1.0, error="timeout", first_s=None, events=0, end_s=None))
    assert (vllm_result(nothing)["mean_ttft_ms"], vllm_result(nothing)["completed"]) == (None, 0)


def test_a_csv_has_a_line_for_each_request() -> None:
    rows = list(csv.DictReader(io.StringIO(exported([measured(), measured()], "csv"))))
    assert len(rows) == 8
    assert tuple(rows[0]) == COLUMNS
    assert [row["steady"] for row in rows[:4]] == ["false", "true", "true", "true"]
    assert (rows[1]["ttft_ms"], rows[1]["e2e_ms"], rows[1]["tpot_ms"]) == ("100.0", "500.0", "100.0")
    assert (rows[3]["error"], rows[3]["first_s"], rows[3]["ttft_ms"]) == ("HTTP 503", "", "")


def test_several_levels_are_lines_of_one_file() -> None:
    for form in ("vllm", "sglang"):
        lines = exported([measured(), measured()], form).splitlines()
        assert [json.loads(line)["completed"] for line in lines] == [2, 2]


def test_json_has_everything_and_the_gaps_beside_their_requests() -> None:
    level = measured()
    (found,) = json.loads(exported([level], "json"))
    assert found["samples"]["requests"][1]["gaps_us"] == [100_000] * 4
    assert "gaps" not in found["samples"]
    assert found["figures"]["ttft_ms"]["p50"] == level.figures.ttft_ms["p50"]
    assert found["benchmark"]["prompt_tokens"] == 256
