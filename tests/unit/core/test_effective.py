"""One configuration out of many partial facts, its differences from what was asked, and when two servers are one."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.core.candidate import Candidate, Launch
from autotuner.core.effective import Demand, Difference, differences, identity, merge
from autotuner.engines.base import Effective

DEMAND = Demand((1, 8, 128), 384)
FULL = Effective(
    running_cap=256,
    kv_tokens=684832,
    context_len=8192,
    attention_backend="triton",
    graph_max_batch=256,
    speculating=False,
    kv_cache_dtype="bfloat16",
    dp=1,
    version="0.5.12",
    arguments="0123456789abcdef",
    source="server",
)


def candidate(engine: Any = "sglang", name: str = "a", env: dict[str, str] | None = None, **args: Any) -> Candidate:
    flags = {key.replace("_", "-"): value for key, value in args.items()}
    return Candidate(name=name, engine=engine, launch=Launch(model="/models/big", args=flags, env=env or {}))


def found(
    asked: Effective | None = None, env: dict[str, str] | None = None, engine: str = "sglang", **effective: Any
) -> tuple[Difference, ...]:
    return differences(asked or Effective(), replace(FULL, **effective), DEMAND, engine, env or {})


def the_one(*args: Any, **more: Any) -> Difference:
    (difference,) = found(*args, **more)
    return difference


# --- merging


def test_an_answer_beats_the_log_and_the_log_beats_the_dump_of_arguments_in_whatever_order_they_came() -> None:
    facts = [
        Effective(running_cap=48, version="1", source="server"),
        Effective(running_cap=256, attention_backend="fa3"),
        Effective(running_cap=512, attention_backend="triton", speculating=True, source="arguments"),
    ]
    for order in (facts, facts[::-1]):
        whole = merge(order)
        assert (whole.running_cap, whole.attention_backend, whole.speculating) == (48, "fa3", True)


def test_within_one_source_the_later_line_is_believed() -> None:
    assert merge([Effective(running_cap=256), Effective(running_cap=48)]).running_cap == 48


def test_the_figures_of_data_parallel_ranks_are_summed_and_a_rank_counts_once() -> None:
    lines = [Effective(running_cap=48)]  # of the main process, before the ranks divide it
    lines += [Effective(running_cap=6, kv_tokens=1000, context_len=8192, rank=f"DP{i}") for i in range(8)] * 2
    whole = merge(lines)
    assert (whole.running_cap, whole.kv_tokens, whole.context_len, whole.dp) == (48, 8000, 8192, 8)


def test_what_holds_for_each_rank_counts_as_often_as_there_are_ranks() -> None:
    facts = [Effective(dp=4, source="arguments"), Effective(running_cap=64, rank="each")]
    assert merge(facts).running_cap == 256
    assert merge(facts[1:]).running_cap == 64


def test_nothing_said_is_nothing_known() -> None:
    assert replace(merge([]), source="log") == Effective()


ONE = st.builds(
    Effective,
    running_cap=st.none() | st.integers(0, 9),
    context_len=st.none() | st.integers(0, 9),
    speculating=st.none() | st.booleans(),
    rank=st.sampled_from(["", "DP0", "DP1"]),
    source=st.sampled_from(["arguments", "log", "server"]),
)


@given(facts=st.lists(ONE, max_size=8))
def test_a_merge_forgets_nothing_that_was_said_and_saying_it_twice_changes_nothing(facts: list[Effective]) -> None:
    whole = merge(facts)
    for name in ("running_cap", "context_len", "speculating"):
        assert (getattr(whole, name) is None) == all(getattr(fact, name) is None for fact in facts)
    assert merge(facts + facts) == whole


# --- differences


def test_a_server_that_is_what_was_asked_for_differs_in_nothing() -> None:
    assert found() == ()
    assert found(Effective(running_cap=256, attention_backend="TRITON", context_len=8192, graph_max_batch=256)) == ()


def test_nothing_known_is_no_difference() -> None:
    asked = Effective(running_cap=256, attention_backend="triton", speculating=True, context_len=8192)
    assert differences(asked, Effective(), DEMAND, "sglang", {}) == ()


def test_a_cap_below_the_largest_level_says_how_many_wait_and_what_lifts_it() -> None:
    difference = the_one(Effective(speculating=True), running_cap=48, speculating=True)
    assert str(difference) == (
        "running requests: 48 in force, nothing asked; 80 of 128 requests wait at the largest level: a default of "
        "speculation, not its cost (set args.max-running-requests to 128 or more)"
    )
    assert "args.max-num-seqs" in the_one(running_cap=48, engine="vllm").advice
    assert "args.parallel" in the_one(running_cap=48, engine="llamacpp").advice


def test_a_cap_that_was_asked_for_and_is_below_the_largest_level_is_told_too() -> None:
    assert str(the_one(Effective(running_cap=48), running_cap=48)) == (
        "running requests: 48 as asked; 80 of 128 requests wait at the largest level "
        "(set args.max-running-requests to 128 or more)"
    )


def test_a_cap_below_what_was_asked_is_a_difference_even_where_no_level_feels_it() -> None:
    difference = the_one(Effective(running_cap=512))
    assert (difference.asked, difference.effective) == ("512", "256")
    assert "lowered it itself" in difference.advice


def test_graphs_that_are_off_matter_only_where_nobody_asked_for_that() -> None:
    assert the_one(graph_max_batch=0).what == "CUDA graphs"
    assert found(Effective(graph_max_batch=0), graph_max_batch=0) == ()


def test_the_largest_graph_is_held_against_what_one_rank_runs_at_once() -> None:
    difference = the_one(graph_max_batch=48)
    assert difference.why == "up to 128 requests decode at once, and those above 48 without a graph"
    assert found(graph_max_batch=48, dp=4) == ()
    assert {d.what for d in found(graph_max_batch=48, running_cap=48)} == {"running requests"}


@pytest.mark.parametrize(
    ("asked", "got", "same"),
    [
        ("fa3", "triton", False),
        ("FLASH_ATTN", "FLASH_ATTN_VLLM_V1", True),
        ("flash-attn", "FLASH_ATTN", True),
        ("trtllm_mla", "flashmla", False),
    ],
)
def test_another_attention_backend_is_told_from_another_spelling(asked: str, got: str, *, same: bool) -> None:
    assert bool(found(Effective(attention_backend=asked), attention_backend=got)) is not same


def test_speculation_that_was_asked_for_and_is_off_and_the_other_way_round() -> None:
    off = the_one(Effective(speculating=True, spec_method="EAGLE3"))
    assert (off.asked, off.effective) == ("EAGLE3", "off")
    on = the_one(Effective(speculating=False), speculating=True, spec_method="EAGLE")
    assert (on.asked, on.effective) == ("off", "EAGLE")


def test_draft_tokens_that_were_adjusted() -> None:
    asked = Effective(speculating=True, draft_tokens=8, spec_steps=3)
    difference = the_one(asked, speculating=True, draft_tokens=4, spec_steps=3)
    assert (difference.what, difference.asked, difference.effective) == ("draft tokens", "8", "4")


def test_a_shorter_context_and_one_that_the_requests_do_not_fit_into() -> None:
    assert the_one(Effective(context_len=32768)).why == "longer requests are refused or cut"
    assert the_one(context_len=256).why == "a request of 384 tokens does not fit"


def test_a_kv_cache_that_the_largest_level_does_not_fit_into() -> None:
    difference = the_one(kv_tokens=40_000)
    assert difference.why == "128 requests of 384 tokens need 49152, so some are put back"
    assert {d.what for d in found(kv_tokens=40_000, running_cap=64)} == {"running requests"}


def test_nccl_variables_matter_where_nccl_carries_small_messages_and_are_moot_where_it_does_not() -> None:
    tuned = {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO"}
    moot = the_one(env=tuned, all_reduce="custom, nccl")
    assert moot.why == "small messages never reach NCCL, so NCCL_ALGO can hardly change decoding"
    assert "disable-custom-all-reduce" in moot.advice
    matters = the_one(env=tuned, all_reduce="nccl")
    assert "its variables matter" in matters.why
    assert found(Effective(all_reduce="nccl"), tuned, all_reduce="nccl") == ()
    assert found(env={"NCCL_DEBUG": "INFO"}, all_reduce="custom, nccl") == ()


# --- identity


def test_two_ways_of_asking_for_one_server_have_one_identity_and_names_do_not_count() -> None:
    plain = identity(candidate(), FULL)
    assert len(plain) == 16
    assert identity(candidate(name="b", max_running_requests=256, cuda_graph_max_bs=512), FULL) == plain
    assert identity(candidate(env={"NCCL_DEBUG": "INFO"}), FULL) == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"running_cap": 48},
        {"graph_max_batch": 48},
        {"kv_tokens": 100_000},
        {"attention_backend": "fa3"},
        {"speculating": True},
        {"version": "0.5.13"},
        {"arguments": "fedcba9876543210"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"all_reduce": "nccl"},
    ],
)
def test_another_server_has_another_identity(changes: dict[str, Any]) -> None:
    assert identity(candidate(), replace(FULL, **changes)) != identity(candidate(), FULL)


def test_another_model_environment_or_program_is_another_server() -> None:
    plain = candidate()
    for launch in (
        plain.launch.model_copy(update={"model": "/models/other"}),
        plain.launch.model_copy(update={"env": {"NCCL_ALGO": "Ring"}}),
        plain.launch.model_copy(update={"python": "/opt/other/bin/python"}),
    ):
        assert identity(plain.model_copy(update={"launch": launch}), FULL) != identity(plain, FULL)


def test_a_kv_cache_that_differs_as_launches_do_is_the_same() -> None:
    assert identity(candidate(), replace(FULL, kv_tokens=684_000)) == identity(candidate(), FULL)


@pytest.mark.parametrize("name", ["running_cap", "kv_tokens", "context_len", "graph_max_batch", "attention_backend"])
def test_what_is_not_known_makes_two_servers_never_the_same(name: str) -> None:
    assert identity(candidate(), replace(FULL, **{name: None})) == ""


def test_a_flag_that_nothing_known_stands_for_keeps_two_servers_apart() -> None:
    said = replace(FULL, arguments=None)
    plain = identity(candidate("vllm"), said)
    assert identity(candidate("vllm", max_num_seqs=256), said) == plain
    assert identity(candidate("vllm", max_num_batched_tokens=4096), said) != plain
    assert identity(candidate("vllm", enable_expert_parallel=False), said) == plain, "false leaves a flag out"
    one = candidate("vllm", speculative_config='{"method": "ngram", "num_speculative_tokens": 4}')
    other = candidate("vllm", speculative_config='{"num_speculative_tokens":4,"method":"ngram"}')
    assert identity(one, said) == identity(other, said) != plain
    drafter = candidate("vllm", speculative_config='{"method": "eagle3", "model": "/d2"}')
    assert identity(drafter, said) != identity(one, said)


def test_slots_that_share_a_cache_are_not_those_that_have_one_each() -> None:
    apart = replace(FULL, arguments=None, running_cap=4, context_len=512, kv_tokens=2048)
    shared = replace(apart, kv_tokens=512)
    asked = candidate("llamacpp", parallel=4, ctx_size=2048)
    assert identity(asked, apart) == identity(candidate("llamacpp", np=4, c=2048), apart)
    assert identity(asked, apart) != identity(candidate("llamacpp", ctx_size=512), shared)


def test_a_server_that_tells_nothing_is_nobodys_twin() -> None:
    command = Candidate(name="c", engine="command", launch=Launch(command=("serve", "{port}")))
    assert identity(command, Effective()) == ""
