"""Environment variables that harm, do nothing, or are misspelt: a table of them with reasons, and how it is read. Pure.

A variable that a server ignores makes a candidate that measures noise, and no engine complains about one.
"""

import re
from dataclasses import dataclass
from typing import Literal

from autotuner.core.candidate import Candidate
from autotuner.engines.flags import Findings
from autotuner.engines.variables import KNOWN
from autotuner.engines.version import within

Severity = Literal["refuse", "warn"]
_OFF = ("", "0", "false", "no", "off")
_TP = ("tensor-parallel-size", "tp-size", "tp")
_CUSTOM_ALL_REDUCE_SIZES = (2, 4, 6, 8)
# What tunes how NCCL carries an all-reduce; the others choose interfaces or print.
_NCCL_TUNING = re.compile(
    r"NCCL_(ALGO|PROTO|(MIN|MAX)_(NCHANNELS|CTAS)|BUFFSIZE|NTHREADS|NVLS_ENABLE|P2P_LEVEL|P2P_DISABLE"
    r"|SHM_DISABLE|GRAPH_REGISTER|CUMEM_ENABLE)"
)


@dataclass(frozen=True)
class Variable:
    """One row: which variable, in which engines and releases, how bad, and a sentence that says what to do.

    `pattern` must match the whole name, `value` is looked for in the value; without `value`, one that turns it off passes.
    """

    pattern: str
    severity: Severity
    says: str
    engines: tuple[str, ...] = ()
    since: str = ""
    before: str = ""
    value: str = ""

    def applies(self, engine: str, name: str, value: str, version: str | None) -> bool:
        """Tell whether this row is about a variable of a candidate."""
        if self.engines and engine not in self.engines:
            return False
        if not re.fullmatch(self.pattern, name) or not within(version, self.since, self.before):
            return False
        return bool(re.search(self.value, value)) if self.value else value.lower() not in _OFF


ANY_VALUE = r"(?s)"

TABLE = (
    # Dangerous.
    Variable(
        "SGLANG_IS_IN_CI",
        "refuse",
        "changes context-length checks, the watchdog and cache flushing for SGLang's own tests; take it out",
        ("sglang",),
    ),
    Variable(
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
        "warn",
        "lets a context run past what a model or drafter was made for: acceptance collapses there and older releases "
        "crash; keep context-length within the drafter's, or benchmark at production lengths",
        ("sglang",),
    ),
    Variable(
        "SGLANG_SIMULATE_ACC_LEN",
        "warn",
        "fakes acceptance, so the server writes garbage: measure the cost of a step with it, and never promote it",
        ("sglang",),
    ),
    Variable(
        "LLAMA_ARG_.*",
        "refuse",
        "sets a flag behind args, where it is neither checked nor compared; write the flag under args",
        ("llamacpp",),
        value=ANY_VALUE,
    ),
    Variable(
        "CUDA_LAUNCH_BLOCKING",
        "refuse",
        "makes every kernel wait for the one before, so that all figures are of another server; take it out",
    ),
    Variable(
        "VLLM_SERVER_DEV_MODE",
        "refuse",
        "opens endpoints that reset, sleep and reconfigure the server to whoever reaches its port; take it out",
        ("vllm",),
    ),
    Variable(
        "LD_PRELOAD",
        "warn",
        "loads code into every process of the server; give the baseline the same one, or the difference is its doing",
    ),
    # Useless.
    Variable(
        "VLLM_ATTENTION_BACKEND",
        "refuse",
        "no release since 0.19 reads it; use args.attention-backend",
        ("vllm",),
        value=ANY_VALUE,
    ),
    Variable(
        "NCCL_ASYNC_ERROR_HANDLING",
        "warn",
        "has no effect: vLLM takes it out of its workers' environment; leave it out",
        ("vllm",),
        value=ANY_VALUE,
    ),
    Variable(
        "NCCL_CUMEM_ENABLE|NCCL_NVLS_ENABLE",
        "warn",
        "has no effect: SGLang overwrites it up to 0.5.3; use args.enable-nccl-nvls, or a newer release",
        ("sglang",),
        before="0.5.6",
        value=ANY_VALUE,
    ),
    Variable(
        "SGLANG_ENABLE_SPEC_V2",
        "warn",
        "has no effect from 0.5.15 on, where overlapped speculation is the only kind; leave it out "
        "(args.disable-overlap-schedule is the synchronous one)",
        ("sglang",),
        since="0.5.15",
        value=ANY_VALUE,
    ),
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "warn",
        "has no effect: SGLang always overwrites it; leave it out",
        ("sglang",),
        value=ANY_VALUE,
    ),
)


