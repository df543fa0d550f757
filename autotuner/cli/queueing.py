"""`enqueue` and `queue`: put candidates in, list, move and cancel what waits."""

import asyncio
import contextlib
import glob
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from autotuner.cli.common import (
    State,
    describe_slot,
    json_option,
    live_line,
    open_state,
    print_json,
    slot_option,
    table,
    wait_until,
)
from autotuner.core.candidate import Candidate, parse_candidates
from autotuner.core.report import duration
from autotuner.core.state import TrialState
from autotuner.edge import clock
from autotuner.edge.helpcache import HelpCache
from autotuner.edge.rows import Trial
from autotuner.edge.starts import usual_ready_s
from autotuner.engines.flags import Findings
from autotuner.engines.nccl import unchecked
from autotuner.errors import AutotunerError, HostUnreachable, InvalidInput, NotFound, Refused
from autotuner.hosts import Hosts
from autotuner.known import planned_s
from autotuner.preflight import Preflight, by_itself, place_warnings, slot_problems
from autotuner.settings import read_source

INVALID, REFUSED = InvalidInput.exit_code, Refused.exit_code


@dataclass
class _Item:
    """One candidate of one file on one slot, and what became of it."""

    file: str
    name: str = ""
    candidate: str = ""
    slot: str = ""
    status: str = ""
    trial: int | None = None
    takes_s: float | None = None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Asked:
    """How the files are to be queued."""

    priority: int
    again: bool
    force: bool
    dry_run: bool


@click.command()
@click.argument("files", nargs=-1, required=True)
@click.option("--priority", default=0, show_default=True, help="Higher goes first.")
@click.option("--dry-run", is_flag=True, help="Say what would be queued, and queue nothing.")
@click.option("--again", is_flag=True, help="Queue candidates that were tried before under the same benchmark.")
@click.option("--force", is_flag=True, help="Wait neither for requests that run on the best-known nor for a window.")
@click.option(
    "--no-preflight", is_flag=True, help="Do not check flags against the installed program; let it say so itself."
)
@click.option("--wait", is_flag=True, help="Wait until all of them are concluded and their wins confirmed.")
@click.option("--timeout", type=float, metavar="S", help="With --wait: give up waiting after so many seconds.")
@slot_option
@json_option
@click.pass_context
def enqueue(
    ctx: click.Context,
    files: tuple[str, ...],
    priority: int,
    dry_run: bool,
    again: bool,
    force: bool,
    no_preflight: bool,
    wait: bool,
    timeout: float | None,
    slot: str | None,
    as_json: bool,
) -> None:
    """Put candidate FILES into the queue: of each slot that a candidate names, or of the one named here.

    Good files are queued even if others are broken; the exit code is then 3 (a file is wrong) or 4 (refused: a flag the
    program does not have, a candidate already tried). The same candidate twice is one trial.

    \b
    Examples:
      autotuner enqueue config.toml
      autotuner enqueue 'sweeps/*.toml' --priority 5
      autotuner enqueue config.toml --dry-run
      autotuner enqueue config.toml --wait && autotuner why
    """
    state = open_state(ctx)
    items = _read_files(state, files, slot)
    about_slots = [] if no_preflight else asyncio.run(_preflight(state, items))
    ready = [(item, c, text) for item, c, text in items if not item.status and c is not None]
    with state.store.transaction():
        for item, candidate, text in ready:
            _put(state, item, candidate, text, _Asked(priority, again, force, dry_run))
    shown = [item for item, _, _ in items]
    if as_json and not wait:
        print_json([asdict(item) for item in shown])
    elif not as_json:
        _print(state, shown, about_slots)
    if wait and not dry_run:
        _wait(state, shown, timeout, quiet=as_json)
        if as_json:
            print_json([asdict(item) for item in shown])
    ctx.exit(_exit_code(shown))


