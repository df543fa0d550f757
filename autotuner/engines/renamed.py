"""Flags that engines renamed or removed, as data: the new name, the releases, and where the fact is from. Pure.

The installed program's own help comes first: a row speaks only where the help has the other name, or where there is no
help to ask. A version is the first release read that had the change; one in between may have had it already.
"""

from dataclasses import dataclass

from autotuner.core.candidate import Scalar

_SGLANG = "sglang/srt/server_args.py"
_CUDA_GRAPHS = f"{_SGLANG} of 0.5.13, 0.5.15 and 0.5.23"


@dataclass(frozen=True)
class Renamed:
    """One old flag. `since` is when the new name came, `gone` when the old one went; empty where that is not known.

    A name that ends in `*` stands for all that begin so. `new` is empty for a flag that has no successor. `value` is
    what the successor is to be given, empty where it takes what the old flag had.
    """

    engine: str
    old: str
    new: str
    since: str
    gone: str
    source: str
    advice: str = ""
    value: str = ""

    def successor(self, flag: str) -> str | None:
        """Given a flag, return its new name, empty if it has none; None if this row is not about it."""
        return _translated(flag, self.old, self.new)

    def predecessor(self, flag: str) -> str | None:
        """Given a new flag, return its old name; None if this row is not about it."""
        return _translated(flag, self.new, self.old) if self.new else None

    @property
    def when(self) -> str:
        """The releases in words."""
        parts = [f"from {self.since} on" if self.since else "", f"gone in {self.gone}" if self.gone else ""]
        return ", ".join(part for part in parts if part)


TABLE = (
    Renamed("sglang", "cuda-graph-max-bs", "cuda-graph-max-bs-decode", "0.5.15", "0.5.23", _CUDA_GRAPHS),
    Renamed("sglang", "cuda-graph-bs", "cuda-graph-bs-decode", "0.5.15", "0.5.23", _CUDA_GRAPHS),
    Renamed(
        *("sglang", "disable-cuda-graph", "disable-decode-cuda-graph", "0.5.15", "", _CUDA_GRAPHS),
        "disable-prefill-cuda-graph is the other half of it",
    ),
    Renamed(
        *("sglang", "enable-piecewise-cuda-graph", "", "", "0.5.10", f"{_SGLANG} of 0.5.3 and 0.5.10"),
        "piecewise graphs are on by default from 0.5.10 on",
    ),
    Renamed(
        *("sglang", "disable-piecewise-cuda-graph", "cuda-graph-backend-prefill", "0.5.15", "", _CUDA_GRAPHS),
        'write cuda-graph-backend-prefill = "disabled"',
        value="disabled",
    ),
    Renamed(
        *("sglang", "enable-breakable-cuda-graph", "cuda-graph-backend-prefill", "0.5.15", "", _CUDA_GRAPHS),
        'write cuda-graph-backend-prefill = "breakable"',
        value="breakable",
    ),
    Renamed(
        *("sglang", "enable-ep-moe", "ep-size", "0.5", "", f"{_SGLANG}: its own deprecation note"),
        "give ep-size the value of tp-size",
    ),
    Renamed(
        *("sglang", "enable-deepep-moe", "moe-a2a-backend", "0.5", "", f"{_SGLANG}: its own deprecation note"),
        'write moe-a2a-backend = "deepep"',
        value="deepep",
    ),
    Renamed("sglang", "max-micro-batch-size", "pp-max-micro-batch-size", "0.5", "", f"{_SGLANG} of 0.5"),
    Renamed("sglang", "crash-on-nan", "", "", "0.5", f"{_SGLANG} of 0.5"),
    Renamed(
        *("sglang", "enable-beta-spec", "", "", "0.5.4", f"{_SGLANG} of 0.5.3 and 0.5.6"),
        "overlapped speculation is env.SGLANG_ENABLE_SPEC_V2 from 0.5.4 on and the default from 0.5.11 on",
    ),
    Renamed("sglang", "nsa-*", "dsa-*", "0.5.13", "", f"{_SGLANG} of 0.5.12 and 0.5.13"),
    Renamed("sglang", "enable-nan-detection", "", "", "0.5.15", f"{_SGLANG} of 0.5.13 and 0.5.15"),
    Renamed(
        *("sglang", "mamba-scheduler-strategy", "mamba-radix-cache-strategy", "0.5.15", ""),
        f"{_SGLANG} of 0.5.13 and 0.5.15",
    ),
    Renamed(
        *("sglang", "enable-flashinfer-allreduce-fusion", "flashinfer-allreduce-fusion-backend", "0.5.15", ""),
        f"{_SGLANG} of 0.5.13 and 0.5.15",
    ),
    Renamed(
        *("sglang", "speculative-dflash-draft-window-size", "speculative-draft-window-size", "0.5.12", ""),
        f"{_SGLANG} of 0.5.11 and 0.5.12",
    ),
    Renamed(
        *("sglang", "speculative-ngram-branch-length", "speculative-ngram-max-trie-depth", "0.5.10", "0.5.10"),
        f"{_SGLANG} of 0.5.9 and 0.5.10",
    ),
    Renamed(
        *("sglang", "speculative-ngram-min-match-window-size", "speculative-ngram-max-trie-depth", "0.5.10", "0.5.10"),
        f"{_SGLANG} of 0.5.9 and 0.5.10",
        "the match window is one number now",
    ),
    Renamed(
        *("sglang", "speculative-ngram-max-match-window-size", "speculative-ngram-max-trie-depth", "0.5.10", "0.5.10"),
        f"{_SGLANG} of 0.5.9 and 0.5.10",
    ),
    Renamed("sglang", "speculative-skip-dp-mlp-sync", "", "", "0.5.23", f"{_SGLANG} of 0.5.18 and 0.5.23"),
    Renamed("sglang", "cuda-graph-tc-compiler", "", "", "0.5.23", f"{_SGLANG} of 0.5.18 and 0.5.23"),
    Renamed("sglang", "enable-dp-attention", "attn-dp-size", "0.5.23", "", f"{_SGLANG} of 0.5.18 and 0.5.23"),
    Renamed("sglang", "disable-mla", "", "", "0.4.9", f"{_SGLANG} of 0.4.6 and 0.4.9"),
    Renamed(
        *("sglang", "enable-flashinfer-mla", "attention-backend", "0.4.9", "0.4.9", f"{_SGLANG} of 0.4.6 and 0.4.9"),
        'write attention-backend = "flashinfer"',
        value="flashinfer",
    ),
    Renamed(
        *("sglang", "enable-flashmla", "attention-backend", "0.4.9", "0.4.9", f"{_SGLANG} of 0.4.6 and 0.4.9"),
        'write attention-backend = "flashmla"',
        value="flashmla",
    ),
    Renamed("sglang", "n-share-experts-fusion", "", "", "0.4.9", f"{_SGLANG} of 0.4.6 and 0.4.9"),
    Renamed(
        *("vllm", "speculative-model", "speculative-config", "", "0.19", "vllm/engine/arg_utils.py of 0.19"),
        "it is JSON with method, model and num_speculative_tokens",
    ),
    Renamed(
        *("vllm", "num-speculative-tokens", "speculative-config", "", "0.19", "vllm/engine/arg_utils.py of 0.19"),
        "it is JSON with method, model and num_speculative_tokens",
    ),
    Renamed(
        *("vllm", "speculative-disable-by-batch-size", "speculative-config", "", "0.19"),
        "vllm/engine/arg_utils.py of 0.19",
        "its key num_speculative_tokens_per_batch_size does the same, from 0.26 on",
    ),
    *(
        Renamed("llamacpp", old, "spec-draft-n-max", "", "", "common/arg.cpp: the argument has been removed")
        for old in ("draft", "draft-n", "draft-max")
    ),
    *(
        Renamed("llamacpp", old, "spec-draft-n-min", "", "", "common/arg.cpp: the argument has been removed")
        for old in ("draft-min", "draft-n-min")
    ),
    Renamed("llamacpp", "mmap", "load-mode", "", "", "common/arg.cpp", 'write load-mode = "mmap"', value="mmap"),
    Renamed("llamacpp", "no-mmap", "load-mode", "", "", "common/arg.cpp", 'write load-mode = "none"', value="none"),
    Renamed("llamacpp", "mlock", "load-mode", "", "", "common/arg.cpp", 'write load-mode = "mlock"', value="mlock"),
)


