"""What an engine's own argv asks for, read loosely; a flag that the engine does not have is refused in its words."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from autotuner.rehearsal.batch import Acceptance
from autotuner.rehearsal.personalities import CAPPED_AT, HALF_LIFE_S, Personality
from autotuner.rehearsal.ranks import ALONE, Ranks
from autotuner.rehearsal.speeds import DRAFTED_NGRAM, DRAFTED_STEPS, SHAPES, Costs, Shape, shape_for

ENGINES = ("sglang", "vllm", "llamacpp")
PROGRAMS = {"sglang": "sglang serve", "vllm": "vllm serve", "llamacpp": "llama-server"}
SIMULATE_VAR = "SGLANG_SIMULATE_ACC_LEN"
SPECULATIVE_CAP = 48  # SGLang's, for the whole server, unless --max-running-requests is given
TENSOR_PARALLEL = ("--tensor-parallel-size", "--tp-size", "--tp", "-tp")
MEMORY_MAX = {"sglang": 0.95, "vllm": 0.975}  # what is left above it does not hold the graphs

# Chances a position, where nothing is simulated: what the recorded methods reached, and a middling drafter.
CHANCES = {"eagle": 0.6, "standalone": 0.88, "ngram": 0.6}
_KINDS = (("ngram", "ngram"), ("suffix", "ngram"), ("standalone", "standalone"), ("draft", "standalone"))


class WrongFlagError(Exception):
    """The engine would refuse the command line; the text is what it says behind its name."""


@dataclass(frozen=True)
class Asked:
    """One server as it was asked for, and as it will behave."""

    engine: str
    model: str
    host: str
    port: int
    costs: Costs
    cap: int
    acceptance: Acceptance | None
    method: str = ""  # as the engine writes it
    draft_model: str = ""
    draft_tokens: int = 0  # per verify step, as the engine counts them for its rate
    reset_to_cap: bool = False  # SGLang lowered the cap by itself
    metrics: bool = True
    out_of_memory: bool = False  # by its own flags
    log_interval: int = 40
    context_len: int = 8192
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gpus: int = 1
    nccl: Mapping[str, str] = field(default_factory=dict)  # its variables
    ranks: Ranks = ALONE


@cache
def known_flags(engine: str) -> frozenset[str]:
    """Given an engine's name, return the flags that its rehearsal knows."""
    return frozenset((Path(__file__).parent / "flags" / f"{engine}.txt").read_text(encoding="utf-8").split())


def help_text(engine: str) -> str:
    """Given an engine's name, return what its `--help` prints here."""
    lines = [f"usage: {PROGRAMS[engine]} [options]", "", "options (a rehearsal's list of common flags):"]
    return "\n".join([*lines, *(f"  {flag}" for flag in sorted(known_flags(engine)))]) + "\n"


def options_of(engine: str, argv: list[str]) -> dict[str, tuple[str, ...]]:
    """Given an engine's whole argv, return its flags with their values. Raise WrongFlagError for an unknown one."""
    words = argv[3:] if argv[1:2] == ["-m"] else argv[1:]
    found: dict[str, tuple[str, ...]] = {}
    unknown: list[str] = []
    flag, known = "", True
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-[\d.]+", word):
            name, has_value, value = word.partition("=")
            flag = name if name in known_flags(engine) else name.partition(".")[0].replace("_", "-")
            known = flag in known_flags(engine) and (engine == "vllm" or flag == name)
            found[flag] = (value,) if has_value else ()
            unknown += [] if known else [word]
        elif known:
            found[flag] = (*found.get(flag, ()), word)
        else:
            unknown.append(word)
    if unknown:
        said = unknown[0] if engine == "llamacpp" else " ".join(unknown)
        raise WrongFlagError(f"invalid argument: {said}" if engine == "llamacpp" else f"unrecognized arguments: {said}")
    return found


