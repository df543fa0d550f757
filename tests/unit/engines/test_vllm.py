"""What is read out of vLLM, each promise on the text of a real log or in the format of one release."""

from pathlib import Path
from typing import Any

import pytest

from autotuner.core.candidate import Candidate, Launch
from autotuner.engines.base import (
    Effective,
    LogFact,
    Note,
    Place,
    ServerExit,
    Stage,
    StageSeen,
    Window,
    window_between,
)
from autotuner.engines.logtext import split_lines
from autotuner.engines.vllm import VLLM
from autotuner.engines.vocabulary import CAUSES

RECORDINGS = Path(__file__).parent / "recordings"
ENGINE = VLLM()
PLACE = Place("127.0.0.1", 8000)
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
PREFIX = "(APIServer pid=10) INFO 05-08 16:26:39 [loggers.py:271] "


def candidate(args: dict[str, Any] | None = None, env: dict[str, str] | None = None, **launch: Any) -> Candidate:
    return Candidate(
        name="c", engine="vllm", launch=Launch(model="/models/m", args=args or {}, env=env or {}, **launch)
    )


def recorded(name: str) -> list[str]:
    return split_lines((RECORDINGS / name).read_bytes())


def facts_of(name: str) -> list[LogFact]:
    return [fact for line in recorded(name) for fact in ENGINE.read_line(line)]


def window(line: str) -> Window:
    (found,) = ENGINE.read_line(line)
    assert isinstance(found, Window)
    return found


def cause(*lines: str, code: int | None = 1, asked: bool = False, ready: bool = False) -> str:
    return ENGINE.diagnose(ServerExit(code, asked, ready), lines).cause


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_server_listens_where_the_slot_says() -> None:
    argv = ENGINE.argv(candidate({"tensor-parallel-size": 8}, python="/opt/env/bin/python"), PLACE)
    assert argv[:5] == ("/opt/env/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "/models/m")
    assert argv[5:] == ("--host", "127.0.0.1", "--port", "8000", "--tensor-parallel-size", "8")


def test_the_operators_own_vllm_is_used_where_it_is_named() -> None:
    assert ENGINE.argv(candidate(binary="/usr/bin/vllm"), PLACE)[:3] == (
        "/usr/bin/vllm",
        "serve",
        "/models/m",
    )
    assert ENGINE.help_argv(candidate(binary="/usr/bin/vllm")) == ("/usr/bin/vllm", "serve", "--help=all")


def test_a_long_load_is_not_cut_short_and_the_candidates_environment_wins() -> None:
    assert ENGINE.environment(candidate())["VLLM_ENGINE_READY_TIMEOUT_S"] == "3600"
    own = candidate(env={"VLLM_ENGINE_READY_TIMEOUT_S": "60"})
    assert ENGINE.environment(own)["VLLM_ENGINE_READY_TIMEOUT_S"] == "60"


def test_every_stage_has_a_silence_limit() -> None:
    assert all(ENGINE.silence_limit_s(stage) >= 60 for stage in Stage)


# --- what contradicts itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"port": 1}, "belongs to the slot"),
        ({"model": "/other"}, "contradicts launch.model"),
        ({"speculative-config": "{'method': 'ngram'}"}, "is not valid JSON"),
        ({"speculative-config": "[1]"}, "must be a JSON object"),
        ({"speculative-config": '{"num_speculative_tokens": 3}'}, "names neither method nor model"),
        ({"speculative-config": '{"method": "ngram"}'}, "needs num_speculative_tokens"),
        ({"speculative-config": '{"method": "ngram", "num_speculative_tokens": 0}'}, "above 0"),
        ({"speculative-config": '{"method": "eagle3", "num_speculative_tokens": 3}'}, "needs model"),
        ({"sc": '{"method": "eagle", "model": "/d/EAGLE3-x", "num_speculative_tokens": 3}'}, '"eagle3"'),
        (
            {
                "speculative-config": '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 5, '
                '"prompt_lookup_max": 2}'
            },
            "prompt_lookup_min",
        ),
        (
            {
                "tensor-parallel-size": 4,
                "speculative-config": '{"model": "/d", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}',
            },
            "must be 1 or 4",
        ),
        ({"num-speculative-tokens": 5}, "does not exist any more"),
        ({"per-request-spec-decode-metrics": "summary"}, "does not speculate"),
        ({"disable-log-stats": True}, "takes away the metrics"),
    ],
)
def test_flags_that_contradict_each_other_are_named(args: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in ENGINE.check(candidate(args)))


