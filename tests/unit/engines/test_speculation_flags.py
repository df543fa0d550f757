"""Speculation that an engine would refuse, override or ignore is named before a slot is taken; what it does unasked, too."""

import json
from typing import Any

import pytest

from autotuner.core.candidate import Candidate, Launch
from autotuner.engines import llamacpp_flags, sglang_flags, vllm_flags


def made(engine: Any, args: dict[str, Any]) -> Candidate:
    return Candidate(name="x", engine=engine, launch=Launch(model="/m", args=args))


def sglang(method: str, **args: Any) -> Candidate:
    named = {key.replace("_", "-"): value for key, value in args.items()}
    return made("sglang", {"speculative-algorithm": method, **named})


def steps(steps: int, topk: int, tokens: int) -> dict[str, int]:
    return {"speculative_num_steps": steps, "speculative_eagle_topk": topk, "speculative_num_draft_tokens": tokens}


@pytest.mark.parametrize(
    ("candidate", "says"),
    [
        (sglang("NEXTN", speculative_num_draft_tokens=4), "stops with an assertion"),
        (sglang("NEXTN", **steps(3, 1, 8)), "would become 4"),
        (sglang("NEXTN", **steps(2, 2, 8)), "more than 2 steps of top-k 2 yield (7)"),
        (sglang("NGRAM", enable_dp_attention=True), "enable-dp-attention"),
        (sglang("NGRAM", speculative_num_steps=3), "is not used"),
        (sglang("DFLASH", speculative_draft_model="/d", speculative_num_steps=3), "would become 1"),
        (sglang("DFLASH", speculative_draft_model="/d", pp_size=2), "pipeline"),
        (sglang("DFLASH", speculative_draft_model="/d", enable_dp_attention=True), "enable-dp-lm-head"),
        (
            sglang(
                "DFLASH", speculative_draft_model="/d", speculative_dflash_block_size=16, speculative_num_draft_tokens=8
            ),
            "contradicts",
        ),
        (sglang("NEXTN", **steps(3, 2, 8), speculative_adaptive=True), "needs args.speculative-eagle-topk = 1"),
        (sglang("NGRAM", speculative_adaptive=True), "not with NGRAM"),
        (sglang("NEXTN", speculative_adaptive=True, enable_dp_attention=True), "switched off"),
        (sglang("NEXTN", **steps(3, 2, 8), attention_backend="trtllm_mha"), "chains only"),
        (sglang("NEXTN", **steps(3, 2, 8), attention_backend="aiter", page_size=16), "fa3, flashinfer, triton"),
        (sglang("NEXTN", **steps(3, 2, 8), speculative_use_rejection_sampling=True), "rejection-sampling"),
    ],
)
def test_sglang_contradictions(candidate: Candidate, says: str) -> None:
    found = sglang_flags.problems(candidate)
    assert len(found) == 1
    assert says in found[0]


@pytest.mark.parametrize(
    "candidate",
    [
        sglang("NEXTN", **steps(3, 1, 4), speculative_adaptive=True),
        sglang("DFLASH", speculative_draft_model="/d", **steps(1, 1, 8)),
        sglang("DFLASH", speculative_draft_model="/d", enable_dp_attention=True, enable_dp_lm_head=True),
        sglang("NEXTN", **steps(3, 2, 8), attention_backend="trtllm_mla", page_size=1),
        sglang("NEXTN", **steps(3, 2, 8), attention_backend="fa3", page_size=16),
        sglang("NGRAM"),
    ],
)
def test_sound_sglang_speculation_passes(candidate: Candidate) -> None:
    assert sglang_flags.problems(candidate) == ()


def test_sglang_warns_of_what_speculation_changes_unasked() -> None:
    (cap,) = sglang_flags.warnings(sglang("NEXTN"))
    assert "48 requests" in cap
    assert sglang_flags.warnings(sglang("NEXTN", max_running_requests=128)) == ()
    assert sglang_flags.warnings(made("sglang", {"enable-mixed-chunk": True})) == ()
    mixed = sglang("NEXTN", max_running_requests=8, enable_mixed_chunk=True, speculative_accept_threshold_single=0.9)
    assert [w.split(" ")[0] for w in sglang_flags.warnings(mixed)] == [
        "args.enable-mixed-chunk",
        "args.speculative-accept-threshold-single",
    ]


def vllm(config: dict[str, Any], **args: Any) -> Candidate:
    named = {key.replace("_", "-"): value for key, value in args.items()}
    return made("vllm", {"speculative-config": json.dumps(config), **named})


