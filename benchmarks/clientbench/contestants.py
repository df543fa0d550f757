"""The clients that are compared: how each is had, started for a mode, and what it reports afterwards."""

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from clientbench.report import OURS, RUST, VLLM, Run
from clientbench.schedule import Mode

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.measurement import LevelSamples, figures
from autotuner.bench.worker import Order, command

ROOT = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 32
SGLANG = "sglang==0.5.23"


class Unavailable(Exception):
    """A peer cannot be had; the message says why."""


@dataclass
class Start:
    """How to start a client: its argv, what it reads from stdin (which then stays open), variables."""

    argv: list[str]
    order: bytes = b""
    env: dict[str, str] = field(default_factory=dict)


class Client(Protocol):
    """A client; its process gets `folder` as working directory, with its output in the files `stdout` and `stderr`."""

    name: str

    def start(self, mode: Mode, url: str, folder: Path) -> Start:
        """Return how to start it."""
        ...

    def read(self, run: Run, folder: Path) -> None:
        """Fill in what it reported; raise OSError, ValueError or LookupError where that cannot be read."""
        ...


class Ours:
    """The worker process of this project, given an order as the daemon gives it."""

    name = OURS

    def start(self, mode: Mode, url: str, folder: Path) -> Start:
        benchmark = Benchmark(
            levels=(mode.concurrency,),
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=mode.tokens,
            requests=mode.requests,
            warmup_requests=0,
            seconds=max(60.0, 10 * mode.seconds),  # the longest it may take
        )
        order = Order(url=url, benchmark=benchmark, concurrency=mode.concurrency, model="null")
        line = order.model_dump_json(exclude_defaults=True).encode() + b"\n"
        return Start(list(command()), line, {"PYTHONPATH": str(ROOT)})

    def read(self, run: Run, folder: Path) -> None:
        line = (folder / "stdout").read_bytes().splitlines()[-1]
        samples = LevelSamples.model_validate_json(line)
        found = figures(samples)
        run.ttft_ms, run.itl_ms = _quantiles(found.ttft_ms), _quantiles(found.itl_ms)
        run.limited = found.client_limited or "client was the limit" in found.void
        withheld = "" if found.itl_ms else "ITL withheld"
        run.said = "client was the limit" if run.limited else "void" if found.void else withheld
        run.extra = samples.model_dump(mode="json", exclude={"requests", "bins", "gaps"}) | {
            "void": found.void,
            "finished": sum(not r.cut and not r.error for r in samples.requests),
            "cut": sum(r.cut for r in samples.requests),
            "failed": sum(bool(r.error) for r in samples.requests),
        }


def _quantiles(found: dict[str, float]) -> dict[str, float]:
    return {name: found[name] for name in ("p50", "p99") if name in found}


class SglangRust:
    """The Rust client in SGLang's wheel: one extension module, loaded alone, so that nothing else of SGLang is needed."""

    name = RUST
    _LOAD = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('_bench', sys.argv.pop(1)); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); m.run_argv(sys.argv)"
    )

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self._tokenizer = tokenizer
        self._module = next(folder.glob("_bench*.so"), None) or self._fetch(folder)

    @staticmethod
    def _fetch(folder: Path) -> Path:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        argv = [*pip, "--only-binary", ":all:", "--dest", str(folder), SGLANG]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        wheel = next(folder.glob("sglang-*.whl"), None)
        if done.returncode or wheel is None:
            told = done.stderr.strip().splitlines() or ["no wheel"]
            raise Unavailable(f"pip could not download {SGLANG}: {told[-1]}")
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if Path(n).parent.name == "rust_extensions" and "/_bench" in n]
            if not names:
                raise Unavailable(f"{wheel.name} has no Rust client for this platform")
            module = folder / Path(names[0]).name
            module.write_bytes(archive.read(names[0]))
        wheel.unlink()
        return module

    def start(self, mode: Mode, url: str, folder: Path) -> Start:
        flags = {
            "backend": "vllm",
            "base-url": url,
            "model": "null",
            "tokenizer": self._tokenizer,
            "dataset-name": "random-ids",
            "num-prompts": mode.requests,
            "max-concurrency": mode.concurrency,
            "random-input-len": PROMPT_TOKENS,
            "random-output-len": mode.tokens,
            "random-range-ratio": 1.0,
            "warmup-requests": 0,
            "output-file": folder / "result.jsonl",
        }
        return Start([sys.executable, "-c", self._LOAD, str(self._module), *_flags(flags), "--disable-tqdm"])

    def read(self, run: Run, folder: Path) -> None:
        _read_result(run, json.loads((folder / "result.jsonl").read_text().splitlines()[-1]))


class VllmBench:
    """`vllm bench serve`, of the environment that `make test-vllm` makes or CLIENTS_VLLM names."""

    name = VLLM

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = tokenizer
        venv = Path(os.environ.get("CLIENTS_VLLM") or ROOT / ".venv-vllm")
        self._program = venv / "bin" / "vllm"
        if not self._program.exists():
            raise Unavailable(f"no vLLM in {venv} (`make test-vllm` makes it, 4 GB; or name another in CLIENTS_VLLM)")

    def start(self, mode: Mode, url: str, folder: Path) -> Start:
        flags = {
            "backend": "openai",
            "base-url": url,
            "model": "null",
            "tokenizer": self._tokenizer,
            "dataset-name": "random",
            "num-prompts": mode.requests,
            "max-concurrency": mode.concurrency,
            "random-input-len": PROMPT_TOKENS,
            "random-output-len": mode.tokens,
            "ready-check-timeout-sec": 0,  # its check is a request
            "percentile-metrics": "ttft,itl",
            "metric-percentiles": "50,99",
            "result-dir": folder,
            "result-filename": "result.json",
        }
        argv = [str(self._program), "bench", "serve", *_flags(flags), "--ignore-eos", "--disable-tqdm", "--save-result"]
        return Start(argv, env={"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"})

    def read(self, run: Run, folder: Path) -> None:
        _read_result(run, json.loads((folder / "result.json").read_text()))


def _flags(flags: dict[str, object]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def _read_result(run: Run, result: dict[str, float]) -> None:
    if result["completed"] != run.mode.requests:
        raise ValueError(f"it completed {result['completed']} of {run.mode.requests} requests")
    run.ttft_ms = {"p50": result["median_ttft_ms"], "p99": result["p99_ttft_ms"]}
    run.itl_ms = {"p50": result["median_itl_ms"], "p99": result["p99_itl_ms"]}


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of a thousand words for the peers, which make their prompts of one; return its folder."""
    folder.mkdir(exist_ok=True)
    unknown = {"id": 0, "content": "<unk>", "special": True}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    vocabulary = {word: i for i, word in enumerate(["<unk>", *(f"w{i}" for i in range(1000))])}
    document = {
        "version": "1.0",
        "added_tokens": [unknown | plain],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "model_max_length": 8192}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
