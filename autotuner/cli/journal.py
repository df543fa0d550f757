"""`journal`: show, follow, seal and verify the journal's files, and compute verdicts again."""

import secrets
import sys
from dataclasses import asdict
from pathlib import Path

import click

from autotuner.cli.common import State, json_option, open_settings, open_state, print_json
from autotuner.core.entry import GENESIS, Entry, Flaw
from autotuner.core.policy import Policy
from autotuner.core.replay import Replayed
from autotuner.core.replay import replay as replay_trial
from autotuner.core.seal import KEY_BYTES, check_seals, checkpoint, read_checkpoint, read_seals, since_checkpoint
from autotuner.core.state import Verdict
from autotuner.core.verdict import Judgement
from autotuner.edge import clock
from autotuner.edge.files import FolderLock
from autotuner.edge.journal import compare_with_store, journal_files, read_entries
from autotuner.edge.rows import Trial
from autotuner.edge.seals import NAME, Seals, begin, give_to_owner, read_all, read_key
from autotuner.errors import JournalBroken, Locked, NotFound, Refused
from autotuner.outcome import benchmark_of


@click.group()
def journal() -> None:
    """Show, follow, seal or verify the journal, or compute its verdicts again."""


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
@click.option("--since", metavar="CHECKPOINT", help="Prove that the files extend what `journal head` printed then.")
@click.option(
    "--key", metavar="FILE", help="The first key that `journal seal` printed, in a file; - reads it from stdin."
)
@json_option
@click.pass_context
def verify(ctx: click.Context, since: str | None, key: str | None, as_json: bool) -> None:
    """Check that nothing in the journal was changed, lost or reordered; exit code 8 if something was.

    The files' hash chain is followed, and compared with the state database, which knows every entry that was published.
    Whoever can change both, and the service log, is found by a checkpoint or a key that is kept elsewhere.

    \b
    Examples:
      autotuner journal verify
      autotuner journal verify --since 42:5d41402abc4b2a76b9719d911017c592
      autotuner journal verify --key - < first-key
    """
    point = read_checkpoint(since) if since is not None else (0, "")
    if point is None:
        raise click.UsageError(f"{since} is no checkpoint; `autotuner journal head` prints one")
    state = open_state(ctx)
    seals = _Sealing(state, _first_key(key)) if key is not None else None
    entries, flaws = check_journal(state)
    heads = [(entry.number, entry.sha256) for entry in entries]
    flaws += since_checkpoint(point, heads)
    said, sealed = "", None
    if seals is not None:
        sealed_flaws, sealed = seals.check(dict(heads))
        flaws += sealed_flaws
        waiting = len([number for number, _ in heads if number > (sealed or 0)])
        said = f", sealed to {sealed:04d}" + (f"; {waiting} not sealed yet" if waiting else "")
    files = journal_files(state.settings.journal)
    head = entries[-1].sha256 if entries else ""
    if as_json:
        shown = {"entries": len(entries), "files": len(files), "head": head, "flaws": [str(f) for f in flaws]}
        print_json(shown if seals is None else {**shown, "sealed": sealed})
    if flaws:
        raise JournalBroken("the journal does not verify:\n" + "\n".join(f"  {flaw}" for flaw in flaws))
    if not as_json:
        extends = f", extending {since}" if since is not None else ""
        click.echo(f"{len(entries)} entries intact in {len(files)} files; head {head[:16] or 'none'}{extends}{said}")


@journal.command()
@json_option
@click.pass_context
def head(ctx: click.Context, as_json: bool) -> None:
    """Print a checkpoint of the journal as it is now: the last entry's number and the beginning of its hash.

    Paste it where nobody who can change this host can change it: a chat, a ticket, another host. `journal verify --since`
    proves later that the journal still says what it said, and was only added to.

    \b
    Examples:
      autotuner journal head
      autotuner journal verify --since "$(ssh log-host cat checkpoint)"
    """
    state = open_state(ctx)
    entries, flaws = check_journal(state)
    if flaws:
        raise JournalBroken(f"the journal does not verify, so it gets no checkpoint: {flaws[0]}")
    number, sha256 = (entries[-1].number, entries[-1].sha256) if entries else (0, GENESIS)
    point = checkpoint(number, sha256)
    if as_json:
        print_json({"checkpoint": point, "number": number, "sha256": sha256})
    else:
        click.echo(point)


@journal.command()
@click.pass_context
def seal(ctx: click.Context) -> None:
    """Seal the journal from now on, and print the first key, once: keep it away from this host.

    Each entry gets a code that only that key can make, in the file `seals` beside the journal. The host keeps the key for the
    next entry alone, so that whoever takes it over cannot rewrite what was decided before: `journal verify --key` finds it.

    \b
    Examples:
      autotuner journal seal > first-key    # then move that file to another host
      ssh log-host cat first-key | autotuner journal verify --key -
    """
    state = open_state(ctx)
    key_file, folder = state.settings.seal_key, state.settings.journal
    if key_file.exists() or read_all(folder) != read_seals(b""):
        raise Refused(
            f"the journal is sealed already; to begin with a new key, move {key_file} and {folder / NAME} aside "
            "(what the old key sealed can then be checked only with those)"
        )
    entries, flaws = check_journal(state)
    if flaws:
        raise JournalBroken(f"the journal does not verify, so it is not sealed: {flaws[0]}")
    key = secrets.token_bytes(KEY_BYTES)
    begin(key_file, entries[-1].number if entries else 1, key)
    _seal_now(state, entries)
    click.echo(key.hex())
    click.echo(
        "This key is shown once. Keep it elsewhere: whoever has it can forge, and without it nothing is proved.",
        err=True,
    )


def _seal_now(state: State, entries: list[Entry]) -> None:
    """Seal the last entry at once, so that the first key is forgotten here; a running daemon does it in its next cycle."""
    folder = state.settings.journal
    lock = FolderLock(state.settings.lock_file)
    try:
        lock.acquire()
    except Locked:
        return
    try:
        Seals(state.settings.seal_key, folder).keep_up(entries[-1].number if entries else 0, state.store.entries_after)
        give_to_owner(folder / NAME)
    finally:
        lock.release()


class _Sealing:
    """What the seals say, read in the order that a working daemon asks for: the key, the seals, and then the journal."""

    def __init__(self, state: State, first_key: bytes) -> None:
        self._first_key = first_key
        self._key = read_key(state.settings.seal_key)
        self._seals = read_all(state.settings.journal)

    def check(self, entries: dict[int, str]) -> tuple[list[Flaw], int]:
        """Given the hashes of the journal's entries, return what does not agree, and the last sealed entry."""
        return check_seals(self._first_key, self._seals, entries, self._key)


def _first_key(name: str) -> bytes:
    """Read the first key from a file, or from standard input. Raise NotFound or UsageError."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        key = bytes.fromhex(text.strip())
    except OSError as error:
        raise NotFound(f"{name} cannot be read: {error.strerror}") from None
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise click.UsageError(f"{name} holds no key: it is the one line that `autotuner journal seal` printed")
    return key


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
