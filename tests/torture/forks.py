"""The harness's side of `torture.daemon`: run command lines of autotuner in forks, from any thread, and await their ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torture import faults

TESTS = Path(__file__).resolve().parents[1]


class Forked:
    """One process: its pid, and its exit code once it has one (negative for a signal)."""

    def __init__(self) -> None:
        self.pid = 0
        self.code: int | None = None
        self._begun, self._ended = threading.Event(), threading.Event()

    def told(self, what: dict[str, Any]) -> None:
        """Take in what the server says of it."""
        if "pid" in what:
            self.pid = what["pid"]
            self._begun.set()
        else:
            self.code = what["code"]
            self._ended.set()

    def begun(self) -> Self:
        """Wait until it runs."""
        if not self._begun.wait(60):
            raise TimeoutError("the fork server does not answer")
        return self

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; return its exit code, None if it goes on."""
        self._ended.wait(timeout_s)
        return self.code

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal it, and with SIGKILL wait for its end. It is not reaped before we are told, so the pid is its own."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
        if number is signal.SIGKILL:
            self._ended.wait(30)


class Forks:
    """A fork server; use as a context manager. `library` is the fault library or None."""

    def __init__(self, library: Path | None, bug: str = "") -> None:
        env = {**os.environ, "TORTURE_BUG": bug or os.environ.get("TORTURE_BUG", "")}
        if library is not None:
            env["LD_PRELOAD"] = str(library)
        self.library = library
        self._server = subprocess.Popen(
            [sys.executable, "-m", "torture.daemon"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            cwd=TESTS,
        )
        self._lock, self._forks, self._next = threading.Lock(), dict[int, Forked](), 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server and, with it, whatever it has forked."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(30)
        self._reader.join(30)
        if self._server.stdout is not None:
            self._server.stdout.close()

    def start(
        self, argv: list[str], log: Path, control: faults.Control | None = None, trace: Path | None = None
    ) -> Forked:
        """Start a command line of autotuner; return once it runs."""
        with self._lock:
            self._next += 1
            number, forked = self._next, Forked()
            self._forks[number] = forked
            order = {
                "id": number,
                "argv": argv,
                "log": str(log),
                "control": str(control.path) if control else "",
                "trace": str(trace or ""),
            }
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps(order).encode() + b"\n")
            self._server.stdin.flush()
        return forked.begun()

    def run(
        self,
        argv: list[str],
        log: Path,
        control: faults.Control | None = None,
        trace: Path | None = None,
        timeout_s: float = 120.0,
    ) -> tuple[int | None, str]:
        """Run a command line to its end; return its exit code and its output. One that is late is killed."""
        log.unlink(missing_ok=True)
        forked = self.start(argv, log, control, trace)
        code = forked.wait(timeout_s)
        if code is None:
            forked.kill()
        return code, log.read_text(encoding="utf-8", errors="replace")

    def _read(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            what = json.loads(line)
            with self._lock:
                self._forks[what["id"]].told(what)
                if "code" in what:
                    del self._forks[what["id"]]


def until(done: Any, timeout_s: float, every_s: float = 0.05) -> bool:
    """Wait until `done()` is true; tell whether it became so in time."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True
