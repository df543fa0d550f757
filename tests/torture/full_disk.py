"""Fills the disk under real daemons, in each phase of their work, and lets daemon and server die on it.

A house lives on a small tmpfs that is filled to the last byte; where none may be mounted, the daemon's own writes are refused
instead. With 0 bytes free the best-known must be serving: it goes on, or comes back after the server, the daemon or both were
killed. When there is room again the queue goes on by itself, nothing acknowledged is lost and the journal verifies. One house has
no benchmark client at all: the best-known is restored there too.
"""

import random
import subprocess
import time
from pathlib import Path

from autotuner.edge import procfs
from torture import sabotage, street
from torture.forks import Forks, until
from torture.home import Home, kill_all
from torture.tally import Tally

HOMES = 3
ROUNDS = 15
TMPFS = "size=32m"
PHASES = ("idle", "launching", "warm-up", "measuring", "concluding", "stopping", "restoring")
BACK_S = 90.0
DEATHS = ("nothing", "nothing", "server", "daemon", "both")


class Tight(Home):
    """A house on a disk of its own, which can be filled."""

    def __init__(self, folder: Path, forks: Forks, cache: Path) -> None:
        super().__init__(folder, forks, cache)
        self.disk = folder / "disk"
        self.disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", TMPFS, "tmpfs", str(self.disk)]
        self.mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        self.state = self.disk / "state"
        self.settings["disk_free_min_mib"] = "10"
        self.filler = self.disk / "filler"
        self.full = False

    def fill(self) -> int:
        """Take the last byte there is; return how many there were."""
        self.full = True
        if not self.mounted:
            assert self.control is not None
            self.control.fill_disk()
            return 0
        taken = 0
        with self.filler.open("ab", buffering=0) as f:
            for size in (1 << 20, 4096, 1):
                try:
                    while f.write(b"x" * size) == size:
                        taken += size
                except OSError:
                    continue
        return taken

    def empty(self) -> None:
        """There is room again."""
        self.full = False
        self.filler.unlink(missing_ok=True)
        if self.control is not None:
            self.control.mend()

    def start_on_full(self) -> None:
        """Start the daemon on a disk that is still full."""
        self.start_daemon()
        if self.full and not self.mounted:
            assert self.control is not None
            self.control.fill_disk()

    def best_serves(self) -> bool:
        """Whether exactly one server lives, is a launch of the best-known, and generates: seen from outside."""
        servers = self.servers()
        if len(servers) != 1:
            return False
        best = self.ask("SELECT candidate_id FROM incumbents ORDER BY id DESC LIMIT 1")
        mine = self.ask("SELECT candidate_id FROM launches WHERE id = ?", procfs.launch_id_of(servers[0]) or "")
        return bool(best) and best == mine and self.generates()

    def close(self) -> None:
        super().close()
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.disk)], check=False, capture_output=True)


