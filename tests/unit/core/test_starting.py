"""A slow load is never called a hang: silence counts from the last sign of progress of any kind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.core.starting import CPU_STEP_S, MEMORY_STEP_BYTES, READ_STEP_BYTES, Pulse, Start, follow, so_far
from autotuner.engines.base import STAGE_ORDER, LogFact, Note, Stage, StageSeen

QUIET = Pulse()


def bar(done: int, total: int = 100) -> StageSeen:
    return StageSeen(Stage.WEIGHTS, done, total)


def silent_s(start: Start, now_s: float) -> float:
    return so_far(start, now_s, 1800.0, 600.0).silent_s


@pytest.mark.parametrize(
    "pulse",
    [
        Pulse(log_bytes=1),
        Pulse(read_bytes=READ_STEP_BYTES),
        Pulse(cpu_s=CPU_STEP_S),
        Pulse(rss_bytes=MEMORY_STEP_BYTES),
        Pulse(rss_bytes=-MEMORY_STEP_BYTES),
    ],
)
def test_any_sign_of_life_ends_the_silence(pulse: Pulse) -> None:
    assert silent_s(follow(Start(), (), pulse, 400.0), 410.0) == 10.0


def test_idling_is_no_progress() -> None:
    idle = Pulse(read_bytes=READ_STEP_BYTES - 1, cpu_s=CPU_STEP_S / 2, rss_bytes=MEMORY_STEP_BYTES - 1)
    assert silent_s(follow(Start(), (), idle, 400.0), 410.0) == 410.0


def test_a_load_that_reads_slowly_but_steadily_is_never_silent_for_long() -> None:
    """547 GB at 100 MB/s: an hour and a half without a line of log."""
    start, worst = Start(), 0.0
    for second in range(5470):
        worst = max(worst, silent_s(start, second))
        start = follow(start, (), Pulse(read_bytes=second * 100_000_000), float(second))
    assert worst <= 1.0


def test_slow_progress_adds_up_over_looks() -> None:
    start = Start()
    for second in range(100):
        start = follow(start, (), Pulse(cpu_s=second * 0.1), float(second))
    assert silent_s(start, 100.0) <= 11.0


def test_a_bar_that_moves_is_progress_and_one_that_stands_is_not() -> None:
    start = follow(Start(), (bar(1),), QUIET, 10.0)
    start = follow(start, (bar(2),), QUIET, 20.0)
    assert silent_s(start, 50.0) == 30.0
    assert start.progress == "weights loading 2/100"
    assert silent_s(follow(start, (bar(2),), QUIET, 40.0), 50.0) == 30.0


def test_stages_are_kept_with_the_time_they_were_reached() -> None:
    start = follow(Start(), (bar(1),), QUIET, 5.0)
    start = follow(start, (StageSeen(Stage.KV_POOL), StageSeen(Stage.GRAPH_CAPTURE)), QUIET, 9.0)
    assert start.reached == (("process up", 0.0), ("weights loading", 5.0), ("KV pool", 9.0), ("graph capture", 9.0))
    assert start.progress == "graph capture"


def test_a_rank_that_lags_behind_shows_life_but_does_not_turn_back_the_stage() -> None:
    start = follow(Start(), (StageSeen(Stage.KV_POOL),), QUIET, 5.0)
    start = follow(start, (bar(50),), QUIET, 30.0)
    assert (start.stage, start.moved_at_s) == (Stage.KV_POOL, 30.0)


def test_other_lines_of_a_log_are_no_stages() -> None:
    start = follow(Start(), (Note("warning", "x"),), QUIET, 5.0)
    assert (start.stage, start.moved_at_s) == (Stage.PROCESS, 0.0)


facts = st.one_of(
    st.builds(StageSeen, st.sampled_from(STAGE_ORDER), st.none() | st.integers(0, 9), st.just(9)),
    st.just(Note("error", "x")),
)


@given(st.lists(st.tuples(st.lists(facts, max_size=3), st.integers(0, 10**8)), max_size=30))
def test_a_start_never_goes_back_and_never_claims_progress_in_the_future(
    story: list[tuple[list[LogFact], int]],
) -> None:
    start, order = Start(), 0
    for now, (seen, read) in enumerate(story, 1):
        start = follow(start, tuple(seen), Pulse(read_bytes=read), float(now))
        assert STAGE_ORDER.index(start.stage) >= order
        assert 0 <= start.moved_at_s <= now
        order = STAGE_ORDER.index(start.stage)
    assert len({stage for stage, _ in start.reached}) == len(start.reached)