def renamed(engine: str, flag: str) -> Renamed | None:
    """Given a flag without its dashes, return the row that says what became of it."""
    return next((row for row in TABLE if row.engine == engine and row.successor(flag) is not None), None)


def older_name(engine: str, flag: str) -> tuple[Renamed, ...]:
    """Given a flag without its dashes, return the rows in which it is the new name."""
    return tuple(row for row in TABLE if row.engine == engine and row.predecessor(flag) is not None)


def replacement(engine: str, flag: str, value: Scalar | tuple[Scalar, ...]) -> tuple[str, Scalar] | None:
    """Given a flag that was refused, without its dashes, and its value, return what to write instead.

    ("", False) takes it out: it was removed, and did nothing but switch something on. None where the tables do not know,
    or where what the new flag wants does not follow from the old one's value.
    """
    if isinstance(value, tuple):
        return None
    row = renamed(engine, flag)
    if row is not None and not row.new:
        return ("", False) if value is True else None
    if row is not None:
        new = row.successor(flag) or ""
        switches = value is True and flag.partition("-")[0] == new.partition("-")[0]
        if row.value:
            return (new, row.value) if value is True else None
        # A bare flag has no value to hand on, unless its successor is one too; advice says what else is to be thought of.
        return (new, value) if switches or (value is not True and not row.advice) else None
    older = older_name(engine, flag)
    return (older[0].predecessor(flag) or "", value) if len(older) == 1 and not older[0].value else None


def _translated(flag: str, source: str, target: str) -> str | None:
    if not source.endswith("*"):
        return target if flag == source else None
    rest = flag.removeprefix(source[:-1])
    return target[:-1] + rest if rest != flag else None
