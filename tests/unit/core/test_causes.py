"""The loss against the best-known is split between its causes, and the parts add up."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.core.building import level, windows

from autotuner.core.causes import Level, level_of, split_loss
from autotuner.core.speculation import SpeculationAtLevel, assess
from autotuner.core.statistics import Interval
from autotuner.core.verdict import LevelReading
from autotuner.engines.base import Speculation

EAGLE3 = Speculation("EAGLE3", 3, 4)
BASE = {1: level(1, 63.6, running=1.0), 128: level(128, 2370.0, running=128.0)}
SPEC = SpeculationAtLevel(running=48.0, accept_len=Interval(1.65, 1.6, 1.7), needed=3.12, ceiling=4.0)


def shares(**more: Any) -> dict[str, float]:
    table: dict[str, Any] = {
        "concurrency": 128,
        "baseline_tok_s": 2370.0,
        "measured_tok_s": 849.0,
        "running": 48.0,
        "base_step_s": 48 / 1606,
        "speculation": SPEC,
    }
    return {share.cause: share.tok_s for share in split_loss(Level(**{**table, **more}))}


def test_about_half_of_the_loss_at_128_was_the_cap_of_48_running_requests() -> None:
    """The campaign this program was made for: 2,370 tok/s plain, 849 with a drafter under SGLang's cap."""
    found = assess(windows(48, 849.0, 1.65, queued=16.0), 128, 48, EAGLE3, {1.0: 1 / 63.6, 128.0: 128 / 2370})
    result = level(128, 849.0, speculation=found, running=48.0)
    explained = level_of(result, BASE)
    assert explained is not None
    parts = split_loss(explained)
    total = sum(share.tok_s for share in parts)
    assert total == pytest.approx(1521)
    by_cause = {share.cause: share.tok_s / total for share in parts}
    assert by_cause["admission-cap"] == pytest.approx(0.5, abs=0.02)
    assert by_cause["acceptance"] == pytest.approx(0.5, abs=0.02)
    assert "a plain server held there would give about 1,606 tok/s" in parts[0].words + parts[1].words


def test_requests_that_do_not_fit_into_the_kv_pool_are_no_cap() -> None:
    assert "kv-pressure" in shares(preempted=True)
    assert "admission-cap" not in shares(preempted=True)


def test_what_no_drafter_could_win_back_is_the_cost_of_the_step() -> None:
    """At break-even 4.8 even four tokens a step give 0.83 of the plain rate; the rest is for a better drafter."""
    hopeless = SpeculationAtLevel(running=128.0, accept_len=Interval(1.6, 1.5, 1.7), needed=4.8, ceiling=4.0)
    found = shares(running=128.0, measured_tok_s=790.0, speculation=hopeless)
    assert found["acceptance"] == pytest.approx(790 * (4.0 / 1.6 - 1))
    assert found["step-cost"] == pytest.approx(2370 - 790 * 4.0 / 1.6)


def test_missing_graphs_have_their_own_share_of_a_speculative_loss() -> None:
    found = shares(step_cause="graphs-off", running=128.0, measured_tok_s=400.0)
    assert found["graphs-off"] > 0
    assert sum(found.values()) == pytest.approx(1970)


BROKEN = SpeculationAtLevel(running=48.0, accept_len=Interval(1.0, 1.0, 1.0), needed=2.3, ceiling=4.0, drafts=96)


def test_what_a_broken_drafter_costs_is_its_own_and_not_a_matter_of_acceptance() -> None:
    found = shares(speculation=BROKEN)
    assert found == {"admission-cap": pytest.approx(764), "draft-broken": pytest.approx(757)}
    without_graphs = shares(speculation=replace(BROKEN, needed=6.0), step_cause="graphs-off", measured_tok_s=100.0)
    assert set(without_graphs) == {"admission-cap", "graphs-off", "draft-broken"}
    assert sum(without_graphs.values()) == pytest.approx(2270)


