"""What a follow-up's wish comes to in flags: each engine's own names, each release's, and never two that contradict."""

import json
from typing import Any

import pytest

from autotuner.core.candidate import Candidate, Launch, derive
from autotuner.engines import ENGINES
from autotuner.engines.renamed import replacement
from autotuner.engines.wishes import (
    CannotChange,
    Changed,
    DraftSteps,
    GraphBatch,
    GraphsOn,
    MemoryShare,
    RunAtOnce,
    SpeculateUpTo,
    Wish,
)

EAGLE3 = {
    "speculative-algorithm": "EAGLE3",
    "speculative-draft-model-path": "/d",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}
JSON = '{"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}'


def candidate(engine: Any, args: dict[str, Any]) -> Candidate:
    return Candidate(name="c", engine=engine, launch=Launch(model="/m", args=args))


def changed(engine: str, args: dict[str, Any], wish: Wish, version: str | None = None) -> Candidate:
    before = candidate(engine, args)
    answer = ENGINES[engine].change(before, wish, version)
    assert isinstance(answer, Changed), answer
    after = derive(before, answer.settings, "", answer.label)
    assert not ENGINES[engine].check(after), "what is proposed passes the engine's own check"
    return after


def refused(engine: str, args: dict[str, Any], wish: Wish, version: str | None = None) -> str:
    answer = ENGINES[engine].change(candidate(engine, args), wish, version)
    assert isinstance(answer, CannotChange), answer
    return answer.why


# --- SGLang


def test_sglangs_cap_is_of_the_whole_server() -> None:
    after = changed("sglang", {**EAGLE3, "dp-size": 4}, RunAtOnce(128, 384))
    assert after.arg("max-running-requests") == 128
    assert after.name == "c+max-running-requests-128"


@pytest.mark.parametrize(
    ("version", "name", "gone"),
    [
        ("0.5.12", "cuda-graph-max-bs", "cuda-graph-max-bs-decode"),
        ("0.5.14", "cuda-graph-max-bs", "cuda-graph-max-bs-decode"),
        ("0.5.15", "cuda-graph-max-bs-decode", "cuda-graph-max-bs"),
        ("0.5.23", "cuda-graph-max-bs-decode", "cuda-graph-max-bs"),
        (None, "cuda-graph-max-bs-decode", "cuda-graph-max-bs"),
    ],
)
def test_sglangs_largest_graph_has_the_name_of_the_release(version: str | None, name: str, gone: str) -> None:
    after = changed("sglang", {"cuda-graph-max-bs": 32}, GraphBatch(100), version)
    assert after.arg(name) == 104, "on the ladder of sizes"
    assert after.arg(gone) is None


def test_a_list_of_graph_sizes_gives_way_to_the_largest() -> None:
    assert changed("sglang", {"cuda-graph-bs": (1, 2, 4)}, GraphBatch(64), "0.5.12").arg("cuda-graph-bs") is None


@pytest.mark.parametrize(
    "args",
    [
        {"disable-cuda-graph": True},
        {"disable_decode_cuda_graph": True},
        {"cuda-graph-backend-decode": "disabled"},
    ],
)
def test_what_turned_sglangs_graphs_off_is_taken_out(args: dict[str, Any]) -> None:
    after = changed("sglang", {"tp-size": 2, **args}, GraphsOn())
    assert after.id == candidate("sglang", {"tp-size": 2}).id, "it is the candidate that never had the flag"
    assert after.name == "c+cuda-graphs-on"


def test_graphs_that_no_flag_turned_off_are_no_flags_matter() -> None:
    assert "log says why" in refused("sglang", {}, GraphsOn())
    assert "log says why" in refused("vllm", {}, GraphsOn())


def test_another_depth_in_sglang_keeps_steps_and_draft_tokens_together() -> None:
    after = changed("sglang", EAGLE3, DraftSteps(2))
    assert (after.arg("speculative-num-steps"), after.arg("speculative-num-draft-tokens")) == (2, 3)
    assert after.name == "c+speculative-num-steps-2"
    tree = {**EAGLE3, "speculative-eagle-topk": 4, "speculative-num-draft-tokens": 16}
    chain = changed("sglang", tree, DraftSteps(3))
    assert (chain.arg("speculative-eagle-topk"), chain.arg("speculative-num-draft-tokens")) == (1, 4)
    assert "speculative-eagle-topk-1" in chain.name


def test_a_block_drafter_has_no_other_depth() -> None:
    args = {"speculative-algorithm": "DFLASH", "speculative-draft-model-path": "/d"}
    assert "block" in refused("sglang", args, DraftSteps(2))


