"""The paths of each engine's HTTP interface but those that generate, and what they answer. Pure."""

import json
from dataclasses import dataclass
from typing import Any

from autotuner.rehearsal.asked import Asked
from autotuner.rehearsal.batch import Batch
from autotuner.rehearsal.voice import Voice

METRICS_KIND = "text/plain; version=0.0.4; charset=utf-8"
GENERATING = {"/v1/completions", "/v1/chat/completions"}


@dataclass(frozen=True)
class Answer:
    """A whole answer; `kind` is its content type."""

    status: int
    body: dict[str, Any] | str
    kind: str = "application/json"


LOADING = Answer(503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}})
NOT_FOUND = Answer(404, {"detail": "Not Found"})


def answer_to(path: str, body: dict[str, Any], asked: Asked, batch: Batch, voice: Voice) -> Answer:
    """Given a path of a server that is ready and what was sent there, return what it answers."""
    common = {
        "/tokenize": lambda: _tokenized(str(body.get("prompt", body.get("content", "")))),
        "/v1/models": lambda: Answer(200, {"object": "list", "data": [{"id": asked.model, "object": "model"}]}),
        "/metrics": lambda: _metrics(asked, voice),
    }
    table = {"sglang": _sglang, "vllm": _vllm, "llamacpp": _llamacpp}[asked.engine]
    found = {**common, **table(asked, batch)}.get(path)
    return found() if found is not None else NOT_FOUND


def _metrics(asked: Asked, voice: Voice) -> Answer:
    if asked.metrics:
        return Answer(200, voice.metrics(), METRICS_KIND)
    if asked.engine == "llamacpp":
        message = "This server does not support metrics endpoint. Start it with `--metrics`"
        return Answer(501, {"error": {"code": 501, "message": message, "type": "not_supported_error"}})
    return NOT_FOUND


def _tokenized(text: str) -> Answer:
    """A word is a token here, as in the counts of answers."""
    tokens = list(range(len(text.split())))
    return Answer(200, {"count": len(tokens), "tokens": tokens})


def _sglang(asked: Asked, batch: Batch) -> dict[str, Any]:
    model = Answer(200, {"model_path": asked.model, "is_generation": True, "weight_version": "default"})
    steps = asked.acceptance.drafted if asked.acceptance else None
    server = {
        "model_path": asked.model,
        "max_running_requests": asked.cap,
        "speculative_algorithm": asked.method or None,
        "speculative_num_steps": steps,
        "disable_cuda_graph": not asked.costs.graphs,
        "version": "0.5.12",
        "internal_states": [{"effective_max_running_requests_per_dp": asked.cap}],
    }
    loads = {"dp_rank": 0, "num_running_reqs": len(batch.running), "num_waiting_reqs": batch.queued}
    return {
        "/health": lambda: Answer(200, ""),
        "/health_generate": lambda: Answer(200, ""),
        "/model_info": lambda: model,
        "/get_model_info": lambda: model,
        "/server_info": lambda: Answer(200, server),
        "/get_server_info": lambda: Answer(200, server),
        "/v1/loads": lambda: Answer(200, {"loads": [loads]}),
        "/flush_cache": lambda: _flushed(batch),
    }


def _flushed(batch: Batch) -> Answer:
    if batch.running or batch.waiting:
        return Answer(400, "Flush cache failed: there are pending requests.\n", "text/plain")
    return Answer(200, "Cache flushed.\n", "text/plain")


def _vllm(asked: Asked, batch: Batch) -> dict[str, Any]:
    return {
        "/health": lambda: Answer(200, ""),
        "/ping": lambda: Answer(200, ""),
        "/version": lambda: Answer(200, {"version": "0.32.0"}),
    }


def _llamacpp(asked: Asked, batch: Batch) -> dict[str, Any]:
    slots = [
        {
            "id": number,
            "n_ctx": asked.context_len,
            "speculative": bool(asked.method),
            "is_processing": number < len(batch.running),
        }
        for number in range(asked.cap)
    ]
    props = {
        "default_generation_settings": {"n_ctx": asked.context_len},
        "total_slots": asked.cap,
        "model_path": asked.model,
        "build_info": "rehearsal",
        "is_sleeping": False,
    }
    return {
        "/health": lambda: Answer(200, {"status": "ok"}),
        "/v1/health": lambda: Answer(200, {"status": "ok"}),
        "/props": lambda: Answer(200, props),
        "/slots": lambda: Answer(200, json.dumps(slots)),
    }
