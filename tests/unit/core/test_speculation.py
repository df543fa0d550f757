"""Break-even of speculation, held against published measurements and recordings of real servers."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.core.building import windows

from autotuner.core.speculation import (
    PRIOR_ERROR,
    Doubt,
    Pays,
    SpeculationAtLevel,
    StepTime,
    accept_length,
    assess,
    baseline_step,
    decode_rate,
    needed_accept_len,
    prior_needed,
    steady_windows,
    step_time_s,
)
from autotuner.core.statistics import Interval
from autotuner.engines.base import Speculation, Window

EAGLE3 = Speculation("EAGLE3", num_steps=3, draft_tokens=4)

# Kimi-K2.5 INT4 on eight PCIe GPUs: SGLang with CUDA graphs, and with a drafter that was trained for another model.
BASE = {1: 63.6, 128: 2370.0}
BASE_STEPS = {float(b): step_time_s(b, 1, rate) for b, rate in BASE.items()}
MEASURED = {1: 62.9, 128: 849.0}
CAP = 48
SURE = Doubt(launch_noise=0.0)  # as if every launch were like every other: what is then left is what was measured

with (Path(__file__).parent / "data" / "speculation-numbers.csv").open() as file:
    PUBLISHED = list(csv.DictReader(file))


def window(**more: Any) -> Window:
    return Window(**{"source": "log", "running": 8.0, "queued": 0.0, "gen_tok_s": 100.0, "accept_len": 2.0, **more})


# --- the campaign this program was made for


def test_at_one_stream_the_ready_made_drafter_needed_an_accept_length_of_1_67_and_had_1_65() -> None:
    found = assess(windows(1, MEASURED[1], 1.65), 1, CAP, EAGLE3, BASE_STEPS, SURE)
    assert found.needed == pytest.approx(1.67, abs=0.005)
    assert found.baseline_step == StepTime(1 / 63.6, "measured")
    assert found.pays is Pays.NO
    assert not found.capped


def test_a_loss_of_one_percent_is_no_loss_where_launches_differ_by_three() -> None:
    found = assess(windows(1, MEASURED[1], 1.65), 1, CAP, EAGLE3, BASE_STEPS)
    assert found.speedup is not None
    assert found.speedup.low < 1 < found.speedup.high
    assert found.pays is Pays.UNKNOWN


def test_the_plain_step_at_the_cap_is_interpolated_to_29_9_ms() -> None:
    step = baseline_step(BASE_STEPS, CAP)
    assert step is not None
    assert 1000 * step.seconds == pytest.approx(29.9, abs=0.05)
    assert (step.known, step.between) == ("interpolated", (1.0, 128.0))


def test_at_the_cap_the_drafter_was_far_below_what_was_needed() -> None:
    found = assess(windows(CAP, MEASURED[128], 1.65, queued=16.0), 128, CAP, EAGLE3, BASE_STEPS)
    assert found.needed == pytest.approx(48 * 1.65 / 849 / 0.0299, rel=0.002)
    assert found.pays is Pays.NO
    assert found.ceiling == 4.0


def test_an_accept_length_of_one_is_a_broken_drafter_and_no_question_of_speed() -> None:
    for base in (BASE_STEPS, {}):
        assert assess(windows(1, 40.8, 1.0), 1, CAP, EAGLE3, base).pays is Pays.BROKEN


# --- recordings: SGLang 0.5.12 on one H200, the shape of an 8B model; TPOT in ms at concurrency 1, 8, 32, 128

TPOT_BASE = {1: 4.57, 8: 4.69, 32: 5.18, 128: 7.01}
TPOT_CAPPED = {1: 4.97, 8: 5.56, 32: 7.27}
TPOT_UNCAPPED = {1: 5.26, 8: 4.80, 32: 7.63, 128: 18.2}


@pytest.mark.parametrize(
    ("tpot", "concurrency", "low", "high"),
    [
        (TPOT_CAPPED, 1, 1.75, 1.95),
        (TPOT_UNCAPPED, 1, 1.75, 1.95),
        (TPOT_CAPPED, 8, 1.65, 2.0),
        (TPOT_UNCAPPED, 8, 1.65, 2.0),
        (TPOT_CAPPED, 32, 2.25, 2.5),
        (TPOT_UNCAPPED, 32, 2.25, 2.5),
        (TPOT_UNCAPPED, 128, 4.1, 4.6),
    ],
)
def test_recorded_times_per_token_give_the_recorded_break_even(
    tpot: dict[int, float], concurrency: int, low: float, high: float
) -> None:
    base = {float(b): ms / 1000 for b, ms in TPOT_BASE.items()}
    rate = concurrency * 1000 / tpot[concurrency]
    found = assess(windows(concurrency, rate, 1.65), concurrency, None, EAGLE3, base, SURE)
    assert found.needed is not None
    assert low <= found.needed <= high
    assert found.pays is (Pays.HOPELESS if concurrency == 128 else Pays.NO)


def test_at_128_no_drafter_of_three_steps_could_win_on_that_machine() -> None:
    """Break-even was above the ceiling of 4, which even an accept length of 3.99 does not change."""
    base = {128.0: TPOT_BASE[128] / 1000}
    step_s = TPOT_UNCAPPED[128] / 1000 * 1.65
    found = assess(windows(128, 128 * 3.99 / step_s, 3.99), 128, None, EAGLE3, base, SURE)
    assert found.needed is not None
    assert found.needed > 4.0
    assert found.pays is Pays.HOPELESS


# --- published measurements


@pytest.mark.parametrize(
    "row", PUBLISHED, ids=lambda r: f"{r['model']}-{r['method']}-{r['num_steps']}-at-{r['concurrency']}"
)
def test_published_speedups_agree_with_accept_length_over_break_even(row: dict[str, str]) -> None:
    running, accept_len, speedup = float(row["concurrency"]), float(row["accept_len"]), float(row["speedup"])
    both = bool(row["base_tok_s"] and row["spec_tok_s"])
    base = float(row["base_tok_s"]) if both else 100.0 * running
    spec = float(row["spec_tok_s"]) if both else base * speedup
    depth = int(row["num_steps"])
    steps = {running: step_time_s(running, 1, base)}
    found = assess(windows(running, spec, accept_len), round(running), None, Speculation("x", depth), steps, SURE)
    assert found.needed == pytest.approx(accept_len / speedup, rel=0.01 / speedup), "speedups are given to 0.01"
    if abs(speedup - 1) > 0.005:
        pays = accept_len > found.needed
        assert pays is (speedup > 1)
        assert (found.pays is Pays.YES) is (speedup > 1)
    if row["topk"] == "1":
        assert found.ceiling is not None
        assert accept_len <= found.ceiling


def test_there_are_published_wins_and_losses_on_both_sides_of_any_fixed_accept_length() -> None:
    wins = [float(r["accept_len"]) for r in PUBLISHED if float(r["speedup"]) > 1.02]
    losses = [float(r["accept_len"]) for r in PUBLISHED if float(r["speedup"]) < 0.98]
    assert len(wins) > 20
    assert len(losses) > 10
    assert min(wins) < max(losses)


def test_break_even_from_throughput_equals_break_even_from_the_clock() -> None:
    """Two chains at batch 8 whose step times were published: 23.34 ms plain, 39.47 ms at depth 1, 66.82 ms at depth 7."""
    assert needed_accept_len(39.47, 23.34) == pytest.approx(1.67 / (292.0 / 295.6), abs=0.01)
    assert needed_accept_len(66.82, 23.34) == pytest.approx(2.44 / (252.1 / 295.6), abs=0.01)


# --- the rule itself


@given(st.floats(1, 256), st.floats(1, 8), st.floats(0.001, 0.2), st.floats(0.001, 0.2))
def test_speculation_pays_exactly_where_it_is_faster(
    running: float, accept_len: float, spec: float, base: float
) -> None:
    spec_rate, base_rate = running * accept_len / spec, running / base
    assert step_time_s(running, accept_len, spec_rate) == pytest.approx(spec)
    needed = needed_accept_len(spec, base)
    if not math.isclose(spec_rate, base_rate, rel_tol=1e-9):
        assert (accept_len > needed) is (spec_rate > base_rate)


@given(st.floats(1.1, 4), st.floats(1.1, 4))
def test_a_bad_drafter_gives_the_break_even_of_a_good_one(bad: float, good: float) -> None:
    """The step costs what it costs, however many of its tokens are kept."""
    step = 0.04
    found = [assess(windows(8, 8 * al / step, al), 8, None, EAGLE3, {8.0: 0.02}) for al in (bad, good)]
    assert found[0].needed == pytest.approx(2.0)
    assert found[1].needed == pytest.approx(2.0)


def between(low: float, high: float) -> Interval:
    return Interval((low + high) / 2, low, high)


@pytest.mark.parametrize(
    ("accept_len", "needed", "speedup", "ceiling", "pays"),
    [
        (None, between(1.9, 2.1), between(0.9, 1.1), 4.0, Pays.UNKNOWN),
        (between(1.0, 1.0), between(1.9, 2.1), between(0.4, 0.6), 4.0, Pays.BROKEN),
        (between(1.0, 1.019), None, None, None, Pays.BROKEN),
        (between(1.0, 1.02), None, None, None, Pays.UNKNOWN),
        (between(1.0, 1.021), between(1.9, 2.1), between(0.4, 0.6), 4.0, Pays.NO),
        (between(1.9, 2.1), None, None, 4.0, Pays.UNKNOWN),
        (between(1.9, 2.1), None, between(0.4, 0.6), 4.0, Pays.UNKNOWN),
        (between(1.9, 2.1), between(1.9, 2.6), None, 4.0, Pays.UNKNOWN),
        (between(1.9, 2.1), between(1.5, 1.9), between(1.001, 1.3), 4.0, Pays.YES),
        (between(1.9, 2.1), between(1.5, 1.9), between(1.0, 1.3), 4.0, Pays.UNKNOWN),
        (between(1.9, 2.1), between(1.9, 2.6), between(0.8, 1.0), 4.0, Pays.UNKNOWN),
        (between(1.9, 2.1), between(1.9, 2.6), between(0.8, 0.999), 4.0, Pays.NO),
        (between(1.9, 2.1), between(4.01, 4.5), between(0.4, 0.6), 4.0, Pays.HOPELESS),
        (between(1.9, 2.1), between(4.0, 4.5), between(0.4, 0.6), 4.0, Pays.NO),
        (between(1.9, 2.1), between(4.01, 4.5), between(0.4, 0.6), None, Pays.NO),
    ],
)
def test_the_reading_of_a_level_needs_the_whole_interval_on_one_side(
    accept_len: Interval | None,
    needed: Interval | None,
    speedup: Interval | None,
    ceiling: float | None,
    pays: Pays,
) -> None:
    found = SpeculationAtLevel(accept_len=accept_len, needed_bounds=needed, speedup=speedup, ceiling=ceiling)
    assert found.pays is pays


def test_the_bounds_of_the_comparison_count_every_doubt() -> None:
    """Noise between launches, the baseline's own, and that of a step that was not measured: each widens it, alone and together."""

    def width(doubt: Doubt, base: dict[float, float] = BASE_STEPS, running: float = 128) -> float:
        found = assess(windows(running, 100.0, 2.0), round(running), None, EAGLE3, base, doubt)
        assert found.speedup is not None
        return (found.speedup.high - found.speedup.mean) / found.speedup.mean

    assert width(SURE) == pytest.approx(0.0, abs=1e-9), "windows that all say the same"
    assert width(Doubt(0.05, 0.03)) == pytest.approx(1.96 * math.sqrt(2) * 0.03, rel=1e-3)
    assert width(Doubt(0.05, 0.0, 0.04)) == pytest.approx(0.04, rel=1e-3)
    assert width(Doubt(0.05, 0.03, 0.04)) == pytest.approx(math.hypot(1.96 * math.sqrt(2) * 0.03, 0.04), rel=1e-3)
    assert width(SURE, running=64.5) == pytest.approx(0.10, rel=1e-2), "half way between two levels"
    assert width(SURE, running=300) == pytest.approx(0.30, rel=1e-2), "beyond them"
    assert width(Doubt(0.001, 0.03)) == pytest.approx(3.2905 * math.sqrt(2) * 0.03, rel=1e-3)


