"""P23: the daemon is stopped at each await of its loop in turn, waiting, deaf or blocked, before a manager that listens.

A real daemon with a cycle's deadline of one second works a small campaign. Where the cycles hang, the manager may hear no WATCHDOG=1
any more, and the log must say where; where only a long action hangs, beside the cycles, they must go on feeding it.
"""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from e2e.house import House

from torture import wedging
from torture.tally import Tally

TESTS = Path(__file__).resolve().parents[1]
HOWS = ("waits", "deaf", "blocks")
AT_ONCE = 4  # a wedged daemon costs nothing, and is listened to for seconds
REACHED_S = 20.0  # a place that the campaign has not come to by then is left for another round
LATE_S = 2.0 * wedging.DEADLINE_S  # one slot's cycle may take its time: by then it is late
LISTEN_S = 2.5 * wedging.DEADLINE_S
SETTLED_S = 20.0  # a loaded machine may take this long for what takes a deadline and a half
NOW_AND_THEN = {"_tidy"}  # done once a minute: given up and said, the cycles after it are whole ones
bug = ""  # planted in the daemons


@dataclass(frozen=True)
class Seen:
    """What became of one daemon: the manager's view, and its log."""

    reached: bool
    in_cycles: bool = False
    fed_after: int = 0
    alive: bool = True
    log: str = ""


def run(seed: int, seconds: float) -> Tally:
    """Wedge one await after another, in an order drawn from the seed, until the time is over."""
    tally, until = Tally(), time.monotonic() + seconds
    known = wedging.awaits()
    places = [(place, how) for place, function in known.items() if function != "restore_now" for how in HOWS]
    random.Random(seed).shuffle(places)
    places.sort(
        key=lambda p: not p[0].startswith(("daemon", "rounds", "slotworker"))
    )  # these are nearly all in the cycles
    with tempfile.TemporaryDirectory(prefix="autotuner-wedged-") as folder:
        model = _campaign(Path(folder))

        def one(number: int) -> Seen | None:
            if number >= AT_ONCE and time.monotonic() > until:
                return None
            house = _copy(model, Path(folder) / str(number))
            try:
                place, how = places[number]
                return _wedge(house, place, how, ends=known[place] in {"end", "_end"})
            finally:
                house.close()
                shutil.rmtree(house.folder, ignore_errors=True)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for (place, how), seen in zip(places, pool.map(one, range(len(places))), strict=True):
                if seen is not None:
                    _judge(tally, place, how, seen, seed, goes_on=how == "waits" and known[place] in NOW_AND_THEN)
    return tally


def _judge(tally: Tally, place: str, how: str, seen: Seen, seed: int, *, goes_on: bool = False) -> None:
    if not seen.reached:
        tally.counts["awaits not reached"] += 1
        return
    where = f"the await at {place}, {how}: python -m torture --part wedged --seed {seed}"
    if seen.in_cycles:
        module, line, _ = place.split(":")
        told = f"{module}.py:{line} " in seen.log or f'{module}.py", line {line} ' in seen.log
        tally.check("P23", kept=goes_on or not seen.fed_after, how=f"{where}: fed {seen.fed_after} times while it hung")
        tally.check("P23", kept=told, how=f"{where}: the log does not say so; it ends {seen.log[-300:]!r}")
        tally.counts["cycles wedged"] += 1
    elif how == "blocks":
        tally.check("P23", kept=not seen.fed_after, how=f"{where}: fed {seen.fed_after} times while it was blocked")
        tally.counts["loops blocked"] += 1
    else:
        tally.check(
            "P23", kept=seen.fed_after > 0 and seen.alive, how=f"{where}: an action hangs, and so do the cycles"
        )
        tally.counts["actions wedged"] += 1


def _campaign(folder: Path) -> House:
    """A house with one candidate in its queue; its server ends by itself after some answers, to be restored."""
    house = House(folder / "model")
    house.folder.mkdir()
    house.settings = {"cycle_s": "0.05", "launcher": '"shim"', "serving_probe_every_s": "0.5"}
    house.benchmark |= {"seconds": "1.0", "levels": "[1]"}
    house.write_settings()
    house.cli("enqueue", house.candidate("one", mode="die-after", die_after=40), "--no-preflight")
    return house


def _copy(model: House, folder: Path) -> House:
    shutil.copytree(model.folder, folder)
    house = House(folder)
    house.settings, house.benchmark = model.settings, model.benchmark
    house.write_settings()
    return house


def _wedge(house: House, place: str, how: str, *, ends: bool) -> Seen:
    """Run a daemon until it hangs, and listen to it after that; `ends`: it is told to end, and hangs in that."""
    report, log = house.folder / "hangs", house.folder / "daemon.log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, log.open("wb") as out:
        manager.bind(str(house.folder / "notify"))
        manager.setblocking(False)
        env = {**os.environ, "NOTIFY_SOCKET": str(house.folder / "notify"), "WATCHDOG_USEC": "3000000"}
        words = [str(house.settings_file), place, how, str(report), bug]
        daemon = subprocess.Popen(
            [sys.executable, "-m", "torture.wedging", *words],
            cwd=TESTS,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
        try:
            return _listen(daemon, manager, report, log, ends=ends)
        finally:
            daemon.kill()
            daemon.wait()


def _listen(daemon: "subprocess.Popen[bytes]", manager: socket.socket, report: Path, log: Path, *, ends: bool) -> Seen:
    until = time.monotonic() + REACHED_S
    while not report.exists():
        if _heard(manager) and ends:
            daemon.terminate()
        if time.monotonic() > until or daemon.poll() is not None:
            return Seen(reached=False, log=log.read_text(errors="replace"))
        time.sleep(0.02)
    hung = json.loads(report.read_text())
    time.sleep(LATE_S if hung["in_cycles"] else 0.2)
    _heard(manager)  # what it said before it hung, and before that was too long
    fed, text, settled = 0, "", time.monotonic() + SETTLED_S
    quiet = time.monotonic() + LISTEN_S
    while time.monotonic() < settled:
        time.sleep(0.1)
        fed += _heard(manager)
        text = log.read_text(errors="replace")
        said = any(words in text for words in ("the daemon hangs", "took longer than", "Timeout ("))
        if time.monotonic() > quiet and (said or (fed and not hung["in_cycles"])):
            break
        if time.monotonic() > quiet and not hung["in_cycles"] and said:
            break
    return Seen(True, bool(hung["in_cycles"]), fed, daemon.poll() is None, text)


def _heard(manager: socket.socket) -> int:
    """How often the watchdog was fed since the last look."""
    fed = 0
    while True:
        try:
            fed += b"WATCHDOG=1" in manager.recv(4096).split(b"\n")
        except BlockingIOError:
            return fed
