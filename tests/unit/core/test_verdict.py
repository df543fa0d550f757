"""Only a pass under the same benchmark as a measured best-known is promoted; everything else says why not."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.core.building import figures, fired, level

from autotuner.core.objective import Constraints, Objective, unusable
from autotuner.core.policy import Fired
from autotuner.core.state import Verdict
from autotuner.core.verdict import LevelResult, TrialSoFar, disagreement, judge, lost, next_level
from autotuner.edge.rows import basis_json, read_basis

LEVELS = (1, 8, 32, 128)


def trial(*results: LevelResult, base: dict[int, float] | None = None, **more: Any) -> TrialSoFar:
    baseline = {lv: level(lv, rate) for lv, rate in (base or {}).items()}
    return TrialSoFar(
        **{
            "objective": Objective(),
            "levels": LEVELS,
            "results": results,
            "baseline": baseline,
            "launch_noise": 0.03,
            **more,
        }
    )


def whole(rate: float, **more: Any) -> tuple[LevelResult, ...]:
    return tuple(level(lv, rate, **more) for lv in LEVELS)


EVEN = dict.fromkeys(LEVELS, 100.0)


# --- the four verdicts


@pytest.mark.parametrize(
    ("rate", "verdict", "promote"),
    [
        (150.0, Verdict.PASS, True),
        (109.2, Verdict.PASS, True),
        (108.5, Verdict.INCONCLUSIVE, False),
        (100.0, Verdict.INCONCLUSIVE, False),
        (92.5, Verdict.INCONCLUSIVE, False),
        (91.5, Verdict.FAIL, False),
        (50.0, Verdict.FAIL, False),
    ],
)
def test_a_promotion_needs_a_difference_beyond_the_noise_between_launches(
    rate: float, verdict: Verdict, promote: bool
) -> None:
    """3 % between launches on both sides: the ratio is known to ± 1.96 x 3 % x sqrt(2) = 8.3 %."""
    found = judge(trial(*whole(rate), base=EVEN))
    assert (found.verdict, found.promote) == (verdict, promote)
    assert found.score is not None
    assert f"{rate / 100:.3f} of the best-known's (95 % interval" in found.reasons[0]
    assert "3.0 % noise between launches" in found.reasons[0]


def test_a_gain_that_is_too_small_to_be_worth_it_is_none() -> None:
    asks = Objective(min_gain_ratio=0.2)
    assert not judge(trial(*whole(125.0), base=EVEN, objective=asks)).promote
    assert judge(trial(*whole(140.0), base=EVEN, objective=asks)).promote
    assert judge(trial(*whole(105.0), base=EVEN, objective=asks)).verdict is Verdict.FAIL


def test_the_first_candidate_that_was_measured_is_promoted() -> None:
    found = judge(trial(*whole(10.0)))
    assert (found.verdict, found.promote, found.reasons) == (
        Verdict.PASS,
        True,
        ("it is the first one that was measured here",),
    )


def test_a_best_known_without_a_measurement_here_is_not_replaced_unseen() -> None:
    found = judge(trial(*whole(10.0), has_best=True))
    assert (found.verdict, found.promote) == (Verdict.INCONCLUSIVE, False)
    assert "nothing to compare with" in found.reasons[0]


def test_the_first_candidate_must_have_generated_something() -> None:
    assert judge(trial(*whole(0.0))).verdict is Verdict.INCONCLUSIVE
    assert judge(trial()).verdict is Verdict.INCONCLUSIVE
    only_one = judge(trial(level(1, 50.0)))
    assert (only_one.verdict, only_one.promote) == (Verdict.INCONCLUSIVE, False), "the level that decides is missing"


def test_the_best_known_measured_again_passes_and_changes_nothing() -> None:
    found = judge(trial(*whole(500.0), base=EVEN, is_baseline=True))
    assert (found.verdict, found.promote) == (Verdict.PASS, False)


def test_a_void_level_that_decides_makes_the_trial_inconclusive_and_says_which() -> None:
    results = (*whole(500.0)[:3], level(128, 500.0, void="the client was the limit"))
    found = judge(trial(*results, base=EVEN))
    assert (found.verdict, found.promote) == (Verdict.INCONCLUSIVE, False)
    assert found.reasons == ("concurrency 128: the client was the limit",)


def test_a_void_level_that_weighs_nothing_does_not_matter() -> None:
    results = (level(1, 500.0, void="the client was the limit"), *whole(500.0)[1:])
    assert judge(trial(*results, base=EVEN)).promote


def test_a_void_single_stream_level_matters_where_its_speed_is_a_constraint() -> None:
    objective = Objective(constraints=Constraints(single_stream_ratio_min=0.9))
    results = (level(1, 500.0, void="the client was the limit"), *whole(500.0)[1:])
    assert judge(trial(*results, base=EVEN, objective=objective)).verdict is Verdict.INCONCLUSIVE


def test_a_level_missing_on_either_side_is_nothing_to_promote_on() -> None:
    for results, base in ((whole(500.0)[:3], EVEN), (whole(500.0), {1: 100.0, 8: 100.0})):
        found = judge(trial(*results, base=base))
        assert (found.verdict, found.promote) == (Verdict.INCONCLUSIVE, False)


def test_a_violated_constraint_fails_the_fastest_candidate() -> None:
    results = (*whole(900.0)[:3], level(128, 900.0, requests_failed=3, errors={"timeout": 3}))
    found = judge(trial(*results, base=EVEN))
    assert (found.verdict, found.promote) == (Verdict.FAIL, False)
    assert found.reasons == ("3 requests failed at concurrency 128 (3 x timeout)",)


def test_a_failure_outranks_a_void_level() -> None:
    results = (level(8, 1.0, requests_failed=1, errors={"reset": 1}), level(128, 1.0, void="x"))
    assert judge(trial(*results, base=EVEN)).verdict is Verdict.FAIL


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_rule_that_ended_the_trial_gives_its_verdict_and_never_promotes(verdict: Verdict) -> None:
    ended = fired("abandon", verdict, sentence="The server ended")
    found = judge(trial(*whole(900.0), base=EVEN, ended=ended))
    assert (found.verdict, found.promote, found.reasons, found.rule) == (verdict, False, ("The server ended",), ended)


KINDS = {
    "faster": lambda lv: level(lv, 300.0),
    "slower": lambda lv: level(lv, 30.0),
    "same": lambda lv: level(lv, 100.0),
    "void": lambda lv: level(lv, 300.0, void="client"),
    "silent": lambda lv: level(lv, 0.0),
    "failing": lambda lv: level(lv, 300.0, requests_failed=1, errors={"x": 1}),
    "skipped": lambda lv: level(lv, 300.0, fired=fired("skip-level")),
    "abandoned": lambda lv: level(lv, 300.0, fired=fired("abandon")),
}


@pytest.mark.parametrize("first", [*KINDS, None])
@pytest.mark.parametrize("second", [*KINDS, None])
def test_the_whole_table_promotes_only_what_is_faster_where_it_counts(first: str | None, second: str | None) -> None:
    """Every pair of outcomes at two levels, for every objective, with and without a best-known and its measurement."""
    results = tuple(KINDS[kind](lv) for kind, lv in ((first, 1), (second, 128)) if kind)
    outcomes = {1: first, 128: second}
    objectives = (Objective(), Objective(level=1), Objective(maximise="geometric_mean"))
    worlds: tuple[dict[str, Any], ...] = (
        {"base": {1: 100.0, 128: 100.0}, "has_best": True},
        {"base": {128: 100.0}, "has_best": True},
        {"has_best": True},
        {},
    )
    for objective, world in itertools.product(objectives, worlds):
        found = judge(trial(*results, levels=(1, 128), objective=objective, **world))
        assert found.reasons
        assert all(found.reasons)
        assert found.promote <= (found.verdict is Verdict.PASS), "inconclusive, fail and error never promote"
        if not found.promote:
            continue
        deciding = {"output_tok_s": [objective.level or 128], "geometric_mean": [1, 128]}[objective.maximise]
        assert "failing" not in outcomes.values()
        assert "abandoned" not in outcomes.values()
        for lv in deciding:
            assert outcomes[lv] in {"faster", "same", "slower", "skipped"}
        if "base" in world:
            assert any(outcomes[lv] in {"faster", "skipped"} for lv in deciding)
            assert all(lv in world["base"] for lv in deciding)
        else:
            assert not world, "without a measured best-known only the very first is promoted"


@given(
    st.lists(st.sampled_from(LEVELS), unique=True),
    st.floats(1, 1000),
    st.floats(0, 300),
    st.floats(0, 0.2),
    st.sampled_from([Objective(), Objective(level=8), Objective(maximise="geometric_mean", weights={1: 1, 32: 3})]),
)
def test_what_is_promoted_is_above_the_bound_and_measured_everywhere_it_counts(
    done: list[int], rate: float, half: float, noise: float, objective: Objective
) -> None:
    results = tuple(level(lv, rate, half) for lv in done)
    found = judge(trial(*results, base=EVEN, objective=objective, launch_noise=noise))
    if found.promote:
        assert found.score is not None
        assert found.score.low > 1
        assert rate > 100
    elif found.verdict is Verdict.FAIL:
        assert found.score is not None
        assert found.score.high < 1


# --- what is measured next, and when a trial is lost


def test_the_level_that_decides_is_measured_first_and_each_level_once() -> None:
    assert next_level(trial()) == 128
    assert next_level(trial(level(128, 1.0))) == 32
    assert next_level(trial(*whole(1.0))) is None


def test_a_trial_that_is_over_measures_nothing_more() -> None:
    assert next_level(trial(ended=fired("abandon"))) is None
    assert next_level(trial(level(128, 1.0, fired=fired("abandon")))) is None


@pytest.mark.parametrize("action", ["abandon", "quarantine"])
def test_a_rule_that_abandons_loses_the_trial_at_any_level(action: str) -> None:
    rule = fired(action)
    assert lost(trial(level(1, 1.0, fired=rule))) == rule
    assert judge(trial(level(1, 1.0, fired=rule), base=EVEN)).rule == rule


def test_a_skipped_level_loses_the_trial_only_if_it_carries_the_whole_objective() -> None:
    skip = fired("skip-level")
    assert lost(trial(level(128, 1.0, fired=skip))) == skip
    assert lost(trial(level(32, 1.0, fired=skip))) is None
    assert next_level(trial(level(128, 1.0), level(32, 1.0, fired=skip))) == 8


@given(st.sets(st.sampled_from(LEVELS)), st.dictionaries(st.sampled_from(LEVELS), st.floats(0.1, 5), min_size=1))
def test_no_level_is_pruned_on_another_levels_loss_alone(skipped: set[int], weights: dict[int, float]) -> None:
    objective = Objective(maximise="geometric_mean", weights=weights)
    results = tuple(level(lv, 1.0, fired=fired("skip-level")) for lv in sorted(skipped))
    found = lost(trial(*results, objective=objective))
    assert (found is not None) is (set(weights) <= skipped)


def test_a_rule_that_only_voids_or_proposes_loses_nothing() -> None:
    assert lost(trial(level(128, 1.0, fired=fired("void")))) is None
    proposal: Fired = fired("propose")
    assert lost(trial(level(128, 1.0).model_copy(update={"proposal": proposal}))) is None


def test_a_level_result_survives_the_store() -> None:
    result = level(128, 849.0, 3.0, fired=fired("skip-level"), running=48.0)
    assert LevelResult.model_validate_json(result.model_dump_json()) == result
    assert result.step_s == pytest.approx(48 / 849)


def test_figures_that_say_nothing_are_unusable() -> None:
    assert unusable(None)
    assert unusable(figures(8, 0.0))
    assert unusable(figures(8, 5.0, void="x"))
    assert not unusable(figures(8, 5.0))


# --- answers

SAID = tuple(f"answer {n}: the light house keeper watched" for n in range(8))


def test_a_server_that_answers_otherwise_fails_before_anything_is_measured_and_both_answers_are_shown() -> None:
    corrupt = trial(base=EVEN, answers=("!!!!!!!!",) * 8, best_answers=SAID)
    assert next_level(corrupt) is None
    found = judge(corrupt)
    assert (found.verdict, found.promote) == (Verdict.FAIL, False)
    (said,) = found.reasons
    assert said == (
        "its answers agree with the best-known's to 0.00 over 8 prompts, at least 0.25 is asked: to"
        " 'The capital of France is Paris. The capital of Japan is' it answers '!!!!!!!!', the best-known"
        " 'answer 0: the light house keeper watched'"
    )
    fastest = judge(trial(*whole(900.0), base=EVEN, answers=("!!!!!!!!",) * 8, best_answers=SAID))
    assert fastest.verdict is Verdict.FAIL, "however fast it is"


@pytest.mark.parametrize(("answers", "best"), [((), SAID), (SAID, ()), (SAID, SAID)])
def test_answers_that_agree_or_are_not_on_record_cost_nothing(answers: Any, best: Any) -> None:
    fine = trial(*whole(150.0), base=EVEN, answers=answers, best_answers=best)
    assert disagreement(fine) == ()
    assert judge(fine).promote


@pytest.mark.parametrize(("answers", "best"), [((), SAID), (SAID, ()), ((), ())])
@pytest.mark.parametrize("more", [{"base": EVEN}, {"has_best": False}])
def test_what_may_corrupt_answers_is_never_promoted_unless_they_were_compared(
    answers: Any, best: Any, more: Any
) -> None:
    fast = whole(900.0)
    found = judge(trial(*fast, answers=answers, best_answers=best, may_corrupt="NCCL_PROTO = LL128", **more))
    assert (found.verdict, found.promote) == (Verdict.INCONCLUSIVE, False)
    assert found.reasons[0].startswith(
        "NCCL_PROTO = LL128 can corrupt answers, and its answers were compared with nothing: set"
    )


def test_what_may_corrupt_answers_and_does_not_is_promoted_like_any_other() -> None:
    found = trial(*whole(900.0), base=EVEN, answers=SAID, best_answers=SAID, may_corrupt="NCCL_PROTO = LL128")
    assert judge(found).promote
    assert judge(read_basis(basis_json(found))).promote


def test_how_far_answers_must_agree_is_the_operators_to_say() -> None:
    near = (*SAID[:7], "something else")
    for least, verdict in ((0.8, Verdict.PASS), (0.95, Verdict.FAIL), (0.0, Verdict.PASS)):
        objective = Objective(constraints=Constraints(answers_agree_min=least))
        found = judge(trial(*whole(150.0), base=EVEN, objective=objective, answers=near, best_answers=SAID))
        assert found.verdict is verdict


def test_what_was_judged_before_answers_were_asked_is_still_read() -> None:
    old = json.loads(basis_json(trial(*whole(150.0), base=EVEN)))
    del old["answers"], old["best_answers"], old["objective"]["constraints"]["answers_agree_min"]
    del old["objective"]["ttft_ms_max"], old["objective"]["tpot_ms_max"]
    for result in (*old["results"], *old["baseline"].values()):
        for name in [name for name in result["figures"] if name.startswith("goodput")]:
            del result["figures"][name]
    assert judge(read_basis(json.dumps(old))).promote


# --- constraints and the best-known


LATE = {"ttft_ms": {"p99": 900.0}}
IN_TIME = {"ttft_ms": {"p99": 400.0}}
BOUND = Objective(constraints=Constraints(ttft_p99_ms_max=500.0))


def late_best(p99: float) -> dict[int, LevelResult]:
    return {lv: level(lv, 100.0, ttft_ms={"p99": p99}) for lv in LEVELS}


def test_a_best_known_that_violates_a_limit_on_latency_is_measured_all_the_same_and_told() -> None:
    found = judge(trial(*whole(100.0, **LATE), objective=BOUND, is_baseline=True))
    assert (found.verdict, found.promote) == (Verdict.PASS, False)
    assert "TTFT p99 at concurrency 1 is 900.0 ms, the limit is 500 ms" in found.reasons
    failing = judge(trial(*whole(100.0, requests_failed=1), objective=BOUND, is_baseline=True))
    assert failing.verdict is Verdict.FAIL, "a measurement with failed requests is nothing to compare with"


def test_a_slower_server_that_keeps_the_limits_replaces_a_best_known_that_does_not() -> None:
    found = judge(trial(*whole(80.0, **IN_TIME), objective=BOUND, baseline=late_best(900.0)))
    assert (found.verdict, found.promote) == (Verdict.PASS, True)
    assert found.reasons[0].startswith("it keeps the limits on latency, which the best-known does not: TTFT p99")


def test_a_best_known_that_violates_a_limit_by_no_more_than_noise_is_not_replaced_by_a_slower_one() -> None:
    """3 % between launches: up to 1.96 x 3 % above the limit may be chance."""
    slower = whole(80.0, **IN_TIME)
    assert judge(trial(*slower, objective=BOUND, baseline=late_best(529.0))).verdict is Verdict.FAIL
    assert judge(trial(*slower, objective=BOUND, baseline=late_best(530.0))).promote


def test_a_best_known_that_violates_the_limits_is_not_replaced_by_itself() -> None:
    again = trial(*whole(100.0, **IN_TIME), objective=BOUND, baseline=late_best(900.0), is_best=True, has_best=True)
    assert not judge(again).promote


def test_one_that_violates_the_limits_itself_replaces_nobody() -> None:
    assert judge(trial(*whole(300.0, **LATE), objective=BOUND, baseline=late_best(900.0))).verdict is Verdict.FAIL


def test_goodput_that_was_not_measured_on_both_sides_decides_nothing_and_says_so() -> None:
    objective = Objective(maximise="goodput", ttft_ms_max=500.0)
    found = judge(trial(*whole(150.0), base=EVEN, objective=objective))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "too few of its requests met the limits" in found.reasons[0]
