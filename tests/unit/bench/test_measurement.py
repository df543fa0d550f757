"""The figures' promises: tokens from usage, failures apart, the steady part alone, and a void level says why."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.bench.goodput import figures_under
from autotuner.bench.measurement import (
    BIN_S,
    TOO_FEW,
    TOO_MANY,
    USAGE_MISSING,
    Figures,
    LevelSamples,
    Progress,
    RequestSample,
    drift,
    figures,
    interim_figures,
    tokens_per_event,
)
from autotuner.bench.samples import METHOD, pack_gaps
from autotuner.core.replay import _figures as replay_figures
from autotuner.core.verdict import LevelResult


def request(sent: float, events: int = 10, tokens: int | None = 10, **more: object) -> RequestSample:
    fields = {"sent_s": sent, "first_s": sent + 0.1, "end_s": sent + 1.0, "events": events, "output_tokens": tokens}
    return RequestSample.model_validate(fields | more)


def steady(*requests: RequestSample, bins: tuple[int, ...] = (10,) * 20, **more: object) -> LevelSamples:
    fields = {"concurrency": 1, "steady_from_s": 5.0, "steady_to_s": 5.0 + BIN_S * len(bins)}
    return LevelSamples.model_validate(fields | {"requests": requests, "bins": bins} | more)


def test_a_constant_stream_has_its_rate_and_no_width() -> None:
    found = figures(steady(request(5.0)))
    assert found.output_tok_s == pytest.approx(100.0)
    assert found.output_tok_s_high - found.output_tok_s_low == pytest.approx(0.0, abs=1e-9)


def test_events_that_carry_several_tokens_are_counted_by_usage() -> None:
    found = figures(steady(request(5.0, events=10, tokens=25)))
    assert (found.tokens_per_event, found.tokens_counted) == (2.5, True)
    assert found.output_tok_s == pytest.approx(250.0)


def test_without_usage_a_token_is_an_event_and_the_figures_say_so() -> None:
    found = figures(steady(request(5.0, tokens=None)))
    assert (found.tokens_per_event, found.tokens_counted) == (1.0, False)


def test_failures_are_named_and_counted_and_change_no_average() -> None:
    good = request(5.0)
    bad = [request(5.0, tokens=1, end_s=99.0, error="HTTP 503") for _ in range(3)]
    bad.append(request(5.0, events=0, first_s=None, error="timeout"))
    found = figures(steady(good, *bad))
    alone = figures(steady(good))
    assert (found.requests_ok, found.requests_failed) == (1, 4)
    assert found.errors == {"HTTP 503": 3, "timeout": 1}
    assert (found.ttft_ms, found.e2e_ms, found.output_tok_s) == (alone.ttft_ms, alone.e2e_ms, alone.output_tok_s)


def test_latencies_are_those_of_requests_sent_in_the_steady_part() -> None:
    found = figures(steady(request(0.0, first_s=3.0), request(6.0)))
    assert found.ttft_ms["mean"] == pytest.approx(100.0)
    assert found.tpot_ms["p50"] == pytest.approx(100.0)


def test_a_request_cut_by_the_end_is_neither_good_nor_failed() -> None:
    found = figures(steady(request(5.0), request(6.0, cut=True, end_s=None, output_tokens=None)))
    assert (found.requests_ok, found.requests_failed) == (1, 0)


def test_the_cache_hit_ratio_is_that_of_prompt_tokens() -> None:
    found = figures(steady(request(5.0, prompt_tokens=100, cached_tokens=25)))
    assert (found.prompt_tokens_mean, found.cache_hit_ratio) == (100.0, 0.25)
    assert figures(steady(request(5.0))).cache_hit_ratio is None


def test_a_level_without_a_steady_part_is_void_and_says_why() -> None:
    found = figures(LevelSamples(concurrency=1, requests=(request(0.0),)))
    assert "before its steady part" in found.void
    assert found.output_tok_s == 0.0


def test_a_level_where_the_client_was_the_limit_is_void_and_says_why() -> None:
    assert "client was the limit" in figures(steady(request(5.0), lag_p99_ms=80.0, cpu_ratio=0.99)).void
    assert figures(steady(request(5.0), lag_p99_ms=2.0, cpu_ratio=0.5)).void == ""


@given(st.lists(st.integers(0, 50), min_size=10, max_size=400))
def test_the_interval_always_holds_the_rate_and_the_rate_is_all_tokens_over_all_time(counts: list[int]) -> None:
    found = figures(steady(request(5.0), bins=tuple(counts)))
    assert found.output_tok_s == pytest.approx(sum(counts) / (BIN_S * len(counts)))
    assert 0 <= found.output_tok_s_low <= found.output_tok_s <= found.output_tok_s_high


def test_a_request_with_an_error_teaches_nothing_about_tokens_per_event() -> None:
    assert tokens_per_event((request(0.0, tokens=99, error="truncated stream"),)) == (1.0, False)


def test_what_is_reported_reads_back_as_it_was() -> None:
    samples = steady(request(5.0), itl_ms={"p50": 1.5}, merged_ratio=0.01)
    assert LevelSamples.model_validate_json(samples.model_dump_json()) == samples
    assert LevelSamples.model_validate_json(samples.model_dump_json(exclude_defaults=True)) == samples


def test_interim_figures_are_those_of_the_steady_part_so_far() -> None:
    def told(at_s: float, phase: str, events: int) -> Progress:
        more = {"in_flight": 1, "done": 3, "failed": 1, "tokens_per_event": 2.0}
        return Progress.model_validate({"at_s": at_s, "phase": phase, "events": events} | more)

    warm = [told(0.5, "warm-up", 900), told(1.0, "warm-up", 900)]
    found = interim_figures(8, warm + [told(1.0 + 0.5 * i, "steady", 50) for i in range(1, 7)])
    assert found.output_tok_s == pytest.approx(200.0)
    assert (found.requests_ok, found.requests_failed, found.concurrency) == (3, 1, 8)
    assert interim_figures(8, warm).output_tok_s == 0.0
    assert interim_figures(8, []).output_tok_s == 0.0


def level_of(*rates: int) -> LevelSamples:
    """A level with a stretch of a second at each of these events a bin."""
    return steady(request(5.0), bins=tuple(rate for rate in rates for _ in range(10)))


def test_a_rate_that_falls_within_a_level_is_told_with_its_size() -> None:
    found = figures(level_of(100, 101, 99, 100, 96, 95, 90, 88, 90, 89, 91, 90))
    assert found.drift_ratio == pytest.approx(-0.1)
    assert figures(level_of(90, 88, 90, 89, 96, 95, 100, 101, 99, 100, 99, 100)).drift_ratio == pytest.approx(
        0.116, abs=0.01
    )


def test_a_rate_that_keeps_changes_little_or_scatters_is_no_drift() -> None:
    assert figures(level_of(*[100] * 12)).drift_ratio is None
    assert figures(level_of(*[100] * 6, *[96] * 6)).drift_ratio is None, "4 % is not worth another launch"
    assert figures(level_of(100, 60, 140, 100, 100, 100, 100, 100, 80, 120, 60, 90)).drift_ratio is None
    assert figures(level_of(100, 100, 50, 50)).drift_ratio is None, "too few stretches to tell"
    assert figures(level_of(*[0] * 12)).drift_ratio is None


def test_a_rate_that_rises_through_a_short_level_is_told_by_the_order_of_its_stretches() -> None:
    """Seven stretches of a real server at 128 in flight that was still rising when its level ended, and orders as good as it."""
    assert drift([17471, 19042, 21835, 23034, 26014, 27958, 31315]) == pytest.approx(0.62, abs=0.01)
    assert drift([100, 90, 80, 70, 60]) == pytest.approx(-0.4)
    assert drift([15465, 18473, 23366, 25473, 25590, 12971, 35597]) is None, "one stretch out of order"
    assert drift([100, 110, 120, 130]) is None, "four in order are one chance in twelve, both ways"
    assert drift([100, 100.5, 101, 101.5, 102]) is None, "too little"


def test_a_level_recorded_before_five_stretches_could_tell_a_drift_has_none_still() -> None:
    now = level_of(100, 110, 120, 130, 140).model_copy(update={"method": METHOD})
    assert figures(now).drift_ratio == pytest.approx(0.4)
    assert figures(now.model_copy(update={"method": 0})).drift_ratio is None


def test_a_level_that_only_scatters_is_seldom_said_to_drift() -> None:
    """5 % scatter between stretches: Student's band is crossed by 1 level in 20, whatever the number of stretches."""
    source = random.Random(11)
    told = [
        drift([source.gauss(100, 5) for _ in range(count)]) for count in (5, 6, 7, 8, 9, 15, 30) for _ in range(700)
    ]
    assert sum(found is not None for found in told) / len(told) < 0.06


