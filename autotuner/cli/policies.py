"""`policies`: list the stop rules, explain one, list the facts they may use, try others on what was recorded."""

from pathlib import Path
from typing import Any

import click

from autotuner.cli.backtesting import (
    Backtest,
    open_store,
    outcomes_data,
    outcomes_of,
    show_outcomes,
    wanted_objective,
    with_objective,
)
from autotuner.cli.common import json_option, open_settings, open_state, print_json, table
from autotuner.core.confirm import Noise
from autotuner.core.objective import Objective
from autotuner.core.policy import FACTS, Policy, used_facts
from autotuner.core.source import nearest
from autotuner.edge.campaigns import is_campaign, read_campaign
from autotuner.errors import NotFound
from autotuner.settings import Settings, load_policies, policies_in
from autotuner.shipped import folder as shipped_folder


@click.group()
def policies() -> None:
    """List, explain and try the stop rules."""


@policies.command("list")
@json_option
@click.pass_context
def list_(ctx: click.Context, as_json: bool) -> None:
    """List the rules in force; without settings, the shipped ones."""
    loaded = _in_force(_settings(ctx))
    if as_json:
        print_json([{"file": p.file, "sha256": p.sha256, "rules": [r.model_dump() for r in p.rules]} for p in loaded])
        return
    rows = [
        (p.file, r.name, r.on, str(r.looks), r.action + (" (dry run)" if r.dry_run else ""))
        for p in loaded
        for r in p.rules
    ]
    click.echo(table(rows, ("file", "rule", "looked at", "looks", "action")))


@policies.command()
@click.argument("rule")
@click.pass_context
def explain(ctx: click.Context, rule: str) -> None:
    """Explain RULE: its condition, the facts it uses, what it does."""
    rules = [(p, r) for p in _in_force(_settings(ctx)) for r in p.rules]
    found = [(p, r) for p, r in rules if r.name == rule]
    if not found:
        hint = nearest(rule, [r.name for _, r in rules]) or "list them: autotuner policies list"
        raise NotFound(f"there is no rule called {rule} ({hint})")
    policy, chosen = found[0]
    click.echo(f"{chosen.name} ({policy.file}, sha256 {policy.sha256[:16]})")
    click.echo(f"  looked at: {chosen.on}; must hold {chosen.looks} looks in a row")
    click.echo(f"  condition: {' '.join(chosen.when.split())}")
    click.echo(
        f"  action:    {chosen.action}, verdict {chosen.verdict}"
        + (" (dry run: noted, not obeyed)" if chosen.dry_run else "")
    )
    if chosen.action == "propose":
        changes = ", ".join(f"{key} = {value}" for key, value in chosen.set.items())
        click.echo(f"  proposes:  {chosen.move or changes}")
    click.echo(f"  says:      {chosen.sentence}")
    if chosen.advice:
        click.echo(f"  advice:    {chosen.advice}")
    names = set(used_facts(chosen))
    rows = [(f.name, f.unit or "-", f.meaning, f.absent) for f in FACTS if f.name in names]
    click.echo("\n" + table(rows, ("fact", "unit", "meaning", "absent")))


@policies.command()
@json_option
def facts(as_json: bool) -> None:
    """List every fact that a rule may use, with its unit, and when it is absent."""
    if as_json:
        print_json(
            [
                {"name": f.name, "type": f.kind.__name__, "unit": f.unit, "meaning": f.meaning, "absent": f.absent}
                for f in FACTS
            ]
        )
        return
    rows = [(f.name, f.kind.__name__, f.unit or "-", f.meaning, f.absent) for f in FACTS]
    click.echo(table(rows, ("fact", "type", "unit", "meaning", "absent")))


@policies.command()
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--policies",
    "rules_dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="The rules to try, the same as FOLDER; else those in force, else the shipped ones.",
)
@click.option(
    "--campaign",
    "campaigns",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="A recorded campaign, or a daemon's state folder; may be given several times.",
)
@click.option(
    "--objective", callback=wanted_objective, metavar="WHAT", help="level=N or mean, in place of the campaign's own."
)
@json_option
@click.pass_context
def test(
    ctx: click.Context,
    folder: Path | None,
    rules_dir: Path | None,
    campaigns: tuple[Path, ...],
    objective: Objective | None,
    as_json: bool,
) -> None:
    """Try the rules in FOLDER, or those in force, on what was recorded.

    Without --campaign, on every level in this host's store: what would end otherwise, and what it saves. A level that a
    rule ended early has no record of how it had gone on; where the rules let it go on, that is said and nothing more. A
    rule that would end a level of a trial that passed is named first.

    With --campaign, each recorded campaign is told again: every candidate's verdict, the rule and level it ended at, the
    causes of its loss, the load used of the whole benchmark, and the best-known at the end. Rules other than the shipped
    ones are compared with those: decisions that change, GPU minutes saved or lost, and wrong stops, which are candidates that
    were stopped although by their whole figures they would have won by 3 % or more.

    \b
    Examples:
      autotuner policies test
      autotuner policies test my-policies
      autotuner policies test --campaign examples/campaigns/kimi-k2.5
      autotuner policies test --campaign examples/campaigns/kimi-k2.5 --objective level=1
      autotuner policies test --policies my-policies --campaign /var/lib/autotuner --campaign my-campaign
    """
    if folder is not None and rules_dir is not None and folder != rules_dir:
        raise click.UsageError("FOLDER and --policies are the same thing; give one")
    if objective is not None and not any(is_campaign(where) for where in campaigns):
        raise click.UsageError("--objective is for recorded campaigns; name one with --campaign")
    given = rules_dir or folder
    if not campaigns:
        state = open_state(ctx)
        outcomes, unknown = outcomes_of(state.store, policies_in(given) if given else load_policies(state.settings))
        if as_json:
            print_json(outcomes_data(outcomes))
        else:
            show_outcomes(outcomes, unknown)
        return
    settings = _settings(ctx)
    shipped = policies_in(shipped_folder("policies"))
    rules = policies_in(given) if given else _in_force(settings)
    budget = (settings.noise if settings else Noise()).error_budget
    data: list[Any] = []
    for number, where in enumerate(campaigns):
        if number and not as_json:
            click.echo("\n" + "=" * 72 + "\n")
        if is_campaign(where):
            recorded = read_campaign(where)
            recorded = with_objective(recorded, objective)
            told = Backtest(recorded, rules, shipped, budget)
            data.append(told.as_data())
            if not as_json:
                told.show()
        else:
            outcomes, unknown = outcomes_of(open_store(where), rules)
            data.append({"campaign": str(where), "left_out": unknown, "levels": outcomes_data(outcomes)})
            if not as_json:
                click.echo(f"{where}:")
                show_outcomes(outcomes, unknown)
    if as_json:
        print_json(data)


def _in_force(settings: Settings | None) -> tuple[Policy, ...]:
    """The rules that the settings name, the shipped ones where there are no settings."""
    return load_policies(settings) if settings else policies_in(shipped_folder("policies"))


def _settings(ctx: click.Context) -> Settings | None:
    """The settings, None where there are none and none were named: rules and recorded campaigns need no host."""
    try:
        return open_settings(ctx)[1]
    except NotFound:
        if ctx.obj:
            raise
        return None