def test_a_variable_that_no_release_reads_is_named() -> None:
    (problem,) = ENGINE.check(candidate(env={"VLLM_ATTENTION_BACKEND": "FLASHINFER"}))
    assert "args.attention-backend" in problem


def test_a_sound_candidate_has_no_problems() -> None:
    assert ENGINE.check(candidate({"max-num-seqs": 64})) == ()
    assert ENGINE.check(candidate({"speculative-config": NGRAM})) == ()
    assert ENGINE.check(candidate({"speculative-config": '{"method": "mtp"}'})) == ()


@pytest.mark.parametrize(
    "args",
    [
        {"speculative-config": NGRAM},
        {"--speculative_config": NGRAM},
        {"-sc": NGRAM},
        {"speculative-config.method": "ngram", "speculative-config.num_speculative_tokens": 4},
        {"spec-method": "ngram", "spec-tokens": 4},
    ],
)
def test_speculation_is_read_in_all_its_spellings(args: dict[str, Any]) -> None:
    asked = ENGINE.speculation(candidate(args))
    assert asked is not None
    assert (asked.method, asked.num_steps, asked.ceiling) == ("ngram", 4, 5.0)


def test_the_method_is_guessed_from_the_drafter_as_vllm_does() -> None:
    asked = ENGINE.speculation(candidate({"sc": '{"model": "/d/My-EAGLE3", "num_speculative_tokens": 3}'}))
    assert asked is not None
    assert asked.method == "eagle3"


def test_no_speculation_is_none() -> None:
    assert ENGINE.speculation(candidate()) is None
    assert ENGINE.speculation(candidate({"speculative-config": "{"})) is None


# --- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        (
            "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 124.5 tokens/s, Running: 8 reqs, "
            "Waiting: 3 reqs, GPU KV cache usage: 7.4%, Prefix cache hit rate: 0.0%"
        ),
        PREFIX + "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 124.5 tokens/s, "
        "Running: 8 reqs, Waiting: 3 reqs, Deferred: 1 reqs, Preemptions: 2, CPU KV cache usage: 7.4%, MM cache hit rate: 1%",
        (
            "INFO 08-27 15:21:10 metrics.py:406] Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 124.5 tokens/s, "
            "Running: 8 reqs, Swapped: 0 reqs, Pending: 3 reqs, GPU KV cache usage: 9.2%, CPU KV cache usage: 0.0%."
        ),
        PREFIX
        + "2 Engines Aggregated: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 124.5 tokens/s, "
        "Running: 8 reqs, Waiting: 3 reqs",
    ],
)
def test_the_load_line_is_read_in_every_release(line: str) -> None:
    found = window(line)
    assert (found.running, found.queued, found.gen_tok_s, found.rank) == (8, 3, 124.5, "")
    assert found.preemptions == (2 if "Preemptions" in line else 0)
    assert not found.prefill


def test_a_window_with_prompt_tokens_is_no_steady_state() -> None:
    assert window("Engine 000: Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: 1.0 tokens/s").prefill


def test_engines_beyond_the_first_are_told_apart() -> None:
    line = "Engine 001: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 88.0 tokens/s, Running: 4 reqs"
    assert window(line).rank == "DP1"


def test_the_speculation_line_gives_counts_length_and_a_rate_of_one_definition() -> None:
    found = window(
        PREFIX + "SpecDecoding metrics: Mean acceptance length: 2.82, Accepted throughput: 8.43 tokens/s, "
        "Drafted throughput: 18.49 tokens/s, Accepted: 93 tokens, Drafted: 204 tokens, "
        "Per-position acceptance rate: 0.588, 0.471, 0.412, 0.353, Avg Draft acceptance rate: 45.6%"
    )
    assert (found.accept_len, found.accepted, found.drafted, found.drafts) == (2.82, 93, 204, 51)
    assert found.accept_rate == pytest.approx(0.456, abs=5e-4)
    assert found.seconds == pytest.approx(11.03, abs=0.01)


