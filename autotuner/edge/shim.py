"""The shim: one tiny process a launch that starts a server, outlives the daemon, and cleans up after the server.

Run as `python -I shim.py FOLDER`, standard library only, so that it can be copied to any host; with `--foreground` it stays the
process that it was started as, which a unit wants. It is a child subreaper: whatever the server forks, however detached,
becomes its child in the end, so "stopped" can be proven without root. Where it is told to, it works in a control group
of its own. It records identity and exit status atomically in FOLDER:

  launch.json     what to run, written by the daemon; renamed to claimed.json by the shim, or to revoked.json by a daemon
                  that gave the launch up: exactly one of the two renames can succeed
  identity.json   boot id, pid and start ticks of the shim and of the server
  exit.json       the server's exit code (negative for a signal), once nothing of it is left, or else what is left
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
GIVE_UP_S = 60.0  # a process that survives SIGKILL this long hangs in the kernel; it is reported as left


class NotStartedError(Exception):
    """The server could not be started: the exit code that a shell would give, and why."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def main(folder: str, *, foreground: bool = False) -> None:
    """Given a launch folder, run its server to its end."""
    if not foreground:
        if os.fork():
            os._exit(0)  # the daemon need not reap us: we belong to init from here on
        os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a starter that ignores it would cost us every exit code
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # a stop that comes early waits until there is a server to stop
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        os.rename(os.path.join(folder, "launch.json"), os.path.join(folder, "claimed.json"))
    except FileNotFoundError:
        return  # revoked, or never written: nothing may be started
    record(folder, "exit.json", run(folder, libc))


def run(folder: str, libc: ctypes.CDLL) -> dict[str, Any]:
    """Start the server of a claimed launch under its slot's lock, follow it, clear up after it; return its end."""
    lock = None
    try:
        with open(os.path.join(folder, "claimed.json"), encoding="utf-8") as f:
            spec = json.load(f)
        lock = take_slot(spec["slot_lock"])
        if lock is None:
            return {"code": None, "error": "another server holds the slot"}
        if spec.get("group"):
            enter(spec["group"])
        server = start(folder, spec, libc)
    except NotStartedError as error:
        append_log(folder, f"autotuner: the server could not be started: {error}\n")
        return {"code": error.code, "error": str(error)}
    except Exception as error:  # noqa: BLE001 - nothing runs yet, and a launch without an end would be waited for
        return {"code": None, "error": f"the shim failed: {type(error).__name__}: {error}"}
    else:
        identities = {"shim": identity(os.getpid()), "server": identity(server)}
        record(folder, "identity.json", {"boot_id": boot_id(), **identities})
        code, left = clear(server, follow(server, float(spec["stop_grace_s"])))
        return {"code": code, "left": left, "error": ""}
    finally:
        if lock is not None:
            os.close(lock)  # before the end is recorded: whoever reads of it may start the next server at once


def take_slot(path: str) -> int | None:
    """Take the slot's lock for as long as anything of the server lives; None if another launch has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def enter(group: str) -> None:
    """Make a control group and move there, before anything is started. Raise NotStartedError."""
    for _ in range(10):
        try:
            os.makedirs(group, exist_ok=True)
            with open(os.path.join(group, "cgroup.procs"), "w", encoding="ascii") as f:
                f.write(str(os.getpid()))
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENODEV}:  # an empty group may be swept away just then
                raise NotStartedError(126, f"control group {group} cannot be entered: {error.strerror}") from None
        else:
            return
    raise NotStartedError(126, f"control group {group} cannot be entered: it is removed again and again")


def start(folder: str, spec: dict[str, Any], libc: ctypes.CDLL) -> int:
    """Start the server and return its pid. Raise NotStartedError if its program cannot be run."""
    env = {**inherited(tuple(spec.get("dropped", ()))), **spec["env"], **secrets(spec["secret_files"])}
    log = os.open(os.path.join(folder, "server.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    tell, told = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            # Should the shim be killed, the server goes with it; its own workers are found by the launch id.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == parent:
                become(spec, env, log, null)
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent is told and nothing else runs here
            os.write(told, reason(spec["argv"][0], error).encode("utf-8", "replace")[:4000])
        finally:
            os._exit(127)
    for fd in (log, null, told):
        os.close(fd)
    failed = os.read(tell, 4096).decode("utf-8", "replace")  # it is closed, empty, by a program that runs
    os.close(tell)
    if failed:
        os.waitpid(pid, 0)
        code, _, message = failed.partition(" ")
        raise NotStartedError(int(code), message)
    return pid


def become(spec: dict[str, Any], env: dict[str, str], log: int, null: int) -> None:
    """Turn this process into the server; everything else that it inherits closes with the exec."""
    for fd, standard in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, standard)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            close_on_exec(fd)
    # Python ignores some, a shell's background job INT and QUIT, and what is ignored stays so over an exec.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.chdir(spec["cwd"])
    os.execvpe(spec["argv"][0], spec["argv"], env)


def close_on_exec(fd: int) -> None:
    """Keep a descriptor from the server; the one that listed them is closed already."""
    try:
        os.set_inheritable(fd, False)
    except OSError:
        pass


def inherited(dropped: tuple[str, ...]) -> dict[str, str]:
    """Our own environment, without the variables whose names begin like one of these."""
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def reason(program: str, error: Exception) -> str:
    """Why a program cannot be run, behind the exit code that a shell would give."""
    if not isinstance(error, OSError):
        return f"126 {program}: {error}"
    if error.errno == errno.ENOENT and "/" in program and os.path.exists(program):
        return f"127 {program}: the interpreter that its first line names does not exist"
    return f"{127 if error.errno == errno.ENOENT else 126} {program}: {error.strerror}"


def secrets(paths: dict[str, str]) -> dict[str, str]:
    """Read the secrets that the server gets in its environment; they are written nowhere."""
    values = {}
    for name, path in paths.items():
        try:
            with open(path, encoding="utf-8") as f:
                values[name] = f.read().strip()
        except OSError as error:
            raise NotStartedError(126, f"secret file {path} for {name}: {error.strerror}") from None
        except ValueError:
            raise NotStartedError(126, f"secret file {path} for {name}: it is no UTF-8 text") from None
    return values


def follow(server: int, grace_s: float) -> int | None:
    """Wait for the server's end, passing a stop on to it; return its exit code, None if it outlives the grace."""
    deadline: float | None = None
    while deadline is None or time.monotonic() < deadline:
        wait = 1.0 if deadline is None else max(0.0, min(1.0, deadline - time.monotonic()))
        got = signal.sigtimedwait(WATCHED, wait)
        code, _ = reap(server)
        if code is not None:
            return code
        if got is not None and got.si_signo in {signal.SIGTERM, signal.SIGINT} and deadline is None:
            os.kill(server, signal.SIGTERM)  # not reaped yet, so the pid is still its own
            deadline = time.monotonic() + grace_s
    return None


