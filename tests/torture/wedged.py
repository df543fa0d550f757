"""P23: the daemon is stopped at each await of its loop in turn, waiting, deaf or blocked, before a manager that listens.

First one works the campaign unharmed and notes which awaits it comes to, and when; only those are wedged, and of the others is said in
which functions they are. A real daemon with a cycle's deadline of one second works a small campaign. Where the cycles hang, the manager may hear no WATCHDOG=1
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
from typing import IO

from e2e.house import House

from torture import wedging
from torture.tally import Tally

TESTS = Path(__file__).resolve().parents[1]
HOWS = ("waits", "deaf", "blocks")
AT_ONCE = 6  # a wedged daemon costs nothing, and is listened to for seconds
MAP_S = 60.0  # the unharmed campaign takes a quarter of this
REACHED_S = 60.0  # a place that the campaign has not come to by then is left for another round
LATE_S = 2.0 * wedging.DEADLINE_S  # one slot's cycle may take its time: by then it is late
LISTEN_S = 2.5 * wedging.DEADLINE_S
SETTLED_S = 20.0  # a loaded machine may take this long for what takes a deadline and a half
ELSEWHERE = {"work_until"}  # what a command does without a daemon
NVIDIA_SMI = """#!/bin/sh
case $1 in
*index*) [ -e "${0%/*}/late" ] && echo "0, GPU-a, 60400, 80000" || echo "0, GPU-a, 400, 80000" ;;
esac
"""
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
    with tempfile.TemporaryDirectory(prefix="autotuner-wedged-") as folder:
        model = _campaign(Path(folder))
        reached = _map(_copy(model, Path(folder) / "map"))
        places = _in_turn(known, reached, random.Random(seed))
        _tell_out_of_reach(tally, known, reached)

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
                if seen is None:
                    tally.counts["left for another seed"] += 1
                else:
                    _judge(tally, place, how, seen, seed, goes_on=how == "waits" and known[place] in NOW_AND_THEN)
    return tally


def _in_turn(known: dict[str, str], reached: set[str], dice: random.Random) -> list[tuple[str, str]]:
    """Every await that can be come to, hung in one way, then in the next; those of the cycles first."""
    mine = sorted(reached & known.keys())
    dice.shuffle(mine)
    mine.sort(key=lambda place: not place.startswith(("daemon", "rounds", "slotworker")))
    turns = [dice.sample(HOWS, len(HOWS)) for _ in mine]
    return [(place, hows[turn]) for turn in range(len(HOWS)) for place, hows in zip(mine, turns, strict=True)]


def _tell_out_of_reach(tally: Tally, known: dict[str, str], reached: set[str]) -> None:
    tally.counts["awaits come to"] += len(reached & known.keys())
    for place in sorted(known.keys() - reached):
        if known[place] not in ELSEWHERE:
            tally.counts[f"not come to in {place.partition(':')[0]}.{known[place]}"] += 1


def _map(house: House) -> set[str]:
    """Work the campaign unharmed; return the awaits that it comes to."""
    report = house.folder / "come-to"
    with (house.folder / "daemon.log").open("wb") as out:
        daemon = _start(house, "", "map", report, out)
        until = time.monotonic() + MAP_S
        while time.monotonic() < until and daemon.poll() is None and not (house.folder / "worked").exists():
            time.sleep(0.1)
        time.sleep(1.0)  # what comes after it
        daemon.terminate()  # the end has awaits of its own
        try:
            daemon.wait(MAP_S)
        finally:
            daemon.kill()
            daemon.wait()
            house.close()
    return {line.split()[0] for line in report.read_text().splitlines()} if report.exists() else set()


def _start(house: House, place: str, how: str, report: Path, out: IO[bytes]) -> "subprocess.Popen[bytes]":
    path = f"{house.folder}:{os.environ['PATH']}"  # where its nvidia-smi is
    env = {**os.environ, "PATH": path, "NOTIFY_SOCKET": str(house.folder / "notify"), "WATCHDOG_USEC": "3000000"}
    words = [str(house.settings_file), place, how, str(report), bug]
    argv = [sys.executable, "-m", "torture.wedging", *words]
    return subprocess.Popen(argv, cwd=TESTS, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


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
    """A house with candidates of all sorts in its queue: the first one's server ends by itself after some answers, to be restored."""
    house = House(folder / "model")
    house.folder.mkdir()
    house.settings = {"cycle_s": "0.05", "launcher": '"shim"', "serving_probe_every_s": "0.5"}
    house.slot = {"gpus": "[0]", "drain_s": "1"}
    house.benchmark |= {"seconds": "1.0", "levels": "[1]"}
    house.extra = "[objective.constraints]\nanswers_agree_min = 0.1"
    house.write_settings()
    smi = house.folder / "nvidia-smi"
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    house.cli("enqueue", house.candidate("one", mode="die-after", die_after=80), "--no-preflight")
    house.cli("enqueue", house.candidate("gone", mode="unheard-of"), "--no-preflight")
    house.cli("enqueue", house.candidate("late", timeout_s=1.5, mode="never-ready"), "--no-preflight")
    return house


def _copy(model: House, folder: Path) -> House:
    shutil.copytree(model.folder, folder)
    house = House(folder)
    house.settings, house.benchmark, house.slot, house.extra = model.settings, model.benchmark, model.slot, model.extra
    house.write_settings()
    return house


def _wedge(house: House, place: str, how: str, *, ends: bool) -> Seen:
    """Run a daemon until it hangs, and listen to it after that; `ends`: it is told to end, and hangs in that."""
    report, log = house.folder / "hangs", house.folder / "daemon.log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, log.open("wb") as out:
        manager.bind(str(house.folder / "notify"))
        manager.setblocking(False)
        daemon = _start(house, place, how, report, out)
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
