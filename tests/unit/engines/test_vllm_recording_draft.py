"""A recorded server that drafts with a model of its own (vLLM 0.32.0 on the CPU): what is read from its log and counters.

Recorded by tests/e2e/test_real_vllm.py: SmolLM2-135M drafts for itself, two tokens a step, until our own SIGTERM.
"""

from pathlib import Path

from autotuner.engines.base import Effective, LogFact, ServerExit, Stage, StageSeen, Window
from autotuner.engines.logtext import split_lines
from autotuner.engines.vllm import VLLM

ENGINE = VLLM()
RECORDINGS = Path(__file__).parent / "recordings"
LINES = tuple(split_lines((RECORDINGS / "vllm-0.32-draft-model.log").read_bytes()))
METRICS = (RECORDINGS / "vllm-0.32-draft-model.metrics").read_text()
FACTS: tuple[LogFact, ...] = tuple(fact for line in LINES for fact in ENGINE.read_line(line))


def test_accept_length_is_the_same_by_the_log_and_by_the_counters() -> None:
    windows = [fact for fact in FACTS if isinstance(fact, Window) and fact.drafts]
    drafts, accepted = sum(w.drafts or 0 for w in windows), sum(w.accepted or 0 for w in windows)
    counters = ENGINE.read_metrics(METRICS)
    assert (drafts, accepted) == (counters.drafts, counters.accepted) == (162, 320)
    assert sum(w.drafted or 0 for w in windows) == counters.drafted == 324


def test_the_pool_in_the_log_is_the_one_in_the_metrics() -> None:
    pools = [fact.kv_tokens for fact in FACTS if isinstance(fact, Effective) and fact.kv_tokens]
    assert pools == [23296]
    assert 'kv_cache_size_tokens="23296"' in METRICS


def test_the_limits_of_the_target_are_the_last_ones_named_whatever_the_drafter_could_do() -> None:
    limits = [fact for fact in FACTS if isinstance(fact, Effective)]
    assert [fact.running_cap for fact in limits if fact.running_cap] == [4]
    assert [fact.context_len for fact in limits if fact.context_len][-1] == 1024
    assert [fact.speculating for fact in limits if fact.speculating is not None] == [True]
    assert all(fact.graph_max_batch is None for fact in limits), "a CPU has no graphs to be off"


def test_the_stages_of_a_start_with_two_models_are_seen_in_order() -> None:
    seen = list(dict.fromkeys(fact.stage for fact in FACTS if isinstance(fact, StageSeen)))
    assert seen == [
        Stage.PROCESS,
        Stage.WEIGHTS,
        Stage.DRAFT_WEIGHTS,
        Stage.KV_POOL,
        Stage.WARM_UP,
        Stage.HTTP_UP,
    ]


def test_running_requests_never_exceed_the_cap() -> None:
    running = [fact.running for fact in FACTS if isinstance(fact, Window) and fact.running is not None]
    assert max(running) == 4


def test_a_stop_of_ours_and_one_of_somebody_elses_are_told_apart() -> None:
    assert ENGINE.diagnose(ServerExit(0, asked=True, became_ready=True), LINES).cause in {"asked-to-stop", "own-stop"}
    assert ENGINE.diagnose(ServerExit(0, asked=False, became_ready=True), LINES).sentence.startswith(
        "somebody other than autotuner"
    )
