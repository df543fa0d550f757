"""Real autotuner processes at a tenth of their price: a server that has imported the program once and forks it.

Started by `forks.Forks` with the fault library preloaded. It reads orders as JSON lines: `{"id", "argv", "log", "control", "trace"}`
runs that command line of autotuner in a fork, with its output in a file, and answers `{"id", "pid"}` at once and `{"id", "code"}`
at its end (negative for a signal). A fork is a whole process of its own, with descriptors, locks, children and a death of its
own; what it lacks against a fresh start are only the half second of imports.

By hand: python -m torture.daemon -- -s autotuner.toml daemon
"""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from torture import faults, sabotage

PR_SET_PDEATHSIG = 1


def serve() -> None:
    """Fork what is ordered on stdin until that ends; what was forked ends with this process."""
    wake, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    known: dict[int, Any] = {}
    rest = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            reap(known)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = fork(order)
                known[pid] = order["id"]
                say(id=order["id"], pid=pid)


def reap(known: dict[int, Any]) -> None:
    """Tell of every fork that has ended."""
    for pid in list(known):
        got, status = os.waitpid(pid, os.WNOHANG)
        if got:
            say(id=known.pop(pid), code=os.waitstatus_to_exitcode(status))


def say(**what: Any) -> None:
    """Answer with one line."""
    os.write(1, json.dumps(what).encode() + b"\n")


def fork(order: dict[str, Any]) -> int:
    """Run an order in a fork; return its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            stand_alone(order["log"])
            code = run(order)
    except BaseException:  # noqa: BLE001 - a fork must end here, whatever happens in it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def stand_alone(log: str) -> None:
    """Leave nothing of the server in the fork: its signals, its pipes, its session."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for fd, standard in ((null, 0), (out, 1), (out, 2)):
        os.dup2(fd, standard)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            try:
                os.close(fd)
            except OSError:
                continue


def run(order: dict[str, Any]) -> int:
    """Run the command line with what is asked for; return its exit code."""
    from autotuner.cli import main

    if order.get("control"):
        phase = faults.Phase(Path(order["control"]))
        phase.enter("starting")
        watch(phase)
        faults.begin(order["control"], order.get("trace") or "")
    try:
        main(order["argv"], prog_name="autotuner")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


def watch(phase: faults.Phase) -> None:
    """Have the daemon say which phase it is in: what its slot decides, and what its level reports."""
    from autotuner.context import SlotContext
    from autotuner.daemon import Daemon
    from autotuner.slotworker import SlotWorker

    carry_out, end, assign = SlotWorker._carry_out, Daemon._end, SlotContext.__setattr__

    async def carrying_out(self: SlotWorker, decision: Any, *rest: Any) -> None:
        if entered := phase_of(decision.action, busy=self.busy):
            phase.enter(entered)
        await carry_out(self, decision, *rest)

    def ending(self: Daemon) -> Coroutine[Any, Any, None]:
        phase.enter("ending")
        return end(self)

    def assigning(self: SlotContext, name: str, value: Any) -> None:
        if name == "live" and value.stage == "measuring (steady)":
            phase.enter("measuring")
        assign(self, name, value)

    patches: tuple[tuple[type, str, Callable[..., Any]], ...] = (
        (SlotWorker, "_carry_out", carrying_out),
        (Daemon, "_end", ending),
        (SlotContext, "__setattr__", assigning),
    )
    for owner, name, patched in patches:
        setattr(owner, name, patched)


def phase_of(action: Any, *, busy: bool) -> str:
    """Given what a slot decided, return the phase that begins with it, '' if the one before goes on."""
    named = {"RunLevel": "warm-up", "Stop": "stopping", "Verify": "restoring", "RestoreDone": "restoring"}
    kind = type(action).__name__
    if kind in {"Launch", "AwaitServing"}:
        return "launching" if action.trial_id is not None else "restoring"
    if kind in {"Wait", "Interrupt"}:
        return "" if busy else "idle"
    return named.get(kind, "concluding")


def warm_up() -> None:
    """What a process does once and every fork would do again: compile the shipped rules, build the parser's tables."""
    from autotuner.settings import Settings, load_policies

    load_policies(Settings.model_validate({"state_dir": "/nonexistent", "slots": {"t": {"port": 1}}}))


def main() -> int:
    """Serve, or run one command line by hand."""
    os.environ.pop("LD_PRELOAD", None)  # it is for this process and its forks alone
    for module in (
        "cli",
        "cli.daemon",
        "cli.queueing",
        "cli.journal",
        "cli.control",
        "cli.status",
        "daemon",
        "settings",
    ):
        importlib.import_module(f"autotuner.{module}")
    sabotage.plant(os.environ.pop("TORTURE_BUG", ""))
    warm_up()
    if "--" in sys.argv:
        return run({"argv": sys.argv[sys.argv.index("--") + 1 :]})
    gc.collect()
    gc.freeze()
    serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
