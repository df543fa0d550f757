"""What the daemon costs while nothing is to be done: CPU seconds and memory of a real one beside a server that serves.

Every setting is the default; the server is the tests' fake one, and a campaign of one short trial comes first, as on a host.
Exits with 1 if the daemon takes more than CPU_PERCENT_MAX of a core or RSS_MB_MAX. `python benchmarks/idle.py --seconds 60`
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autotuner.bench.benchmark import Benchmark
from autotuner.core.candidate import parse_candidates
from autotuner.core.entry import Draft
from autotuner.core.source import Source
from autotuner.core.state import LaunchState, Purpose, TrialState
from autotuner.edge import procfs
from autotuner.edge.rows import LaunchRow
from autotuner.edge.store import Store

FAKE = Path(__file__).resolve().parents[1] / "tests" / "fakes" / "fake_openai.py"
CPU_PERCENT_MAX = 0.5
RSS_MB_MAX = 80.0
READY_WITHIN_S = 120.0
SETTLE_S = 5.0

SETTINGS = """
state_dir = "{state}"
[slots.main]
port = {port}
[benchmarks.quick]
levels = [4]
seconds = 1
output_tokens = 16
prompt_tokens = 16
[noise]
confirm_launches = 0
"""


def main() -> int:
    """Run the daemon, wait until it idles, and measure it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--history", type=int, default=1000, help="trials that are on record before (1000)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="idle-") as name:
        folder = Path(name)
        settings = _write(folder)
        autotuner = [sys.executable, "-m", "autotuner", "-s", str(settings)]
        _make_history(folder, asked.history)
        subprocess.run([*autotuner, "enqueue", str(folder / "base.toml")], check=True, stdout=subprocess.DEVNULL)
        with (folder / "daemon.log").open("wb") as log:
            daemon = subprocess.Popen([*autotuner, "daemon"], stdout=log, stderr=log)
        try:
            _wait_until_idle(folder)
            return _measure(daemon.pid, asked.seconds)
        finally:
            daemon.terminate()
            daemon.wait(30)
            _end_servers(folder)


def _write(folder: Path) -> Path:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    words = [sys.executable, str(FAKE), "--port", "{port}", "--tok-s", "100"]
    candidate = f'name = "base"\nengine = "command"\n[launch]\ncommand = {json.dumps(words)}\n'
    (folder / "base.toml").write_text(candidate, encoding="utf-8")
    settings = folder / "autotuner.toml"
    settings.write_text(SETTINGS.format(state=folder / "state", port=port), encoding="utf-8")
    return settings


def _make_history(folder: Path, trials: int) -> None:
    """A daemon that has worked for months: what it looks at each second must not grow with what it has done."""
    store = Store(folder / "state" / "state.db")
    benchmark, at = Benchmark(), "2026-01-01 00:00:00Z"
    with store.transaction():
        for number in range(trials):
            text = f'name = "old-{number}"\nengine = "command"\n[launch]\ncommand = ["server", "{number}"]\n'
            (candidate,) = parse_candidates(Source(f"old-{number}.toml", text))
            store.put_candidate(candidate, text, f"old-{number}.toml")
            trial = store.add_trial("main", candidate, ("default", benchmark), at)
            store.move_trial(trial, TrialState.RUNNING, begun_at=at)
            row = (f"{number:016x}", "main", candidate.id, candidate.name, Purpose.TRIAL, trial, LaunchState.INTENDED)
            store.add_launch(LaunchRow(*row, at, "an earlier boot", 0.0, None, {}, None, None, False, None))
            store.move_launch(f"{number:016x}", LaunchState.ENDED, ended_at=at, end_asked=True)
            store.move_trial(trial, TrialState.DONE, verdict="fail", ended_at=at)
            store.add_entry(Draft("main", f"discarded old-{number}", "It was slower."), at, trial)
    store.close()


def _wait_until_idle(folder: Path) -> None:
    until = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < until:
        time.sleep(1.0)
        try:
            said = json.loads((folder / "state" / "status.json").read_text())["slots"]["main"]["sentence"]
        except (OSError, ValueError):
            continue
        if said.startswith("serving the best-known"):
            time.sleep(SETTLE_S)
            return
    raise SystemExit("the daemon did not come to rest:\n" + (folder / "daemon.log").read_text(errors="replace")[-2000:])


def _measure(pid: int, seconds: float) -> int:
    before, began = _cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    cpu_s = _cpu_s(pid) - before
    _, _, resident = procfs.usage(pid)
    percent, rss_mb = 100 * cpu_s / took, resident / 1e6
    print(f"idle daemon: {percent:.2f} % of a core ({cpu_s:.2f} s in {took:.0f} s), at most {CPU_PERCENT_MAX} %")
    print(f"             {rss_mb:.1f} MB resident, at most {RSS_MB_MAX:.0f} MB")
    return 0 if percent <= CPU_PERCENT_MAX and rss_mb <= RSS_MB_MAX else 1


def _cpu_s(pid: int) -> float:
    """CPU seconds from the scheduler, to the nanosecond; ticks of 10 ms would be too coarse for an idle process."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _end_servers(folder: Path) -> None:
    for launch in (folder / "state" / "launches").glob("*/identity.json"):
        shim = json.loads(launch.read_text())["shim"]
        procfs.signal_exactly(shim["pid"], shim["start_ticks"], signal.SIGTERM)
        until = time.monotonic() + 10
        while procfs.lives(**shim) and time.monotonic() < until:
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
