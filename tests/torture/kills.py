"""Kills real daemons with SIGKILL at chosen system calls, in each phase of their work, and looks what the next one makes of it.

A round: a phase, a call and a number are chosen; the daemon is killed at that call (before it, after it, or with half of a write
done); in some rounds the server, its shim or everything dies too, and in some the recovery is killed as well, up to three times.
Then one more start, and the promises are looked at: one server, the best-known's, that generates; every acknowledged entry and
candidate there; each decision with one entry; the journal verifies and its verdicts replay.
"""

import random
import threading

from torture import faults, street
from torture.forks import until
from torture.home import Home, kill_all
from torture.tally import Tally

HOMES = 6  # houses at once: they mostly wait
ROUNDS = 40  # of one house, before it is torn down and another built
REACH_S = 12.0  # a phase that does not come within this time is not waited for: the daemon is killed where it is
WORKED = ("launching", "warm-up", "measuring", "concluding", "stopping", "restoring")
NESTED_MAX = 3
NUMBER_MAX = 25
OUTBOX = (  # around an entry's commit, its append, its fsync and its mark
    *(("fsync", 1, when) for when in ("before", "after")),
    *(("fdatasync", n, when) for n in (1, 2) for when in ("before", "after")),
    *(("write", n, when) for n in (2, 3) for when in ("before", "half", "after")),
)
RARE = 0.3  # calls that come less often than this in a visit of their phase are not waited for