@click.group(invoke_without_command=True)
@slot_option
@json_option
@click.pass_context
def queue(ctx: click.Context, slot: str | None, as_json: bool) -> None:
    """List what waits; or move and cancel it.

    \b
    Examples:
      autotuner queue
      autotuner queue move 12 --first
      autotuner queue cancel 12
    """
    if ctx.invoked_subcommand is None:
        _list(ctx, slot, as_json)


@queue.command("list")
@slot_option
@json_option
@click.pass_context
def list_(ctx: click.Context, slot: str | None, as_json: bool) -> None:
    """List what waits, next first."""
    _list(ctx, slot, as_json)


@queue.command()
@click.argument("trial")
@click.option("--first", is_flag=True, help="Make it the next one.")
@click.option("--priority", type=int, help="Give it another priority; higher goes first.")
@click.pass_context
def move(ctx: click.Context, trial: str, first: bool, priority: int | None) -> None:
    """Move a waiting TRIAL (its number or its candidate's name)."""
    state = open_state(ctx)
    found = state.find_trial(trial)
    if found.state is not TrialState.QUEUED:
        raise Refused(f"trial {found.id} ({found.name}) is {found.state}; only what waits can be moved")
    if not first and priority is None:
        raise click.UsageError("say where to: --first or --priority N")
    with state.store.transaction():
        if priority is not None:
            state.store.update_trial(found.id, priority=priority)
        if first:
            state.store.put_first(found.id)
    click.echo(f"moved trial {found.id} ({found.name})")


@queue.command()
@click.argument("trials", nargs=-1, required=True)
@click.pass_context
def cancel(ctx: click.Context, trials: tuple[str, ...]) -> None:
    """Cancel waiting TRIALS (numbers or candidates' names). The one in hand is ended by `restore-best` or `pause --now`."""
    state = open_state(ctx)
    for what in trials:
        found = state.find_trial(what)
        if found.state is TrialState.RUNNING:
            raise Refused(f"trial {found.id} ({found.name}) is in hand; end it with: autotuner restore-best")
        if found.state is not TrialState.QUEUED:
            raise Refused(f"trial {found.id} ({found.name}) is {found.state} already")
        with state.store.transaction():
            gone = [found, *_only_for(state, found)]
            for trial in gone:
                state.store.move_trial(trial.id, TrialState.CANCELLED, ended_at=clock.utc_label())
        for trial in gone:
            click.echo(f"cancelled trial {trial.id} ({trial.name}{', ' + trial.aim if trial.aim else ''})")


def _only_for(state: State, cancelled: Trial) -> list[Trial]:
    """The launches of the best-known that wait only for a confirming trial that is cancelled."""
    if cancelled.confirms is None or cancelled.is_baseline:
        return []
    beside = state.store.confirming(cancelled.confirms)
    return [t for t in beside if t.is_baseline and t.state is TrialState.QUEUED]


def _read_files(state: State, files: tuple[str, ...], slot: str | None) -> list[tuple[_Item, Candidate | None, str]]:
    """Each candidate of each file on each of its slots, with its text; broken files become items that say what is wrong."""
    found: list[tuple[_Item, Candidate | None, str]] = []
    for name in expand(files):
        try:
            source = read_source(Path(name))
            for candidate in parse_candidates(source):
                found += [(item, candidate, source.text) for item in _items(state, name, candidate, slot)]
        except InvalidInput as error:
            found.append((_Item(name, status="invalid", problems=[str(p) for p in error.problems]), None, ""))
    return found


def _items(state: State, file: str, candidate: Candidate, wanted: str | None) -> list[_Item]:
    """A candidate's items, one a slot; if it is not known which slots are meant, one that says so."""
    try:
        items = [_Item(file, candidate.name, candidate.id, slot) for slot in slots_for(state, candidate, wanted)]
    except AutotunerError as error:
        return [_Item(file, candidate.name, candidate.id, status="refused", problems=[str(error)])]
    for item in items:
        try:
            state.settings.benchmark_name(item.slot, candidate.benchmark)
        except AutotunerError as error:
            item.status, item.problems = "refused", [str(error)]
        if candidate.slots and item.slot not in candidate.slots:
            item.warnings = [
                f"its `slots` name {', '.join(candidate.slots)}; it goes to {item.slot} since --slot says so"
            ]
    return items


