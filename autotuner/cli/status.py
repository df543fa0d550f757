"""`status`: what serves, what is tried, what waits."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click

from autotuner.bench.benchmark import Level, LoadKind, level_column
from autotuner.cli.common import (
    State,
    describe_slot,
    json_option,
    live_line,
    open_state,
    print_json,
    slot_option,
    table,
)
from autotuner.core.front import OnFront, described, front_of
from autotuner.core.report import duration, rate
from autotuner.core.state import LaunchState, TrialState
from autotuner.edge import clock
from autotuner.edge.rows import Trial
from autotuner.known import benchmark_of


@dataclass(frozen=True)
class _Figure:
    """A figure in the table of trials: its name, its key in a trial's row, and how its numbers are written."""

    head: str
    key: str
    text: Callable[[float | None], str]


_OUTPUT = _Figure("tok/s", "output_tok_s", rate)
_GOODPUT = _Figure("goodput req/s", "goodput_req_s", lambda value: "-" if value is None else f"{value:.2f}")


@click.command()
@click.option("--all", "show_all", is_flag=True, help="Every trial, not the last ten alone.")
@click.option("--follow", "-f", is_flag=True, help="Keep one live line until interrupted.")
@slot_option
@json_option
@click.pass_context
def status(ctx: click.Context, show_all: bool, follow: bool, slot: str | None, as_json: bool) -> None:
    """Say what is serving, what is being tried, and what waits.

    \b
    Examples:
      autotuner status
      autotuner status --follow
      autotuner status --json | jq .slots
    """
    state = open_state(ctx)
    if follow:
        _follow(state, state.slot(slot))
        return
    seen = {name: slot_status(state, name) for name in state.slots(slot)}
    if as_json:
        pid = state.daemon_pid
        print_json({"daemon": {"running": pid is not None, "pid": pid, **_trouble(state)}, "slots": seen})
        return
    pid = state.daemon_pid
    click.echo(f"daemon: running, pid {pid}" if pid is not None else "daemon: not running (autotuner daemon)")
    if trouble := _trouble(state)["trouble"]:
        click.echo(f"trouble: {trouble}")
    for name, row in seen.items():
        _print_slot(state, name, row, show_all=show_all)


def slot_status(state: State, name: str) -> dict[str, Any]:
    """Given a slot, return all that `status --json` says about it."""
    store = state.store
    row, ladder = store.slot(name), store.ladder(name)
    live = state.status().get("slots", {}).get(name, {})
    serving = next((r for r in store.open_launches(name) if r.state is LaunchState.SERVING), None)
    trial = store.trial_in_hand(name)
    return {
        "host": state.settings.slots[name].host,
        "nodes": _nodes(state, name, live),
        "endpoint": state.settings.slots[name].place.url,
        "best_known": {"name": ladder[0][1], "candidate": ladder[0][0], "trial": ladder[0][2]} if ladder else None,
        "serving": {
            "name": serving.name,
            "launch": serving.id,
            "is_best_known": bool(ladder) and serving.candidate_id == ladder[0][0],
            "verified": serving.id in live.get("verified", []),
            "gone": bool(live) and serving.id not in live.get("living", []),
        }
        if serving
        else None,
        "trial": {"id": trial.id, "name": trial.name, "aim": trial.aim} if trial else None,
        "queue": [{"id": t.id, "name": t.name, "aim": t.aim} for t in store.queue(name)],
        "decision": live.get("sentence", ""),
        "live": live.get("live", {}),
        "paused": row.paused,
        "hands_off": row.hands_off,
        "stopped": row.stopped,
        "degraded": row.degraded,
        "blocked": row.blocked,
        "restore_wanted": row.restore_wanted,
        "objective": state.settings.objective_in_words(name),
        "trials": [trial_row(state, t) for t in store.trials(name) if t.state is TrialState.DONE],
        "pareto_front": [asdict(row) for row in _front(state, name)],
    }


def _nodes(state: State, name: str, live: dict[str, Any]) -> list[dict[str, Any]]:
    """The ranks of a slot over several nodes; `alive` is None where no daemon has looked at a launch."""
    slot, seen = state.settings.slots[name], live.get("ranks") or []
    if not slot.nodes:
        return []
    lives = [rank["alive"] for rank in seen] if len(seen) == len(slot.nodes) else [None] * len(slot.nodes)
    return [
        {"rank": rank, "host": node.host, "gpus": list(node.gpus), "alive": alive}
        for rank, (node, alive) in enumerate(zip(slot.nodes, lives, strict=True))
    ]


