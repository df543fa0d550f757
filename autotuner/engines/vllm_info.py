"""What a serving vLLM says of itself at /version, /v1/models and /metrics, and what a candidate asks of it."""

import re

from autotuner.core.candidate import Candidate
from autotuner.engines import prometheus
from autotuner.engines.answers import count, document, dtype, flag_count, flag_word, rows, table, word
from autotuner.engines.base import Effective
from autotuner.engines.vllm_flags import speculation

_DIGITS = re.compile(r"[0-9]{1,12}")
_NO_GRAPHS = re.compile(r"""cudagraph_mode["']?\s*[:=]\s*["']?NONE\b""", re.IGNORECASE)


def paths(candidate: Candidate) -> tuple[str, ...]:
    """Given a candidate, return the paths to ask; /server_info is there in development mode only."""
    metrics = () if candidate.arg("disable-log-stats") else ("/metrics",)
    return ("/version", "/v1/models", *metrics)


def read(path: str, text: str) -> Effective:
    """Given an answer at one of the paths, return what it says."""
    if path == "/metrics":
        return _metrics(text)
    answer = table(document(text))
    if path == "/version":
        return Effective(version=word(answer.get("version")), source="server")
    first = next(iter(rows(answer.get("data"))), {})
    return Effective(context_len=count(first.get("max_model_len")), source="server")


def asked(candidate: Candidate) -> Effective:
    """Given a candidate, return what its flags ask for; --max-num-seqs holds for each data-parallel rank."""
    speculative = speculation(candidate)
    steps = speculative.num_steps if speculative else None
    graphs = flag_count(candidate, "max-cudagraph-capture-size")  # in tokens: a verify step takes 1 + K a request
    dp = flag_count(candidate, "data-parallel-size", "dp") or 1
    cap = flag_count(candidate, "max-num-seqs")
    return Effective(
        running_cap=cap * dp if cap else None,
        context_len=flag_count(candidate, "max-model-len"),
        attention_backend=flag_word(candidate, "attention-backend"),
        graph_max_batch=0 if _no_graphs(candidate) else (graphs // (1 + (steps or 0)) if graphs else None),
        speculating=speculative is not None,
        spec_method=speculative.method if speculative else None,
        spec_steps=steps,
        all_reduce="nccl" if candidate.arg("disable-custom-all-reduce") else None,
        source="arguments",
    )


def _no_graphs(candidate: Candidate) -> bool:
    if candidate.arg("enforce-eager") or str(candidate.arg("cc.cudagraph-mode")).upper() == "NONE":
        return True
    return bool(_NO_GRAPHS.search(str(candidate.arg("compilation-config", "cc"))))


def _metrics(text: str) -> Effective:
    """The KV cache of every engine together; series on speculation are there only where there is speculation."""
    scrape = [sample for sample in prometheus.samples(text) if sample.name.startswith("vllm:")]
    configs = [sample.labels for sample in scrape if sample.name == "vllm:cache_config_info"]
    sizes = [size for labels in configs if (size := _tokens(labels)) is not None]
    return Effective(
        kv_tokens=sum(sizes) if sizes and len(sizes) == len(configs) else None,
        kv_cache_dtype=dtype(configs[0].get("cache_dtype")) if configs else None,
        speculating=any(s.name == "vllm:spec_decode_num_drafts_total" for s in scrape) if configs else None,
        source="server",
    )


def _tokens(labels: dict[str, str]) -> int | None:
    """Stated by newer releases; else blocks times their size, where one rank alone holds the context."""
    stated, blocks, size = (
        count(int(value)) if _DIGITS.fullmatch(value := labels.get(name, "")) else None
        for name in ("kv_cache_size_tokens", "num_gpu_blocks", "block_size")
    )
    return stated if stated is not None else blocks * size if blocks and size else None
