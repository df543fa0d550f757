"""The workload's promises: fresh, seeded prompts of stated lengths, the same for both sides, datasets as they are recorded."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from unit.bench.asking import request_body

from autotuner.bench.benchmark import Benchmark, Level
from autotuner.bench.records import Records, parse_records
from autotuner.bench.words import WORDS, Words
from autotuner.bench.workload import Ask, Workload

numbers = st.integers(0, 10_000)
BOS, TEMPLATE = 1, 7
EXACT = Words(how="exact", words=WORDS[:200], openers=WORDS[:9], tokens_per_word=1.0, overhead=BOS)
CHAT = EXACT.model_copy(update={"overhead": TEMPLATE})


def text_of(asked: Ask | None) -> str:
    assert asked is not None
    return str(asked.body["prompt"])


def tokens_of(text: str, overhead: int = BOS) -> int:
    """As a server counts that has a token for each word: one that is doubled, missing or wrong would show."""
    words = text.split(" ")
    assert set(words) <= set(EXACT.words)
    return len(words) + overhead


def beginning(one: str, other: str) -> int:
    """How many words two texts have in common at their start."""
    pairs = zip(one.split(), other.split(), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one.split()), len(other.split())))


def records_of(*lines: object) -> Records:
    return parse_records("data.jsonl", "\n".join(json.dumps(line) for line in lines).encode())


def asks(workload: Workload, count: int) -> list[Ask]:
    found = [workload.ask(index) for index in range(count)]
    assert None not in found
    return [asked for asked in found if asked is not None]


# --- synthetic prompts


@given(numbers, numbers, numbers)
def test_the_same_request_is_the_same_text_every_time(seed: int, level: int, index: int) -> None:
    first, again = (request_body(Benchmark(seed=seed, prompt_tokens=32), level, index, None) for _ in range(2))
    assert first == again


@given(st.integers(BOS + 1, 600), numbers, st.sampled_from([1, 128, 0.5]))
def test_a_prompt_of_single_token_words_has_exactly_its_tokens_with_what_the_server_adds(
    tokens: int, index: int, level: Level
) -> None:
    benchmark = Benchmark(prompt_tokens=tokens, load="request-rate")
    assert tokens_of(text_of(Workload(benchmark, level, None, EXACT).ask(index))) == tokens


def test_a_prompt_that_the_servers_own_tokens_fill_has_one_word() -> None:
    workload = Workload(Benchmark(prompt_tokens=3, endpoint="chat"), 1, None, CHAT)
    assert len(asks(workload, 1)[0].body["messages"][0]["content"].split()) == 1


@pytest.mark.parametrize("tokens", [64, 256, 4096])
def test_a_prompt_for_an_unknown_server_is_about_as_long_as_asked_for(tokens: int) -> None:
    words = len(request_body(Benchmark(prompt_tokens=tokens), 1, 0, None)["prompt"].split())
    assert words * Words().tokens_per_word == pytest.approx(tokens, rel=0.05)


@given(st.integers(2, 300), st.integers(1, 5), st.integers(1, 200), st.integers(0, 50))
def test_a_shared_prefix_is_as_long_as_asked_for_and_the_rest_is_each_prompts_own(
    own: int, prefixes: int, shared: int, start: int
) -> None:
    benchmark = Benchmark(prompt_tokens=shared + own, prefix_tokens=shared, prefixes=prefixes)
    workload = Workload(benchmark, 32, None, EXACT)
    texts = [text_of(workload.ask(index)) for index in range(start, start + 40)]
    assert {tokens_of(text) for text in texts} == {shared + own}
    # What the server adds stands first and is a part of what is shared.
    heads = {" ".join(text.split()[: shared - BOS]) for text in texts}
    assert len(heads) <= prefixes
    assert len(set(texts)) == len(texts) or own < 4


def test_all_of_several_prefixes_are_used_and_another_level_has_others() -> None:
    benchmark = Benchmark(prompt_tokens=200, prefix_tokens=101, prefixes=4)
    heads = {level: {" ".join(t.split()[:100]) for t in _texts(benchmark, level, 100)} for level in (8, 32)}
    assert [len(found) for found in heads.values()] == [4, 4]
    assert max(beginning(a, b) for a in heads[8] for b in heads[32]) < 8


def _texts(benchmark: Benchmark, level: int, count: int) -> list[str]:
    workload = Workload(benchmark, level, None, EXACT)
    return [text_of(workload.ask(index)) for index in range(count)]


# --- conversations


def test_a_conversation_goes_on_from_the_servers_own_answers_as_text() -> None:
    workload = Workload(Benchmark(prompt_tokens=20, prefix_tokens=5, turns=3), 4, None, EXACT)
    first = workload.ask(0)
    second, third = workload.follow(0, (" an answer",)), workload.follow(0, (" an answer", " another"))
    assert text_of(second).startswith(text_of(first) + " an answer ")
    assert text_of(third).startswith(text_of(second) + " another ")
    new = text_of(third).removeprefix(text_of(second) + " another ")
    assert len(new.split()) == 20 - 5  # the prefix was said once
    assert [asked.more for asked in (first, second, third) if asked] == [True, True, False]
    with pytest.raises(IndexError, match="3 turns"):
        workload.follow(0, ("a", "b", "c"))


def test_a_chat_goes_on_from_the_servers_own_answers_as_messages() -> None:
    workload = Workload(Benchmark(prompt_tokens=20, turns=2, endpoint="chat"), 4, "m", CHAT)
    (first,) = asks(workload, 1)
    body = workload.follow(0, ("so",)).body
    assert "prompt" not in body
    assert body["messages"][:2] == [*first.body["messages"], {"role": "assistant", "content": "so"}]
    assert body["messages"][2]["role"] == "user"
    assert len(body["messages"][2]["content"].split()) == 20
    assert len(first.body["messages"][0]["content"].split()) == 20 - TEMPLATE


def test_no_turn_of_a_conversation_says_what_another_says() -> None:
    workload = Workload(Benchmark(prompt_tokens=40, turns=3, endpoint="chat"), 4, None, CHAT)
    said = [
        m["content"] for i in range(5) for m in workload.follow(i, ("x", "y")).body["messages"] if m["role"] == "user"
    ]
    assert len({" ".join(text.split()[:8]) for text in said}) == 15


# --- what a request asks for


def test_a_request_streams_asks_for_usage_and_fixes_its_length() -> None:
    body = request_body(Benchmark(output_tokens=77), 4, 9, "m")
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["model"]) == (77, True, 0, "m")


def test_what_a_server_might_not_know_is_left_out() -> None:
    body = request_body(Benchmark(ignore_eos=False), 1, 0, None)
    assert "ignore_eos" not in body
    assert "model" not in body


def test_streams_do_not_run_in_lockstep_after_their_first_request() -> None:
    benchmark = Benchmark(levels=(1, 8), output_tokens=64)
    first = [request_body(benchmark, 8, i, None)["max_tokens"] for i in range(8)]
    assert first == [8, 16, 24, 32, 40, 48, 56, 64]
    assert {request_body(benchmark, 8, i, None)["max_tokens"] for i in range(8, 30)} == {64}
    assert request_body(benchmark, 1, 0, None)["max_tokens"] == 64


@pytest.mark.parametrize("changed", [{"warmup_requests": 0}, {"load": "request-rate"}])
def test_without_a_warm_up_or_without_streams_every_request_has_its_full_length(changed: dict[str, Any]) -> None:
    benchmark = Benchmark(levels=(8,), output_tokens=64, **changed)
    assert {request_body(benchmark, 8, i, None)["max_tokens"] for i in range(20)} == {64}


def test_a_conversation_is_staggered_by_its_first_turn_alone() -> None:
    workload = Workload(Benchmark(output_tokens=64, turns=2), 8, None)
    assert asks(workload, 1)[0].body["max_tokens"] == 8
    assert workload.follow(0, ("x",)).body["max_tokens"] == 64


# --- datasets


def test_a_datasets_prompts_are_all_sent_in_an_order_of_each_level_before_any_is_sent_again() -> None:
    records = records_of(*({"prompt": f"question {i}"} for i in range(20)))
    orders = {}
    for level in (4, 8):
        workload = Workload(Benchmark(dataset="d"), level, None, records=records)
        texts = [text_of(workload.ask(index)) for index in range(40)]
        assert set(texts[:20]) == set(texts[20:]) == {f"question {i}" for i in range(20)}
        assert texts[:20] != texts[20:]
        orders[level] = texts
    assert orders[4] != orders[8]


def test_a_record_says_how_long_its_answer_may_be_and_the_benchmark_where_it_does_not() -> None:
    records = records_of({"prompt": "a", "max_tokens": 5}, {"prompt": "b", "output_tokens": 6}, {"prompt": "c"})
    workload = Workload(Benchmark(dataset="d", output_tokens=9, warmup_requests=0), 1, None, records=records)
    assert {a.body["prompt"]: a.body["max_tokens"] for a in asks(workload, 3)} == {"a": 5, "b": 6, "c": 9}


def test_messages_are_sent_as_they_are_to_chat_and_as_their_text_to_completions() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    records = records_of({"messages": messages})
    chat, text = (
        Workload(Benchmark(dataset="d", endpoint=e), 1, None, records=records) for e in ("chat", "completions")
    )
    assert asks(chat, 1)[0].body["messages"] == messages
    assert asks(text, 1)[0].body["prompt"] == "be brief\nhi"
    assert not asks(chat, 1)[0].more


def test_a_recorded_conversation_is_played_with_the_servers_answers_for_as_many_turns_as_it_has_and_the_benchmark_allows() -> (
    None
):
    turns = [("human", "one"), ("gpt", "recorded"), ("human", "two"), ("gpt", "recorded"), ("human", "three")]
    records = records_of({"conversations": [{"from": who, "value": said} for who, said in turns]})
    workload = Workload(Benchmark(dataset="d", turns=2), 1, None, records=records)
    (first,) = asks(workload, 1)
    second = workload.follow(0, (" new",))
    assert (first.body["prompt"], first.more) == ("one", True)
    assert (second.body["prompt"], second.more) == ("one new\ntwo", False)
    longer = Workload(Benchmark(dataset="d", turns=9), 1, None, records=records)
    assert not longer.follow(0, ("a", "b")).more
    assert not asks(Workload(Benchmark(dataset="d"), 1, None, records=records), 1)[0].more


def trace(*requests: tuple[float, int, int, list[int]]) -> Records:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    return records_of(*(dict(zip(keys, request, strict=True)) for request in requests))


def test_a_trace_is_played_once_in_the_order_of_its_times_as_much_faster_as_the_level_says() -> None:
    records = trace((9000, 30, 3, []), (4000, 10, 1, []), (5000, 20, 2, []))
    workload = Workload(Benchmark(dataset="d", load="trace", levels=(2,)), 2, None, EXACT, records)
    played = asks(workload, 3)
    assert [a.at_s for a in played] == [0.0, 0.5, 2.5]
    assert [tokens_of(a.body["prompt"]) for a in played] == [10, 20, 30]
    assert [a.body["max_tokens"] for a in played] == [1, 2, 3]
    assert workload.ask(3) is None


def test_a_trace_in_a_closed_loop_lends_its_lengths_and_has_no_end() -> None:
    workload = Workload(Benchmark(dataset="d"), 4, None, EXACT, trace((0, 30, 3, []), (7, 10, 8, [])))
    again = asks(workload, 100)
    assert {tokens_of(a.body["prompt"]) for a in again} == {10, 30}
    assert {a.at_s for a in again} == {None}


@pytest.mark.parametrize("words", [EXACT, CHAT], ids=["completions", "chat"])
def test_requests_of_a_trace_share_the_blocks_whose_ids_they_share_and_no_token_more(words: Words) -> None:
    records = trace((0, 1400, 1, [0, 1, 2]), (1, 1500, 1, [0, 1, 3]), (2, 1400, 1, [4, 5, 6]), (3, 1300, 1, [0, 1, 2]))
    endpoint = "completions" if words is EXACT else "chat"
    workload = Workload(Benchmark(dataset="d", load="trace", endpoint=endpoint), 1, None, words, records)
    bodies = [a.body for a in asks(workload, 4)]
    texts = [b["prompt"] if words is EXACT else b["messages"][0]["content"] for b in bodies]
    assert [tokens_of(text, words.overhead) for text in texts] == [1400, 1500, 1400, 1300]
    ahead = words.overhead if words is EXACT else 0  # of a block's 512 tokens, what the server puts before the text
    assert 2 * 512 <= beginning(texts[0], texts[1]) + ahead < 2 * 512 + 8
    assert beginning(texts[0], texts[2]) < 8
    assert beginning(texts[0], texts[3]) + words.overhead == 1300


def test_what_a_traces_blocks_do_not_cover_is_each_requests_own() -> None:
    records = trace((0, 700, 1, [0]), (1, 700, 1, [0]))
    one, other = asks(Workload(Benchmark(dataset="d", load="trace"), 1, None, EXACT, records), 2)
    assert 512 <= beginning(one.body["prompt"], other.body["prompt"]) + BOS < 520


# --- what makes measurements comparable


@pytest.mark.parametrize(
    "change",
    [
        {"levels": (1, 2)},
        {"prompt_tokens": 9},
        {"output_tokens": 9},
        {"seconds": 9.0},
        {"seed": 9},
        {"prefix_tokens": 9},
        {"turns": 2},
        {"endpoint": "chat"},
        {"dataset": "d"},
        {"dataset": "d", "dataset_sha256": 64 * "a"},
    ],
)
def test_the_hash_changes_with_whatever_makes_measurements_incomparable(change: dict[str, object]) -> None:
    assert Benchmark.model_validate(change).hash != Benchmark().hash


def test_the_hash_goes_by_a_datasets_content_and_not_by_its_place() -> None:
    here = Benchmark(dataset="here", dataset_sha256=64 * "a")
    assert here.hash == Benchmark(dataset="there", dataset_sha256=64 * "a").hash
    assert here.hash != Benchmark(dataset="here", dataset_sha256=64 * "b").hash


def test_measurements_from_before_workloads_stay_comparable() -> None:
    assert Benchmark().hash == "2b849606ba223ec5"


def test_the_hash_ignores_how_often_the_rules_look_and_the_order_of_levels() -> None:
    assert Benchmark(window_s=5.0).hash == Benchmark().hash
    assert Benchmark(levels=(8, 1)).hash == Benchmark(levels=(1, 8)).hash


@pytest.mark.parametrize(
    "wrong",
    [
        {"levels": ()},
        {"levels": (0,)},
        {"levels": (4, 4)},
        {"output_tokens": 1},
        {"second": 3},
        {"prefix_tokens": 256},
        {"prefixes": 2},
        {"dataset": "d", "prefix_tokens": 9},
        {"dataset_sha256": 64 * "a"},
        {"dataset": "d", "dataset_sha256": "abc"},
        {"load": "trace"},
    ],
)
def test_a_benchmark_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Benchmark.model_validate(wrong)
