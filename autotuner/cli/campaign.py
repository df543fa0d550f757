"""What `demo` and `rehearse` share: a daemon of their own on a folder of their own, followed until its queue is done."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from autotuner.cli.common import State, describe_slot, live_line
from autotuner.core.state import LaunchState
from autotuner.edge import clock
from autotuner.edge.files import lock_holder
from autotuner.edge.host_local import LocalHost
from autotuner.errors import AutotunerError, HostError, TimedOut
from autotuner.settings import load_settings

DAEMON_WAIT_S = 15.0
DAEMON_END_S = 20.0
STOP_GRACE_S = 5.0


@contextlib.contextmanager
def own_daemon(where: Path, settings: Path, program: str = "autotuner") -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon on a folder's settings until the block is left; `program` is the module to run.

    SIGTERM and SIGHUP leave the block as ctrl-c does, so that whoever ends this command ends its daemon too.
    """
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    with (where / "daemon.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", program, "-s", str(settings), "daemon", "--log-format", "json"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        until = clock.monotonic_s() + DAEMON_WAIT_S
        while lock_holder(load_settings(settings).lock_file) is None and process.poll() is None:
            if clock.monotonic_s() > until:
                break
            clock.pause(0.05)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DAEMON_END_S)
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def follow(
    state: State,
    slot: str,
    process: subprocess.Popen[bytes],
    finished: Callable[[], bool],
    limit_s: float,
    *,
    quiet: bool = False,
) -> None:
    """Print each entry as it is decided, and a live line meanwhile, until it is finished."""
    shown, until = 0, clock.monotonic_s() + limit_s
    with live_line(quiet=quiet or not sys.stderr.isatty()) as show:
        while True:
            for row_id, entry in state.store.decided_after(shown):
                show("")
                if not quiet:
                    click.echo(f"{entry.number:04d}  {entry.title}: {entry.sentence}")
                shown = row_id
            if finished():
                return
            if process.poll() is not None:
                raise AutotunerError(f"the daemon ended with exit code {process.returncode}; read daemon.log")
            if clock.monotonic_s() > until:
                raise TimedOut(f"the campaign did not end within {limit_s:.0f} s; read daemon.log")
            show("      " + describe_slot(state.status(), slot, clock.monotonic_s()))
            clock.pause(0.2)


def best_serves(state: State, slot: str) -> bool:
    """Nothing waits, nothing is in hand, and the daemon says that the best-known serves."""
    store = state.store
    if store.queue(slot) or store.trial_in_hand(slot) or not store.ladder(slot):
        return False
    mine = state.status().get("slots", {}).get(slot, {})
    serving = [r for r in store.open_launches(slot) if r.state is LaunchState.SERVING]
    right = len(serving) == 1 and serving[0].candidate_id == store.ladder(slot)[0][0]
    return right and serving[0].id in mine.get("verified", []) and str(mine.get("sentence", "")).startswith("serving")


async def stop_servers(state: State, slot: str) -> None:
    """Stop what a campaign left serving; only launches of its own folder are touched. Raise HostError."""
    host = LocalHost(state.settings.launches)
    for row in state.store.open_launches(slot):
        seen = await host.stop(row.id, STOP_GRACE_S)
        if seen.alive:
            raise HostError(f"the server of {row.name} could not be stopped")


def free_port(wanted: int) -> int:
    """Given a port, return it if it is free on loopback, else another one that is."""
    for port in (wanted, 0):
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(s.getsockname()[1])
    raise HostError("no free port was found on 127.0.0.1")
