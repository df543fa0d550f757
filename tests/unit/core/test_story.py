"""The recorded campaigns told again: who is stopped by which rule and why, who is best, and what other rules would change."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from autotuner.core.objective import Constraints, Objective
from autotuner.core.policy import Policy, load_policy
from autotuner.core.source import Source
from autotuner.core.state import Verdict
from autotuner.core.story import Story, Told, changes, ending, tell
from autotuner.edge.campaigns import read_campaign
from autotuner.engines import ENGINES
from autotuner.settings import policies_in

ROOT = Path(__file__).resolve().parents[3]
CAMPAIGNS = ROOT / "examples" / "campaigns"
SHIPPED = policies_in(ROOT / "policies")


@cache
def story(name: str, level: int | None = None, rules: tuple[str, ...] = ()) -> Story:
    campaign = read_campaign(CAMPAIGNS / name)
    if level is not None:
        campaign = replace(campaign, objective=Objective(level=level))
    return tell(campaign, (*SHIPPED, *(house(text) for text in rules)), 0.05, ENGINES)


def house(text: str) -> Policy:
    return load_policy(Source("house.toml", f'description = "House rules"\n\n{text}'))


def told(of: Story, name: str) -> Told:
    return next(one for one in of.told if one.name == name)


def share_of(one: Told, cause: str) -> float:
    """The cause's part of the loss at the level that ended it."""
    causes = one.levels[-1].causes
    return sum(s.tok_s for s in causes if s.cause == cause) / sum(s.tok_s for s in causes)


# --- Kimi-K2.5 on eight PCIe GPUs, from a table of figures


def test_kimi_both_drafters_are_stopped_and_sglang_without_speculation_is_best() -> None:
    kimi = story("kimi-k2.5")
    assert kimi.best == "sglang-base"
    assert [ending(one) for one in kimi.told] == [
        "promoted",
        "fail by cannot-win at 128",
        "fail by below-break-even at 128",
        "fail by drafter-broken at 128",
    ]
    assert kimi.wrong_stops == ()


def test_kimi_the_cap_of_48_is_named_with_about_half_of_the_loss_and_its_candidate_proposed() -> None:
    drafter = told(story("kimi-k2.5"), "eagle3-aq-medai")
    assert share_of(drafter, "admission-cap") == pytest.approx(0.5, abs=0.02)
    assert share_of(drafter, "acceptance") == pytest.approx(0.5, abs=0.02)
    assert [p.name for p in drafter.proposals] == ["eagle3-aq-medai+max-running-requests-128"]
    assert drafter.used_s < 0.2 * drafter.full_s


def test_kimi_with_single_stream_as_the_objective_vllm_is_preferred() -> None:
    single = story("kimi-k2.5", level=1)
    assert single.best == "vllm-baseline"
    assert ending(told(single, "eagle3-own")) == "fail by drafter-broken at 1"
    assert not told(single, "eagle3-aq-medai").judgement.promote


# --- SGLang 0.5.12 on one H200, from its logs


def test_h200_the_plain_server_stays_best_at_every_level() -> None:
    for level in (1, 8, 32, 128):
        assert story("sglang-0.5.12-h200/big", level).best == "big-base"


def test_h200_the_capped_drafter_is_stopped_its_cap_named_and_lifting_it_proposed() -> None:
    capped = told(story("sglang-0.5.12-h200/big"), "big-eagle3-sim1.65-capped")
    assert ending(capped) == "fail by below-break-even at 128"
    assert capped.levels[0].used_s < 0.6 * capped.levels[0].full_s
    assert share_of(capped, "admission-cap") > 0.4
    assert [p.recorded_as for p in capped.proposals] == ["big-eagle3-sim1.65-uncapped"]


def test_h200_the_uncapped_drafter_is_stopped_too_since_no_drafter_could_pay_at_128() -> None:
    uncapped = told(story("sglang-0.5.12-h200/big"), "big-eagle3-sim1.65-uncapped")
    assert uncapped.judgement.rule is not None
    assert uncapped.judgement.rule.rule in {"below-break-even", "hopeless-at-this-level", "cannot-win-speculating"}
    spec = uncapped.levels[0].result.speculation
    assert spec is not None
    assert spec.needed is not None
    assert spec.ceiling == 4.0
    assert spec.needed > 4.0
    assert share_of(uncapped, "admission-cap") == 0


def test_h200_without_graphs_it_loses_and_the_graphs_are_named() -> None:
    for level in (1, 8, 32, 128):
        eager = told(story("sglang-0.5.12-h200/big", level), "big-no-cg")
        assert eager.judgement.verdict is Verdict.FAIL
        assert {share.cause for level in eager.levels for share in level.causes} == {"graphs-off"}


