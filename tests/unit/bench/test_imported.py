"""Recorded results of real clients become figures; what their clients hide is found in them and said."""

import base64
import json
import zlib
from array import array
from pathlib import Path
from typing import Any, cast

import pytest

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.foreign import Client, Order
from autotuner.bench.imported import Imported, imported
from autotuner.bench.measurement import Figures, figures

RECORDED = Path(__file__).parent / "foreign"
# Recorded with a server of 30 ms to the first token and 10 ms a token: 16 requests of 12 tokens, two at a time.
GOOD = {
    "vllm": "vllm-0.32.json",
    "sglang": "sglang-0.5.23-python.jsonl",
    "sglang-rust": "sglang-0.5.23-rust.jsonl",
    "guidellm": "guidellm-0.8.1.json",
}


def read(client: str, text: str, level: float = 2, warmup: int = 2, **more: Any) -> Imported:
    name = cast(Client, client.removesuffix("-rust"))
    given = {"client": name, "levels": (level,), "prompt_tokens": 16, "output_tokens": 12, "seconds": 1}
    found = Order(name, (), {}, {}, "result.json", warmup, 60.0)
    return imported(Benchmark.model_validate(given | more), level, found, text)


def recorded(client: str, **more: Any) -> tuple[Imported, Figures]:
    found = read(client, (RECORDED / GOOD[client]).read_text(), **more)
    return found, figures(found.samples)


