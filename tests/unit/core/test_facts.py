"""What was read becomes the named facts of the rules; what is not known is left out."""

import dataclasses
import math
from typing import Any

import pytest
from unit.core.building import figures

from autotuner.core.facts import LevelSoFar, StartSoFar, level_facts, server_facts, start_facts
from autotuner.core.objective import Constraints
from autotuner.core.policy import FACT_BY_NAME, FACTS, Facts
from autotuner.core.speculation import Doubt, SpeculationAtLevel, StepTime
from autotuner.core.statistics import Interval
from autotuner.engines.base import Diagnosis, Stage

SPEC = SpeculationAtLevel(
    running=48.0,
    capped=True,
    accept_len=Interval(1.9, 1.8, 2.0),
    needed=2.5,
    baseline_step=StepTime(0.03, "measured"),
    needed_bounds=Interval(2.5, 2.4, 2.6),
    speedup=Interval(0.76, 0.7, 0.82),
    ceiling=4.0,
    drafts=300,
    windows=7,
)
PRIOR = dataclasses.replace(SPEC, baseline_step=StepTime(0.03, "prior"))


def so_far(**more: Any) -> LevelSoFar:
    table: dict[str, Any] = {
        "figures": figures(
            128, 849.0, 10.0, requests_ok=9, requests_failed=1, ttft_ms={"p99": 400.0}, tpot_ms={"p99": 40.0}
        ),
        "load_s": 30.0,
        "decides": True,
        "running": 48.0,
        "speculates": True,
        "speculation": SPEC,
        "accept_ratio": 0.3,
        "best": figures(128, 2370.0, 20.0),
        "doubt": Doubt(0.05, 0.03),
        "prompts": 40,
        "rates": (839.0, 859.0, 849.0, 845.0, 853.0),
        "score_high": 1.1,
        "constraints": Constraints(single_stream_ratio_min=0.9, ttft_p99_ms_max=500.0, tpot_p99_ms_max=50.0),
    }
    return LevelSoFar(**{**table, **more})


EVERYTHING: Facts = {
    **server_facts(alive=False, exit_code=-9, diagnosis=Diagnosis("killed", "it was killed")),
    **start_facts(StartSoFar(Stage.WEIGHTS, 10.0, 1800.0, 3.0, 600.0)),
    **level_facts(
        so_far(over=True, running_cap=48, graph_max_batch=48, preempted=0, depth=3, pays_up_to=8, loses_from=32)
    ),
    **level_facts(so_far(speculation=PRIOR, over=True)),
    **level_facts(
        so_far(
            figures=figures(20, 849.0, load="request-rate"),
            in_flight=160,
            queued=12.0,
            answered_ratio=Interval(0.7, 0.6, 0.8),
            best_answered_ratio=0.99,
            silent_s=3.0,
            silence_limit_s=450.0,
        )
    ),
}


def test_every_fact_of_a_server_a_start_and_a_level_is_really_provided() -> None:
    """A fact in the table that nothing fills would make every rule on it silently dead."""
    by_others = {"trial", "budget", "candidate"}
    promised = {fact.name for fact in FACTS if fact.name.partition(".")[0] not in by_others}
    assert set(EVERYTHING) == promised


def test_every_fact_has_the_kind_that_the_table_says() -> None:
    for name, value in EVERYTHING.items():
        assert type(value) is FACT_BY_NAME[name].kind, name


def test_figures_become_facts_in_their_units() -> None:
    facts = level_facts(so_far())
    assert facts["level.failed_ratio"] == pytest.approx(0.1)
    assert facts["level.output_tok_s_high"] == 859.0
    assert facts["best.ratio"] == pytest.approx(849 / 2370)
    assert facts["best.ratio_high"] > facts["best.ratio"]
    assert (facts["spec.accept_len_low"], facts["spec.accept_len"], facts["spec.accept_len_high"]) == (1.8, 1.9, 2.0)
    assert (facts["spec.needed_low"], facts["spec.needed_high"]) == (2.4, 2.6)
    assert (facts["spec.speedup_low"], facts["spec.speedup"], facts["spec.speedup_high"]) == (0.7, 0.76, 0.82)
    assert facts["level.rate_error"] == pytest.approx(0.0235, abs=0.0005)
    assert facts["level.launch_noise"] == 0.03
    assert (facts["spec.needed"], facts["spec.ceiling"], facts["spec.verify_steps"]) == (2.5, 4.0, 300.0)


