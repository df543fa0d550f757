"""`proposals`: what rules proposed, why, what it should bring, and whether it is queued."""

from typing import Any

import click

from autotuner.cli.common import State, json_option, open_state, print_json, slot_option, table
from autotuner.core.candidate import to_toml
from autotuner.core.report import duration
from autotuner.edge.proposals import ProposalRow


@click.command()
@slot_option
@json_option
@click.pass_context
def proposals(ctx: click.Context, slot: str | None, as_json: bool) -> None:
    """List what rules proposed: the candidate, the trial it comes from, why, what it should bring, what became of it.

    What is `suggested` waits for you: enqueue its file. What is `refused` says why. `autotuner policies list` shows the
    rules, and `propose` in the settings says whether their proposals are queued.

    \b
    Examples:
      autotuner proposals
      autotuner proposals --json
    """
    state = open_state(ctx)
    found = [(row, _row(state, row)) for name in state.slots(slot) for row in state.store.proposals.of_slot(name)]
    if as_json:
        print_json([data for _, data in found])
        return
    if not found:
        click.echo("nothing was proposed")
        return
    click.echo(table([_cells(data) for _, data in found], ("proposal", "from", "expected", "takes", "state", "rule")))
    for _, data in found:
        click.echo(f"\n{data['name'] or data['rule']}: {data['reason']}")
        if data["why"]:
            click.echo(f"  {data['state']}: {data['why']}")
        elif data["state"] == "suggested":
            click.echo(f"  autotuner enqueue {data['file']}")


def _row(state: State, row: ProposalRow) -> dict[str, Any]:
    """One proposal for programs; `gain` is a ratio less 1."""
    parent = state.store.trial(row.trial_id)
    return {
        "name": row.name,
        "slot": row.slot,
        "parent": parent.name,
        "parent_trial": row.trial_id,
        "state": row.state.value,
        "why": row.why,
        "rule": f"{row.fired.file} / {row.fired.rule}",
        "move": row.fired.move,
        "level": row.level,
        "reason": row.fired.sentence + (f" ({row.said})" if row.said else ""),
        "gain": row.gain,
        "gpu_s": row.gpu_s,
        "trial": row.queued_as,
        "file": row.file,
        "toml": to_toml(row.candidate) if row.candidate else None,
        "at": row.at,
    }


def _cells(data: dict[str, Any]) -> tuple[str, ...]:
    gain = f"{100 * data['gain']:+.0f} %" if data["gain"] is not None else "-"
    takes = duration(data["gpu_s"]) if data["gpu_s"] is not None else "-"
    state = f"{data['state']} as trial {data['trial']}" if data["trial"] else data["state"]
    return (data["name"] or "-", f"{data['parent']} ({data['parent_trial']})", gain, takes, state, data["rule"])