def expand(files: tuple[str, ...]) -> list[str]:
    """Given names and patterns as typed, return the files they mean, each once; one that matches nothing stays as it is."""
    expanded: list[str] = []
    for pattern in files:
        matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]  # noqa: PTH207 - patterns as typed
        expanded += matches or [pattern]
    return list(dict.fromkeys(expanded))


def slots_for(state: State, candidate: Candidate, wanted: str | None) -> tuple[str, ...]:
    """Given a candidate and the slot named on the command line, return the slots in whose queues it goes.

    The latter is a person's word, whatever the file says. Without either it is the only slot; which of several, a person must
    say. Raise NotFound or Refused.
    """
    if wanted is not None:
        return (state.slot(wanted),)
    if unknown := candidate.unknown_slots(state.settings.slots):
        known = ", ".join(state.settings.slots)
        raise NotFound(f"its `slots` name {', '.join(unknown)}, and there is no such slot; known: {known}")
    if candidate.slots:
        return tuple(dict.fromkeys(candidate.slots))
    if len(state.settings.slots) > 1:
        names = ", ".join(state.settings.slots)
        raise Refused(
            f"there are several slots: name one with --slot, or those that it fits with `slots` in it ({names})"
        )
    return (state.slot(None),)


async def _preflight(state: State, items: list[tuple[_Item, Candidate | None, str]]) -> list[str]:
    """Check what would run against what is installed; importing an engine for its flags can take half a minute.

    Return what is to be said of the slots, which is the same for all that would run there.
    """
    hosts = Hosts(state.settings)
    preflights: dict[str, Preflight] = {}
    held: dict[str, tuple[str, ...]] = {}
    with contextlib.closing(hosts), live_line(quiet=not sys.stderr.isatty()) as show:
        for number, (item, candidate, _) in enumerate(items, 1):
            if candidate is None or item.status:
                continue
            show(f"checking {number} of {len(items)}: {item.name} against the flags of its program")
            slot = state.settings.slots[item.slot]
            host = hosts.of(item.slot)
            where = item.slot if slot.nodes else slot.host
            preflight = preflights.setdefault(where, Preflight(host, HelpCache(state.settings.cache)))
            if item.slot not in held:
                ours = {row.id for row in state.store.open_launches(item.slot)}
                held[item.slot] = await place_warnings(host, slot, ours)
            try:
                found = await preflight.check(candidate, gpus=slot.gpus)
            except HostUnreachable as error:
                found = by_itself(candidate) + Findings(warnings=(f"not checked against its program: {error}",))
            name = state.settings.benchmark_name(item.slot, candidate.benchmark)
            objective = state.settings.objective_of(item.slot)
            odd = objective.warnings(name, state.settings.benchmarks[name])
            risks = unchecked(candidate, objective.constraints.answers_agree_min)
            item.warnings += [*found.warnings, *odd, *held[item.slot]]
            if problems := [*slot_problems(candidate, slot), *risks, *found.problems]:
                item.status, item.problems = "refused", problems
    return [warning for warnings in held.values() for warning in warnings]


def _put(state: State, item: _Item, candidate: Candidate, text: str, asked: _Asked) -> None:
    name = state.settings.benchmark_name(item.slot, candidate.benchmark)
    benchmark = state.settings.benchmarks[name]
    item.takes_s = planned_s(benchmark, usual_ready_s(state.store, candidate))
    # What only confirms a win measures a part of the levels, and is no answer to who asks for a trial.
    earlier = [t for t in state.store.same_trials(item.slot, candidate.id, benchmark.hash) if t.confirms is None]
    waiting = [t for t in earlier if t.state in {TrialState.QUEUED, TrialState.RUNNING}]
    if waiting:
        item.status, item.trial = "already queued", waiting[0].id
        if asked.force and not asked.dry_run:
            state.store.update_trial(waiting[0].id, force=True)
    elif earlier and not asked.again:
        done = earlier[0]
        item.status, item.trial = "refused", done.id
        said = (
            f"tried before under the same benchmark: trial {done.id}, verdict {done.verdict} on {done.ended_at}; "
            "queue it again with --again"
        )
        item.problems = [said]
    elif asked.dry_run:
        item.status = "would be queued"
    else:
        state.store.put_candidate(candidate, text, item.file)
        item.trial = state.store.add_trial(
            item.slot, candidate, (name, benchmark), clock.utc_label(), priority=asked.priority
        )
        if asked.force:
            state.store.update_trial(item.trial, force=True)
        item.status = "queued"


