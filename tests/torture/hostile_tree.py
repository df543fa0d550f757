"""One server that does not want to be stopped: hostile_tree.py SEED COUNT FIFO KEEP. A program; standard library, no site packages.

Its tree has COUNT processes, and some more all the time. Each of them holds the write end of FIFO, so that its reader sees the
end of file when, and only when, none is left. Drawn from SEED, each detaches itself (double fork, setsid) or does not, is deaf to
TERM, INT and HUP or is not, calls itself something else, wipes its environment unless KEEP is 1, or goes on forking while it is
being killed. None lives longer than two minutes.
"""

import ctypes
import os
import random
import signal
import sys
import time

LIFE_S = 120
YOUNG_S = 1.0  # what those that go on forking leave behind all the time lives so long
NAMES = (b"VLLM::Worker_TP0", b"sglang::sched", b"python3", b") Z 1 (", b"systemd", b"sh")
LIBC = ctypes.CDLL(None)


def main(seed: int, count: int, fifo: str, *, keep: bool) -> None:
    """Grow the tree, say so, and stay."""
    draw = random.Random(seed)
    os.set_inheritable(os.open(fifo, os.O_WRONLY), True)
    signal.alarm(LIFE_S)
    made = 0
    while made < count - 1:
        detaches, deaf, breeds = draw.random() < 0.6, draw.random() < 0.7, draw.random() < 0.05
        become = (draw.choice(NAMES), deaf, breeds, not keep and draw.random() < 0.6)
        made += 1
        if not detaches:
            if os.fork() == 0:
                live(*become)
            continue
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork() == 0:
                live(*become)
            os._exit(0)
        os.waitpid(child, 0)
    if draw.random() < 0.5:
        be_deaf()
    print("ready", flush=True)
    if draw.random() < 0.2:
        os._exit(3)  # the server ends by itself, its workers do not
    time.sleep(LIFE_S)


def live(name: bytes, deaf: bool, breeds: bool, wipe: bool) -> None:
    """Be one process of the tree, to the end."""
    signal.alarm(LIFE_S)
    LIBC.prctl(15, name, 0, 0, 0)
    if deaf:
        be_deaf()
    if wipe:
        wipe_environment()
    while breeds:
        time.sleep(0.15)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.alarm(LIFE_S)
                time.sleep(YOUNG_S)
            os._exit(0)
        os.waitpid(-1, 0)
    time.sleep(LIFE_S)
    os._exit(0)


def be_deaf() -> None:
    """Ignore what can be ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def wipe_environment() -> None:
    """Empty what /proc/PID/environ shows, as programs do that write their title there."""
    with open("/proc/self/stat", "rb") as f:
        fields = f.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, 0, end - start)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], keep=sys.argv[4] == "1")
