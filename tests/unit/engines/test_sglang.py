"""What is read out of SGLang, each promise on the text of a real log or in the format of one release."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from autotuner.core.candidate import Candidate, Launch
from autotuner.engines.base import (
    Effective,
    LogFact,
    Note,
    Place,
    Prefill,
    ServerExit,
    Stage,
    StageSeen,
    Window,
)
from autotuner.engines.logtext import split_lines
from autotuner.engines.sglang import SGLang
from autotuner.engines.vocabulary import CAUSES

RECORDINGS = Path(__file__).parent / "recordings"
CAMPAIGNS = Path(__file__).resolve().parents[3] / "examples" / "campaigns"
ENGINE = SGLang()
PLACE = Place("127.0.0.1", 30000)


def candidate(env: dict[str, str] | None = None, **args: Any) -> Candidate:
    table = {flag.replace("_", "-"): value for flag, value in args.items()}
    return Candidate(name="c", engine="sglang", launch=Launch(model="/models/m", args=table, env=env or {}))


def recorded(name: str) -> list[str]:
    return split_lines((RECORDINGS / name).read_bytes())


def facts_of(name: str) -> list[LogFact]:
    return [fact for line in recorded(name) for fact in ENGINE.read_line(line)]


def window(line: str) -> Window:
    (found,) = [fact for fact in ENGINE.read_line(line) if isinstance(fact, Window)]
    return found


def effective(line: str) -> Effective:
    (found,) = [fact for fact in ENGINE.read_line(line) if isinstance(fact, Effective)]
    return found


def stages(line: str) -> list[StageSeen]:
    return [fact for fact in ENGINE.read_line(line) if isinstance(fact, StageSeen)]


def cause(*lines: str, code: int | None = -9, asked: bool = False, ready: bool = False) -> str:
    return ENGINE.diagnose(ServerExit(code, asked, ready), lines).cause


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_server_listens_where_the_slot_says_with_metrics_on() -> None:
    argv = ENGINE.argv(candidate(tp_size=8, trust_remote_code=True), PLACE)
    assert argv[:3] == ("python3", "-m", "sglang.launch_server")
    assert " ".join(argv).endswith(
        "--model-path /models/m --host 127.0.0.1 --port 30000 --enable-metrics --tp-size 8 --trust-remote-code"
    )


def test_metrics_that_the_candidate_sets_itself_are_left_to_it() -> None:
    assert ENGINE.argv(candidate(enable_metrics=True), PLACE).count("--enable-metrics") == 1
    assert "--enable-metrics" not in ENGINE.argv(candidate(enable_metrics=False), PLACE)
    assert ENGINE.endpoints(candidate(enable_metrics=False)).metrics is None
    assert ENGINE.endpoints(candidate()).metrics == "/metrics"


def test_the_candidates_environment_wins() -> None:
    environment = ENGINE.environment(candidate(env={"NO_COLOR": "0", "NCCL_ALGO": "Ring"}))
    assert environment["NO_COLOR"] == "0"
    assert environment["NCCL_ALGO"] == "Ring"
    assert environment["SPT_NOENV"] == "1"


def test_every_stage_has_a_silence_limit() -> None:
    assert all(ENGINE.silence_limit_s(stage) >= 60 for stage in Stage)


# --- what contradicts itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"port": 1}, "belongs to the slot"),
        ({"host": "0.0.0.0"}, "belongs to the slot"),
        ({"model_path": "/other"}, "contradicts launch.model"),
        ({"speculative_num_steps": 3}, "nothing would be speculated"),
        ({"speculative_draft_model_path": "/d"}, "nothing would be speculated"),
        (
            {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1},
            "needs args.speculative-num-steps",
        ),
        (
            {
                "speculative_algorithm": "EAGLE",
                "speculative_num_steps": 3,
                "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": 8,
            },
            "would become 4",
        ),
        (
            {
                "speculative_algorithm": "EAGLE",
                "speculative_num_steps": 2,
                "speculative_eagle_topk": 2,
                "speculative_num_draft_tokens": 8,
            },
            "is more than 2 steps of top-k 2 yield (7)",
        ),
        ({"speculative_algorithm": "EAGLE3"}, "needs args.speculative-draft-model-path"),
        (
            {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/m/llama-Eagle-3-head"},
            '"EAGLE3"',
        ),
        ({"speculative_algorithm": "NGRAM", "enable_dp_attention": True}, "does not run with"),
    ],
)
def test_flags_that_contradict_each_other_are_named(args: dict[str, Any], said: str) -> None:
    problems = ENGINE.check(candidate(**args))
    assert len(problems) == 1
    assert said in problems[0]


def test_a_sound_candidate_has_no_problems() -> None:
    assert ENGINE.check(candidate(tp_size=8)) == ()
    assert ENGINE.check(candidate(speculative_algorithm="NEXTN")) == ()
    assert ENGINE.check(candidate(speculative_algorithm="NGRAM", speculative_num_draft_tokens=8)) == ()
    eagle3 = candidate(
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path="/models/eagle3",
        speculative_num_steps=5,
        speculative_eagle_topk=4,
        speculative_num_draft_tokens=8,
    )
    assert ENGINE.check(eagle3) == ()


def test_the_ceiling_of_a_chain_is_its_steps_and_the_bonus_token() -> None:
    asked = ENGINE.speculation(
        candidate(speculative_algorithm="EAGLE3", speculative_num_steps=3, speculative_eagle_topk=1)
    )
    assert asked is not None
    assert (asked.method, asked.num_steps, asked.draft_tokens, asked.ceiling) == ("EAGLE3", 3, 4, 4.0)


def test_a_block_drafter_may_be_accepted_to_the_length_of_its_block() -> None:
    asked = ENGINE.speculation(candidate(speculative_algorithm="NGRAM", speculative_num_draft_tokens=8))
    assert asked is not None
    assert asked.ceiling == 8.0


def test_what_sglang_chooses_by_itself_is_unknown() -> None:
    asked = ENGINE.speculation(candidate(speculative_algorithm="EAGLE"))
    assert asked is not None
    assert asked.ceiling is None
    adaptive = ENGINE.speculation(
        candidate(speculative_algorithm="EAGLE", speculative_num_steps=3, speculative_adaptive=True)
    )
    assert adaptive is not None
    assert adaptive.ceiling is None
    assert ENGINE.speculation(candidate(tp_size=8)) is None


# --- decode and prefill lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        (
            "[2024-11-30 10:01:02 TP0] Decode batch. #running-req: 7, #token: 4210, token usage: 0.03, "
            "gen throughput (token/s): 640.18, #queue-req: 2"
        ),
        (
            "[2025-03-12 10:02:11 TP0] Decode batch. #running-req: 7, #token: 188, token usage: 0.00, accept len: 2.61, "
            "gen throughput (token/s): 640.18, largest-len: 12, #queue-req: 2, "
        ),
        (
            "[2025-07-30 10:01:02 TP0] Decode batch. #running-req: 7, #token: 4210, token usage: 0.03, accept len: 2.61, "
            "cuda graph: True, gen throughput (token/s): 640.18, #queue-req: 2, "
        ),
        (
            "[2026-02-20 10:01:02 TP0] Decode batch, #running-req: 7, #token: 4210, token usage: 0.03, accept len: 2.61, "
            "accept rate: 0.65, cuda graph: True, gen throughput (token/s): 640.18, #queue-req: 2"
        ),
        (
            "[2026-07-30 13:35:13 TP0] Decode batch, #running-req: 7, #full token: 257, full token usage: 0.00, mamba num: 3, "
            "mamba usage: 0.03, accept len: 2.61, accept rate: 0.54, npu graph: True, gen throughput (token/s): 640.18, "
            "#queue-req: 2, est. decode TFLOPS/s (per GPU): 21.40, fwd occupancy: 91.0%"
        ),
        (
            "[2026-09-24 01:50:43.001 DP0 TP0 EP0] Decode batch [40], #running-req: 7, #token: 532160, token usage: 0.19, "
            "#queue-req: 2, accept len: 2.61, pre-allocated usage: 0.18, #transfer-req: 22, #retracted-req: 0, "
            "cuda graph: True, gen throughput (token/s): 640.18"
        ),
        (
            "2026-09-24 WARNING 77 scheduler.py:12 Decode batch, #running-req: 7, accept len: 2.61, "
            "gen throughput (token/s): 640.18, #queue-req: 2"
        ),
    ],
)
def test_decode_fields_are_read_whatever_their_order_and_release(line: str) -> None:
    found = window(line)
    assert (found.running, found.queued, found.gen_tok_s) == (7, 2, 640.18)
    assert found.accept_len == (2.61 if "accept len" in line else None)
    assert found.graph is (True if "graph: True" in line else None)


def test_the_accept_rate_is_never_read_because_its_definition_changed_twice() -> None:
    line = "Decode batch, #running-req: 1, accept len: 1.00, accept rate: 0.25, gen throughput (token/s): 1.0"
    assert window(line).accept_rate is None
    assert window(line).accepted is None


def test_a_window_without_a_sample_has_no_accept_length() -> None:
    assert window("Decode batch, #running-req: 1, accept len: nan, gen throughput (token/s): 1.0").accept_len is None


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[2026-11-29 15:02:35] ", ""),
        ("[2025-07-02 11:36:23 DP5 TP5] ", "DP5 TP5"),
        ("[2026-09-24 01:50:43 DP0 PP1 ATTN_CP0 MOE_DP2 TP3 EP3] ", "DP0 PP1 ATTN_CP0 MOE_DP2 TP3 EP3"),
    ],
)
def test_the_rank_is_the_prefix_as_printed(prefix: str, rank: str) -> None:
    assert window(prefix + "Decode batch, #running-req: 1, #queue-req: 0").rank == rank


def test_graphs_off_shows_in_the_window() -> None:
    line = "Decode batch, #running-req: 36, cuda graph: False, gen throughput (token/s): 1262.64, #queue-req: 0"
    assert window(line).graph is False


def test_a_prefill_batch_is_told_from_a_decode_batch() -> None:
    line = "[2026-11-20 10:01:00 TP0] Prefill batch, #new-seq: 2, #new-token: 3100, #cached-token: 512, #running-req: 5"
    assert ENGINE.read_line(line) == (Prefill(3100, 512, 5.0, None, "TP0"),)


def test_a_retraction_is_a_preemption_and_worth_a_note() -> None:
    line = (
        "[2026-05-24 03:51:46 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_token_ratio: 0.1"
    )
    assert window(line).preemptions == 3
    assert any(isinstance(fact, Note) for fact in ENGINE.read_line(line))


def test_text_of_users_in_the_log_is_never_a_fact() -> None:
    line = "[2026-05-24 03:51:46] Receive: obj=GenerateReqInput(text='Decode batch, #running-req: 999, CUDA out of memory')"
    assert ENGINE.read_line(line) == ()
    assert cause(line, code=1) == "unknown"


# --- the start -------------------------------------------------------------------------------------------------------


def test_the_recorded_start_shows_every_stage_in_order() -> None:
    seen = [fact for fact in facts_of("sglang-0.5.12-eagle3-capped.log") if isinstance(fact, StageSeen)]
    first = list(dict.fromkeys(fact.stage for fact in seen))
    assert first == [
        Stage.PROCESS,
        Stage.WEIGHTS,
        Stage.KV_POOL,
        Stage.GRAPH_CAPTURE,
        Stage.DRAFT_WEIGHTS,
        Stage.HTTP_UP,
        Stage.WARM_UP,
    ]
    assert seen[-1] == StageSeen(Stage.WARM_UP, ended=True)


def test_the_recorded_limits_are_the_effective_ones() -> None:
    found = [fact for fact in facts_of("sglang-0.5.12-eagle3-capped.log") if isinstance(fact, Effective)]
    assert Effective(running_cap=48) in found
    assert (
        Effective(
            attention_backend="triton",
            speculating=True,
            spec_method="EAGLE3",
            spec_steps=3,
            draft_tokens=4,
            dp=1,
            memory_share=0.7,
            source="arguments",
        )
        in found
    )
    assert Effective(graph_max_batch=48) in found
    assert Effective(running_cap=48, kv_tokens=684832, context_len=8192) in found


def test_every_recorded_batch_line_is_read() -> None:
    lines = recorded("sglang-0.5.12-eagle3-capped.log")
    facts = facts_of("sglang-0.5.12-eagle3-capped.log")
    windows = [fact for fact in facts if isinstance(fact, Window)]
    assert len(windows) == sum("Decode batch" in line for line in lines) > 0
    assert len([fact for fact in facts if isinstance(fact, Prefill)]) == sum("Prefill batch" in line for line in lines)
    assert all(w.accept_len is not None and w.running is not None for w in windows)
    assert max(w.running or 0 for w in windows) == 48
    assert max(w.queued or 0 for w in windows) == 80


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "Loading safetensors checkpoint shards:  37% Completed | 60/163 [03:01<05:11,  3.02s/it]",
            StageSeen(Stage.WEIGHTS, 60, 163),
        ),
        (
            "Multi-thread loading shards: 100% Completed | 1/1 [00:00<00:00]",
            StageSeen(Stage.WEIGHTS, 1, 1, ended=True),
        ),
        ("  4%|4         | 1/23 [00:10<03:40, 10.02s/it]", StageSeen(Stage.GRAPH_CAPTURE, 1, 23)),
        (
            "Capturing batches (bs=48 avail_mem=41.56 GB):   4%|▍    | 1/23 [00:02<00:49]",
            StageSeen(Stage.GRAPH_CAPTURE, 1, 23),
        ),
        ("DeepGEMM warmup:  31%|###1      | 80/256 [00:14<00:31,  5.60it/s]", StageSeen(Stage.JIT, 80, 256)),
        (
            "[2026-07-21 08:22:00 TP0] Capture target verify CUDA graph end. elapsed=4.56 s, mem usage=0.38 GB",
            StageSeen(Stage.GRAPH_CAPTURE, ended=True),
        ),
        (
            "[2026-11-29 15:02:07] Load weight end. elapsed=0.01 s, type=LlamaForCausalLMEagle3, avail mem=39.76 GB",
            StageSeen(Stage.DRAFT_WEIGHTS, ended=True),
        ),
    ],
)
def test_progress_is_read_from_bars_and_lines(line: str, expected: StageSeen) -> None:
    assert stages(line) == [expected]


def test_a_line_glued_to_a_bar_is_not_lost() -> None:
    line = (
        "Capturing batches (bs=128 avail_mem=31.18 GB):   0%|          | 0/19 [00:00<?, ?it/s]"
        "[2025-09-14 20:08:18 TP0] Entering DeepGEMM JIT Pre-Compile session."
    )
    assert stages(line) == [StageSeen(Stage.GRAPH_CAPTURE, 0, 19), StageSeen(Stage.JIT)]


def test_the_largest_graph_is_the_targets_in_the_new_wording_too() -> None:
    line = (
        "Capture target verify CUDA graph begin. backend=full, num_tokens_per_bs=6, bs=[1, 2, 3, 4, 5, 6], avail mem=7"
    )
    assert effective(line).graph_max_batch == 6
    draft = "Capture draft decode CUDA graph begin. backend=full, bs=[1, 2, 99], avail mem=7.77 GB"
    assert not [fact for fact in ENGINE.read_line(draft) if isinstance(fact, Effective)]


@pytest.mark.parametrize(
    "dump",
    [
        (
            "server_args=ServerArgs(model_path='/m', attention_backend='fa3', decode_attention_backend=None, "
            "speculative_algorithm=None, disable_cuda_graph=True)"
        ),
        (
            "server_args={'model_path': '/m', 'attention_backend': 'fa3', 'decode_attention_backend': None, "
            "'speculative_algorithm': None, 'disable_cuda_graph': True}"
        ),
    ],
)
def test_the_dump_of_arguments_is_read_as_an_object_and_as_a_dict(dump: str) -> None:
    assert effective(dump) == Effective(
        attention_backend="fa3", graph_max_batch=0, speculating=False, source="arguments"
    )


def test_the_default_attention_backend_is_read() -> None:
    line = (
        "[2026-03-13 21:35:09] INFO server_args.py:2140: Attention backend not specified. Use fa3 backend by default."
    )
    assert effective(line).attention_backend == "fa3"


def test_traceback_inside_the_dump_of_arguments_is_no_crash() -> None:
    dump = "[2026-11-29 15:01:27] server_args=ServerArgs(served_model_name='Traceback CUDA out of memory', port=1)"
    assert not [fact for fact in ENGINE.read_line(dump) if isinstance(fact, Note)]
    assert cause(dump, code=1) == "unknown"


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_counters_are_read_from_a_real_scrape() -> None:
    counters = ENGINE.read_metrics((RECORDINGS / "sglang-0.5.12-eagle3-capped.metrics").read_text())
    assert (counters.running, counters.queued) == (16, 0)
    assert (counters.generated_tokens, counters.prompt_tokens) == (64904, 8593)
    assert counters.accept_len == 1.65
    assert counters.drafts is None  # the release has no such series
    assert counters.accepted is None


def test_tensor_parallel_copies_are_counted_once_and_data_parallel_ranks_added() -> None:
    scrape = "\n".join(
        f'sglang:num_running_reqs{{dp_rank="{dp}",tp_rank="{tp}"}} {running}'
        for dp, tp, running in [(0, 0, 3.0), (0, 1, 3.0), (1, 2, 5.0), (1, 3, 5.0)]
    )
    assert ENGINE.read_metrics(scrape).running == 8


def test_a_gauge_of_zero_is_no_accept_length() -> None:
    assert ENGINE.read_metrics('sglang:spec_accept_length{tp_rank="0"} 0.0').accept_len is None


def test_verify_calls_are_the_drafts() -> None:
    counters = ENGINE.read_metrics('sglang:spec_verify_calls_total{model_name="m"} 43.0')
    assert counters.drafts == 43


# --- why it died -----------------------------------------------------------------------------------------------------


def test_our_own_sigterm_looks_like_a_crash_and_is_not_one() -> None:
    lines = tuple(recorded("sglang-0.5.12-eagle3-capped.log"))
    assert "It usually means one child failed" in lines[-1]
    assert cause(*lines, asked=True, ready=True) == "own-stop"
    assert not [fact for line in lines[-3:] for fact in ENGINE.read_line(line)]


def test_somebody_elses_sigterm_is_named() -> None:
    lines = tuple(recorded("sglang-0.5.12-eagle3-capped.log"))
    diagnosis = ENGINE.diagnose(ServerExit(-9, False, True), lines)
    assert (diagnosis.cause, diagnosis.sentence) == (
        "told-to-stop",
        "somebody other than autotuner told the server to stop",
    )


def test_a_flag_of_another_release_is_named_from_the_recording() -> None:
    diagnosis = ENGINE.diagnose(ServerExit(2, False, False), tuple(recorded("sglang-0.5.12-bad-flag.log")))
    assert diagnosis.cause == "bad-flag-combination"
    assert "--cuda-graph-max-batch" in diagnosis.evidence[0]


def test_a_missing_model_is_named_from_the_recording() -> None:
    log = CAMPAIGNS / "sglang-0.5.12-h200" / "smol" / "missing-model.log.gz"
    lines = split_lines(gzip.decompress(log.read_bytes()))
    diagnosis = ENGINE.diagnose(ServerExit(1, False, False), tuple(lines))
    assert diagnosis.cause == "bad-flag-combination"
    assert "not found" in diagnosis.sentence
    assert "/models/nope" in diagnosis.evidence[0]


@pytest.mark.parametrize(
    ("expected", "lines"),
    [
        (
            "oom-in-capture",
            ["Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 1.50 GiB."],
        ),
        ("kv-too-small", ["RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."]),
        ("capture-failed-other", ["Exception: Capture cuda graph failed: invalid argument"]),
        ("bad-flag-combination", ["ValueError: Cannot find the config file for awq"]),
        ("bad-flag-combination", ["RuntimeError: selected index k out of range"]),
        ("unsupported", ["ValueError: Model architectures ['X'] are not supported for now."]),
        ("host-oom", ["Rank 0 scheduler is dead. Please check if there are relevant logs.", "Exit code: -9"]),
        ("watchdog-timeout", ["scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)"]),
        ("collective-timeout", ["Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2)", "ncclSystemError"]),
        ("device-busy", ["ERROR: [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000)"]),
        (
            "unknown",
            [
                "Scheduler hit an exception: Traceback (most recent call last):",
                "Received sigquit from a child",
            ],
        ),
        (
            "oom-in-load",
            [
                "Scheduler hit an exception: Traceback (most recent call last):",
                "torch.OutOfMemoryError: CUDA out of memory.",
            ],
        ),
    ],
)
def test_failures_have_a_cause(expected: str, lines: list[str]) -> None:
    assert expected in CAUSES
    assert cause(*lines) == expected


def test_a_size_mismatch_is_the_drafters_only_where_there_is_one() -> None:
    mismatch = "size mismatch for lm_head.weight: copying a param with shape torch.Size([32000, 4096])"
    assert cause(mismatch) == "unsupported"
    assert cause('  File "/x/speculative/eagle_worker.py", line 9, in __init__', mismatch) == "draft-mismatch"


def test_the_noise_of_a_healthy_start_is_never_the_cause() -> None:
    noise = (
        "[2026-11-29 15:01:58] Ignore import error when loading sglang.srt.models.x: No module named 'x'",
        (
            "Failed to load generation config for /d: /d does not appear to have a file named generation_config.json. "
            "Proceeding without generation config."
        ),
        "[2026-11-29 15:01:58] Watchdog scheduler initialized.",
    )
    assert cause(*noise, code=1) == "unknown"
    assert cause(*noise, "torch.OutOfMemoryError: CUDA out of memory.") == "oom-in-load"


def test_a_missing_library_that_ends_the_server_is_no_noise() -> None:
    line = "RuntimeError: Failed to import transformers.models.x because of: No module named 'tiktoken'"
    assert cause(line, code=1) == "unsupported"


@pytest.mark.parametrize("value", ["9" * 400, "1" * 5000, "-", "", "٣", "1e999"])
def test_no_damaged_number_stops_the_reader(value: str) -> None:
    for text in (
        f"Decode batch, #running-req: {value}, accept len: {value}, #queue-req: {value}",
        f"Prefill batch, #new-seq: 1, #new-token: {value}",
        f"max_total_num_tokens={value}, max_running_requests={value}, context_len={value}",
        f"Capture cuda graph bs [{value}, ,1]",
        f"Capturing batches: {value}%|#| {value}/{value} [00:00]",
        f"Retract requests. #retracted_reqs: {value}",
    ):
        ENGINE.read_line(text)
