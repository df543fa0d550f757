"""`restore-best`, `pause`, `stop`, `resume`: the operator takes the wheel."""

import asyncio
import getpass
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from autotuner.cli.common import State, describe_slot, open_settings, open_state, slot_option, wait_until
from autotuner.edge import clock
from autotuner.edge.ballast import Ballast
from autotuner.edge.store import Store
from autotuner.errors import Degraded, DiskFull, Locked, NotFound, TimedOut

NO_DAEMON_TIMEOUT_S = 3600.0


@click.command()
@click.option("--wait", is_flag=True, help="Wait until it serves and has generated tokens.")
@click.option("--timeout", type=float, metavar="S", help="Give up waiting after so many seconds.")
@click.option(
    "--force",
    is_flag=True,
    help="Do not wait for requests on what serves now, nor for GPU memory that did not come back.",
)
@click.option("--then-resume", is_flag=True, help="Go on with the queue afterwards, instead of holding it.")
@slot_option
@click.pass_context
def restore_best(
    ctx: click.Context, wait: bool, timeout: float | None, force: bool, then_resume: bool, slot: str | None
) -> None:
    """Put the best-known server back, now.

    A trial in hand is interrupted and goes back to the queue. The queue is then held, so that the best-known stays, until
    `autotuner resume`. Works without a running daemon too: then this command does it itself, and waits.

    \b
    Examples:
      autotuner restore-best --wait
      autotuner restore-best --then-resume
    """
    state = open_state(ctx)
    name = state.slot(slot)
    if not state.store.ladder(name):
        raise NotFound(f"slot {name} has no best-known server yet; enqueue a candidate first")
    why = f"restore-best by {_who()}"
    columns = {"degraded": "", "hands_off": "", "stopped": "", "force": force}
    _ask(state, name, forgive=True, restore_wanted=why, restore_hold=int(not then_resume), **columns)
    done = partial(_restored, state.store, name)
    if state.daemon_pid is None:
        _work_here(ctx, name, done, timeout, "restoring")
        if not done():
            raise TimedOut("the best-known server does not serve yet; look at its log, or run this again")
    elif wait:
        wait_until(done, lambda: describe_slot(state.status(), name, clock.monotonic_s()), timeout)
    else:
        click.echo("asked the daemon to restore the best-known server; watch it: autotuner status --follow")
        return
    _report(state, name)


@click.command()
@click.option("--now", is_flag=True, help="Interrupt the trial in hand; it goes back to the queue.")
@click.option("--hands-off", is_flag=True, help="The daemon only watches: it neither starts nor stops anything.")
@click.option("--reason", default="", help="Shown in status and journal.")
@slot_option
@click.pass_context
def pause(ctx: click.Context, now: bool, hands_off: bool, reason: str, slot: str | None) -> None:
    """Begin nothing new; the trial in hand ends, the best-known is put back and kept serving.

    \b
    Examples:
      autotuner pause --reason "demo for visitors"
      autotuner pause --now
      autotuner pause --hands-off
    """
    state = open_state(ctx)
    why = f"by {_who()}" + (f", {reason}" if reason else "")
    for name in state.slots(slot):
        columns = {"hands_off": why} if hands_off else {"paused": f"now: {why}" if now else why}
        with state.store.transaction():
            state.store.update_slot(name, **columns)
        said = "hands off" if hands_off else "paused, the trial in hand is put back" if now else "paused"
        click.echo(f"slot {name}: {said}; go on with: autotuner resume")


