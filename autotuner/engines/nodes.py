"""One server over several nodes: the flags that make each process a rank of it, and what a candidate must leave to us. Pure.

SGLang starts the same command on each node; rank 0 has the interface, the others a port that answers health checks and
nothing else (`launch_dummy_health_check_server` in sglang/srt/utils). vLLM without Ray starts `vllm serve` on the first and
the same with --headless on the others (`run_headless` in vllm/entrypoints/cli/serve.py); with --nnodes above 1 it takes the
backend "mp" by itself (vllm/config/parallel.py). Both put the GPUs of all nodes into one group: what is spread is tensor
parallelism times pipelines, the nodes sharing it evenly.
"""

from collections.abc import Mapping

from autotuner.core.candidate import Candidate
from autotuner.engines.base import Place, Rank

_OURS: Mapping[str, tuple[str, ...]] = {
    "sglang": ("dist-init-addr", "nccl-init-addr", "nnodes", "node-rank"),
    "vllm": ("nnodes", "n", "node-rank", "r", "master-addr", "master-port", "headless"),
}
_PARALLEL: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "sglang": (("tp-size", "tp", "tensor-parallel-size"), ("pp-size", "pp", "pipeline-parallel-size")),
    "vllm": (
        ("tensor-parallel-size", "tp"),
        ("pipeline-parallel-size", "pp"),
        ("data-parallel-size", "dp"),
    ),
}
# Each gives further nodes an interface of their own, and only rank 0's is looked at.
_SEVERAL_FRONTS = ("data-parallel-hybrid-lb", "data-parallel-external-lb", "data-parallel-rank")
_RAY = (
    'distributed-executor-backend = "ray" needs a Ray cluster, whose processes are neither autotuner\'s to stop nor to prove '
    'stopped; leave it out: several nodes are worked by vLLM\'s own "mp" (--nnodes)'
)


def sglang_flags(rank: Rank) -> tuple[str, ...]:
    """Given a rank, return SGLang's flags for it."""
    return (
        *("--dist-init-addr", _address(rank.meet), "--nnodes", str(rank.count)),
        *("--node-rank", str(rank.number)),
    )


def vllm_flags(rank: Rank, candidate: Candidate) -> tuple[str, ...]:
    """Given a rank, return vLLM's flags for it; one that is headless must not be asked for front ends."""
    common = ("--nnodes", str(rank.count), "--node-rank", str(rank.number))
    meet = ("--master-addr", rank.meet.host, "--master-port", str(rank.meet.port))
    if rank.number == 0:
        return (*common, *meet)
    none = ("--api-server-count", "0") if candidate.arg("api-server-count", "asc") is not None else ()
    return (*common, *meet, "--headless", *none)


def problems(candidate: Candidate, count: int) -> tuple[str, ...]:
    """Given a candidate for SGLang or vLLM, return what keeps it from being one server over so many nodes."""
    engine = candidate.engine
    named = [name for name in _OURS[engine] if candidate.arg(name) is not None]
    found = [f"args.{name} is not the candidate's to choose: the slot's nodes say it, rank by rank" for name in named]
    if engine == "vllm":
        found += [_RAY] if _uses_ray(candidate) else []
        several = [name for name in _SEVERAL_FRONTS if candidate.arg(name) not in {None, False}]
        found += [f"args.{name} is for several interfaces; over several nodes rank 0 alone answers" for name in several]
    if engine == "sglang" and _whole(candidate, ("dp-size", "dp", "data-parallel-size")) > 1:
        attention = candidate.arg("enable-dp-attention") or candidate.arg("attn-dp-size")
        found += [] if attention else ["SGLang spreads data parallelism over nodes only with args.enable-dp-attention"]
    if ranks_of(candidate) % count:
        found.append(
            f"its {ranks_of(candidate)} GPU ranks (tensor parallel times the rest) do not divide by {count} nodes"
        )
    return tuple(found)


def ranks_of(candidate: Candidate) -> int:
    """Given a candidate for SGLang or vLLM, return the GPUs that its flags ask for, over all nodes."""
    ranks = 1
    for names in _PARALLEL[candidate.engine]:
        ranks *= _whole(candidate, names)
    return ranks


def _uses_ray(candidate: Candidate) -> bool:
    backends = (candidate.arg("distributed-executor-backend"), candidate.arg("data-parallel-backend", "dpb"))
    return "ray" in backends


def _whole(candidate: Candidate, names: tuple[str, ...]) -> int:
    asked = candidate.arg(*names)
    return asked if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0 else 1


def _address(place: Place) -> str:
    host = f"[{place.host}]" if ":" in place.host else place.host
    return f"{host}:{place.port}"
