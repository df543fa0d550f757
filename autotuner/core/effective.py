"""What a server resolved, from everything it said: one configuration, where it differs from what was asked, its identity.

Owns the promise that two candidates are taken for one server only if everything that is known to make a difference is
known of both, and equal. Pure.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from autotuner.core.candidate import Candidate, flag_name
from autotuner.core.nccl import Nccl, stands_for
from autotuner.core.topology import Topology
from autotuner.engines.base import Effective

_SOURCES: tuple[Literal["arguments", "log", "server"], ...] = (
    "arguments",
    "log",
    "server",
)  # the later one is believed
EACH = "each"  # as a rank: the figure is that of each data-parallel rank

_OPEN = "nothing"  # asked for: the server chooses

_VALUES = tuple(f.name for f in fields(Effective) if f.name not in {"rank", "source"})

# What must be known before two servers can be called the same.
_NEEDED = {
    "sglang": ("running_cap", "kv_tokens", "context_len", "attention_backend", "graph_max_batch", "kv_cache_dtype"),
    "vllm": ("running_cap", "kv_tokens", "context_len", "speculating"),
    "llamacpp": ("running_cap", "kv_tokens", "context_len", "speculating"),
}
# Flags that count by what came of them, wherever that is known.
_COVERED = {
    "sglang": {
        "max-running-requests": "running_cap",
        "context-length": "context_len",
        "cuda-graph-max-bs": "graph_max_batch",
        "cuda-graph-max-bs-decode": "graph_max_batch",
        "attention-backend": "attention_backend",
        "disable-custom-all-reduce": "all_reduce",
    },
    "vllm": {
        "max-num-seqs": "running_cap",
        "max-model-len": "context_len",
        "attention-backend": "attention_backend",
        "disable-custom-all-reduce": "all_reduce",
    },
    "llamacpp": {
        "parallel": "running_cap",
        "np": "running_cap",
        "ctx-size": "context_len",
        "c": "context_len",
        "kv-unified": "kv_tokens",
        "kvu": "kv_tokens",
    },
}
_REPORTING = ("enable-metrics", "metrics", "slots", "log-", "served-model-name", "alias", "verbosity", "decode-log-")
_SILENT_ENV = ("NCCL_DEBUG", "PYTHONUNBUFFERED", "NO_COLOR", "TERM", "HF_TOKEN", "VLLM_LOG", "SGLANG_LOG")


@dataclass(frozen=True)
class Demand:
    """What a benchmark asks of a server: its concurrencies, and the tokens of one request, prompt and output.

    There are no concurrencies where its levels are rates.
    """

    levels: tuple[int, ...] = ()
    request_tokens: int = 0

    @property
    def level(self) -> int:
        """The largest level."""
        return max(self.levels, default=0)


@dataclass(frozen=True)
class Difference:
    """One point in which a server is not what was asked for: both sides, why it matters, what to do."""

    what: str
    asked: str
    effective: str
    why: str
    advice: str = ""

    def __str__(self) -> str:
        """One sentence."""
        sides = f"asked {self.asked}, in force {self.effective}"
        if self.asked == _OPEN:
            sides = f"{self.effective} in force, nothing asked"
        elif self.asked == self.effective:
            sides = f"{self.effective} as asked"
        said = f"{self.what}: {sides}; {self.why}"
        return f"{said} ({self.advice})" if self.advice else said


@dataclass(frozen=True)
class Configuration:
    """What a launch resolved to, kept with it; `identity` is empty where too little is known to call two servers one.

    `nccl` is what NCCL said of itself and `topology` how the host's GPUs are joined; None where nobody tells.
    """

    effective: Effective
    differences: tuple[Difference, ...] = ()
    identity: str = ""
    nccl: Nccl | None = None
    topology: Topology | None = None


def overlay(older: Effective, newer: Effective) -> Effective:
    """Given two partial facts, return both in one; what the newer one states wins."""
    stated = {name: value for name in _VALUES if (value := getattr(newer, name)) is not None}
    return replace(older, **stated)


def merge(facts: Iterable[Effective]) -> Effective:
    """Given everything a server said, in its order, return the one configuration that it amounts to.

    An answer of the server beats a line of its log, and that the dump of its arguments; within one, later beats earlier.
    Figures of data-parallel ranks are summed; what the tensor-parallel ranks of one say again counts once.
    """
    said: dict[tuple[str, str], Effective] = {}
    for fact in facts:
        key = (fact.source, fact.rank)
        said[key] = overlay(said[key], fact) if key in said else fact
    whole = Effective(source="arguments")
    for source in _SOURCES:
        of_source = {rank: fact for (by, rank), fact in said.items() if by == source}
        if of_source:
            whole = replace(overlay(whole, _whole_server(of_source, whole.dp)), source=source)
    return whole


def differences(
    asked: Effective, effective: Effective, demand: Demand, engine: str, env: Mapping[str, str]
) -> tuple[Difference, ...]:
    """Given what a candidate asks for and what its server resolved, return the differences that matter to a benchmark."""
    found = (
        _running_cap(asked, effective, demand, engine),
        _graphs(asked, effective, demand, engine),
        _attention(asked, effective),
        _speculation(asked, effective),
        _depth(asked, effective),
        _context(asked, effective, demand),
        _kv_tokens(effective, demand),
        _all_reduce(asked, effective, env),
    )
    return tuple(difference for difference in found if difference is not None)


def identity(candidate: Candidate, effective: Effective, nccl: Nccl | None = None) -> str:
    """Given a candidate and what its server and NCCL resolved, return 16 hex digits that equal servers share; empty if unknown.

    Flags count by what came of them where that is known, and as they were written where it is not. The size of the KV
    cache varies a little from launch to launch, so it counts by its magnitude, in steps of a fifth.
    """
    if any(getattr(effective, name) is None for name in _NEEDED.get(candidate.engine, ("version",))):
        return ""
    launch = candidate.launch
    # The memory share shows in the KV cache, and counts by that.
    known = {name: getattr(effective, name) for name in _VALUES if name not in {"kv_tokens", "memory_share"}}
    env, links = stands_for(launch.env, nccl)
    body = {
        "engine": candidate.engine,
        "model": launch.model,
        "program": [launch.python, launch.binary],
        "env": {name: value for name, value in sorted(env.items()) if not name.startswith(_SILENT_ENV)},
        "flags": None if effective.arguments else _other_flags(candidate, effective),
        "known": {name: _normal(value) for name, value in known.items()},
        "kv_tokens": _magnitude(effective.kv_tokens or 0),
    }
    if links:
        body["links"] = links
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def _whole_server(by_rank: dict[str, Effective], known_dp: int | None) -> Effective:
    """One source's facts: ranks that speak for themselves are summed, and outweigh a line that speaks for all."""
    whole = by_rank.get("", Effective())
    for fact in by_rank.values():
        whole = overlay(whole, replace(fact, running_cap=None, kv_tokens=None))
    ranks = {rank: fact for rank, fact in by_rank.items() if rank not in {"", EACH}}
    dp = whole.dp or known_dp or len(ranks) or 1
    cap, tokens = (_total(by_rank, ranks, name, dp) for name in ("running_cap", "kv_tokens"))
    whole = overlay(whole, Effective(running_cap=cap, kv_tokens=tokens))
    return replace(whole, dp=whole.dp or (len(ranks) if len(ranks) > 1 else None), rank="")