def test_the_luck_of_the_prompts_cancels_out_of_the_needed_accept_length() -> None:
    """Accept length and rate rise and fall together; their quotient, the step time, stands still."""
    seen = tuple(w for al in (1.5, 2.0, 2.5, 1.8, 2.2, 1.6) for w in windows(8, 8 * al / 0.04, al, 1))
    found = assess(seen, 8, None, EAGLE3, {8.0: 0.02}, SURE)
    assert found.needed_bounds is not None
    assert found.speedup is not None
    assert found.needed_bounds.high - found.needed_bounds.low == pytest.approx(0.0, abs=1e-9)
    assert found.speedup.high - found.speedup.low > 0.2


def test_where_no_window_states_both_the_errors_of_accept_length_and_rate_add_up() -> None:
    lens = tuple(window(gen_tok_s=None, running=None, accept_len=al) for al in (1.9, 2.0, 2.1, 2.0, 1.9, 2.1))
    rates = tuple(window(gen_tok_s=r, accept_len=None) for r in (390.0, 400.0, 410.0, 400.0, 395.0, 405.0))
    found = assess(lens + rates, 8, None, EAGLE3, {8.0: 0.02}, SURE)
    assert found.accept_len is not None
    assert found.needed_bounds is not None
    assert found.speedup is not None
    apart = [(i.high - i.mean) / i.mean for i in (found.accept_len, found.speedup)]
    assert (found.needed_bounds.high - found.needed_bounds.mean) / found.needed_bounds.mean == pytest.approx(
        math.hypot(*apart), rel=1e-3
    )


