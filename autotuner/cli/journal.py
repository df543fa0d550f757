"""`journal`: show, follow, seal and verify the journal's files, and compute verdicts again."""

import secrets
import sys
from dataclasses import asdict
from pathlib import Path

import click

from autotuner.cli.common import State, json_option, open_settings, open_state, print_json
from autotuner.cli.sealing import Sealed, Sealing, seal_now, seal_paths
from autotuner.core.entry import GENESIS, Entry, Flaw
from autotuner.core.policy import Policy
from autotuner.core.replay import Replayed
from autotuner.core.replay import replay as replay_trial
from autotuner.core.seal import KEY_BYTES, checkpoints, read_checkpoints, since_checkpoints
from autotuner.core.state import Verdict
from autotuner.core.verdict import Judgement
from autotuner.edge import clock
from autotuner.edge.journal import Read, read_entries
from autotuner.edge.outbox import COMMON, NO_SLOT
from autotuner.edge.rows import Trial
from autotuner.edge.seals import begin
from autotuner.errors import JournalBroken, NotFound, Refused
from autotuner.known import benchmark_of
from autotuner.publishing import checked
from autotuner.settings import Settings

journal_option = click.option("--slot", metavar="NAME", help="The journal of this slot alone.")


@click.group()
def journal() -> None:
    """Show, follow, seal or verify the journal, or compute its verdicts again."""


@journal.command()
@click.argument("number", type=int, required=False)
@journal_option
@json_option
@click.pass_context
def show(ctx: click.Context, number: int | None, slot: str | None, as_json: bool) -> None:
    """Print the whole journal, or entry NUMBER; of several journals by their times, or that of one slot alone.

    \b
    Examples:
      autotuner journal show | less
      autotuner journal show 42
      autotuner journal show --slot kimi
    """
    _, settings = open_settings(ctx)
    chosen = [e for e in _entries(settings, slot) if number is None or e.number == number]
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
@journal_option
@click.pass_context
def tail(ctx: click.Context, count: int, follow: bool, slot: str | None) -> None:
    """Print the last entries, of all slots or of one."""
    _, settings = open_settings(ctx)
    entries = _entries(settings, slot)
    for entry in entries[-count:] if count else []:
        click.echo(_readable(entry))
    seen = {(entry.slot, entry.number) for entry in entries}
    while follow:
        try:
            clock.pause(0.5)
        except KeyboardInterrupt:
            return
        fresh = [entry for entry in _entries(settings, slot) if (entry.slot, entry.number) not in seen]
        for entry in fresh:
            click.echo(_readable(entry))
            seen.add((entry.slot, entry.number))


@journal.command()
@click.option("--since", metavar="CHECKPOINT", help="Prove that the files extend what `journal head` printed then.")
@click.option(
    "--key", metavar="FILE", help="The first key that `journal seal` printed, in a file; - reads it from stdin."
)
@journal_option
@json_option
@click.pass_context
def verify(ctx: click.Context, since: str | None, key: str | None, slot: str | None, as_json: bool) -> None:
    """Check that nothing in the journal was changed, lost or reordered; exit code 8 if something was.

    The files' hash chain is followed, and compared with the state database, which knows every entry that was published.
    Whoever can change both, and the service log, is found by a checkpoint or a key that is kept elsewhere.

    Each slot has a journal of its own, also one that is in the settings no more; all of them are checked, or that of one slot.

    \b
    Examples:
      autotuner journal verify
      autotuner journal verify --since 42:5d41402abc4b2a76b9719d911017c592
      autotuner journal verify --key - < first-key
    """
    points = read_checkpoints(since) if since is not None else {}
    if points is None:
        raise click.UsageError(f"{since} is no checkpoint; `autotuner journal head` prints one")
    state = open_state(ctx)
    seals = Sealing(state.settings, _first_key(key)) if key is not None else None
    journals = check_journals(state, slot)
    flaws = [flaw for read in journals for flaw in read.flaws]
    flaws += since_checkpoints(points, chains(journals))
    sealed = seals.check(journals, slot) if seals is not None else None
    flaws += sealed.flaws if sealed is not None else []
    if as_json:
        _print_verified(journals, flaws, sealed)
    if flaws:
        raise JournalBroken("the journal does not verify:\n" + "\n".join(f"  {flaw}" for flaw in flaws))
    if not as_json:
        for line in _verified(journals, since, sealed):
            click.echo(line)


