"""The campaign of this folder, worked twice without a hand: with the stop rules in force, then every trial to its end.

    python examples/h200/campaign.py WORK                    both runs, below the folder WORK
    python examples/h200/campaign.py WORK --slots big        on a host with one GPU
    python examples/h200/campaign.py WORK --runs exhaustive  one of the runs alone; with --gpu 1 beside the other one
    python examples/h200/campaign.py WORK --rehearse         against servers that only pretend; no GPU needed

In the first run the daemon is killed (SIGKILL) once, while a server starts, and started again: it must come back by itself.
Each run is a folder with settings, state, journal and logs of its own, and is packed into WORK/NAME.tgz when it is over;
WORK/DONE is written at the very end. examples/h200/keep.py makes a recorded campaign of what is packed.
"""

import argparse
import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from autotuner.cli.campaign import best_serves, stop_servers
from autotuner.cli.common import State
from autotuner.core.state import LaunchState, Purpose, TrialState
from autotuner.edge import clock
from autotuner.edge.store import Store
from autotuner.settings import load_settings
from autotuner.shipped import folder

HERE = Path(__file__).resolve().parent
WRONG = "*-wrong-flag.toml"  # preflight refuses it; queued all the same, so that the server says so itself
# Without stop rules only what concerns the server itself is left: one that died or hangs must not be waited for.
EXHAUSTIVE_RULES = ("server.toml",)
RUNS = ("rules", "exhaustive")
POLL_S = 0.5


@dataclass(frozen=True)
class Plan:
    """What is asked for on the command line."""

    work: Path
    slots: tuple[str, ...]
    runs: tuple[str, ...]
    rehearse: bool
    kill_after: int
    limit_s: float
    until_s: float  # on the monotonic clock: when both runs must be over
    seconds: float | None
    gpu: int

    @property
    def program(self) -> str:
        """The module to run: the program, or the same with its engines in rehearsal."""
        return "autotuner.rehearsal" if self.rehearse else "autotuner"


