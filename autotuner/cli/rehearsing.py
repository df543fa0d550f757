"""`rehearse`: candidate files and policies through the real daemon, against a server that only pretends. No GPU needed."""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from autotuner.cli.campaign import best_serves, follow, free_port, own_daemon, stop_servers
from autotuner.cli.common import State, json_option, print_json
from autotuner.cli.journal import check_journal
from autotuner.cli.queueing import INVALID, REFUSED, expand
from autotuner.cli.status import trial_row, trials_table
from autotuner.core.candidate import parse_candidates
from autotuner.core.report import duration
from autotuner.core.state import TrialState
from autotuner.edge import clock
from autotuner.edge.journal import journal_files, journal_folder
from autotuner.edge.store import Store
from autotuner.errors import AutotunerError, InvalidInput, JournalBroken, NotFound
from autotuner.rehearsal.engine import REHEARSED
from autotuner.rehearsal.personalities import ENV_VAR
from autotuner.settings import load_policies, load_settings, read_source

SLOT = "rehearsal"
PROGRAM = "autotuner.rehearsal"  # the command line with its engines in rehearsal
START_TIMEOUT_S = 90.0  # the usual half hour, as much shorter as the load is
OUTPUT_TOKENS = 128
NOTE = (
    "The figures come from a model of speeds recorded with SGLang 0.5.12 on one H200, not from your hardware, engine or "
    "model: read the decisions, not the rates."
)


@dataclass
class _Plan:
    """What is to be rehearsed: files for the queue, benchmarks that they name, and what cannot be rehearsed."""

    files: list[str] = field(default_factory=list)
    candidates: int = 0
    benchmarks: list[str] = field(default_factory=lambda: [SLOT])
    refused: list[dict[str, Any]] = field(default_factory=list)


@click.command()
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--policies", metavar="DIR", type=click.Path(path_type=Path), help="Folder of stop rules; else the shipped."
)
@click.option(
    "--levels", default="1,8,32,128", show_default=True, metavar="N,N", help="Concurrencies; the busiest decides."
)
@click.option("--seconds", default=6.0, show_default=True, type=click.FloatRange(1.0), help="Measured time of a level.")
@click.option(
    "--propose",
    type=click.Choice(["queue", "suggest", "off"]),
    default="suggest",
    show_default=True,
    help="What is done with follow-ups that rules propose; queue runs them too.",
)
@click.option("--no-preflight", is_flag=True, help="Launch candidates with wrong flags too.")
@click.option("--keep", is_flag=True, help="Keep the state and the servers' logs, not the journal alone.")
@json_option
@click.pass_context
def rehearse(
    ctx: click.Context,
    files: tuple[str, ...],
    policies: Path | None,
    levels: str,
    seconds: float,
    propose: str,
    no_preflight: bool,
    keep: bool,
    as_json: bool,
) -> None:
    """Run candidate FILES through the real daemon against a server that only pretends. No GPU, no engine, no model.

    The server takes the engine's own command line, prints its log lines, serves its HTTP interface, and takes as long as
    recorded servers did (a start 20 times faster). So you see what your files launch, what your stop rules decide, and
    what the journal says, before it costs an hour of a GPU. Rates are those of the recordings, not of your hardware, and the
    load is that of --levels, whatever benchmark a file names.

    A candidate that should go wrong says how in its file: AUTOTUNER_FAKE_PERSONALITY under [launch.env], for example
    oom-capture, hang-weights, dies-silently, drafter-broken or health-200-but-dead. SGLANG_SIMULATE_ACC_LEN sets the
    accept length of an SGLang candidate.

    \b
    Examples:
      autotuner rehearse campaign/*.toml
      autotuner rehearse eagle3.toml --levels 1,32 --seconds 10
      autotuner rehearse campaign/*.toml --policies my-policies --keep
    """
    wanted = _levels(levels)
    plan = _plan(files)
    if policies is not None and not policies.is_dir():
        raise NotFound(f"there is no policies folder at {policies}")
    where = Path(tempfile.mkdtemp(prefix="autotuner-rehearsal-"))
    began_s = clock.monotonic_s()
    settings = _prepare(where, plan, policies, wanted, seconds, propose)
    ctx.obj = str(settings)
    try:
        loaded = load_settings(settings)
        load_policies(loaded)  # a broken one is said here, not in a log
    except AutotunerError:
        shutil.rmtree(where, ignore_errors=True)
        raise
    state = State(loaded, Store(loaded.database))
    done = False
    try:
        if not as_json:
            click.echo(f"{NOTE}\n\nfolder   {where}\n")
        queued = _enqueue(settings, plan, no_preflight=no_preflight, quiet=as_json)
        if queued:
            most = queued + (loaded.budget.proposals if propose == "queue" else 0)
            limit_s = 120.0 + most * (2 * START_TIMEOUT_S + len(wanted) * (4 * seconds + 30.0))
            with own_daemon(where, settings, PROGRAM) as process:
                follow(state, SLOT, process, lambda: _finished(state), limit_s, quiet=as_json)
        _report(state, plan, settings, clock.monotonic_s() - began_s, keep=keep, as_json=as_json)
        done = True
    finally:
        asyncio.run(stop_servers(state, SLOT))
        state.store.close()
        _clear(where, keep=keep or not done)  # what went wrong is read in the daemon's log
    statuses = {item["status"] for item in plan.refused}
    ctx.exit(INVALID if "invalid" in statuses else REFUSED if statuses else 0)


