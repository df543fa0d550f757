"""`simulate`: try the stop rules on campaigns of simulated servers, in virtual time."""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import click

from autotuner.cli.common import json_option, live_line, print_json, table
from autotuner.core.objective import Objective
from autotuner.core.policy import Policy
from autotuner.settings import policies_in
from autotuner.shipped import folder
from autotuner.simulation.campaign import CampaignEnd, run_campaign
from autotuner.simulation.tally import Tally, tally
from autotuner.simulation.world import make_world

# Most operators ask for throughput; one campaign in five is for a single user, one for all levels alike.
OBJECTIVES = (
    Objective(),
    Objective(),
    Objective(),
    Objective(level=1),
    Objective(maximise="geometric_mean"),
)


@click.command()
@click.option("--campaigns", "-n", default=200, show_default=True, type=click.IntRange(1), help="How many campaigns.")
@click.option("--seed", default=0, show_default=True, help="The first campaign's seed; the others follow it.")
@click.option(
    "--policies",
    "rules",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder of rules to try; the shipped ones if none is named.",
)
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True, type=click.IntRange(1), help="Processes.")
@json_option
def simulate(campaigns: int, seed: int, rules: Path | None, jobs: int, as_json: bool) -> None:
    """Work campaigns of simulated servers with the stop rules, and say what they save and where they are wrong.

    The servers are made of recorded and published figures, with the noise that recordings show; every decision is the
    program's own. No settings, no GPU and no server are needed. A seed gives the same campaign every time.

    \b
    Examples:
      autotuner simulate
      autotuner simulate -n 2000 --policies my-policies
    """
    policies = tuple(_ending(policy) for policy in policies_in(rules or folder("policies")))
    ends: list[CampaignEnd] = []
    with ProcessPoolExecutor(jobs) as pool, live_line(quiet=as_json) as show:
        work = [(number, policies) for number in range(seed, seed + campaigns)]
        for end in pool.map(_one, work, chunksize=4):
            ends.append(end)
            if len(ends) % 20 == 0:
                show(f"{len(ends)} of {campaigns} campaigns")
        show("")
    found = tally(ends)
    if as_json:
        print_json(asdict(found))
        return
    click.echo(table(_rows(found), ("figure", "value", "of")))


def _ending(policy: Policy) -> Policy:
    """A policy without what only proposes: simulated campaigns follow no proposal, and looking costs time."""
    return replace(policy, rules=tuple(rule for rule in policy.rules if rule.action != "propose"))


def _one(work: tuple[int, tuple[Policy, ...]]) -> CampaignEnd:
    seed, policies = work
    return run_campaign(make_world(seed), OBJECTIVES[seed % len(OBJECTIVES)], policies, seed)


def _rows(found: Tally) -> list[tuple[str, ...]]:
    t = found
    return [
        ("campaigns", str(t.campaigns), f"{t.candidates} candidates, {t.stopped} stopped, {t.promoted} promoted"),
        ("wrong stops", f"{100 * t.wrong_stop_ratio:.2f} %", f"{t.wrong_stops} would have won by 3 % or more"),
        ("wrong promotions", f"{100 * t.wrong_promotion_ratio:.2f} %", f"{t.wrong_promotions} are truly worse"),
        (
            "missed winners",
            f"{100 * t.missed / t.campaigns:.2f} %",
            f"{t.missed} campaigns end on one beaten by 3 % or more",
        ),
        ("benchmark time, median", f"{100 * t.time_ratio:.1f} %", "of everything to its end"),
        ("launches, median", f"{100 * t.launch_ratio:.1f} %", "of one for each server"),
        (
            "hopeless speculation, median",
            f"{100 * t.hopeless_ratio:.1f} %",
            f"of its benchmark; {t.hopeless} candidates",
        ),
        ("hopeless speculation, worst", f"{100 * t.hopeless_worst:.1f} %", "of its benchmark"),
        ("best found", f"{t.found:.4f}", "of the best there was"),
        ("best found at random", f"{t.found_at_random:.4f}", "random order, each to its end, in the same time"),
    ]
