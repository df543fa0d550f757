"""SGLang's lines and metrics, as release 0.5.12 was recorded. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from autotuner.rehearsal.batch import Step
from autotuner.rehearsal.personalities import LoadStage
from autotuner.rehearsal.voice import OUT_OF_MEMORY, Mouth, Said, nccl_meets, shards, tqdm

KV_TOKENS = 684832
IDLE_GAUGES_S = 30.0  # so long the gauges stand as the last line of a batch left them, whatever has ended since
CAPTURE_SIZES = (1, 2, 4, 8, 12, 16, *range(24, 513, 8))
_TRACE = '  File "/opt/venv/lib/python3.12/site-packages/sglang/srt/managers/scheduler.py", line 3182, in run_scheduler_process'


@dataclass
class SGLangVoice(Mouth):
    """Speaks as SGLang does; its decode lines come every so many steps and cover what was served since the last."""

    exit_code_stopped: int = -9
    exit_code_failed: int = -9
    _line_at_s: float = 0.0
    _generated: int = 0
    _verified: int = 0
    _accepted: int = 0
    _rate: float = 0.0
    _accept_len: float = 0.0
    _gauges: tuple[int, int] = (0, 0)  # running and queued requests, as they were when a line was last written
    _gauges_at_s: float = 0.0

    def starting(self) -> Iterator[Said]:
        """Weights, pool, graphs, the drafter's, the port, the warm-up: about a minute as recorded."""
        a = self.asked
        yield Said("flashinfer.comm is not available, falling back to standard implementation\n", 1.0, "process")
        if a.reset_to_cap:
            yield Said(
                self._line(
                    f"Max running requests is reset to {a.cap} for speculative decoding. "
                    "You can override this by explicitly setting --max-running-requests."
                )
            )
        yield Said(self._line(f"server_args={self._arguments()}"), 1.0, "process")
        yield Said(self._line("Init torch distributed begin."), 20.0, "process", meets=True)
        yield from nccl_meets(a)
        yield Said(self._line("Init torch distributed ends. elapsed=0.26 s, mem usage=0.09 GB"), 0.3)
        broken = "Ignore import error when loading sglang.srt.models.mimo_audio: Can not import FA3 in sgl_kernel."
        yield Said(self._line(broken), 2.0)
        yield Said(self._line("Load weight begin. avail mem=139.13 GB"), 1.0, "weights")
        yield from shards("Loading safetensors checkpoint shards", 4, 6.0)
        end = "Load weight end. elapsed=6.13 s, type=LlamaForCausalLM, avail mem=125.36 GB, mem usage=13.77 GB."
        yield Said(self._line(end))
        yield Said(self._line("Using KV cache dtype: torch.bfloat16"))
        pool = f"KV Cache is allocated. #tokens: {KV_TOKENS}, K size: 41.80 GB, V size: 41.80 GB"
        yield Said(self._line(pool), 0.4)
        yield Said(self._line("Memory pool end. avail mem=41.60 GB"))
        if a.costs.graphs:
            yield from self._capture("cuda graph", 20.0)
        if a.draft_model:
            yield from self._drafter()
        if a.ranks.number:
            # Not recorded: the words of launch_dummy_health_check_server in sglang/srt/utils.
            yield Said(self._line(f"Starting dummy health check server at {a.host}:{a.port}"))
            return
        limits = (
            f"max_total_num_tokens={KV_TOKENS}, chunked_prefill_size=8192, max_prefill_tokens=16384, "
            f"max_running_requests={a.cap}, context_len={a.context_len}, available_gpu_mem=41.39 GB"
        )
        yield Said(self._line(limits), 1.0)
        yield Said(self._line(f"INFO:     Started server process [{self.pid}]"))
        yield Said(self._line("INFO:     Waiting for application startup."))
        yield Said(self._line("INFO:     Application startup complete."))
        up = f"INFO:     Uvicorn running on http://{a.host}:{a.port} (Press CTRL+C to quit)"
        yield Said(self._line(up), 0.2, "warmup", listens=True)
        yield Said(self._line("The server is fired up and ready to roll!"), 2.0)

    def step(self, step: Step) -> list[str]:
        """A line a prefill batch, and one every `--decode-log-interval` decode steps."""
        if step.kind == "prefill":
            self._gauges, self._gauges_at_s = (step.running, step.queued), step.at_s
            rate = step.tokens / step.took_s if step.took_s else 0.0
            return [
                self._line(
                    f"Prefill batch, #new-seq: {step.requests}, #new-token: {step.tokens}, #cached-token: 0, "
                    f"token usage: {self.tokens_held / KV_TOKENS:.2f}, #running-req: {step.running}, "
                    f"#queue-req: {step.queued}, #pending-token: 0, cuda graph: False, "
                    f"input throughput (token/s): {rate:.2f}"
                )
            ]
        if not step.requests or self.ledger.steps % self.asked.log_interval:
            return []
        return [self._decode(step)]

    def tick(self, now_s: float) -> list[str]:
        """No line, since SGLang counts steps; its gauges are set anew after a while without one."""
        if now_s - self._gauges_at_s > IDLE_GAUGES_S and not self.batch.running:
            self._gauges, self._gauges_at_s = (0, self.batch.queued), now_s
        return []

    def access(self, peer: str, method: str, path: str, status: int) -> str:
        """Uvicorn's line in SGLang's envelope."""
        words = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}.get(status, "Bad Request")
        return self._line(f'INFO:     {peer} - "{method} {path} HTTP/1.1" {status} {words}')

    def stopping(self, *, noisy: bool) -> list[str]:
        """As recorded: it speaks of a crash, and ends itself with SIGKILL."""
        child = self.pid + 1
        lines = [
            "SIGTERM received. signum=None frame=None. Draining requests and shutting down...",
            f"Subprocess scheduler_0 (pid={child}) crashed with exit code -15. Triggering SIGQUIT for cleanup...",
            "SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
        ]
        text = [self._line(line) for line in lines]
        if noisy:
            noise = (
                "[rank0]:[W1129 15:02:38.123456789 ProcessGroupNCCL.cpp:1524] Warning: WARNING: "
                "destroy_process_group() was not called before program exit, which can leak resources.\n"
            )
            leaked = (
                "/usr/lib/python3.12/multiprocessing/resource_tracker.py:279: UserWarning: resource_tracker: "
                "There appear to be 1 leaked shared_memory objects to clean up at shutdown\n"
            )
            text += [noise, leaked]
        return text

    def out_of_memory(self, stage: LoadStage) -> list[str]:
        """A scheduler's traceback, then the front end's word on it."""
        gone = f"CUDA out of memory. {OUT_OF_MEMORY}"
        if stage != "capture":
            return self.failed(f"torch.OutOfMemoryError: {gone}")
        return self.failed(
            f"torch.OutOfMemoryError: {gone}",
            "\nDuring handling of the above exception, another exception occurred:\n\n",
            f"Exception: Capture cuda graph failed: {gone}\n",
            "Possible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n",
            "2. set --cuda-graph-max-bs to a smaller value (e.g., 16)\n\n",
        )

    def failed(self, error: str, *more: str) -> list[str]:
        """A scheduler's traceback, then the front end's word on it."""
        head = self._line("Scheduler hit an exception: Traceback (most recent call last):")
        last = self._line("Received sigquit from a child process. It usually means the child failed.")
        return [head, f"{_TRACE}\n", "    scheduler = Scheduler(\n", f"{error}\n", *more, "\n", last]

    def engine_died(self) -> list[str]:
        """The scheduler was killed from outside."""
        crashed = (
            f"Subprocess scheduler_0 (pid={self.pid + 1}) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
        )
        return [self._line(crashed)]

    def metrics(self) -> str:
        """The series that are read, and some that are not; token counters rise when a request ends, gauges with a line."""
        ledger, a = self.ledger, self.asked
        labels = f'engine_type="unified",model_name="{a.model}"'
        rank = f'{labels},moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        right = (self._accept_len - 1) / a.draft_tokens if self._accept_len and a.draft_tokens else 0.0
        gauges = {
            "num_running_reqs": self._gauges[0],
            "num_queue_reqs": self._gauges[1],
            "num_retracted_reqs": 0,
            "gen_throughput": self._rate,
            "token_usage": self.tokens_held / KV_TOKENS,
            "num_used_tokens": self.tokens_held,
            "max_total_num_tokens": KV_TOKENS,
            "spec_accept_length": self._accept_len,
            "spec_accept_rate": right,
        }
        counters = {
            "prompt_tokens_total": ledger.prompt_tokens_ended,
            "generation_tokens_total": ledger.generated_ended,
            "cached_tokens_total": 0,
            "num_requests_total": ledger.received,
        }
        lines = [f"# TYPE sglang:{name} gauge\nsglang:{name}{{{rank}}} {float(v)}" for name, v in gauges.items()]
        lines += [f"# TYPE sglang:{name} counter\nsglang:{name}{{{labels}}} {float(v)}" for name, v in counters.items()]
        return "\n".join(lines) + "\n"

    def _decode(self, step: Step) -> str:
        ledger, a = self.ledger, self.asked
        seconds = step.at_s - self._line_at_s
        self._rate = (ledger.generated - self._generated) / seconds if seconds > 0 else 0.0
        verified, accepted = ledger.verified - self._verified, ledger.accepted - self._accepted
        self._line_at_s, self._generated = step.at_s, ledger.generated
        self._verified, self._accepted = ledger.verified, ledger.accepted
        self._gauges, self._gauges_at_s = (step.running, step.queued), step.at_s
        spoken = ""
        if a.method and verified:
            self._accept_len = 1 + accepted / verified
            rate = (self._accept_len - 1) / a.draft_tokens
            spoken = f"accept len: {self._accept_len:.2f}, accept rate: {rate:.2f}, "
        held = self.tokens_held
        return self._line(
            f"Decode batch, #running-req: {step.running}, #token: {held}, token usage: {held / KV_TOKENS:.2f}, "
            f"{spoken}cuda graph: {step.graph}, gen throughput (token/s): {self._rate:.2f}, #queue-req: {step.queued}"
        )

    def _capture(self, what: str, seconds: float) -> Iterator[Said]:
        sizes = [size for size in CAPTURE_SIZES if size <= max(1, self.asked.costs.graph_max_batch)]
        begin = f"Capture {what} begin. This can take up to several minutes. avail mem=41.51 GB"
        yield Said(self._line(begin), 0.1, "capture")
        if what == "cuda graph":
            yield Said(self._line(f"Capture cuda graph bs {sizes}"), 0.0, "capture")
        yield Said(tqdm("", 0, len(sizes), 0.0))
        for done, size in enumerate(reversed(sizes), 1):
            label = f"Capturing batches (bs={size} avail_mem=41.39 GB): "
            each_s = seconds / len(sizes)
            yield Said(tqdm(label, done, len(sizes), done * each_s), each_s, "capture")
        end = f"Capture {what} end. Time elapsed: {seconds:.2f} s. mem usage=0.12 GB. avail mem=41.39 GB."
        yield Said("\n" + self._line(end))

    def _drafter(self) -> Iterator[Said]:
        yield Said(self._line("Using draft model load_format: 'auto'"), 1.0, "weights")
        yield Said(self._line("Load weight begin. avail mem=41.44 GB"), 0.1, "weights")
        kind = "LlamaForCausalLMEagle3" if "EAGLE3" in self.asked.method else "LlamaForCausalLMEagle"
        kind = "LlamaForCausalLM" if self.asked.method == "STANDALONE" else kind
        yield Said(
            self._line(f"Load weight end. elapsed=0.81 s, type={kind}, avail mem=39.76 GB, mem usage=1.67 GB."), 0.8
        )
        if self.asked.costs.graphs:
            yield from self._capture("draft cuda graph", 4.0)
            yield from self._capture("draft extend cuda graph", 1.1)

    def _arguments(self) -> str:
        a = self.asked
        quoted = repr(a.method) if a.method else "None"
        steps = a.acceptance.drafted if a.acceptance else None
        return (
            f"ServerArgs(model_path={a.model!r}, host={a.host!r}, port={a.port}, max_running_requests={a.cap}, "
            f"watchdog_timeout=300.0, crash_dump_folder=None, enable_metrics={a.metrics}, attention_backend=None, "
            f"speculative_algorithm={quoted}, speculative_draft_model_path={a.draft_model or None!r}, "
            f"speculative_num_steps={steps}, disable_cuda_graph={not a.costs.graphs}, nnodes={a.ranks.count}, "
            f"node_rank={a.ranks.number})"
        )

    def _line(self, text: str) -> str:
        """Of several ranks each names itself; a rank on one node alone says nothing of it, as recorded."""
        rank = f" TP{self.asked.ranks.first_gpu}" if self.asked.ranks.count > 1 else ""
        return f"[{self.stamps.wall('%Y-%m-%d %H:%M:%S')}{rank}] {text}\n"