def test_verify_steps_of_shortened_drafts_follow_from_the_length() -> None:
    found = window(
        "SpecDecoding metrics: Mean acceptance length: 3.00, Accepted throughput: 1.0 tokens/s, Drafted throughput: "
        "1.5 tokens/s, Accepted: 200 tokens, Drafted: 300 tokens, Per-position acceptance rate: 0.9, 0.6, 0.3, 0.2"
    )
    assert found.drafts == 100


def test_verify_steps_are_known_when_nothing_was_accepted() -> None:
    found = window(
        "SpecDecoding metrics: Mean acceptance length: 1.00, Accepted throughput: 0.00 tokens/s, Drafted throughput: "
        "95.10 tokens/s, Accepted: 0 tokens, Drafted: 951 tokens, Per-position acceptance rate: 0.000, 0.000, 0.000, "
        "0.000, 0.000, Avg Draft acceptance rate: 0.0%"
    )
    assert (found.accept_len, found.accept_rate, found.drafts) == (1.0, 0.0, 190)


def test_a_window_in_which_nothing_was_drafted_is_no_sample() -> None:
    found = window(
        "SpecDecoding metrics: Mean acceptance length: nan, Accepted throughput: 0.00 tokens/s, Drafted throughput: 0.00 "
        "tokens/s, Accepted: 0 tokens, Drafted: 0 tokens, Per-position acceptance rate: nan, nan, Avg Draft acceptance "
        "rate: nan%"
    )
    assert (found.accept_len, found.accept_rate, found.drafts, found.drafted) == (None, None, 0, 0)


def test_text_of_users_in_the_log_is_never_a_fact() -> None:
    line = PREFIX + "Received request cmpl-1: prompt: 'Running: 9 reqs Avg generation throughput: 1 CUDA out of memory'"
    assert ENGINE.read_line(line) == ()
    assert cause(line) == "unknown"


# --- the recording ---------------------------------------------------------------------------------------------------


def test_the_recorded_start_shows_its_stages_in_order() -> None:
    seen = [fact for fact in facts_of("vllm-0.32-ngram.log") if isinstance(fact, StageSeen)]
    assert list(dict.fromkeys(fact.stage for fact in seen)) == [
        Stage.PROCESS,
        Stage.WEIGHTS,
        Stage.DRAFT_WEIGHTS,
        Stage.JIT,
        Stage.KV_POOL,
        Stage.WARM_UP,
        Stage.HTTP_UP,
    ]
    assert StageSeen(Stage.WEIGHTS, 1, 1, ended=True) in seen


def test_the_recorded_limits_are_the_effective_ones() -> None:
    found = [fact for fact in facts_of("vllm-0.32-ngram.log") if isinstance(fact, Effective)]
    assert Effective(running_cap=8) in found
    assert Effective(kv_tokens=46592, context_len=2048) in found
    assert Effective(context_len=2048, graph_max_batch=0, speculating=True) in found


def test_recorded_lines_and_counters_agree_on_the_verify_steps() -> None:
    windows = [fact for fact in facts_of("vllm-0.32-ngram.log") if isinstance(fact, Window)]
    counters = ENGINE.read_metrics((RECORDINGS / "vllm-0.32-ngram.metrics").read_text())
    assert sum(w.drafts or 0 for w in windows) == counters.drafts == 178
    assert sum(w.accepted or 0 for w in windows) == counters.accepted == 317
    assert sum(w.drafted or 0 for w in windows) == counters.drafted == 712


def test_counters_bound_a_window_and_created_samples_are_left_out() -> None:
    text = (RECORDINGS / "vllm-0.32-ngram.metrics").read_text()
    before = ENGINE.read_metrics(text)
    after = ENGINE.read_metrics(text.replace("} 178.0", "} 278.0").replace("} 317.0", "} 517.0"))
    assert before.generated_tokens == 1341
    assert window_between(before, after, 10.0, None).accept_len == 3.0


def test_a_server_without_speculation_has_no_drafts() -> None:
    assert ENGINE.read_metrics('vllm:num_requests_running{engine="0"} 3.0').drafts is None


def test_the_broadcast_warning_is_a_note_and_no_more() -> None:
    line = (
        "(EngineCore pid=1) INFO 10-22 09:43:49 [shm_broadcast.py:466] No available shared memory broadcast block found"
    )
    assert ENGINE.read_line(line) == (Note("warning", "No available shared memory broadcast block found"),)


