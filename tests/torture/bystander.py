"""A process that nobody launched and that looks as if: a line on its standard output for each signal that reaches it. A program.

bystander.py NAME: it calls itself NAME, is in a session of its own, and ends when its standard input does.
"""

import ctypes
import os
import signal
import sys


def main(name: str) -> None:
    """Report signals until nobody listens any more."""
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        try:
            signal.signal(number, lambda number, frame: os.write(1, f"signal {number}\n".encode()))
        except (OSError, ValueError):
            continue  # the C library's own
    os.write(1, b"watching\n")
    while os.read(0, 64):
        pass


if __name__ == "__main__":
    main(sys.argv[1])
