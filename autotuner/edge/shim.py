"""The shim: one tiny process a launch that starts a server, outlives the daemon, and cleans up after the server.

Run as `python -I shim.py FOLDER`, standard library only, so that it can be copied to any host. It is a child subreaper:
whatever the server forks, however detached, becomes its child in the end, so "stopped" can be proven without root. It
records identity and exit status atomically in FOLDER:

  launch.json     what to run, written by the daemon; renamed to claimed.json by the shim, or to revoked.json by a daemon
                  that gave the launch up: exactly one of the two renames can succeed
  identity.json   boot id, pid and start ticks of the shim and of the server
  exit.json       the server's exit code (negative for a signal), once nothing of it is left
  server.log      standard output and standard error together
"""

import ctypes
import errno
import fcntl
import json
import os
import signal
import sys
import time
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
LINGER_S = 2.0  # workers of a server that ended get this long to follow it before they are killed
GIVE_UP_S = 60.0  # a process that survives SIGKILL this long hangs in the kernel; it is reported


def main(folder: str) -> None:
    """Given a launch folder, run its server to its end."""
    if os.fork():
        os._exit(0)  # the daemon need not reap us: we belong to init from here on
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        os.rename(os.path.join(folder, "launch.json"), os.path.join(folder, "claimed.json"))
    except FileNotFoundError:
        return  # revoked, or never written: nothing may be started
    with open(os.path.join(folder, "claimed.json"), encoding="utf-8") as f:
        spec = json.load(f)
    lock = take_slot(spec["slot_lock"])
    if lock is None:
        record(folder, "exit.json", {"code": None, "error": "another server holds the slot"})
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    try:
        server = start(folder, spec, libc)
    except OSError as error:
        message = f"{spec['argv'][0]}: {error.strerror}"
        append_log(folder, f"autotuner: the server could not be started: {message}\n")
        record(folder, "exit.json", {"code": 127 if error.errno == errno.ENOENT else 126, "error": message})
        return
    record(folder, "identity.json", {"boot_id": boot_id(), "shim": identity(os.getpid()), "server": identity(server)})
    code = follow(server, float(spec["stop_grace_s"]))
    left = clear()
    record(folder, "exit.json", {"code": code, "left": left, "error": ""})
    os.close(lock)


def take_slot(path: str) -> int | None:
    """Take the slot's lock for as long as anything of the server lives; None if another launch has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def start(folder: str, spec: dict[str, Any], libc: ctypes.CDLL) -> int:
    """Start the server and return its pid. Raise OSError if its program cannot be run."""
    env = dict(spec["env"])
    for name, path in spec["secret_files"].items():
        with open(path, encoding="utf-8") as f:
            env[name] = f.read().strip()
    log = os.open(os.path.join(folder, "server.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    null = os.open(os.devnull, os.O_RDONLY)
    tell, told = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            # Should the shim be killed, the server goes with it; its own workers are found by the launch id.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            os.dup2(null, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.closerange(3, told)
            os.closerange(told + 1, 256)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
            os.chdir(spec["cwd"])
            os.execvpe(spec["argv"][0], spec["argv"], env)
        except OSError as error:
            os.write(told, str(error.errno).encode())
        os._exit(127)
    for fd in (log, null, told):
        os.close(fd)
    failed = os.read(tell, 16)
    os.close(tell)
    if failed:
        os.waitpid(pid, 0)
        raise OSError(int(failed), os.strerror(int(failed)))
    return pid


def follow(server: int, grace_s: float) -> int:
    """Wait for the server's end, passing a stop on to it; return its exit code, negative for a signal."""
    deadline: float | None = None
    while True:
        wait = 1.0 if deadline is None else max(0.0, min(1.0, deadline - time.monotonic()))
        got = signal.sigtimedwait(WATCHED, wait)
        code = reap(server)
        if code is not None:
            return code
        if got is not None and got.si_signo in {signal.SIGTERM, signal.SIGINT} and deadline is None:
            send(server, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
        if deadline is not None and time.monotonic() >= deadline:
            send(server, signal.SIGKILL)


def reap(server: int) -> int | None:
    """Collect whatever has ended; return the server's exit code if it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == server:
            code = os.waitstatus_to_exitcode(status)


def clear() -> list[int]:
    """End everything that the server left behind; return the pids that even SIGKILL did not end."""
    started = time.monotonic()
    told: set[int] = set()
    while True:
        reap(0)
        left = descendants(os.getpid())
        if not left or time.monotonic() - started > GIVE_UP_S:
            return left
        patient = time.monotonic() - started < LINGER_S
        for pid in left:
            if patient and pid not in told:
                send(pid, signal.SIGTERM)
                told.add(pid)
            elif not patient:
                send(pid, signal.SIGKILL)
        signal.sigtimedwait(WATCHED, 0.02)


def descendants(root: int) -> list[int]:
    """Every living process below `root`; the dead that nobody has collected yet do not count."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = stat_fields(int(name))
            if fields is not None and fields[0] not in "ZX":
                children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    todo = [root]
    while todo:
        for child in children.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found


def stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; the name before them may hold spaces and brackets."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
            return f.read().rpartition(")")[2].split()
    except OSError:
        return None


def identity(pid: int) -> dict[str, int]:
    """What a process is, whatever happens to pids later: its pid and the tick at which it started."""
    fields = stat_fields(pid)
    return {"pid": pid, "start_ticks": int(fields[19]) if fields else 0}


def boot_id() -> str:
    """What changes with each boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as f:
        return f.read().strip()


def send(pid: int, number: int) -> None:
    """Signal a process of ours; one that is already gone is no error."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def record(folder: str, name: str, value: dict[str, Any]) -> None:
    """Write a file as a whole. A full disk must not end the server: what is lost can be found in /proc."""
    temporary = os.path.join(folder, f".{name}")
    try:
        with open(temporary, "w", encoding="utf-8") as f:
            json.dump(value, f)
            f.flush()
            os.fsync(f.fileno())
        os.rename(temporary, os.path.join(folder, name))
    except OSError as error:
        append_log(folder, f"autotuner: {name} could not be written: {error.strerror}\n")


def append_log(folder: str, text: str) -> None:
    """Add a line to the server's log."""
    try:
        with open(os.path.join(folder, "server.log"), "a", encoding="utf-8") as f:
            f.write(text)
    except OSError:
        pass


if __name__ == "__main__":
    main(sys.argv[1])
