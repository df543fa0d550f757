"""Whether our client and `vllm bench serve` report the same of the same requests: short rounds of both, in turn.

Two servers: llama.cpp with a small real model, whose speed wanders by more than a client could be wrong, so that only
neighbouring rounds are compared; and the null server, which keeps its schedule.
"""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol, Self, cast

from clientbench.contestants import ROOT, Unavailable
from clientbench.nullserver import NullServer
from clientbench.pairs import Agreement, Figures, Pair, agreements
from clientbench.processes import end, pinned
from clientbench.schedule import Mode

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.measurement import LevelSamples, figures
from autotuner.bench.worker import Order, command
from autotuner.bench.workload import Workload

CONCURRENCIES = (1, 4)
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 32
PER_STREAM = (
    2  # requests of a stream in a round on llama.cpp: rounds as short as can be, so that pairs are close neighbours
)
NULL_PER_STREAM = 6
NULL_S, LLAMA_S = 100.0, 160.0  # no pair is begun later: on a busy machine there are fewer
NULL_PAIRS = 6  # the fewest whose ratios have an interval
NULL_TTFT_MS, NULL_ITL_MS = 200.0, 10.0  # about what the small model takes, so that the same rows can be compared
START_S, ROUND_S = 300.0, 300.0  # the longest that is waited, on a machine that does other things too
LAST_CHUNK = "ITL mean ms, of all gaps but the last chunk's"
WHOLE = "output tok/s, from first request to last answer"
ACCOUNT = {  # of llama.cpp's /metrics
    "prompt_s": "llamacpp:prompt_seconds_total",
    "generating_s": "llamacpp:tokens_predicted_seconds_total",
    "tokens": "llamacpp:tokens_predicted_total",
}


def program() -> tuple[Path, Path]:
    """Return the Python of vLLM's environment and the folder of the small model's tokenizer. Raise Unavailable."""
    venv = Path(os.environ.get("CLIENTS_VLLM") or ROOT / ".venv-vllm")
    python, tokenizer = venv / "bin" / "python", venv / "smollm2"
    if not (python.exists() and tokenizer.is_dir()):
        raise Unavailable(f"no vLLM in {venv} (`make test-vllm` makes it, 4 GB; or name another in CLIENTS_VLLM)")
    return python, tokenizer


class Client(Protocol):
    """One of the two."""

    def round(self, url: str, model: str, dataset: Path, concurrency: int, requests: int) -> Figures:
        """Send a dataset's requests once, so many at a time, and return what it reported."""
        ...