def read(
    engine: str, argv: list[str], env: Mapping[str, str], personality: Personality, shape: str | None = None
) -> Asked:
    """Given an engine's argv and environment, return the server it asks for. Raise WrongFlagError."""
    options = _Options(options_of(engine, argv))
    readers = {"sglang": _sglang, "vllm": _vllm, "llamacpp": _llamacpp}
    model = options.text("--model-path", "--model", "-m") or "model"
    if engine == "vllm":
        model = next(iter(options.values.get("", ())[1:]), model)
    found = readers[engine](options, env, personality, SHAPES[shape] if shape else shape_for(model), model)
    gpus = options.whole(1, *TENSOR_PARALLEL) if engine != "llamacpp" else 1
    spoken = {name: value for name, value in env.items() if name.startswith("NCCL_")}
    return replace(found, gpus=gpus, nccl=spoken, ranks=ranks_of(engine, argv))


def ranks_of(engine: str, argv: list[str]) -> Ranks:
    """Given an engine's argv, return which rank of how many it asks for. Raise WrongFlagError."""
    options = _Options(options_of(engine, argv))
    count, number = options.whole(1, "--nnodes"), options.whole(0, "--node-rank")
    if number >= count:
        raise WrongFlagError(f"argument --node-rank: {number} of {count} nodes")
    if count == 1:
        return ALONE
    host, _, port = (options.text("--dist-init-addr", "--nccl-init-addr") or "127.0.0.1:20000").rpartition(":")
    if engine == "vllm":
        host, port = options.text("--master-addr") or "127.0.0.1", options.text("--master-port") or "29501"
        if options.has("--headless") != bool(number):
            raise WrongFlagError("argument --headless: is for every rank but the first")
    gpus = options.whole(1, "--tp-size", "--tp", "--tensor-parallel-size") * options.whole(
        1, "--pp-size", "--pipeline-parallel-size"
    )
    return Ranks(number, count, host.strip("[]"), int(port), number * (gpus // count))


@dataclass(frozen=True)
class _Options:
    values: dict[str, tuple[str, ...]]

    def has(self, *flags: str) -> bool:
        return any(flag in self.values for flag in flags)

    def text(self, *flags: str) -> str | None:
        return next((self.values[flag][0] for flag in flags if self.values.get(flag)), None)

    def whole(self, default: int, *flags: str) -> int:
        return int(self._number(int, flags) or default)

    def real(self, *flags: str) -> float | None:
        return self._number(float, flags)

    def _number(self, kind: type[int] | type[float], flags: tuple[str, ...]) -> float | None:
        said = self.text(*flags)
        try:
            return kind(said) if said is not None else None
        except ValueError:
            raise WrongFlagError(f"argument {flags[0]}: invalid {kind.__name__} value: {said!r}") from None


def _acceptance(kind: str, depth: int, mean_len: float | None, who: Personality) -> Acceptance | None:
    if kind == "none":
        return None
    half_life_s = HALF_LIFE_S if who.decays else 0.0
    return Acceptance(depth, 1.0 if who.broken else mean_len, CHANCES[kind], half_life_s)


def _kind(method: str) -> str:
    lowered = method.lower()
    if lowered in {"", "none"}:
        return "none"
    # llama.cpp's drafts by EAGLE-3 or MTP are cheap ones, whatever their first word.
    if any(word in lowered for word in ("eagle", "mtp", "nextn", "dflash", "dspark")):
        return "eagle"
    return next((kind for part, kind in _KINDS if part in lowered), "eagle")


def _simulated(env: Mapping[str, str]) -> float | None:
    try:
        return float(env[SIMULATE_VAR]) if env.get(SIMULATE_VAR) else None
    except ValueError:
        raise WrongFlagError(f"environment variable {SIMULATE_VAR}: no number: {env[SIMULATE_VAR]!r}") from None


def _sglang(o: _Options, env: Mapping[str, str], who: Personality, shape: Shape, model: str) -> Asked:
    method = (o.text("--speculative-algorithm", "--speculative-algo") or "").upper()
    kind = _kind(method)
    draft_model = o.text("--speculative-draft-model-path") or ""
    draft_tokens = o.whole(8 if kind == "ngram" else 4, "--speculative-num-draft-tokens") - 1
    depth = draft_tokens if kind == "ngram" else o.whole(DRAFTED_STEPS, "--speculative-num-steps")
    mean_len = _simulated(env)
    if method == "EAGLE" and re.search(r"eagle[-_.]?3", draft_model, re.IGNORECASE):
        mean_len = 1.0  # SGLang starts such a pair without a word, and nothing is ever accepted
    if mean_len is None and o.text("--speculative-draft-load-format") == "dummy":
        mean_len = 1.0  # random weights: as recorded, nothing that they draft is right
    asked_cap = o.whole(0, "--max-running-requests")
    cap = CAPPED_AT if who.capped else asked_cap or (4096 if kind == "none" else SPECULATIVE_CAP)
    graphs = [int(size) for size in o.values.get("--cuda-graph-bs", ()) if size.isdigit()]
    largest = o.whole(max(graphs, default=256), "--cuda-graph-max-bs", "--cuda-graph-max-bs-decode")
    on = not o.has("--disable-cuda-graph", "--disable-decode-cuda-graph")
    return Asked(
        engine="sglang",
        model=model,
        host=o.text("--host") or "127.0.0.1",
        port=o.whole(30000, "--port"),
        costs=Costs(shape, kind, 0 if kind == "none" else depth, on, min(largest, cap)),
        cap=cap,
        acceptance=_acceptance(kind, depth, mean_len, who),
        method="" if kind == "none" else method,
        draft_model=draft_model,
        draft_tokens=draft_tokens,
        reset_to_cap=kind != "none" and not asked_cap,
        metrics=o.has("--enable-metrics"),
        out_of_memory=(o.real("--mem-fraction-static") or 0.0) >= MEMORY_MAX["sglang"],
        log_interval=max(1, o.whole(40, "--decode-log-interval")),
        context_len=o.whole(8192, "--context-length"),
        options=o.values,
    )


def _vllm(o: _Options, env: Mapping[str, str], who: Personality, shape: Shape, model: str) -> Asked:
    try:
        config = json.loads(o.text("--speculative-config", "-sc") or "{}")
    except ValueError as error:
        raise WrongFlagError(f"argument --speculative-config: Value cannot be converted: {error}") from None
    method = str(config.get("method") or o.text("--spec-method") or ("draft_model" if config.get("model") else ""))
    kind = _kind(method)
    tokens = int(config.get("num_speculative_tokens") or o.whole(DRAFTED_STEPS, "--spec-tokens"))
    mean_len = config.get("synthetic_acceptance_length")
    cap = CAPPED_AT if who.capped else o.whole(256, "--max-num-seqs")
    largest = o.whole(512, "--max-cudagraph-capture-size") // (1 + (tokens if kind != "none" else 0))
    return Asked(
        engine="vllm",
        model=model,
        host=o.text("--host") or "127.0.0.1",
        port=o.whole(8000, "--port"),
        costs=Costs(shape, kind, 0 if kind == "none" else tokens, not o.has("--enforce-eager"), largest),
        cap=cap,
        acceptance=_acceptance(kind, tokens, float(mean_len) if mean_len else None, who),
        method="" if kind == "none" else method,
        draft_model=str(config.get("model") or o.text("--spec-model") or ""),
        draft_tokens=tokens,
        metrics=not o.has("--disable-log-stats"),
        out_of_memory=(o.real("--gpu-memory-utilization") or 0.0) >= MEMORY_MAX["vllm"],
        context_len=o.whole(8192, "--max-model-len"),
        options=o.values,
    )


def _llamacpp(o: _Options, env: Mapping[str, str], who: Personality, shape: Shape, model: str) -> Asked:
    method = o.text("--spec-type") or "none"
    kind = _kind(method)
    tokens = o.whole(DRAFTED_NGRAM if kind == "ngram" else DRAFTED_STEPS, "--spec-draft-n-max")
    slots = CAPPED_AT if who.capped else max(1, o.whole(4, "--parallel", "-np"))
    context = o.whole(8192, "--ctx-size", "-c")
    return Asked(
        engine="llamacpp",
        model=model,
        host=o.text("--host") or "127.0.0.1",
        port=o.whole(8080, "--port"),
        costs=Costs(shape, kind, 0 if kind == "none" else tokens, graph_max_batch=slots),
        cap=slots,
        acceptance=_acceptance(kind, tokens, o.real("--spec-synth-len"), who),
        method="" if kind == "none" else method,
        draft_model=o.text("--spec-draft-model", "--model-draft", "-md") or "",
        draft_tokens=tokens,
        metrics=o.has("--metrics"),
        context_len=context // slots,
        options=o.values,
    )
