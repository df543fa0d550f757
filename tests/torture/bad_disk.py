"""Lets fsync and fdatasync of real daemons and commands fail with EIO, one after the other, and then cuts the power.

A round: the n-th sync from now on fails (or some in a row) while a trial is worked or a candidate enqueued. The daemon must say
so, open its files again and go on. Then it is killed, perhaps started again in between, and what was never on the disk is taken
from its files. Every entry that was marked as published and every candidate whose enqueue ended with 0 must still be there.
"""

import errno
import random
import time
from pathlib import Path

from torture import faults, street
from torture.forks import Forks, until
from torture.home import Home, kill_all
from torture.platter import Platter
from torture.tally import Tally

HOMES = 3
ROUNDS = 12  # of one house
SYNCS_MAX = 30  # of a trial, from its launch to its entry
MEND_S = 90.0


class Traced(Home):
    """A house in which every write to the state folder is traced, the operator's too."""

    def __init__(self, folder: Path, forks: Forks, cache: Path) -> None:
        super().__init__(folder, forks, cache)
        self.trace = folder / "trace"
        self.trace.touch()
        self.platter = Platter(self.trace)

    def hold(self) -> None:
        self.autotuner("pause", "--now")

    def let_go(self) -> None:
        self.autotuner("resume")

    def forgive(self) -> None:
        """`resume` does it."""

    def seen_published(self) -> dict[int, str]:
        """What a running daemon says is published: its own view, not what a copy of its files would come to."""
        return dict(self.ask("SELECT number, sha256 FROM entries WHERE published = 1"))


class Round:
    """One round."""

    def __init__(self, home: Traced, seed: int, tally: Tally) -> None:
        self.home, self.tally, self.seed = home, tally, seed
        self.luck = random.Random(seed)
        self.what: list[str] = []

    def run(self) -> bool:
        """Do it; return False if the house is not to be used any more."""
        home, luck = self.home, self.luck
        name = f"c{home.runs}"
        if luck.random() < 0.3:
            self._enqueue_failing(name)
        elif home.enqueue(name, tok_s=luck.choice((8, 40, 80)) + home.runs / 1000)[0] != 0:
            self.tally.broken("P16", f"a good disk, and enqueue failed; {self._again()}")
        self._work_failing()
        if luck.random() < 0.4 and not self._restarted():
            return False
        return self._power_cut()

    def _enqueue_failing(self, name: str) -> None:
        """Enqueue while one of the command's own syncs fails; what it says counts."""
        control = faults.Control(self.home.folder / f"command-control-{self.home.runs}")
        skip = self.luck.randint(0, 2)
        control.fail(faults.SYNCS, errno.EIO, skip=skip, times=self.luck.choice((1, 1, 2)))
        code, _ = self.home.enqueue(name, control=control, tok_s=20 + self.home.runs / 1000)
        self.tally.counts["failed syncs"] += control.block.failed
        self.what.append(f"sync {skip + 1} of enqueue failed {control.block.failed} times, exit code {code}")

    def _work_failing(self) -> None:
        """Let the daemon work a trial while one of its syncs fails; it must say so, and mend it."""
        home, luck = self.home, self.luck
        said_before = len(home.log_tail(1 << 24))
        home.platter.read_on()
        failed_before = len(home.platter.failed)
        skip, times = luck.randint(0, SYNCS_MAX), luck.choice((1, 1, 1, 2, 4))
        home.let_go()
        home.control.fail(faults.SYNCS, errno.EIO, skip=skip, times=times)
        until(lambda: home.control.block.failed or not home.waiting(), 15)
        time.sleep(luck.uniform(0.0, 1.5))
        home.control.mend()
        failed = home.control.block.failed
        self.tally.counts["failed syncs"] += failed
        self.what.append(f"sync {skip + 1} of the daemon failed {failed} times")
        home.platter.read_on()
        of_journal = [path for path in home.platter.failed[failed_before:] if path.endswith(".md")]
        if of_journal:
            spoken = until(lambda: '"level": "error"' in home.log_tail(1 << 24)[said_before:], 10)
            self.tally.check(
                "P16", kept=spoken, how=f"an fsync of the journal failed and the daemon did not say so; {self._again()}"
            )
        if luck.random() < 0.5:
            mended = until(lambda: home.all_published() and not home.said().get("trouble"), MEND_S)
            self.tally.check("P16", kept=mended, how=f"the daemon did not go on: {self._again()}\n{home.log_tail()}")

    def _restarted(self) -> bool:
        """Kill the daemon and start another one, which finds in memory what is not on the disk."""
        home = self.home
        home.published |= home.seen_published()
        home.daemon.kill()
        home.start_daemon()
        self.what.append("the daemon was killed and started again")
        if not home.recovered():
            self.tally.broken("P16", f"no best-known serves after a restart: {self._again()}\n{home.log_tail()}")
            return False
        return True

    def _power_cut(self) -> bool:
        """The daemon dies, the disk forgets what was not written; then the next daemon goes on."""
        home = self.home
        home.published |= home.seen_published()
        home.daemon.kill()
        family = home.family()
        kill_all(family["server"] + family["shim"])  # a host without power runs nothing
        flushed = self.luck.random() < 0.5
        home.platter.cut_power(home.state, flushed=flushed)
        self.what.append("power cut" + (", what was dirty had been written" if flushed else ""))
        self.tally.counts["power cuts"] += 1
        wrong = home.acknowledged(home.record())
        for _, each in wrong:
            self.tally.broken("P16", f"{each}: {self._again()}")
        home.start_daemon()
        if not home.recovered():
            self.tally.broken("P16", f"no best-known serves after a power cut: {self._again()}\n{home.log_tail()}")
            return False
        whole = home.whole(home.record_of_the_living())
        for promise, each in whole:
            self.tally.broken(promise, f"{each}: {self._again()}")
        wrong += whole
        code, said = home.autotuner("journal", "verify")
        self.tally.check(
            "P16", kept=code == 0 and not wrong, how=f"journal verify: {code} {said[-300:]}: {self._again()}"
        )
        return not wrong

    def _again(self) -> str:
        return f"{'; '.join(self.what)}; again: python -m torture --part bad_disk --seed {self.seed} --seconds 2"


def run(seed: int, seconds: float) -> Tally:
    """Work houses side by side until the time is over. Round k has the seed `seed + k`."""

    def works(home: Home, round_seed: int, tally: Tally) -> bool:
        assert isinstance(home, Traced)
        return Round(home, round_seed, tally).run()

    return street.work(Traced, works, seed, seconds, promise="P16", homes=HOMES, rounds=ROUNDS)