def _print(state: State, items: list[_Item], about_slots: list[str]) -> None:
    said: set[tuple[str, str]] = set()  # a sweep's candidates mostly share their warnings
    for item in items:
        what = f"{item.name} " if item.name else ""
        number = f" as trial {item.trial}" if item.trial and item.status != "refused" else ""
        takes = (
            f", about {duration(item.takes_s)}" if item.takes_s and item.status in {"queued", "would be queued"} else ""
        )
        bad = item.status in {"invalid", "refused"}
        where = f" on slot {item.slot}" if item.slot and (not bad or len(state.settings.slots) > 1) else ""
        click.echo(f"{item.file}: {what}{item.status}{number}{where}{takes}", err=bad)
        for problem in item.problems:
            click.echo(f"  {problem}", err=True)
        for warning in item.warnings:
            if warning not in about_slots and (item.file, warning) not in said:
                said.add((item.file, warning))
                click.echo(f"  warning: {warning}", err=True)
    for warning in about_slots:
        click.echo(f"warning: {warning}", err=True)
    good = [item for item in items if item.status in {"queued", "would be queued"}]
    if len(good) > 1:
        click.echo(f"{len(good)} candidates, about {duration(sum(item.takes_s or 0 for item in good))} in all")
    if good and state.daemon_pid is None:
        click.echo("no daemon is running; it will find them when it starts: autotuner daemon")


def _exit_code(items: list[_Item]) -> int:
    states = {item.status for item in items}
    return INVALID if "invalid" in states else REFUSED if "refused" in states else 0


def _wait(state: State, items: list[_Item], timeout: float | None, *, quiet: bool) -> None:
    wanted = [item for item in items if item.trial is not None and item.status in {"queued", "already queued"}]
    if not wanted:
        return
    if state.daemon_pid is None:
        raise Refused("nothing works the queue: no daemon is running; start it with: autotuner daemon")

    def trials(item: _Item) -> list[Trial]:
        """The item's own trial, and whatever was queued to confirm its win."""
        return [state.store.trial(item.trial or 0), *state.store.confirming(item.trial or 0)]

    def done() -> bool:
        return all(t.state in {TrialState.DONE, TrialState.CANCELLED} for item in wanted for t in trials(item))

    wait_until(done, lambda: describe_slot(state.status(), wanted[0].slot, clock.monotonic_s()), timeout, quiet=quiet)
    for item in wanted:
        trial = [t for t in trials(item) if not t.is_baseline][-1]
        item.status = str(trial.verdict or trial.state)
        if not quiet:
            click.echo(f"{trial.name}: {item.status}: {'; '.join(trial.reasons)}")


def _list(ctx: click.Context, slot: str | None, as_json: bool) -> None:
    state = open_state(ctx)
    waiting = [trial for name in state.slots(slot) for trial in state.store.queue(name)]
    if as_json:
        keys = ("id", "slot", "name", "aim", "candidate_id", "benchmark", "priority", "enqueued_at", "interruptions")
        print_json([{key: getattr(trial, key) for key in keys} for trial in waiting])
        return
    if not waiting:
        click.echo("nothing waits")
        return
    rows = [(str(t.id), t.slot, t.name, t.benchmark, str(t.priority), t.enqueued_at, t.aim or "-") for t in waiting]
    click.echo(table(rows, ("trial", "slot", "candidate", "benchmark", "priority", "enqueued", "aim")))
