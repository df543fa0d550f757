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
    Pays,
    SpeculationAtLevel,
    StepTime,
    accept_length,
    assess,
    baseline_step,
    decode_rate,
    loss_shares,
    needed_accept_len,
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

with (Path(__file__).parent / "data" / "speculation-numbers.csv").open() as file:
    PUBLISHED = list(csv.DictReader(file))


def window(**more: Any) -> Window:
    return Window(**{"source": "log", "running": 8.0, "queued": 0.0, "gen_tok_s": 100.0, "accept_len": 2.0, **more})


# --- the campaign this program was made for


def test_at_one_stream_the_ready_made_drafter_needed_an_accept_length_of_1_67_and_had_1_65() -> None:
    found = assess(windows(1, MEASURED[1], 1.65), 1, CAP, EAGLE3, BASE_STEPS)
    assert found.needed == pytest.approx(1.67, abs=0.005)
    assert found.baseline_step == StepTime(1 / 63.6, "measured")
    assert found.pays is Pays.NO
    assert not found.capped


def test_the_plain_step_at_the_cap_is_interpolated_to_29_9_ms() -> None:
    step = baseline_step(BASE_STEPS, CAP)
    assert step is not None
    assert 1000 * step.seconds == pytest.approx(29.9, abs=0.05)
    assert (step.known, step.between) == ("interpolated", (1.0, 128.0))


def test_about_half_of_the_loss_at_128_was_the_cap_of_48_running_requests() -> None:
    found = assess(windows(CAP, MEASURED[128], 1.65, queued=16.0), 128, CAP, EAGLE3, BASE_STEPS)
    assert found.running == CAP
    assert found.capped
    assert found.baseline_step is not None
    shares = loss_shares(BASE[128], MEASURED[128], CAP, found.baseline_step.seconds)
    assert shares.total_tok_s == pytest.approx(1521)
    assert shares.plain_at_cap_tok_s == pytest.approx(1600, abs=10)
    assert shares.cap_tok_s / shares.total_tok_s == pytest.approx(0.5, abs=0.02)
    assert shares.cap_tok_s + shares.speculation_tok_s == pytest.approx(shares.total_tok_s)


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
    found = assess(windows(concurrency, rate, 1.65), concurrency, None, EAGLE3, base)
    assert found.needed is not None
    assert low <= found.needed <= high
    assert found.pays is (Pays.HOPELESS if concurrency == 128 else Pays.NO)


def test_at_128_no_drafter_of_three_steps_could_win_on_that_machine() -> None:
    """Break-even was above the ceiling of 4, which even an accept length of 3.99 does not change."""
    base = {128.0: TPOT_BASE[128] / 1000}
    step_s = TPOT_UNCAPPED[128] / 1000 * 1.65
    found = assess(windows(128, 128 * 3.99 / step_s, 3.99), 128, None, EAGLE3, base)
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
    found = assess(windows(running, spec, accept_len), round(running), None, Speculation("x", depth), steps)
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


INTERVAL = Interval(2.0, 1.9, 2.1)


@pytest.mark.parametrize(
    ("accept_len", "needed", "ceiling", "pays"),
    [
        (None, 2.0, 4.0, Pays.UNKNOWN),
        (Interval(1.0, 1.0, 1.0), 2.0, 4.0, Pays.BROKEN),
        (Interval(1.01, 1.0, 1.019), None, None, Pays.BROKEN),
        (Interval(1.01, 1.0, 1.021), 2.0, 4.0, Pays.NO),
        (INTERVAL, None, 4.0, Pays.UNKNOWN),
        (INTERVAL, 1.89, 4.0, Pays.YES),
        (INTERVAL, 1.9, 4.0, Pays.UNKNOWN),
        (INTERVAL, 2.1, 4.0, Pays.UNKNOWN),
        (INTERVAL, 2.11, 4.0, Pays.NO),
        (INTERVAL, 4.01, 4.0, Pays.HOPELESS),
        (INTERVAL, 4.01, None, Pays.NO),
    ],
)
def test_the_reading_of_a_level_needs_the_whole_interval_on_one_side(
    accept_len: Interval | None, needed: float | None, ceiling: float | None, pays: Pays
) -> None:
    assert SpeculationAtLevel(accept_len=accept_len, needed=needed, ceiling=ceiling).pays is pays