def test_what_looks_drafts_up_in_the_text_is_not_said_to_be_trained() -> None:
    said = refused("sglang", {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": 8}, DraftSteps(2))
    assert "trained" not in said
    assert "speculative-num-draft-tokens" in said


@pytest.mark.parametrize(
    ("args", "version", "says"),
    [
        (EAGLE3, "0.5.10", "came with 0.5.11"),
        ({**EAGLE3, "speculative-num-steps": 2, "speculative-num-draft-tokens": 3}, "0.5.12", "1, 3, 5 or 7"),
        ({**EAGLE3, "speculative-eagle-topk": 4}, "0.5.12", "top-k 1"),
        ({**EAGLE3, "enable-dp-attention": True}, "0.5.12", "data-parallel attention"),
        ({**EAGLE3, "speculative-adaptive": True}, "0.5.12", "already"),
        ({"speculative-algorithm": "NGRAM"}, "0.5.12", "EAGLE"),
    ],
)
def test_sglang_has_only_its_adaptive_depth_and_that_not_everywhere(
    args: dict[str, Any], version: str, says: str
) -> None:
    assert says in refused("sglang", args, SpeculateUpTo(8, 128), version)


def test_sglangs_adaptive_depth_is_proposed_and_what_it_is_not_is_said() -> None:
    answer = ENGINES["sglang"].change(candidate("sglang", EAGLE3), SpeculateUpTo(8, 128), "0.5.12")
    assert isinstance(answer, Changed)
    assert answer.settings == {"args.speculative-adaptive": True}
    assert "no limit by batch size" in answer.note


# --- memory


@pytest.mark.parametrize(
    ("engine", "args", "wish", "flag", "value"),
    [
        ("sglang", {"mem-fraction-static": 0.9}, MemoryShare(-0.05), "mem-fraction-static", 0.85),
        ("sglang", {}, MemoryShare(-0.05, known=0.873), "mem-fraction-static", 0.82),
        ("sglang", {"mem-fraction-static": 0.94}, MemoryShare(0.03), "mem-fraction-static", 0.95),
        ("vllm", {"gpu-memory-utilization": 0.8}, MemoryShare(0.03), "gpu-memory-utilization", 0.83),
        ("vllm", {}, MemoryShare(-0.05), "gpu-memory-utilization", 0.87),
    ],
)
def test_memory_moves_from_what_is_set_or_in_force(
    engine: str, args: dict[str, Any], wish: Wish, flag: str, value: float
) -> None:
    assert changed(engine, args, wish).arg(flag) == value


def test_memory_goes_no_further_than_it_may_and_nowhere_from_what_is_not_known() -> None:
    assert "no further" in refused("sglang", {"mem-fraction-static": 0.95}, MemoryShare(0.03))
    assert "no further" in refused("sglang", {"mem-fraction-static": 0.97}, MemoryShare(0.03))
    assert "no further" in refused("sglang", {"mem-fraction-static": 0.12}, MemoryShare(-0.05))
    assert "not known" in refused("sglang", {}, MemoryShare(-0.05))
    assert "no such switch" in refused("llamacpp", {}, MemoryShare(-0.05))


def test_the_default_of_an_older_vllm_is_its_own() -> None:
    assert changed("vllm", {}, MemoryShare(-0.05), "0.19.1").arg("gpu-memory-utilization") == 0.85


# --- vLLM


def test_vllms_cap_is_of_each_rank() -> None:
    assert changed("vllm", {"max-num-seqs": 16, "data-parallel-size": 4}, RunAtOnce(130, 384)).arg("max-num-seqs") == 33


def test_vllms_graphs_are_sized_in_tokens() -> None:
    after = changed("vllm", {"speculative-config": JSON, "cudagraph-capture-sizes": (1, 2)}, GraphBatch(64))
    assert after.arg("max-cudagraph-capture-size") == 256
    assert after.arg("cudagraph-capture-sizes") is None


@pytest.mark.parametrize(
    ("args", "left"),
    [
        ({"enforce-eager": True}, {}),
        ({"cc.cudagraph-mode": "NONE"}, {}),
        ({"compilation-config": '{"cudagraph_mode": "NONE"}'}, {}),
        ({"cc": '{"cudagraph_mode": "NONE", "mode": 3}'}, {"cc": '{"mode": 3}'}),
    ],
)
def test_what_turned_vllms_graphs_off_is_taken_out(args: dict[str, Any], left: dict[str, Any]) -> None:
    assert changed("vllm", args, GraphsOn()).id == candidate("vllm", left).id


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"speculative-config": JSON}, "speculative-config"),
        ({"speculative-config.method": "ngram", "speculative-config.num_speculative_tokens": 3}, ""),
        ({"spec-method": "ngram", "spec-tokens": 3}, "spec-tokens"),
    ],
)
def test_another_depth_in_vllm_keeps_the_spelling_of_the_candidate(args: dict[str, Any], key: str) -> None:
    after = changed("vllm", args, DraftSteps(5))
    spec = ENGINES["vllm"].speculation(after)
    assert spec is not None
    assert spec.num_steps == 5
    assert spec.method in {"eagle3", "ngram"}
    assert set(after.launch.args) == set(args), "no second spelling beside the first"
    assert after.name == "c+num-speculative-tokens-5"
    if key == "speculative-config":
        assert json.loads(str(after.arg(key))) == {**json.loads(JSON), "num_speculative_tokens": 5}