def _levels(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        raise click.BadParameter(f"{text!r} is no list of concurrencies", param_hint="--levels")
    return sorted({int(word) for word in words})


def _plan(files: tuple[str, ...]) -> _Plan:
    """Sort the files; one that is wrong goes on to `enqueue`, which says what is wrong with it."""
    plan = _Plan()
    for name in expand(files):
        try:
            candidates = parse_candidates(read_source(Path(name)))
        except InvalidInput:
            plan.files.append(name)
            continue
        if candidates[0].engine not in REHEARSED:
            why = f'engine "{candidates[0].engine}" starts a program of its own, which cannot be rehearsed'
            plan.refused.append({"file": name, "name": candidates[0].name, "status": "refused", "problems": [why]})
            continue
        plan.files.append(str(Path(name).resolve()))
        plan.candidates += len(candidates)
        named = [c.benchmark for c in candidates if c.benchmark]
        plan.benchmarks = list(dict.fromkeys([*plan.benchmarks, *named]))
    return plan


def _prepare(where: Path, plan: _Plan, policies: Path | None, levels: list[int], seconds: float, propose: str) -> Path:
    """Write settings with one slot; every benchmark that a candidate names is the rehearsal's own."""
    lines = [f"state_dir = {json.dumps(str(where / 'state'))}", "cycle_s = 0.2", "disk_free_min_mib = 0"]
    lines.append(f'propose = "{propose}"')
    if policies is not None:
        lines.append(f"policies_dir = {json.dumps(str(policies.resolve()))}")
    lines += [f"[slots.{SLOT}]", f"port = {free_port(18090)}", f"benchmark = {json.dumps(SLOT)}"]
    lines += [f"start_timeout_s = {START_TIMEOUT_S}", "stop_grace_s = 3", "drain_s = 1"]
    for name in plan.benchmarks:
        lines += [f"[benchmarks.{json.dumps(name)}]", f"levels = {levels}", f"seconds = {seconds}"]
        lines += ["prompt_tokens = 64", f"output_tokens = {OUTPUT_TOKENS}", f"window_s = {max(0.3, seconds / 12):.2f}"]
    path = where / "autotuner.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _enqueue(settings: Path, plan: _Plan, *, no_preflight: bool, quiet: bool) -> int:
    """Queue the files by the program's own command; return how many candidates wait now."""
    if not plan.files:
        return 0
    options = ["--slot", SLOT, "--json", *(["--no-preflight"] if no_preflight else [])]
    command = [sys.executable, "-m", PROGRAM, "-s", str(settings), "enqueue", *options, "--", *plan.files]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    if ran.returncode not in {0, INVALID, REFUSED}:
        raise AutotunerError(f"enqueue failed with exit code {ran.returncode}: {(ran.stdout + ran.stderr).strip()}")
    items = json.loads(ran.stdout)
    queued = [item for item in items if item["status"] == "queued"]
    for item in items:
        if item["status"] in {"refused", "invalid"}:
            # The list of flags is the rehearsal's, not that of the interpreter which printed it.
            own = f"{sys.executable} has no flag"
            item["problems"] = [said.replace(own, "the rehearsal knows no flag") for said in item["problems"]]
            plan.refused.append(item)
    if not quiet:
        for item in plan.refused:
            click.echo(f"{item['name'] or item['file']}: {item['status']}", err=True)
            for problem in item["problems"]:
                click.echo(f"  {problem}", err=True)
        click.echo(f"{len(queued)} queued, {len(plan.refused)} refused\n")
    return len(queued)


def _finished(state: State) -> bool:
    """The queue is done, and the best-known serves; or there is none, or it cannot be brought back."""
    store = state.store
    if store.queue(SLOT) or store.trial_in_hand(SLOT):
        return False
    return not store.ladder(SLOT) or bool(store.slot(SLOT).degraded) or best_serves(state, SLOT)


def _report(state: State, plan: _Plan, settings: Path, took_s: float, *, keep: bool, as_json: bool) -> None:
    done = [trial for trial in state.store.trials(SLOT) if trial.state is TrialState.DONE]
    entries, flaws = check_journal(state)
    if flaws:
        raise JournalBroken("the rehearsal's own journal does not verify:\n" + "\n".join(map(str, flaws)))
    files = journal_files(journal_folder(state.settings.journal, SLOT))
    journal = str(files[-1]) if files else None
    if as_json:
        trials = [{**trial_row(state, trial), "reasons": list(trial.reasons)} for trial in done]
        data = {"trials": trials, "refused": plan.refused, "journal": journal, "took_s": round(took_s, 1), "note": NOTE}
        print_json({**data, "settings": str(settings) if keep else None})
        return
    if done:
        click.echo("\n" + trials_table(state, done))
    for item in plan.refused:
        click.echo(f"{item['status']}  {item['name'] or item['file']}: {'; '.join(item['problems'])}")
    click.echo(f"\nrehearsed {sum(not t.aim for t in done)} candidates in {duration(took_s)}")
    if journal:
        click.echo(f"journal   {journal} ({len(entries)} entries intact)")
    if keep:
        click.echo(f"read on   autotuner -s {settings} journal show\n          autotuner -s {settings} status")
    click.echo(f"\n{NOTE} To make a candidate go wrong, set {ENV_VAR} in its [launch.env].")


def _clear(where: Path, *, keep: bool) -> None:
    """Leave the journal and what was proposed, and everything else only where that was asked for."""
    if keep:
        return
    journal = where / "state" / "journal"
    if not journal.is_dir():
        shutil.rmtree(where, ignore_errors=True)
        return
    for path in [*where.iterdir(), *(where / "state").glob("*")]:
        if path in {where / "state", journal, where / "state" / "proposals"}:
            continue
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
