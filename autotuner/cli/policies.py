"""`policies`: list the stop rules, explain one, list the facts they may use, try others on what was recorded."""

from dataclasses import asdict
from pathlib import Path

import click

from autotuner.cli.common import State, json_option, open_settings, open_state, print_json, table
from autotuner.core.backtest import Outcome, end_of
from autotuner.core.policy import FACTS, Policy, used_facts
from autotuner.core.report import duration
from autotuner.core.state import Verdict
from autotuner.errors import NotFound
from autotuner.settings import load_policies


@click.group()
def policies() -> None:
    """List, explain and try the stop rules."""


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
@json_option
@click.pass_context
def test(ctx: click.Context, folder: Path | None, as_json: bool) -> None:
    """Try the rules in FOLDER, or those in force, on every level on record: what would end otherwise, and what it saves.

    A level that a rule ended early has no record of how it had gone on; where the rules let it go on, that is said and
    nothing more. A rule that would end a level of a trial that passed is named first.

    \b
    Examples:
      autotuner policies test
      autotuner policies test my-policies
    """
    state = open_state(ctx)
    rules = load_policies(state.settings.model_copy(update={"policies_dir": folder}) if folder else state.settings)
    outcomes, unknown = _outcomes(state, rules)
    if as_json:
        print_json([{**asdict(o), "saved_s": round(o.saved_s, 1), "changed": o.changed} for o in outcomes])
        return
    lost = [o for o in outcomes if o.loses_winner]
    for outcome in lost:
        click.echo(
            f"would lose {outcome.name} at concurrency {outcome.level}: {outcome.now.rule} ends a trial that passed"
        )
    changed = [o for o in outcomes if o.changed]
    if changed:
        columns = ("trial", "name", "level", "then", "now", "saved")
        click.echo(table([_row(o) for o in changed], columns))
    saved = duration(abs(sum(o.saved_s for o in outcomes)))
    more = "saved" if sum(o.saved_s for o in outcomes) >= 0 else "more"
    on = sum(o.goes_on for o in outcomes)
    click.echo(
        f"{len(changed)} of {len(outcomes)} levels on record would end otherwise: {saved} of load {more}, {on} would go on"
    )
    if unknown:
        click.echo(f"{unknown} levels were left out: the rules they were looked at with are not kept")


def _outcomes(state: State, rules: tuple[Policy, ...]) -> tuple[list[Outcome], int]:
    """Every level on record under the rules of then and under these; and how many cannot be replayed."""
    kept, found, unknown = state.store.kept_policies(), [], 0
    for trial in state.store.trials():
        for result in state.store.results(trial.id):
            evidence = state.store.evidence(trial.id, result.concurrency)
            hashes = evidence.get("policies", {}).values()
            if not hashes or any(sha256 not in kept for sha256 in hashes):
                unknown += 1
                continue
            then = end_of(tuple(kept[sha256] for sha256 in hashes), evidence["looks"])
            now = end_of(rules, evidence["looks"])
            won = trial.verdict is Verdict.PASS
            found.append(Outcome(trial.id, trial.name, result.concurrency, won, then, now))
    return found, unknown


def _row(outcome: Outcome) -> tuple[str, ...]:
    then, now = (f"{end.rule or 'to its end'} at {duration(end.load_s)}" for end in (outcome.then, outcome.now))
    saved = "unknown: it goes on" if outcome.goes_on else duration(abs(outcome.saved_s))
    sign = "-" if outcome.saved_s < 0 else ""
    return (str(outcome.trial), outcome.name, str(outcome.level), then, now, f"{sign}{saved}")