def test_a_rate_that_rises_with_what_runs_is_no_noise() -> None:
    """20 tok/s a request throughout: how many run says nothing against the figures; a window without a rate neither."""
    seen = tuple(w for running in (7.5, 8.0, 8.5, 7.5, 8.5) for w in windows(running, 20 * running, 2.0, 1))
    found = assess((*seen, window(gen_tok_s=None)), 8, None, EAGLE3, {8.0: 0.02}, SURE)
    assert found.speedup is not None
    assert found.speedup.high - found.speedup.low == pytest.approx(0.0, abs=1e-9)


def test_three_windows_that_state_both_are_enough_to_know_the_step_time() -> None:
    seen = tuple(w for al in (1.5, 2.0, 2.5) for w in windows(8, 8 * al / 0.04, al, 1))
    known = assess(seen, 8, None, EAGLE3, {8.0: 0.02}, SURE).needed_bounds
    two = assess(seen[:2], 8, None, EAGLE3, {8.0: 0.02}, SURE).needed_bounds
    assert known is not None
    assert two is not None
    assert known.high - known.low == pytest.approx(0.0, abs=1e-9)
    assert two.high == math.inf


def test_without_a_baseline_the_needed_accept_length_is_a_prior_and_no_verdict() -> None:
    found = assess(windows(8, 100.0, 2.0), 8, None, EAGLE3, {})
    assert found.baseline_step is not None
    assert (found.baseline_step.known, found.baseline_step.error) == ("prior", PRIOR_ERROR)
    assert found.needed == pytest.approx(prior_needed(3, 8))
    assert found.needed_bounds is not None
    assert found.needed_bounds.low == pytest.approx(
        found.needed * (1 - math.hypot(0.35, 1.96 * math.sqrt(2) * 0.03)), rel=1e-3
    )
    assert "is a prior, since no baseline was measured" in str(found)
    unknown_depth = assess(windows(8, 100.0, 2.0), 8, None, Speculation("ngram", None), {})
    assert (unknown_depth.needed, unknown_depth.pays) == (None, Pays.UNKNOWN)
    assert unknown_depth.step_s == pytest.approx(8 * 2.0 / 100.0)