def test_graph_sizes_in_tokens_become_requests() -> None:
    dump = (
        "(EngineCore pid=1) INFO 11-29 16:11:00 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
        "model='/m', speculative_config=SpeculativeConfig(method='eagle3', num_spec_tokens=3), max_seq_len=4096, "
        "enforce_eager=False, compilation_config={'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>, "
        "'max_cudagraph_capture_size': 512}"
    )
    assert Effective(context_len=4096, graph_max_batch=128, speculating=True) in ENGINE.read_line(dump)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  34%|###4      | 23/67 [00:02<00:04,  8.92it/s]",
            StageSeen(Stage.GRAPH_CAPTURE, 23, 67),
        ),
        (
            "Loading safetensors checkpoint shards:  37% Completed | 60/163 [03:01<05:11,  3.02s/it]",
            StageSeen(Stage.WEIGHTS, 60, 163),
        ),
        ("INFO:     Application startup complete.", StageSeen(Stage.HTTP_UP)),
    ],
)
def test_progress_is_read_from_bars_and_lines(line: str, expected: StageSeen) -> None:
    assert ENGINE.read_line(line) == (expected,)


def test_the_message_before_http_listens_is_not_taken_for_it() -> None:
    assert ENGINE.read_line(PREFIX + "Starting vLLM server on http://0.0.0.0:8195") == ()


def test_the_attention_backend_is_read() -> None:
    line = PREFIX + "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER']."
    assert ENGINE.read_line(line) == (Effective(attention_backend="FLASH_ATTN"),)


# --- why it died -----------------------------------------------------------------------------------------------------


def test_our_own_sigterm_is_no_crash_and_leaves_no_notes() -> None:
    lines = recorded("vllm-0.32-ngram.log")
    assert cause(*lines, code=0, asked=True, ready=True) == "own-stop"
    stopping = [line for line in lines if "[shutdown]" in line]
    assert stopping
    assert not [fact for line in stopping for fact in ENGINE.read_line(line)]


def test_an_exit_with_0_that_nobody_asked_for_is_not_a_success() -> None:
    assert (
        cause(
            "(EngineCore pid=9) ERROR 08-25 10:10:00 [core.py:710] EngineCore encountered a fatal error.",
            code=0,
        )
        == "unknown"
    )


@pytest.mark.parametrize(
    ("expected", "lines"),
    [
        ("bad-flag-combination", ["vllm: error: unrecognized arguments: --cuda-graph-max-bs 8"]),
        (
            "bad-flag-combination",
            [
                "pydantic_core.ValidationError: 1 validation error for SpeculativeConfig",
                "num_speculative_tokens",
            ],
        ),
        (
            "bad-flag-combination",
            [
                "1 validation error for ModelConfig",
                "  Value error, Invalid repository ID or local directory specified: '/n'",
            ],
        ),
        ("kv-too-small", ["ValueError: No available memory for the cache blocks. Try increasing"]),
        (
            "device-busy",
            [
                "ValueError: Free memory on device cuda:0 (2/80 GiB) on startup is less than desired GPU memory utilization"
            ],
        ),
        ("oom-in-load", ["torch.OutOfMemoryError: CUDA out of memory.", "EngineCore failed to start."]),
        ("draft-mismatch", ["ValueError: Target and draft model should have the same vocabulary size."]),
        ("device-busy", ["OSError: [Errno 98] Address already in use"]),
        (
            "watchdog-timeout",
            ["EngineCore encountered a fatal error.", "TimeoutError: RPC call to sample_tokens timed out."],
        ),
        ("host-oom", ["Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor."]),
        (
            "unknown",
            ["RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"],
        ),
    ],
)
def test_failures_have_a_cause(expected: str, lines: list[str]) -> None:
    assert expected in CAUSES
    assert cause(*lines) == expected


def test_benign_lines_are_never_the_cause() -> None:
    noise = (
        "WARNING 07-22 03:07:03 [custom_all_reduce.py:134] Custom allreduce is disabled because it's not supported on PCIe",
        "INFO 10-22 09:43:49 [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds.",
        "(APIServer pid=1) INFO 11-29 16:10:44 [api_utils.py:286] non-default args: {'served_model_name': 'CUDA out of memory'}",
    )
    assert cause(*noise) == "unknown"
