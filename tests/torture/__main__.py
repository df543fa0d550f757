"""Break it: `python -m torture [--seconds S] [--seed N] [--part NAME] [--planted]`, from the tests folder.

Works the parts on as many lanes as there are cores, prints what each found as it ends, and a line a promise at the end. Exit code
1 if a promise was broken, if one that a part should have tried was not tried, or, with --planted, if a planted bug went unnoticed.
"""

import argparse
import ctypes
import importlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from torture.parts import PARTS, Part
from torture.planted import BUGS, Bug
from torture.promises import PROMISES
from torture.tally import Tally

TESTS = Path(__file__).resolve().parents[1]
PR_SET_PDEATHSIG = 1
LEAST_S = 2.0  # a part that gets less than this does one round and ends
OVERRUN_S = 300.0  # a part that is this late hangs


def main() -> int:
    """Run what the arguments ask for."""
    options = arguments()
    if options.inside:
        return inside(options.inside, options.bug, options.seed, options.seconds)
    if options.planted:
        return planted(options.seed, options.only)
    parts = [part for part in PARTS if not options.only or part.module in options.only]
    began = time.monotonic()
    found, failed = work(parts, options.seed, options.seconds)
    return report(parts, found, failed, time.monotonic() - began, options.seed)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="torture", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [part.module for part in PARTS]
    parser.add_argument("--seconds", type=float, default=60.0, help="how long all of it may take (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="the first seed; a violation names the one that shows it")
    parser.add_argument("--part", dest="only", action="append", choices=names, help="this part alone; may be repeated")
    parser.add_argument("--planted", action="store_true", help="plant each bug in turn: its promise must turn red")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--bug", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def inside(module: str, bug: str, seed: int, seconds: float) -> int:
    """Run one part in this process, with a bug planted if one is named; print its tally as the last line."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # a harness that is ended takes its parts along
    for known in BUGS:
        if known.name == bug:
            known.plant()
    tally: Tally = importlib.import_module(f"torture.{module}").run(seed, seconds)
    print(tally.as_json(), flush=True)
    return 0


def run_part(module: str, seed: int, seconds: float, bug: str = "", core: int | None = None) -> tuple[Tally, str]:
    """Run a part in a process of its own, on one core if it is named; return what it found, and why it failed if it did."""
    command = [sys.executable, "-m", "torture", "--inside", module, "--seed", str(seed), "--seconds", f"{seconds:.1f}"]
    if core is not None:  # parts that start many processes must not starve the others
        command = [sys.executable, "-c", _PINNED, str(core), *command]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    try:
        ran = subprocess.run(
            [*command, "--bug", bug],
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds + OVERRUN_S,
            env=env,
            cwd=TESTS,
        )
    except subprocess.TimeoutExpired:
        return Tally(), f"it did not end within {seconds + OVERRUN_S:.0f} s"
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        return Tally(), f"exit code {ran.returncode}: {ran.stderr.strip()[-2000:]}"
    return Tally.from_json(lines[-1]), ""


_PINNED = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.execv(sys.argv[2], sys.argv[2:])"


def work(parts: Iterable[Part], seed: int, seconds: float) -> tuple[Tally, list[str]]:
    """Run the parts on a lane a core; return what they found together, and the parts that failed."""
    waiting: queue.SimpleQueue[Part] = queue.SimpleQueue()
    chosen = sorted(parts, key=lambda part: -part.share)
    for part in chosen:
        waiting.put(part)
    cores = sorted(os.sched_getaffinity(0))[: len(chosen)]
    whole_s = seconds * len(cores) / sum(part.share for part in chosen)
    found, failed, lock = Tally(), list[str](), threading.Lock()

    def lane(core: int) -> None:
        while True:
            try:
                part = waiting.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            tally, why = run_part(part.module, seed, max(LEAST_S, part.share * whole_s), core=core)
            with lock:
                found.add(tally)
                if why:
                    failed.append(f"{part.module}: {why}")
                print(line(part, tally, why, time.monotonic() - began), flush=True)

    threads = [threading.Thread(target=lane, args=(core,)) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, failed


def line(part: Part, tally: Tally, why: str, took_s: float) -> str:
    """What a part did, in one line."""
    did = ", ".join(f"{count:,} {what}" for what, count in sorted(tally.counts.items()))
    return f"{part.module:12} {took_s:6.0f} s  {why or did}"


def report(parts: list[Part], found: Tally, failed: list[str], took_s: float, seed: int) -> int:
    """Print a line a promise and how to see each violation again; return the exit code."""
    due = {promise for part in parts for promise in part.promises}
    print(f"\n{'':4} {'tried':>9} {'violated':>8}")
    for promise, text in PROMISES.items():
        if promise in due or found.tried[promise]:
            print(f"{promise:4} {found.tried[promise]:>9,} {found.violated[promise]:>8,}  {text}")
        for how in found.examples.get(promise, []):
            print(f"       {how}")
    untried = sorted(promise for promise in due if not found.tried[promise])
    print("\n" + ", ".join(f"{count:,} {what}" for what, count in sorted(found.counts.items())))
    print(f"{took_s:.0f} s, seed {seed}")
    for why in failed:
        print(f"a part failed: {why}")
    if untried:
        print(f"not tried: {', '.join(untried)}")
    return int(bool(found.violated or failed or untried))


def planted(seed: int, only: list[str] | None) -> int:
    """Plant each bug in turn and run the part that must notice it; return 1 if one goes unnoticed."""
    missed = 0
    for bug in BUGS:
        if only and bug.module not in only:
            continue
        began = time.monotonic()
        tally, why = run_part(bug.module, seed, bug.seconds, bug.name)
        missed += not tally.violated[bug.promise]
        print(told(bug, tally, why, time.monotonic() - began), flush=True)
    print(f"\n{len(BUGS)} bugs planted, {missed} unnoticed")
    return int(missed > 0)


def told(bug: Bug, tally: Tally, why: str, took_s: float) -> str:
    """Whether a planted bug was noticed, in one line."""
    times = tally.violated[bug.promise]
    others = sorted(set(tally.violated) - {bug.promise})
    also = f" (and {', '.join(others)})" if others else ""
    seen = f"{bug.promise} red {times:,} times{also}" if times else f"UNNOTICED by {bug.promise} {why}"
    return f"{bug.name:32} {took_s:5.0f} s  {seen}"


if __name__ == "__main__":
    sys.exit(main())