@pytest.mark.parametrize(
    ("depth", "running", "low", "high"), [(2, 2, 1.3, 1.7), (3, 1, 1.4, 1.65), (3, 8, 1.6, 2.1), (3, 32, 2.0, 2.5), (3, 64, 2.0, 2.6)]
)  # fmt: skip
def test_the_prior_lies_among_the_published_rows_of_dense_models(
    depth: int, running: float, low: float, high: float
) -> None:
    assert low <= prior_needed(depth, running) <= high


def test_what_is_found_is_said_in_a_sentence_an_engineer_agrees_with() -> None:
    found = assess(windows(8, 300.0, 1.65), 8, None, EAGLE3, {8.0: 8 / 400}, Doubt(0.05, 0.03))
    assert str(found) == (
        "accept length 1.65 (1.65 to 1.65) measured, 2.20 (2.02 to 2.38) needed, 4.00 the best possible: below break-even, "
        "0.75 (0.69 to 0.81) of the rate of a plain server that runs as many requests"
    )
    assert str(SpeculationAtLevel()) == "no accept length was reported"


def test_of_a_drafter_whose_depth_is_not_fixed_no_best_is_said() -> None:
    found = assess(windows(8, 300.0, 1.65), 8, None, Speculation("ngram", None), {8.0: 8 / 400}, Doubt(0.05, 0.03))
    assert str(found).startswith(
        "accept length 1.65 (1.65 to 1.65) measured, 2.20 (2.02 to 2.38) needed: below break-even"
    )
    unknown = assess(windows(8, 300.0, 1.65), 8, None, Speculation("ngram", None), {})
    assert str(unknown) == "accept length 1.65 (1.65 to 1.65) measured; what is needed is not known"