SYNTHETIC = {"method": "mtp", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
DYNAMIC = "num_speculative_tokens_per_batch_size"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("config", "args", "says"),
    [
        ({**NGRAM, "prompt_lookup_min": 5, "prompt_lookup_max": 2}, {}, "above prompt_lookup_max"),
        ({**NGRAM, "prompt_lookup_min": 0}, {}, "prompt_lookup_min must be a whole number above 0"),
        ({**NGRAM, DYNAMIC: [[2, 8, 3]]}, {}, "must be 1, not 2"),
        ({**NGRAM, DYNAMIC: [[1, 8, 3], [5, 9, 1]]}, {}, "do not follow 8"),
        ({**NGRAM, DYNAMIC: [[1, 8]]}, {}, "list of [from, to, K]"),
        ({**NGRAM, DYNAMIC: 3}, {}, "list of [from, to, K]"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 4.5}, {}, "between 1 and 4"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 0.5}, {}, "between 1 and 4"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.8]}, {}, "none larger"),
        ({**NGRAM, "synthetic_acceptance_length": 2}, {}, "no effect"),
        ({**NGRAM, "draft_tensor_parallel_size": 2}, {"tensor_parallel_size": 8}, "must be 1 or 8"),
    ],
)
def test_vllm_contradictions(config: dict[str, Any], args: dict[str, Any], says: str) -> None:
    found = vllm_flags.problems(vllm(config, **args))
    assert len(found) == 1
    assert says in found[0]


@pytest.mark.parametrize(
    "config",
    [
        {**NGRAM, DYNAMIC: [[1, 8, 4], [9, 64, 0]]},
        {**SYNTHETIC, "synthetic_acceptance_length": 1},
        {**SYNTHETIC, "synthetic_acceptance_length": 4},
        {**SYNTHETIC, "synthetic_acceptance_rates": [0.9, 0.9, 0.1]},
        {**NGRAM, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    ],
)
def test_sound_vllm_speculation_passes(config: dict[str, Any]) -> None:
    assert vllm_flags.problems(vllm(config)) == ()


@pytest.mark.parametrize(
    ("config", "args", "says"),
    [
        ({"model": "/d/eagle3-x", "num_speculative_tokens": 3}, {}, "would guess eagle3"),
        ({"method": "medusa", "model": "/d", "num_speculative_tokens": 3}, {}, "gone by 0.33"),
        ({**NGRAM, "speculative_token_tree": "[]"}, {}, "speculative_token_tree is gone"),
        (SYNTHETIC, {}, "never promote"),
        ({**NGRAM, "rejection_sample_method": "fly"}, {}, "lossy"),
        ({**NGRAM, DYNAMIC: [[1, 8, 3]]}, {"data_parallel_size": 2}, "is dropped"),
    ],
)
def test_vllm_warns_of_what_it_does_unasked(config: dict[str, Any], args: dict[str, Any], says: str) -> None:
    (said,) = vllm_flags.warnings(vllm(config, **args))
    assert says in said
    assert vllm_flags.warnings(vllm(NGRAM)) == ()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"spec-draft-n-max": 4}, "without args.spec-type"),
        (
            {"spec-type": "draft-simple", "spec-draft-model": "/d", "spec-draft-n-min": 4},
            "above args.spec-draft-n-max = 3",
        ),
        ({"spec-type": "draft-simple", "spec-draft-n-max": 3, "spec-synth-len": 4.5}, "between 1 and 4"),
        ({"spec-type": "draft-mtp", "spec-synth-len": 0}, "between 1 and 4"),
    ],
)
def test_llama_server_contradictions(args: dict[str, Any], says: str) -> None:
    (said,) = llamacpp_flags.problems(made("llamacpp", args))
    assert says in said


def test_sound_llama_server_speculation_passes_and_dice_are_named() -> None:
    sound = made(
        "llamacpp", {"spec-type": "draft-simple", "spec-draft-n-max": 3, "spec-draft-n-min": 1, "spec-synth-len": 4}
    )
    assert llamacpp_flags.problems(sound) == ()
    assert "never promote" in llamacpp_flags.warnings(sound)[0]
    assert "kind shows" in llamacpp_flags.warnings(made("llamacpp", {"spec-draft-hf": "a/b"}))[0]
    assert llamacpp_flags.warnings(made("llamacpp", {"c": 1})) == ()
