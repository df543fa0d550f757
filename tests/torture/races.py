"""Starts eight daemons at once on one state folder, and sixteen enqueuers some of which are killed; looks into what they hold.

One daemon may work a folder, the others must say who does and end with 6; when it is killed, while it measures, its shim, server
and benchmark worker hold nothing that keeps the next one out. What an enqueue with exit code 0 acknowledged is in the queue, once,
however many enqueued the same thing, and whatever was killed.
"""

import os
import random
import signal
from pathlib import Path

from autotuner.edge import procfs
from autotuner.edge.files import lock_holder
from torture import faults, street
from torture.forks import Forked, until
from torture.home import Home, command_of
from torture.tally import Tally

HOMES = 2
ROUNDS = 15
STARTS = 8
ENQUEUERS = 8
LOCKED = 6  # the exit code of a daemon that finds another one
OURS = ("daemon.lock", "state.db", "state.db-wal", "state.db-shm")
ENQUEUE_CALLS = {"write": 1, "pwrite64": 8, "fdatasync": 1, "create": 2, "unlink": 1}  # and how many an enqueue makes


class Round:
    """One round on a house: a wave of enqueuers, and a race of daemons for the folder."""

    def __init__(self, home: Home, seed: int, tally: Tally) -> None:
        self.home, self.tally, self.seed = home, tally, seed
        self.luck = random.Random(seed)

    def run(self) -> bool:
        """Do it; return False if the house is not to be used any more."""
        self._measure_and_audit()
        self.home.daemon.kill()
        if self.luck.random() < 0.5:
            self._enqueue()
        winner = self._race()
        if winner is None:
            return False
        self.home.daemon = winner
        if not self.home.recovered():
            self.tally.broken(
                "P17", f"the daemon that won the race restored nothing; {self._again()}\n{self.home.log_tail()}"
            )
            return False
        self._enqueue()
        return True

    def _measure_and_audit(self) -> None:
        """While it measures, so that there are a worker, a server and a shim: none of them holds what is the daemon's."""
        home = self.home
        home.enqueue(f"m{home.runs}", tok_s=10 + home.runs / 1000)
        home.let_go()
        measuring = until(lambda: home.control.phase == "measuring", 20) if home.forks.library else True
        holders = self._holders()
        self.tally.counts["audited while measuring" if measuring else "audited while not measuring"] += 1
        self.tally.check("P17", kept=not holders, how=f"{'; '.join(holders)}; {self._again()}")

    def _holders(self) -> list[str]:
        """The processes of the house, other than the daemon, that have one of its files open."""
        home = self.home
        family = home.family()
        found = []
        for pid in {*family["shim"], *family["server"], *procfs.descendants(home.daemon.pid)[1:]}:
            held = open_files(pid, home.state)
            # A child between its fork and its exec still has everything, and still is what the daemon is.
            if held and command_of(pid) != command_of(home.daemon.pid):
                found.append(f"{procfs.name_of(pid)} ({pid}) holds {', '.join(held)}")
        return found

    def _race(self) -> Forked | None:
        """Start eight at once; return the one that works."""
        home = self.home
        argv = ["-s", str(home.settings_file), "daemon", "--log-format", "json"]
        started, controls = [], []
        for _ in range(STARTS):
            home.runs += 1
            control = faults.Control(home.folder / f"control-{home.runs}")
            controls.append(control)
            started.append(home.forks.start(argv, home.folder / "daemon.log", control))
        until(lambda: sum(each.code is not None for each in started) >= STARTS - 1, 60)
        living = [each for each in started if each.code is None]
        codes = sorted(each.code for each in started if each.code is not None)
        self.tally.counts["races of 8 starts"] += 1
        holder = lock_holder(home.state / "daemon.lock")
        kept = len(living) == 1 and codes == [LOCKED] * (STARTS - 1) and holder == living[0].pid
        self.tally.check(
            "P17",
            kept=kept,
            how=f"{len(living)} of {STARTS} live, exit codes {codes}, the lock says {holder}; {self._again()}",
        )
        for each in living[1:] if kept else living:
            each.kill()
        if kept:
            home.control = controls[started.index(living[0])]
        return living[0] if kept else None

    def _enqueue(self) -> None:
        """Enqueue at once, two and two the same; kill some of them; then ask once more for each."""
        home, luck = self.home, self.luck
        names = [f"q{home.runs}-{n}" for n in range(ENQUEUERS // 2)]
        paths = [
            home.candidate(name, max_seconds=900, tok_s=30 + home.runs / 1000 + n / 1e5) for n, name in enumerate(names)
        ]
        tries: list[tuple[str, Forked]] = []
        for name, path in [*zip(names, paths, strict=True)] * 2:
            home.runs += 1
            control = faults.Control(home.folder / f"control-{home.runs}")
            if luck.random() < 0.6:
                call = luck.choice(sorted(ENQUEUE_CALLS))
                control.kill_at(None, call, luck.randint(1, ENQUEUE_CALLS[call]), luck.choice(faults.WHEN))
            argv = ["-s", str(home.settings_file), "enqueue", str(path)]
            tries.append((name, home.forks.start(argv, home.folder / f"command-{home.runs}.log", control)))
            if not home.forks.library and luck.random() < 0.5:
                until(lambda: False, luck.uniform(0, 0.1))
                tries[-1][1].kill()
        for _, each in tries:
            if each.wait(90) is None:
                each.kill()
        self.tally.counts["enqueues"] += len(tries)
        self.tally.counts["enqueues killed"] += sum(each.code == -signal.SIGKILL for _, each in tries)
        acknowledged = {name for name, each in tries if each.code == 0}
        self._once(acknowledged, names, "after the wave")
        for name, path in zip(names, paths, strict=True):
            code, said = home.autotuner("enqueue", path)
            self.tally.check(
                "P18", kept=code in {0, 4}, how=f"enqueue of {name} again: {code} {said[-300:]}; {self._again()}"
            )
        self._once(set(names), names, "after each was enqueued again")
        home.autotuner("queue", "cancel", *names)

    def _once(self, acknowledged: set[str], names: list[str], when: str) -> None:
        found = [name for (name,) in self.home.ask("SELECT name FROM trials WHERE state != 'cancelled'")]
        for name in names:
            times = found.count(name)
            kept = times == 1 if name in acknowledged else times <= 1
            self.tally.check("P18", kept=kept, how=f"{name} is in the queue {times} times {when}; {self._again()}")

    def _again(self) -> str:
        return f"again: python -m torture --part races --seed {self.seed} --seconds 2"


def open_files(pid: int, state: Path) -> list[str]:
    """Which of the daemon's own files a process has open."""
    found = []
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            where = Path(os.readlink(f"/proc/{pid}/fd/{name}"))
            if where.parent == state and where.name in OURS:
                found.append(where.name)
    except OSError:
        return found  # it has ended
    return found


def run(seed: int, seconds: float) -> Tally:
    """Work houses side by side until the time is over. Round k has the seed `seed + k`."""
    return street.work(
        Home,
        lambda home, round_seed, tally: Round(home, round_seed, tally).run(),
        seed,
        seconds,
        promise="P17",
        homes=HOMES,
        rounds=ROUNDS,
    )
