"""Lines of several ranks are one server's: data-parallel ranks add up, copies of a rank count once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.core.ranks import RankJoiner, join
from autotuner.engines.base import Window


def line(rank: str, running: float = 4.0, rate: float = 100.0, **more: object) -> Window:
    return Window(source="log", running=running, queued=1.0, gen_tok_s=rate, rank=rank)._replace(**more)


def joined(*windows: Window) -> list[Window]:
    joiner = RankJoiner()
    return [whole for window in windows for whole in joiner.add(window)]


def test_a_server_without_data_parallel_ranks_is_handed_on_as_it_is() -> None:
    windows = [line("TP0"), line("TP0", 5.0)]
    assert joined(*windows) == windows


def test_a_tensor_parallel_copy_says_nothing_new() -> None:
    assert joined(line("TP0"), line("TP1"), line("TP0")) == [line("TP0"), line("TP0")]


def test_interleaved_ranks_are_added() -> None:
    windows = joined(*[line(f"DP{rank} TP{rank}", rate=10.0 + rank) for _ in range(3) for rank in range(4)])
    assert [w.running for w in windows] == [16.0, 16.0, 16.0]
    assert {w.gen_tok_s for w in windows} == {46.0}


def test_a_rank_that_has_nothing_to_do_prints_nothing_and_holds_up_nobody() -> None:
    zero = line("DP0")
    assert [w.running for w in joined(zero, line("DP1"), zero, line("DP1"), zero, zero, zero)] == [8.0, 8.0, 4.0, 4.0]


def test_accept_length_is_the_mean_over_verify_steps() -> None:
    whole = join((line("DP0", running=1.0, accept_len=4.0), line("DP1", running=3.0, accept_len=2.0)))
    assert whole.accept_len == pytest.approx(2.5)


def test_one_rank_without_graphs_is_a_server_without_graphs() -> None:
    assert join((line("DP0", graph=True), line("DP1", graph=False))).graph is False
    assert join((line("DP0", graph=True), line("DP1", graph=True))).graph is True
    assert join((line("DP0"), line("DP1"))).graph is None


@given(st.lists(st.integers(0, 3), max_size=60))
def test_no_line_is_counted_twice(ranks: list[int]) -> None:
    total = sum(w.gen_tok_s or 0 for w in joined(*[line(f"DP{rank}", rate=1.0) for rank in ranks]))
    assert total <= len(ranks)
