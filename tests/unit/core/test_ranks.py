"""Lines of several ranks are one server's: data-parallel ranks add up, copies of a rank count once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.core.ranks import LineOrder, RankJoiner, join, whole_logs
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


def stamped(second: int, text: str, hour: int = 12) -> bytes:
    return f"[2026-11-29 {hour:02d}:00:{second:02d} DP0 TP0] {text}\n".encode()


def test_lines_of_hosts_whose_clocks_differ_are_read_in_the_order_in_which_they_were_written() -> None:
    order = LineOrder()
    here = [stamped(second, f"here {second}") for second in range(0, 9, 2)]
    there = [stamped(second, f"there {second}", hour=15) for second in range(1, 10, 2)]  # three hours ahead of ours
    found = b"".join(piece for _, piece in order.order([b"".join(here), b"".join(there)], now_s=1000.0))
    words = [line.split()[-2:] for line in found.decode().splitlines()]
    # Both were read up to now, so their last lines count as written together.
    assert words[-2:] == [["here", "8"], ["there", "9"]]
    assert [who for who, _ in words] == ["here", "there"] * 5


def test_lines_of_one_second_take_turns() -> None:
    second = [stamped(1, f"{n}") for n in range(3)]
    found = LineOrder().order([b"".join(second), b"".join(second)], now_s=1.0)
    assert [rank for rank, _ in found] == [0, 1, 0, 1, 0, 1]


def test_a_clock_is_judged_by_the_newest_line_ever_seen() -> None:
    order = LineOrder()
    order.order([stamped(10, "a"), stamped(10, "b", hour=13)], now_s=100.0)
    later = order.order([stamped(14, "a"), stamped(12, "b", hour=13) + stamped(15, "b", hour=13)], now_s=105.0)
    assert [rank for rank, _ in later] == [1, 0, 1]


def test_whole_logs_are_read_by_their_clocks_also_where_one_rank_ended_long_before_the_other() -> None:
    long = b"".join(stamped(second, f"long {second}") for second in range(0, 50, 10))
    for hour in (12, 20):  # the same zone, and another
        short = b"".join(stamped(second, f"short {second}", hour=hour) for second in (3, 12))
        text = b"".join(piece for _, piece in whole_logs([long, short])).decode()
        found = [line.split()[-2:] for line in text.splitlines()]
        assert [who for who, _ in found][-3:] == ["long", "long", "long"]
        assert sorted(map(tuple, found)) == sorted(
            map(tuple, [line.split()[-2:] for line in (long + short).decode().splitlines()])
        )
    # Within a zone the clocks are believed to the second.
    here = b"".join(stamped(second, f"short {second}") for second in (3, 12))
    order = [
        line.split()[-1] for line in b"".join(piece for _, piece in whole_logs([long, here])).decode().splitlines()
    ]
    assert order == ["0", "3", "10", "12", "20", "30", "40"]


@given(
    st.lists(st.lists(st.binary(max_size=40), max_size=6), min_size=2, max_size=3),
    st.lists(st.integers(0, 59), max_size=6),
)
def test_no_byte_of_a_rank_is_lost_or_moved_before_an_earlier_one(looks: list[list[bytes]], seconds: list[int]) -> None:
    order, read = LineOrder(), [b"" for _ in looks]
    for number in range(max(map(len, looks))):
        head = stamped(seconds[number], "x") if number < len(seconds) else b""
        pieces = [head + (pieces[number] if number < len(pieces) else b"") for pieces in looks]
        for rank, piece in order.order(pieces, now_s=float(number)):
            read[rank] += piece
    heads = [stamped(second, "x") for second in seconds]
    longest = max(map(len, looks))
    wanted = [
        b"".join((heads[n] if n < len(heads) else b"") + (p[n] if n < len(p) else b"") for n in range(longest))
        for p in looks
    ]
    assert read == wanted