def reap(server: int) -> tuple[int | None, bool]:
    """Collect whatever has ended; return the server's exit code if it is among them, and whether no child is left."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code, True
        if pid == 0:
            return code, False
        if pid == server:
            code = os.waitstatus_to_exitcode(status)


def clear(server: int, code: int | None) -> tuple[int | None, list[dict[str, int]]]:
    """End everything that is left; return the server's exit code, and the processes that even SIGKILL did not end.

    A subreaper without children has no descendants: that is the proof. A walk over /proc is none, for a process that
    forks and ends all the time is never where the walk looks.
    """
    started = time.monotonic()
    linger_s = 0.0 if code is None else LINGER_S
    told: set[tuple[int, int]] = set()
    while True:
        ended, childless = reap(server)
        code = ended if code is None else code
        waited_s = time.monotonic() - started
        left = [] if childless else descendants(os.getpid())
        if childless or waited_s > GIVE_UP_S:
            return code, [{"pid": pid, "start_ticks": ticks} for pid, ticks in left]
        if waited_s < linger_s:
            for process in left:
                if process not in told:
                    send(*process, signal.SIGTERM)
                    told.add(process)
        else:
            for process in left:
                send(*process, signal.SIGKILL)
            ended = kill_children(server)
            code = ended if code is None else code
        # A look at all of /proc is dear; workers that end one after the other are not worth one each.
        time.sleep(0.1 if waited_s < linger_s else 0.02)


def kill_children(server: int) -> int | None:
    """Kill our own children over and over, fast enough for one that forks and ends faster than /proc can be walked.

    Return the server's exit code if it is among them.
    """
    code = None
    for _ in range(100):
        try:
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as f:
                children = f.read().split()
        except OSError:
            break  # a kernel without this file
        for child in children:
            os.kill(int(child), signal.SIGKILL)  # not reaped yet, so the pid is still its own
        ended, childless = reap(server)
        code = ended if code is None else code
        if childless:
            break
    return code


def descendants(root: int) -> list[tuple[int, int]]:
    """Every living process below `root` as (pid, start ticks); the dead that nobody has collected do not count."""
    children: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc"):
        fields = stat_fields(int(name)) if name.isdigit() else None
        if fields and alive(fields):
            children.setdefault(int(fields[1]), []).append((int(name), int(fields[19])))
    found: list[tuple[int, int]] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += [pid for pid, _ in below]
    return found


def alive(fields: list[str]) -> bool:
    """Whether a process lives, by its stat fields: one whose first thread ended looks dead while its others run."""
    return fields[0] not in "ZXx" or (fields[0] == "Z" and int(fields[17]) > 1)


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


def send(pid: int, ticks: int, number: int) -> None:
    """Signal a process of ours and no other that may have got its pid since; one that is gone is no error."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        fields = stat_fields(pid)
        if fields and int(fields[19]) == ticks:
            signal.pidfd_send_signal(fd, number)
    except OSError:
        pass
    finally:
        os.close(fd)


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
        remove(temporary)
        append_log(folder, f"autotuner: {name} could not be written: {error.strerror}\n")


def remove(path: str) -> None:
    """Remove a file that may not be there."""
    try:
        os.unlink(path)
    except OSError:
        pass


def append_log(folder: str, text: str) -> None:
    """Add a line to the server's log."""
    try:
        with open(os.path.join(folder, "server.log"), "a", encoding="utf-8") as f:
            f.write(text)
    except OSError:
        pass


if __name__ == "__main__":
    main(sys.argv[-1], foreground="--foreground" in sys.argv[1:-1])