def test_a_drafter_is_not_called_broken_on_a_handful_of_steps() -> None:
    assert "draft-broken" not in shares(speculation=replace(BROKEN, drafts=49))
    assert "draft-broken" in shares(speculation=replace(BROKEN, drafts=50))
    assert "draft-broken" not in shares(speculation=replace(BROKEN, accept_len=Interval(1.02, 1.0, 1.04)))


def test_a_plain_server_without_graphs_lost_by_that_alone() -> None:
    assert shares(speculation=None, step_cause="graphs-off", running=128.0) == {"graphs-off": pytest.approx(1521)}
    assert shares(speculation=None, running=128.0) == {"slower-step": pytest.approx(1521)}


def test_a_drafter_that_pays_under_a_cap_is_not_blamed_for_the_loss() -> None:
    found = shares(measured_tok_s=1800.0)
    assert found["admission-cap"] == pytest.approx(764)
    assert found["speculation-gain"] == pytest.approx(-194)
    plain = shares(measured_tok_s=1800.0, speculation=None)
    assert plain["step-gain"] == pytest.approx(-194), "a server that does not speculate gained nothing by that"


def test_nothing_is_split_where_nothing_was_lost() -> None:
    assert shares(measured_tok_s=2370.0) == {}


RATES = st.tuples(st.floats(10, 5000), st.floats(0, 1), st.floats(1, 128), st.floats(0.0005, 0.2))
SPECS = st.none() | st.builds(
    lambda accept_len, needed: SpeculationAtLevel(
        accept_len=Interval(accept_len, accept_len, accept_len), needed=needed, ceiling=4.0
    ),
    st.floats(1, 4),
    st.floats(1, 6),
)


@given(RATES, SPECS, st.sampled_from(["", "graphs-off", "graph-batch"]), st.booleans())
def test_the_shares_add_up_to_the_loss(
    rates: tuple[float, float, float, float], spec: SpeculationAtLevel | None, cause: str, preempted: bool
) -> None:
    base, part, running, step = rates
    one = Level(128, base, base * part, running, step, spec, cause, preempted)
    assert sum(share.tok_s for share in split_loss(one)) == pytest.approx(base - base * part, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"graph_ratio": 0.0}, "graphs-off"),
        ({"graph_ratio": 0.0, "graph_max_batch": 48}, "graph-batch"),
        ({"graph_ratio": 0.9}, ""),
        ({"reading": LevelReading(cause="thermal-or-power-limit", action="remeasure", sentence="hot")}, "thermal-or-power-limit"),
        ({"reading": LevelReading(cause="warm-prefix-cache", action="remeasure", sentence="warm")}, ""),
    ],
)  # fmt: skip
def test_what_made_the_steps_dearer_is_read_from_the_server(change: dict[str, Any], cause: str) -> None:
    result = level(128, 400.0, running=128.0).model_copy(update=change)
    found = level_of(result, BASE)
    assert found is not None
    assert found.step_cause == cause


def test_graphs_that_the_baseline_lacks_too_explain_nothing() -> None:
    base = {128: BASE[128].model_copy(update={"graph_ratio": 0.0})}
    found = level_of(level(128, 400.0, running=128.0).model_copy(update={"graph_ratio": 0.0}), base)
    assert found is not None
    assert found.step_cause == ""


def test_a_level_without_a_counterpart_is_not_explained() -> None:
    assert level_of(level(8, 400.0, running=8.0), BASE) is None
    assert level_of(level(128, 400.0), BASE) is None, "how many ran is not known"
    assert level_of(level(128, 400.0, running=128.0, void="client"), BASE) is None


def test_what_runs_at_a_request_rate_explains_no_loss() -> None:
    """How many run is then what comes of the server's speed: few are no cap, and many are no gain."""
    base = {20: level(20, 2370.0, running=128.0, load="request-rate")}
    assert level_of(level(20, 849.0, running=48.0, load="request-rate"), base) is None
