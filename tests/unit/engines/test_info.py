"""What is read out of the answers of a serving server: on recorded ones, on older and newer shapes, and on garbage."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.core.candidate import Candidate, Launch
from autotuner.core.effective import merge
from autotuner.engines import engine_for
from autotuner.engines.base import Effective
from autotuner.engines.logtext import split_lines

RECORDINGS = Path(__file__).parent / "recordings"
SGLANG, VLLM, LLAMA, COMMAND = (engine_for(name) for name in ("sglang", "vllm", "llamacpp", "command"))
READERS = [
    (SGLANG, "/server_info"),
    (SGLANG, "/get_server_info"),
    (VLLM, "/version"),
    (VLLM, "/v1/models"),
    (VLLM, "/metrics"),
    (LLAMA, "/props"),
    (LLAMA, "/slots"),
    (COMMAND, "/anything"),
]


def recorded(name: str) -> str:
    return (RECORDINGS / name).read_text(encoding="utf-8")


def server_info(name: str = "eagle3-capped", **changes: Any) -> str:
    return json.dumps({**json.loads(recorded(f"sglang-0.5.12-{name}.server_info.json")), **changes})


def sglang(text: str) -> Effective:
    return SGLANG.read_info("/server_info", text)


def candidate(engine: Any = "sglang", env: dict[str, str] | None = None, **args: Any) -> Candidate:
    flags = {key.replace("_", "-"): value for key, value in args.items()}
    return Candidate(name="c", engine=engine, launch=Launch(model="/m", args=flags, env=env or {}))


def said(effective: Effective) -> dict[str, Any]:
    plain = Effective()
    values = {name: getattr(effective, name) for name in Effective.__dataclass_fields__ if name != "source"}
    return {name: value for name, value in values.items() if value != getattr(plain, name)}


# --- SGLang ----------------------------------------------------------------------------------------------------------


def test_a_recorded_speculating_sglang_tells_its_real_cap_and_depth() -> None:
    found = said(sglang(server_info()))
    assert found.pop("arguments")
    assert found == {
        "running_cap": 48,
        "kv_tokens": 684832,
        "context_len": 8192,
        "attention_backend": "triton",
        "speculating": True,
        "spec_method": "EAGLE3",
        "spec_steps": 3,
        "draft_tokens": 4,
        "dp": 1,
        "version": "0.5.12",
        "memory_share": 0.7,
    }


def test_planned_graphs_are_not_taken_for_captured_ones() -> None:
    info = json.loads(server_info())
    assert max(info["internal_states"][0]["cuda_graph_bs"]) == 128, (
        "what it planned; its log says that 48 was the largest"
    )
    assert sglang(json.dumps(info)).graph_max_batch is None
    assert sglang(server_info("no-graphs")).graph_max_batch == 0


def test_the_ranks_of_a_server_are_summed() -> None:
    info = json.loads(server_info(dp_size=3))
    info["internal_states"] *= 3
    for state in info["internal_states"]:
        state["dp_size"] = 3
    found = sglang(json.dumps(info))
    assert (found.running_cap, found.kv_tokens, found.dp) == (144, 3 * 684832, 3)
    info["internal_states"] = info["internal_states"][:1]
    assert sglang(json.dumps(info)).running_cap == 144, "one rank alone answered: the others have as much"


def test_an_older_sglang_without_the_effective_cap_leaves_it_to_the_log() -> None:
    info = json.loads(server_info())
    for state in info["internal_states"]:
        del state["effective_max_running_requests_per_dp"], state["memory_usage"]
    found = sglang(json.dumps(info))
    assert found.running_cap is None
    assert found.kv_tokens == 684832, "said beside the states too"


def test_two_launches_of_one_configuration_have_one_digest_and_another_seed_changes_nothing() -> None:
    base, again = server_info("base"), server_info("base-again")
    assert json.loads(base)["random_seed"] != json.loads(again)["random_seed"]
    assert sglang(base).arguments == sglang(again).arguments
    assert sglang(base).arguments != sglang(server_info("no-graphs")).arguments


def test_any_other_argument_makes_another_digest() -> None:
    info = json.loads(server_info("base"))
    info["internal_states"][0]["chunked_prefill_size"] = 4096
    assert sglang(json.dumps(info)).arguments != sglang(server_info("base")).arguments


def test_a_key_among_the_arguments_goes_no_further() -> None:
    plain = sglang(server_info())
    assert sglang(server_info(api_key="s3cret-value", admin_api_key="another")) == plain


def test_the_older_name_is_asked_only_where_the_newer_one_gives_nothing() -> None:
    assert SGLANG.info_paths(candidate()) == ("/server_info|/get_server_info",)


def test_custom_all_reduce_that_was_turned_off_is_told_only_where_there_is_one_to_do() -> None:
    info = json.loads(server_info(disable_custom_all_reduce=True))
    info["internal_states"][0] |= {"disable_custom_all_reduce": True}
    assert sglang(json.dumps(info)).all_reduce is None
    info["internal_states"][0] |= {"tp_size": 8}
    assert sglang(json.dumps(info)).all_reduce == "nccl"


@pytest.mark.parametrize(
    "line",
    [
        "[2026-03-03 11:06:07 TP0] Custom allreduce is disabled because this process group spans across nodes.",
        "[2026-03-03 11:06:07 TP1] Setup Custom allreduce failed with invalid argument. To silence this warning, specify",
    ],
)
def test_sglangs_log_says_that_nccl_carries_the_all_reduce(line: str) -> None:
    dump = "server_args=ServerArgs(tp_size=8, dp_size=1, disable_custom_all_reduce=False, speculative_algorithm=None)"
    facts = [f for text in (dump, line) for f in SGLANG.read_line(text) if isinstance(f, Effective)]
    assert merge(facts[:1]).all_reduce == "custom, nccl"
    assert merge(facts).all_reduce == "nccl"


def test_the_recorded_log_and_answer_make_one_configuration() -> None:
    lines = split_lines((RECORDINGS / "sglang-0.5.12-eagle3-capped.log").read_bytes())
    facts = [fact for line in lines for fact in SGLANG.read_line(line) if isinstance(fact, Effective)]
    found = merge([*facts, sglang(server_info())])
    assert (found.running_cap, found.graph_max_batch, found.kv_cache_dtype) == (48, 48, "bfloat16")
    assert found.version == "0.5.12"


# --- vLLM ------------------------------------------------------------------------------------------------------------


def test_vllm_tells_a_part_at_each_path() -> None:
    assert VLLM.info_paths(candidate("vllm")) == ("/version", "/v1/models", "/metrics")
    assert VLLM.info_paths(candidate("vllm", disable_log_stats=True)) == ("/version", "/v1/models")
    assert said(VLLM.read_info("/version", '{"version": "0.32.0"}')) == {"version": "0.32.0"}
    models = json.dumps({"object": "list", "data": [{"id": "m", "max_model_len": 2048}]})
    assert said(VLLM.read_info("/v1/models", models)) == {"context_len": 2048}
    assert said(VLLM.read_info("/metrics", recorded("vllm-0.32-ngram.metrics"))) == {
        "kv_tokens": 46592,
        "speculating": True,
    }


def test_an_older_vllm_has_blocks_and_every_engine_its_own() -> None:
    line = 'vllm:cache_config_info{block_size="16",cache_dtype="fp8",engine="%d",num_gpu_blocks="100"} 1.0\n'
    found = VLLM.read_info("/metrics", line % 0 + line % 1)
    assert said(found) == {"kv_tokens": 3200, "speculating": False, "kv_cache_dtype": "fp8"}


def test_vllms_limit_on_requests_is_each_ranks_own() -> None:
    lines = (
        "non-default args: {'max_num_seqs': 64}",
        (
            "Initializing a V1 LLM engine (v0.33.0) with config: model='/m', tensor_parallel_size=2, data_parallel_size=4, "
            "disable_custom_all_reduce=False, kv_cache_dtype=auto"
        ),
        "(EngineCore_DP0 pid=1) INFO 11-29 16:12:29 [kv.py:1] GPU KV cache size: 1,000 tokens",
        "(EngineCore_DP1 pid=2) INFO 11-29 16:12:29 [kv.py:1] GPU KV cache size: 900 tokens",
        "(EngineCore_DP1 pid=2) INFO 11-29 16:12:30 [kv.py:1] GPU KV cache size: 1,100 tokens",
    )
    found = merge(f for line in lines for f in VLLM.read_line(line) if isinstance(f, Effective))
    assert (found.running_cap, found.kv_tokens, found.version) == (256, 2100, "0.33.0")
    assert VLLM.asked(candidate("vllm", max_num_seqs=64, data_parallel_size=4)).running_cap == 256


@pytest.mark.parametrize(
    ("line", "carriers"),
    [
        (
            (
                "INFO 08-25 19:32:40 [x.py:264] Using ['CUSTOM', 'PYNCCL'] all-reduce backends (in dispatch order) for group "
                "'tp:0' out of potential backends: ['NCCL_SYMM_MEM', 'QUICK_REDUCE', 'FLASHINFER', 'CUSTOM', 'PYNCCL']."
            ),
            "custom, nccl",
        ),
        ("Using ['PYNCCL'] all-reduce backends (in dispatch order) for 'tp:0'", "nccl"),
        ("Using ['PYNCCL'] all-reduce backends (in dispatch order) for group 'ep:0' out of", None),
        ("Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs.", "nccl"),
    ],
)
def test_vllms_log_says_who_carries_the_all_reduce(line: str, carriers: str | None) -> None:
    facts = [fact for fact in VLLM.read_line(line) if isinstance(fact, Effective)]
    assert merge(facts).all_reduce == carriers


# --- llama.cpp -------------------------------------------------------------------------------------------------------


def test_a_recorded_llama_server_tells_its_slots_and_that_it_speculates() -> None:
    props = LLAMA.read_info("/props", recorded("llamacpp-draft.props.json"))
    slots = LLAMA.read_info("/slots", recorded("llamacpp-draft.slots.json"))
    assert said(props) == {"running_cap": 4, "context_len": 512, "version": "b0-unknown"}
    assert said(slots) == {"running_cap": 4, "context_len": 512, "speculating": True}
    assert LLAMA.info_paths(candidate("llamacpp")) == ("/props", "/slots")


def test_slots_have_a_context_each_or_share_one() -> None:
    line = "0.01.083.118 I srv    load_model: initializing, n_slots = 4, n_ctx_slot = 512, kv_unified = '%s'"
    (apart,), (shared,) = LLAMA.read_line(line % "false")[1:], LLAMA.read_line(line % "true")[1:]
    assert isinstance(apart, Effective)
    assert isinstance(shared, Effective)
    assert (apart.kv_tokens, shared.kv_tokens) == (2048, 512)


def test_an_error_of_llama_server_says_nothing() -> None:
    error = '{"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}'
    assert said(LLAMA.read_info("/props", error)) == said(LLAMA.read_info("/slots", error)) == {}


# --- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (candidate(), {"speculating": False}),
        (
            candidate(max_running_requests=128, attention_backend="fa3", cuda_graph_max_bs=64, disable_custom_all_reduce=True),
            {
                "running_cap": 128,
                "attention_backend": "fa3",
                "graph_max_batch": 64,
                "speculating": False,
                "all_reduce": "nccl",
            },
        ),
        (candidate(disable_cuda_graph=True, cuda_graph_max_bs=64), {"graph_max_batch": 0, "speculating": False}),
        (candidate("vllm", enforce_eager=True, max_model_len=4096), {"graph_max_batch": 0, "context_len": 4096, "speculating": False}),
        (
            candidate("vllm", compilation_config='{"cudagraph_mode": "NONE"}'),
            {"graph_max_batch": 0, "speculating": False},
        ),
        (
            candidate("llamacpp", parallel=4, ctx_size=2048),
            {"running_cap": 4, "context_len": 512, "speculating": False},
        ),
        (
            candidate("llamacpp", parallel=4, ctx_size=2048, kv_unified=True),
            {"running_cap": 4, "context_len": 2048, "speculating": False},
        ),
        (candidate("llamacpp", parallel=-1, ctx_size=0), {"speculating": False}),
        (candidate("llamacpp", ctx_size=2048), {"speculating": False}),
    ],
)  # fmt: skip
def test_what_a_candidate_leaves_open_is_not_asked(asked: Candidate, expected: dict[str, Any]) -> None:
    assert said(engine_for(asked.engine).asked(asked)) == expected


# --- garbage ---------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from(
    """version internal_states speculative_algorithm dp_size memory_usage token_capacity data max_model_len total_slots
    default_generation_settings n_ctx build_info speculative cuda_graph_bs decode_cuda_graph_bs tp_size
    effective_max_running_requests_per_dp context_length""".split()  # noqa: SIM905 - a paragraph reads better
)
SHAPED = st.dictionaries(KEYS, JSON | st.lists(st.dictionaries(KEYS, JSON, max_size=5), max_size=3), max_size=10)


@given(answer=st.text() | (JSON | SHAPED | st.lists(SHAPED, max_size=3)).map(json.dumps))
def test_no_answer_raises_and_what_is_kept_is_small_and_plain(answer: str) -> None:
    for engine, path in READERS:
        for value in said(engine.read_info(path, answer)).values():
            assert isinstance(value, bool | int) or (
                isinstance(value, str) and len(value) <= 80 and value.isprintable()
            )
            assert isinstance(value, str) or 0 <= value <= 10**18


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "<html><h1>502 Bad Gateway</h1></html>",
        "Internal Server Error",
        "[" * 5000,
        "1" * 5000,
        "{}",
        "[]",
        "null",
        "{",
    ],
)
def test_what_is_no_answer_says_nothing(answer: str) -> None:
    for engine, path in READERS:
        assert said(engine.read_info(path, answer)) == {}, path


def test_nothing_is_asked_of_a_server_that_nothing_is_known_about() -> None:
    assert COMMAND.info_paths(candidate()) == ()
    assert said(COMMAND.asked(candidate())) == {}
