"""What a serving SGLang says of itself at /server_info, and what a candidate asks of it.

The answer holds every argument as it was resolved, beside one state a data-parallel rank. A secret among the arguments
(api_key) never leaves this module.
"""

import hashlib
import json
from typing import Any

from autotuner.core.candidate import Candidate
from autotuner.core.redact import names_secret
from autotuner.engines.answers import count, document, dtype, flag_count, flag_word, rows, share, table, word
from autotuner.engines.base import Effective
from autotuner.engines.sglang_flags import speculation

PATHS = ("/server_info|/get_server_info",)  # the older name logs a warning at every use by now

# Resolved anew at each launch, about where it listens or what it logs, or what it has done since.
_VOLATILE = frozenset(
    """
internal_states version status max_req_input_len max_total_num_tokens startup_time launch_command kv_events frontend
env_vars random_seed host port grpc_port nccl_port dist_init_addr served_model_name weight_version last_gen_throughput
avg_spec_accept_length memory_usage step_time_dict effective_max_running_requests_per_dp decode_cuda_graph_memory_gb
watchdog_timeout soft_watchdog_timeout show_time_cost enable_metrics crash_dump_folder file_storage_path
""".split()  # noqa: SIM905 - a paragraph of words reads better than a list of them
)
# Known by what came of them, so that two ways of asking for one thing are one: see Effective.
_COVERED = frozenset(
    """
max_running_requests context_length kv_cache_dtype cuda_graph_max_bs cuda_graph_max_bs_decode
decode_cuda_graph_bs disable_custom_all_reduce
""".split()  # noqa: SIM905 - as above
)
_BATCHES = ("cuda_graph_bs", "cuda_graph_bs_decode")


def read(text: str) -> Effective:
    """Given an answer, return what it says; of 0.4.6 to 0.5.23, the states of all ranks summed."""
    top = table(document(text))
    states = rows(top.get("internal_states"))
    said = {**top, **(states[0] if states else {})}
    if "version" not in top and "speculative_algorithm" not in said:
        return Effective()
    dp = count(said.get("dp_size")) or 1
    caps = [count(state.get("effective_max_running_requests_per_dp")) for state in states]
    tokens = [count(table(state.get("memory_usage")).get("token_capacity")) for state in states]
    cap = _over_ranks(caps, dp)
    return Effective(
        running_cap=cap,
        kv_tokens=_over_ranks(tokens, dp) or _over_ranks([count(top.get("max_total_num_tokens"))], dp),
        context_len=count(said.get("context_length")),
        attention_backend=word(said.get("decode_attention_backend")) or word(said.get("attention_backend")),
        graph_max_batch=_graph_max_batch(said),
        speculating=word(said.get("speculative_algorithm")) is not None if "speculative_algorithm" in said else None,
        spec_method=word(said.get("speculative_algorithm")),
        spec_steps=count(said.get("speculative_num_steps")),
        draft_tokens=count(said.get("speculative_num_draft_tokens")),
        draft_quantization=word(said.get("speculative_draft_model_quantization")),
        # Not disabled does not mean active: the log says if setting it up failed.
        all_reduce="nccl" if said.get("disable_custom_all_reduce") is True and (count(said.get("tp_size")) or 1) > 1
        else None,
        quantization=word(said.get("quantization")),
        kv_cache_dtype=dtype(said.get("kv_cache_dtype")),
        dp=dp,
        version=word(top.get("version")),
        arguments=_digest(said, cap // dp if cap else None),
        memory_share=share(said.get("mem_fraction_static")),
        source="server",
    )  # fmt: skip


def asked(candidate: Candidate) -> Effective:
    """Given a candidate, return what its flags ask for."""
    off = candidate.arg("disable-cuda-graph") or candidate.arg("disable-decode-cuda-graph")
    off = off or candidate.arg("cuda-graph-backend-decode") == "disabled"
    speculative = speculation(candidate)
    return Effective(
        running_cap=flag_count(candidate, "max-running-requests"),
        context_len=flag_count(candidate, "context-length"),
        attention_backend=flag_word(candidate, "decode-attention-backend") or flag_word(candidate, "attention-backend"),
        graph_max_batch=0 if off else flag_count(candidate, "cuda-graph-max-bs", "cuda-graph-max-bs-decode"),
        speculating=speculative is not None,
        spec_method=speculative.method if speculative else None,
        spec_steps=None if candidate.arg("speculative-adaptive") else flag_count(candidate, "speculative-num-steps"),
        draft_tokens=flag_count(candidate, "speculative-num-draft-tokens"),
        all_reduce="nccl" if candidate.arg("disable-custom-all-reduce") else None,
        source="arguments",
    )


def _over_ranks(values: list[int | None], dp: int) -> int | None:
    """The sum over data-parallel ranks; where not all of them answered, what the least of the others gives."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return sum(known) if len(known) == dp else min(known) * dp


def _graph_max_batch(said: dict[str, Any]) -> int | None:
    """`cuda_graph_bs` holds what was planned; what was captured is said by 0.5.23 here, and else by the log alone."""
    if any(said.get(name) is True for name in ("disable_cuda_graph", "disable_decode_cuda_graph")):
        return 0
    if said.get("cuda_graph_backend_decode") == "disabled":
        return 0
    captured = said.get("decode_cuda_graph_bs")
    sizes = [size for size in map(count, captured) if size is not None] if isinstance(captured, list) else []
    return max(sizes, default=None)


def _digest(said: dict[str, Any], cap: int | None) -> str | None:
    """Of every resolved argument that could make a server another one; the planned graphs without those above the cap."""
    kept = {
        key: value
        for key, value in said.items()
        if key not in _VOLATILE | _COVERED and not names_secret(key) and not key.startswith(("_", "log_", "bucket_"))
    }
    if said.get("pp_size") == 1:
        kept.pop("pp_max_micro_batch_size", None)  # follows the cap, and means nothing without a pipeline
    for key in _BATCHES:
        if isinstance(kept.get(key), list):
            sizes = {size for size in map(count, kept[key]) if size is not None}
            kept[key] = sorted(size for size in sizes if cap is None or size <= cap)
    try:
        text = json.dumps(kept, sort_keys=True)
    except RecursionError:  # nested just so deep that it could be read
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:16]
