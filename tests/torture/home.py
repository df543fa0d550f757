"""A house to be tortured: real daemon, real shim, real server processes; what it has acknowledged; and the inquest after a death."""

import asyncio
import http.client
import json
import shutil
import signal
import sqlite3
import tempfile
import threading
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from e2e.house import SLOT, House

from autotuner.core.entry import Entry
from autotuner.edge import procfs
from autotuner.edge.calibration import capacity_tok_s
from autotuner.edge.files import lock_holder
from autotuner.edge.journal import read_entries
from torture import faults
from torture.forks import Forked, Forks, until

RECOVERY_S = 120.0  # generous: the machine is full of other houses
HELD = "now: the harness looks at it"


@dataclass(frozen=True)
class Record:
    """What a state folder says: the database as a process that opens it finds it, and the journal's files."""

    entries: dict[int, str]
    published: dict[int, str]
    concluding: dict[int, list[int]]
    trials: tuple[tuple[int, str, str, int | None], ...]
    best: str
    files: tuple[Entry, ...]
    flaws: tuple[str, ...]


class Home(House):
    """One state folder with one slot, its daemon forked on demand. `enqueued` are the names whose enqueue ended with 0."""

    def __init__(self, folder: Path, forks: Forks, known: Path | None = None) -> None:
        super().__init__(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.forks = forks
        self.known = known
        self.control: faults.Control | None = None
        self.daemon: Forked | None = None
        self.trace: Path | None = None
        self.enqueued: list[str] = []
        self.published: dict[int, str] = {}
        self.runs = 0
        self.counting = threading.Lock()
        self.settings |= {"cycle_s": "0.1", "serving_probe_every_s": "5"}
        self.slot |= {"stop_grace_s": "1", "drain_s": "0.2"}
        self.benchmark |= {
            "levels": "[2]",
            "requests": "6",
            "window_s": "0.2",
            "output_tokens": "4",
            "prompt_tokens": "4",
        }
        self.extra = "[noise]\nopen_launches = 0\nconfirm_launches = 0"

    # --- doing

    def begin(self) -> None:
        """A best-known that serves, and nothing in the queue."""
        self.write_settings()
        if self.known is not None:
            shutil.copytree(self.known, self.state / "cache", dirs_exist_ok=True)
        self.start_daemon()
        for _ in range(5):  # on a machine this full the client's own lateness may leave a level without a verdict
            self.enqueue("base", "--again", tok_s=25)
            if until(lambda: not self.waiting(), RECOVERY_S) and until(self.serves_best, 2.0):
                return
        raise RuntimeError(f"no best-known came to be:\n{self.log_tail()}")

    def enqueue(
        self, name: str, *options: str, control: faults.Control | None = None, **behaviour: object
    ) -> tuple[int | None, str]:
        """Enqueue a candidate by the command; remember it if that said so."""
        path = self.candidate(name, **{"max_seconds": 900, "ttft_ms": 20, **behaviour})
        code, said = self.autotuner("enqueue", path, *options, control=control)
        if code == 0:
            self.enqueued += [] if name in self.enqueued else [name]
        return code, said

    def autotuner(self, *words: object, control: faults.Control | None = None) -> tuple[int | None, str]:
        """Run a command to its end; return exit code and output."""
        with self.counting:
            self.runs += 1
            run = self.runs
        argv = ["-s", str(self.settings_file), *map(str, words)]
        if self.trace is not None and control is None:
            control = faults.Control(self.folder / f"control-{run}")
        return self.forks.run(argv, self.folder / f"command-{run}.log", control, self.trace)

    def start_daemon(self) -> Forked:
        """Start the daemon with a fresh control block."""
        with self.counting:
            self.runs += 1
            run = self.runs
        self.control = faults.Control(self.folder / f"control-{run}")
        argv = ["-s", str(self.settings_file), "daemon", "--log-format", "json"]
        self.daemon = self.forks.start(argv, self.folder / "daemon.log", self.control, self.trace)
        return self.daemon

    def hold(self) -> None:
        """Pause at once, as `pause --now` does, as soon as the daemon works; the harness wants to look."""
        self.write("UPDATE slots SET paused = ? WHERE name = ?", HELD, SLOT)

    def let_go(self) -> None:
        """As `resume` does: go on."""
        self.write("UPDATE slots SET paused = '' WHERE name = ?", SLOT)

    def forgive(self) -> None:
        """As `resume` does: the restart budget begins anew, or rounds would spend each other's."""
        self.write(
            "UPDATE slots SET failures_from = (SELECT COALESCE(MAX(rowid), 0) FROM launches) WHERE name = ?", SLOT
        )

    def write(self, sql: str, *values: object) -> None:
        """Change a row beside the running daemon, leaving its write-ahead log alone."""
        with closing(sqlite3.connect(self.state / "state.db", timeout=30, isolation_level=None)) as db:
            db.execute("PRAGMA wal_autocheckpoint = 0")
            db.execute(sql, values)

    # --- looking

    def ask(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Read from the database of a running daemon; nothing if it is not there yet."""
        try:
            with closing(sqlite3.connect(f"file:{self.state / 'state.db'}?mode=ro", uri=True, timeout=30)) as db:
                return db.execute(sql, values).fetchall()
        except sqlite3.OperationalError:
            return []

    def said(self) -> dict[str, Any]:
        """The status of the daemon that runs now; empty if it has not said anything."""
        try:
            status: dict[str, Any] = json.loads((self.state / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return status if self.daemon is not None and status.get("pid") == self.daemon.pid else {}

    def serves_best(self) -> bool:
        """Whether the daemon says that the best-known serves, verified, and that nothing is left to restore."""
        verified = self.said().get("slots", {}).get(SLOT, {}).get("verified", [])
        rows = self.ask(
            "SELECT l.id FROM launches l, slots s WHERE l.slot = s.name AND l.state = 'serving' AND s.restore_wanted = ''"
            " AND l.candidate_id = (SELECT candidate_id FROM incumbents ORDER BY id DESC LIMIT 1)"
        )
        return any(launch in verified for (launch,) in rows)

    def waiting(self) -> bool:
        """Whether a trial waits or is in hand."""
        return bool(self.ask("SELECT 1 FROM trials WHERE state IN ('queued', 'running')"))

    def in_hand(self) -> bool:
        """Whether a trial is in hand."""
        return bool(self.ask("SELECT 1 FROM trials WHERE state = 'running'"))

    def all_published(self) -> bool:
        """Whether every entry is marked as published."""
        return not self.ask("SELECT 1 FROM entries WHERE published = 0")

    def recovered(self, timeout_s: float = RECOVERY_S) -> bool:
        """Wait until the best-known serves and nothing is in hand; tell whether it came to that."""
        until(lambda: bool(self.said()), timeout_s)
        self.hold()
        return until(
            lambda: (
                self.serves_best() and not self.in_hand() and self.all_published() and not self.said().get("trouble")
            ),
            timeout_s,
        )

    def generates(self) -> bool:
        """Whether the server on the slot's port answers a completion with tokens: the harness's own probe."""
        body = json.dumps({"prompt": "one two", "max_tokens": 4})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        except (OSError, ValueError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return bool(answer.get("choices") and answer["choices"][0].get("text"))

    def family(self) -> dict[str, list[int]]:
        """The living processes of this house's open launches: shims, servers, and what servers have started."""
        known = {row[0] for row in self.ask("SELECT id FROM launches WHERE state != 'ended'")}
        found: dict[str, list[int]] = {"shim": [], "server": []}
        for pid in procfs.pids():
            if procfs.launch_id_of(pid) in known and procfs.start_ticks(pid) is not None:
                found["shim" if b"shim.py" in command_of(pid) else "server"].append(pid)
        return found

    def log_tail(self, size: int = 2500) -> str:
        """The end of the daemon's log."""
        return (self.folder / "daemon.log").read_text(errors="replace")[-size:]

    # --- the inquest

    def record(self) -> Record:
        """Read a dead daemon's state from a copy, so that the next daemon finds it untouched."""
        with tempfile.TemporaryDirectory(dir=self.folder) as where:
            for name in ("state.db", "state.db-wal"):
                if (self.state / name).exists():
                    shutil.copy(self.state / name, where)
            with closing(sqlite3.connect(Path(where) / "state.db")) as db:
                return self._record(db)

    def record_of_the_living(self) -> Record:
        """Read a running daemon's state beside it."""
        with closing(sqlite3.connect(f"file:{self.state / 'state.db'}?mode=ro", uri=True, timeout=30)) as db:
            return self._record(db)

    def _record(self, db: sqlite3.Connection) -> Record:
        db.execute("BEGIN")  # all of it as of one moment
        entries = db.execute("SELECT number, sha256, published, trial_id FROM entries ORDER BY number").fetchall()
        trials = db.execute("SELECT id, name, state, entry FROM trials ORDER BY id").fetchall()
        best = db.execute("SELECT name FROM incumbents ORDER BY id DESC LIMIT 1").fetchone()
        files, flaws = read_entries(self.state / "journal")
        concluding: dict[int, list[int]] = {}
        for number, _, _, trial in entries:
            if trial is not None:
                concluding.setdefault(trial, []).append(number)
        return Record(
            entries={number: sha for number, sha, _, _ in entries},
            published={number: sha for number, sha, published, _ in entries if published},
            concluding=concluding,
            trials=tuple(trials),
            best=best[0] if best else "",
            files=tuple(files),
            flaws=tuple(map(str, flaws)),
        )

    def acknowledged(self, record: Record) -> list[tuple[str, str]]:
        """Given a record, return (promise, what is wrong): what was acknowledged must be in it, at any instant."""
        files = {entry.number: entry.sha256 for entry in record.files}
        names = {name for _, name, _, _ in record.trials}
        unpublished = [n for n, sha in self.published.items() if record.published.get(n) != sha]
        unwritten = [n for n, sha in record.published.items() if files.get(n) != sha]
        uncommitted = [n for n, sha in files.items() if record.entries.get(n) != sha]
        wrong = [("P7", f"entry {n} was published and is not any more") for n in unpublished]
        wrong += [("P7", f"entry {n} is marked as published and is not in the journal's files") for n in unwritten]
        wrong += [("P10", f"entry {n} is in the journal's files and was never committed") for n in uncommitted]
        wrong += [("P18", f"{n} was enqueued and is not in the record") for n in self.enqueued if n not in names]
        self.published |= record.published
        return wrong

    def whole(self, record: Record) -> list[tuple[str, str]]:
        """Given the record of a daemon that has recovered, return (promise, what is wrong) with its journal."""
        wrong = []
        if sorted(record.entries) != list(range(1, len(record.entries) + 1)):
            wrong.append(("P10", "the entries' numbers have gaps"))
        files = [(entry.number, entry.sha256) for entry in record.files]
        if files != sorted(record.entries.items()):
            wrong.append(("P10", f"{len(files)} entries in the files, {len(record.entries)} in the record"))
        if record.flaws:
            wrong.append(("P10", f"the journal has flaws: {record.flaws[0]}"))
        for trial, name, state, entry in record.trials:
            found = record.concluding.get(trial, [])
            if found != ([entry] if state == "done" else []):
                wrong.append(("P10", f"trial {trial} ({name}) is {state} and has the entries {found}"))
        altered = [entry.number for entry in record.files if entry.title == "journal altered"]
        if altered:
            wrong.append(("P10", f"entry {altered[0]} says that the journal was altered; nobody did"))
        return wrong

    def one_server(self) -> list[str]:
        """Return what is wrong with the servers: there must be one, the best-known's, and it must generate."""
        servers = self.servers()
        if len(servers) != 1:
            return [f"there are {len(servers)} servers"]
        return [] if self.generates() else ["the server does not generate"]

    def close(self) -> None:
        """End the daemon and every process of the house."""
        if self.daemon is not None:
            self.daemon.kill()
        super().close()


def shared_cache(folder: Path) -> Path:
    """Measure once a process what the benchmark client can take on this host, so that no house has to."""
    folder.mkdir(exist_ok=True)
    for name, data in _measured().items():
        (folder / name).write_bytes(data)
    return folder


@cache
def _measured() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as where:
        asyncio.run(capacity_tok_s(Path(where)))
        return {path.name: path.read_bytes() for path in Path(where).iterdir()}


def lock_is_free(home: Home, timeout_s: float) -> bool:
    """Wait until nobody holds a house's state folder; tell whether it came to that."""
    return until(lambda: lock_holder(home.state / "daemon.lock") is None, timeout_s)


def kill_all(pids: list[int]) -> int:
    """kill -9 these processes of a house; return how many there were."""
    for pid in pids:
        ticks = procfs.start_ticks(pid)
        if ticks is not None:
            procfs.signal_exactly(pid, ticks, signal.SIGKILL)
    return len(pids)


def command_of(pid: int) -> bytes:
    """The command line of a process, as /proc has it; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