def test_vllm_speculates_by_batch_size_from_026_on() -> None:
    after = changed("vllm", {"speculative-config": JSON}, SpeculateUpTo(8, 128), "0.26.0")
    config = json.loads(str(after.arg("speculative-config")))
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 8, 3], [9, 128, 0]]
    assert after.name == "c+speculate-up-to-8"
    assert "came with 0.26" in refused("vllm", {"speculative-config": JSON}, SpeculateUpTo(8, 128), "0.25.1")
    parallel = {"speculative-config": JSON, "data-parallel-size": 2}
    assert "ranks" in refused("vllm", parallel, SpeculateUpTo(8, 128), "0.30")
    again = {"speculative-config": str(after.arg("speculative-config"))}
    assert "already" in refused("vllm", again, SpeculateUpTo(8, 128), "0.26.0")


def test_a_configuration_in_pieces_takes_no_schedule() -> None:
    args = {"spec-method": "ngram", "spec-tokens": 3}
    assert "not one JSON object" in refused("vllm", args, SpeculateUpTo(8, 128), "0.33")


# --- llama.cpp


@pytest.mark.parametrize(
    ("args", "slots", "context"),
    [
        ({"parallel": 4, "ctx-size": 8192}, "parallel", 32 * 2048),  # each slot keeps what it had
        ({"np": 4, "c": 1024}, "np", 32 * 512),  # 384 tokens and a quarter more, in steps of 256
        ({"parallel": 4, "ctx-size": 8192, "kv-unified": True}, "parallel", 32 * 512),
        ({"parallel": 4, "ctx-size": 65536, "kv-unified": True}, "parallel", 65536),
        ({}, "parallel", 32 * 512),
    ],
)
def test_more_slots_bring_the_context_they_need(args: dict[str, Any], slots: str, context: int) -> None:
    after = changed("llamacpp", args, RunAtOnce(32, 384))
    assert after.arg(slots) == 32
    assert after.arg("ctx-size", "c") == context
    assert after.name == f"c+{slots}-32"


@pytest.mark.parametrize("flag", ["spec-draft-n-max", "draft-max"])
def test_another_depth_in_llamacpp_keeps_the_name_that_the_build_took(flag: str) -> None:
    assert changed("llamacpp", {"spec-type": "ngram-simple", flag: 8}, DraftSteps(3)).arg(flag) == 3


def test_nothing_is_known_of_a_command() -> None:
    before = Candidate(name="c", engine="command", launch=Launch(command=("serve", "{port}")))
    assert isinstance(ENGINES["command"].change(before, GraphsOn(), None), CannotChange)


# --- flags that were refused


@pytest.mark.parametrize(
    ("engine", "flag", "value", "instead"),
    [
        ("sglang", "cuda-graph-max-bs", 64, ("cuda-graph-max-bs-decode", 64)),
        ("sglang", "cuda-graph-max-bs-decode", 64, ("cuda-graph-max-bs", 64)),  # too new for the release
        ("sglang", "nsa-decode-backend", "x", ("dsa-decode-backend", "x")),
        ("sglang", "disable-cuda-graph", True, ("disable-decode-cuda-graph", True)),
        ("sglang", "enable-flashmla", True, ("attention-backend", "flashmla")),
        ("sglang", "crash-on-nan", True, ("", False)),
        ("llamacpp", "draft-max", 8, ("spec-draft-n-max", 8)),
        ("llamacpp", "no-mmap", True, ("load-mode", "none")),
        ("sglang", "enable-ep-moe", True, None),  # wants the value of another flag
        ("sglang", "enable-dp-attention", True, None),
        ("vllm", "speculative-model", "/d", None),  # a path is no JSON
        ("sglang", "tp-size", 2, None),
    ],
)
def test_a_refused_flag_is_replaced_only_where_its_value_can_go_along(
    engine: str, flag: str, value: Any, instead: tuple[str, Any] | None
) -> None:
    assert replacement(engine, flag, value) == instead