@pytest.mark.parametrize("missing", ["needed", "needed_bounds", "speedup"])
def test_a_comparison_that_lacks_a_part_is_not_said(missing: str) -> None:
    whole = {"needed": 2.0, "needed_bounds": between(1.9, 2.1), "speedup": between(0.9, 1.1)}
    found = SpeculationAtLevel(accept_len=between(1.9, 2.1), ceiling=4.0, **{**whole, missing: None})  # type: ignore[arg-type]
    assert str(found) == (
        "accept length 2.00 (1.90 to 2.10) measured, 4.00 the best possible; what is needed is not known"
    )


def test_the_ceiling_is_the_depth_and_the_bonus_token() -> None:
    assert Speculation("x", 3).ceiling == 4.0
    assert Speculation("x", None).ceiling is None


# --- the plain step at what really runs


def test_a_measured_point_is_used_as_it_is_and_says_so() -> None:
    assert baseline_step({1.0: 0.01, 48.0: 0.03}, 47.0) == StepTime(0.03, "measured")
    assert baseline_step({1.0: 0.01, 105.0: 0.03}, 100.0) == StepTime(0.03, "measured"), "within a twentieth"
    for points, running in (({1.0: 0.01, 105.5: 0.03}, 100.0), ({1.08: 0.01, 8.0: 0.03}, 1.0)):
        beyond = baseline_step(points, running)
        assert beyond is not None
        assert beyond.known != "measured"
    assert baseline_step({}, 8) is None


def test_between_levels_the_step_time_is_linear_and_the_entry_can_name_them() -> None:
    assert baseline_step({1.0: 0.010, 11.0: 0.020, 100.0: 0.5}, 6.0) == StepTime(
        pytest.approx(0.015), "interpolated", (1.0, 11.0), pytest.approx(0.10)
    )  # type: ignore[arg-type]


def test_beyond_the_levels_it_is_extended_and_called_so() -> None:
    beyond = baseline_step({1.0: 0.010, 11.0: 0.020}, 21.0)
    assert beyond == StepTime(pytest.approx(0.030), "extrapolated", (1.0, 11.0), 0.30)  # type: ignore[arg-type]
    assert baseline_step({8.0: 0.02}, 64.0) == StepTime(0.02, "extrapolated", (8.0, 8.0), 0.30)
    falling = baseline_step({1.0: 0.020, 11.0: 0.010}, 21.0)
    assert falling == StepTime(0.010, "extrapolated", (1.0, 11.0), 0.30), "a larger batch is never faster a step"
    below = baseline_step({10.0: 0.01, 20.0: 0.5}, 1.0)
    assert below == StepTime(0.005, "extrapolated", (10.0, 20.0), 0.30), "never absurdly short"


@pytest.mark.parametrize("again", [0.0100, 0.0120, 0.0121])
def test_two_levels_at_one_cap_are_one_point_of_the_line(again: float) -> None:
    """Steps of 16 and of 16.02 requests differ by noise; a line through them would give a step of seconds at 128."""
    found = baseline_step({1.0: 0.008, 16.0: 0.0120, 16.02: again}, 128.0)
    assert found is not None
    assert found.between == (1.0, 16.02)
    assert 0.02 < found.seconds < 0.06


@given(
    st.dictionaries(st.integers(1, 300).map(float), st.floats(0.001, 1.0), min_size=1, max_size=6), st.floats(1, 400)
)
def test_a_step_time_is_positive_and_within_its_neighbours(points: dict[float, float], running: float) -> None:
    step = baseline_step(points, running)
    assert step is not None
    assert step.seconds > 0
    if step.known == "interpolated":
        assert step.between is not None
        low, high = sorted((points[step.between[0]], points[step.between[1]]))
        assert low * 0.999 <= step.seconds <= high * 1.001
    if step.known == "extrapolated" and running > max(points):
        assert step.seconds >= points[max(points)] * 0.999, "a larger batch is never faster a step"