def _verified(journals: list[Read], since: str | None, sealed: Sealed | None) -> list[str]:
    """What is said of journals in which nothing is wrong: a line each, which names it where there are several."""
    extends = f", extending {since}" if since is not None else ""
    if not journals:
        return [f"0 entries intact in 0 files; head none{extends}{sealed.said(None) if sealed else ''}"]
    lines = []
    for read in journals:
        name = (f"slot {read.slot}: " if read.slot else "of all slots, closed: ") if len(journals) > 1 else ""
        head = read.entries[-1].sha256[:16] if read.entries else "none"
        said = sealed.said(read) if sealed is not None else ""
        extended = extends if len(journals) == 1 else ""
        lines.append(
            f"{name}{len(read.entries)} entries intact in {len(read.files)} files; head {head}{extended}{said}"
        )
    return lines + ([f"together they extend {since}"] if extends and len(journals) > 1 else [])


def _print_verified(journals: list[Read], flaws: list[Flaw], sealed: Sealed | None) -> None:
    shown: dict[str, object] = {
        "entries": sum(len(read.entries) for read in journals),
        "files": sum(len(read.files) for read in journals),
        "head": journals[-1].head[1] if len(journals) == 1 and journals[-1].entries else "",
        "flaws": [str(flaw) for flaw in flaws],
        "journals": [
            {
                "slot": read.slot,
                "entries": len(read.entries),
                "files": len(read.files),
                "head": read.head[1] if read.entries else "",
                **({"sealed": sealed.last.get(read.slot, 0)} if sealed is not None else {}),
            }
            for read in journals
        ],
    }
    if sealed is not None and len(journals) <= 1:
        shown["sealed"] = sealed.last.get(journals[0].slot, 0) if journals else 0
    print_json(shown)


@journal.command()
@journal_option
@json_option
@click.pass_context
def head(ctx: click.Context, slot: str | None, as_json: bool) -> None:
    """Print a checkpoint of the journal as it is now: the last entry's number and the beginning of its hash, for each slot.

    Paste it where nobody who can change this host can change it: a chat, a ticket, another host. `journal verify --since`
    proves later that the journal still says what it said, and was only added to.

    \b
    Examples:
      autotuner journal head
      autotuner journal verify --since "$(ssh log-host cat checkpoint)"
    """
    journals = check_journals(open_state(ctx), slot)
    if flaws := [flaw for read in journals for flaw in read.flaws]:
        raise JournalBroken(f"the journal does not verify, so it gets no checkpoint: {flaws[0]}")
    heads = {read.slot: read.head for read in journals if read.entries}
    if len(heads) > 1:
        heads.pop(COMMON, None)  # the others go on from it
    point = checkpoints(heads)
    if not as_json:
        click.echo(point)
        return
    shown = [{"slot": name, "number": number, "sha256": sha256} for name, (number, sha256) in heads.items()]
    number, sha256 = next(iter(heads.values())) if heads else (0, GENESIS)
    alone = {"number": number, "sha256": sha256} if len(heads) <= 1 else {}
    print_json({"checkpoint": point, **alone, "journals": shown})