def test_what_was_recorded_before_has_the_figures_of_then() -> None:
    """Samples and figures as the program of schema 5 wrote them: every figure that it had comes out again."""
    then = json.loads((Path(__file__).parent / "recordings" / "level-schema-5.json").read_text())
    kept = Figures.model_validate(then["figures"])
    samples = LevelSamples.model_validate(then["samples"])
    now = figures_under(samples, kept.goodput_limits).model_dump(mode="json")
    for name, value in then["figures"].items():
        if isinstance(value, dict):
            assert value.items() <= now[name].items(), name
        else:
            assert now[name] == value, name
    assert replay_figures(then["samples"], LevelResult(concurrency=4, figures=kept)) == []


def test_requests_that_began_after_the_steady_part_are_in_no_latency() -> None:
    """Of those only the short ones have ended when the tail is over: the mean would be theirs."""
    samples = steady(request(6.0), request(7.5))
    assert figures(samples) == figures(steady(request(6.0))).model_copy(
        update={name: getattr(figures(samples), name) for name in ("requests_ok", "usage_problems", "total_tok_s")}
    )


def test_an_open_loop_counts_from_the_intended_time_and_says_how_late_it_sent() -> None:
    found = figures(steady(request(6.5, due_s=6.0), request(6.9, due_s=6.9)))
    assert found.ttft_ms["mean"] == pytest.approx(350.0)  # 600 and 100
    assert found.e2e_ms["mean"] == pytest.approx(1250.0)
    assert found.send_late_ms["mean"] == pytest.approx(250.0)
    assert figures(steady(request(6.0))).send_late_ms == {}


