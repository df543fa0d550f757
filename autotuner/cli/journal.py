"""`journal`: show, follow and verify the journal's files."""

from dataclasses import asdict

import click

from autotuner.cli.common import State, json_option, open_settings, open_state, print_json
from autotuner.core.entry import Entry, Flaw
from autotuner.edge import clock
from autotuner.edge.journal import compare_with_store, journal_files, read_entries
from autotuner.errors import JournalBroken, NotFound


@click.group()
def journal() -> None:
    """Show, follow or verify the journal."""


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


def check_journal(state: State) -> tuple[list[Entry], list[Flaw]]:
    """Read the journal's files and return their entries with everything that is wrong with them.

    What the store calls published is asked for first: a running daemon may publish more while the files are read.
    """
    published = state.store.published()
    entries, flaws = read_entries(state.settings.journal)
    return entries, flaws + compare_with_store(entries, published, state.store.committed())


def _readable(entry: Entry) -> str:
    return entry.text.rsplit("<!--", 1)[0].rstrip() + "\n"
