"""Gaps read back as they were, belong to their requests, and the steady part takes no others."""

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autotuner.bench.samples import LevelSamples, RequestSample, pack_gaps, steady_gaps_us


def request(sent_s: float, events: int, **more: object) -> RequestSample:
    return RequestSample.model_validate({"sent_s": sent_s, "first_s": sent_s + 0.1, "events": events, **more})


def level(*pairs: tuple[RequestSample, list[int]], **more: object) -> LevelSamples:
    requests = [r for r, _ in pairs]
    fields = {"concurrency": 1, "steady_from_s": 1.0, "steady_to_s": 2.0, "requests": requests}
    return LevelSamples.model_validate(fields | {"gaps": pack_gaps(g for _, g in pairs)} | more)


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=5), max_size=8))
def test_gaps_read_back_as_they_were(gaps: list[list[int]]) -> None:
    samples = level(*((request(1.0, len(row) + 1), row) for row in gaps))
    assert [list(row) for row in samples.gaps_us()] == gaps
    assert LevelSamples.model_validate_json(samples.model_dump_json()) == samples


def test_gaps_are_what_the_contract_says() -> None:
    """zlib over unsigned 32 bit little endian, base64: another program must read them without this one."""
    raw = zlib.decompress(base64.b64decode(level((request(1.0, 3), [1, 258])).gaps))
    assert raw == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_requests_without_events_or_with_one_have_no_gaps() -> None:
    samples = level((request(1.0, 0, first_s=None), []), (request(1.0, 1), []), (request(1.0, 2), [7]))
    assert [list(row) for row in samples.gaps_us()] == [[], [], [7]]
    assert LevelSamples(concurrency=1, requests=samples.requests).gaps_us() == ()


@pytest.mark.parametrize("gaps", [pack_gaps([[1, 2]]), "no base64!", base64.b64encode(b"no zlib").decode()])
def test_gaps_that_do_not_fit_their_requests_are_refused(gaps: str) -> None:
    with pytest.raises(ValidationError, match="gaps"):
        LevelSamples(concurrency=1, requests=(request(1.0, 2),), gaps=gaps)


def test_only_gaps_that_ended_in_the_steady_part_count() -> None:
    samples = level(
        (request(0.0, 4), [500_000, 500_000, 1_200_000]),  # events at 0.1, 0.6, 1.1 and 2.3 s
        (request(1.2, 3), [100_000, 200_000]),  # all inside
        (request(1.2, 2, error="truncated stream"), [1]),
        (request(1.8, 3, cut=True), [50_000, 400_000]),  # the second event came after the end
    )
    assert [list(row) for row in steady_gaps_us(samples)] == [[500_000], [100_000, 200_000], [50_000]]


def test_without_a_steady_part_no_gap_counts() -> None:
    assert steady_gaps_us(level((request(1.0, 2), [5]), steady_from_s=None, steady_to_s=None)) == ()


def test_a_request_that_was_due_earlier_began_when_it_was_due() -> None:
    assert request(3.0, 1, due_s=2.5).began_s == 2.5
    assert request(3.0, 1).began_s == 3.0
