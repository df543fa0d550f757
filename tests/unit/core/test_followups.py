"""From a rule that proposes to a candidate: each move's reason and numbers, and what speaks against a proposal."""

from typing import Any

import pytest
from unit.core.building import fired, level

from autotuner.core.candidate import Candidate, Launch, derive
from autotuner.core.followups import (
    REPAIR_CHANCE,
    USUAL_GAIN,
    Limits,
    NotProposed,
    Proposal,
    Situation,
    Tried,
    depths_measured,
    objection,
    ordered,
    speculation_by_level,
    work_out,
)
from autotuner.core.policy import Move
from autotuner.core.speculation import SpeculationAtLevel, StepTime
from autotuner.core.state import Verdict
from autotuner.core.statistics import Interval
from autotuner.engines import ENGINES
from autotuner.engines.base import Effective

EAGLE3: dict[str, Any] = {
    "speculative-algorithm": "EAGLE3",
    "speculative-draft-model-path": "/d",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}


def candidate(args: dict[str, Any] | None = None, engine: Any = "sglang", name: str = "eagle3") -> Candidate:
    return Candidate(name=name, engine=engine, launch=Launch(model="/m", args=EAGLE3 if args is None else args))


def spec(accept_len: float, needed: float | None = None, **more: Any) -> SpeculationAtLevel:
    known = {}
    if needed is not None:
        ratio = accept_len / needed
        known = {
            "speedup": Interval(ratio, ratio - 0.02, ratio + 0.02),
            "needed_bounds": Interval(needed, needed, needed),
        }
    return SpeculationAtLevel(
        accept_len=Interval(accept_len, accept_len - 0.05, accept_len + 0.05), needed=needed, **{**known, **more}
    )


def situation(who: Candidate | None = None, **more: Any) -> Situation:
    who = who or candidate()
    table: dict[str, Any] = {"levels": (1, 8, 32, 128), "request_tokens": 384, "version": "0.5.12"}
    return Situation(candidate=who, engine=ENGINES[who.engine], **{**table, **more})


def move(name: Move) -> Any:
    return fired("propose", move=name)


def proposal(name: Move, known: Situation) -> Proposal:
    found = work_out(move(name), known)
    assert isinstance(found, Proposal), found
    return found


def why_not(name: Move, known: Situation) -> str:
    found = work_out(move(name), known)
    assert isinstance(found, NotProposed), found
    return found.why


# --- moves


def test_a_lifted_cap_says_which_share_of_the_loss_is_the_caps() -> None:
    """The campaign's own figures: 849 of 2,370 tok/s at 128, 48 running; a plain step at 48 takes 29.9 ms."""
    capped = spec(1.93, 2.98, running=48.0, capped=True, baseline_step=StepTime(0.0299, "measured"))
    known = situation(
        level=128, results=(level(128, 849.0, speculation=capped, running=48.0),), baseline={128: level(128, 2370.0)}
    )
    found = proposal("lift-running-cap", known)
    assert found.candidate.name == "eagle3+max-running-requests-128"
    assert found.said == "the cap: 50 % of the 1,521 tok/s lost at concurrency 128"
    assert found.gain == pytest.approx(2370 / (48 / 0.0299) - 1)  # what a plain server gains by it
    assert "the cap: 50 %" in found.candidate.hypothesis
    assert "house.toml / a-rule" in found.candidate.hypothesis


def test_a_cap_without_a_baseline_is_lifted_for_half_of_what_would_run_more() -> None:
    known = situation(candidate({}, "vllm"), level=128, results=(level(128, 849.0, running=64.0),))
    found = proposal("lift-running-cap", known)
    assert found.said == "64 of 128 requests ran"
    assert found.gain == pytest.approx(0.5)


def test_graphs_are_raised_to_the_busiest_level_a_rank() -> None:
    found = proposal("raise-graph-batch", situation(level=128, effective=Effective(dp=2, graph_max_batch=32)))
    assert found.candidate.arg("cuda-graph-max-bs") == 64
    assert found.said == "the largest CUDA graph holds 32 requests"