def _total(by_rank: dict[str, Effective], ranks: dict[str, Effective], name: str, dp: int) -> int | None:
    """The sum of what the ranks say, or what one of them says times their number."""
    own = [value for fact in ranks.values() if (value := getattr(fact, name)) is not None]
    each = getattr(by_rank[EACH], name) if EACH in by_rank else None
    if own:
        return int(sum(own))
    return int(each) * dp if each is not None else None


def _running_cap(asked: Effective, effective: Effective, demand: Demand, engine: str) -> Difference | None:
    cap, wanted = effective.running_cap, asked.running_cap
    if cap is None or (cap >= demand.level and (wanted is None or cap >= wanted)):
        return None
    why = f"{demand.level - cap} of {demand.level} requests wait at the largest level" if cap < demand.level else ""
    flag = {"vllm": "args.max-num-seqs", "llamacpp": "args.parallel"}.get(engine, "args.max-running-requests")
    advice = f"set {flag} to {demand.level} or more"
    if wanted is not None and cap < wanted:
        why, advice = (
            why or "the server has no room for more",
            "the server lowered it itself: see the warnings in its log",
        )
    elif effective.speculating and wanted is None and engine == "sglang":
        why = f"{why}: a default of speculation, not its cost"
    return Difference("running requests", _said(wanted), str(cap), why, advice)


