"""A level is void where the client did harm, and only there."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.bench.measurement import LevelSamples, RequestSample
from autotuner.bench.samples import Placement
from autotuner.bench.selfcheck import blurred, client_limit, shared


def level(**fields: Any) -> LevelSamples:
    requests = tuple(RequestSample(sent_s=i, first_s=i + 0.1, end_s=i + 1.0, events=2) for i in range(3))
    usual = {"concurrency": 1, "steady_from_s": 0.0, "steady_to_s": 3.0, "requests": requests, "kernel_stamps": True}
    return LevelSamples.model_validate(usual | fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, ""),
        ({"cpu_ratio": 1.0}, ""),  # busy alone does no harm
        ({"send_delay_ms": {"mean": 40.0}}, ""),
        ({"send_delay_ms": {"mean": 1000.0}}, "50 % of its streams' time"),
        ({"send_delay_ms": {"mean": 1000.0}, "load": "request-rate"}, "1000.0 ms late"),
        ({"send_delay_ms": {"mean": 4.0}, "load": "request-rate"}, ""),
        ({"send_delay_ms": {"mean": 1000.0}, "load": "request-rate", "held_back": True}, ""),
        ({"kernel_stamps": False, "cpu_ratio": 0.95, "lag_p99_ms": 50.0}, "50 ms late (p99)"),
        ({"kernel_stamps": False, "cpu_ratio": 0.5, "lag_p99_ms": 50.0}, ""),
        ({"cpu_ratio": 0.95, "lag_p99_ms": 50.0}, ""),  # the kernel's receive times are right all the same
    ],
)
def test_the_client_is_a_limit_where_it_did_harm(fields: dict[str, Any], said: str) -> None:
    found = client_limit(level(**fields))
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"waited_ratio": 0.8, "cpu_ratio": 0.1}, "something else used its core while it waited, 80 %"),
        ({"cpu_ratio": 0.95}, "its core was 95 % busy"),
        ({"cpu_ratio": 0.2}, "held up from outside, since its core was only 20 % busy"),
        ({"cpu_ratio": 0.5, "bins": (300, 300)}, "takes about 400 events/s"),
        ({"capacity_tok_s": 123_456.0, "processes": 2}, "its 2 processes it takes about 250,000 events/s"),
        ({}, "is not known"),
    ],
)
def test_it_says_why_and_what_it_could_have_measured(fields: dict[str, Any], said: str) -> None:
    assert said in client_limit(level(send_delay_ms={"mean": 5000.0}, **fields))


def test_events_that_shared_a_read_blur_itl_only_where_the_client_was_late() -> None:
    sent_at_once = level(merged_ratio=0.9, lag_p99_ms=0.5, itl_ms={"p50": 10.0})
    assert blurred(sent_at_once) == ""
    late = level(merged_ratio=0.9, lag_p99_ms=30.0, itl_ms={"p50": 10.0})
    assert "90 % of the events shared a read" in blurred(late)
    assert client_limit(late) == "", "its other figures hold"


ROAMS = Placement(shares=True, server_cores=4, said="the load client was not pinned")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"placed": ROAMS, "cpu_ratio": 0.5},
            "the load client was not pinned; it took 12 % of the cores that the server may use",
        ),
        ({"placed": ROAMS, "cpu_ratio": 0.5, "processes": 2}, "it took 25 % of the cores"),
        ({"placed": ROAMS, "cpu_ratio": 0.02, "waited_ratio": 0.2}, "and waited for a core 20 % of the time"),
        ({"placed": ROAMS, "cpu_ratio": 0.02}, ""),
        ({"placed": ROAMS.model_copy(update={"shares": False}), "cpu_ratio": 0.9}, ""),
        ({"placed": ROAMS.model_copy(update={"shares": None}), "cpu_ratio": 0.9}, ""),
        ({"cpu_ratio": 0.9}, ""),
    ],
)
def test_what_the_client_took_from_the_server_by_sharing_its_cores_is_said_where_it_matters(
    fields: dict[str, Any], said: str
) -> None:
    found = shared(level(**fields))
    assert said in found
    assert bool(found) == bool(said)


small = st.floats(0.0, 10.0)


@given(st.lists(st.tuples(small, small, st.booleans()), max_size=4), small, small, st.booleans(), st.booleans(), small)
def test_no_level_breaks_the_check(
    made: list[tuple[float, float, bool]], late_ms: float, busy: float, stamps: bool, open_loop: bool, end: float
) -> None:
    requests = tuple(RequestSample(sent_s=s, end_s=e if ended else None, first_s=e) for s, e, ended in made)
    fields = {
        "send_delay_ms": {"mean": late_ms},
        "cpu_ratio": busy,
        "kernel_stamps": stamps,
        "load": "request-rate" if open_loop else "concurrency",
    }
    for samples in (level(requests=requests, steady_to_s=end, **fields), level(requests=requests, steady_from_s=None)):
        assert isinstance(client_limit(samples) + blurred(samples), str)
