"""A level's figures are of the part in which its rate stood still; what is no rise stays in them."""

import random

import pytest

from autotuner.bench.measurement import figures
from autotuner.bench.samples import BIN_S, LevelSamples, Progress, RequestSample, pack_gaps
from autotuner.bench.settling import settled, settled_from, settled_line

# Token events of each second of the steady part at 128 in flight, from two campaigns on an H200: the servers replaced requests one
# by one at first, and several times as fast once many ended together.
JUMPS = {
    "without overlap": ([1044, 1014, 923, 660, 2111, 1176, 2392, 1219, 1827, 1949, 1287, 2405], 4),
    "overlapped": ([1191, 1463, 971, 3520, 3867, 3860, 3837, 3625, 4021, 3348, 3966, 3576], 3),
    "overlapped, launched again": ([2073, 1624, 978, 3881, 3712, 3712, 3728, 3712, 4208, 4105, 4183, 4176], 3),
    "late, at 32 in flight": ([624, 627, 651, 631, 605, 648, 632, 613, 502, 1394, 1312, 1478], 9),
    "a first server on a fresh machine": ([395, 430, 453, 459, 449, 582, 691, 667, 709, 782, 729, 648], 5),
}
STEADY = {
    "waves": [593, 585, 705, 517, 653, 667, 543, 795, 510, 557, 820, 519],
    "speculating": [217, 229, 163, 279, 219, 246, 213, 245, 214, 205, 249, 215],
    "even": [198, 198, 214, 200, 202, 202, 193, 204, 201, 205, 203, 197],
    "capped": [204, 227, 182, 231, 156, 164, 184, 164, 132, 120, 170, 212],
    "falling": [900, 880, 860, 400, 410, 390, 400, 405, 395, 400, 400, 400],
    "all the same": [50] * 12,
    "nothing at all": [0] * 12,
    "too short to tell": [10, 20, 30],
}


@pytest.mark.parametrize("name", JUMPS)
def test_what_came_before_a_rise_is_left_out(name: str) -> None:
    rates, cold = JUMPS[name]
    assert settled_from(rates) == cold


@pytest.mark.parametrize("name", STEADY)
def test_what_is_no_rise_is_left_in(name: str) -> None:
    assert settled_from(STEADY[name]) == 0


def test_two_rises_are_both_left_out() -> None:
    assert settled_from([100, 104, 98, 101, 300, 310, 290, 305, 900, 910, 890, 905, 899]) == 8


def test_a_rate_that_only_makes_noise_is_hardly_ever_cut() -> None:
    dice = random.Random(5)
    cut = sum(bool(settled_from([dice.gauss(100, 12) for _ in range(30)])) for _ in range(500))
    assert cut <= 5, f"{cut} of 500 levels without a rise were cut"


def level(per_second: list[int], load: str = "concurrency") -> LevelSamples:
    bins = tuple(n // 10 + (i < n % 10) for n in per_second for i in range(10))
    requests = tuple(
        RequestSample(sent_s=2.0 + i / 8, first_s=2.1 + i / 8, end_s=3.0 + i / 8, events=8, output_tokens=8)
        for i in range(8 * len(per_second))
    )
    steady = {"steady_from_s": 2.0, "steady_to_s": 2.0 + len(bins) * BIN_S}
    return LevelSamples.model_validate({"concurrency": 8, "load": load, "requests": requests, "bins": bins, **steady})


def test_the_gaps_of_a_level_that_was_cut_may_be_forgotten_and_its_figures_stay() -> None:
    whole = level(JUMPS["overlapped"][0])
    gaps = [[1000 + number] * 7 for number, _ in enumerate(whole.requests)]
    cut = settled(whole.model_copy(update={"gaps": pack_gaps(gaps), "itl_ms": {"mean": 1.0}}))
    assert cut.unsettled_s
    assert figures(cut).itl_ms["p50"] > 1.0, "of the steady part that is left, not of the whole"
    assert figures(cut.model_copy(update={"gaps": ""})) == figures(cut)


def test_figures_are_of_the_part_that_stood_still_and_say_so() -> None:
    rates, cold = JUMPS["overlapped"]
    whole, cut = figures(level(rates)), figures(settled(level(rates)))
    assert cut.output_tok_s == pytest.approx(sum(rates[cold:]) / len(rates[cold:]))
    assert (cut.seconds, cut.unsettled_s) == (pytest.approx(9.0), pytest.approx(3.0))
    assert cut.output_tok_s_high - cut.output_tok_s_low < (whole.output_tok_s_high - whole.output_tok_s_low) / 2
    assert figures(settled(level(STEADY["even"]))).unsettled_s == 0


def test_a_load_that_is_not_kept_in_flight_is_left_alone() -> None:
    rates, _ = JUMPS["overlapped"]
    samples = level(rates, "request-rate")
    assert settled(samples) is samples


def lines(per_second: list[int], duration_s: float, streams: int) -> list[Progress]:
    found, done = [Progress(at_s=5.0, phase="warm-up", events=0, in_flight=streams, done=streams, failed=0)], 0.0
    for half in range(2 * len(per_second)):
        done += streams / duration_s / 2
        events = per_second[half // 2] // 2
        at_s = 5.0 + (half + 1) / 2
        found.append(
            Progress(at_s=at_s, phase="steady", events=events, in_flight=streams, done=streams + int(done), failed=0)
        )
    return found


def test_a_level_in_progress_is_cut_at_the_same_place() -> None:
    rates, cold = JUMPS["overlapped"]
    progress = lines(rates, 1.4, 128)
    assert progress[settled_line(progress, 128)].at_s == pytest.approx(5.0 + cold)
    assert settled_line(progress[: 2 * cold + 1], 128) == 0, "before the rise there is none to be seen"


def test_a_level_whose_requests_are_long_is_cut_by_slots_as_long_as_half_of_one() -> None:
    waves = [300, 900] * 10  # what one request a stream makes of a prefill and a decode
    assert settled_line(lines(waves, 4.0, 16), 16) == 0
