"""A server that keeps up with a rate is never called overloaded, and one that clearly does not is named before the level's end."""

import heapq
import math
import random

import pytest

from autotuner.bench.measurement import Progress
from autotuner.core.keeping_up import KEEPS_UP_MIN, SENT_MIN, answered_ratio

WARM_UP_S = 5.0


def load(
    rate: float, capacity: int | None, lasts_s: float, seconds: float, seed: int = 1, at_once: int | None = None
) -> list[Progress]:
    """What a client says twice a second of Poisson arrivals at a server that works on `capacity` requests at once.

    `at_once` is the most that the client keeps in flight; requests beyond that are sent when one returns.
    """
    rng = random.Random(seed)
    due, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(rate)) < WARM_UP_S + seconds:
        due.append(at_s)
    free = [0.0] * (capacity or 10_000)
    heapq.heapify(free)
    sent, ends, flying = [], [], list[float]()
    for wanted in due:
        now = wanted
        if at_once is not None and len(flying) >= at_once:
            now = max(now, heapq.heappop(flying))
        begins = max(now, heapq.heappop(free))
        end = begins + lasts_s * rng.uniform(0.5, 1.5)
        heapq.heappush(free, end)
        heapq.heappush(flying, end)
        sent.append(now)
        ends.append(end)
    lines = []
    for step in range(1, int(2 * (WARM_UP_S + seconds)) + 1):
        t = step / 2
        done = sum(end <= t for end in ends)
        phase = "steady" if t > WARM_UP_S else "warm-up"
        lines.append(
            Progress(at_s=t, phase=phase, events=0, in_flight=sum(s <= t for s in sent) - done, done=done, failed=0)  # type: ignore[arg-type]
        )
    return lines


def told(lines: list[Progress], rate: float) -> list[float]:
    """The upper bounds at every look, two seconds apart."""
    found = [answered_ratio(lines[: n + 1], rate) for n in range(3, len(lines), 4)]
    return [bound.high for bound in found if bound is not None]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("rate", "lasts_s"), [(0.7, 2.0), (2.0, 3.0), (10.0, 2.0), (10.0, 20.0), (40.0, 20.0), (40.0, 50.0)]
)
def test_a_server_that_keeps_up_is_never_called_overloaded_however_long_its_answers_take(
    rate: float, lasts_s: float, seed: int
) -> None:
    """With answers of 20 s what is in flight grows for 20 s, and with ones of 50 s nearly as long as the level lasts."""
    assert all(high >= KEEPS_UP_MIN for high in told(load(rate, None, lasts_s, 60.0, seed), rate))


@pytest.mark.parametrize("share", [0.55, 0.6, 0.7])
def test_a_server_that_answers_less_than_what_is_sent_is_told_before_the_level_ends(share: float) -> None:
    rate, lasts_s = 20.0, 2.0
    lines = load(rate, int(share * rate * lasts_s), lasts_s, 60.0)
    highs = told(lines, rate)
    assert sum(high < KEEPS_UP_MIN for high in highs) >= 3
    final = answered_ratio(lines, rate)
    assert final is not None
    assert final.mean == pytest.approx(share, abs=0.08)


def test_requests_that_the_client_holds_back_are_not_taken_for_answered_ones() -> None:
    """At most 64 in flight: as many return as are sent, and yet half of what was due was not."""
    lines = load(40.0, 40, 2.0, 60.0, at_once=64)
    assert max(p.in_flight for p in lines) <= 64
    found = answered_ratio(lines, 40.0)
    assert found is not None
    assert found.high < KEEPS_UP_MIN


def line(at_s: float, done: int, in_flight: int, failed: int = 0, phase: str = "steady") -> Progress:
    return Progress(at_s=at_s, phase=phase, events=0, in_flight=in_flight, done=done, failed=failed)  # type: ignore[arg-type]


def test_nothing_is_said_of_the_warm_up_of_few_requests_or_before_anything_returned() -> None:
    assert answered_ratio([], 1.0) is None
    assert answered_ratio([line(10.0, 50, 1)], 5.0) is None, "one line spans no time"
    assert answered_ratio([line(5.0, 20, 1, phase="warm-up"), line(10.0, 50, 1, phase="warm-up")], 5.0) is None
    few = [line(10.0, 50, 1), line(20.0, 50 + SENT_MIN - 1, 1)]
    assert answered_ratio(few, 1.0) is None
    assert answered_ratio([few[0], line(20.0, 50 + SENT_MIN, 1)], 1.0) is not None
    assert answered_ratio([line(10.0, 10, 90), line(20.0, 20, 180)], 10.0) is None, "they may still be on their way"


def test_the_share_is_of_what_was_sent_since_and_failed_ones_do_not_wait() -> None:
    found = answered_ratio([line(2.0, 10, 4), line(10.0, 60, 6), line(20.0, 120, 30, failed=16)], 9.0)
    assert found is not None
    assert found.mean == pytest.approx(76 / 100)
    assert found.high == pytest.approx(0.76 + 3 * math.sqrt(12) / 100)
    assert found.low == pytest.approx(0.76 - 3 * math.sqrt(12) / 100)
