"""A whole autotuner in a temporary folder: settings, candidates on a fake server, the daemon as a real process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patience import PATIENCE_S

from autotuner.cli.common import State
from autotuner.cli.status import slot_status
from autotuner.core.state import LaunchState
from autotuner.edge import procfs
from autotuner.edge.rows import LaunchRow
from autotuner.edge.store import Store
from autotuner.settings import load_settings

FAKE = Path(__file__).parents[1] / "fakes" / "fake_openai.py"
SLOT = "t"
# Nothing that runs beside a test may void what it measures: undisturbed.py says how.
PROGRAM = (sys.executable, "-m", "e2e.undisturbed")
TESTS = Path(__file__).parents[1]


class House:
    """One state folder, one slot, and whatever a test does to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.state = folder / "state"
        self.measured: set[str] = set()
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.settings: dict[str, str] = {}
        self.slot: dict[str, str] = {}
        self.benchmark = {
            "levels": "[4]",
            "seconds": "2.0",
            "window_s": "0.3",
            "output_tokens": "64",  # of long answers what a busy machine delays is a small part
            "prompt_tokens": "16",
        }
        self.extra = ""
        self.program = PROGRAM

    @property
    def settings_file(self) -> Path:
        return self.folder / "autotuner.toml"

    def write_settings(self) -> None:
        top = {
            "state_dir": json.dumps(str(self.state)),
            "cycle_s": "0.1",
            "serving_probe_every_s": "2",
            "disk_free_min_mib": "0",
            "propose": '"suggest"',
            **self.settings,
        }
        slot = {"port": str(self.port), "start_timeout_s": "120", "stop_grace_s": "2", "drain_s": "1", **self.slot}
        text = "\n".join(f"{k} = {v}" for k, v in top.items())
        text += f"\n[slots.{SLOT}]\n" + "\n".join(f"{k} = {v}" for k, v in slot.items())
        text += "\n[benchmarks.quick]\n" + "\n".join(f"{k} = {v}" for k, v in self.benchmark.items())
        # Seconds a trial, where a test is not about them: further launches of who leads by chance, and the fixed prompts.
        if "[noise]" not in self.extra:
            text += "\n[noise]\nopen_launches = 0"
        if "[objective" not in self.extra:
            text += "\n[objective.constraints]\nanswers_agree_min = 0"
        self.settings_file.write_text(f"{text}\n{self.extra}\n")

    def candidate(self, name: str, *, timeout_s: float | None = None, **behaviour: object) -> Path:
        """Write a candidate whose server is the fake one with this behaviour."""
        words = [sys.executable, str(FAKE), "--port", "{port}"]
        for key, value in behaviour.items():
            words += [f"--{key.replace('_', '-')}", str(value)]
        limit = f"start_timeout_s = {timeout_s}\n" if timeout_s else ""
        path = self.folder / f"{name}.toml"
        path.write_text(f'name = "{name}"\nengine = "command"\n[launch]\ncommand = {json.dumps(words)}\n{limit}')
        return path

    def cli(self, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [*self.program, "-s", str(self.settings_file), *map(str, arguments)]
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False, env=environment()
        )
        assert not check or ran.returncode == 0, ran.stdout + ran.stderr
        return ran

    def start(self) -> subprocess.Popen[bytes]:
        if not self.settings_file.exists():
            self.write_settings()
        with (self.folder / "daemon.log").open("ab") as log:
            process = subprocess.Popen(
                [*self.program, "-s", str(self.settings_file), "daemon", "--log-format", "json"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
            )
        self.daemons.append(process)
        return process

    def kill(self) -> None:
        """kill -9 the daemon."""
        self.daemons[-1].kill()
        self.daemons[-1].wait()

    def end(self) -> float:
        """SIGTERM the daemon; return how long it took."""
        began = time.monotonic()
        self.daemons[-1].send_signal(signal.SIGTERM)
        self.daemons[-1].wait(PATIENCE_S)
        return time.monotonic() - began

    def read(self, ask: Callable[[Store], Any]) -> Any:
        store = Store(self.state / "state.db")
        try:
            return ask(store)
        finally:
            store.close()

    def wait(self, what: Callable[[], Any], timeout_s: float = PATIENCE_S, why: str = "") -> Any:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if got := what():
                return got
            time.sleep(0.1)
        log = (self.folder / "daemon.log").read_text(errors="replace")[-3000:]
        raise AssertionError(f"in vain: {why or what}; status {self.status()}\n{log}")

    def status(self) -> dict[str, Any]:
        """What `status --json` says of the slot, read in this process, since tests ask many times a second."""
        settings = load_settings(self.settings_file)
        return dict(self.read(lambda store: slot_status(State(settings, store), SLOT)))

    def serving(self) -> str:
        """The name of the best-known server if it serves and is verified, '' otherwise."""
        serving = self.status().get("serving")
        return str(serving["name"]) if serving and serving["verified"] and serving["is_best_known"] else ""

    def wait_serving(self, name: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until this server serves, verified, and is the only one."""
        self.wait(lambda: self.serving() == name, timeout_s, f"{name} serving")
        assert len(self.servers()) == 1

    def wait_settled(self, timeout_s: float = 2 * PATIENCE_S) -> None:
        """Wait until nothing waits and nothing is in hand, and something serves."""

        def settled() -> bool:
            s = self.status()
            serves = bool(s["serving"]) and s["serving"]["verified"] and s["serving"]["is_best_known"]
            return not s["queue"] and not s["trial"] and bool(serves)

        self.wait(settled, timeout_s, "the queue to be worked off")

    def wait_measuring(self, name: str) -> None:
        """Wait until a level of this candidate's trial runs, on a launch that no earlier call has waited for.

        What a killed daemon left in its status file still says "measuring": only a new launch proves a new level.
        """

        def measuring() -> bool:
            s = self.status()
            mine = [r for r in self.launches() if r.name == name and r.state is LaunchState.SERVING]
            fresh = {r.id for r in mine} - self.measured
            runs = str(s["live"].get("stage", "")).startswith("measuring") and (s["trial"] or {}).get("name") == name
            if not fresh or not runs:
                return False
            self.measured |= fresh
            return True

        self.wait(measuring, why=f"{name} to be measured")

    def verdicts(self) -> dict[str, str]:
        return {t.name: str(t.verdict or t.state) for t in self.read(lambda s: s.trials())}

    def titles(self) -> list[str]:
        return [e.title for e in self.read(lambda s: s.entries())]

    def launches(self) -> list[LaunchRow]:
        return list(self.read(lambda s: s.launches()))

    def servers(self) -> list[int]:
        """The fake servers of this house that live."""
        known = {path.name for path in (self.state / "launches").glob("*")} if self.state.exists() else set()
        found = []
        for pid in procfs.pids():
            if procfs.launch_id_of(pid) in known and procfs.start_ticks(pid) is not None:
                try:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes()
                except OSError:  # it ended while we looked
                    continue
                if b"shim.py" not in command and f"{self.port}".encode() in command:
                    found.append(pid)
        return found

    def close(self) -> None:
        for daemon in self.daemons:
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()
        known = {path.name for path in (self.state / "launches").glob("*")}
        for pid in procfs.pids():
            if procfs.launch_id_of(pid) in known:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment() -> dict[str, str]:
    """The environment of a program under test, as it is now: a test may have changed it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))}
