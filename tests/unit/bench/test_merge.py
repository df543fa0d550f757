"""Several processes' samples become those of one level, with no event lost, none counted twice, and the worst of each."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from autotuner.bench.measurement import LevelSamples, RequestSample
from autotuner.bench.merge import merge
from autotuner.bench.samples import pack_gaps


def part(
    start: float | None = 2.0, bins: tuple[int, ...] = (1, 2, 3), gaps: tuple[list[int], ...] = (), **more: Any
) -> LevelSamples:
    at = 0.0 if start is None else start
    requests = tuple(RequestSample(sent_s=at + 0.1, first_s=at + 0.2, end_s=at + 0.3, events=len(g) + 1) for g in gaps)
    fields = {
        "concurrency": 4,
        "steady_from_s": start,
        "steady_to_s": None if start is None else round(start + 0.1 * len(bins), 6),
        "bins": () if start is None else bins,
        "requests": requests,
        "gaps": pack_gaps(gaps),
        "kernel_stamps": True,
    }
    return LevelSamples.model_validate(fields | more)


parts = st.lists(
    st.builds(
        part,
        st.floats(0.0, 9.0).map(lambda s: round(s, 6)),
        st.lists(st.integers(0, 99), min_size=1, max_size=9).map(tuple),
        st.lists(st.lists(st.integers(0, 10**6), max_size=4), max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=5,
)


@given(parts)
def test_requests_gaps_and_bins_are_those_of_all_parts_as_far_as_all_were_steady(found: list[LevelSamples]) -> None:
    merged = LevelSamples.model_validate(merge(found).model_dump())  # the gaps still fit the requests
    assert merged.processes == len(found)
    assert len(merged.requests) == sum(len(p.requests) for p in found)
    assert [list(g) for g in merged.gaps_us()] == [list(g) for p in found for g in p.gaps_us()]
    shared = min(len(p.bins) for p in found)
    assert merged.bins == tuple(sum(p.bins[i] for p in found) for i in range(shared))
    assert merged.steady_from_s is not None
    assert merged.steady_to_s is not None
    assert abs(merged.steady_to_s - merged.steady_from_s - 0.1 * shared) < 1e-5
    # Each request lies where it lay from the steady part's beginning on.
    assert all(abs(r.sent_s - merged.steady_from_s - 0.1) < 1e-5 for r in merged.requests)


def test_a_level_of_which_a_part_never_was_steady_was_never_steady() -> None:
    merged = merge([part(), part(None, stopped_early=True)])
    assert (merged.steady_from_s, merged.steady_to_s, merged.bins) == (None, None, ())
    assert merged.stopped_early


def test_what_describes_a_process_is_that_of_the_worst() -> None:
    busy = part(cpu_ratio=0.7, waited_ratio=0.1, lag_p99_ms=1.0, read_delay_ms={"p99": 5.0}, unread_bytes_max=7)
    waiting = part(cpu_ratio=0.1, waited_ratio=0.5, lag_p99_ms=9.0, held_back=True, merged_ratio=0.3)
    merged = merge([waiting, busy])
    assert (merged.cpu_ratio, merged.waited_ratio) == (0.7, 0.1), "of one process, not the worst halves of two"
    assert (merged.lag_p99_ms, merged.merged_ratio, merged.unread_bytes_max) == (9.0, 0.3, 7)
    assert merged.read_delay_ms == {"p99": 5.0}
    assert merge([busy, waiting]).held_back, "whichever part was held back"


def test_a_part_that_read_nothing_says_nothing_about_receive_times() -> None:
    with_events = part(gaps=([1],))
    assert merge([with_events, part(kernel_stamps=False)]).kernel_stamps
    assert not merge([with_events, part(gaps=([1],), kernel_stamps=False)]).kernel_stamps
