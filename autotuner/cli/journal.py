"""`journal`: show, follow and verify the journal's files, and compute verdicts again."""

from dataclasses import asdict

import click

from autotuner.cli.common import State, json_option, open_settings, open_state, print_json
from autotuner.core.entry import Entry, Flaw
from autotuner.core.policy import Policy
from autotuner.core.replay import Replayed
from autotuner.core.replay import replay as replay_trial
from autotuner.core.state import Verdict
from autotuner.core.verdict import Judgement
from autotuner.edge import clock
from autotuner.edge.journal import compare_with_store, journal_files, read_entries
from autotuner.edge.rows import Trial
from autotuner.errors import JournalBroken, NotFound
from autotuner.outcome import benchmark_of


@click.group()
def journal() -> None:
    """Show, follow or verify the journal, or compute its verdicts again."""


@journal.command()
@click.argument("number", type=int, required=False)
@json_option
@click.pass_context
def show(ctx: click.Context, number: int | None, as_json: bool) -> None:
    """Print the whole journal, or entry NUMBER.

    \b
    Examples:
      autotuner journal show | less
      autotuner journal show 42
    """
    _, settings = open_settings(ctx)
    entries, _ = read_entries(settings.journal)
    chosen = [e for e in entries if number is None or e.number == number]
    if not chosen:
        raise NotFound(f"there is no entry {number}" if number is not None else "the journal is empty")
    if as_json:
        print_json([asdict(e) for e in chosen])
        return
    for entry in chosen:
        click.echo(_readable(entry))


@journal.command()
@click.option("-n", "count", default=5, show_default=True, help="How many entries.")
@click.option("--follow", "-f", is_flag=True, help="Wait for further entries until interrupted.")
@click.pass_context
def tail(ctx: click.Context, count: int, follow: bool) -> None:
    """Print the last entries."""
    _, settings = open_settings(ctx)
    entries, _ = read_entries(settings.journal)
    for entry in entries[-count:] if count else []:
        click.echo(_readable(entry))
    seen = entries[-1].number if entries else 0
    while follow:
        try:
            clock.pause(0.5)
        except KeyboardInterrupt:
            return
        fresh = [e for e in read_entries(settings.journal)[0] if e.number > seen]
        for entry in fresh:
            click.echo(_readable(entry))
            seen = entry.number


@journal.command()
@json_option
@click.pass_context
def verify(ctx: click.Context, as_json: bool) -> None:
    """Check that nothing in the journal was changed, lost or reordered; exit code 8 if something was.

    The files' hash chain is followed, and compared with the state database, which knows every entry that was published.
    """
    state = open_state(ctx)
    entries, flaws = check_journal(state)
    files = journal_files(state.settings.journal)
    head = entries[-1].sha256 if entries else ""
    if as_json:
        print_json({"entries": len(entries), "files": len(files), "head": head, "flaws": [str(f) for f in flaws]})
    if flaws:
        raise JournalBroken("the journal does not verify:\n" + "\n".join(f"  {flaw}" for flaw in flaws))
    if not as_json:
        click.echo(f"{len(entries)} entries intact in {len(files)} files; head {head[:16] or 'none'}")


@journal.command()
@click.argument("numbers", type=int, nargs=-1)
@json_option
@click.pass_context
def replay(ctx: click.Context, numbers: tuple[int, ...], as_json: bool) -> None:
    """Compute the verdicts of entries NUMBERS again from the recorded evidence; of all trials if none is named.

    The rules look at the recorded facts again under the policy texts of that time, the figures are taken from the samples
    again, and the verdict is judged again. Exit code 8 if anything comes out otherwise.

    \b
    Examples:
      autotuner journal replay
      autotuner journal replay 42
    """
    state = open_state(ctx)
    trials = [trial for trial in state.store.trials() if trial.entry is not None and trial.verdict is not None]
    unknown = set(numbers) - {trial.entry for trial in trials}
    if unknown:
        raise NotFound(f"no trial was concluded by entry {min(unknown)}; autotuner status lists the trials")
    policies = state.store.kept_policies()
    done = [
        (trial, _replayed(state, trial, policies)) for trial in trials if not numbers or trial.entry in set(numbers)
    ]
    if as_json:
        print_json([{"entry": t.entry, "trial": t.id, "name": t.name, **asdict(again)} for t, again in done])
    elif not done:
        click.echo("no trial was concluded yet, so there is nothing to compute again")
    for trial, again in [] if as_json else done:
        said = "as recorded" if not again.differences else f"{len(again.differences)} differences"
        click.echo(
            f"{trial.entry:04d}  {trial.name}: {trial.verdict}, {again.levels} level{'s' * (again.levels != 1)}, "
            f"{again.looks} looks: {said}"
        )
        for difference in again.differences:
            click.echo(f"      {difference}")
    if any(again.differences for _, again in done):
        raise JournalBroken("not every verdict comes out as it was recorded")


def _replayed(state: State, trial: Trial, policies: dict[str, Policy]) -> Replayed:
    store = state.store
    evidence = {r.concurrency: store.evidence(trial.id, r.concurrency) for r in store.results(trial.id)}
    recorded = Judgement(Verdict(trial.verdict or ""), trial.promoted, trial.reasons, trial.score)
    load = benchmark_of(trial).load
    return replay_trial(store.basis(trial.id), recorded, evidence, policies, load)


def check_journal(state: State) -> tuple[list[Entry], list[Flaw]]:
    """Read the journal's files and return their entries with everything that is wrong with them.

    What the store calls published is asked for first: a running daemon may publish more while the files are read.
    """
    published = state.store.published()
    entries, flaws = read_entries(state.settings.journal)
    return entries, flaws + compare_with_store(entries, published, state.store.committed())


def _readable(entry: Entry) -> str:
    return entry.text.rsplit("<!--", 1)[0].rstrip() + "\n"