# --- which windows count


def test_a_window_counts_only_in_steady_state() -> None:
    good = (window(), window(), window())
    dropped = (window(prefill=True), window(after_idle=True), window(running=7.1))
    assert steady_windows((*dropped, *good), 8, None) == good


def test_nine_tenths_of_what_can_run_are_enough_and_at_small_levels_half_a_request_may_be_missed() -> None:
    for concurrency, enough, few in ((10, 9.0, 8.99), (2, 1.5, 1.49), (1, 0.5, 0.49)):
        counts, does_not = window(running=enough), window(running=few)
        assert steady_windows((counts, does_not), concurrency, None) == (counts,), concurrency


def test_with_hardly_a_window_without_a_prefill_those_with_one_count_too() -> None:
    busy = (window(prefill=True), window(), window(prefill=True), window())
    assert steady_windows((*busy, window(after_idle=True)), 8, None) == busy
    assert steady_windows((window(),), 8, None) == (window(),)


def test_what_can_run_is_the_cap_where_there_is_one() -> None:
    at_cap = window(running=48.0)
    assert steady_windows((at_cap,), 128, 48) == (at_cap,)
    assert steady_windows((at_cap,), 128, None) == ()
    assert steady_windows((window(running=43.0),), 128, 48) == ()


def test_a_cap_that_was_not_printed_is_seen_in_the_queue() -> None:
    running = (window(running=48.0, queued=80.0), window(running=30.0, queued=80.0), window(running=47.0, queued=81.0))
    assert steady_windows(running, 128, None) == (running[0], running[2])
    one_waits = (window(running=48.0, queued=0.5), window(running=47.0, queued=None))
    assert steady_windows(one_waits, 128, None) == one_waits


def test_where_the_number_running_is_not_told_nothing_contradicts_a_window() -> None:
    unknown = window(running=None)
    assert steady_windows((unknown,), 128, None) == (unknown,)


def test_capped_means_fewer_run_and_some_wait() -> None:
    def capped(running: float, queued: float) -> bool:
        return assess(windows(running, 100.0, 2.0, queued=queued), 128, 48, EAGLE3, {}).capped

    assert capped(48, 80)
    assert not capped(48, 0), "a load that is not there is no cap"
    assert not capped(128, 3)
    assert capped(48, 1), "one that waits is enough"
    assert not capped(48, 0.9)
    assert not assess(windows(9.0, 100.0, 2.0, queued=1.0), 10, None, EAGLE3, {}).capped, "nine of ten run: no cap"
    assert assess(windows(8.9, 100.0, 2.0, queued=1.0), 10, None, EAGLE3, {}).capped


def test_windows_of_known_length_are_weighted_by_it() -> None:
    both = (window(running=8.0, gen_tok_s=100.0, seconds=3.0), window(running=4.0, gen_tok_s=20.0, seconds=1.0))
    assert decode_rate(both) == (pytest.approx(7.0), pytest.approx(80.0))


def test_a_server_slower_than_a_token_a_second_has_a_rate_too() -> None:
    assert decode_rate((window(gen_tok_s=0.4),)) == (8.0, 0.4)


def test_one_log_line_that_spans_a_stall_does_not_count_more_than_the_others() -> None:
    lines = (window(gen_tok_s=100.0), window(gen_tok_s=102.0), window(gen_tok_s=1.0))
    assert decode_rate(lines) == (8.0, 100.0)


@pytest.mark.parametrize("lines", [(), (window(running=None),), (window(gen_tok_s=None),), (window(gen_tok_s=0.0),)])
def test_a_rate_that_is_not_stated_is_not_made_up(lines: tuple[Window, ...]) -> None:
    assert decode_rate(lines) is None


def test_counted_steps_give_the_exact_accept_length() -> None:
    """One window of 10 steps and one of 90: their plain mean would be 2.5."""
    two = (window(accept_len=3.0, drafts=10, accepted=20), window(accept_len=2.0, drafts=90, accepted=90))
    found, drafts = accept_length(two)
    assert found is not None
    assert found.mean == pytest.approx(1 + 110 / 100)
    assert drafts == 100


