"""What the meter keeps is what happened, however the load was cut into records."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.bench.meter import Meter, Record
from autotuner.bench.samples import BIN_S, LevelSamples

ZERO = 1000.0
event_times = st.lists(st.floats(0.0, 3.0), max_size=30).map(sorted)


def record(times: list[float], **more: object) -> Record:
    made = Record(sent=ZERO)
    for name, value in more.items():
        setattr(made, name, value)
    for at in times:
        made.add(ZERO + at, 1)
    return made


def level(meter: Meter, end: float) -> LevelSamples:
    return LevelSamples(
        concurrency=1, requests=meter.samples(ZERO), gaps=meter.gaps(), bins=meter.whole_bins(ZERO + end)
    )


@given(st.lists(event_times, max_size=6), st.floats(0.0, 2.0))
def test_first_tokens_gaps_and_bins_are_the_event_times(requests: list[list[float]], start: float) -> None:
    meter = Meter()
    meter.begin(ZERO + start)
    for times in requests:
        meter.archive(record(times), ZERO)
    samples = level(meter, 4.0)
    for times, sample, gaps in zip(requests, samples.requests, samples.gaps_us(), strict=True):
        assert sample.events == len(times)
        if sample.first_s is not None:
            found = list(accumulate(gaps, initial=round(1e6 * sample.first_s)))
            # Each time is as right as the last, so that no error grows over a request; a microsecond is what rounding costs.
            assert found == pytest.approx([1e6 * at for at in times], abs=1.6)
    every = [ZERO + at for times in requests for at in times if ZERO + at >= ZERO + start]
    assert sum(samples.bins) == len([at for at in every if at < ZERO + start + len(samples.bins) * BIN_S])
    for number, count in enumerate(samples.bins):
        edge = ZERO + start + number * BIN_S
        inside = sum(edge + 1e-9 <= at < edge + BIN_S - 1e-9 for at in every)
        assert inside <= count <= sum(edge - 1e-9 <= at < edge + BIN_S + 1e-9 for at in every)


@given(event_times, st.lists(st.integers(0, 30), max_size=5))
def test_bins_do_not_depend_on_how_events_are_spread_over_requests(times: list[float], places: list[int]) -> None:
    edges = [0, *sorted(min(p, len(times)) for p in places), len(times)]
    meters = Meter(), Meter()
    for meter in meters:
        meter.begin(ZERO + 0.5)
    meters[0].archive(record(times), ZERO)
    for a, b in pairwise(edges):
        meters[1].archive(record(times[a:b]), ZERO)
    assert meters[0].whole_bins(ZERO + 4) == meters[1].whole_bins(ZERO + 4)
    assert meters[0].events == meters[1].events == len(times)


def test_only_reads_with_several_events_in_the_steady_part_are_merged_ones() -> None:
    meter, made = Meter(), Record(sent=ZERO)
    meter.begin(ZERO + 1)
    for at, count in [(0.5, 4), (1.0, 3), (1.5, 1), (1.9, 2), (2.0, 5)]:
        made.add(ZERO + at, count)
    meter.end(ZERO + 2)
    meter.archive(made, ZERO)
    assert meter.merged == 5
    assert meter.merged_ratio((6,)) == pytest.approx(5 / 6)
    assert meter.merged_ratio(()) == 0.0


def test_a_clock_that_went_back_makes_no_gap_that_nobody_can_read() -> None:
    meter = Meter()
    meter.archive(record([2.0, 1.0, 5000.0]), ZERO)
    samples = level(meter, 0.0)
    assert [list(row) for row in samples.gaps_us()] == [[0, 2**32 - 1]]


def test_delays_of_the_warm_up_and_of_the_tail_do_not_count() -> None:
    meter = Meter()
    given_to_connections = meter.read_delays
    given_to_connections.append(9.0)
    meter.begin(ZERO)
    given_to_connections.append(1.0)
    meter.end(ZERO + 1)
    given_to_connections.append(8.0)
    assert list(meter.read_delays) == [1.0]


def test_a_level_that_is_stopped_before_its_steady_part_has_no_bins() -> None:
    meter = Meter()
    assert meter.whole_bins(ZERO) == ()
    meter.begin(ZERO + 0.2)
    meter.archive(record([0.3]), ZERO)
    assert meter.whole_bins(ZERO + 0.05) == ()


@pytest.mark.parametrize("said", [b"", b"[1]", b'{"usage":3}', b"[" * 100_000, b'{"usage":{"completion_tokens":"x"}}'])
def test_usage_that_makes_no_sense_stays_unknown(said: bytes) -> None:
    made = record([], said=said)
    made.read_usage()
    assert made.output_tokens is None


def test_tokens_per_event_counts_whole_good_answers_alone() -> None:
    meter = Meter()
    assert meter.tokens_per_event == 1.0
    meter.archive(record([0.1, 0.2], output_tokens=6), ZERO)
    meter.archive(record([0.1], output_tokens=50, cut=True), ZERO)
    meter.archive(record([0.1], output_tokens=50, error="timeout"), ZERO)
    assert meter.tokens_per_event == 3.0
