"""A start that loads says how long it still takes, from earlier starts and from its bar; and nothing where nothing is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.cli.common import describe_slot
from autotuner.core.estimate import Estimate, History, in_words, learn, remaining
from autotuner.engines.base import STAGE_ORDER, Stage

REACHED = (("process up", 0.0), ("weights loading", 10.0), ("graph capture", 260.0), ("HTTP up", 310.0))
USUAL = learn([History(REACHED, 312.0)])


def test_a_stage_lasts_until_the_next_one_and_the_last_until_it_serves() -> None:
    assert USUAL == {"process up": 10.0, "weights loading": 250.0, "graph capture": 50.0, "HTTP up": 2.0}


def test_the_median_of_earlier_starts_is_what_is_usual() -> None:
    starts = [
        History((("process up", 0.0), ("weights loading", at)), at + took) for at, took in ((1, 9), (2, 20), (9, 900))
    ]
    assert learn(starts) == {"process up": 2.0, "weights loading": 20.0}


def test_a_stage_that_few_starts_had_is_not_expected_of_the_next() -> None:
    plain = History((("process up", 0.0),), 5.0)
    drafted = History((("process up", 0.0), ("draft weights loading", 5.0)), 65.0)
    assert learn([plain, plain, drafted]) == {"process up": 5.0}


def test_nothing_is_claimed_where_nothing_was_learned() -> None:
    assert learn([]) == {}
    assert remaining({}, Stage.WEIGHTS, 20.0, 12, 64) == Estimate()
    assert in_words(Estimate()) == ""


def test_without_a_bar_history_says_what_is_left_of_this_stage_and_of_the_later_ones() -> None:
    assert remaining(USUAL, Stage.WEIGHTS, 50.0) == Estimate(250.0, 200.0 + 50.0 + 2.0)
    assert remaining(USUAL, Stage.HTTP_UP, 0.5) == Estimate(2.0, 1.5)


def test_a_stage_over_its_time_without_a_bar_is_said_to_be_so_and_no_end_is_promised() -> None:
    found = remaining(USUAL, Stage.GRAPH_CAPTURE, 80.0)
    assert found == Estimate(50.0, None, overdue=True)
    assert in_words(found) == "usually 50 s in this stage; longer than usual now"


def test_the_further_the_bar_the_more_it_is_believed() -> None:
    """A disk at half its usual speed: 100 s of a usual 250 s, and the bar shows how far it really is."""
    early = remaining(USUAL, Stage.WEIGHTS, 5.0, 1, 100).remaining_s
    late = remaining(USUAL, Stage.WEIGHTS, 240.0, 48, 100).remaining_s
    assert early == pytest.approx(52.0 + 0.99 * 245.0 + 0.01 * 495.0)
    assert late == pytest.approx(52.0 + 0.52 * 10.0 + 0.48 * 260.0)
    assert remaining(USUAL, Stage.WEIGHTS, 400.0, 80, 100) == Estimate(250.0, pytest.approx(100.0 + 52.0))


def test_a_bar_that_begins_anew_does_not_promise_hours() -> None:
    """The drafter's shards follow the target's in the same stage: one of 64 after 200 s."""
    found = remaining(USUAL, Stage.WEIGHTS, 200.0, 1, 64).remaining_s
    assert found is not None
    assert found < 52.0 + 50.0 + 12.0


def test_a_stage_that_was_never_seen_counts_with_its_bar() -> None:
    assert remaining(USUAL, Stage.JIT, 30.0, 1, 2) == Estimate(None, 30.0 + 52.0)
    assert remaining(USUAL, Stage.JIT, 30.0) == Estimate(None, 52.0)


@given(
    st.dictionaries(st.sampled_from([s.value for s in STAGE_ORDER]), st.floats(0, 1e5)),
    st.sampled_from(STAGE_ORDER),
    st.floats(0, 1e5),
    st.none() | st.integers(0, 70),
    st.none() | st.integers(0, 64),
)
def test_whatever_is_known_what_remains_is_never_negative(
    usual: dict[str, float], stage: Stage, in_stage_s: float, done: int | None, total: int | None
) -> None:
    found = remaining(usual, stage, in_stage_s, done, total)
    assert found.remaining_s is None or 0 <= found.remaining_s < float("inf")
    in_words(found)


@pytest.mark.parametrize(
    ("estimate", "said"),
    [
        (Estimate(250.0, 252.0), "usually 4 min 10 s in this stage; about 5 min to go"),
        (Estimate(0.2, 41.0), "about 50 s to go"),
        (Estimate(None, 0.1), "about 1 s to go"),
        (Estimate(7200.0, 7100.0), "usually 2 h 0 min in this stage; about 1 h 59 min to go"),
    ],
)
def test_it_is_said_no_finer_than_it_is_known(estimate: Estimate, said: str) -> None:
    assert in_words(estimate) == said


def test_status_shows_what_is_left_beside_the_bar() -> None:
    live = {
        "stage": "weights loading", "progress": "weights loading 12/64", "since_s": 100.0, "usual_s": 312.0,
        "stage_s": 50.0, "stage_usual_s": 250.0, "remaining_s": 252.0, "overdue": False,
    }  # fmt: skip
    mine = {"sentence": "waiting for base to serve", "action": "Wait", "live": live}
    said = describe_slot({"slots": {"kimi": mine}}, "kimi", 160.0)
    assert "weights loading 12/64, usually 4 min 10 s in this stage; about 5 min to go · 60 s of about 312 s" in said
    mine["live"] = {key: live[key] for key in ("stage", "progress", "since_s")}  # of an older daemon
    assert describe_slot({"slots": {"kimi": mine}}, "kimi", 160.0).endswith("weights loading 12/64 · 60 s")
