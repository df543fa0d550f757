"""The workload's promises: fresh, seeded prompts, the same for both sides, and a hash that tells benchmarks apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.workload import TOKENS_PER_WORD, prompt, request_body

numbers = st.integers(0, 10_000)


@given(numbers, numbers, numbers)
def test_the_same_request_is_the_same_text_every_time(seed: int, level: int, index: int) -> None:
    benchmark = Benchmark(seed=seed, prompt_tokens=32)
    assert prompt(benchmark, level, index) == prompt(Benchmark(seed=seed, prompt_tokens=32), level, index)


@given(st.sets(st.tuples(numbers, numbers, numbers), min_size=2, max_size=20))
def test_no_two_requests_share_a_first_word_so_no_prefix_cache_answers_one_from_another(
    keys: set[tuple[int, int, int]],
) -> None:
    openings = {prompt(Benchmark(seed=s, prompt_tokens=16), lv, i).split()[0] for s, lv, i in keys}
    assert len(openings) == len(keys)


@pytest.mark.parametrize("tokens", [64, 256, 4096])
def test_a_prompt_is_about_as_long_as_asked_for(tokens: int) -> None:
    words = len(prompt(Benchmark(prompt_tokens=tokens), 1, 0).split())
    assert words * TOKENS_PER_WORD == pytest.approx(tokens, rel=0.15)


def test_a_request_streams_asks_for_usage_and_fixes_its_length() -> None:
    body = request_body(Benchmark(output_tokens=77), 4, 9, "m")
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["model"]) == (77, True, 0, "m")


def test_what_a_server_might_not_know_is_left_out() -> None:
    body = request_body(Benchmark(ignore_eos=False), 1, 0, None)
    assert "ignore_eos" not in body
    assert "model" not in body


@pytest.mark.parametrize(
    "change", [{"levels": (1, 2)}, {"prompt_tokens": 9}, {"output_tokens": 9}, {"seconds": 9.0}, {"seed": 9}]
)
def test_the_hash_changes_with_whatever_makes_measurements_incomparable(change: dict[str, object]) -> None:
    assert Benchmark.model_validate(change).hash != Benchmark().hash


def test_the_hash_ignores_how_often_the_rules_look_and_the_order_of_levels() -> None:
    assert Benchmark(window_s=5.0).hash == Benchmark().hash
    assert Benchmark(levels=(8, 1)).hash == Benchmark(levels=(1, 8)).hash


@pytest.mark.parametrize(
    "wrong", [{"levels": ()}, {"levels": (0,)}, {"levels": (4, 4)}, {"output_tokens": 1}, {"second": 3}]
)
def test_a_benchmark_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Benchmark.model_validate(wrong)


def test_streams_do_not_run_in_lockstep_after_their_first_request() -> None:
    benchmark = Benchmark(levels=(1, 8), output_tokens=64)
    first = [request_body(benchmark, 8, i, None)["max_tokens"] for i in range(8)]
    assert first == [8, 16, 24, 32, 40, 48, 56, 64]
    assert {request_body(benchmark, 8, i, None)["max_tokens"] for i in range(8, 30)} == {64}
    assert request_body(benchmark, 1, 0, None)["max_tokens"] == 64


def test_without_a_warm_up_every_request_is_measured_and_so_has_its_full_length() -> None:
    benchmark = Benchmark(levels=(8,), output_tokens=64, warmup_requests=0)
    assert {request_body(benchmark, 8, i, None)["max_tokens"] for i in range(20)} == {64}