def test_steps_of_which_nothing_was_kept_count_and_those_of_which_it_is_not_known_do_not() -> None:
    rejected = (window(accept_len=1.0, drafts=100, accepted=0), window(accept_len=2.0, drafts=100, accepted=100))
    assert accept_length(rejected)[0] == Interval(1.5, 1.0, math.inf)
    unknown = (*rejected, window(accept_len=3.0, drafts=50, accepted=None), window(accept_len=3.0, accepted=9))
    found, drafts = accept_length(unknown)
    assert found is not None
    assert (found.mean, drafts) == (1.5, 250)


def test_where_neither_steps_nor_requests_are_told_a_line_stands_for_the_steps_of_one_request() -> None:
    assert accept_length((window(accept_len=2.0, running=None),) * 3)[1] == 3 * 40


def test_printed_accept_lengths_are_averaged_with_an_interval_and_their_steps_estimated() -> None:
    lines = tuple(window(accept_len=al, running=2.0) for al in (1.9, 2.0, 2.1, 2.1, 1.9, 2.0))
    found, drafts = accept_length(lines)
    assert found is not None
    assert found.mean == pytest.approx(2.0)
    assert (found.low, found.high) == (pytest.approx(2.0 - 0.230, abs=0.001), pytest.approx(2.0 + 0.230, abs=0.001))
    assert drafts == 6 * 40 * 2


def test_an_accept_length_is_never_said_to_be_above_what_its_depth_allows() -> None:
    found, _ = accept_length((window(accept_len=2.0), window(accept_len=3.0)), ceiling=4.0)
    assert found == Interval(2.5, 1.0, 4.0), "two windows bound nothing but what must be"


def test_an_accept_length_is_never_said_to_be_below_one() -> None:
    found, _ = accept_length((window(accept_len=1.0), window(accept_len=1.6)))
    assert found is not None
    assert found.low == 1.0
    assert accept_length((window(accept_len=None),)) == (None, 0)


def test_what_the_evidence_rests_on_is_told_with_it() -> None:
    """At the cap, of which no queue tells: running, windows and steps are in the finding, whether it can be compared or not."""
    spread = tuple(w for al in (1.2, 2.0, 3.4, 2.0) for w in windows(CAP, 849.0, al, 1, drafts=50))
    for base in (BASE_STEPS, {}):
        found = assess(spread, 128, CAP, Speculation("ngram", None), base, SURE)
        assert (found.running, found.windows, found.drafts) == (CAP, 4, 200)
    assert assess(windows(CAP, 849.0, 2.0), 128, None, EAGLE3, BASE_STEPS).windows == 0, "without a cap, none is steady"


def test_the_bounds_of_an_accept_length_know_the_depth_and_the_error_that_was_allowed() -> None:
    lens = (1.9, 3.5, 2.0, 3.9, 3.7, 1.8)
    seen = tuple(w for al in lens for w in windows(8, 400.0, al, 1))
    bounds = {}
    for alpha in (0.05, 0.2):
        for depth in (None, 3):
            found = assess(seen, 8, None, Speculation("x", depth), {8.0: 0.02}, Doubt(alpha, 0.0)).accept_len
            assert found is not None
            bounds[alpha, depth] = found
    assert bounds[0.2, None].high < bounds[0.05, None].high
    assert bounds[0.05, None].high > 4.0
    assert bounds[0.05, 3].high == 4.0


@pytest.mark.parametrize("alone", [{"gen_tok_s": None}, {"accept_len": None}])
def test_accept_length_or_rate_alone_is_no_comparison_but_is_told(alone: dict[str, Any]) -> None:
    found = assess((window(drafts=30, **alone),) * 5, 8, None, EAGLE3, BASE_STEPS)
    assert (found.needed, found.speedup, found.step_s, found.pays) == (None, None, None, Pays.UNKNOWN)
    assert (found.accept_len is None) is ("accept_len" in alone)
    assert (found.drafts, found.windows, found.ceiling) == (150, 5, 4.0)


def test_without_telemetry_nothing_is_claimed() -> None:
    nothing = assess((), 8, None, EAGLE3, BASE_STEPS)
    assert (nothing.accept_len, nothing.running, nothing.windows, nothing.pays) == (None, None, 0, Pays.UNKNOWN)
    assert nothing.ceiling == 4.0
