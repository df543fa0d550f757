"""Servers that do not want to be stopped. A program: hostile_server.py MODE [FIFO [COUNT]]

Every process it makes holds the write end of FIFO, so the reader sees its end when, and only when, none is left; none
lives longer than ten minutes.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

LIFE_S = 600
_ME = [sys.executable, "-I", "-S", __file__]


def main() -> None:
    mode, fifo, count = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "", int((sys.argv[3:] or ["10"])[0])
    if fifo:
        os.set_inheritable(os.open(fifo, os.O_WRONLY), True)
    signal.alarm(LIFE_S)
    MODES[mode](count)


def detached(work: Callable[..., None], *args: int) -> None:
    """Run work in a process that is no child and of no session of ours: double fork and setsid."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.alarm(LIFE_S)
    try:
        work(*args)
    finally:
        os._exit(0)


def sleep() -> None:
    time.sleep(LIFE_S)


def deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def rename(name: bytes) -> None:
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)


def breed(depth: int) -> None:
    """A deaf worker that forks on and on, also while it is being killed."""
    deaf()
    rename(b") Z 1 (")  # a name that looks like fields of a stat file
    for _ in range(depth):
        time.sleep(0.03)
        if os.fork() == 0:
            signal.alarm(LIFE_S)
            os.setsid()
            time.sleep(0.03)
            if os.fork():
                os._exit(0)
            signal.alarm(LIFE_S)
            sleep()
    sleep()


def tree(count: int, *, deaf_itself: bool = True) -> None:
    for i in range(count // 2):
        detached(breed, 20) if i % 3 == 0 else detached(lambda: (deaf(), sleep()))
    for _ in range(count - count // 2):
        if os.fork() == 0:
            signal.alarm(LIFE_S)
            deaf()
            sleep()
    if deaf_itself:
        deaf()
    print("ready", flush=True)
    sleep()


def bare_tree(count: int) -> None:
    """The same, but half of it has no environment: after its shim's end neither that nor its parents lead to it."""
    for _ in range(count // 2):
        detached(lambda: os.execve(sys.executable, [*_ME, "deaf", sys.argv[2]], {}))
    tree(count - count // 2)


def alone(count: int) -> None:
    deaf()
    rename(b"VLLM::Worker_TP0")
    sleep()


def hop() -> None:
    """Never the same pid for long: fork, let the parent end, again."""
    end = time.monotonic() + LIFE_S
    deaf()
    while time.monotonic() < end:
        if os.fork():
            os._exit(0)
        os.setsid()


def hopper(count: int) -> None:
    detached(hop)
    print("ready", flush=True)
    sleep()


def leaves_workers(count: int) -> None:
    """The server ends by itself, its detached workers do not."""
    for _ in range(count):
        detached(lambda: (deaf(), sleep()))
    print("ready", flush=True)
    sys.exit(5)


def detached_workers(count: int) -> None:
    for _ in range(count):
        detached(lambda: (deaf(), sleep()))
    print("ready", flush=True)
    sleep()


def busy(count: int) -> None:
    """The server idles, its detached worker loads something."""

    def work() -> None:
        while True:
            with open("/proc/self/stat", "rb") as f:
                f.read()

    detached(work)
    print("ready", flush=True)
    sleep()


def first_thread_ends(count: int) -> None:
    threading.Thread(target=sleep).start()
    print("ready", flush=True)
    sys.stdout.flush()
    ctypes.CDLL(None).pthread_exit(None)


def listener(port: int) -> None:
    """A detached grandchild listens, and shows no environment."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    s.bind(("127.0.0.1", port))
    s.listen()
    s.set_inheritable(True)
    os.dup2(s.fileno(), 30)
    s.close()
    detached(lambda: os.execve("/bin/sleep", ["sleep", str(LIFE_S)], {}))
    os.close(30)
    print("ready", flush=True)
    sleep()


MODES = {
    "tree": tree,
    "tree-that-listens": lambda count: tree(count, deaf_itself=False),
    "bare-tree": bare_tree,
    "deaf": alone,
    "hopper": hopper,
    "leaves-workers": leaves_workers,
    "detached-workers": detached_workers,
    "busy": busy,
    "first-thread-ends": first_thread_ends,
    "listener": listener,
}

if __name__ == "__main__":
    main()