@dataclass
class Run:
    """One of the two runs: its folder, its open state, and its daemon."""

    plan: Plan
    name: str
    where: Path
    state: State
    daemon: subprocess.Popen[bytes] | None = None

    def autotuner(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the program on this run's settings and show what it prints."""
        command = [sys.executable, "-m", self.plan.program, "-s", str(self.where / "autotuner.toml"), *arguments]
        ran = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        say(f"{self.name}: autotuner {arguments[0]} -> {ran.returncode}\n{ran.stdout.rstrip()}")
        return ran

    def start_daemon(self) -> None:
        """Start the daemon as a service manager would: in a session of its own."""
        command = [sys.executable, "-m", self.plan.program, "-s", str(self.where / "autotuner.toml"), "daemon"]
        with (self.where / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        say(f"{self.name}: daemon started, pid {self.daemon.pid}")

    def end_daemon(self, number: int = signal.SIGTERM) -> None:
        """Signal the daemon and wait for its end; servers live on."""
        assert self.daemon is not None
        self.daemon.send_signal(number)
        try:
            self.daemon.wait(30)
        except subprocess.TimeoutExpired:
            self.daemon.kill()
            self.daemon.wait()
        say(f"{self.name}: daemon ended by signal {number}")

    def concluded(self, slot: str | None = None) -> int:
        """How many trials have their verdict."""
        return sum(trial.state is TrialState.DONE for trial in self.state.store.trials(slot))

    def starting(self) -> bool:
        """Whether a server of a trial is being started this very moment."""
        rows = [row for slot in self.plan.slots for row in self.state.store.open_launches(slot)]
        return any(row.purpose is Purpose.TRIAL and row.state is LaunchState.STARTING for row in rows)

    def idle(self, slot: str) -> bool:
        """Whether nothing is left to try in a slot."""
        store = self.state.store
        return not store.queue(slot) and store.trial_in_hand(slot) is None


def say(text: str) -> None:
    """Print a line with the seconds since the machine started, which both runs share."""
    print(f"[{clock.monotonic_s():9.1f}] {text}", flush=True)


def main() -> None:
    """Work both runs, one after the other, and pack what they left."""
    plan = asked()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, too
    plan.work.mkdir(parents=True, exist_ok=True)
    done = plan.work / "DONE"
    done.unlink(missing_ok=True)
    try:
        for name in plan.runs:
            with prepared(plan, name) as run:
                work(run, kill=name == "rules", restore=name == "rules")
    finally:
        done.write_text("done\n", encoding="utf-8")
        say("done")


def asked() -> Plan:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for everything that comes of it")
    parser.add_argument("--slots", default="smol,big", help="which slots are worked")
    parser.add_argument("--gpu", type=int, default=0, help="the GPU of a single slot; its port is as much higher")
    parser.add_argument("--runs", default=",".join(RUNS), help="which runs are worked, in this order")
    parser.add_argument("--rehearse", action="store_true", help="servers only pretend")
    parser.add_argument("--kill-after", type=int, default=4, help="kill the daemon once so many trials are concluded")
    parser.add_argument("--limit-s", type=float, default=900.0, help="the longest that a run may take")
    parser.add_argument("--total-s", type=float, default=7200.0, help="the longest that both runs may take together")
    parser.add_argument("--seconds", type=float, help="measured time of a level, instead of the settings'")
    given = parser.parse_args()
    slots, runs = tuple(given.slots.split(",")), tuple(given.runs.split(","))
    if not set(runs) <= set(RUNS):
        parser.error(f"--runs knows {' and '.join(RUNS)}")
    until_s = clock.monotonic_s() + given.total_s
    work, limit_s = given.work.resolve(), given.limit_s
    return Plan(work, slots, runs, given.rehearse, given.kill_after, limit_s, until_s, given.seconds, given.gpu)


@contextmanager
def prepared(plan: Plan, name: str) -> Iterator[Run]:
    """Make a run's folder with its settings and rules, and open its state; whatever serves at the end is stopped."""
    where = plan.work / name
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir()
    rules = sorted(folder("policies").glob("*.toml"))
    (where / "policies").mkdir()
    for path in rules:
        if name == "rules" or path.name in EXHAUSTIVE_RULES:
            shutil.copy(path, where / "policies")
    for known in plan.work.glob("*/state/cache"):  # the flags of the engine, which takes a minute to print them
        if known.parent.parent != where:
            shutil.copytree(known, where / "state" / "cache", dirs_exist_ok=True)
    (where / "autotuner.toml").write_text(tomli_w.dumps(settings_for(plan)), encoding="utf-8")
    loaded = load_settings(where / "autotuner.toml")
    state = State(loaded, Store(loaded.database))
    try:
        yield Run(plan, name, where, state)
    finally:
        for slot in plan.slots:
            asyncio.run(stop_servers(state, slot))
        state.store.close()


def settings_for(plan: Plan) -> dict[str, Any]:
    """The folder's settings, for the slots that are worked."""
    settings = tomllib.loads((HERE / "autotuner.toml").read_text(encoding="utf-8"))
    settings["policies_dir"] = "policies"
    settings["slots"] = {slot: settings["slots"][slot] for slot in plan.slots}
    if len(plan.slots) == 1:
        only = settings["slots"][plan.slots[0]]
        only["gpus"] = [plan.gpu]
        only["port"] += plan.gpu
    for benchmark in settings["benchmarks"].values():
        benchmark["seconds"] = plan.seconds or benchmark["seconds"]
    if plan.rehearse and shutil.which("nvidia-smi") is None:
        for slot in settings["slots"].values():
            slot["gpus"] = []
    return settings


def work(run: Run, *, kill: bool, restore: bool) -> None:
    """Queue everything, let the daemon work it, and pack what it left, whatever happened."""
    files = [p for p in sorted(HERE.glob("*-[0-9]-*.toml")) if p.name.split("-")[0] in run.plan.slots]
    wrong = [path for path in files if path.match(WRONG)]
    try:
        run.autotuner("enqueue", *(str(path) for path in files))
        if wrong:
            run.autotuner("enqueue", "--no-preflight", *(str(path) for path in wrong))
        run.start_daemon()
        follow(run, kill=kill, restore=restore)
        run.end_daemon()
    except Exception as error:
        say(f"{run.name}: failed: {error!r}")
        raise
    finally:
        if run.daemon is not None and run.daemon.poll() is None:
            run.end_daemon()
        pack(run)


def follow(run: Run, *, kill: bool, restore: bool) -> None:
    """Wait until the queue is done and, if asked for, the best-known serves; kill the daemon once meanwhile."""
    over: Callable[[str], bool] = (lambda slot: best_serves(run.state, slot)) if restore else run.idle
    until, shown = min(clock.monotonic_s() + run.plan.limit_s, run.plan.until_s), 0
    while not all(over(slot) for slot in run.plan.slots):
        for row_id, entry in run.state.store.decided_after(shown):
            say(f"{run.name}: {entry.number:04d} {entry.title}: {entry.sentence}")
            shown = row_id
        if kill and run.concluded() >= run.plan.kill_after and run.starting():
            run.end_daemon(signal.SIGKILL)
            run.start_daemon()
            kill = False
        assert run.daemon is not None
        if run.daemon.poll() is not None:
            say(f"{run.name}: the daemon ended with {run.daemon.returncode}; it is started again")
            run.start_daemon()
        if clock.monotonic_s() > until:
            say(f"{run.name}: not done in time; what there is is kept")
            return
        clock.pause(POLL_S)
    for _, entry in run.state.store.decided_after(shown):
        say(f"{run.name}: {entry.number:04d} {entry.title}: {entry.sentence}")


def pack(run: Run) -> None:
    """Check the journal and put journal, state, candidates and logs into one archive."""
    run.autotuner("status", "--all")
    run.autotuner("journal", "verify")
    run.autotuner("journal", "replay")
    where, database = run.where, run.state.settings.database
    with closing(sqlite3.connect(database)) as live, closing(sqlite3.connect(where / "state.db")) as copy:
        live.backup(copy)
    with tarfile.open(run.plan.work / f".{run.name}.tgz", "w:gz", compresslevel=6) as archive:
        for path in (where / "state.db", where / "autotuner.toml", where / "daemon.log", where / "policies"):
            archive.add(path, path.relative_to(where.parent))
        if run.state.settings.journal.is_dir():
            archive.add(run.state.settings.journal, Path(run.name, "journal"))
        for path in sorted(run.state.settings.launches.glob("*/*.*")):
            archive.add(path, Path(run.name, "launches", path.parent.name, path.name))
    os.replace(run.plan.work / f".{run.name}.tgz", run.plan.work / f"{run.name}.tgz")  # noqa: PTH105 - whole or not there


if __name__ == "__main__":
    main()
