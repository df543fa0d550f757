"""The worker's promises: lines in, lines out, stopped at once by a signal or by the loss of its parent."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S, comes_true

from autotuner.bench import worker
from autotuner.bench.measurement import LevelSamples, Progress, figures

ROOT = Path(__file__).parents[3]
FAKE = ROOT / "tests" / "fakes" / "fake_openai.py"
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, str(FAKE), "--port", str(port), "--max-seconds", "600"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert "listening" in server.stdout.readline()
        yield f"http://127.0.0.1:{port}"
        server.terminate()


def order(url: str, seconds: float = 600.0, **more: Any) -> bytes:
    benchmark = {"levels": [2], "prompt_tokens": 16, "output_tokens": 10, "seconds": seconds}
    return json.dumps({"url": url, "benchmark": benchmark, "concurrency": 2, "model": None, **more}).encode() + b"\n"


@pytest.fixture
def started() -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(worker.command(), stdin=pipe, stdout=pipe, stderr=pipe, env=ENV) as process:
        yield process
        process.kill()


def begin(process: subprocess.Popen[bytes], line: bytes) -> list[bytes]:
    """Give the order, wait until tokens came in the steady part, which a line tells, and return the lines so far."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    process.stdin.flush()
    told: list[bytes] = []
    while not told or not (b'"phase":"steady"' in told[-1] and b'"events":0,' not in told[-1]):
        told.append(process.stdout.readline())
        assert told[-1], "it ended before its steady part"
    return told


def test_progress_comes_while_the_load_runs_and_the_samples_at_its_end(
    started: subprocess.Popen[bytes], url: str
) -> None:
    first = begin(started, order(url, 1.0))
    assert started.stdout is not None
    lines = [*first, *started.stdout.readlines()]
    assert started.wait(PATIENCE_S) == 0
    heard = [Progress.model_validate_json(line) for line in lines[:-1]]
    samples = LevelSamples.model_validate_json(lines[-1])
    assert json.loads(lines[-1])["kind"] == "samples"
    assert sum(p.events for p in heard) > 0
    assert not samples.stopped_early
    assert figures(samples).output_tok_s > 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, "end of stdin"])
def test_a_stopped_worker_still_says_what_it_measured(
    started: subprocess.Popen[bytes], url: str, how: signal.Signals | str
) -> None:
    begin(started, order(url))
    asked = time.monotonic()
    if isinstance(how, signal.Signals):
        started.send_signal(how)
    assert started.stdin is not None
    assert started.stdout is not None
    if how == "end of stdin":
        started.stdin.close()
    samples = LevelSamples.model_validate_json(started.stdout.readlines()[-1])
    assert started.wait(PATIENCE_S) == 0
    assert time.monotonic() - asked < 10.0  # of ten minutes; it takes a twentieth of a second
    assert samples.stopped_early
    assert sum(samples.bins) > 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "the order: Invalid JSON"),
        (b"{}\n", "url: Field required"),
        (order("ftp://a", api_key="sk-secret-secret-secret"), "http://127.0.0.1:8080"),
        (order("http://a", concurrency=0, api_key="sk-secret-secret-secret"), "concurrency"),
        (order("http://a", api_key=["sk-secret-secret-secret"]), "api_key"),
    ],
)
def test_a_wrong_order_gets_one_line_that_repeats_no_secret(
    line: bytes, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    os.write(write, line)
    os.close(write)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(worker, "_die_with_parent", lambda: None)
        monkeypatch.setattr(sys, "stdout", sys.__stdout__)
        try:
            assert worker.main() == 2
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert "secret" not in told


def test_the_load_does_not_outlive_its_parent(url: str) -> None:
    # The worker's stdin is the grandparent's, so only the parent's death can end it.
    code = (
        "import os, subprocess, sys\n"
        "from autotuner.bench.worker import command\n"
        "p = subprocess.Popen(command(), stdin=0, stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); os._exit(0)\n"
    )
    read, write = os.pipe()
    os.write(write, order(url))
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdin=read, stdout=subprocess.PIPE, env=ENV, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
    gone = comes_true(lambda: not _runs(pid))
    os.close(write)
    os.close(read)
    assert gone


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_parent_that_does_not_read_holds_nothing_up_and_misses_no_events() -> None:
    read, write = os.pipe()
    reporter = worker._Reporter(write)
    told = Progress(at_s=1.0, phase="steady", events=7, in_flight=1, done=1, failed=0)
    for _ in range(2000):  # far more than a pipe holds; a write that blocked would end this test by its timeout
        reporter.progress(told)
    heard = 0
    os.set_blocking(read, False)
    text = os.read(read, 1 << 20)
    reporter.progress(told)
    text += os.read(read, 1 << 20)
    heard = sum(Progress.model_validate_json(line).events for line in text.splitlines())
    os.close(read)
    os.close(write)
    assert heard == 2001 * 7
