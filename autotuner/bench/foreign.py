"""Other benchmark clients: a benchmark -> their command lines; what they print -> how far they are and what went wrong. Pure.

`vllm bench serve` (flags as of 0.32), `sglang.bench_serving` (as of 0.5.23, its Rust client included) and `guidellm run`
(as of 0.8.1). None of them can be trusted blindly: each comment that says "trap" names one, and a test keeps its guard.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

from autotuner.bench.benchmark import Benchmark, Level

Client = Literal["vllm", "sglang", "guidellm"]

COMMANDS: dict[Client, tuple[str, ...]] = {
    "vllm": ("vllm", "bench", "serve"),
    "sglang": ("python3", "-m", "sglang.bench_serving"),
    "guidellm": ("guidellm", "run"),
}
TITLES: dict[Client, str] = {
    "vllm": "vllm bench serve",
    "sglang": "sglang.bench_serving",
    "guidellm": "guidellm",
}
RESULT, CONFIG = "result.json", "guidellm.json"

# `vllm bench serve` and `sglang.bench_serving` send a number of prompts and know no time. Where the benchmark gives none, a
# stream is taken to make so many tokens a second: a level lasts `seconds` then, less on a faster server and more on a slower.
STREAM_TOK_S = 50.0
ROUNDS_MIN = 5  # requests a stream, so that a steady part is left between the first wave and the last
WARMUP_SHARE = 0.25  # of `seconds`: how much longer guidellm runs, which can be told a time
START_S = 300.0  # imports, tokenizer and prompts of a client; measured: 8 to 50 s on two cores
SECONDS_MAX = 4.0  # a client is ended when it has run so many times `seconds` longer than that


class Order(NamedTuple):
    """How to run a client for one level.

    `env` is added to the environment, `files` are written into its folder (name to text), `result` is the
    file in that folder which it leaves; `warmup` of its requests, the first ones, are not counted.
    """

    client: Client
    argv: tuple[str, ...]
    env: dict[str, str]
    files: dict[str, str]
    result: str
    warmup: int
    limit_s: float


def seed_of(benchmark: Benchmark, level: Level, launch: int) -> int:
    """Given a benchmark, a level and the number of the candidate's launch, return the seed of the prompts, 31 bits.

    Trap: a client that is given its seed again sends the same prompts again, and a prefix cache answers them, even one on disk
    that outlived the launch. So each level and each launch has a seed of its own; and the n-th launches of two candidates share
    theirs, so that both sides of a comparison answer the same prompts.
    """
    text = f"{benchmark.seed}/{level:g}/{launch}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def order(
    benchmark: Benchmark,
    level: Level,
    url: str,
    model: str | None,
    folder: str,
    *,
    launch: int = 0,
    api_key: str | None = None,
) -> Order:
    """Given a benchmark, a level, the server, its model's name and a folder, return how its client is run there.

    `folder` is where the result goes, an absolute path; an API key is put into the environment and nowhere else.
    """
    client = cast(Client, benchmark.client)
    argv, files = _ARGUMENTS[client](
        benchmark, level, url.rstrip("/"), model, folder, seed_of(benchmark, level, launch)
    )
    env = {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "TQDM_DISABLE": "1"}
    if api_key is not None:
        env["GUIDELLM__SPEC__BACKEND__API_KEY" if client == "guidellm" else "OPENAI_API_KEY"] = api_key
    return Order(
        client=client,
        argv=(*(benchmark.client_command or COMMANDS[client]), *argv),
        env=env,
        files=files,
        result=RESULT,
        warmup=warmup_of(benchmark, level),
        limit_s=START_S + SECONDS_MAX * benchmark.seconds,
    )


def warmup_of(benchmark: Benchmark, level: Level) -> int:
    """How many requests are sent first and not counted: `warmup_requests` a stream, or for each request a second."""
    return benchmark.warmup_requests * math.ceil(level)


def prompts_of(benchmark: Benchmark, level: Level) -> int:
    """How many prompts a client that knows no time is given, the warm-up included."""
    if benchmark.requests is not None:
        counted = benchmark.requests
    elif benchmark.load == "request-rate":
        counted = math.ceil(level * benchmark.seconds)
    else:
        rounds = math.ceil(benchmark.seconds * STREAM_TOK_S / benchmark.output_tokens)
        counted = int(level) * max(ROUNDS_MIN, rounds)
    return warmup_of(benchmark, level) + counted


def _vllm(
    b: Benchmark, level: Level, url: str, model: str | None, folder: str, seed: int
) -> tuple[list[str], dict[str, str]]:
    chat = b.endpoint == "chat"
    argv = ["--backend", "openai-chat" if chat else "openai", "--base-url", url]
    argv += ["--endpoint", "/v1/chat/completions" if chat else "/v1/completions"]
    argv += _model(b, model)
    if b.dataset:
        # Trap: with fewer conversations than prompts it would send some twice, and the prefix cache would answer those.
        argv += ["--dataset-name", "sharegpt", "--dataset-path", b.dataset, "--no-oversample"]
        argv += ["--sharegpt-output-len", str(b.output_tokens)]
    else:
        argv += ["--dataset-name", "random", "--random-input-len", str(b.prompt_tokens - b.prefix_tokens)]
        argv += ["--random-output-len", str(b.output_tokens), "--random-prefix-len", str(b.prefix_tokens)]
        argv += ["--random-range-ratio", "0.0"]  # trap: here 0 is "all of one length"
    argv += ["--num-prompts", str(prompts_of(b, level))]
    argv += _pace(b, level)
    if b.load == "request-rate":
        argv += ["--burstiness", "1.0" if b.arrivals == "poisson" else "inf"]
    # Trap: its own warm-up sends the first prompt again and again, and then counts it: out of the prefix cache.
    argv += ["--num-warmups", "0", "--ready-check-timeout-sec", "0"]
    argv += ["--seed", str(seed), "--temperature", "0"]
    argv += ["--ignore-eos"] if b.ignore_eos else []
    argv += ["--save-result", "--save-detailed", "--disable-tqdm", "--result-dir", folder, "--result-filename", RESULT]
    return argv, {}


def _sglang(
    b: Benchmark, level: Level, url: str, model: str | None, folder: str, seed: int
) -> tuple[list[str], dict[str, str]]:
    chat = b.endpoint == "chat"
    argv = ["--backend", "sglang-oai-chat" if chat else "sglang-oai", "--base-url", url, *_model(b, model)]
    if b.dataset:
        argv += ["--dataset-name", "sharegpt", "--dataset-path", b.dataset]
        argv += ["--sharegpt-output-len", str(b.output_tokens)]
    else:
        # Trap: its workload "random" downloads a corpus and repeats it; this one makes its prompts of token numbers.
        argv += ["--dataset-name", "random-ids", "--random-input-len", str(b.prompt_tokens)]
        argv += ["--random-output-len", str(b.output_tokens)]
        argv += [
            "--random-range-ratio",
            "1.0",
        ]  # trap: here 1 is "all of one length", and 0, its default, is "any length"
    argv += ["--num-prompts", str(prompts_of(b, level))]
    argv += _pace(b, level)
    # It tells no send times. With a concurrency they can be worked out, and the warm-up with them; with a rate they cannot.
    argv += ["--warmup-requests", str(warmup_of(b, level) if b.load == "request-rate" else 0)]
    if chat:
        # Trap: without it the tokens that were asked for are counted; on completions its Python client would fail by it.
        argv += ["--extra-request-body", '{"stream_options": {"include_usage": true}}']
    argv += [] if b.ignore_eos else ["--disable-ignore-eos"]
    argv += ["--seed", str(seed), "--disable-tqdm", "--output-details", "--output-file", f"{folder}/{RESULT}"]
    return argv, {}


def _model(b: Benchmark, model: str | None) -> list[str]:
    return (["--model", model] if model else []) + (["--tokenizer", b.tokenizer] if b.tokenizer else [])


def _pace(b: Benchmark, level: Level) -> list[str]:
    if b.load == "concurrency":
        return ["--max-concurrency", f"{level:g}"]
    cap = ["--max-concurrency", str(b.max_concurrency)] if b.max_concurrency is not None else []
    return ["--request-rate", f"{level:g}", *cap]


def _guidellm(
    b: Benchmark, level: Level, url: str, model: str | None, folder: str, seed: int
) -> tuple[list[str], dict[str, str]]:
    profile: dict[str, Any] = {"rampup_duration": b.ramp_s}
    if b.load == "concurrency":
        profile |= {"kind": "concurrent", "streams": [int(level)]}
    else:
        profile |= {"kind": b.arrivals, "rate": [float(level)], "max_concurrency": b.max_concurrency}
    # It can be told a time and keeps what it has when that is over, so nothing need be guessed here.
    constraints = [{"kind": "max_duration", "seconds": b.ramp_s + (1 + WARMUP_SHARE) * b.seconds}]
    if b.requests is not None:
        constraints.append({"kind": "max_requests", "count": prompts_of(b, level)})
    data: dict[str, Any] = {"kind": "synthetic_text", "prompt_tokens": b.prompt_tokens - b.prefix_tokens}
    data["output_tokens"] = b.output_tokens
    if b.prefix_tokens:
        data |= {"prefix_tokens": b.prefix_tokens, "prefix_count": b.prefixes}
    backend: dict[str, Any] = {"kind": "openai_http", "target": url, "timeout": b.request_timeout_s}
    backend["request_format"] = "/v1/chat/completions" if b.endpoint == "chat" else "/v1/completions"
    backend["extras"] = {"body": {"temperature": 0}}
    backend |= {"model": model} if model else {}
    spec = {
        "backend": backend,
        "profile": profile,
        "constraints": constraints,
        "data": [data],
        "seed": {"kind": "static", "value": seed},
        "metrics": {"kind": "generative", "sample_size": 0},
        "outputs": [{"kind": "json", "path": f"{folder}/{RESULT}"}],
    }
    if b.tokenizer:
        spec["tokenizer"] = {"kind": "huggingface_auto", "model": b.tokenizer}
    return ["--config", f"{folder}/{CONFIG}", "--disable-console"], {CONFIG: json.dumps({"spec": spec})}


_Arguments = Callable[[Benchmark, Level, str, str | None, str, int], tuple[list[str], dict[str, str]]]
_ARGUMENTS: dict[Client, _Arguments] = {"vllm": _vllm, "sglang": _sglang, "guidellm": _guidellm}


# What a client says.

_GUIDELLM_DONE = re.compile(r"successful=(\d+) errored=(\d+)")
_NOT_THERE = (
    'it is not installed there: set client_command to where it is, such as ["/opt/vllm/bin/vllm", "bench", "serve"]'
)
_NO_TOKENIZER = (
    "it makes and counts prompts with a tokenizer: set tokenizer in the benchmark to the folder of the model's"
)
_HINTS = tuple(
    (re.compile(pattern, re.IGNORECASE), hint)
    for pattern, hint in (
        (r"no module named '?(vllm|sglang|guidellm)\b", _NOT_THERE),
        (r"no module named", "its environment lacks a module: install it there"),
        (r"huggingface\.co|not a valid model identifier|cannot find a tokenizer|can't load tokenizer", _NO_TOKENIZER),
        (r"repo id must|repo_?id|localentrynotfound|repositorynotfound|offlinemodeisenabled", _NO_TOKENIZER),
        (
            r"unrecognized arguments|unexpected argument|no such (command|option)|extra inputs are not permitted",
            "it is of another release than the flags are for: vLLM 0.32, SGLang 0.5.23, guidellm 0.8.1",
        ),
        (r"errno 111|connection refused|cannot connect to host", "the server refused its connections"),
        (r"index -1 is out of bounds|list index out of range", "it does so when all requests failed"),
    )
)


def done_of(client: Client, line: str) -> tuple[int, int] | None:
    """Given a line that a client printed, return how many requests were answered and have failed, if it tells."""
    found = _GUIDELLM_DONE.search(line) if client == "guidellm" else None
    return (int(found[1]), int(found[2])) if found else None


def ended_badly(client: Client, code: int | None, said: str) -> str:
    """Given a client's exit code and the end of what it printed, return the error: what it said last, and what to do."""
    hint = next((hint for pattern, hint in _HINTS if pattern.search(said)), "")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if re.search(r"error|exception|fail", line, re.IGNORECASE)), "")
    last = last or (lines[-1] if lines else "it said nothing")
    how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    return f"{TITLES[client]} {how} and left no result: {last[:300]}" + (f"; {hint}" if hint else "")


def not_found(client: Client, program: str) -> str:
    """Given the program that could not be started, return the error: what to install, or which key to set."""
    return (
        f"{TITLES[client]} cannot be run: there is no program {program}; install it on this host, or say where it is with "
        f"client_command in the benchmark"
    )


def stopped(client: Client, why: str) -> str:
    """Why a level that was ended early has no figures. Trap: what an aborted client had measured is lost."""
    return f"{TITLES[client]} {why}, and keeps nothing when it is stopped"
