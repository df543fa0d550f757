"""The rehearsed server as a process: its log, its metrics and its answers agree, and each personality does as it is named."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.rehearsed import Rehearsed
from patience import FOR_EVER_S, PATIENCE_S, comes_true

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.workload import Workload
from autotuner.core.answers import ANSWER_TOKENS, PROMPTS, agreement
from autotuner.edge.tokenizer import words_for
from autotuner.engines.base import STAGE_ORDER, Effective, Note, Prefill, Stage, StageSeen, Window
from autotuner.rehearsal.asked import ENGINES

DRAFTER = (
    "--speculative-algorithm",
    "EAGLE3",
    "--speculative-draft-model-path",
    "/m/d",
    "--speculative-num-steps",
    "3",
)
SPEC = {
    "sglang": (*DRAFTER, "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    "vllm": (
        "--speculative-config",
        '{"method": "eagle3", "model": "/m/d", "num_speculative_tokens": 3, "synthetic_acceptance_length": 1.65}',
    ),
    "llamacpp": ("--spec-type", "draft-eagle3", "--spec-draft-model", "/m/d", "--spec-synth-len", "1.65", "-np", "8"),
}
ENV = {"SGLANG_SIMULATE_ACC_LEN": "1.65", "VLLM_LOG_STATS_INTERVAL": "0.3"}
FAST = {"speed": 10}


def windows(server: Rehearsed) -> list[Window]:
    return [fact for fact in server.facts if isinstance(fact, Window)]


def stages(server: Rehearsed) -> list[Stage]:
    return [fact.stage for fact in server.facts if isinstance(fact, StageSeen)]


def errors(server: Rehearsed) -> str:
    return "\n".join(fact.text for fact in server.facts if isinstance(fact, Note) and fact.severity == "error")


# --- log, metrics and answers ----------------------------------------------------------------------------------------


def test_sglangs_log_metrics_and_usage_agree(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "sglang", *SPEC["sglang"], env=ENV, **FAST) as server:
        server.wait_ready()
        usage = server.load(8, 200)
        counters, facts = server.counters, server.facts
        assert counters.generated_tokens == sum(u["completion_tokens"] for u in usage)
        assert counters.prompt_tokens == sum(u["prompt_tokens"] for u in usage)
        assert sum(f.tokens or 0 for f in facts if isinstance(f, Prefill)) == counters.prompt_tokens
        seen = windows(server)
        assert len(seen) >= 3
        assert all(w.graph for w in seen)
        lengths = [w.accept_len or 0.0 for w in seen]
        assert sum(lengths) / len(lengths) == pytest.approx(1.65, abs=0.06)
        assert counters.accept_len == pytest.approx(lengths[-1], abs=0.006)
        assert counters.queued == 0
        assert [f.running_cap for f in facts if isinstance(f, Effective) and f.running_cap] == [48, 48]


def test_sglangs_decode_lines_give_back_the_step_time(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "sglang", *SPEC["sglang"], env=ENV, speed=4) as server:
        server.wait_ready()
        server.complete(400)
        steps = [(w.running or 0) * (w.accept_len or 0) / (w.gen_tok_s or 1) for w in windows(server)[1:]]
        assert steps
        assert steps == pytest.approx([0.0082] * len(steps), rel=0.05)


def test_vllms_log_metrics_and_usage_agree(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "vllm", *SPEC["vllm"], env=ENV, **FAST) as server:
        server.wait_ready()
        usage = server.load(8, 200)
        counters = server.counters
        assert counters.generated_tokens == sum(u["completion_tokens"] for u in usage)
        assert counters.prompt_tokens == sum(u["prompt_tokens"] for u in usage)
        server.wait(lambda: sum(w.drafted or 0 for w in windows(server)) == counters.drafted, "all of it in the log")
        assert sum(w.accepted or 0 for w in windows(server)) == counters.accepted
        assert counters.drafts
        assert counters.accepted
        assert sum(w.drafts or 0 for w in windows(server)) == counters.drafts
        assert 1 + counters.accepted / counters.drafts == pytest.approx(1.65, abs=0.06)


def test_an_idle_vllm_falls_silent(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "vllm", env={"VLLM_LOG_STATS_INTERVAL": "0.1"}, **FAST) as server:
        server.wait_ready()
        server.complete(20)
        server.wait(lambda: server.text.rstrip().endswith("rate: 0.0%"), "a line of statistics")

        def silent() -> bool:
            said = server.text
            time.sleep(0.5)  # five times as long as between two lines
            return server.text == said

        server.wait(silent, "silent")
        last = [line for line in server.text.splitlines() if "Engine 000" in line][-1]
        assert "Running: 0 reqs" in last, "that nothing runs is said once"


def test_llamacpps_log_metrics_and_usage_agree(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "llamacpp", *SPEC["llamacpp"], **FAST) as server:
        server.wait_ready()
        usage = server.load(8, 100)
        counters, seen = server.counters, windows(server)
        assert counters.generated_tokens == sum(u["completion_tokens"] for u in usage)
        assert counters.prompt_tokens == sum(u["prompt_tokens"] for u in usage)
        assert len(seen) == 8
        assert sum(w.accepted or 0 for w in seen) == counters.accepted
        assert sum(w.drafted or 0 for w in seen) == counters.drafted
        assert counters.drafts == pytest.approx(sum(w.drafts or 0 for w in seen), rel=0.02)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_start_goes_through_the_stages_in_their_order(tmp_path: Path, engine: str) -> None:
    with Rehearsed(tmp_path, engine, *SPEC[engine], env=ENV) as server:
        server.wait_ready()
        seen = stages(server)
        assert Stage.WEIGHTS in seen
        assert Stage.DRAFT_WEIGHTS in seen
        assert Stage.HTTP_UP in seen
        assert (Stage.GRAPH_CAPTURE in seen) == (engine != "llamacpp")
        firsts = [stage for stage in dict.fromkeys(seen) if stage is not Stage.DRAFT_WEIGHTS]
        if engine == "llamacpp":
            assert firsts[:2] == [Stage.WEIGHTS, Stage.KV_POOL]
        else:
            main = [Stage.PROCESS, Stage.WEIGHTS, Stage.KV_POOL, Stage.GRAPH_CAPTURE]
            assert [stage for stage in firsts if stage in main] == [s for s in STAGE_ORDER if s in main]
        assert not errors(server)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stream_carries_several_tokens_an_event_under_speculation_and_true_counts(
    tmp_path: Path, engine: str
) -> None:
    with Rehearsed(tmp_path, engine, *SPEC[engine], env=ENV) as server:
        server.wait_ready()
        events = server.events(60, stream_options={"include_usage": True})
        texts = [e["choices"][0]["text"] for e in events if e["choices"]]
        assert sum(len(text) > 0 for text in texts) < 50
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 60
        assert events[-1]["usage"]["prompt_tokens"] == 3
        whole = server.complete(60)["choices"][0]
        assert "".join(texts) == whole["text"]
        assert whole["finish_reason"] == "length"
        chat = server.events(5, "/v1/chat/completions", messages=[{"role": "user", "content": "a b c"}])
        said = "".join(e["choices"][0]["delta"].get("content", "") for e in chat)
        assert said
        assert whole["text"].startswith(said)


PATHS = {
    "sglang": (
        "/health",
        "/health_generate",
        "/model_info",
        "/get_model_info",
        "/server_info",
        "/v1/loads",
        "/flush_cache",
    ),
    "vllm": ("/health", "/version"),
    "llamacpp": ("/health", "/props", "/slots"),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_has_its_own_paths(tmp_path: Path, engine: str) -> None:
    with Rehearsed(tmp_path, engine) as server:
        server.wait_ready()
        for path in (*PATHS[engine], "/v1/models", "/metrics"):
            assert server.get(path)[0] == 200, path
        assert server.get("/nothing")[0] == 404


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rehearsed_tokenizer_counts_as_usage_does(tmp_path: Path, engine: str) -> None:
    with Rehearsed(tmp_path, engine) as server:
        server.wait_ready()
        words = asyncio.run(words_for(f"http://127.0.0.1:{server.port}", Benchmark(prompt_tokens=30), None))
        assert words.how == "exact"
        asked = Workload(Benchmark(prompt_tokens=30), 8, None, words).ask(0)
        assert asked is not None
        assert server.complete(2, asked.body["prompt"])["usage"]["prompt_tokens"] == 30


def test_llamacpp_answers_while_it_loads_and_the_others_do_not(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "llamacpp", time_scale=10) as server:
        status, text = server.wait(lambda: _try(server), "listening")
        assert status == 503
        assert "Loading model" in text
    with Rehearsed(tmp_path, "vllm", time_scale=10) as server:
        server.wait(lambda: Stage.WEIGHTS in stages(server), "loading")
        assert _try(server) is None


def _try(server: Rehearsed) -> tuple[int, str] | None:
    try:
        return server.get("/health")
    except OSError:
        return None


@pytest.mark.parametrize(("engine", "code"), [("sglang", 2), ("vllm", 2), ("llamacpp", 1)])
def test_a_wrong_flag_ends_it_at_once_in_the_engines_words(tmp_path: Path, engine: str, code: int) -> None:
    with Rehearsed(tmp_path, engine, "--no-such-flag", "7") as server:
        assert server.process.wait(PATIENCE_S) == code
        said = (
            "invalid argument: --no-such-flag" if engine == "llamacpp" else "unrecognized arguments: --no-such-flag 7"
        )
        assert said in server.text


# --- personalities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("who", "engine", "last"),
    [
        ("hang-process", "sglang", None),
        ("hang-weights", "sglang", Stage.WEIGHTS),
        ("hang-capture", "sglang", Stage.GRAPH_CAPTURE),
        ("hang-warmup", "sglang", Stage.HTTP_UP),
        ("hang-weights", "vllm", Stage.WEIGHTS),
        ("hang-capture", "vllm", Stage.GRAPH_CAPTURE),
        ("hang-weights", "llamacpp", Stage.WEIGHTS),
    ],
)
def test_a_start_that_hangs_stays_in_its_stage(tmp_path: Path, who: str, engine: str, last: Stage | None) -> None:
    with Rehearsed(tmp_path, engine, personality=who) as server:
        server.wait(lambda: server.text, "anything said")
        server.wait(lambda: not stages(server) if last is None else last in stages(server), "in that stage")
        said = server.text
        time.sleep(0.3)
        assert server.text == said
        assert server.process.poll() is None
        answer = _try(server)
        assert answer is None or answer[0] == 503


@pytest.mark.parametrize("who", ["oom-load", "oom-capture"])
@pytest.mark.parametrize(("engine", "code"), [("sglang", -9), ("vllm", 1), ("llamacpp", 1)])
def test_running_out_of_memory_ends_the_start_with_the_engines_words(
    tmp_path: Path, who: str, engine: str, code: int
) -> None:
    with Rehearsed(tmp_path, engine, env={"AUTOTUNER_FAKE_PERSONALITY": who}) as server:
        assert server.process.wait(PATIENCE_S) == code
        assert "out of memory" in server.text
        assert errors(server)
        assert (Stage.GRAPH_CAPTURE in stages(server)) == (who == "oom-capture" and engine != "llamacpp")


def test_a_slow_load_moves_all_the_time(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "sglang", personality="slow-load", time_scale=200) as server:
        server.wait(lambda: Stage.WEIGHTS in stages(server), "loading")
        before = len(stages(server))
        server.wait(lambda: len(stages(server)) > before, "further")
        assert _try(server) is None


def test_one_that_dies_silently_leaves_no_word(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "sglang", personality="dies-silently", after=2, **FAST) as server:
        server.wait_ready()
        server.complete(5)
        with pytest.raises((OSError, EOFError)):
            server.complete(5)
        assert server.process.wait(PATIENCE_S) == -signal.SIGKILL
        assert not errors(server)


def test_one_that_falls_dumb_goes_on_to_call_itself_healthy(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "vllm", personality="health-200-but-dead", after=1, **FAST) as server:
        server.wait_ready()
        server.complete(5)
        with pytest.raises(TimeoutError):
            server.complete(5, timeout_s=0.4)
        assert server.get("/health")[0] == 200


def test_an_engine_that_dies_lets_its_front_end_exit_with_0(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "vllm", personality="exit-0-after-engine-death", after=1, **FAST) as server:
        server.wait_ready()
        server.complete(5)
        assert server.process.wait(PATIENCE_S) == 0
        assert "died unexpectedly" in errors(server)


def test_orphaned_workers_survive_their_server(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "sglang", personality="orphaned-workers", max_seconds=FOR_EVER_S) as server:
        server.wait_ready()
        workers = [int(line.split("pid=")[1].split()[0]) for line in server.text.splitlines() if "worker pid=" in line]
        try:
            assert server.stop() == -signal.SIGKILL
            assert len(workers) == 2
            for pid in workers:
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.1)
            assert all(Path(f"/proc/{pid}").exists() for pid in workers)
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGKILL)


def test_greedy_answers_of_honest_servers_are_one_and_the_same_and_those_of_a_corrupt_one_are_not(
    tmp_path: Path,
) -> None:
    def asked(engine: str, *flags: str, **options: object) -> tuple[str, ...]:
        with Rehearsed(tmp_path, engine, *flags, **options, **FAST) as server:
            server.wait_ready()
            return tuple(server.complete(ANSWER_TOKENS, prompt)["choices"][0]["text"] for prompt in PROMPTS)

    plain, drafted = asked("sglang"), asked("vllm", *SPEC["vllm"], env=ENV)
    same = agreement(drafted, plain)
    assert same is not None
    assert same.mean == 1.0
    assert len(set(plain)) > 1, "the answer is to the prompt"
    wrong = agreement(asked("sglang", personality="corrupt"), plain)
    assert wrong is not None
    assert wrong.mean < 0.05


def test_a_capped_one_lets_the_rest_wait(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "sglang", "--max-running-requests", "256", personality="capped", **FAST) as server:
        server.wait_ready()
        server.load(24, 150)
        seen = windows(server)
        assert max(w.running or 0 for w in seen) == 16
        assert 1 <= max(w.queued or 0 for w in seen) <= 8


def test_a_broken_drafter_has_accept_length_1(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "sglang", *SPEC["sglang"], personality="drafter-broken", env=ENV, **FAST) as server:
        server.wait_ready()
        server.complete(200)
        assert {w.accept_len for w in windows(server)} == {1.0}


def test_acceptance_that_decays_is_lower_at_the_end(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "sglang", *SPEC["sglang"], personality="decaying-acceptance", speed=40) as server:
        server.wait_ready()
        server.complete(6000)
        lengths = [w.accept_len or 0 for w in windows(server)]
        assert sum(lengths[:5]) / 5 > sum(lengths[-5:]) / 5 + 0.5


@pytest.mark.parametrize(("engine", "code"), [("sglang", -9), ("vllm", 0), ("llamacpp", 0)])
def test_a_stop_looks_as_recorded_and_is_no_crash_to_the_reader(tmp_path: Path, engine: str, code: int) -> None:
    with Rehearsed(tmp_path, engine) as server:
        server.wait_ready()
        before = len(server.text)
        assert server.stop() == code
        said = server.text[before:]
        frightening = {"sglang": "crashed with exit code -15", "vllm": "force killing", "llamacpp": "cleaning up"}[
            engine
        ]
        assert frightening in said
        assert "leak" not in said


@pytest.mark.parametrize(("engine", "noise"), [("sglang", "leaked shared_memory"), ("vllm", "nanobind: leaked")])
def test_a_noisy_stop_says_even_more(tmp_path: Path, engine: str, noise: str) -> None:
    with Rehearsed(tmp_path, engine, personality="sigterm-noise") as server:
        server.wait_ready()
        server.stop()
        assert noise in server.text


def test_one_that_ignores_sigterm_lives_on(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "vllm", personality="ignores-sigterm") as server:
        server.wait_ready()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        assert server.get("/health")[0] == 200


# --- its end ---------------------------------------------------------------------------------------------------------


def test_it_ends_with_its_parent() -> None:
    server = [
        sys.executable,
        "-m",
        "autotuner.rehearsal.server",
        "--as",
        "sglang",
        "--personality",
        "hang-process",
        "--",
    ]
    words = [*server, "python3", "-m", "x", "--port", "1"]
    code = (
        "import subprocess, time; null = subprocess.DEVNULL; "
        f"print(subprocess.Popen({words!r}, stdout=null, stderr=null).pid, flush=True); time.sleep(1)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    pid = int(ran.stdout)
    assert comes_true(lambda: not _lives(pid))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_it_ends_after_its_time(tmp_path: Path) -> None:
    with Rehearsed(tmp_path, "sglang", personality="ignores-sigterm", max_seconds=1) as server:
        assert server.process.wait(PATIENCE_S) == -signal.SIGALRM