@journal.command()
@click.pass_context
def seal(ctx: click.Context) -> None:
    """Seal the journal from now on, and print the first key, once: keep it away from this host.

    Each entry gets a code that only that key can make, in the file `seals` beside its journal; one first key is enough for the
    journals of all slots, also of those to come. The host keeps the keys for the next entries alone, so that whoever takes it
    over cannot rewrite what was decided before: `journal verify --key` finds it.

    \b
    Examples:
      autotuner journal seal > first-key    # then move that file to another host
      ssh log-host cat first-key | autotuner journal verify --key -
    """
    state = open_state(ctx)
    if there := seal_paths(state.settings):
        raise Refused(
            f"the journal is sealed already; to begin with a new key, move {', '.join(map(str, there))} aside "
            "(what the old key sealed can then be checked only with those)"
        )
    journals = check_journals(state)
    if flaws := [flaw for read in journals for flaw in read.flaws]:
        raise JournalBroken(f"the journal does not verify, so it is not sealed: {flaws[0]}")
    key = secrets.token_bytes(KEY_BYTES)
    common = next((read for read in journals if read.slot == COMMON), None)
    begin(state.settings.seal_key, common.head[0] if common else 1, key)
    seal_now(state, journals)
    click.echo(key.hex())
    click.echo(
        "This key is shown once. Keep it elsewhere: whoever has it can forge, and without it nothing is proved.",
        err=True,
    )


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
@journal_option
@json_option
@click.pass_context
def replay(ctx: click.Context, numbers: tuple[int, ...], slot: str | None, as_json: bool) -> None:
    """Compute the verdicts of entries NUMBERS again from the recorded evidence; of all trials if none is named.

    The rules look at the recorded facts again under the policy texts of that time, the figures are taken from the samples
    again, and the verdict is judged again. Exit code 8 if anything comes out otherwise.

    \b
    Examples:
      autotuner journal replay
      autotuner journal replay 42
    """
    state = open_state(ctx)
    if slot is not None:
        _require_known(slot, [*state.settings.slots, *state.store.journals()])
    trials = [t for t in state.store.trials(slot) if t.entry is not None and t.verdict is not None]
    several = len({trial.slot for trial in trials}) > 1
    unknown = set(numbers) - {trial.entry for trial in trials}
    if unknown:
        raise NotFound(f"no trial was concluded by entry {min(unknown)}; autotuner status lists the trials")
    policies = state.store.kept_policies()
    done = [
        (trial, _replayed(state, trial, policies)) for trial in trials if not numbers or trial.entry in set(numbers)
    ]
    if as_json:
        print_json(
            [{"slot": t.slot, "entry": t.entry, "trial": t.id, "name": t.name, **asdict(again)} for t, again in done]
        )
    elif not done:
        click.echo("no trial was concluded yet, so there is nothing to compute again")
    for trial, again in [] if as_json else done:
        said = "as recorded" if not again.differences else f"{len(again.differences)} differences"
        click.echo(
            f"{f'{trial.slot}  ' if several else ''}{trial.entry:04d}  {trial.name}: {trial.verdict}, "
            f"{again.levels} level{'s' * (again.levels != 1)}, {again.looks} looks: {said}"
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


def check_journals(state: State, slot: str | None = None) -> list[Read]:
    """Read every journal, or that of one slot and what it goes on from, with all that is wrong. Raise NotFound."""
    journals = checked(state.settings, state.store)
    if slot is None:
        return journals
    _require_known(slot, [*state.settings.slots, *(read.slot for read in journals)])
    return [read for read in journals if read.slot in {slot, COMMON}]


def check_journal(state: State) -> tuple[list[Entry], list[Flaw]]:
    """Read every journal; return the entries of all of them with everything that is wrong."""
    journals = check_journals(state)
    return [e for read in journals for e in read.entries], [flaw for read in journals for flaw in read.flaws]


def _entries(settings: Settings, slot: str | None) -> list[Entry]:
    """The entries of all slots by their times, or of one, also from before it had a journal of its own. Raise NotFound."""
    entries, _ = read_entries(settings.journal)
    if slot is None:
        return entries
    _require_known(slot, [*settings.slots, *(entry.slot for entry in entries if entry.slot != NO_SLOT)])
    return [entry for entry in entries if entry.slot == slot]


def _require_known(slot: str, names: list[str]) -> None:
    known = [name for name in dict.fromkeys(names) if name != COMMON]
    if slot not in known:
        raise NotFound(f"there is neither a slot nor a journal called {slot}; known: {', '.join(known)}")


def chains(journals: list[Read]) -> dict[str, list[tuple[int, str]]]:
    """Each journal's (number, hash) from its very beginning, that of the common journal of earlier versions, by slot."""
    hashes = {read.slot: [(entry.number, entry.sha256) for entry in read.entries] for read in journals}
    common = hashes.get(COMMON, [])
    return {slot: (common if slot != COMMON else []) + chain for slot, chain in hashes.items()}


def _readable(entry: Entry) -> str:
    return entry.text.rsplit("<!--", 1)[0].rstrip() + "\n"
