"""P24: servers that lie, on the real host and asked by the real probes: none may ever be called serving.

Three phases: a lie from the start on; one that begins after the server was called serving, when it is looked at again; and one that
begins while no daemon runs. A stranger on the port is such a lie, too, however well it answers. An honest server must be called
serving, or nothing would be shown.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from autotuner import act
from autotuner.context import SlotContext
from autotuner.core import decide
from autotuner.core.candidate import parse_candidates
from autotuner.core.source import Source
from autotuner.core.state import LaunchState, Purpose
from autotuner.edge import probes, procfs
from autotuner.edge.host_local import LocalHost
from autotuner.edge.store import Store
from autotuner.errors import HostError
from autotuner.settings import load_policies, load_settings
from torture import liar
from torture.tally import Tally

LIAR = Path(__file__).with_name("liar.py")
STRANGERS = ("stranger", "shares")  # our server is silent, or honest and not alone
LATER = (
    "refuses",
    "hangs",
    "500",
    "cut",
    "endless",
    "reset",
    "ends",
    *liar.BODIES,
)  # what a server that served may turn to
PHASES = ("start", "serving", "restart")
AT_ONCE = 6
LIARS_LIVE_S = 0.5  # none of them dies
ANSWER_S = 5.0  # instead of a minute; an honest server answers at once, also on a loaded machine
LIES_FOR_S, HONEST_S = 4.0, 60.0


def run(seed: int, seconds: float) -> Tally:
    """Every lie in every phase, in an order drawn from the seed, again and again until the time is over; at least a few."""
    patience_s, probes.GENERATE_TIMEOUT_S = probes.GENERATE_TIMEOUT_S, ANSWER_S
    dying_s, act.DYING_S = act.DYING_S, LIARS_LIVE_S
    try:
        return _work(seed, seconds)
    finally:
        probes.GENERATE_TIMEOUT_S, act.DYING_S = patience_s, dying_s


def _work(seed: int, seconds: float) -> Tally:
    tally, until, number = Tally(), time.monotonic() + seconds, 0
    cases = [("start", mode) for mode in (*liar.MODES, *STRANGERS)]
    cases += [(phase, mode) for phase in PHASES[1:] for mode in (*LATER, "shares")]
    cases += [(phase, "good") for phase in PHASES]
    while number == 0 or time.monotonic() < until:
        random.Random(seed + number).shuffle(cases)
        for i in range(0, len(cases), AT_ONCE):
            if number + i and time.monotonic() > until:
                return tally
            asyncio.run(_some(tally, cases[i : i + AT_ONCE], seed))
        number += len(cases)
    return tally


async def _some(tally: Tally, cases: list[tuple[str, str]], seed: int) -> None:
    await asyncio.gather(*(_one(tally, phase, mode, seed) for phase, mode in cases))


async def _one(tally: Tally, phase: str, mode: str, seed: int) -> None:
    with _house(mode if phase == "start" else "good", mode) as (first, folder, port):
        ctx = first
        turns = folder / "turns"
        again = f"the lie {mode} in phase {phase}: python -m torture --part probes --seed {seed}"
        with _stranger(port) if mode in STRANGERS and phase == "start" else contextlib.nullcontext():
            row_id = await _start(ctx)
        if phase != "start":
            tally.check("P24", kept=_serving(ctx, row_id), how=f"{again}: an honest server was not called serving")
            if phase == "restart":
                ctx = SlotContext(ctx.name, ctx.settings, ctx.policies, ctx.store, ctx.host)
            ctx.verified.clear()  # the daemon asks for a fresh proof
            turns.touch()
            with _stranger(port) if mode in STRANGERS else contextlib.nullcontext():
                await _verify(ctx, row_id)
        said = row_id in ctx.verified or (phase == "start" and ctx.store.launch(row_id).state is LaunchState.SERVING)
        if mode == "good":
            tally.check("P24", kept=said, how=f"{again}: an honest server was not called serving")
        else:
            tally.check("P24", kept=not said, how=f"{again}: it was called serving")
        tally.counts["lies told" if mode != "good" else "honest servers"] += 1
        await ctx.host.stop(row_id, 0.1)


def _serving(ctx: SlotContext, row_id: str) -> bool:
    return row_id in ctx.verified and ctx.store.launch(row_id).state is LaunchState.SERVING


async def _start(ctx: SlotContext) -> str:
    """Launch the slot's one candidate as the best-known and follow its start to its end."""
    (candidate_id,) = (row["id"] for row in ctx.store.db.all("SELECT id FROM candidates"))
    await act.launch(ctx, decide.Launch(candidate_id, "liar", Purpose.RESTORE))
    (row,) = ctx.store.open_launches(ctx.name)
    with contextlib.suppress(HostError):
        await act.await_serving(ctx, decide.AwaitServing(row.id))
    return row.id


async def _verify(ctx: SlotContext, row_id: str) -> None:
    """Ask for a proof of life as the daemon does; a stranger on the port keeps the stop from being proven, which is no matter here."""
    with contextlib.suppress(HostError):
        await act.verify(ctx, decide.Verify(row_id))


@contextlib.contextmanager
def _house(mode: str, later: str) -> Iterator[tuple[SlotContext, Path, int]]:
    """One slot with one candidate: a server that lies from the start, or from when the file `turns` is there."""
    with tempfile.TemporaryDirectory(prefix="autotuner-probes-") as name:
        folder = Path(name)
        port = _free_port()
        honest = mode in {"good", "shares"}
        settings = folder / "autotuner.toml"
        limit_s = HONEST_S if honest and mode != "shares" else LIES_FOR_S
        settings.write_text(
            f'state_dir = "{folder}/state"\n[slots.s]\nport = {port}\nstart_timeout_s = {limit_s}\nstop_grace_s = 0.1\n'
        )
        loaded = load_settings(settings)
        loaded.state_dir.mkdir()
        lies = [later, str(folder / "turns")] if mode == "good" else ["good" if honest else _ours(mode)]
        argv = [sys.executable, "-I", "-S", str(LIAR), "{port}", *lies]
        text = f'name = "liar"\nengine = "command"\n[launch]\ncommand = {json.dumps(argv)}\n'
        (candidate,) = parse_candidates(Source("liar.toml", text))
        store = Store(loaded.database)
        try:
            store.put_candidate(candidate, text, "liar.toml")
            host = LocalHost(loaded.launches, loaded.launcher)
            yield SlotContext("s", loaded, load_policies(loaded), store, host), folder, port
        finally:
            for launch in loaded.launches.glob("*"):
                for pid in {*procfs.of_launch(launch.name), *procfs.in_group_of(launch.name)}:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            store.close()


def _ours(mode: str) -> str:
    return "silent" if mode == "stranger" else mode


@contextlib.contextmanager
def _stranger(port: int) -> Iterator[None]:
    """Somebody else's server on the slot's port, which answers as well as one can."""
    stranger = subprocess.Popen(
        [sys.executable, "-I", "-S", str(LIAR), str(port), "good"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert stranger.stdout is not None
    stranger.stdout.readline()
    try:
        yield
    finally:
        stranger.kill()
        stranger.communicate()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
