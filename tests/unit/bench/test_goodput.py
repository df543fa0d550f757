"""Goodput counts the requests that a user would call good, where they ended, and says how sure the rate is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.bench.goodput import figures_under, goodput, meets, with_goodput
from autotuner.bench.measurement import Figures, GoodputLimits, LevelSamples, RequestSample, figures

BOTH = GoodputLimits(ttft_ms_max=500.0, tpot_ms_max=50.0)


def request(
    sent_s: float, ttft_ms: float = 100.0, tpot_ms: float = 10.0, tokens: int = 11, **more: object
) -> RequestSample:
    first_s = sent_s + ttft_ms / 1000
    end_s = first_s + tpot_ms * (tokens - 1) / 1000
    table = {"sent_s": sent_s, "first_s": first_s, "end_s": end_s, "events": tokens, "output_tokens": tokens, **more}
    return RequestSample.model_validate(table)


def level(*requests: RequestSample, start: float | None = 10.0, end: float = 20.0) -> LevelSamples:
    bins = (20,) * round((end - (start or 0.0)) * 10)
    return LevelSamples(concurrency=8, steady_from_s=start, steady_to_s=end, requests=requests, bins=bins)


def rate(samples: LevelSamples, limits: GoodputLimits = BOTH) -> float:
    found = goodput(samples, limits)
    assert found is not None
    return found.mean


@pytest.mark.parametrize(
    ("sample", "is_good"),
    [
        (request(0.0, ttft_ms=500.0, tpot_ms=50.0), True),
        (request(0.0, ttft_ms=501.0), False),
        (request(0.0, tpot_ms=51.0), False),
        (request(0.0, error="reset"), False),
        (request(0.0, cut=True), False),
        (request(0.0, first_s=None), False),
        (request(0.0, tokens=1), True),
    ],
)
def test_a_request_is_good_if_both_its_own_latencies_are_within_the_limits(
    sample: RequestSample, is_good: bool
) -> None:
    assert meets(sample, BOTH) is is_good


def test_a_limit_that_is_not_named_does_not_matter() -> None:
    assert meets(request(0.0, ttft_ms=9000.0), GoodputLimits(tpot_ms_max=50.0))
    assert meets(request(0.0, tpot_ms=9000.0), GoodputLimits(ttft_ms_max=500.0))


def test_good_requests_are_counted_over_the_steady_part_where_they_ended() -> None:
    """Of ten in ten seconds one is too late and one failed; one ended before, one after, and one was cut off."""
    inside = [request(10.0 + i) for i in range(8)]
    samples = level(
        *inside,
        request(12.0, ttft_ms=900.0),
        request(13.0, error="reset"),
        request(9.0),
        request(19.9),
        request(19.0, cut=True),
        request(9.9),  # sent in the warm-up, ended in the steady part
    )
    assert rate(samples) == pytest.approx(0.9)


def test_a_level_in_which_no_request_ended_has_no_goodput() -> None:
    assert goodput(level(), BOTH) is None
    assert goodput(level(request(1.0), start=None), BOTH) is None
    assert goodput(level(request(19.9)), BOTH) is None


def test_none_good_of_those_that_ended_is_a_goodput_of_zero() -> None:
    found = goodput(level(*(request(10.0 + i, ttft_ms=900.0) for i in range(5))), BOTH)
    assert found is not None
    assert (found.mean, found.low) == (0.0, 0.0)
    assert found.high > 0, "a count of none is not known to be none for ever"


def test_a_count_is_never_called_surer_than_one_request_more_or_less() -> None:
    even = goodput(level(*(request(10.05 + i / 2) for i in range(20))), BOTH)
    assert even is not None
    assert (even.low, even.mean, even.high) == (pytest.approx(1.9), pytest.approx(2.0), pytest.approx(2.1))
    bursts = goodput(level(*(request(10.05 + i % 4 / 10) for i in range(20))), BOTH)
    assert bursts is not None
    assert bursts.mean == pytest.approx(even.mean)
    assert bursts.high - bursts.low > 4 * (even.high - even.low)


@given(st.lists(st.tuples(st.floats(8, 20), st.floats(1, 2000), st.floats(1, 200)), max_size=40), st.floats(1, 2000))
def test_looser_limits_never_lower_goodput(rows: list[tuple[float, float, float]], limit: float) -> None:
    samples = level(*(request(at, ttft_ms=ttft, tpot_ms=tpot) for at, ttft, tpot in rows))
    tight, loose = (goodput(samples, GoodputLimits(ttft_ms_max=ms)) for ms in (limit, 2 * limit))
    assert (tight is None) is (loose is None)
    if tight is not None and loose is not None:
        assert 0 <= tight.low <= tight.mean <= loose.mean


def test_figures_keep_the_limits_that_their_goodput_is_under() -> None:
    samples = level(*(request(10.0 + i) for i in range(8)))
    found = figures_under(samples, BOTH)
    assert (found.goodput_limits, found.goodput_req_s) == (BOTH, pytest.approx(0.8))
    assert Figures.model_validate_json(found.model_dump_json()) == found
    assert figures_under(samples, None) == figures(samples)
    assert with_goodput(figures(samples), samples, BOTH) == found
    assert with_goodput(found, samples, None) == figures(samples)


def test_figures_from_before_goodput_are_still_read() -> None:
    old = figures(level(request(11.0))).model_dump(exclude={name for name in Figures.model_fields if "goodput" in name})
    assert Figures.model_validate(old).goodput_req_s is None
