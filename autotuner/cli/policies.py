"""`policies`: list the stop rules, explain one, list the facts they may use."""

import click

from autotuner.cli.common import json_option, open_settings, print_json, table
from autotuner.core.policy import FACTS, used_facts
from autotuner.errors import NotFound
from autotuner.settings import load_policies


@click.group()
def policies() -> None:
    """List, explain and check the stop rules."""


@policies.command("list")
@json_option
@click.pass_context
def list_(ctx: click.Context, as_json: bool) -> None:
    """List the rules in force."""
    _, settings = open_settings(ctx)
    loaded = load_policies(settings)
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
    _, settings = open_settings(ctx)
    found = [(p, r) for p in load_policies(settings) for r in p.rules if r.name == rule]
    if not found:
        raise NotFound(f"there is no rule called {rule}; list them: autotuner policies list")
    policy, chosen = found[0]
    click.echo(f"{chosen.name} ({policy.file}, sha256 {policy.sha256[:16]})")
    click.echo(f"  looked at: {chosen.on}; must hold {chosen.looks} looks in a row")
    click.echo(f"  condition: {' '.join(chosen.when.split())}")
    click.echo(
        f"  action:    {chosen.action}, verdict {chosen.verdict}"
        + (" (dry run: noted, not obeyed)" if chosen.dry_run else "")
    )
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
