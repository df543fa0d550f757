"""The soak: one simulated year of one daemon, with as many trials as the time allows; nothing may grow but the record of them.

The year is the real loop in virtual time, as in the campaigns, but the daemon looks once an hour while it has nothing to
do, and faults are as rare as on a good host. Work is handed out by the clock of the machine that runs this, so that the year ends when
it should: its length is exact, the number of its trials is what fitted.
"""

import ctypes
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path

from autotuner.core.candidate import to_toml
from torture import simedge
from torture.simcampaign import Campaign, settings_of
from torture.simworld import DAY_S, HOUR_S, YEAR_S, Faults
from torture.tally import Tally

WHOLE_YEAR_FROM_S = 150.0  # with less time than this it is a part of a year
IDLE_CYCLE_S = 3600.0
CANDIDATES = 40
BATCH = 24
WARM_TRIALS = 300  # until then caches fill, and the allocator finds its size
RSS_GROWTH_MAX_MIB = 5.0
FILES_MAX = 40  # a journal of a year is 13 files; beside them the database, its two companions and the ballast
ENTRY_BYTES_MAX = 8192.0  # of journal a trial, the entries of restores and restarts included
RATES = {
    "server crashes while it serves": 0.05,
    "server exits early": 0.03,
    "server hangs in its start": 0.01,
    "workers outlive their server": 0.5,
    "GPU memory comes back late": 0.2,
    "host error": 0.001,
    "client dies": 0.01,
    "requests fail": 0.02,
}


@dataclass(frozen=True)
class Size:
    """How much the process and its files take, at a time of the year."""

    at_s: float
    rss_mib: float
    fds: int
    files: int
    journal_bytes: int
    trials: int


class Year(Campaign):
    """A campaign without an end."""

    part = "soak"

    def __init__(self, seed: int, found: Tally, seconds: float) -> None:
        super().__init__(seed, found, jumps=False)
        self.world.faults = Faults(self.world.rng, RATES)
        plain = settings_of(1, True, 1, 1, "idle", "[4]", 0)
        self.settings = plain.model_copy(update={"cycle_s": IDLE_CYCLE_S, "serving_probe_every_s": 4 * HOUR_S})
        self.host.slots = {name: (slot.port, slot.gpus) for name, slot in self.settings.slots.items()}
        self.host.by_slot = {name: [] for name in self.host.slots}
        self.length_s = YEAR_S * min(1.0, seconds / WHOLE_YEAR_FROM_S)
        self.sizes: list[Size] = []
        self._seconds = 0.9 * seconds
        self._began = time.monotonic()

    def _schedule(self) -> None:
        self.faults_end_s = self.length_s  # whatever comes by the clock comes within the year
        for nature in self.natures.values():
            nature.broken = ""
        self._hour()
        self._week()
        self._month()

    def _hour(self) -> None:
        """Work, as long as the year is not behind the clock."""
        share = (time.monotonic() - self._began) / self._seconds
        with self._as_operator():
            if share < self.world.now / self.length_s and not self.store.queue("s0"):
                for _ in range(BATCH):
                    self._work()
        self._next(HOUR_S / 4, self._hour)

    def _work(self) -> None:
        """A candidate that is new, while there are not many, or one of the known again."""
        if len(self.natures) < CANDIDATES:
            self._enqueue("s0")
            list(self.natures.values())[-1].broken = ""
            return
        candidate = self.store.candidate(self.rng.choice(list(self.natures)))
        with self.store.transaction():
            self.store.put_candidate(candidate, to_toml(candidate), f"{candidate.name}.toml")
            self.store.add_trial("s0", candidate, ("quick", self.settings.benchmarks["quick"]), "2026-03-01 12:00:00Z")

    def _week(self) -> None:
        self._forget()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        where = self.settings.state_dir
        every = [path for path in where.rglob("*") if path.is_file()]
        journal = sum(path.stat().st_size for path in self.settings.journal.glob("**/*.md")) if self.lives else 0
        with self._as_operator():
            done = self.store.db.one("SELECT COUNT(*) FROM trials WHERE state = 'done'")
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        rss_mib = pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
        fds = len(os.listdir("/proc/self/fd"))
        self.sizes.append(Size(self.world.now, rss_mib, fds, len(every), journal, int(done[0]) if done else 0))
        self._next(min(7 * DAY_S, self.length_s / 50), self._week)

    def _forget(self) -> None:
        """The world need not remember what is over, and must not grow itself."""
        host, now = self.host, self.world.now
        over = [i for i, s in host.servers.items() if not s.alive and now > max(s.gpu_until, s.claimed_at) + DAY_S]
        for launch_id in over:
            server = host.servers.pop(launch_id)
            host.by_slot[server.spec.slot].remove(server)
            self.checker.launched.pop(launch_id, None)
        self.checker.last_lines.clear()

    def _month(self) -> None:
        """The daemon is killed and started again, and the operator begins another campaign."""
        if self.world.now:
            self.world.dead = True
            with self._as_operator():
                last = self.store.db.one("SELECT MAX(id) FROM trials")
                self.store.update_slot("s0", campaign_from=int(last[0]) if last else 0)
                self._resume("s0")
        self._next(30 * DAY_S, self._month)

    def _next(self, seconds: float, event: object) -> None:
        if self.world.now + seconds <= self.length_s:
            self.world.after(seconds, event)
        elif event == self._hour:
            self.world.at(self.length_s, self._end)

    def _end(self) -> None:
        self._week()
        self.world.stopped = True

    def _account(self, *, replayed: bool) -> None:
        """P25: nothing has grown but the record."""
        last = self.sizes[-1]
        first = next((size for size in self.sizes if size.trials >= WARM_TRIALS), last)
        check, counts = self.checker.check, self.found.counts
        grown = last.rss_mib - first.rss_mib
        check(
            "P25",
            f"memory grew by {grown:.1f} MiB in {last.trials - first.trials} trials",
            kept=grown < RSS_GROWTH_MAX_MIB,
        )
        check("P25", f"{last.fds} descriptors are open, {first.fds} were", kept=last.fds <= first.fds + 1)
        check("P25", f"the state folder has {last.files} files", kept=last.files <= FILES_MAX)
        each = last.journal_bytes / max(1, last.trials)
        check("P25", f"the journal has {each:.0f} bytes a trial", kept=each <= ENTRY_BYTES_MAX)
        counts["soaked days"] += round(self.world.now / DAY_S)
        counts["soaked trials"] += last.trials
        counts["soaked launches"] += len(self.checker.actions) and self.checker.actions["Launch"]


def run(seed: int, seconds: float) -> Tally:
    """Live through a year, or the part of it for which there is time."""
    simedge.install()
    found = Tally()
    year = Year(seed, found, seconds)
    year.run()
    return found