@pytest.mark.parametrize(
    ("change", "absent"),
    [
        (
            {"figures": figures(8, 0.0, seconds=0.0, requests_ok=0)},
            {"level.output_tok_s", "level.failed_ratio", "best.ratio"},
        ),
        ({"running": None}, {"level.running"}),
        ({"best": None}, {"best.output_tok_s", "best.ratio", "best.ratio_high"}),
        ({"best": figures(8, 5.0, void="client")}, {"best.output_tok_s", "best.ratio"}),
        ({"best": figures(8, 0.0)}, {"best.output_tok_s", "best.ratio"}),
        ({"speculation": None}, {"spec.accept_len", "spec.verify_steps", "spec.capped", "spec.needed"}),
        ({"speculation": SpeculationAtLevel()}, {"spec.accept_len", "spec.capped", "spec.needed", "spec.ceiling"}),
        ({"speculation": PRIOR}, {"spec.needed", "spec.needed_low", "spec.speedup", "spec.speedup_high"}),
        ({"accept_ratio": None}, {"spec.accept_ratio"}),
        (
            {"figures": figures(128, 849.0, math.inf)},
            {"level.output_tok_s_high", "best.ratio_high", "best.ratio_low"},
        ),
        ({"rates": (849.0, 850.0)}, {"level.rate_error"}),
        ({}, {"level.running_cap", "level.graph_max_batch", "level.preempted", "spec.pays_up_to", "spec.loses_from"}),
        ({"depth": None}, {"spec.best_depth", "spec.predicted_gain", "spec.predicted_ratio"}),
        ({"depth": 3, "tree": True}, {"spec.best_depth", "spec.predicted_gain", "spec.predicted_ratio"}),
        ({"depth": 3, "speculation": SpeculationAtLevel(accept_len=Interval(2, 2, 2))}, {"spec.best_depth"}),
        ({"over": False}, {"level.client_limited"}),
    ],
)
def test_what_is_not_known_is_left_out_and_never_zero(change: dict[str, Any], absent: set[str]) -> None:
    assert not absent & set(level_facts(so_far(**change)))


def test_whether_the_best_known_was_measured_is_always_known() -> None:
    assert level_facts(so_far())["best.measured"] is True
    assert level_facts(so_far(best=None))["best.measured"] is False


def test_a_level_that_measured_the_client_says_so_at_its_end() -> None:
    slow = figures(8, 5.0, client_limited=True)
    assert level_facts(so_far(figures=slow, over=True))["level.client_limited"] is True
    assert level_facts(so_far(over=True))["level.client_limited"] is False


def test_a_living_server_has_no_cause_of_death() -> None:
    assert server_facts(alive=True, exit_code=None, diagnosis=None) == {"server.alive": True}


def test_a_constraint_that_is_not_set_and_a_score_that_is_not_bounded_are_left_out() -> None:
    facts = level_facts(so_far(constraints=Constraints(), score_high=None))
    always = "objective.latency_counts"
    assert {name for name in facts if name.startswith("objective.")} == {"objective.failed_requests_max", always}
    facts = level_facts(so_far(constraints=None, score_high=None))
    assert {name for name in facts if name.startswith("objective.")} == {always}


def test_latencies_are_known_at_the_end_of_a_level_that_is_not_void() -> None:
    late = {"level.ttft_p99_ms", "level.tpot_p99_ms"}
    assert not late & set(level_facts(so_far()))
    assert late <= set(level_facts(so_far(over=True)))
    void = figures(128, 849.0, ttft_ms={"p99": 400.0}, void="the client was the limit")
    assert not late & set(level_facts(so_far(over=True, figures=void)))


RATE: dict[str, Any] = {"figures": figures(2.5, 849.0, 10.0, load="request-rate")}


def test_a_level_that_is_a_rate_is_named_as_one_and_has_no_concurrency() -> None:
    facts = level_facts(so_far(**RATE))
    assert facts["level.name"] == "2.5 req/s"
    assert facts["level.request_rate"] == 2.5
    assert "level.concurrency" not in facts
    assert level_facts(so_far())["level.name"] == "concurrency 128"
    assert "level.request_rate" not in level_facts(so_far())


def test_at_a_rate_output_is_compared_at_the_levels_end_alone() -> None:
    """Until then the two sides have not been sent the same requests; and that a rate is known settles nothing."""
    ratios = {"best.ratio", "best.ratio_low", "best.ratio_high"}
    assert not {*ratios, "level.rate_error"} & set(level_facts(so_far(**RATE)))
    assert ratios <= set(level_facts(so_far(**RATE, over=True)))
    assert "level.rate_error" not in level_facts(so_far(**RATE, over=True))


def test_the_speed_of_a_trace_is_neither_a_concurrency_nor_a_rate() -> None:
    facts = level_facts(so_far(figures=figures(2, 849.0, load="trace")))
    assert facts["level.name"] == "2 times the trace's speed"
    assert not {"level.concurrency", "level.request_rate"} & set(facts)
