"""The simulated world's time, its dice and its faults. Everything in it is a function of one seed."""

import datetime as dt
import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

EPOCH = dt.datetime(2026, 3, 1, 12, 0, tzinfo=dt.UTC)
HOUR_S, DAY_S, YEAR_S = 3600.0, 86_400.0, 365.25 * 86_400.0

# What can go wrong, and how often at most: by step of the daemon's loop, by call, or by launch. A campaign has some of them on.
RATES = {
    "daemon killed between two steps": 0.006,
    "daemon killed inside a call": 0.004,
    "daemon stalls": 0.01,
    "host error": 0.1,
    "host error after the deed": 0.12,
    "host disk full": 0.1,
    "host disk low": 0.2,
    "database error": 0.01,
    "database full": 0.01,
    "journal write fails": 0.15,
    "journal write is cut": 0.1,
    "journal fsync fails": 0.15,
    "server exits early": 0.25,
    "server crashes in its start": 0.2,
    "server hangs in its start": 0.12,
    "server never starts": 0.1,
    "server starts slowly": 0.3,
    "server crashes while it serves": 0.35,
    "server hangs while it serves": 0.2,
    "server lies about its health": 0.25,
    "server generates nothing": 0.12,
    "workers outlive their server": 0.5,
    "workers hold the port": 0.5,
    "GPU memory comes back late": 0.5,
    "GPU memory never comes back": 0.1,
    "GPUs cannot be read": 0.15,
    "stop takes long": 0.3,
    "stop fails": 0.25,
    "shim is killed": 0.15,
    "probe finds nobody": 0.4,
    "probe hangs": 0.15,
    "others use the server": 0.3,
    "client is missing": 0.12,
    "client dies": 0.2,
    "client hangs": 0.3,  # of those that would have died
    "client ends without samples": 0.12,
    "client is too slow": 0.15,
    "requests fail": 0.2,
    "stranger on the port": 0.0,  # these come by the clock, see Campaign
    "stranger on the GPU": 0.0,
    "host reboots": 0.0,
    "clock steps": 0.0,
    "everything of a launch is killed": 0.0,
}
OF_JOURNAL_FILES = ("journal write fails", "journal write is cut", "journal fsync fails")


class Killed(BaseException):
    """The daemon was killed here. No `except Exception` may catch it, as none could catch the real thing."""


@dataclass
class Faults:
    """The faults of one campaign: which are on and how likely each is, and how many struck."""

    dice: Callable[[str], random.Random]
    rates: dict[str, float]
    on: bool = True
    struck: Counter[str] = field(default_factory=Counter)

    @classmethod
    def drawn(cls, dice: Callable[[str], random.Random]) -> "Faults":
        """Some kinds on, others off: all at once would hide what only a few can bring about."""
        rng = dice("faults")
        share = rng.choice((0.4, 0.7, 0.95))
        rates = {kind: rate * rng.uniform(0.3, 1.0) for kind, rate in RATES.items() if rng.random() < share}
        return cls(dice, rates)

    def strike(self, kind: str) -> bool:
        """Whether this fault happens here and now."""
        if not self.on or kind not in self.rates or self.dice(kind).random() >= self.rates[kind]:
            return False
        self.struck[kind] += 1
        return True


class World:
    """Time, events that come by themselves, and the life of the daemon's process. Times are seconds since the beginning."""

    def __init__(self, seed: str, faults: Faults | None = None) -> None:
        self.seed = seed
        self.now = 0.0
        self.booted_at = -1000.0
        self.boots = 1
        self.wall_ahead_s = 0.0
        self.dead = False
        self.stopped = False
        self.steps = 0
        self.stalled_s = 0.0
        self._rngs: dict[str, random.Random] = {}
        self.faults = faults or Faults.drawn(self.rng)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def rng(self, name: str) -> random.Random:
        """Dice of their own for each purpose, so that throwing some more of one kind changes no other."""
        if name not in self._rngs:
            self._rngs[name] = random.Random(f"{self.seed}/{name}")
        return self._rngs[name]

    @property
    def uptime_s(self) -> float:
        """The monotonic clock: it begins anew with each boot."""
        return self.now - self.booted_at

    @property
    def awake_s(self) -> float:
        """Time without that in which the daemon was stalled."""
        return self.now - self.stalled_s

    @property
    def boot_id(self) -> str:
        return f"boot-{self.boots}"

    @property
    def wall(self) -> dt.datetime:
        """The wall clock, wherever it was set to."""
        return EPOCH + dt.timedelta(seconds=self.now + self.wall_ahead_s)

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Have something happen at a time."""
        self._count += 1
        heapq.heappush(self._events, (max(when, self.now), self._count, event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Have something happen later."""
        self.at(self.now + seconds, event)

    def advance(self, to: float) -> None:
        """Let time go on, with all that happens meanwhile. Raise Killed where that ends the daemon or the simulation."""
        while self._events and self._events[0][0] <= to:
            when, _, event = heapq.heappop(self._events)
            self.now = max(self.now, when)
            event()
            if self.dead or self.stopped:
                raise Killed
        self.now = max(self.now, to)

    def sleep_dead(self, seconds: float) -> None:
        """Let time go on without a daemon."""
        until = self.now + seconds
        while self.now < until and not self.stopped:
            try:
                self.advance(until)
            except Killed:
                self.dead = False
        self.dead = False

    def before_step(self) -> None:
        """Before each step of the daemon's loop: it may be killed here, or be stopped for a while."""
        self.steps += 1
        faults = self.faults
        if faults.strike("daemon killed between two steps"):
            self.dead = True
            raise Killed
        if faults.strike("daemon stalls"):
            stall_s = self.rng("stalls").choice((5.0, 40.0, 400.0))
            self.stalled_s += stall_s
            self.advance(self.now + stall_s)

    def kill_here(self) -> None:
        """Inside a call of the daemon's: it may be killed here."""
        if self.faults.strike("daemon killed inside a call"):
            self.die()

    def die(self) -> None:
        """The daemon is killed now, whatever it was doing."""
        self.dead = True
        raise Killed