class Peer:
    """`vllm bench serve`, started once; a context manager."""

    def __init__(self, python: Path, tokenizer: Path, core: int, folder: Path) -> None:
        self._tokenizer = tokenizer
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        with (folder / "vllm.txt").open("wb") as said:
            self._process = subprocess.Popen(
                [str(python), str(Path(__file__).with_name("vllm_rounds.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet,
                preexec_fn=pinned(core),  # noqa: PLW1509 - this program has one thread
            )
        self._said = folder / "vllm.txt"
        if self._answer() != "ready":
            raise Unavailable("vLLM's client did not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end(self._process)

    def _answer(self) -> Any:
        line = cast("IO[bytes]", self._process.stdout).readline()
        if not line:
            said = self._said.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise Unavailable(f"vLLM's client ended: {said[-1]}")
        return json.loads(line)

    def round(self, url: str, model: str, dataset: Path, concurrency: int, requests: int) -> Figures:
        """Send a dataset's requests once, so many at a time, and return what it reported."""
        flags = {
            "backend": "openai",
            "base-url": url,
            "endpoint": "/v1/completions",
            "model": model,
            "tokenizer": self._tokenizer,
            "dataset-name": "sharegpt",
            "dataset-path": dataset,
            "sharegpt-output-len": OUTPUT_TOKENS,
            "num-prompts": requests,
            "max-concurrency": concurrency,
            "num-warmups": 0,
            "ready-check-timeout-sec": 0,  # its check is a request
            "temperature": 0,
        }
        argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        # The requests as they stand in the file, in its order.
        argv += ["--disable-shuffle", "--no-oversample", "--ignore-eos", "--disable-tqdm", "--save-detailed"]
        stdin = cast("IO[bytes]", self._process.stdin)
        stdin.write(json.dumps(argv).encode() + b"\n")
        stdin.flush()
        found = self._answer()
        if found["completed"] != requests:
            raise ValueError(f"vLLM's client completed {found['completed']} of {requests} requests")
        known = {
            "output tokens counted": found["total_output_tokens"],
            "output tok/s": found["output_throughput"],
            WHOLE: found["output_throughput"],
            "TTFT mean ms": found["mean_ttft_ms"],
            "TTFT p50 ms": found["median_ttft_ms"],
            "TPOT mean ms": found["mean_tpot_ms"],
            "TPOT p50 ms": found["median_tpot_ms"],
            "ITL mean ms": found["mean_itl_ms"],
            "ITL p50 ms": found["median_itl_ms"],
        }
        # It counts the chunk without a token that ends an answer of llama.cpp as a token's, and ITL has no other such trap.
        gaps = [gap for one in found["itls"] for gap in one[: OUTPUT_TOKENS - 1]]
        return known | {LAST_CHUNK: 1000 * statistics.fmean(gaps)}


class Worker:
    """Our client, as the daemon starts it: a process a round."""

    def __init__(self, core: int, folder: Path, *, once: bool) -> None:
        """`once` sends a dataset as a recording whose requests were all made at once, so each of them once, as the peer does.

        A closed loop keeps its concurrency up until the last answer that counts, and sends further requests for it; on a server
        that shares its speed among requests that alone makes figures of few requests differ.
        """
        self._core, self._folder, self._once = core, folder, once

    def round(self, url: str, model: str, dataset: Path, concurrency: int, requests: int) -> Figures:
        """Send a dataset's requests once, so many at a time, and return what it reported."""
        load: dict[str, Any] = {"load": "trace", "levels": (1,), "max_concurrency": concurrency}
        if not self._once:
            load = {"levels": (concurrency,), "requests": requests, "warmup_requests": 0}
        benchmark = Benchmark(dataset=str(dataset), output_tokens=OUTPUT_TOKENS, seconds=ROUND_S, **load)
        order = Order(url=url, benchmark=benchmark, concurrency=benchmark.levels[0], model=model)
        with (self._folder / "worker.txt").open("wb") as said:
            process = subprocess.Popen(
                command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                preexec_fn=pinned(self._core),  # noqa: PLW1509 - this program has one thread
            )
        try:
            stdin, stdout = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
            stdin.write(order.model_dump_json(exclude_defaults=True).encode() + b"\n")
            stdin.flush()  # and stays open: its end is a stop
            lines = stdout.read().splitlines()
        finally:
            end(process)
        if not lines:
            raise ValueError(f"our client left no result: {(self._folder / 'worker.txt').read_text()[-300:]}")
        return ours(LevelSamples.model_validate_json(lines[-1]), requests)


def ours(samples: LevelSamples, wanted: int) -> Figures:
    """Given the samples of a round, return its figures; raise ValueError where not all requests were answered.

    A request's latencies count from when it was sent, as vLLM's client counts them behind its own limit of concurrency; those
    of a recording would count from when it was due.
    """
    samples = samples.model_copy(
        update={"requests": tuple(r.model_copy(update={"due_s": None}) for r in samples.requests)}
    )
    good = [r for r in samples.requests if not r.error and not r.cut]
    if len(good) < wanted:
        raise ValueError(f"our client completed {len(good)} of {wanted} requests")
    found = figures(samples, ignore_eos=True)
    if found.usage_problems or not found.tokens_counted:
        raise ValueError(f"the server's answers are not as long as asked for: {found.usage_problems}")
    if found.cache_hit_ratio:
        raise ValueError(f"the server's prompt cache held {found.cache_hit_ratio:.1%} of the prompts")
    kept = zip(samples.requests, samples.gaps_us(), strict=True)
    first = sorted(((r.end_s or 0.0, r.output_tokens or 0, us) for r, us in kept if not r.error and not r.cut))[:wanted]
    tokens = sum(count for _, count, _ in first)
    gaps = [us for _, _, each in first for us in each]
    return {
        "output tokens counted": float(tokens),
        "output tok/s": found.output_tok_s,
        WHOLE: tokens / first[-1][0],
        **{
            f"{name} {short} ms": table[key]
            for name, table in (("TTFT", found.ttft_ms), ("TPOT", found.tpot_ms), ("ITL", found.itl_ms))
            for short, key in (("mean", "mean"), ("p50", "p50"))
            if table
        },
        LAST_CHUNK: statistics.fmean(gaps) / 1000,
    }


def write_requests(path: Path, requests: int, number: int) -> None:
    """Write the requests of a pair of rounds, prompts that no other pair has, in ShareGPT's form, which both clients read."""
    workload = Workload(Benchmark(prompt_tokens=PROMPT_TOKENS, seed=number), requests, None)
    asks = (workload.ask(index) for index in range(requests))
    talks = ([{"from": "human", "value": a.body["prompt"]}, {"from": "gpt", "value": "-"}] for a in asks if a)
    path.write_text(json.dumps([{"conversations": talk, "timestamp": 0} for talk in talks]))


class Rounds:
    """Pairs of rounds on one server. `account`, where the server keeps one, tells what it spent so far."""

    def __init__(self, url: str, model: str, folder: Path, per_stream: int) -> None:
        self._url, self._model, self._per_stream = url, model, per_stream
        self._dataset = folder / "requests.json"

    def compare(
        self, mine: Client, theirs: Client, pairs: int, limit_s: float, account: Callable[[], Figures] | None = None
    ) -> dict[str, list[Agreement]]:
        """Run pairs of rounds at each concurrency, AB BA AB …, and return the agreements by load."""
        until = time.monotonic() + limit_s
        found: dict[int, list[Pair]] = {concurrency: [] for concurrency in CONCURRENCIES}
        for number in range(-1, pairs):
            if number > 0 and time.monotonic() > until:
                break
            for concurrency in CONCURRENCIES:
                write_requests(self._dataset, concurrency * self._per_stream, number + 2)
                clients = (mine, theirs) if number % 2 else (theirs, mine)
                made = {client: self._round(client, concurrency, account) for client in clients}
                if number >= 0:  # what the first answers of all cost, on either side, is nobody's figure
                    found[concurrency].append(Pair(made[mine], made[theirs]))
        return {f"C {concurrency}": agreements(ones) for concurrency, ones in found.items()}

    def _round(self, client: Client, concurrency: int, account: Callable[[], Figures] | None) -> Figures:
        before = account() if account else {}
        requests = concurrency * self._per_stream
        reported = client.round(self._url, self._model, self._dataset, concurrency, requests)
        spent = {name: value - before[name] for name, value in account().items()} if account else {}
        return reported | (by_account(reported, spent, concurrency, requests) if spent else {})


def by_account(reported: Figures, spent: Figures, concurrency: int, requests: int) -> Figures:
    """Given what a client reported of a round and what the server spent in it, return the one as multiples of the other.

    The server's own seconds wander as its speed does, so these multiples hardly wander at all. They are near 1 and need not be
    1, since an account of seconds by request is no throughput and no latency; what counts is that both clients have the same.
    """
    busy_s = spent["prompt_s"] + spent["generating_s"]
    own = {
        WHOLE: spent["tokens"] * concurrency / busy_s,
        "TTFT mean ms": 1000 * spent["prompt_s"] / requests,
        "TPOT mean ms": 1000 * spent["generating_s"] / spent["tokens"],
        LAST_CHUNK: 1000 * spent["generating_s"] / spent["tokens"],
    }
    return {f"{name}, as multiple of the server's": reported[name] / own[name] for name in own if name in reported}


def agree(
    server: NullServer,
    cores: list[int],
    folder: Path,
    pairs: int,
    told: Callable[[str, dict[str, list[Agreement]]], None],
) -> dict[str, dict[str, list[Agreement]]]:
    """Compare on both servers; return the agreements by server and load, each told as it comes. Raise Unavailable, with why."""
    python, tokenizer = program()
    found = {}
    with Peer(python, tokenizer, cores[1], folder) as peer:
        server.prepare(Mode("agree", 1, 0, OUTPUT_TOKENS, ttft_ms=NULL_TTFT_MS, itl_ms=NULL_ITL_MS))
        rounds = Rounds(server.url, "null", folder, NULL_PER_STREAM)
        found["null server"] = rounds.compare(Worker(cores[1], folder, once=False), peer, NULL_PAIRS, NULL_S)
        told("null server", found["null server"])
        with llama_server(cores[0], folder) as url:
            rounds = Rounds(url, "demo", folder, PER_STREAM)
            worker = Worker(cores[1], folder, once=True)
            found["llama.cpp"] = rounds.compare(worker, peer, pairs, LLAMA_S, lambda: account_of(url))
        told("llama.cpp", found["llama.cpp"])
    return found


@contextlib.contextmanager
def llama_server(core: int, folder: Path) -> Iterator[str]:
    """The demo's server with its small model, one thread on this core, without a prompt cache; yields its URL."""
    port = _free_port()
    flags = ["--model", "demo", "--port", str(port), "--threads", "1", "--no-cache-prompt", "--cache-ram", "0"]
    flags += ["--parallel", str(max(CONCURRENCIES)), "--ctx-size", str(1024 * max(CONCURRENCIES)), "--metrics"]
    with (folder / "llama.txt").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "autotuner.engines.embedded", *flags],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            preexec_fn=pinned(core),  # noqa: PLW1509 - this program has one thread
        )
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > until:
                told = (folder / "llama.txt").read_text(errors="replace").strip().splitlines() or ["it said nothing"]
                raise Unavailable(f"llama.cpp's server did not start (make install brings it): {told[-1]}")
            time.sleep(0.1)
        yield url
    finally:
        end(process)


def account_of(url: str) -> Figures:
    """What the server has spent so far, in seconds and tokens, added up over all requests."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        said = dict(line.split()[:2] for line in answer.read().decode().splitlines() if line and line[0] != "#")
    return {name: float(said[metric]) for name, metric in ACCOUNT.items()}


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