def test_requests_answered_and_total_tokens_are_counted_where_requests_ended() -> None:
    samples = steady(
        request(4.5, prompt_tokens=100),  # ends at 5.5, inside
        request(5.0, prompt_tokens=300, cached_tokens=300),  # cached prompts are prompts
        request(6.5, prompt_tokens=999),  # ends at 7.5, after the end
        request(5.0, error="HTTP 503"),
        request(6.0, cut=True, end_s=None, output_tokens=None),
    )
    found = figures(samples)
    assert found.answered_req_s == pytest.approx(1.0)  # two in two seconds
    assert found.answered_req_s_low is not None
    assert found.answered_req_s_high is not None
    assert found.answered_req_s_low < 1.0 < found.answered_req_s_high
    assert found.total_tok_s == pytest.approx(found.output_tok_s + 200.0)
    assert (found.prompt_tokens_min, found.prompt_tokens_max) == (100, 999)


def test_the_total_is_unknown_where_a_prompt_was_not_counted() -> None:
    assert figures(steady(request(5.0, prompt_tokens=100), request(5.5))).total_tok_s is None
    assert figures(steady()).total_tok_s is None
    assert figures(steady()).answered_req_s is None


def test_usage_that_is_missing_or_not_what_was_asked_is_counted_by_name_and_averaged_into_nothing() -> None:
    good = request(5.0, asked_tokens=10)
    odd = [
        request(5.1, asked_tokens=10, tokens=None),
        request(5.2, asked_tokens=10, tokens=30, end_s=60.0),
        request(5.3, asked_tokens=10, tokens=4, end_s=5.5),
    ]
    found = figures(steady(good, *odd), ignore_eos=True)
    assert found.usage_problems == {USAGE_MISSING: 1, TOO_MANY: 1, TOO_FEW: 1}
    assert found.e2e_ms["mean"] == pytest.approx(1000.0)
    assert found.requests_ok == 4
    relaxed = figures(steady(good, *odd))
    assert TOO_FEW not in relaxed.usage_problems, "without ignore_eos an answer may be short"
    assert figures(steady(request(5.0, tokens=4)), ignore_eos=True).usage_problems == {}, "nobody knows what was asked"


def test_requests_that_went_out_twice_are_counted() -> None:
    assert figures(steady(request(5.0, retried=True), request(5.5))).requests_retried == 1


def test_itl_comes_from_the_gaps_where_they_were_kept() -> None:
    requests = [request(5.0 + 0.1 * i, events=5) for i in range(4)]
    kept = pack_gaps([[20_000, 20_000, 30_000, 20_000]] * 4)
    found = figures(steady(*requests, gaps=kept))
    assert (found.itl_ms["p50"], found.itl_ms["mean"]) == (pytest.approx(20.0), pytest.approx(22.5))
    assert found.itl_ms["p50_low"] <= 20.0 <= found.itl_ms["p50_high"]
    assert figures(steady(*requests, itl_ms={"p50": 99.0})).itl_ms == {"p50": 99.0}
    assert figures(steady(*requests, gaps=kept, merged_ratio=0.2, lag_p99_ms=30.0)).itl_ms == {}
    sent_at_once = figures(steady(*requests, gaps=kept, merged_ratio=0.2, lag_p99_ms=0.5))
    assert sent_at_once.itl_ms["p50"] == pytest.approx(20.0)
