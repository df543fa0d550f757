"""A win is confirmed on fresh launches beside fresh ones of the best-known, and confirming it comes to an end."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.core.building import figures, level

from autotuner.bench.measurement import Figures, GoodputLimits
from autotuner.core.confirm import (
    Noise,
    Owed,
    Record,
    Run,
    complete,
    drifted,
    first_leg,
    noise_between,
    on_record,
    owed,
    owed_again,
    owed_if_open,
    pool,
)
from autotuner.core.objective import Objective
from autotuner.core.state import Verdict
from autotuner.core.statistics import LAUNCH_NOISE_PRIOR, Z95, launch_noise
from autotuner.core.verdict import TrialSoFar, Win, judge

HOUR = 3600.0


def run(trial: int, rate: float, age_s: float | None = 0.0, **more: object) -> Run:
    return Run(trial, {8: figures(8, rate, **more)}, age_s)  # type: ignore[arg-type]


def record(*ages: float | None) -> Record:
    return Record(tuple(run(i, 100.0, age) for i, age in enumerate(ages)), 0.03)


def turns(owing: tuple[Owed, ...]) -> str:
    return "".join("A" if one.what == "baseline" else "B" for one in owing)


# --- what is owed


@pytest.mark.parametrize(
    ("asked", "known", "order"),
    [
        ({}, 1, "AB"),  # after A1 B1: A1 B1 A2 B2
        ({}, 2, "B"),
        ({}, 0, "AAB"),
        ({"baseline_launches": 1}, 1, "B"),
        ({"confirm_launches": 2}, 1, "ABB"),
        ({"baseline_launches": 3, "confirm_launches": 2}, 1, "ABAB"),
        ({"baseline_launches": 4, "confirm_launches": 2}, 1, "AABAB"),
        ({"confirm_launches": 0}, 0, ""),
    ],
)
def test_the_two_sides_take_turns_and_the_winner_is_last(asked: dict[str, int], known: int, order: str) -> None:
    assert turns(owed(Noise(**asked), record(*[0.0] * known), 0, 0)) == order


def test_a_win_that_was_confirmed_beside_enough_launches_owes_nothing() -> None:
    assert owed(Noise(), record(0.0, 0.0), 1, 1) == ()


@pytest.mark.parametrize(("ages", "order"), [((5 * HOUR, None), "AB"), ((5 * HOUR, HOUR), "B"), ((None, None), "AB")])
def test_a_best_known_measured_long_ago_or_before_a_boot_is_launched_once_more(
    ages: tuple[float | None, ...], order: str
) -> None:
    found = owed(Noise(), record(*ages), 0, 0)
    assert turns(found) == order
    if order == "AB":
        assert "older than 4 h or of another boot" in found[0].why


def test_a_best_known_whose_launches_stopped_to_count_is_launched_again_and_the_winner_beside_it() -> None:
    found = owed(Noise(), record(0.0), best_tries=1, confirmed=1)
    assert turns(found) == "AB"
    assert "once more beside" in found[1].why


@given(
    st.integers(1, 5),
    st.integers(0, 5),
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=40, max_size=40),
)
def test_confirming_a_win_ends_whatever_becomes_of_the_launches(
    baselines: int, confirms: int, fates: list[tuple[bool, bool]]
) -> None:
    """Every launch of the best-known may be lost, or make those before it stop to count."""
    noise = Noise(baseline_launches=baselines, confirm_launches=confirms)
    kept, tries, confirmed = 1, 0, 0
    for lost, jumped in fates:
        leg = first_leg(owed(noise, record(*[0.0] * kept), tries, confirmed))
        if not leg:
            break
        assert turns(leg).count("B") == 1
        assert leg[-1].what == "confirm", "its verdict is the one that promotes"
        for one in leg[:-1]:
            assert one.what == "baseline"
            tries += 1
            kept = kept if lost else 1 if jumped else kept + 1
        confirmed += 1
    else:
        raise AssertionError("it never ended")
    assert tries <= baselines
    assert confirmed <= confirms + baselines
    assert confirmed >= confirms


# --- which launches count


def test_launches_that_agree_all_count_and_give_the_noise() -> None:
    found = on_record((run(1, 100.0), run(4, 104.0)), (8,))
    assert [r.trial for r in found.runs] == [1, 4]
    assert found.noise == launch_noise([100.0, 104.0])
    assert found.said == ()


def test_one_launch_has_the_prior_noise_and_none_is_an_empty_record() -> None:
    assert on_record((run(1, 100.0),), (8,)).noise == LAUNCH_NOISE_PRIOR
    assert on_record((), (8,)) == Record((), LAUNCH_NOISE_PRIOR)


def test_a_launch_beyond_the_noise_makes_those_before_it_stop_to_count_and_is_told() -> None:
    found = on_record((run(1, 100.0), run(4, 101.0), run(9, 80.0)), (8,))
    assert [r.trial for r in found.runs] == [9]
    assert "launch of trial 9 gave 80.0 tok/s at concurrency 8, 100.5 before (-20 %)" in found.said[0]
    assert found.noise > 0.1, "one launch alone cannot tell drift from noise"
    repeated = on_record((run(1, 100.0), run(4, 101.0), run(9, 80.0), run(11, 81.0)), (8,))
    assert [r.trial for r in repeated.runs] == [9, 11]
    assert repeated.noise < LAUNCH_NOISE_PRIOR, "two that agree after the jump show that it was one"


def test_what_the_noise_explains_is_no_drift() -> None:
    """3 % between launches: two of them are within 2.576 x 3 % x sqrt(2) = 10.9 % in 99 of 100 cases."""
    assert on_record((run(1, 100.0), run(2, 111.0)), (8,)).said == ()
    assert on_record((run(1, 100.0), run(2, 112.0)), (8,)).said != ()
    assert on_record((run(1, 100.0), run(2, 112.0, half=5.0)), (8,)).said == (), "nor what the scatter explains"


def test_a_stable_host_is_hardly_ever_said_to_have_drifted() -> None:
    source = random.Random(3)
    pairs = [(source.gauss(100, 3), source.gauss(100, 3)) for _ in range(2000)]
    told = sum(bool(on_record((run(1, a), run(2, b)), (8,)).said) for a, b in pairs)
    assert told / len(pairs) == pytest.approx(0.01, abs=0.008)


def test_a_launch_that_lacks_a_deciding_level_or_is_void_there_does_not_count() -> None:
    runs = (run(1, 100.0), run(2, 300.0, void="client"), Run(3, {1: figures(1, 50.0)}))
    assert [r.trial for r in on_record(runs, (8,)).runs] == [1]
    assert complete(runs[0].figures, (8,))
    assert not complete(runs[2].figures, (8,))


def test_a_launch_that_drifted_within_its_level_counts_only_while_there_is_no_better_one() -> None:
    bad, good = run(1, 100.0, drift_ratio=-0.2), run(2, 99.0)
    assert on_record((bad,), (8,)).runs == (bad,)
    assert on_record((bad, good), (8,)).runs == (good,)
    assert drifted(bad.figures, (8,)) == (8,)
    assert drifted(bad.figures, (1,)) == ()


def test_a_baseline_that_drifted_is_repeated_once_and_never_again() -> None:
    bad = run(1, 100.0, drift_ratio=-0.2).figures
    assert [one.what for one in first_leg(owed_again(bad, (8,), is_repeat=False))] == ["baseline"]
    assert owed_again(bad, (8,), is_repeat=True) == ()
    assert owed_again(bad, (1,), is_repeat=False) == (), "a level that decides nothing may drift"


# --- means of launches


def test_launches_are_pooled_by_level_with_the_half_width_of_a_mean() -> None:
    found = pool(({8: figures(8, 100.0, 3.0), 1: figures(1, 9.0)}, {8: figures(8, 110.0, 4.0)}))
    assert found[1].output_tok_s == 9.0
    assert found[8].output_tok_s == 105.0
    assert found[8].output_tok_s_high - 105.0 == pytest.approx(math.hypot(3, 4) / 2)


def test_goodput_is_pooled_like_the_rate_unless_the_limits_differ() -> None:
    limits = GoodputLimits(ttft_ms_max=500)
    one = figures(8, 100.0, goodput_limits=limits, goodput_req_s=2.0, goodput_req_s_low=1.7, goodput_req_s_high=2.3)
    two = figures(8, 100.0, goodput_limits=limits, goodput_req_s=4.0, goodput_req_s_low=3.6, goodput_req_s_high=4.4)
    found = pool(({8: one}, {8: two}))[8]
    assert found.goodput_req_s == 3.0
    assert found.goodput_req_s_high == pytest.approx(3.0 + math.hypot(0.3, 0.4) / 2)
    other = two.model_copy(update={"goodput_limits": GoodputLimits(ttft_ms_max=9)})
    assert pool(({8: one}, {8: other}))[8].goodput_req_s == 4.0


def test_where_goodput_is_compared_its_own_noise_between_launches_counts() -> None:
    def run(number: int, goodput: float) -> Run:
        return Run(number, {8: figures(8, 100.0, goodput_limits=GoodputLimits(ttft_ms_max=500), goodput_req_s=goodput)})

    assert on_record((run(1, 4.0), run(2, 4.0)), (8,)).noise < LAUNCH_NOISE_PRIOR
    assert on_record((run(1, 3.0), run(2, 5.0)), (8,)).noise > 0.2
    assert on_record((run(1, 0.0), run(2, 0.0)), (8,)).noise < LAUNCH_NOISE_PRIOR


def test_a_void_level_is_shown_only_where_there_is_nothing_else() -> None:
    void, good = figures(8, 500.0, void="client"), figures(8, 100.0)
    assert pool(({8: good}, {8: void})) == {8: good}
    assert pool(({8: void},)) == {8: void}
    assert pool(()) == {}


# --- the verdict of a confirming trial

WIN = Win(2, None)


def trial(rate: float, runs: tuple[float, ...] = (100.0, 100.0), **more: object) -> TrialSoFar:
    table: dict[str, object] = {
        "objective": Objective(),
        "levels": (1, 8),
        "results": (level(8, rate),),
        "baseline_runs": tuple({8: figures(8, r)} for r in runs),
        "has_best": True,
        "launch_noise": 0.03,
    }
    return TrialSoFar(**{**table, **more})  # type: ignore[arg-type]


def test_a_win_is_not_promoted_while_something_is_owed_and_names_it() -> None:
    owing = owed(Noise(), record(0.0), 0, 0)
    found = judge(trial(150.0, owed=owing))
    assert (found.verdict, found.promote, found.follows) == (Verdict.PASS, False, owing)
    assert "once fresh launches have confirmed that" in found.reasons[0]
    assert judge(trial(50.0, owed=owing)).follows == (), "what did not win costs no further launch"
    assert judge(trial(100.0, owed=owing)).follows == ()


def test_a_confirmed_win_is_promoted_and_an_unconfirmed_one_is_not() -> None:
    assert judge(trial(150.0, win=WIN)).promote
    for rate, verdict in ((101.0, Verdict.INCONCLUSIVE), (70.0, Verdict.FAIL)):
        found = judge(trial(rate, win=WIN))
        assert (found.verdict, found.promote) == (verdict, False)
        assert found.reasons[0].startswith("the win of trial 2 is not confirmed on a fresh launch: the objective is")


def test_a_confirming_trial_is_decided_by_the_mean_of_all_confirming_launches() -> None:
    """108 and 112 against three launches of 100: 1.10 ± 1.96 x 3 % x sqrt(1/2 + 1/3) x 1.10 = 5.9 %."""
    found = judge(trial(112.0, (100.0, 100.0, 100.0), win=WIN, earlier_runs=({8: figures(8, 108.0)},)))
    assert found.promote
    assert found.score is not None
    assert found.score.mean == pytest.approx(1.1)
    assert found.score.high - 1.1 == pytest.approx(1.1 * Z95 * 0.03 * math.sqrt(5 / 6))
    assert "2 against 3 launches" in found.reasons[0]
    assert "on 2 fresh launches" in found.reasons[0]


def test_an_open_confirmation_goes_on_with_the_launches_that_are_owed() -> None:
    owing = owed(Noise(confirm_launches=2), record(0.0, 0.0), 0, 1)
    found = judge(trial(105.0, win=WIN, owed=owing))
    assert (found.verdict, found.follows) == (Verdict.INCONCLUSIVE, owing)
    assert "is still open" in found.reasons[0]
    assert judge(trial(60.0, win=WIN, owed=owing)).follows == (), "what lost clearly needs no second launch"


@pytest.mark.parametrize(
    ("asked", "tries", "confirmed", "order"),
    [({}, 0, 0, "AB"), ({}, 1, 1, "AB"), ({}, 2, 1, "B"), ({}, 3, 3, ""), ({"open_launches": 0}, 0, 0, ""), ({"confirm_launches": 0}, 0, 0, "")],
)  # fmt: skip
def test_a_lead_is_measured_in_pairs_and_not_for_ever(
    asked: dict[str, int], tries: int, confirmed: int, order: str
) -> None:
    assert turns(owed_if_open(Noise(**asked), tries, confirmed)) == order


def test_only_a_lead_that_is_worth_it_costs_more_launches() -> None:
    pair = owed_if_open(Noise(), 0, 0)
    assert judge(trial(105.0, owed_if_open=pair)).follows == pair
    assert judge(trial(102.0, owed_if_open=pair)).follows == ()
    assert judge(trial(105.0, owed_if_open=pair, is_best=True)).follows == ()
    asked = Objective(min_gain_ratio=0.05)
    assert judge(trial(105.0, owed_if_open=pair, objective=asked)).follows == (), "5 % and 3 % of that are asked for"


def test_the_launches_of_both_sides_give_the_noise() -> None:
    known = on_record((run(1, 99.0), run(2, 101.0)), (8,))
    one, two = {8: figures(8, 120.0)}, {8: figures(8, 126.0)}
    assert noise_between(known, (one,), (8,)) == known.noise
    assert noise_between(known, (one, two), (8,)) == pytest.approx(launch_noise([99.0, 101.0], [120.0, 126.0]))
    moved = on_record((run(1, 60.0), run(2, 101.0)), (8,))
    assert moved.said
    assert noise_between(moved, (one, two), (8,)) == moved.noise, "a host that has changed keeps its own"


@pytest.mark.parametrize("rate", [150.0, 100.0, 50.0])
def test_the_best_known_itself_neither_wins_nor_loses_against_itself(rate: float) -> None:
    """Whatever it gives stays on its record, which a lost trial would not."""
    found = judge(trial(rate, is_best=True))
    assert (found.verdict, found.promote, found.follows) == (Verdict.INCONCLUSIVE, False, ())
    assert "cannot beat itself" in found.reasons[0]


def test_the_best_known_launched_again_says_by_how_much_it_differs() -> None:
    found = judge(trial(97.0, (100.0,), is_baseline=True))
    assert found.reasons == (
        "the best-known itself, launched again, gave 0.970 of the launch before; the noise between launches is taken to be 3.0 %",
    )


def test_two_launches_that_are_the_same_server_are_hardly_ever_promoted() -> None:
    """Both sides the same server with 3 % between launches: one look promotes 1 in 45, a confirmed one 1 in 450."""
    source = random.Random(5)

    def rate() -> Figures:
        return figures(8, source.gauss(100, 3))

    at_once = confirmed = 0
    for _ in range(3000):
        first = rate()
        won = judge(trial(rate().output_tok_s, (first.output_tok_s,))).promote
        at_once += won
        if won:
            best = on_record((Run(1, {8: first}), Run(3, {8: rate()})), (8,))
            again = trial(rate().output_tok_s, tuple(r.figures[8].output_tok_s for r in best.runs), win=WIN)
            confirmed += judge(again).promote
    assert at_once / 3000 == pytest.approx(0.025, abs=0.01)
    assert confirmed <= 15, "most of what luck alone had won is not confirmed"
