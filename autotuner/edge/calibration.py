"""How many token events a second one process of the load client can take on this host: measured once, kept on disk.

The client is run against the null server for a second. What it used of a core for so many events says what a whole core could
take; so the figure hardly depends on what else the host is doing.
"""

import asyncio
import contextlib
import hashlib
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autotuner.bench import worker
from autotuner.bench.benchmark import Benchmark
from autotuner.bench.placement import AUTO
from autotuner.bench.samples import LevelSamples, read_message
from autotuner.edge import reaping
from autotuner.edge.files import write_atomically

# 64 streams of 20,000 tok/s together: enough to be measured well, and far from what one process can take.
TTFT_MS, ITL_MS, CONCURRENCY = 10.0, 3.2, 64
BENCHMARK = Benchmark(levels=(CONCURRENCY,), prompt_tokens=16, output_tokens=256, seconds=1.0, warmup_requests=0)
LIMIT_S = 15.0
LINE_BYTES_MAX = 64 << 20


async def capacity_tok_s(cache: Path | None, cores: str | None = AUTO) -> float | None:
    """Return how many events a second a core of this host takes; None where that cannot be measured.

    `cores` says which cores the client is bound to, as in a level, since not all of a machine need be alike. The answer is kept
    in `cache`, by host, Python, release and these cores. It takes about 2 s where it is not there.
    """
    path = cache / f"client-{_key(cores)}.json" if cache is not None else None
    if path is not None and (known := _read(path)) is not None:
        return known
    found = None
    with contextlib.suppress(TimeoutError, OSError, ValueError, RuntimeError):
        async with asyncio.timeout(LIMIT_S):
            found = await _measure(cores)
    if path is not None and found is not None:
        with contextlib.suppress(OSError):  # a cache that cannot be written to only means that it is measured again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"capacity_tok_s": found}).encode())
    return found


async def _measure(cores: str | None) -> float | None:
    pipe = asyncio.subprocess.PIPE
    argv = (sys.executable, "-m", "autotuner.bench.nullserver", str(TTFT_MS), str(ITL_MS))
    server = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
    client = None
    try:
        port = int(await _line(server))
        client = await asyncio.create_subprocess_exec(*worker.command(), stdin=pipe, stdout=pipe, limit=LINE_BYTES_MAX)
        order = {"url": f"http://127.0.0.1:{port}", "benchmark": BENCHMARK.model_dump(mode="json")}
        if client.stdin is None:
            return None
        client.stdin.write(json.dumps({**order, "concurrency": CONCURRENCY, "cores": cores}).encode() + b"\n")
        while True:
            message = read_message(await _line(client))
            if isinstance(message, LevelSamples):
                return _capacity(message)
    finally:
        for process in (client, server):
            if process is not None:
                await reaping.killed(process)


async def _line(process: asyncio.subprocess.Process) -> bytes:
    line = await process.stdout.readline() if process.stdout is not None else b""
    if not line:
        raise RuntimeError("it ended early")
    return line


def _capacity(samples: LevelSamples) -> float | None:
    seconds = (samples.steady_to_s or 0.0) - (samples.steady_from_s or 0.0)
    events = sum(samples.bins)
    return round(events / seconds / samples.cpu_ratio) if seconds > 0 and samples.cpu_ratio > 0 and events else None


def _key(cores: str | None = AUTO) -> str:
    """What the capacity depends on: this host's processor and kernel, which of its cores, Python, and our own release."""
    try:
        own = version("autotunerd")
    except PackageNotFoundError:
        own = ""
    seen = (platform.node(), platform.machine(), platform.release(), _processor(), cores, sys.version, own)
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line
    return ""


def _read(path: Path) -> float | None:
    try:
        known: Any = json.loads(path.read_bytes())["capacity_tok_s"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(known) if isinstance(known, int | float) and known > 0 else None