def test_the_ceiling_is_the_depth_and_the_bonus_token() -> None:
    assert Speculation("x", 3).ceiling == 4.0
    assert Speculation("x", None).ceiling is None


# --- the plain step at what really runs


def test_a_measured_point_is_used_as_it_is_and_says_so() -> None:
    assert baseline_step({1.0: 0.01, 48.0: 0.03}, 47.0) == StepTime(0.03, "measured")
    assert baseline_step({}, 8) is None


def test_between_levels_the_step_time_is_linear_and_the_entry_can_name_them() -> None:
    assert baseline_step({1.0: 0.010, 11.0: 0.020, 100.0: 0.5}, 6.0) == StepTime(
        pytest.approx(0.015), "interpolated", (1.0, 11.0)
    )  # type: ignore[arg-type]


def test_beyond_the_levels_it_is_extended_and_called_so() -> None:
    beyond = baseline_step({1.0: 0.010, 11.0: 0.020}, 21.0)
    assert beyond == StepTime(pytest.approx(0.030), "extrapolated", (1.0, 11.0))  # type: ignore[arg-type]
    assert baseline_step({8.0: 0.02}, 64.0) == StepTime(0.02, "extrapolated", (8.0, 8.0))
    below = baseline_step({10.0: 0.01, 20.0: 0.5}, 1.0)
    assert below == StepTime(0.005, "extrapolated", (10.0, 20.0)), "never absurdly short"


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


def test_where_the_number_running_is_not_told_nothing_contradicts_a_window() -> None:
    unknown = window(running=None)
    assert steady_windows((unknown,), 128, None) == (unknown,)


def test_capped_means_fewer_run_and_some_wait() -> None:
    def capped(running: float, queued: float) -> bool:
        return assess(windows(running, 100.0, 2.0, queued=queued), 128, 48, EAGLE3, {}).capped

    assert capped(48, 80)
    assert not capped(48, 0), "a load that is not there is no cap"
    assert not capped(128, 3)


def test_windows_of_known_length_are_weighted_by_it() -> None:
    both = (window(running=8.0, gen_tok_s=100.0, seconds=3.0), window(running=4.0, gen_tok_s=20.0, seconds=1.0))
    assert decode_rate(both) == (pytest.approx(7.0), pytest.approx(80.0))


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


def test_printed_accept_lengths_are_averaged_with_an_interval_and_their_steps_estimated() -> None:
    lines = tuple(window(accept_len=al, running=2.0) for al in (1.9, 2.0, 2.1))
    found, drafts = accept_length(lines)
    assert found is not None
    assert found.mean == pytest.approx(2.0)
    assert found.high - found.mean == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)
    assert drafts == 3 * 40 * 2


def test_an_accept_length_is_never_said_to_be_below_one() -> None:
    found, _ = accept_length((window(accept_len=1.0), window(accept_len=1.6)))
    assert found is not None
    assert found.low == 1.0
    assert accept_length((window(accept_len=None),)) == (None, 0)


def test_without_a_baseline_or_telemetry_nothing_is_claimed() -> None:
    no_base = assess(windows(8, 100.0, 2.0), 8, None, EAGLE3, {})
    assert (no_base.needed, no_base.pays) == (None, Pays.UNKNOWN)
    assert no_base.step_s == pytest.approx(8 * 2.0 / 100.0)
    nothing = assess((), 8, None, EAGLE3, BASE_STEPS)
    assert (nothing.accept_len, nothing.running, nothing.windows, nothing.pays) == (None, None, 0, Pays.UNKNOWN)
    assert nothing.ceiling == 4.0


# --- whose loss


@given(st.floats(10, 5000), st.floats(1, 5000), st.floats(1, 256), st.floats(0.001, 0.2))
def test_the_shares_of_a_loss_add_up_and_the_cap_never_gains(
    base: float, measured: float, running: float, step: float
) -> None:
    shares = loss_shares(base, measured, running, step)
    assert shares.cap_tok_s + shares.speculation_tok_s == pytest.approx(shares.total_tok_s, abs=1e-6)
    assert shares.cap_tok_s >= 0
    assert shares.plain_at_cap_tok_s <= base


def test_a_server_faster_than_the_baseline_has_negative_shares_which_say_what_was_gained() -> None:
    shares = loss_shares(1000.0, 1500.0, 100, 0.1)
    assert (shares.total_tok_s, shares.cap_tok_s, shares.speculation_tok_s) == (-500.0, 0.0, -500.0)