def check(candidate: Candidate, version: str | None = None, nvlink: bool | None = None) -> Findings:
    """Given a candidate, its engine's version and whether its GPUs are joined by NVLink, return what its variables do.

    None for what is not known.
    """
    problems: list[str] = []
    warnings: list[str] = []
    env = candidate.launch.env
    for name, value in env.items():
        for row in TABLE:
            if row.applies(candidate.engine, name, value, version):
                (problems if row.severity == "refuse" else warnings).append(f"env.{name}: {row.says}")
    warnings += [*_moot(candidate, nvlink), *_segments(candidate), *_misspelt(env)]
    return Findings(tuple(problems), tuple(warnings))


def wants_nvlink(candidate: Candidate) -> bool:
    """Given a candidate, tell whether it matters how its GPUs are joined: only then is the host asked."""
    tuned = any(_NCCL_TUNING.fullmatch(name) for name in candidate.launch.env)
    return tuned and _custom_all_reduce(candidate) and _ranks(candidate) > 2


def _ranks(candidate: Candidate) -> int:
    value = candidate.arg(*_TP)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def _custom_all_reduce(candidate: Candidate) -> bool:
    able = candidate.engine in {"sglang", "vllm"} and _ranks(candidate) in _CUSTOM_ALL_REDUCE_SIZES
    return able and not candidate.arg("disable-custom-all-reduce")


def _moot(candidate: Candidate, nvlink: bool | None) -> list[str]:
    """Over NVLink or between two GPUs small all-reduces bypass NCCL, and with them all that a decode step sends."""
    tuned = [name for name in candidate.launch.env if _NCCL_TUNING.fullmatch(name)]
    if not tuned or not _custom_all_reduce(candidate):
        return []
    two = _ranks(candidate) == 2
    if nvlink is False and not two:
        return []
    named = ", ".join(f"env.{name}" for name in tuned)
    where = "between two GPUs" if two else "over NVLink" if nvlink else "if these GPUs are joined by NVLink,"
    said = (
        f"{named}: {where} decode does not use NCCL but the engine's own all-reduce, so this would measure noise; "
        "add args.disable-custom-all-reduce = true to both sides, or leave it out"
    )
    return [said]


def _segments(candidate: Candidate) -> list[str]:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        wanted = re.search(r"expandable_segments\s*:\s*true", candidate.launch.env.get(name, ""), re.IGNORECASE)
        if wanted and _custom_all_reduce(candidate):
            said = (
                f"env.{name}: expandable_segments and custom all-reduce do not go together, graph capture ends with "
                "`invalid argument`; leave it out or add args.disable-custom-all-reduce = true"
            )
            return [said]
    return []


def _misspelt(env: dict[str, str]) -> list[str]:
    found = []
    for name in env:
        if name in KNOWN or any(re.fullmatch(row.pattern, name) for row in TABLE):
            continue
        near = [known for known in sorted(KNOWN) if known[:3] == name[:3] and _one_slip(name, known)]
        if near:
            found.append(
                f"env.{name} is no variable that is known here; did you mean {near[0]}? A wrong name is ignored"
            )
    return found


def _one_slip(a: str, b: str) -> bool:
    """Whether one letter more, less, other, or two letters in each other's place make one word of the other."""
    if abs(len(a) - len(b)) > 1 or a == b:
        return False
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    rest_a, rest_b = a[start:], b[start:]
    swapped = len(rest_a) > 1 and rest_a[1] + rest_a[0] + rest_a[2:] == rest_b
    return rest_a[1:] == rest_b[1:] or rest_a[1:] == rest_b or rest_a == rest_b[1:] or swapped
