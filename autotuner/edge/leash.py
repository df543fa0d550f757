"""A leash for a program of somebody else: runs it, and ends it with everything it started, however it or we end.

`python -m autotuner.edge.leash GRACE_S PROGRAM ARGUMENT…` passes on output and exit code. On SIGTERM, SIGINT and SIGHUP, and
when the process that started it dies, the program's whole tree gets SIGTERM and after the grace SIGKILL; SIGINT is never
sent, since some programs ignore it. It is a child subreaper, so that what detached itself is found as well; a program that
ends and leaves children behind has them killed. A program that cannot be run is exit code 127 and a line on stderr.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

from autotuner.edge import clock, procfs

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ASKED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_LOOK_S = 0.05
LINGER_S = 1.0  # children of a program that ended get this long to follow it
GIVE_UP_S = 10.0  # what survives SIGKILL so long hangs in the kernel


def command(grace_s: float, argv: tuple[str, ...]) -> tuple[str, ...]:
    """Given a grace and a program's argv, return the argv that runs it on a leash."""
    return (sys.executable, "-m", "autotuner.edge.leash", str(grace_s), *argv)


def main(grace_s: float, argv: list[str]) -> int:
    """Run the program to its end or until asked to end it; return its exit code, 128 and the signal's number for a signal."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_ASKED, signal.SIGCHLD})
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        return 1  # it died before the kernel knew of our wish

    def become() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    try:
        program = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=become,  # noqa: PLW1509 - there is one thread here
        )
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        return 127
    asked = _wait(program)
    _end_tree(grace_s if asked else LINGER_S, tell=asked)
    code = program.poll()
    if code is None:
        return 1  # it hangs in the kernel
    return code if code >= 0 else 128 - code


def _wait(program: "subprocess.Popen[bytes]") -> bool:
    """Wait until the program has ended or its end is asked for; tell whether it was asked for."""
    while program.poll() is None:
        if signal.sigwait({*_ASKED, signal.SIGCHLD}) in _ASKED:
            return True
    return False


def _end_tree(grace_s: float, *, tell: bool) -> None:
    """End whatever lives below us: told at once if asked to, killed after the grace."""
    began = clock.monotonic_s()
    told = set[int]()
    while left := procfs.descendants(os.getpid())[1:]:
        waited = clock.monotonic_s() - began
        if waited > grace_s + GIVE_UP_S:
            return
        late = waited >= grace_s
        for pid in left if late else [pid for pid in left if tell and pid not in told]:
            told.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        signal.sigtimedwait({signal.SIGCHLD}, _LOOK_S)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