@click.command()
@click.option("--wait", is_flag=True, help="Wait until nothing serves.")
@click.option("--timeout", type=float, metavar="S", help="Give up waiting after so many seconds.")
@click.option("--force", is_flag=True, help="Do not wait for requests that run on it.")
@click.option("--reason", default="", help="Shown in status and journal.")
@slot_option
@click.pass_context
def stop(ctx: click.Context, wait: bool, timeout: float | None, force: bool, reason: str, slot: str | None) -> None:
    """Stop the server of a slot on purpose, and keep it stopped.

    Requests that run on it get `drain_s` to end. A trial in hand goes back to the queue. No server runs on the slot then,
    also after a restart of the daemon or the host, until `autotuner resume` or `autotuner restore-best`. Works without a
    running daemon too: then this command does it itself, and waits.

    \b
    Examples:
      autotuner stop --reason "the host gets a new driver" --wait
      autotuner stop --force
    """
    state = open_state(ctx)
    name = state.slot(slot)
    why = f"by {_who()}" + (f", {reason}" if reason else "")
    _ask(state, name, stopped=why, force=force, restore_wanted="", restore_hold=0, hands_off="")
    done = partial(_nothing_runs, state.store, name)
    if state.daemon_pid is None:
        _work_here(ctx, name, done, timeout, "stopping")
        if not done():
            raise TimedOut("the server still runs; run this again, or look at its processes")
    elif wait:
        wait_until(done, lambda: describe_slot(state.status(), name, clock.monotonic_s()), timeout)
    else:
        click.echo("asked the daemon to stop the server; watch it: autotuner status --follow")
        return
    if degraded := state.store.slot(name).degraded:
        raise Degraded(f"slot {name}: no server runs, but it is degraded: {degraded}; read: autotuner journal tail")
    click.echo(f"slot {name}: no server runs; go on with: autotuner resume, or autotuner restore-best")


@click.command()
@click.option("--new-campaign", is_flag=True, help="Count budgets (trials, GPU hours) from here on.")
@slot_option
@click.pass_context
def resume(ctx: click.Context, new_campaign: bool, slot: str | None) -> None:
    """Go on after a pause, a stop, a restore-best, or once a degraded slot was mended."""
    state = open_state(ctx)
    for name in state.slots(slot):
        row = state.store.slot(name)
        columns: dict[str, str | int] = {"paused": "", "hands_off": "", "degraded": "", "stopped": "", "force": 0}
        if new_campaign:
            columns["campaign_from"] = max((t.id for t in state.store.trials(name) if t.begun_at), default=0)
        with state.store.transaction():
            state.store.forgive_failures(name)
            state.store.update_slot(name, **columns)
        was = row.stopped or row.degraded or row.hands_off or row.paused
        click.echo(f"slot {name}: goes on" + (f" (it was held: {was})" if was else ""))


def _ask(state: State, name: str, *, forgive: bool = False, **columns: Any) -> None:
    """Write what the operator wants; where the disk is full, in the room that is held back for that."""
    for last in (False, True):
        try:
            with state.store.transaction():
                if forgive:
                    state.store.forgive_failures(name)
                state.store.update_slot(name, **columns)
        except DiskFull:
            if last:
                raise
            Ballast(state.settings.state_dir).drop()
        else:
            return


def _work_here(ctx: click.Context, name: str, done: Callable[[], bool], timeout: float | None, what: str) -> None:
    """No daemon runs: take its lock and work the slot until it is done, or the time is over."""
    from autotuner.daemon import Daemon

    path, _ = open_settings(ctx)
    click.echo(f"no daemon is running: {what} here", err=True)

    async def work() -> None:
        daemon = Daemon(path)
        try:
            await daemon.work_until(name, done, timeout or NO_DAEMON_TIMEOUT_S)
        finally:
            daemon.close()

    try:
        asyncio.run(work())
    except Locked:
        # A daemon started in between, and will do it.
        wait_until(done, lambda: "the daemon does it", timeout)


def _nothing_runs(store: Store, name: str) -> bool:
    return not store.open_launches(name)


def _restored(store: Store, name: str) -> bool:
    return not store.slot(name).restore_wanted


def _report(state: State, name: str) -> None:
    row = state.store.slot(name)
    if row.degraded:
        raise Degraded(f"slot {name} is degraded: {row.degraded}; read: autotuner journal tail")
    best = state.store.ladder(name)[0][1]
    url = state.settings.url_of(name)
    held = "; the queue is held: autotuner resume" if row.paused else ""
    click.echo(f"{best} serves at {url}{held}")


def _who() -> str:
    """The person, not the account: a service's commands are mostly given through sudo."""
    if os.environ.get("SUDO_USER"):
        return os.environ["SUDO_USER"]
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown user"
