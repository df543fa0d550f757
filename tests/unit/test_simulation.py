"""Simulated campaigns are worked by the product's own decisions, and what is reported of them can go wrong."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from autotuner.cli import main
from autotuner.core.objective import Objective
from autotuner.core.policy import load_policy
from autotuner.core.source import Source
from autotuner.settings import policies_in
from autotuner.shipped import folder
from autotuner.simulation.campaign import CampaignEnd, TrialEnd, full_s, run_campaign, true_score
from autotuner.simulation.level import steady_s, warm_up_s
from autotuner.simulation.tally import tally
from autotuner.simulation.world import FAMILIES, Draft, Host, Plain, Server, World, make_world

SHIPPED = policies_in(folder("policies"))
BASE = Server("base", Plain("p", 0.010, 0.0001))
QUIET = Host(launch_noise=0.003, window_noise=0.01, correlation=0.0, prompt_noise=0.02)


def world(*candidates: Server, host: Host = QUIET) -> World:
    return World(host, BASE, candidates, 60.0)


def faster(factor: float) -> Server:
    return Server(f"x{factor}", Plain("p", 0.010 / factor, 0.0001 / factor))


def drafter(accept_len: float, cost: float, cap: int | None = None) -> Server:
    return Server("drafter", BASE.plain, Draft(3, accept_len, cost, 0.0, 0.0), cap)


def test_a_seed_gives_the_same_campaign_every_time() -> None:
    runs = [run_campaign(make_world(3), Objective(), SHIPPED, 3) for _ in range(2)]
    assert runs[0] == runs[1]
    assert run_campaign(make_world(4), Objective(), SHIPPED, 4) != runs[0]


def test_a_clearly_faster_server_is_the_best_known_at_the_end() -> None:
    end = run_campaign(world(faster(0.8), faster(1.25), faster(0.9)), Objective(), SHIPPED, 1)
    assert end.best.name == "x1.25"
    assert [trial.promoted for trial in end.trials] == [False, True, False]
    assert not end.missed


def test_a_slower_server_is_stopped_long_before_its_end() -> None:
    end = run_campaign(world(faster(0.6)), Objective(), SHIPPED, 1)
    (trial,) = end.trials
    assert trial.rule == "cannot-win"
    assert trial.seconds < 0.1 * trial.full_s


@pytest.mark.parametrize(
    ("server", "rule"),
    [
        (drafter(1.0, 2.0), "drafter-broken"),
        (drafter(1.6, 2.4), "below-break-even"),
        (drafter(2.4, 5.5), "below-break-even"),
        (drafter(2.6, 1.6, cap=16), "cannot-win-speculating"),
    ],
)
def test_a_losing_drafter_is_stopped_by_the_rule_that_says_why(server: Server, rule: str) -> None:
    (trial,) = run_campaign(world(server), Objective(), SHIPPED, 1).trials
    assert trial.rule == rule


def test_rules_that_stop_too_early_are_found_out() -> None:
    hasty = """
description = "hasty"
[[rule]]
name = "hasty"
on = "window"
when = "best.ratio < 1.3"
action = "skip-level"
sentence = "slow"
"""
    end = run_campaign(world(faster(1.2)), Objective(), (load_policy(Source("h.toml", hasty)),), 1)
    (trial,) = end.trials
    assert trial.wrongly_stopped
    assert end.missed
    assert tally([end]).wrong_stops == 1


def test_without_rules_everything_runs_to_its_end() -> None:
    end = run_campaign(world(faster(0.5), drafter(1.0, 2.0)), Objective(), (), 1)
    assert [trial.rule for trial in end.trials] == ["", ""]
    assert end.seconds == pytest.approx(end.full_s, rel=0.02)


def test_true_rates_are_running_requests_times_accept_length_over_the_step() -> None:
    server = drafter(2.0, 1.5, cap=48)
    assert server.running(128) == 48
    assert server.tok_s(128) == pytest.approx(48 * 2.0 / (1.5 * (0.010 + 0.0048)))
    assert server.hopeless(128) is False
    assert drafter(2.0, 4.1).hopeless(1) is True
    assert true_score(Objective(level=1), faster(1.1), BASE) == pytest.approx(1.1)


def test_a_level_to_its_end_is_its_warm_up_and_a_minute_or_as_long_as_one_round_of_answers() -> None:
    slow = Server("slow", Plain("p", 0.5, 0.0))
    assert steady_s(BASE, 1) == 60.0
    assert steady_s(slow, 1) == 64.0
    assert warm_up_s(BASE, 1) == pytest.approx(128 * 0.0101)
    assert full_s(BASE) == pytest.approx(240 + sum(warm_up_s(BASE, level) for level in (1, 8, 32, 128)))


def test_worlds_differ_and_hold_candidates_of_every_kind() -> None:
    worlds = [make_world(seed) for seed in range(60)]
    kinds = {server.name.rsplit("-", 1)[0] for one in worlds for server in one.candidates}
    assert kinds == {"variant", "no-graphs", "drafter", "n-gram"}
    assert {one.base.plain.name for one in worlds} == {family.name for family in FAMILIES}
    drafts = [server.draft for one in worlds for server in one.candidates if server.draft]
    assert any(draft.accept_len == 1.0 for draft in drafts)
    assert all(1.0 <= draft.accept_len <= draft.depth + 1 for draft in drafts)


def test_figures_count_what_went_wrong() -> None:
    def trial(**more: object) -> TrialEnd:
        one = TrialEnd(BASE, 1.0, 10.0, 100.0, "", promoted=False, hopeless=False)
        return dataclasses.replace(one, **more)  # type: ignore[arg-type]

    trials = (
        trial(rule="r", true_ratio=1.03),
        trial(rule="r", true_ratio=1.029),
        trial(promoted=True, true_ratio=0.999),
        trial(promoted=True, true_ratio=1.2),
        trial(hopeless=True, rule="r", true_ratio=0.5),
    )
    end = CampaignEnd(trials, BASE, 0.9, 50.0, 7, 200.0, 6, 0.8)
    found = tally([end, dataclasses.replace(end, best_ratio=0.98, seconds=70.0)])
    assert (found.wrong_stops, found.wrong_promotions, found.missed, found.stopped) == (2, 2, 1, 6)
    assert (found.time_ratio, found.hopeless_ratio, found.hopeless_worst) == (0.3, 0.1, 0.1)
    assert (found.wrong_stop_ratio, found.wrong_promotion_ratio) == (0.2, 0.5)
    assert (found.found, found.found_at_random) == (pytest.approx(0.94), pytest.approx(0.8))


def test_the_shipped_rules_are_right_and_worth_it_on_a_slice_of_the_simulation() -> None:
    """`make simulate` does 2,000; the limits here leave room for 30."""
    result = CliRunner().invoke(main, ["simulate", "-n", "30", "--seed", "5000", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["campaigns"] == 30
    assert found["wrong_stops"] <= 1
    assert found["wrong_promotions"] == 0
    assert found["time_ratio"] < 0.35
    assert found["hopeless_ratio"] < 0.10
    assert found["found"] > found["found_at_random"] > 0.6