def columns(**changed: Any) -> str:
    """A result as vLLM leaves it: 40 requests of 4 tokens, two at a time, with some columns changed."""
    starts = [100 + 0.25 * (i // 2) for i in range(40)]
    found: dict[str, Any] = {"duration": 5.0, "start_times": starts, "queue_times": [0.0] * 40}
    found |= {"input_lens": [16] * 40, "output_lens": [4] * 40, "errors": [""] * 40}
    return json.dumps(found | {"ttfts": [0.1] * 40, "itls": [[0.05] * 3] * 40} | changed)


@pytest.mark.parametrize("client", GOOD)
def test_a_recorded_run_of_each_client_has_the_figures_that_the_server_kept(client: str) -> None:
    found, measured = recorded(client)
    assert found.void == ""
    assert measured.requests_ok == 16
    assert measured.requests_failed == 0
    assert measured.tokens_counted
    assert measured.tokens_per_event == 1.0
    truth = 2 * 12 / 0.145
    assert measured.output_tok_s == pytest.approx(truth, rel=0.12)
    if client != "guidellm":  # it takes its time between two requests, and had 1.8 of 2 in flight
        assert measured.output_tok_s_low < truth < measured.output_tok_s_high
    assert 30 <= measured.ttft_ms["p50"] < 40
    assert measured.tpot_ms["p50"] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("client", GOOD)
def test_the_warm_up_and_the_end_in_which_streams_fall_idle_are_not_counted(client: str) -> None:
    found, _ = recorded(client)
    samples = found.samples
    assert samples.steady_from_s is not None
    assert samples.steady_to_s is not None
    first_wave = [r for r in samples.requests if r.sent_s < samples.steady_from_s]
    assert len(first_wave) >= 2
    assert all(r.end_s is not None and r.end_s <= samples.steady_from_s for r in samples.requests[:2])
    assert samples.steady_to_s <= max(r.sent_s for r in samples.requests)
    assert len(samples.bins) == round((samples.steady_to_s - samples.steady_from_s) / 0.1)


def test_an_event_that_only_ends_an_answer_is_neither_a_token_nor_a_gap() -> None:
    """vLLM's client times it like a token: its gap would be 0.01 ms."""
    found, measured = recorded("vllm")
    assert all(r.events == 12 for r in found.samples.requests)
    assert found.samples.merged_ratio == 0.0
    assert measured.itl_ms["p50"] == pytest.approx(10, abs=1)


def test_the_gaps_are_kept_so_that_any_figure_can_be_computed_again() -> None:
    found, _ = recorded("vllm")
    gaps = array("I", zlib.decompress(base64.b64decode(found.samples.gaps)))
    assert len(gaps) == sum(r.events - 1 for r in found.samples.requests)
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(10_000, rel=0.1)


def test_guidellm_divides_by_all_tokens_and_we_by_the_gaps_between_them() -> None:
    text = (RECORDED / GOOD["guidellm"]).read_text()
    row = json.loads(text)["benchmarks"][0]["requests"]["successful"][0]
    at = row["info"]["timings"]
    ours = 1000 * (at["last_token_iteration"] - at["first_token_iteration"]) / 11
    assert row["time_per_output_token_ms"] > 1.1 * ours
    _, measured = recorded("guidellm")
    assert measured.tpot_ms["p50"] == pytest.approx(ours, rel=0.1)
    assert measured.itl_ms == {}  # it keeps no gaps


def test_guidellm_tells_what_the_prefix_cache_answered() -> None:
    assert recorded("guidellm")[1].cache_hit_ratio == 0.0
    assert recorded("vllm")[1].cache_hit_ratio is None


def test_sglang_tells_no_send_times_and_they_are_worked_out_only_where_the_end_agrees() -> None:
    placed, _ = recorded("sglang-rust")
    assert len({r.sent_s for r in placed.samples.requests}) > 10
    result = json.loads((RECORDED / GOOD["sglang-rust"]).read_text())
    slow = read("sglang", json.dumps(result | {"duration": 1.5 * result["duration"]}))
    measured = figures(slow.samples)
    assert slow.void == ""
    assert slow.samples.steady_from_s == 0.0  # the whole run
    assert measured.seconds == pytest.approx(1.5 * result["duration"], abs=0.01)
    assert measured.output_tok_s == pytest.approx(192 / (1.5 * result["duration"]), rel=0.01)
    # Nobody knows when the tokens came, so the rate is no better known than that.
    assert measured.output_tok_s_low == 0.0
    assert measured.output_tok_s_high > 2 * measured.output_tok_s
    assert measured.ttft_ms["p50"] == pytest.approx(31, abs=2)


def test_a_rate_of_sglang_counts_the_whole_run() -> None:
    text = (RECORDED / GOOD["sglang-rust"]).read_text()
    found = read("sglang", text, 14, 0, load="request-rate")
    assert found.samples.steady_from_s == 0.0
    assert all(r.sent_s == 0.0 for r in found.samples.requests)


@pytest.mark.parametrize(
    ("client", "name"),
    [
        ("vllm", "vllm-0.32-all-failed.json"),
        ("sglang", "sglang-0.5.23-rust-all-failed.jsonl"),
        ("guidellm", "guidellm-0.8.1-all-failed.json"),
    ],
)
def test_zeros_printed_for_failed_requests_are_no_result(client: str, name: str) -> None:
    found = read(client, (RECORDED / name).read_text())
    measured = figures(found.samples)
    assert found.void.startswith("all 4 requests of ")
    assert (measured.requests_ok, measured.requests_failed) == (0, 4)
    assert measured.ttft_ms == {}


def test_a_saturated_client_has_no_gaps_to_show_and_its_level_is_void() -> None:
    found = read("vllm", columns(itls=[[0.0, 0.00002, 0.14998]] * 40), output_tokens=4)
    assert "the benchmark client was the limit: 67 % of the gaps" in found.void
    assert figures(found.samples).itl_ms == {}
    some = read("vllm", columns(itls=[[0.05, 0.00002, 0.09998]] * 40), output_tokens=4)
    assert some.void == ""  # a third: the gaps are not believed, the rate still is
    assert figures(some.samples).itl_ms == {}


def test_a_client_that_never_had_its_streams_open_was_the_limit() -> None:
    found = read("vllm", columns(), 8, output_tokens=4)
    assert "kept 2 requests in flight, not 8" in found.void


def test_a_client_that_sent_another_rate_than_asked_for_is_void() -> None:
    """Recorded: guidellm 0.8.1 sends about twice what Poisson arrivals are asked for."""
    text = (RECORDED / "guidellm-0.8.1-rate.json").read_text()
    found = read("guidellm", text, 20, load="request-rate")
    assert "were asked for" in found.void
    assert "20 req/s" in found.void
    assert read("vllm", columns(), 8, load="request-rate", output_tokens=4).void == ""


def test_a_request_due_in_1970_is_due_when_it_was_sent() -> None:
    document = json.loads((RECORDED / GOOD["guidellm"]).read_text())
    document["benchmarks"][0]["requests"]["successful"][3]["info"]["timings"]["targeted_start"] = -0.9
    found = read("guidellm", json.dumps(document), 13, load="request-rate")
    due = [r.due_s for r in found.samples.requests]
    assert due.count(None) == 1
    assert all(at is None or at > -1 for at in due)
    assert found.void == ""


def test_tokens_counted_by_tokenising_the_text_again_are_not_believed() -> None:
    lengths = [4] * 30 + [3] * 10
    found = read("vllm", columns(output_lens=lengths), output_tokens=4)
    assert "10 of 40 answers have other than the 4 tokens asked for" in found.void
    assert read("vllm", columns(output_lens=lengths), output_tokens=4, ignore_eos=False, dataset="x.json").void == ""


def test_tokens_counted_because_they_were_asked_for_are_held_against_the_text() -> None:
    result = json.loads((RECORDED / GOOD["sglang"]).read_text())
    short = read("sglang", json.dumps(result | {"total_output_tokens_retokenized": 40}))
    assert "192 output tokens because they were asked for, but the text that came has only 40" in short.void


def test_too_few_requests_for_a_steady_part_are_said_to_be_too_few() -> None:
    found = read("vllm", columns(), warmup=39, output_tokens=4)
    assert "nothing was steady: raise requests or seconds" in found.void


def test_a_request_cut_off_by_the_end_is_neither_good_nor_failed() -> None:
    document = json.loads((RECORDED / GOOD["guidellm"]).read_text())
    requests = document["benchmarks"][0]["requests"]
    last = requests["successful"].pop()
    last["info"] |= {"status": "cancelled", "error": "Request was cancelled"}
    requests["incomplete"] = [last]
    measured = figures(read("guidellm", json.dumps(document)).samples)
    assert (measured.requests_ok, measured.requests_failed) == (15, 0)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"benchmarks": []}', '{"ttfts": [1]}'])
@pytest.mark.parametrize("client", ["vllm", "sglang", "guidellm"])
def test_a_result_of_another_form_is_one_clear_error(client: str, text: str) -> None:
    with pytest.raises(ValueError, match="another form"):
        read(client, text)


def test_a_result_without_the_times_of_requests_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="each request's times"):
        read("vllm", '{"ttfts": []}')