def test_h200_the_same_server_again_is_no_difference_to_act_on() -> None:
    for level in (1, 8, 32):
        again = told(story("sglang-0.5.12-h200/big", level), "big-base-again")
        assert again.judgement.verdict is Verdict.INCONCLUSIVE
        assert again.full_ratio == pytest.approx(1, abs=0.12)


def test_h200_a_random_drafter_is_broken_and_failed_starts_name_their_error() -> None:
    smol = story("sglang-0.5.12-h200/smol")
    assert ending(told(smol, "smol-eagle3-random")) == "fail by drafter-broken at 32"
    assert "refused a flag" in told(smol, "bad-flag").judgement.reasons[0]
    assert "model was not found" in told(smol, "missing-model").judgement.reasons[0]
    assert told(smol, "bad-flag").used_s == 0
    assert smol.best == "smol-base-cg"


def test_h200_a_void_level_of_the_baseline_makes_no_winner() -> None:
    """At 128 its client was the limit; without regard to that, a slower server would look 1.6 times faster."""
    smol = story("sglang-0.5.12-h200/smol", 128)
    first = told(smol, "smol-base-cg")
    assert first.judgement.verdict is Verdict.INCONCLUSIVE
    assert told(smol, "smol-eagle3-sim2.0").best != "smol-base-cg"


# --- other rules


HASTY = """
[[rule]]
name = "hasty"
on = "window"
when = "candidate.engine == 'vllm' && level.elapsed_s > 0"
action = "abandon"
sentence = "It is vLLM"
"""


def test_a_rule_that_stops_a_winner_is_a_wrong_stop_and_says_what_it_saved() -> None:
    then, now = story("kimi-k2.5", 1), story("kimi-k2.5", 1, (HASTY,))
    assert now.wrong_stops == ("vllm-baseline",)
    assert now.best == "sglang-base"
    found = {change.name: change for change in changes(then, now)}
    assert found["vllm-baseline"].then == "promoted"
    assert found["vllm-baseline"].now == "fail by hasty at 1"
    assert found["vllm-baseline"].saved_gpu_s == pytest.approx(
        8 * (told(then, "vllm-baseline").used_s - told(now, "vllm-baseline").used_s)
    )
    assert changes(then, then) == ()


def test_a_rule_that_stops_a_loser_sooner_is_no_wrong_stop() -> None:
    now = story("kimi-k2.5", 128, (HASTY,))
    assert now.wrong_stops == ()
    assert told(now, "vllm-baseline").used_s < told(story("kimi-k2.5", 128), "vllm-baseline").used_s


def test_a_dry_run_changes_nothing() -> None:
    dry = HASTY.replace('action = "abandon"', 'action = "abandon"\ndry_run = true')
    assert changes(story("kimi-k2.5", 1), story("kimi-k2.5", 1, (dry,))) == ()


def test_stopping_the_first_one_that_serves_is_held_against_the_rules_if_it_would_have_won() -> None:
    everything = HASTY.replace("candidate.engine == 'vllm' && ", "")
    now = story("kimi-k2.5", 128, (everything,))
    assert now.best == ""
    assert "sglang-base" in now.wrong_stops


def test_a_candidate_that_breaks_a_limit_would_not_have_won() -> None:
    campaign = read_campaign(CAMPAIGNS / "kimi-k2.5")
    limits = Constraints(single_stream_ratio_min=2.0)
    strict = replace(campaign, objective=Objective(level=1, constraints=limits))
    assert tell(strict, (*SHIPPED, house(HASTY)), 0.05, ENGINES).wrong_stops == ()


def test_rules_see_the_objectives_limits_and_what_breaks_one_is_no_wrong_stop() -> None:
    campaign = read_campaign(CAMPAIGNS / "kimi-k2.5")
    slow = [
        replace(trial, levels=tuple(replace(level, ttft_ms={"p99": 900.0}) for level in trial.levels))
        for trial in campaign.trials
    ]
    limits = Constraints(ttft_p99_ms_max=500)
    strict = replace(campaign, trials=tuple(slow), objective=Objective(level=128, constraints=limits))
    found = tell(strict, SHIPPED, 0.05, ENGINES)
    assert ending(found.told[0]) == "fail by ttft-above-limit at 128"
    assert (found.best, found.wrong_stops) == ("", ())


def test_a_level_that_is_not_on_record_is_said_and_decides_nothing() -> None:
    campaign = read_campaign(CAMPAIGNS / "kimi-k2.5")
    short = replace(campaign.trials[1], levels=campaign.trials[1].levels[:1])
    again = tell(replace(campaign, trials=(campaign.trials[0], short)), SHIPPED, 0.05, ENGINES)
    assert again.told[1].not_recorded == (128,)
    assert again.told[1].judgement.verdict is Verdict.INCONCLUSIVE