def trial_row(state: State, trial: Trial) -> dict[str, Any]:
    """Given a concluded trial, return the row that tables show."""
    results = state.store.results(trial.id)
    return {
        "id": trial.id,
        "name": trial.name,
        "verdict": str(trial.verdict),
        "promoted": trial.promoted,
        "is_baseline": trial.is_baseline,
        "confirms": trial.confirms,
        "aim": trial.aim,
        "load": benchmark_of(trial).load,
        "output_tok_s": {r.concurrency: round(r.figures.output_tok_s, 1) for r in results},
        "goodput_req_s": {
            r.concurrency: round(r.figures.goodput_req_s, 3) for r in results if r.figures.goodput_req_s is not None
        },
        "accept_len": {
            r.concurrency: round(r.speculation.accept_len.mean, 3)
            for r in results
            if r.speculation and r.speculation.accept_len
        },
        "reason": trial.reasons[0] if trial.reasons else "",
        "rule": _rule(state, trial),
        "took_s": round(trial.busy_s, 1),
        "entry": trial.entry,
    }


def trials_table(state: State, trials: list[Trial]) -> str:
    """Given concluded trials, return them as a table: what was tried, how fast, what came of it."""
    rows = [trial_row(state, trial) for trial in trials]
    columns = sorted({(row["load"], level) for row in rows for level in row["output_tok_s"]})
    shown = [_shown(rows, load, level) for load, level in columns]
    heads = (level_column(*column, figure.head) for column, figure in zip(columns, shown, strict=True))
    header = ("trial", "candidate", *heads, "accept len", "verdict", "took", "why")
    body = []
    for row in rows:
        accept = "/".join(f"{value:.2f}" for value in row["accept_len"].values()) or "-"
        verdict = row["verdict"] + (" (best-known)" if row["promoted"] else "")
        figures = [
            figure.text(row[figure.key].get(level)) if row["load"] == load else "-"
            for (load, level), figure in zip(columns, shown, strict=True)
        ]
        why = row["rule"] or ("promoted" if row["promoted"] else "measured to the end")
        why += f"; {row['aim']}" if row["aim"] else ""
        body.append((str(row["id"]), row["name"], *figures, accept, verdict, duration(row["took_s"]), why))
    return table(body, header)


def _shown(rows: list[dict[str, Any]], load: LoadKind, level: Level) -> _Figure:
    """What a column shows, and its key: where requests are sent at a rate, goodput if it is known."""
    known = any(row["load"] == load and level in row["goodput_req_s"] for row in rows)
    return _GOODPUT if known and load != "concurrency" else _OUTPUT


def _rule(state: State, trial: Trial) -> str:
    if trial.ended is not None:
        return trial.ended.rule
    return next((r.fired.rule for r in state.store.results(trial.id) if r.fired), "")


def _print_slot(state: State, name: str, row: dict[str, Any], *, show_all: bool) -> None:
    best, serving = row["best_known"], row["serving"]
    click.echo(f"\nslot {name} at {state.settings.url_of(name)}")
    click.echo(f"  best-known: {best['name'] if best else 'none yet'}")
    if serving:
        proof = "generated tokens" if serving["verified"] else "not verified since the daemon started"
        proof = "its process has ended" if serving["gone"] else proof
        kind = "the best-known" if serving["is_best_known"] else "a candidate"
        click.echo(f"  serving:    {serving['name']} ({kind}, {proof})")
    else:
        click.echo("  serving:    nothing")
    if row["nodes"]:
        words = {True: " (lives)", False: " (has ended)", None: ""}
        ranks = (f"rank {n['rank']} on {n['host']}{words[n['alive']]}" for n in row["nodes"])
        click.echo(f"  nodes:      {', '.join(ranks)}")
    click.echo(f"  now:        {describe_slot(state.status(), name, clock.monotonic_s())}")
    click.echo(f"  objective:  {row['objective']}")
    for key in ("paused", "hands_off", "stopped", "degraded", "blocked"):
        if row[key]:
            click.echo(f"  {key.replace('_', ' ')}: {row[key]}")
    if row["trial"] and row["trial"]["aim"]:
        click.echo(f"  trial:      {row['trial']['id']}, {row['trial']['name']}: {row['trial']['aim']}")
    waiting = [f"{t['name']}: {t['aim']}" if t["aim"] else t["name"] for t in row["queue"]]
    click.echo(
        f"  queue:      {len(waiting)} waiting"
        + (f" ({', '.join(waiting[:5])}{', …' if len(waiting) > 5 else ''})" if waiting else "")
    )
    done = [t for t in state.store.trials(name) if t.state is TrialState.DONE]
    if done:
        click.echo("")
        click.echo(trials_table(state, done if show_all else done[-10:]))
    found = _front(state, name)
    if len(found) > 1:
        click.echo("\nno single winner over all levels:")
        for line in described(found):
            click.echo(f"  {line}")


def _front(state: State, name: str) -> tuple[OnFront, ...]:
    """The front under the benchmark that was used last: figures of different benchmarks do not compare."""
    done = [t for t in state.store.trials(name) if t.state is TrialState.DONE]
    return front_of(state.store.bases(name, done[-1].benchmark_hash)) if done else ()


def _trouble(state: State) -> dict[str, str]:
    return {"trouble": str(state.status().get("trouble", ""))}


def _follow(state: State, name: str) -> None:
    with live_line() as show:
        try:
            while True:
                show(describe_slot(state.status(), name, clock.monotonic_s()))
                clock.pause(0.3)
        except KeyboardInterrupt:
            return
