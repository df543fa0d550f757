"""A variable that harms, does nothing or is misspelt is named before the candidate costs GPU time."""

from typing import Any

import pytest

from autotuner.core.candidate import Candidate, Launch
from autotuner.engines.environment import TABLE, check, wants_nvlink
from autotuner.engines.variables import KNOWN


def candidate(engine: Any = "sglang", env: dict[str, str] | None = None, **args: Any) -> Candidate:
    args = {key.replace("_", "-"): value for key, value in args.items()}
    return Candidate(name="x", engine=engine, launch=Launch(model="/m", args=args, env=env or {}))


@pytest.mark.parametrize(
    ("engine", "env", "says"),
    [
        ("sglang", {"SGLANG_IS_IN_CI": "true"}, "take it out"),
        ("vllm", {"CUDA_LAUNCH_BLOCKING": "1"}, "every kernel wait"),
        ("vllm", {"VLLM_SERVER_DEV_MODE": "1"}, "endpoints"),
        ("vllm", {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}, "args.attention-backend"),
        ("llamacpp", {"LLAMA_ARG_CTX_SIZE": "0"}, "write the flag under args"),
    ],
)
def test_a_dangerous_variable_is_refused(engine: str, env: dict[str, str], says: str) -> None:
    found = check(candidate(engine, env))
    assert len(found.problems) == 1
    assert says in found.problems[0]
    assert found.problems[0].startswith(f"env.{next(iter(env))}: ")


@pytest.mark.parametrize(
    ("engine", "env", "version", "says"),
    [
        ("sglang", {"SGLANG_SIMULATE_ACC_LEN": "3"}, None, "never promote it"),
        ("sglang", {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}, None, "acceptance collapses"),
        ("sglang", {"SGLANG_ENABLE_SPEC_V2": "1"}, "0.5.15", "no effect"),
        ("sglang", {"SGLANG_ENABLE_SPEC_V2": "1"}, None, "from 0.5.15 on"),
        ("sglang", {"NCCL_NVLS_ENABLE": "0"}, "0.5.3", "overwrites it"),
        ("sglang", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, None, "overwrites"),
        ("vllm", {"NCCL_ASYNC_ERROR_HANDLING": "1"}, None, "no effect"),
        ("llamacpp", {"LD_PRELOAD": "/lib/x.so"}, None, "baseline"),
    ],
)
def test_what_is_useless_or_risky_is_let_through_with_what_to_do(
    engine: str, env: dict[str, str], version: str | None, says: str
) -> None:
    found = check(candidate(engine, env), version)
    assert found.problems == ()
    assert len(found.warnings) == 1
    assert says in found.warnings[0]


@pytest.mark.parametrize(
    ("engine", "env", "version"),
    [
        ("vllm", {"CUDA_LAUNCH_BLOCKING": "0", "VLLM_SERVER_DEV_MODE": "0"}, None),
        ("sglang", {"SGLANG_ENABLE_SPEC_V2": "1"}, "0.5.9"),
        ("sglang", {"NCCL_NVLS_ENABLE": "1"}, "0.5.12"),
        ("sglang", {"NCCL_NVLS_ENABLE": "1"}, None),
        ("sglang", {"VLLM_ATTENTION_BACKEND": "x"}, None),
        ("sglang", {"NCCL_PROTO": "^LL128"}, None),
        ("sglang", {"NCCL_DEBUG": "INFO", "MY_OWN_SWITCH": "1"}, None),
    ],
)
def test_what_does_no_harm_is_not_spoken_of(engine: str, env: dict[str, str], version: str | None) -> None:
    found = check(candidate(engine, env), version)
    assert (found.problems, found.warnings) == ((), ())


def test_nccl_settings_are_moot_where_decode_bypasses_nccl() -> None:
    env = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}

    def said(nvlink: bool | None, engine: str = "sglang", **args: Any) -> str:
        return "\n".join(check(candidate(engine, env, **args), None, nvlink).warnings)

    assert "env.NCCL_ALGO, env.NCCL_PROTO: between two GPUs" in said(None, tp_size=2)
    assert "over NVLink" in said(True, tp_size=8)
    assert "if these GPUs are joined by NVLink" in said(None, "vllm", tensor_parallel_size=4)
    assert said(False, tp_size=8) == ""
    assert said(True, tp_size=8, disable_custom_all_reduce=True) == ""
    assert said(True, tp_size=1) == ""
    assert said(True, tp_size=16) == "", "more than custom all-reduce is made for"
    assert said(True, "command", tp_size=2) == ""


def test_the_host_is_asked_for_nvlink_only_where_it_matters() -> None:
    assert wants_nvlink(candidate("sglang", {"NCCL_ALGO": "Ring"}, tp_size=8))
    assert not wants_nvlink(candidate("sglang", {"NCCL_ALGO": "Ring"}, tp_size=2))
    assert not wants_nvlink(candidate("sglang", {"NCCL_DEBUG": "INFO"}, tp_size=8))
    assert not wants_nvlink(candidate("sglang", {"NCCL_ALGO": "Ring"}, tp_size=8, disable_custom_all_reduce=True))


def test_expandable_segments_are_held_against_custom_all_reduce() -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}
    assert "expandable_segments" in check(candidate("sglang", env, tp_size=4)).warnings[0]
    assert check(candidate("sglang", env, tp_size=4, disable_custom_all_reduce=True)).warnings == ()
    assert check(candidate("sglang", env)).warnings == ()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("NCCL_PROTOO", "NCCL_PROTO"), ("NCCL_AGLO", "NCCL_ALGO"), ("NCCL_P2P_LEVL", "NCCL_P2P_LEVEL"),
     ("SGLANG_IS_IN_CL", "SGLANG_IS_IN_CI"), ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES")],
)  # fmt: skip
def test_a_misspelt_variable_is_named_with_the_right_one(wrong: str, right: str) -> None:
    (said,) = check(candidate("command", {wrong: "1"})).warnings
    assert f"env.{wrong}" in said
    assert f"did you mean {right}?" in said


def test_no_known_variable_is_taken_for_a_misspelt_one() -> None:
    for name in KNOWN:
        assert "did you mean" not in " ".join(check(candidate("command", {name: "0"})).warnings)


def test_every_row_says_what_to_do() -> None:
    for row in TABLE:
        assert row.severity in {"refuse", "warn"}
        assert len(row.says) > 30
