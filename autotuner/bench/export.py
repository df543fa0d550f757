"""What a level measured, as files that other programs read: JSON, CSV, and the result files of vLLM and SGLang. Pure.

Field names are those of `vllm bench serve --save-result --save-detailed` (vLLM 0.32, vllm/benchmarks/serve.py) and of
`python -m sglang.bench_serving --output-file … --output-details` (SGLang 0.5, sglang/benchmark/serving.py). What is not known
is null. Their requests are those of the steady part, rates are the steady part's own, and as in these programs TTFT and latency
count from when a request was sent: how long an open loop held it back stands apart, in `queue_times`.
"""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.machine import MachineFigures, MachineSample
from autotuner.bench.measurement import BIN_S, Figures, LevelSamples, RequestSample, tpot_ms
from autotuner.core.statistics import quantile

FORMATS = ("json", "csv", "vllm", "sglang")
COLUMNS = (
    "level", "steady", "turn", "due_s", "sent_s", "first_s", "end_s", "ttft_ms", "tpot_ms", "e2e_ms", "send_late_ms",
    "prompt_tokens", "cached_tokens", "output_tokens", "asked_tokens", "events", "retried", "cut", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One level: what was asked, what came of it. `at` is when it was measured, `model` its name there."""

    benchmark: Benchmark
    figures: Figures
    samples: LevelSamples
    model: str | None
    at: str
    machine: MachineFigures | None = None
    machine_samples: tuple[MachineSample, ...] = ()
    accept_len: float | None = None


def exported(levels: Sequence[Measured], form: str) -> str:
    """Given levels and one of FORMATS, return the file's text.

    Several levels are lines of one file for vLLM (as its `--append-result` writes them) and SGLang (which always appends).
    """
    match form:
        case "csv":
            return _csv(levels)
        case "vllm":
            return "\n".join(json.dumps(vllm_result(level)) for level in levels) + "\n"
        case "sglang":
            return "".join(json.dumps(sglang_result(level)) + "\n" for level in levels)
        case _:
            return json.dumps([_everything(level) for level in levels], indent=1) + "\n"


def _everything(level: Measured) -> dict[str, Any]:
    samples = level.samples.model_dump(mode="json", exclude={"gaps"})
    for request, gaps in zip(samples["requests"], level.samples.gaps_us(), strict=False):
        request["gaps_us"] = list(gaps)
    return {
        "at": level.at,
        "model": level.model,
        "benchmark": level.benchmark.model_dump(mode="json"),
        "figures": level.figures.model_dump(mode="json"),
        "accept_len": level.accept_len,
        "machine": level.machine.model_dump(mode="json") if level.machine else None,
        "machine_samples": [sample.model_dump(mode="json") for sample in level.machine_samples],
        "samples": samples,
    }


def _csv(levels: Sequence[Measured]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    for level in levels:
        start, end = level.samples.steady_from_s, level.samples.steady_to_s
        for r in level.samples.requests:
            row = r.model_dump(include=set(COLUMNS)) | {
                "level": level.samples.concurrency,
                "steady": start is not None and end is not None and start <= r.began_s < end,
                "ttft_ms": _ms(r.began_s, r.first_s),
                "tpot_ms": None if r.error or (tpot := tpot_ms(r)) is None else round(tpot, 3),
                "e2e_ms": _ms(r.began_s, r.end_s),
                "send_late_ms": None if r.due_s is None else _ms(r.due_s, r.sent_s),
            }
            table.writerow(
                {key: str(value).lower() if isinstance(value, bool) else value for key, value in row.items()}
            )
    return text.getvalue()


def vllm_result(level: Measured) -> dict[str, Any]:
    """Given a level, return it as `vllm bench serve --save-result --save-detailed` writes it."""
    f, counted = level.figures, _Counted(level.samples)
    benchmark = level.benchmark
    result: dict[str, Any] = {
        "date": level.at.replace("-", "").replace(":", "").replace(" ", "-").rstrip("Z"),
        "endpoint_type": "openai-chat" if benchmark.endpoint == "chat" else "openai",
        "backend": "openai-chat" if benchmark.endpoint == "chat" else "openai",
        "label": None,
        "model_id": level.model,
        "tokenizer_id": None,
        "num_prompts": len(counted.requests),
        "request_rate": level.samples.concurrency if benchmark.load == "request-rate" else "inf",
        "burstiness": 1.0 if benchmark.load != "request-rate" or benchmark.arrivals == "poisson" else None,
        "max_concurrency": level.samples.concurrency if benchmark.load == "concurrency" else benchmark.max_concurrency,
        "duration": f.seconds,
        "completed": len(counted.good),
        "failed": len(counted.requests) - len(counted.good),
        "total_input_tokens": counted.prompt_tokens,
        "total_output_tokens": counted.output_tokens,
        "request_throughput": f.answered_req_s,
        "request_goodput": f.goodput_req_s,
        "output_throughput": f.output_tok_s,
        "total_token_throughput": f.total_tok_s,
        "input_lens": [r.prompt_tokens for r in counted.requests],
        "output_lens": counted.output_lens,
        "ttfts": counted.ttfts,
        "itls": counted.itls,
        "latencies": counted.latencies,
        "start_times": [r.sent_s for r in counted.requests],
        "queue_times": counted.queue_times,
        "generated_texts": None,
        "errors": [r.error for r in counted.requests],
        "max_output_tokens_per_s": _peak_tok_s(level.samples, f.tokens_per_event),
        "max_concurrent_requests": _peak_in_flight(level.samples),
        "rtfx": None,
    }
    if level.accept_len is not None:
        result["spec_decode_acceptance_length"] = level.accept_len
    for name, values in counted.tables(f):
        key = "e2el" if name == "e2e" else name
        result |= {f"mean_{key}_ms": values["mean"], f"median_{key}_ms": values["p50"], f"std_{key}_ms": values["std"]}
        result |= {f"p{p}_{key}_ms": values[f"p{p}"] for p in (90, 99)}
    return result


def sglang_result(level: Measured) -> dict[str, Any]:
    """Given a level, return it as `sglang.bench_serving --output-file … --output-details` writes it, as one JSON line."""
    f, counted, benchmark = level.figures, _Counted(level.samples), level.benchmark
    made_up = not benchmark.dataset
    rates: dict[str, Any] = {"concurrency": math.inf, "request-rate": level.samples.concurrency, "trace": "trace"}
    prompt_s = None if f.total_tok_s is None else f.total_tok_s - f.output_tok_s
    result: dict[str, Any] = {
        "tag": None,
        "backend": "sglang-oai-chat" if benchmark.endpoint == "chat" else "sglang-oai",
        "dataset_name": "random" if made_up else "custom",
        "request_rate": rates[benchmark.load],
        "max_concurrency": level.samples.concurrency if benchmark.load == "concurrency" else benchmark.max_concurrency,
        "sharegpt_output_len": None,
        "random_input_len": benchmark.prompt_tokens if made_up else None,
        "random_output_len": benchmark.output_tokens if made_up else None,
        "random_range_ratio": 1.0 if made_up else None,  # all of one length
        "server_info": None,
        "duration": f.seconds,
        "completed": len(counted.good),
        "total_input_tokens": counted.prompt_tokens,
        "total_input_text_tokens": counted.prompt_tokens,
        "total_input_vision_tokens": 0,
        "total_output_tokens": counted.output_tokens,
        "total_output_tokens_retokenized": None,
        "request_throughput": f.answered_req_s,
        "input_throughput": prompt_s,
        "output_throughput": f.output_tok_s,
        "total_throughput": f.total_tok_s,
    }
    for name, values in counted.tables(f):
        key = "e2e_latency" if name == "e2e" else name
        result |= {f"mean_{key}_ms": values["mean"], f"median_{key}_ms": values["p50"], f"std_{key}_ms": values["std"]}
        result |= {f"p{p}_{key}_ms": values[f"p{p}"] for p in (90, 95, 99)}
    return result | {
        "concurrency": _mean_in_flight(level.samples),
        "accept_length": level.accept_len,
        "max_output_tokens_per_s": _peak_tok_s(level.samples, f.tokens_per_event),
        "max_concurrent_requests": _peak_in_flight(level.samples),
        "input_lens": [r.prompt_tokens for r in counted.requests],
        "output_lens": counted.output_lens,
        "ttfts": counted.ttfts,
        "itls": counted.itls,
        "generated_texts": None,
        "errors": [r.error for r in counted.requests],
    }


class _Counted:
    """The requests that latencies are taken of, failed ones included, as the lists that these files have; in seconds."""

    def __init__(self, samples: LevelSamples) -> None:
        start = samples.steady_from_s
        gaps = samples.gaps_us() or (None,) * len(samples.requests)
        ended = [(r, g) for r, g in zip(samples.requests, gaps, strict=True) if not r.cut]
        pairs = [(r, g) for r, g in ended if start is not None and r.began_s >= start] or ended
        self.requests = [r for r, _ in pairs]
        self.good = [r for r in self.requests if not r.error]
        self.ttfts = [_since(r, r.first_s) for r in self.requests]
        self.latencies = [_since(r, r.end_s) for r in self.requests]
        self.queue_times = [None if r.due_s is None else r.sent_s - r.due_s for r in self.requests]
        self.itls = [None if g is None or r.error else [gap / 1e6 for gap in g] for r, g in pairs]
        self.output_lens = [0 if r.error else r.output_tokens for r in self.requests]
        self.prompt_tokens = _sum([r.prompt_tokens for r in self.good])
        self.output_tokens = _sum([r.output_tokens for r in self.good])

    def tables(self, figures: Figures) -> list[tuple[str, dict[str, float | None]]]:
        """Each latency's figures in milliseconds; of gaps that were not kept what was counted of them while it ran."""
        itl = _table([1000 * gap for gaps in self.itls for gap in gaps or ()])
        if itl["mean"] is None:
            itl |= {key: figures.itl_ms.get(key) for key in ("mean", "p50", "p90", "p99")}
        return [
            ("ttft", _table([1000 * t for t in self.ttfts if t is not None])),
            ("tpot", _table([tpot for r in self.good if (tpot := tpot_ms(r)) is not None])),
            ("itl", itl),
            ("e2e", _table([1000 * t for t in self.latencies if t is not None])),
        ]


def _since(request: RequestSample, at_s: float | None) -> float | None:
    return None if request.error or at_s is None else at_s - request.sent_s


def _table(values: list[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(("mean", "std", "p50", "p90", "p95", "p99"))
    ordered = sorted(values)
    found = {f"p{p}": quantile(ordered, p / 100) for p in (50, 90, 95, 99)}
    return {"mean": fmean(ordered), "std": pstdev(ordered), **found}


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _ms(begin_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else round(1000 * (end_s - begin_s), 3)


def _peak_tok_s(samples: LevelSamples, per_event: float) -> float | None:
    """The most tokens in one of the steady part's whole seconds."""
    size = round(1 / BIN_S)
    seconds = [sum(samples.bins[at : at + size]) for at in range(0, len(samples.bins) - size + 1, size)]
    return max(seconds) * per_event if seconds else None


def _spans(samples: LevelSamples) -> list[tuple[float, float]]:
    """From when to when each request was in flight; one that was cut off was until the steady part's end."""
    ends = [(r.sent_s, r.end_s if r.end_s is not None else samples.steady_to_s) for r in samples.requests]
    return [(sent_s, end_s) for sent_s, end_s in ends if end_s is not None and end_s > sent_s]


def _peak_in_flight(samples: LevelSamples) -> int:
    steps = sorted([(at, 1) for at, _ in _spans(samples)] + [(at, -1) for _, at in _spans(samples)])
    now = most = 0
    for _, step in steps:  # at one instant an end comes before a beginning
        now += step
        most = max(most, now)
    return most


def _mean_in_flight(samples: LevelSamples) -> float | None:
    start, end = samples.steady_from_s, samples.steady_to_s
    if start is None or end is None or end <= start:
        return None
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in _spans(samples)) / (end - start)
