"""Puts the real daemon into the simulated world: its clock, its probes, its load and the system calls of its record.

What is replaced is what the product itself names as edges: the functions of `edge/clock.py`, the Host, the Probe, the Load and the
GPU watch. Database and journal are the real ones, on files in memory; their writes can fail or be the last thing the daemon does.
fsync is left out for speed: what a power loss leaves of a file is the matter of another part of this harness.
"""

import errno
import os
import sqlite3
import warnings
from pathlib import Path
from typing import Any

import structlog

from autotuner import act, context, daemon, measure, slotworker
from autotuner.core import decide
from autotuner.core.policy import Policy
from autotuner.edge import ballast, clock, database, files, hanging, statusfile, store
from autotuner.errors import DiskFull, StoreError
from autotuner.settings import Settings
from torture.simcheck import Checker
from torture.simfront import NoMachine, SimLoad, SimProbe
from torture.simhost import SimHost
from torture.simworld import World

START_POLL_S = 2.0


class Scene:
    """The world, the host and the checker of the campaign that runs now, and the settings of its daemon."""

    def __init__(
        self, world: World, host: SimHost, checker: Checker, settings: Settings, rules: tuple[Policy, ...]
    ) -> None:
        self.world, self.host, self.checker = world, host, checker
        self.settings, self.rules = settings, rules
        self.open: list[database.Database] = []
        self.faulty = True  # whether the database that speaks now is the daemon's

    def forget(self) -> None:
        """The daemon's process is gone: its connection with what it had not committed, and its lock."""
        for db in self.open:
            db._connection.close()
        self.open.clear()
        self.checker.rolled_back()


now: Scene


def enter(scene: Scene) -> None:
    """Make this campaign the one that runs."""
    global now  # noqa: PLW0603 - the product's clock is a module too
    now = scene


def install() -> None:
    """Replace the edges, once a process."""
    warnings.filterwarnings(
        "ignore", message="coroutine .* was never awaited"
    )  # of a daemon killed before its first step
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    _clock()
    _edges()
    _record()
    _watch()


def _clock() -> None:
    clock.monotonic_s = lambda: now.world.uptime_s
    clock.monotonic_us = lambda: int(now.world.uptime_s * 1e6)
    clock.utc_now = lambda: now.world.wall
    clock.utc_label = lambda: f"{now.world.wall:%Y-%m-%d %H:%M:%S}Z"
    clock.local_now = lambda: now.world.wall
    clock.boot_id = lambda: now.world.boot_id


def _edges() -> None:
    """What the daemon is given instead of processes, sockets and threads."""
    act.START_POLL_S = START_POLL_S
    # The timer of real time that would tell of a loop that hangs: a thousand threads a campaign, and no part of what is decided.
    hanging.faulthandler.dump_traceback_later = lambda *_, **__: None
    hanging.faulthandler.cancel_dump_traceback_later = lambda: None
    act.uuid.uuid4 = lambda: _Hex(f"{now.world.rng('launches').getrandbits(64):016x}")
    context.Probe = _probe
    measure.load_for = _load
    measure.MachineWatch = NoMachine
    daemon.load_settings = lambda _path: now.settings
    daemon.load_policies = lambda _settings: now.rules
    daemon.FolderLock = _Lock
    ballast.BALLAST_BYTES = 4096
    statusfile.write = lambda _folder, _status: None


class _Hex:
    def __init__(self, text: str) -> None:
        self.hex = text


class _Lock:
    """The state folder's lock; that there is one daemon is the matter of another part."""

    def __init__(self, _path: Path) -> None: ...

    def acquire(self) -> None: ...

    def release(self) -> None: ...


def _probe(place: Any, endpoints: Any) -> SimProbe:
    return SimProbe(now.host, place.port, metrics=endpoints.metrics is not None)


def _load(url: str, benchmark: Any, level: Any, *_args: Any, **_keys: Any) -> SimLoad:
    return SimLoad(now.host, int(url.rsplit(":", 1)[1]), int(level), benchmark.seconds)


def _record() -> None:
    """Database and journal: every statement and every write may fail, or be the last thing that the daemon does."""
    real_init, real_run, real_write = database.Database.__init__, database.Database.run, files.write_all
    os.fsync = lambda _fd: _fsync()

    def init(self: database.Database, path: Path) -> None:
        real_init(self, path)
        if now.faulty:
            now.open.append(self)

    def run(self: database.Database, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql.startswith("BEGIN"):
            now.checker.rolled_back()
        if now.faulty:
            _before_statement(sql)
        cursor = real_run(self, sql, *values)
        if sql == "COMMIT":
            now.checker.committed()
        if now.faulty:
            now.world.kill_here()
        return cursor

    def write_all(fd: int, data: bytes) -> None:
        world, rng = now.world, now.world.rng("writes")
        if now.faulty and world.faults.strike("journal write fails"):
            os.write(fd, data[: rng.randrange(len(data))])
            raise OSError(errno.ENOSPC, "No space left on device")
        if now.faulty and world.faults.strike("journal write is cut"):
            os.write(fd, data[: rng.randrange(len(data))])
            world.die()
        real_write(fd, data)
        if now.faulty:
            world.kill_here()

    database.Database.__init__ = init
    database.Database.run = run
    files.write_all = write_all


def _before_statement(sql: str) -> None:
    world = now.world
    world.kill_here()
    if world.faults.strike("database full"):
        raise DiskFull("the state database cannot be written: database or disk is full")
    if world.faults.strike("database error"):
        raise StoreError("the state database: database is locked")


def _fsync() -> None:
    if now.faulty and now.world.faults.strike("journal fsync fails"):
        raise OSError(errno.EIO, "Input/output error")


def _watch() -> None:
    """Have the checker hear of every decision and of every change of state, as soon as it is committed."""
    real_decide = decide.decide

    def decided(recorded: decide.Recorded, observed: decide.Observed) -> decide.Decision:
        decision = real_decide(recorded, observed)
        now.checker.decided(recorded.slot, decision)
        return decision

    slotworker.decide.decide = decided
    for name in ("add_launch", "move_launch", "promote", "forgive_failures", "add_entry", "note_gpu_pids"):
        _heard(name)
    real_update = store.Store.update_slot

    def update_slot(self: store.Store, name: str, **columns: Any) -> None:
        real_update(self, name, **columns)
        if columns.get("degraded"):
            _tell("degraded", self, (name, columns["degraded"]), {})

    store.Store.update_slot = update_slot


def _heard(name: str) -> None:
    real = getattr(store.Store, name)

    def heard(self: store.Store, *args: Any, **keys: Any) -> Any:
        result = real(self, *args, **keys)
        _tell(name, self, args, keys)
        return result

    setattr(store.Store, name, heard)


def _tell(name: str, of: store.Store, args: tuple[Any, ...], keys: dict[str, Any]) -> None:
    """What is committed is heard at once, what is in a transaction once that is committed."""
    now.checker.heard(name, args, keys, at_once=not of.db._connection.in_transaction)
