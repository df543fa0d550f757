"""Two witnesses of one level: what they disagree on is said, and their noise is not."""

from typing import Any

import pytest
from unit.core.building import figures

from autotuner.bench.measurement import Figures
from autotuner.core.contradiction import contradictions
from autotuner.engines.base import Window

FIGURES = figures(8, 400.0, requests_ok=200)  # of 60 s: 120 tokens a request


def log(n: int = 5, **more: Any) -> list[Window]:
    return [Window(**{"source": "log", "running": 8.0, "gen_tok_s": 400.0, **more}) for _ in range(n)]


def scraped(n: int = 5, **more: Any) -> list[Window]:
    table: dict[str, Any] = {"source": "metrics", "running": 8.0, "gen_tok_s": 400.0, "seconds": 10.0, "counted": 4000}
    return [Window(**{**table, **more}) for _ in range(n)]


def said(
    logged: list[Window], metrics: list[Window], level: Figures = FIGURES, graph: int | None = 48
) -> tuple[str, ...]:
    return contradictions(logged, metrics, level, graph)


def test_witnesses_that_agree_contradict_nothing() -> None:
    logged = log(accept_len=2.0, drafts=100, accepted=100, graph=True)
    assert said(logged, scraped(accept_len=2.02, drafts=100, accepted=102)) == ()
    assert said([], []) == ()
    assert said(logged, []) == ()


def test_accept_lengths_that_differ_are_told_with_what_they_rest_on() -> None:
    (sentence,) = said(log(accept_len=2.0), scraped(accept_len=2.4, drafts=100, accepted=140))
    assert sentence == ("the log says an accept length of 2.00 over 1600 verify steps, the counters 2.40 over 500")


def test_few_verify_steps_contradict_nobody() -> None:
    assert said(log(accept_len=2.0), scraped(accept_len=2.4, drafts=30, accepted=42)) == ()


def test_accept_lengths_within_their_noise_are_one() -> None:
    logged = [w for value in (1.0, 2.0, 3.0, 2.0, 2.0) for w in log(1, accept_len=value)]
    assert said(logged, scraped(accept_len=2.4, drafts=100, accepted=140)) == ()


def test_counters_of_all_tokens_leave_out_the_first_one_of_each_request() -> None:
    # 119 of a request's 120 tokens come from verify steps.
    exact = scraped(drafts=1983, counted=4000)
    assert said(log(accept_len=2.0), exact) == ()
    assert len(said(log(accept_len=3.0), exact)) == 1


def test_running_requests_that_differ() -> None:
    assert said(log(running=48.0), scraped(running=128.0)) == ("the log says that 48 requests run, the metrics 128",)
    assert said(log(2, running=48.0), scraped(2, running=128.0)) == (), "too few to know"


def test_the_lines_of_data_parallel_ranks_are_added_up() -> None:
    logged = [w for rank in ("DP0", "DP1", "DP2", "DP3") for w in log(running=2.0, rank=rank)]
    assert said(logged, scraped()) == ()


def test_lines_of_a_prefill_are_no_witnesses() -> None:
    assert said(log(running=1.0, prefill=True), scraped()) == ()


@pytest.mark.parametrize(("counted", "word"), [(8000, "somebody else"), (2000, "its counter")])
def test_a_server_that_counts_other_tokens_than_the_client(counted: int, word: str) -> None:
    (sentence,) = said(log(), scraped(counted=counted))
    assert word in sentence
    assert f"{counted / 10:.0f} generated tokens a second, the client 400" in sentence


def test_a_counter_that_rises_when_requests_end_may_miss_as_many_as_run() -> None:
    assert said(log(), scraped(counted=3700)) == (), "within a tenth"
    long = figures(8, 400.0, requests_ok=16)  # 1500 tokens a request, and 8 of them at the edges
    assert said(log(), scraped(counted=2000), long) == ()


def test_a_guess_of_the_tokens_an_event_carries_is_no_witness_against_the_finished_levels_usage() -> None:
    """On an H200 at concurrency 1 the client's live rate was 248 tok/s, the server's 222, and `usage` came to 211."""
    assert said(log(), scraped(gen_tok_s=470.0, counted=4000)) == ()
    guessed = figures(8, 400.0, tokens_counted=False)
    (sentence,) = said(log(), scraped(gen_tok_s=470.0, counted=4000), guessed)
    assert "400 generated tokens a second, the client 470" in sentence


def test_decode_without_a_graph_although_there_is_one_for_such_a_batch() -> None:
    (sentence,) = said(log(graph=False), scraped())
    assert sentence == (
        "5 of 5 decode lines say that no CUDA graph was used, although graphs for up to 48 requests were captured"
    )
    assert said(log(graph=False), scraped(), graph=None) == ()
    assert said(log(graph=False, running=64.0), scraped(running=64.0)) == (), "larger than any graph"
    assert said(log(2, graph=False) + log(8, graph=True), scraped()) == ()


def test_at_a_rate_as_many_requests_are_at_the_edges_as_the_server_told_of() -> None:
    """120 tokens a request: of 25 in flight 3,000 may be counted late, of two 240."""
    at_20 = figures(20, 400.0, requests_ok=200, load="request-rate")
    assert said([], scraped(running=5.0, queued=20.0, counted=3500), at_20) == ()
    (sentence,) = said([], scraped(running=2.0, counted=3500), at_20)
    assert "350 generated tokens a second" in sentence
    assert said([], scraped(running=None, counted=3500), at_20) == ()