def _graphs(asked: Effective, effective: Effective, demand: Demand, engine: str) -> Difference | None:
    largest = effective.graph_max_batch
    if largest is None or asked.graph_max_batch == 0:
        return None
    if largest == 0:
        why = "every decode step is launched kernel by kernel, which costs most at low concurrency"
        return Difference("CUDA graphs", "on", "off", why, "look in its log for why they were turned off")
    most = min(demand.level, effective.running_cap or demand.level)
    batch = -(-most // (effective.dp or 1))
    if largest >= batch:
        return None
    flag = "args.max-cudagraph-capture-size" if engine == "vllm" else "args.cuda-graph-max-bs"
    why = f"up to {batch} requests decode at once, and those above {largest} without a graph"
    advice = f"raise {flag}, or args.cuda-graph-max-bs-decode as newer SGLang calls it" if engine == "sglang" else flag
    return Difference("largest CUDA graph", _said(asked.graph_max_batch), str(largest), why, advice)


def _attention(asked: Effective, effective: Effective) -> Difference | None:
    if not asked.attention_backend or not effective.attention_backend:
        return None
    if _backend(asked.attention_backend) == _backend(effective.attention_backend):
        return None
    why = "what is measured is another backend than the one that was to be tried"
    return Difference("attention backend", asked.attention_backend, effective.attention_backend, why)


def _speculation(asked: Effective, effective: Effective) -> Difference | None:
    if asked.speculating is None or effective.speculating is None or asked.speculating == effective.speculating:
        return None
    if asked.speculating:
        why = "nothing is drafted, so this is a plain server with less memory"
        advice = "look in its log for why speculation was turned off"
        return Difference("speculation", asked.spec_method or "on", "off", why, advice)
    why = "it counts as a plain server, although it speculates"
    return Difference("speculation", "off", effective.spec_method or "on", why, "name the method in the candidate")


def _depth(asked: Effective, effective: Effective) -> Difference | None:
    for what, wanted, got in (
        ("draft tokens", asked.draft_tokens, effective.draft_tokens),
        ("draft steps", asked.spec_steps, effective.spec_steps),
    ):
        if effective.speculating and wanted is not None and got is not None and wanted != got:
            why = "the depth decides the longest accept length and the cost of a step"
            return Difference(
                what, str(wanted), str(got), why, "the server adjusted it: ask for a shape that it can do"
            )
    return None


def _context(asked: Effective, effective: Effective, demand: Demand) -> Difference | None:
    context = effective.context_len
    if context is None or context >= max(asked.context_len or 0, demand.request_tokens):
        return None
    if context < demand.request_tokens:
        why = f"a request of {demand.request_tokens} tokens does not fit"
    else:
        why = "longer requests are refused or cut"
    return Difference(
        "context length", _said(asked.context_len), str(context), why, "a drafter's own context may limit it"
    )


def _kv_tokens(effective: Effective, demand: Demand) -> Difference | None:
    tokens = effective.kv_tokens
    running = min(demand.level, effective.running_cap or demand.level)
    if tokens is None or not demand.request_tokens or tokens >= running * demand.request_tokens:
        return None
    why = f"{running} requests of {demand.request_tokens} tokens need {running * demand.request_tokens}, so some are put back"
    advice = "leave more memory to the KV cache, or shorten the benchmark's requests"
    return Difference("KV cache", f"{running * demand.request_tokens} tokens", f"{tokens} tokens", why, advice)


def _all_reduce(asked: Effective, effective: Effective, env: Mapping[str, str]) -> Difference | None:
    carriers = (effective.all_reduce or "").split(", ")
    if not carriers[0]:
        return None
    tuned = sorted(name for name in env if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG"))
    if carriers[0] == "nccl" and asked.all_reduce is None:
        why = "small messages go through NCCL, so its variables matter to decoding"
        return Difference(
            "all-reduce", "the default", "nccl", why, "custom all-reduce was turned off: see its log for why"
        )
    if "nccl" not in carriers[0] and tuned:
        why = f"small messages never reach NCCL, so {', '.join(tuned)} can hardly change decoding"
        advice = "set args.disable-custom-all-reduce to try NCCL's own"
        return Difference("all-reduce", "NCCL with other settings", effective.all_reduce or "", why, advice)
    return None


def _other_flags(candidate: Candidate, effective: Effective) -> dict[str, str]:
    """The flags that nothing known stands for, in one spelling."""
    covered = _COVERED.get(candidate.engine, {})
    found = {}
    for key, value in candidate.launch.args.items():
        name = flag_name(key)
        field = covered.get(name)
        stood_for = field is not None and getattr(effective, field) is not None
        if not stood_for and not name.startswith(_REPORTING) and value is not False:
            found[name] = _json(str(value))
    return found


def _json(text: str) -> str:
    """JSON in one layout; anything else as it is."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def _normal(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _magnitude(tokens: int) -> int:
    steps = 0
    while tokens > 1.2**steps:
        steps += 1
    return steps


def _backend(name: str) -> str:
    plain = name.lower().replace("_", "").replace("-", "").removesuffix("vllmv1")
    return {"fa3": "flashattn3", "fa4": "flashattn4"}.get(plain, plain)


def _said(value: int | None) -> str:
    return str(value) if value is not None else _OPEN