class Round:
    """One round."""

    def __init__(self, home: Tight, seed: int, tally: Tally) -> None:
        self.home, self.tally, self.seed = home, tally, seed
        self.luck = random.Random(seed)
        self.what: list[str] = []

    def run(self) -> bool:
        """Do it; return False if the house is not to be used any more."""
        home, luck = self.home, self.luck
        home.forgive()
        for _ in range(2):
            home.enqueue(f"c{home.runs}", tok_s=luck.choice((8, 40, 80)) + home.runs / 1000)
        phase, death = luck.choice(PHASES), luck.choice(DEATHS)
        self._reach(phase)
        home.fill()
        self.what.append(f"disk full while {home.control.phase}, {death} killed")
        self.tally.counts[
            "disks filled" if home.mounted else "disks filled (writes refused; no tmpfs may be mounted)"
        ] += 1
        self._die(death)
        return self._serves_without_room() and self._goes_on()

    def _reach(self, phase: str) -> None:
        """Let the daemon come to a phase."""
        home = self.home
        if phase == "restoring":
            kill_all(home.family()["server"])
        elif phase != "idle":
            home.let_go()
        if home.forks.library:
            until(lambda: home.control.phase == phase, 15, 0.005)
        else:
            time.sleep(self.luck.uniform(0, 3))
        time.sleep(self.luck.choice((0.0, 0.0, 0.05, 0.3)))

    def _die(self, what: str) -> None:
        home = self.home
        if what in {"server", "both"}:
            family = home.family()
            kill_all(family["server"] + family["shim"])
        if what in {"daemon", "both"}:
            home.daemon.kill()
            home.start_on_full()

    def _serves_without_room(self) -> bool:
        """The best-known must be there although nothing can be written but what the ballast leaves."""
        home = self.home
        serves = until(lambda: home.best_serves() and home.daemon.code is None, BACK_S, 0.2)
        self.tally.check(
            "P15", kept=serves, how=f"no best-known serves with a full disk; {self._again()}\n{self._state()}"
        )
        alive = home.daemon.code is None
        self.tally.check(
            "P15", kept=alive, how=f"the daemon ended with {home.daemon.code}; {self._again()}\n{self._state()}"
        )
        return serves and alive

    def _goes_on(self) -> bool:
        """With room again, the queue goes on unaided, and nothing acknowledged is gone."""
        home = self.home
        home.empty()
        home.let_go()
        done = until(lambda: not home.waiting() and home.all_published() and home.serves_best(), BACK_S, 0.2)
        self.tally.check(
            "P15", kept=done, how=f"the queue does not go on when there is room again; {self._again()}\n{self._state()}"
        )
        if not done:
            return False
        home.hold()
        record = home.record_of_the_living()
        wrong = home.acknowledged(record) + home.whole(record)
        for _, each in wrong:
            self.tally.broken("P15", f"{each}; {self._again()}")
        code, said = home.autotuner("journal", "verify")
        self.tally.check(
            "P15", kept=code == 0 and not wrong, how=f"journal verify: {code} {said[-300:]}; {self._again()}"
        )
        return not wrong

    def _again(self) -> str:
        return f"{'; '.join(self.what)}; again: python -m torture --part full_disk --seed {self.seed} --seconds 2"

    def _state(self) -> str:
        home = self.home
        shown = home.ask("SELECT name, purpose, state, end_asked, diagnosis FROM launches ORDER BY rowid DESC LIMIT 5")
        slots = home.ask("SELECT * FROM slots")
        return f"  {home.said()}\n  {shown}\n  {slots}\n  {home.log_tail()}"


def without_client(home: Home, seed: int, tally: Tally) -> bool:
    """The benchmark's worker cannot be run: a trial is an error, and the best-known is restored all the same."""
    again = f"again: python -m torture --part full_disk --seed {seed} --seconds 2"
    assert home.daemon is not None
    home.daemon.kill()
    good = home.forks
    with Forks(good.library, sabotage.NO_CLIENT) as broken:
        home.forks = broken
        home.enqueue("unmeasurable", tok_s=33)
        home.start_daemon()
        home.let_go()
        done = until(lambda: not home.waiting() and home.serves_best(), BACK_S, 0.2)
        verdict = home.ask("SELECT verdict FROM trials WHERE name = 'unmeasurable'")
        tally.check(
            "P15", kept=done and verdict == [("error",)], how=f"without a client: {verdict}, {home.said()}; {again}"
        )
        for running in (True, False):
            family = home.family()
            if not running:
                home.daemon.kill()
            kill_all(family["server"] + family["shim"])
            code, said = home.autotuner("restore-best", "--wait", "--timeout", "90")
            serves = code == 0 and until(lambda: not home.one_server(), 10)
            tally.check("P15", kept=serves, how=f"restore-best without a client: {code} {said[-500:]}; {again}")
            home.autotuner("resume")
        tally.counts["restores without a benchmark client"] += 2
    home.forks = good
    home.daemon = None
    return False


def run(seed: int, seconds: float) -> Tally:
    """Work houses side by side until the time is over. Round k has the seed `seed + k`; the first has no client."""

    def works(home: Home, round_seed: int, tally: Tally) -> bool:
        assert isinstance(home, Tight)
        if round_seed % 50 == 1 and not without_client(home, round_seed, tally):
            return False
        return Round(home, round_seed, tally).run()

    return street.work(Tight, works, seed, seconds, promise="P15", homes=HOMES, rounds=ROUNDS)
