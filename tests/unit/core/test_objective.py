"""What "best" means: which level decides, what a winner must not violate, and how sure a score is."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from unit.core.building import figures

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.measurement import Figures, GoodputLimits
from autotuner.core.objective import (
    Constraints,
    Objective,
    Standing,
    deciding_levels,
    level_order,
    score,
    score_bound,
    violations,
    weights_of,
)
from autotuner.core.statistics import Z95, Interval, ratio_interval

LEVELS = (1, 8, 32, 128)
BUSIEST = Objective()
MEAN = Objective(maximise="geometric_mean")
GOODPUT = Objective(maximise="goodput", ttft_ms_max=500.0, tpot_ms_max=50.0)
LIMITS = GoodputLimits(ttft_ms_max=500.0, tpot_ms_max=50.0)


def side(**rates: float) -> dict[int, Figures]:
    return {int(name[1:]): figures(int(name[1:]), rate) for name, rate in rates.items()}


def test_output_rate_is_decided_at_the_busiest_level_unless_one_is_named() -> None:
    assert weights_of(BUSIEST, LEVELS) == {1: 0.0, 8: 0.0, 32: 0.0, 128: 1.0}
    assert weights_of(Objective(level=8), LEVELS)[8] == 1.0


@given(st.dictionaries(st.sampled_from(LEVELS), st.floats(0, 10)))
def test_weights_sum_to_one(weights: dict[int, float]) -> None:
    found = weights_of(Objective(maximise="geometric_mean", weights=weights), LEVELS)
    assert sum(found.values()) == pytest.approx(1.0)
    if sum(weights.values()) > 0:
        assert {level for level, w in found.items() if w > 0} <= set(weights)


def test_the_deciding_level_is_measured_first() -> None:
    assert level_order(BUSIEST, LEVELS) == (128, 32, 8, 1)
    assert level_order(Objective(level=1), LEVELS) == (1, 128, 32, 8)
    assert level_order(Objective(maximise="geometric_mean", weights={8: 3, 1: 1}), LEVELS) == (8, 1, 128, 32)


def test_what_carries_weight_decides_and_so_does_the_single_stream_where_it_is_a_constraint() -> None:
    floor = Constraints(single_stream_ratio_min=0.9)
    assert deciding_levels(BUSIEST, LEVELS) == (128,)
    assert deciding_levels(Objective(constraints=floor), LEVELS) == (1, 128)
    assert deciding_levels(Objective(constraints=floor), (8, 32)) == (32,)
    assert deciding_levels(Objective(maximise="geometric_mean", weights={8: 3, 32: 1, 1: 0}), LEVELS) == (8, 32)
    assert deciding_levels(Objective(constraints=Constraints(ttft_p99_ms_max=500)), LEVELS) == (128,)


def test_single_stream_and_throughput_disagree_about_the_winner() -> None:
    """The field case: vLLM 82.5 / 1,536 against SGLang 63.6 / 2,370 tok/s at concurrency 1 / 128."""
    vllm, sglang = side(c1=82.5, c128=1536.0), side(c1=63.6, c128=2370.0)
    for objective, sglang_wins in ((BUSIEST, True), (Objective(level=1), False), (MEAN, True)):
        found = score(objective, sglang, vllm, 0.0)
        assert found is not None
        assert (found.mean > 1) is sglang_wins


def test_a_geometric_mean_is_that_of_the_ratios() -> None:
    found = score(MEAN, side(c1=200.0, c8=50.0), side(c1=100.0, c8=100.0), 0.0)
    assert found is not None
    assert found.mean == pytest.approx(1.0)
    weighted = Objective(maximise="geometric_mean", weights={1: 3, 8: 1})
    found = score(weighted, side(c1=200.0, c8=50.0), side(c1=100.0, c8=100.0), 0.0)
    assert found is not None
    assert found.mean == pytest.approx(2**0.75 * 0.5**0.25)


def test_the_noise_between_launches_counts_once_for_the_whole_score() -> None:
    for objective in (BUSIEST, MEAN):
        found = score(objective, side(c1=100.0, c8=100.0), side(c1=100.0, c8=100.0), 0.03)
        assert found is not None
        assert found.high - 1 == pytest.approx(Z95 * math.sqrt(2) * 0.03)
        repeated = score(objective, side(c1=100.0, c8=100.0), side(c1=100.0, c8=100.0), 0.03, launches=(1, 2))
        assert repeated is not None
        assert repeated.high - 1 == pytest.approx(Z95 * math.sqrt(1.5) * 0.03)


@pytest.mark.parametrize("bad", [None, figures(8, 0.0), figures(8, 100.0, void="the client was the limit")])
@pytest.mark.parametrize("which", ["candidate", "best-known"])
def test_a_deciding_level_that_is_missing_or_void_on_either_side_gives_no_score(
    bad: Figures | None, which: str
) -> None:
    good, other = side(c1=10.0, c8=100.0), side(c1=10.0, c8=100.0)
    del other[8]
    if bad is not None:
        other[8] = bad
    pair = (other, good) if which == "candidate" else (good, other)
    assert score(BUSIEST, *pair, 0.0) is None
    assert score(Objective(level=1), *pair, 0.0) is not None, "a level that weighs nothing may be missing"


def test_nothing_measured_is_no_score() -> None:
    assert score(BUSIEST, {}, {}, 0.03) is None
    assert score(BUSIEST, {}, {}, 0.03, LEVELS) is None


def test_a_level_that_both_sides_lack_does_not_hand_its_weight_to_another() -> None:
    partial = side(c1=100.0, c8=100.0)
    assert score(BUSIEST, partial, partial, 0.03, LEVELS) is None
    assert score(MEAN, partial, partial, 0.03, LEVELS) is None


def test_a_failed_request_violates_unless_allowed() -> None:
    one = {8: figures(8, 100.0, requests_failed=1, errors={"timeout": 1})}
    assert violations(BUSIEST, one, {}) == ("1 requests failed at concurrency 8 (1 x timeout)",)
    assert violations(Objective(constraints=Constraints(failed_requests_max=1)), one, {}) == ()


@pytest.mark.parametrize(("name", "table"), [("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")])
def test_a_latency_above_its_limit_violates_and_names_both(name: str, table: str) -> None:
    objective = Objective(constraints=Constraints(**{f"{table[:4]}_p99_ms_max": 100.0}))
    over: dict[str, Any] = {table: {"p50": 1.0, "p99": 100.1}}
    assert violations(objective, {8: figures(8, 9.0, **over)}, {}) == (
        f"{name} p99 at concurrency 8 is 100.1 ms, the limit is 100 ms",
    )
    at_limit: dict[str, Any] = {table: {"p50": 1.0, "p99": 100.0}}
    assert violations(objective, {8: figures(8, 9.0, **at_limit)}, {}) == ()


def test_a_winner_must_keep_its_single_stream_speed_where_that_is_asked() -> None:
    objective = Objective(constraints=Constraints(single_stream_ratio_min=0.95))
    base = side(c1=100.0, c128=1000.0)
    assert violations(objective, side(c1=95.0, c128=2000.0), base) == ()
    (said,) = violations(objective, side(c1=94.0, c128=2000.0), base)
    assert said == "single-stream speed is 0.94 of the best-known's, at least 0.95 is asked"
    assert violations(objective, side(c1=94.0), {}) == ()


def test_a_void_level_proves_no_violation_but_failed_requests_do() -> None:
    objective = Objective(constraints=Constraints(single_stream_ratio_min=0.95, ttft_p99_ms_max=1.0))
    void = {1: figures(1, 1.0, void="the client was the limit", ttft_ms={"p99": 9.0})}
    assert violations(objective, void, side(c1=100.0)) == ()
    assert violations(objective, side(c1=1.0), {1: figures(1, 100.0, void="x")}) == ()
    failed = {1: figures(1, 1.0, void="x", requests_failed=2, errors={"reset": 2})}
    assert violations(objective, failed, {}) == ("2 requests failed at concurrency 1 (2 x reset)",)


@pytest.mark.parametrize(
    "wrong",
    [
        {"maximise": "geometric_mean", "level": 8},
        {"weights": {1: 1.0}},
        {"maximise": "geometric_mean", "weights": {1: -1.0}},
        {"level": 0},
        {"maximise": "goodput"},
        {"maximise": "goodput", "ttft_ms_max": 500.0, "weights": {1: 1.0}},
        {"ttft_ms_max": 500.0},
        {"maximise": "geometric_mean", "tpot_ms_max": 50.0},
        {"maximise": "goodput", "tpot_ms_max": 0.0},
        {"constraints": {"answers_agree_min": 1.1}},
        {"min_gain_ratio": -0.1},
        {"constraints": {"ttft_p99_ms_max": 0}},
    ],
)
def test_an_objective_that_contradicts_itself_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Objective.model_validate(wrong)


def test_an_objective_reads_as_a_sentence() -> None:
    assert str(BUSIEST) == "output tok/s at the busiest level"
    assert str(Objective(level=8)) == "output tok/s at concurrency 8"
    assert str(Objective(maximise="geometric_mean", weights={8: 2, 1: 1})) == (
        "geometric mean of output tok/s ratios over the levels (weights 1: 1, 8: 2)"
    )
    assert str(GOODPUT) == (
        "goodput at the busiest level (requests per second with TTFT up to 500 ms and TPOT up to 50 ms)"
    )
    assert str(Objective(maximise="goodput", level=8, ttft_ms_max=500)) == (
        "goodput at concurrency 8 (requests per second with TTFT up to 500 ms)"
    )


# --- goodput


def good(rate: float | None, half: float = 0.0, limits: GoodputLimits | None = LIMITS, **more: Any) -> Figures:
    bounds = (None, None) if rate is None else (max(0.0, rate - half), rate + half)
    table: dict[str, Any] = {"goodput_limits": limits, "goodput_req_s": rate}
    return figures(8, 100.0, **table, goodput_req_s_low=bounds[0], goodput_req_s_high=bounds[1], **more)


def test_goodput_is_decided_at_its_level_and_by_requests_not_by_tokens() -> None:
    assert weights_of(GOODPUT, LEVELS)[128] == 1.0
    assert weights_of(Objective(maximise="goodput", level=8, ttft_ms_max=1.0), LEVELS)[8] == 1.0
    found = score(GOODPUT, {8: good(6.0, 0.6)}, {8: good(4.0, 0.4)}, 0.03)
    assert found is not None
    assert found.mean == pytest.approx(1.5)
    expected = ratio_interval(Interval(6.0, 5.4, 6.6), Interval(4.0, 3.6, 4.4), 0.03)
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))


@pytest.mark.parametrize(
    "lacking", [good(None), good(4.0, limits=None), good(4.0, limits=GoodputLimits(ttft_ms_max=9))]
)
def test_goodput_under_other_limits_or_none_is_not_compared(lacking: Figures) -> None:
    assert score(GOODPUT, {8: lacking}, {8: good(4.0)}, 0.0) is None
    assert score(GOODPUT, {8: good(4.0)}, {8: lacking}, 0.0) is None


def test_a_best_known_without_one_good_request_is_beaten_by_what_is_known_for_certain() -> None:
    """None seen in 60 s: up to 3.69 may be usual, which is 0.06 a second; 4 a second are at least 65 times as much."""
    found = score(GOODPUT, {8: good(4.0)}, {8: good(0.0)}, 0.0)
    assert found is not None
    assert found.low == pytest.approx(4.0 / (math.log(40) / 60))
    surer = score(GOODPUT, {8: good(4.0)}, {8: good(0.0)}, 0.0, alpha=0.0005)
    assert surer is not None
    assert surer.low == pytest.approx(4.0 / (math.log(4000) / 60)), "as sure as the verdict has to be"
    lost = score(GOODPUT, {8: good(0.0)}, {8: good(4.0)}, 0.0)
    assert lost is not None
    assert lost.high == pytest.approx(math.log(40) / 60 / 4.0)


def test_a_handful_of_good_requests_against_none_tells_nothing() -> None:
    assert score(GOODPUT, {8: good(1 / 60)}, {8: good(0.0)}, 0.0) is None
    assert score(GOODPUT, {8: good(0.0)}, {8: good(1 / 60)}, 0.0) is None
    assert score(GOODPUT, {8: good(0.0)}, {8: good(0.0)}, 0.0) is None


# --- the bound of a score while a level runs


def standing(objective: Objective, done: dict[int, Figures], levels: tuple[int, ...] = (1, 8)) -> Standing:
    return Standing(objective, levels, done, side(c1=100.0, c8=100.0), 0.03)


@given(st.floats(1, 500), st.floats(0, 400))
def test_with_one_deciding_level_the_bound_is_that_of_its_own_ratio(rate: float, half: float) -> None:
    now = figures(8, rate, half)
    own = ratio_interval(Interval(rate, now.output_tok_s_low, now.output_tok_s_high), Interval(100, 100, 100), 0.03)
    if half <= rate:  # a rate has no bound below 0, so a wider interval is not symmetrical
        assert score_bound(standing(BUSIEST, {}), now) == pytest.approx(own.high)


def test_a_score_is_bounded_once_every_other_level_that_weighs_is_measured() -> None:
    assert score_bound(standing(MEAN, {}), figures(8, 50.0)) is None
    found = score_bound(standing(MEAN, side(c1=100.0)), figures(8, 50.0))
    whole = score(MEAN, side(c1=100.0, c8=50.0), side(c1=100.0, c8=100.0), 0.03)
    assert whole is not None
    assert found == whole.high
    one = Objective(maximise="geometric_mean", weights={8: 1.0})
    assert score_bound(standing(one, {}), figures(8, 50.0)) is not None, "level 1 weighs nothing"
    assert score_bound(standing(BUSIEST, {}), figures(1, 50.0)) is None, "the level that decides is not measured"


def test_nothing_is_bounded_before_the_first_token_or_without_a_best_known() -> None:
    assert score_bound(standing(BUSIEST, {}), figures(8, 0.0)) is None
    assert score_bound(Standing(BUSIEST, (8,), {}, {}, 0.03), figures(8, 50.0)) is None


def test_goodput_is_bounded_at_a_levels_end() -> None:
    at = Standing(GOODPUT, (8,), {}, {8: good(4.0)}, 0.03)
    assert score_bound(at, figures(8, 100.0)) is None
    assert score_bound(at, good(2.0)) == pytest.approx(0.5 * (1 + Z95 * math.sqrt(2) * 0.03))


@pytest.mark.parametrize(
    ("objective", "counts"),
    [
        (Objective(), False),
        (Objective(constraints=Constraints(failed_requests_max=3, single_stream_ratio_min=0.9)), False),
        (Objective(constraints=Constraints(ttft_p99_ms_max=500.0)), True),
        (Objective(constraints=Constraints(tpot_p99_ms_max=50.0)), True),
        (Objective(maximise="goodput", ttft_ms_max=500.0), True),
    ],
)
def test_where_single_latencies_decide_a_rate_alone_does_not_end_a_level(objective: Objective, counts: bool) -> None:
    assert objective.counts_latency is counts


# --- levels that are request rates


def test_a_level_may_be_a_fraction_and_a_whole_number_is_one_however_it_is_written() -> None:
    assert Objective(level=0.5).level == 0.5
    written = Objective.model_validate({"level": 8.0}).level
    assert written == 8
    assert isinstance(written, int)
    found = Objective.model_validate({"maximise": "geometric_mean", "weights": {"0.5": 2, "8": 1}})
    assert found.weights == {0.5: 2.0, 8: 1.0}
    assert weights_of(found, (0.5, 2.5, 8)) == {0.5: 2 / 3, 2.5: 0.0, 8: 1 / 3}
    with pytest.raises(ValidationError):
        Objective(level=0)


def test_an_objective_names_its_level_as_what_the_benchmarks_levels_are() -> None:
    good = Objective(maximise="goodput", level=2.5, ttft_ms_max=500)
    assert good.described("request-rate") == "goodput at 2.5 req/s (requests per second with TTFT up to 500 ms)"
    assert Objective(level=8).described("concurrency") == str(Objective(level=8)) == "output tok/s at concurrency 8"
    assert Objective().described("request-rate") == "output tok/s at the busiest level"


def test_a_violation_names_the_rate_at_which_it_happened() -> None:
    objective = Objective(constraints=Constraints(ttft_p99_ms_max=100))
    late = figures(2.5, 400.0, requests_failed=1, ttft_ms={"p99": 120.0}, load="request-rate")
    found = violations(objective, {2.5: late}, {})
    assert all("at 2.5 req/s" in sentence for sentence in found)
    assert len(found) == 2


def test_goodput_decides_at_a_rate_where_output_is_what_was_sent() -> None:
    limits = GoodputLimits(ttft_ms_max=500)
    objective = Objective(maximise="goodput", ttft_ms_max=500)

    def side(good: float) -> dict[Any, Figures]:
        known = {"goodput_limits": limits, "goodput_req_s": good, "goodput_req_s_low": good, "goodput_req_s_high": good}
        return {2.5: figures(2.5, 400.0, 1.0, load="request-rate", **known)}

    found = score(objective, side(2.4), side(2.0), 0.01)
    assert found is not None
    assert found.mean == pytest.approx(1.2)
    of_output = score(Objective(), side(2.4), side(2.0), 0.01)
    assert of_output is not None
    assert of_output.mean == pytest.approx(1.0)


@pytest.mark.parametrize("load", ["request-rate", "trace"])
def test_output_tok_s_at_a_rate_is_warned_of_and_goodput_is_not(load: Any) -> None:
    benchmark = Benchmark(levels=(0.5, 2.5), load=load, dataset="requests.jsonl" if load == "trace" else "")
    (warning,) = Objective().warnings("live", benchmark)
    assert 'maximise "goodput"' in warning
    (warning,) = Objective(maximise="geometric_mean").warnings("live", benchmark)
    assert "says only whether the server keeps up" in warning
    assert Objective(maximise="goodput", ttft_ms_max=500).warnings("live", benchmark) == ()
    single = Objective(constraints=Constraints(single_stream_ratio_min=0.9))
    assert "single_stream_ratio_min" in single.warnings("live", benchmark)[-1]
    assert single.warnings("chat", Benchmark()) == ()