class Points:
    """The kill points: which calls a visit of a phase makes and how many, learned from every daemon that ran."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._usual: dict[tuple[str, str], float] = {}

    def learn(self, control: faults.Control) -> None:
        """Take in what a daemon has called."""
        with self._lock:
            for pair, count in control.counted().items():
                self._usual[pair] = (count + 3 * self._usual.get(pair, count)) / 4

    def choose(self, luck: random.Random, phases: tuple[str, ...]) -> tuple[str, str, int, str]:
        """Return a phase, a call of it, a number and when; the rare calls as often as the frequent ones."""
        phase = luck.choice(phases)
        with self._lock:
            known = {call: usual for (of, call), usual in self._usual.items() if of == phase and usual > RARE}
        if phase == "concluding" and luck.random() < 0.7:
            return phase, *luck.choice(OUTBOX)
        call = luck.choice(sorted(known) or ["write"])
        when = luck.choice(("before", "after", "half") if call in {"write", "pwrite64"} else ("before", "after"))
        return phase, call, luck.randint(1, min(NUMBER_MAX, max(1, round(known.get(call, 1))))), when


class Round:
    """One round on a house. `what` names everything that was done, for whoever has to do it again."""

    def __init__(self, home: Home, points: Points, seed: int, tally: Tally) -> None:
        self.home, self.points, self.tally = home, points, tally
        self.seed = seed
        self.luck = random.Random(seed)
        self.what: list[str] = []
        self.promise = "P2"

    def run(self) -> bool:
        """Do it; return False if the house is not to be used any more."""
        self._stock()
        self.home.forgive()
        phase, call, n, when = self.points.choose(
            self.luck, ("starting", "idle", *WORKED, *WORKED, *("concluding",) * 4)
        )
        if self.luck.random() < 0.1:
            self._kill_server_alone(phase)
        else:
            self._kill_daemon(phase, call, n, when)
        return self._look()

    def _stock(self) -> None:
        """Keep a few candidates in the queue: better ones, worse ones, one that dies of its load."""
        waiting = len(self.home.ask("SELECT 1 FROM trials WHERE state = 'queued'"))
        for _ in range(3 - waiting if waiting < 2 else 0):
            name = f"c{len(self.home.enqueued)}"
            # No two alike: the same candidate twice would be one trial.
            behaviour: dict[str, object] = {
                "tok_s": self.luck.choice((8, 15, 40, 60, 80)) + len(self.home.enqueued) / 1000
            }
            if self.luck.random() < 0.1:
                behaviour |= {"mode": "die-after", "die_after": 3}
            code, said = self.home.enqueue(name, **behaviour)
            if code != 0:
                self.tally.broken("P18", f"enqueue ended with {code}: {said[-300:]}; {self._again()}")

    def _kill_daemon(self, phase: str, call: str, n: int, when: str) -> None:
        home, luck = self.home, self.luck
        if phase == "starting":
            home.daemon.kill()
            self._start_armed(phase, call, n, when)
        else:
            home.control.kill_at(phase, call, n, when)
            if phase == "restoring":
                self._kill_servers()  # which makes it restore at once, where a trial would come first
            elif phase != "idle":
                home.let_go()
        self._await_death(phase, call, n, when)
        if luck.random() < 0.25:
            self._kill_servers()
        if luck.random() < 0.35:
            self._nest()
        self._inquest()
        home.start_daemon()

    def _start_armed(self, phase: str | None, call: str, n: int, when: str) -> None:
        """Start a daemon that dies at the n-th such call of this phase, or of its whole recovery."""
        self.home.start_daemon()
        self.home.control.kill_at(phase, call, n, when)

    def _await_death(self, phase: str, call: str, n: int, when: str) -> bool:
        """Wait until the daemon was killed; one that does not come so far is killed where it is. Tell which it was."""
        home = self.home
        code = home.daemon.wait(REACH_S if home.forks.library else self.luck.uniform(0, 2))
        chosen = code is not None
        if code is None:
            home.daemon.kill()
        self.points.learn(home.control)
        self.tally.counts["kill -9 of the daemon"] += 1
        self.tally.counts["at a chosen call" if chosen else "at some moment"] += 1
        self.tally.counts[f"while {home.control.phase}"] += 1
        self.what.append(
            f"killed {when} {call} {n} while {phase}"
            if chosen
            else f"killed while {home.control.phase}, {call} {n} of {phase} did not come"
        )
        if code not in {None, -9}:
            self.tally.broken("P2", f"the daemon ended by itself with {code}: {home.log_tail(600)}; {self._again()}")
        return chosen

    def _nest(self) -> None:
        """Kill the recovery too, up to three times in a row."""
        self.promise = "P3"
        for _ in range(self.luck.randint(1, NESTED_MAX)):
            self._inquest()
            phase, call, n, when = self.points.choose(self.luck, ("starting", "restoring", "idle", "concluding"))
            self._start_armed(phase, call, n, when)
            if until(lambda: self.home.daemon.code is not None or self._is_over(), REACH_S):
                self.home.hold() if self.home.daemon.code is None else None
            self._await_death_of_recovery(phase, call, n, when)

    def _is_over(self) -> bool:
        return bool(self.home.said()) and self.home.serves_best()

    def _await_death_of_recovery(self, phase: str, call: str, n: int, when: str) -> None:
        chosen = self.home.daemon.code is not None
        self.home.daemon.kill()
        self.points.learn(self.home.control)
        self.tally.counts["kill -9 of the daemon"] += 1
        self.tally.counts["at a chosen call" if chosen else "at some moment"] += 1
        self.tally.counts["of a recovery"] += 1
        self.what.append(f"recovery killed {when} {call} {n} while {phase}" if chosen else "recovery killed at its end")

    def _kill_servers(self) -> int:
        """Kill the server, the shim, or everything that is not the daemon."""
        family = self.home.family()
        what = self.luck.choice(("server", "shim", "all"))
        killed = sum(kill_all(family[kind]) for kind in family if what in {kind, "all"})
        if killed:
            self.promise = "P4"
            self.tally.counts["kill -9 of servers and shims"] += killed
            self.what.append(f"{what} killed")
        return killed

    def _kill_server_alone(self, phase: str) -> None:
        """The daemon lives; its server or its shim dies while it is in some phase."""
        home = self.home
        self.promise = "P4"
        if phase in WORKED:
            home.let_go()
            until(lambda: home.control.phase == phase or home.daemon.code is not None, REACH_S, 0.005)
        launches = home.ask("SELECT id FROM launches WHERE state != 'ended'")
        if self._kill_servers():
            self.what[-1] += f" while {phase}, the daemon alive"
            for launch in launches:
                until(
                    lambda launch=launch: home.ask("SELECT 1 FROM launches WHERE id = ? AND state = 'ended'", *launch),
                    20,
                )

    def _inquest(self) -> None:
        """With the daemon dead: what was acknowledged is there."""
        record = self.home.record()
        self._told("P7", "P10", "P18", wrong=self.home.acknowledged(record))

    def _look(self) -> bool:
        """The last start must have come back to the best-known; look at everything."""
        home = self.home
        if not home.recovered():
            self.tally.broken(self.promise, f"no best-known serves: {self._again()}\n{self._state()}")
            return False
        wrong = home.one_server()
        for each in wrong:
            self.tally.broken(self.promise, f"{each}: {self._again()}\n{self._state()}")
        if not wrong:
            self.tally.held(self.promise)
        record = home.record_of_the_living()
        self._told("P7", "P10", "P18", wrong=home.acknowledged(record) + home.whole(record))
        for words in (("journal", "verify"), *((("journal", "replay"),) if self.luck.random() < 0.2 else ())):
            code, said = home.autotuner(*words)
            promise = "P10" if words[1] == "verify" else "P11"
            self.tally.check(
                promise, kept=code == 0, how=f"{' '.join(words)} ended with {code}: {said[-400:]}; {self._again()}"
            )
        return not wrong

    def _told(self, *promises: str, wrong: list[tuple[str, str]]) -> None:
        broken = {promise for promise, _ in wrong}
        for promise, what in wrong:
            self.tally.broken(promise, f"{what}: {self._again()}")
        for promise in promises:
            if promise not in broken:
                self.tally.held(promise)

    def _again(self) -> str:
        done = "; ".join(self.what)
        return f"{done}; again: python -m torture --part kills --seed {self.seed} --seconds 2"

    def _state(self) -> str:
        home = self.home
        shown = home.ask("SELECT name, purpose, state, end_asked, diagnosis FROM launches ORDER BY rowid DESC LIMIT 5")
        return f"  {home.said()}\n  {shown}\n  {home.log_tail()}"


def run(seed: int, seconds: float) -> Tally:
    """Work houses side by side until the time is over. Round k has the seed `seed + k`."""
    points = Points()

    def works(home: Home, round_seed: int, tally: Tally) -> bool:
        assert home.control is not None
        points.learn(home.control)
        return Round(home, points, round_seed, tally).run()

    return street.work(Home, works, seed, seconds, promise="P2", homes=HOMES, rounds=ROUNDS)