def test_graphs_are_not_raised_beyond_what_may_run() -> None:
    known = situation(level=128, effective=Effective(running_cap=64, graph_max_batch=32))
    assert proposal("raise-graph-batch", known).candidate.arg("cuda-graph-max-bs") == 64


def test_another_depth_is_proposed_with_what_it_should_bring() -> None:
    known = situation(level=1, results=(level(1, 60.0, speculation=spec(1.4, 1.6)),))
    found = proposal("tune-draft-tokens", known)
    assert found.candidate.arg("speculative-num-steps") == 1
    assert found.gain > 0.03
    assert found.said.startswith("draft depth 1 instead of 3: accept length 1.29 predicted")
    assert found.said.endswith("1.40 measured")


def test_no_depth_is_proposed_that_promises_less_than_the_noise() -> None:
    """Acceptance 0.6 at 3 drafts, with the published cost: 3 is the best depth there is."""
    known = situation(level=1, results=(level(1, 60.0, speculation=spec(2.176, 1.512)),))
    assert "no other depth promises more than 3 %" in why_not("tune-draft-tokens", known)


def test_a_second_measured_depth_outweighs_the_published_shape() -> None:
    """With free drafts (R rises by 0.01 a token) more of them pay; the published shape alone would not say so."""
    results = (level(1, 60.0, speculation=spec(2.176, 1.23)),)
    known = situation(level=1, results=results, depths={1: 1.21})
    assert proposal("tune-draft-tokens", known).candidate.arg("speculative-num-steps") == 7


