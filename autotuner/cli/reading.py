"""`show`, `compare`, `why`: read what was measured and why it was decided so."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click

from autotuner.bench.benchmark import Level, LoadKind, level_cell, level_column, level_short
from autotuner.cli.benchtable import levels_table
from autotuner.cli.common import State, json_option, open_state, print_json, slot_option, table
from autotuner.core.candidate import to_toml
from autotuner.core.effective import Configuration
from autotuner.core.remarks import requests_remarks
from autotuner.core.report import duration, plus_minus, rate
from autotuner.core.topology import joined
from autotuner.core.verdict import LevelResult
from autotuner.edge.rows import LaunchRow, Trial
from autotuner.errors import NotFound
from autotuner.known import benchmark_of


@dataclass(frozen=True)
class _Figure:
    """A figure that `compare` sets side by side: its name, its keys, and how its numbers are written."""

    head: str
    mean: str
    low: str
    high: str
    text: Callable[[float], str]


_OUTPUT = _Figure("output tok/s", "output_tok_s", "low", "high", rate)
_GOODPUT = _Figure("goodput req/s", "goodput_req_s", "goodput_low", "goodput_high", "{:.2f}".format)


@click.command()
@click.argument("trial")
@click.option("--log", "show_log", is_flag=True, help="Print the server's log of its last launch.")
@click.option("--toml", "as_toml", is_flag=True, help="Print its candidate as a file, to change and enqueue.")
@click.option("--evidence", is_flag=True, help="With --json: everything the verdict rests on, raw.")
@json_option
@click.pass_context
def show(ctx: click.Context, trial: str, show_log: bool, as_toml: bool, evidence: bool, as_json: bool) -> None:
    """Show everything about one TRIAL: its number, or a candidate's name or id.

    \b
    Examples:
      autotuner show 12
      autotuner show eagle3-aq-medai --log | less
      autotuner show 12 --toml > variant.toml
      autotuner show 12 --json --evidence > evidence.json
    """
    state = open_state(ctx)
    found = state.find_trial(trial)
    launches = state.store.launches(found.slot, found.id)
    if show_log:
        _print_log(state, launches)
        return
    if as_toml:
        click.echo(to_toml(state.store.candidate(found.candidate_id)), nl=False)
        return
    if as_json:
        print_json(_trial_json(state, found, launches, evidence=evidence))
        return
    _print_trial(state, found, launches)


@click.command()
@click.argument("trials", nargs=-1)
@slot_option
@json_option
@click.pass_context
def compare(ctx: click.Context, trials: tuple[str, ...], slot: str | None, as_json: bool) -> None:
    """Set the measurements of TRIALS (numbers or names) side by side; without any, the best-known and all others.

    \b
    Examples:
      autotuner compare
      autotuner compare sglang-base eagle3-aq-medai
    """
    state = open_state(ctx)
    found = [state.find_trial(what) for what in trials] if trials else _measured(state, slot)
    if not found:
        raise NotFound("nothing has been measured yet")
    data: list[dict[str, Any]] = [
        {
            "trial": t.id,
            "name": t.name,
            "load": benchmark_of(t).load,
            "levels": {
                r.concurrency: {
                    "output_tok_s": r.figures.output_tok_s,
                    "low": r.figures.output_tok_s_low,
                    "high": r.figures.output_tok_s_high,
                    "ttft_ms": r.figures.ttft_ms,
                    "tpot_ms": r.figures.tpot_ms,
                    "itl_ms": r.figures.itl_ms,
                    "e2e_ms": r.figures.e2e_ms,
                    "total_tok_s": r.figures.total_tok_s,
                    "answered_req_s": r.figures.answered_req_s,
                    "goodput_req_s": r.figures.goodput_req_s,
                    "joules_per_output_token": r.machine.joules_per_output_token if r.machine else None,
                    "goodput_low": r.figures.goodput_req_s_low,
                    "goodput_high": r.figures.goodput_req_s_high,
                    "void": r.figures.void,
                }
                for r in state.store.results(t.id)
            },
        }
        for t in found
    ]
    if as_json:
        print_json(data)
        return
    columns = sorted({(row["load"], level) for row in data for level in row["levels"]})
    shown = [_shown(data, *column) for column in columns]
    rows = []
    for row in data:
        pairs = zip(columns, shown, strict=True)
        cells = [_cell(_at(row, *column), _at(data[0], *column), figure) for column, figure in pairs]
        rows.append((str(row["trial"]), str(row["name"]), *cells))
    heads = (level_column(*column, figure.head) for column, figure in zip(columns, shown, strict=True))
    click.echo(table(rows, ("trial", "candidate", *heads)))
    click.echo(f"ratios are to {data[0]['name']}; ± is the 95 % interval within one launch")


@click.command()
@click.argument("candidate", required=False)
@click.option("--slot", metavar="NAME", help="The last decision about this slot.")
@json_option
@click.pass_context
def why(ctx: click.Context, candidate: str | None, slot: str | None, as_json: bool) -> None:
    """Explain the last decision, or the last one about CANDIDATE (its name, id, or a trial's number).

    \b
    Examples:
      autotuner why
      autotuner why eagle3-aq-medai
    """
    state = open_state(ctx)
    entries = state.store.entries()
    if slot is not None:
        wanted = state.slot(slot)
        entries = [e for e in entries if e.slot == wanted]
    if candidate is not None:
        trial = state.find_trial(candidate)
        mine = [e for e in entries if e.slot == trial.slot]
        entries = [e for e in mine if e.number == trial.entry] or [e for e in mine if trial.name in e.title]
    if not entries:
        what = f"about {candidate}" if candidate else "at all"
        raise NotFound(f"nothing has been decided {what} yet; see: autotuner status")
    last = entries[-1]
    if as_json:
        print_json(asdict(last))
        return
    click.echo(last.text.rsplit("<!--", 1)[0].rstrip())


def _measured(state: State, slot: str | None) -> list[Trial]:
    name = state.slot(slot)
    ladder = state.store.ladder(name)
    best = ladder[0][2] if ladder else None
    measured = [t for t in state.store.trials(name) if state.store.results(t.id)]
    return sorted(measured, key=lambda t: (t.id != best, t.id))


def _at(row: dict[str, Any], load: LoadKind, level: Level) -> Any:
    return row["levels"].get(level) if row["load"] == load else None


def _shown(data: list[dict[str, Any]], load: LoadKind, level: Level) -> _Figure:
    """What a column shows: where requests are sent at a rate, goodput if it is known."""
    found = [_at(row, load, level) for row in data]
    known = any(cell is not None and cell["goodput_req_s"] is not None for cell in found)
    return _GOODPUT if known and load != "concurrency" else _OUTPUT


def _cell(level: Any, base: Any, figure: _Figure) -> str:
    if level is None or level[figure.mean] is None:
        return "-"
    if level["void"]:
        return "void"
    half = (level[figure.high] - level[figure.low]) / 2
    ratio = f" ({level[figure.mean] / base[figure.mean]:.2f})" if base and base[figure.mean] else ""
    return f"{figure.text(level[figure.mean])} ± {figure.text(half)}{ratio}"


def _trial_json(state: State, trial: Trial, launches: list[LaunchRow], *, evidence: bool) -> dict[str, Any]:
    results = state.store.results(trial.id)
    source_name, source = state.store.candidate_source(trial.candidate_id)
    data: dict[str, Any] = {
        "trial": {k: v for k, v in asdict(trial).items() if k not in {"ended", "benchmark_body"}},
        "ended_by": trial.ended.model_dump() if trial.ended else None,
        "candidate": state.store.candidate(trial.candidate_id).model_dump(mode="json"),
        "source": {"file": source_name, "text": source},
        "aim": trial.aim,
        "confirmed_by": [t.id for t in state.store.confirming(trial.id)],
        "launches": [asdict(row) for row in launches],
        "results": [r.model_dump(mode="json") for r in results],
    }
    if evidence:
        data["evidence"] = {r.concurrency: state.store.evidence(trial.id, r.concurrency) for r in results}
    return data


def _print_trial(state: State, trial: Trial, launches: list[LaunchRow]) -> None:
    click.echo(
        f"trial {trial.id}: {trial.name} on slot {trial.slot}, {trial.state}"
        + (f", {trial.verdict}" if trial.verdict else "")
    )
    if trial.aim:
        click.echo(f"  aim:        {trial.aim}")
    for later in state.store.confirming(trial.id):
        came = later.verdict or later.state
        click.echo(f"  followed by: trial {later.id}, {later.name}: {later.aim}, {came}")
    if trial.hypothesis:
        click.echo(f"  hypothesis: {trial.hypothesis}")
    click.echo(f"  candidate:  {trial.candidate_id}; benchmark {trial.benchmark} ({trial.benchmark_hash[:8]})")
    for reason in trial.reasons:
        click.echo(f"  reason:     {reason}")
    if trial.score:
        click.echo(f"  score:      {plus_minus(trial.score, 3)} of the best-known's")
    for row in launches:
        ready = f"ready after {duration(row.ready_s)}" if row.ready_s is not None else "never ready"
        why = f", {row.diagnosis.cause}: {row.diagnosis.sentence}" if row.diagnosis else ""
        click.echo(f"  launch:     {row.id} at {row.intended_at}, {ready}{why}")
    if launches and (resolved := launches[-1].configuration) is not None:
        _print_configuration(resolved)
    results = state.store.results(trial.id)
    if results:
        click.echo("")
        click.echo(levels_table([(r.figures, r.machine) for r in results]))
        click.echo("")
        click.echo(table([_ran(r) for r in results], ("level", "running", "accept len", "needed", "ended by")))
    for r in results:
        said = [f"contradiction: {sentence}" for sentence in r.contradictions]
        said += [f"void: {r.figures.void}"] * bool(r.figures.void)
        said += requests_remarks(r.figures)
        said += [str(r.machine)] if r.machine is not None else []
        for sentence in said:
            click.echo(f"{level_short(r.figures.load, r.concurrency)}: {sentence}")
    if trial.entry:
        click.echo(f"\njournal entry {trial.entry}: autotuner why {trial.id}")


def _ran(r: LevelResult) -> tuple[str, ...]:
    """What ran at a level, what speculation did there, and what ended it."""
    spec = r.speculation
    return (
        level_cell(r.figures.load, r.concurrency),
        f"{r.running:.0f}" if r.running else "-",
        plus_minus(spec.accept_len) if spec else "-",
        f"{spec.needed:.2f}" if spec and spec.needed else "-",
        r.fired.rule if r.fired else "void" if r.figures.void else "",
    )


def _print_configuration(resolved: Configuration) -> None:
    """What the server of the last launch resolved, and in what it is not what was asked for."""
    hidden = {"rank", "source", "arguments"}
    known = {k: v for k, v in asdict(resolved.effective).items() if v is not None and k not in hidden}
    if known:
        click.echo("  effective:  " + ", ".join(f"{k.replace('_', ' ')} {_plain(v)}" for k, v in known.items()))
    if resolved.nccl is not None and resolved.nccl.version:
        click.echo(f"  nccl:       {resolved.nccl}")
    if how := joined(resolved.topology):
        click.echo(f"  topology:   {how}")
    for difference in resolved.differences:
        click.echo(f"  differs:    {difference}")
    if resolved.identity:
        click.echo(f"  identity:   {resolved.identity}")


def _plain(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _print_log(state: State, launches: list[LaunchRow]) -> None:
    from autotuner.cli.serverlogs import log_text

    if not launches:
        raise NotFound("this trial was never launched")
    click.echo(log_text(state, launches[-1]))
