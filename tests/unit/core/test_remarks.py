"""What stands in no table is said: failures by name, counts that nobody gave, prompts that were not as asked."""

from typing import Any

from unit.core.building import figures as built

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.measurement import TOO_FEW, Figures
from autotuner.core.remarks import in_words, level_remarks, prompts_remark, requests_remarks

FRESH = Benchmark(levels=(8,), prompt_tokens=256)


def figures(**more: Any) -> Figures:
    return built(8, 100.0).model_copy(update={"itl_ms": {"p50": 10.0, "p99": 20.0}, **more})


def test_a_level_as_it_should_be_needs_no_words() -> None:
    assert level_remarks(figures(), FRESH) == []


def test_failures_are_named_the_most_frequent_first() -> None:
    said = requests_remarks(figures(requests_failed=5, errors={"HTTP 503": 1, "timeout": 4}))
    assert said == ["5 requests failed: 4 timeout, 1 HTTP 503"]


def test_counts_that_are_wrong_or_missing_are_said_by_name() -> None:
    said = requests_remarks(figures(usage_problems={TOO_FEW: 1}, tokens_counted=False))
    assert said[0] == "1 request: fewer tokens than asked for, although ignore_eos"
    assert said[1].startswith("no usage: a token is an event here")


def test_requests_that_went_out_twice_are_said_of_a_level_and_burden_no_entry() -> None:
    assert level_remarks(figures(requests_retried=2), FRESH)[0].startswith("2 requests went out twice")
    assert requests_remarks(figures(requests_retried=2)) == []


def test_late_requests_are_said_with_how_late() -> None:
    (said,) = requests_remarks(figures(send_late_ms={"p50": 3.0, "p99": 45.0}))
    assert said.startswith("requests went out 3 ms (p50) and 45 ms (p99) after their time")
    assert requests_remarks(figures(send_late_ms={"p50": 1.0, "p99": 4.0})) == []


def test_a_server_that_does_not_keep_up_with_its_rate_is_said_so() -> None:
    rate = Benchmark(levels=(8,), load="request-rate")
    assert level_remarks(figures(answered_req_s=3.1), rate) == [
        "3.10 of 8 requests a second were answered: the server does not keep up"
    ]
    assert level_remarks(figures(answered_req_s=7.9), rate) == []
    assert level_remarks(figures(answered_req_s=3.1), FRESH) == [], "a closed loop has no rate to keep up with"


def test_a_cache_that_knows_fresh_prompts_is_said_and_one_that_should_is_not() -> None:
    (said,) = level_remarks(figures(cache_hit_ratio=0.9), FRESH)
    assert "90 % of the prompts came from the prefix cache" in said
    assert level_remarks(figures(cache_hit_ratio=0.9), Benchmark(levels=(8,), prefix_tokens=200)) == []


def test_void_drift_and_missing_itl_are_said() -> None:
    said = level_remarks(figures(void="too slow", drift_ratio=-0.12), FRESH)
    assert said == ["void: too slow", "the rate changed by -12 % from the first third to the last"]
    (said_itl,) = level_remarks(figures(client_note="ITL is not known: the client was late"), FRESH)
    assert said_itl.startswith("ITL is not known")


def test_where_the_client_ran_is_said_beside_a_benchmark_and_in_an_entry_only_where_it_took_something() -> None:
    apart = figures(client_placed="the load client was pinned to core 7, which the server may not use")
    assert level_remarks(apart, FRESH) == ["the load client was pinned to core 7, which the server may not use"]
    assert requests_remarks(apart) == []
    taken = figures(client_placed="not pinned", client_shared="not pinned; it took 12 % of the cores")
    assert requests_remarks(taken) == level_remarks(taken, FRESH) == ["not pinned; it took 12 % of the cores"]


def test_whether_prompts_were_exact_is_said() -> None:
    exact, off = (
        figures(prompt_tokens_min=256, prompt_tokens_max=256),
        figures(prompt_tokens_min=250, prompt_tokens_max=261),
    )
    assert prompts_remark([exact, exact], FRESH) == "prompts were exact: 256 tokens each"
    assert prompts_remark([exact, off], FRESH) == "prompts had 250 to 261 tokens each, 256 asked for"
    assert prompts_remark([figures()], FRESH).startswith("nobody knows")
    assert prompts_remark([off], Benchmark(levels=(8,), dataset="x.jsonl")) == ""


def test_a_benchmark_reads_as_a_line() -> None:
    assert in_words(Benchmark(levels=(1, 8), seconds=30)) == (
        "concurrency 1, concurrency 8; 256 prompt tokens, 128 output tokens; 30 s a level after its warm-up"
    )
    rate = Benchmark(levels=(0.5,), load="request-rate", prefix_tokens=100, turns=3, requests=50)
    assert in_words(rate) == (
        "0.5 req/s; 256 prompt tokens, 100 of them shared, 128 output tokens, 3 turns; "
        "50 requests, at most 60 s a level after its warm-up"
    )