def test_depths_are_compared_only_between_candidates_that_differ_in_nothing_else() -> None:
    def other(steps: int, **more: Any) -> Candidate:
        return candidate(
            {**EAGLE3, "speculative-num-steps": steps, "speculative-num-draft-tokens": steps + 1, **more}, name="other"
        )

    at = (level(1, 60.0, speculation=spec(2.0, 1.4)), level(8, 90.0, speculation=spec(2.0, 1.9)))
    void = (level(1, 60.0, speculation=spec(2.0, 9.0), void="client"),)
    tried = [(other(1), at), (other(5, **{"tp-size": 2}), at), (other(2), void), (candidate({}), at)]
    assert depths_measured(situation(level=1), tried) == {1: 1.4}
    vllm = candidate({"speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}'}, "vllm")
    deeper = candidate({"speculative-config": '{"method": "ngram", "num_speculative_tokens": 5}'}, "vllm")
    assert depths_measured(situation(vllm, level=8), [(deeper, at)]) == {5: 1.9}


def test_a_tree_becomes_a_chain_of_the_same_depth() -> None:
    tree = candidate({**EAGLE3, "speculative-eagle-topk": 4, "speculative-num-draft-tokens": 16})
    found = proposal(
        "tune-draft-tokens", situation(tree, level=32, results=(level(32, 60.0, speculation=spec(1.5, 2.0)),))
    )
    assert (found.candidate.arg("speculative-eagle-topk"), found.candidate.arg("speculative-num-steps")) == (1, 3)
    assert "4 tokens a step instead of 16" in found.said


def by_level() -> tuple[Any, ...]:
    return (
        level(1, 80.0, speculation=spec(2.0, 1.6)),
        level(8, 300.0, speculation=spec(2.0, 1.8)),
        level(32, 800.0, speculation=spec(2.0, 2.4)),
        level(128, 900.0, speculation=spec(2.0), fired=fired("skip-level")),
    )


def test_speculation_is_kept_where_it_pays_and_only_there() -> None:
    who = candidate({"speculative-config": '{"method": "ngram", "num_speculative_tokens": 4}'}, "vllm")
    known = situation(who, level=8, results=by_level(), baseline={8: level(8, 250.0)}, version="0.26")
    found = proposal("no-speculation-above", known)
    assert "[[1, 8, 4], [9, 128, 0]]" in str(found.candidate.arg("speculative-config"))
    assert found.said == "it pays up to concurrency 8 and loses from 32"
    assert found.gain == pytest.approx(0.2)


def test_speculation_that_pays_nowhere_below_is_not_kept() -> None:
    assert speculation_by_level(by_level()) == ([1, 8], [32, 128])
    assert work_out(move("no-speculation-above"), situation(level=32, results=by_level()[2:])) is None


def test_a_start_that_is_mended_is_expected_to_bring_less_than_a_server_that_runs() -> None:
    effective = Effective(memory_share=0.88)
    start = proposal("memory-down", situation(effective=effective))
    load = proposal("memory-down", situation(effective=effective, level=32))
    assert start.candidate.arg("mem-fraction-static") == 0.83
    assert (start.gain, load.gain) == (USUAL_GAIN * REPAIR_CHANCE, USUAL_GAIN)


def test_only_the_flag_that_the_server_refused_is_replaced() -> None:
    who = candidate({"cuda-graph-max-bs": 64, "nsa-decode-backend": "x"})
    line = "launch_server.py: error: unrecognized arguments: --cuda-graph-max-bs 64"
    found = proposal("replace-flag", situation(who, refused=(line,)))
    assert found.candidate.launch.args == {"cuda-graph-max-bs-decode": 64, "nsa-decode-backend": "x"}
    assert found.candidate.name == "eagle3+cuda-graph-max-bs-decode-64"
    assert found.said == "--cuda-graph-max-bs is called --cuda-graph-max-bs-decode there"


def test_a_usage_text_that_names_every_flag_refuses_none() -> None:
    usage = "usage: launch_server.py [-h] [--cuda-graph-max-bs N] [--tp-size N]"
    assert work_out(move("replace-flag"), situation(candidate({"cuda-graph-max-bs": 64}), refused=(usage,))) is None


def test_a_flag_that_nobody_renamed_proposes_nothing_and_says_nothing() -> None:
    line = "error: unrecognized arguments: --no-such-flag"
    assert work_out(move("replace-flag"), situation(candidate({"no-such-flag": 1}), refused=(line,))) is None


def test_a_flag_that_is_gone_is_taken_out() -> None:
    line = "error: unrecognized arguments: --crash-on-nan"
    found = proposal("replace-flag", situation(candidate({"crash-on-nan": True}), refused=(line,)))
    assert found.candidate.id == candidate({}).id
    assert found.candidate.name == "eagle3+without-crash-on-nan"


def test_a_rule_may_still_say_itself_what_to_change() -> None:
    found = work_out(fired("propose", set={"args.max-running-requests": 256}), situation())
    assert isinstance(found, Proposal)
    assert found.candidate.name == "eagle3+max-running-requests-256"
    same = work_out(fired("propose", set={"args.speculative-num-steps": 3}), situation())
    assert same == NotProposed("the candidate has these settings already")


# --- what speaks against one

ROOT = Tried(1, candidate(), None, same_benchmark=True, verdict=None, started=True)
LIMITS = Limits(left=8, depth=2)


def changed(who: Candidate, **settings: Any) -> Proposal:
    dotted = {f"args.{key.replace('_', '-')}": value for key, value in settings.items()}
    return Proposal(derive(who, dotted, "because"), dotted, "because", 0.1)


def tried(number: int, who: Candidate, parent: int | None = None, cause: str = "", **more: Any) -> Tried:
    table: dict[str, Any] = {"same_benchmark": True, "verdict": Verdict.FAIL, "started": not cause}
    return Tried(number, who, parent, cause=cause, **{**table, **more})


def test_what_nobody_tried_has_nothing_against_it() -> None:
    assert objection(changed(ROOT.candidate, tp_size=2), ROOT, [], LIMITS) == ""


def test_a_combination_that_was_tried_or_waits_is_not_proposed_again() -> None:
    one = changed(ROOT.candidate, tp_size=2)
    assert "tried before: trial 7" in objection(one, ROOT, [tried(7, one.candidate)], LIMITS)
    assert "waits already: trial 7" in objection(one, ROOT, [tried(7, one.candidate, verdict=None)], LIMITS)
    assert objection(one, ROOT, [tried(7, one.candidate, same_benchmark=False)], LIMITS) == ""


def test_a_change_that_kept_one_of_the_family_from_starting_is_not_made_to_another() -> None:
    x = changed(ROOT.candidate, max_running_requests=256)
    y = changed(ROOT.candidate, page_size=64)
    history = [ROOT, tried(2, x.candidate, 1, cause="oom-in-capture")]
    parent = tried(3, y.candidate, 1)
    assert "kept trial 2 of this family from starting (oom-in-capture)" in objection(
        changed(parent.candidate, max_running_requests=256), parent, history, LIMITS
    )
    assert objection(changed(parent.candidate, max_running_requests=128), parent, history, LIMITS) == ""


def test_a_failed_change_is_mended_and_no_matter_of_another_family() -> None:
    x = changed(ROOT.candidate, max_running_requests=256)
    failed = tried(2, x.candidate, 1, cause="oom-in-capture")
    assert objection(changed(x.candidate, mem_fraction_static=0.8), failed, [ROOT], LIMITS) == ""
    other = tried(5, candidate({"tp-size": 2}, name="base"))
    assert objection(changed(other.candidate, max_running_requests=256), other, [ROOT, failed], LIMITS) == ""


def test_a_trial_that_failed_by_its_speed_or_by_an_error_of_the_host_bars_no_change() -> None:
    x = changed(ROOT.candidate, max_running_requests=256)
    y = tried(3, changed(ROOT.candidate, page_size=64).candidate, 1)
    again = changed(y.candidate, max_running_requests=256)
    assert objection(again, y, [ROOT, tried(2, x.candidate, 1)], LIMITS) == ""
    error = tried(2, x.candidate, 1, cause="unknown", verdict=Verdict.ERROR)
    assert objection(again, y, [ROOT, error], LIMITS) == ""


def test_a_chain_of_follow_ups_ends_and_so_does_their_number() -> None:
    second = tried(2, changed(ROOT.candidate, page_size=64).candidate, 1)
    third = tried(3, changed(second.candidate, tp_size=2).candidate, 2)
    assert objection(changed(second.candidate, dp_size=2), second, [ROOT], LIMITS) == ""
    assert "follow-up 3 in a chain" in objection(changed(third.candidate, dp_size=2), third, [ROOT, second], LIMITS)
    assert "used up" in objection(changed(ROOT.candidate, dp_size=2), ROOT, [], Limits(left=0, depth=2))


def test_memory_is_not_bisected() -> None:
    """Out of memory at 0.90, too little for the KV cache at 0.85: nothing between is tried."""
    full = tried(1, candidate({"mem-fraction-static": 0.9}), cause="oom-in-capture")
    small = tried(2, candidate({"mem-fraction-static": 0.85}), 1, cause="kv-too-small")
    up = changed(small.candidate, mem_fraction_static=0.88)
    said = objection(up, small, [full], Limits(left=8, depth=9))
    assert "no share of the memory fits: trial 1 ran out of it, and trial 2 had too little" in said
    assert objection(up, small, [tried(1, candidate({"tp-size": 8}), cause="oom-in-capture")], LIMITS) == ""
    assert objection(changed(full.candidate, mem_fraction_static=0.85), full, [], LIMITS) == ""


def test_the_most_gain_for_a_second_of_gpu_time_comes_first() -> None:
    def one(name: str, gain: float, gpu_s: float) -> Proposal:
        return Proposal(candidate(name=name), {}, "", gain, gpu_s)

    found = ordered([one("b", 0.1, 100.0), one("c", 0.3, 600.0), one("d", 0.5, 500.0), one("a", 0.1, 100.0)])
    assert [p.candidate.name for p in found] == ["a", "b", "d", "c"]


# --- levels that are request rates


@pytest.mark.parametrize("name", ["lift-running-cap", "no-speculation-above"])
def test_nothing_is_set_to_a_rate_as_if_so_many_requests_ran(name: Move) -> None:
    assert "levels are rates" in why_not(name, situation(levels=(), level=20))


def test_at_a_rate_graphs_are_raised_to_what_may_well_run() -> None:
    """36 run on average: three standard deviations of a Poisson number above that are 54, which SGLang rounds up to 56."""
    ran = level(20, 849.0, running=36.0, load="request-rate")
    found = proposal("raise-graph-batch", situation(levels=(), level=20, results=(ran,)))
    assert found.change == {"args.cuda-graph-max-bs": 56}
    unknown = level(20, 849.0, load="request-rate")
    assert "levels are rates" in why_not("raise-graph-batch", situation(levels=(), level=20, results=(unknown,)))
