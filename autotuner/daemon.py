"""The loop: observe, decide, record the intent, act, record the outcome, publish the entry. Start-up is the loop too.

A cycle that completes feeds the watchdog; a wedged one does not. Whatever goes wrong in a cycle, the next one starts
again from what is recorded and what is observed.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotuner import log, outcome
from autotuner.context import SlotContext
from autotuner.core.decide import Wait
from autotuner.core.policy import Policy
from autotuner.core.redact import hide, hide_values
from autotuner.edge import clock, housekeeping, statusfile
from autotuner.edge.ballast import Ballast
from autotuner.edge.files import FolderLock
from autotuner.edge.hanging import HangWatch
from autotuner.edge.host import OneHost
from autotuner.edge.host_local import LocalHost
from autotuner.edge.host_nodes import members_of
from autotuner.edge.notify import Notifier
from autotuner.edge.store import Store
from autotuner.errors import AutotunerError, DiskFull, HostError, InvalidInput, Problem, StoreError
from autotuner.hosts import Hosts, controller_id
from autotuner.publishing import Publishing
from autotuner.rounds import Rounds
from autotuner.settings import Settings, load_policies, load_settings, needs_restart
from autotuner.slotworker import SlotWorker
from autotuner.tidying import Tidying

AFTER_A_STEP_S = 0.1
END_DEADLINE_S = 20.0  # well within the time that the unit gives a stop
TIDY_EVERY_S = 60.0
STATUS_EVERY_S = 5.0  # how old the status file may get while nothing changes: replacing a file makes the disk work
CYCLE_DEADLINE_S = 30.0  # a cycle only looks and records; one that takes longer than this is wedged


class Daemon:
    """Works every slot of a settings file until told to end."""

    def __init__(self, settings_path: Path, host: OneHost | None = None) -> None:
        """Take the state folder's lock and open the record; `host` is this machine unless another is given."""
        self._path = settings_path
        self._notifier = Notifier()
        self._settings = load_settings(settings_path)
        self._policies = load_policies(self._settings)
        self._lock = FolderLock(self._settings.lock_file)
        self._lock.acquire()
        self._store = Store(self._settings.database)
        self._store.db.require_intact()
        self._ballast = Ballast(self._settings.state_dir)
        self._publishing = Publishing(self._settings, self._store)
        controller = controller_id(self._settings.state_dir) if self._settings.hosts else ""
        self._hosts = Hosts(self._settings, controller, every=host)
        self._workers = [self._worker(name) for name in self._settings.slots]
        self._rounds = Rounds(self._workers, CYCLE_DEADLINE_S)
        self._tidying = Tidying(self._hosts, self._store, self._workers)
        self._ending = asyncio.Event()
        self._reload_wanted = False
        self._trouble = ""
        self._shown: dict[str, Any] = {}
        self._shown_s = 0.0
        self._tidy_at_s = 0.0
        self._log = log.get()
        self._take_secrets()

    async def run(self) -> None:
        """Work until SIGTERM or SIGINT; the servers live on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.set)
        loop.add_signal_handler(signal.SIGHUP, self._want_reload)
        self._warn()
        self._log.info("daemon started", pid=os.getpid(), settings=str(self._path), slots=list(self._settings.slots))
        watch = HangWatch(self._hangs)
        watch.expect(CYCLE_DEADLINE_S)
        try:
            await self._work(watch)
        finally:
            watch.rest()

    async def _work(self, watch: HangWatch) -> None:
        await self._say_where_servers_live()
        started = False
        while not self._ending.is_set():
            watch.expect(CYCLE_DEADLINE_S)
            started = await self._cycle(started)
            watch.expect(self._settings.cycle_s + CYCLE_DEADLINE_S)
            await self._pause()
        watch.expect(END_DEADLINE_S)
        await self._end()

    async def work_until(self, slot: str, done: Callable[[], bool], deadline_s: float) -> None:
        """Work one slot without a running daemon until what a command asked for is done, or so many seconds have passed."""
        worker = next(w for w in self._workers if w.ctx.name == slot)
        until = clock.monotonic_s() + deadline_s
        worker.start_up()
        while clock.monotonic_s() < until:
            try:
                await worker.cycle()
                self._publishing.publish()
            except StoreError as error:
                self._in_trouble(error)
            if done() and not worker.busy:
                return
            await clock.sleep(0.2)
        await worker.end()

    def close(self) -> None:
        """Let go of the hosts, the store and the lock."""
        self._hosts.close()
        self._store.close()
        self._lock.release()

    async def _cycle(self, started: bool) -> bool:
        """One cycle of every slot. The main loop's boundary: an error here must not end the service."""
        try:
            async with asyncio.timeout(CYCLE_DEADLINE_S):
                if not started:
                    self._start_up()
                if self._reload_wanted:
                    self._reload()
                await self._rounds.go()
                self._publishing.publish()
                await self._tidy()
        except StoreError as error:
            self._in_trouble(error)
            return started
        except Exception as error:  # noqa: BLE001 - the loop outlives its bugs; the watchdog catches a wedged one
            said = str(error) or "it did not end in time"
            self._log.error("cycle failed", error=said, exc_info=error)
            self._trouble = f"{type(error).__name__}: {said}"
            return started
        if self._trouble:
            self._log.info("going on", after=self._trouble)
        self._trouble = ""
        self._ballast.take()  # again, once there is room for it
        self._show()
        self._notifier.cycle_completed()
        return True

    def _hangs(self, tasks: tuple[str, ...]) -> None:
        """The watchdog is not fed by a cycle that does not end; before it bites, the log says what is waited for."""
        self._log.error("the daemon hangs: what should take seconds has not ended", tasks=list(tasks))

    def _warn(self) -> None:
        for warning in self._settings.warnings:
            self._log.warning(warning, settings=str(self._path))

    async def _say_where_servers_live(self) -> None:
        hosts = (host for worker in self._workers for host in members_of(worker.ctx.host))
        local = next((host for host in hosts if isinstance(host, LocalHost)), None)
        if local is not None:
            try:
                rung = await local.rung()
            except AutotunerError as error:  # each launch tries again, and says so in its slot
                self._log.error("no server can be launched", error=str(error))
            else:
                self._log.info("servers are launched", launcher=rung.name, why=rung.why)

    def _start_up(self) -> None:
        for worker in self._workers:
            worker.start_up()

    def _in_trouble(self, error: StoreError) -> None:
        """Nothing can be recorded: keep looking, free the ballast if the disk is full, and try again each cycle."""
        if str(error) != self._trouble:
            self._log.error("cannot record", error=str(error))
        self._trouble = str(error)
        if isinstance(error, DiskFull):
            self._ballast.drop()
        self._publishing.check_again()
        self._show()
        self._notifier.cycle_completed()

    async def _tidy(self) -> None:
        """Now and then: keep logs, old launches and what can be made again within bounds."""
        if clock.monotonic_s() < self._tidy_at_s:
            return
        self._tidy_at_s = clock.monotonic_s() + TIDY_EVERY_S
        try:
            await self._tidying.go(self._settings)
        except (HostError, OSError) as error:
            self._log.warning("old launches could not be removed", error=str(error))
        housekeeping.bound(self._settings.proposals, "*.toml", housekeeping.CANDIDATES_MAX)
        housekeeping.bound(self._settings.cache, "*.json", housekeeping.ANSWERS_MAX)

    def _show(self) -> None:
        """Say what is going on, where people and the service manager look for it."""
        slots = {
            w.ctx.name: {
                "sentence": w.last.reason,
                "action": type(w.last.action).__name__,
                "live": dict(vars(w.ctx.live)),
                "living": sorted(w.ctx.living),
                "verified": sorted(w.ctx.verified),
                "gpus_unread": w.ctx.given.unread,
                "ranks": list(w.ctx.ranks),
            }
            for w in self._workers
        }
        shown, now_s = {"trouble": self._trouble, "slots": slots}, clock.monotonic_s()
        if shown == self._shown and now_s - self._shown_s < STATUS_EVERY_S:
            return
        self._shown, self._shown_s = shown, now_s
        status = {"pid": os.getpid(), "at": clock.utc_label(), "at_s": now_s, **shown}
        statusfile.write(self._settings.state_dir, hide_values(status, self._store.secrets))
        said = self._trouble or "; ".join(f"{w.ctx.name}: {w.last.reason}" for w in self._workers)
        self._notifier.status(hide(said, self._store.secrets))

    async def _pause(self) -> None:
        """Sleep a cycle; less where a long action ends or the last one took no time, so that a trial loses none."""
        tasks = {w.task for w in self._workers if w.task is not None}
        at_once = any(w.task is None and not isinstance(w.last.action, Wait) for w in self._workers)
        ending = asyncio.ensure_future(self._ending.wait())
        pause_s = min(self._settings.cycle_s, AFTER_A_STEP_S if at_once else self._settings.cycle_s)
        try:
            await asyncio.wait({ending, *tasks}, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()

    def _want_reload(self) -> None:
        self._reload_wanted = True

    def _reload(self) -> None:
        """Read settings and policies again; a broken file keeps the old ones and says what is wrong."""
        self._reload_wanted = False
        self._notifier.reloading()
        try:
            settings = load_settings(self._path)
            policies = load_policies(settings)
            if changed := needs_restart(self._settings, settings):
                verb = "needs" if len(changed) == 1 else "need"
                raise InvalidInput([Problem(str(self._path), f"{', '.join(changed)} {verb} a restart of the daemon")])
        except AutotunerError as error:
            self._log.error("settings not taken over, the old ones stay in force", error=str(error))
            sentence = f"Settings or policies could not be read again; the old ones stay in force: {error}"
            for worker in self._workers:  # each slot's reader must know what its slot works by
                outcome.note(worker.ctx, "settings kept", sentence)
        else:
            self._take_over(settings, policies)
        self._notifier.ready()

    def _take_over(self, settings: Settings, policies: tuple[Policy, ...]) -> None:
        self._settings, self._policies = settings, policies
        self._publishing.take_over(settings)
        for worker in self._workers:
            worker.ctx.settings, worker.ctx.policies = settings, policies
        self._take_secrets()
        self._log.info("settings taken over", settings=str(self._path))
        self._warn()

    def _take_secrets(self) -> None:
        for worker in self._workers:
            worker.ctx.take_secrets()

    def _worker(self, name: str) -> SlotWorker:
        return SlotWorker(SlotContext(name, self._settings, self._policies, self._store, self._hosts.of(name)))

    async def _end(self) -> None:
        self._notifier.stopping()
        await self._rounds.end()
        await self._tidying.end()
        for worker in self._workers:
            await worker.end()
        self._log.info("daemon ended; servers live on")
