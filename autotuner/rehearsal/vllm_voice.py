"""vLLM's lines and metrics, as release 0.32 was recorded. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from autotuner.rehearsal.batch import Step
from autotuner.rehearsal.personalities import LoadStage
from autotuner.rehearsal.voice import OUT_OF_MEMORY, Mouth, Said, nccl_meets, shards, tqdm

KV_TOKENS = 684_832
GRAPHS = 20
INTERVAL_S = 10.0


@dataclass
class VLLMVoice(Mouth):
    """Speaks as vLLM does; its two lines of statistics come by the clock and an idle server prints neither."""

    exit_code_stopped: int = 0
    exit_code_failed: int = 1
    interval_s: float = INTERVAL_S
    _at_s: float = 0.0
    _counts: tuple[int, ...] = (0, 0, 0, 0, 0)  # prompt tokens, generated, verified, drafted, accepted
    _positions: tuple[int, ...] = ()
    _idle: bool = True

    def starting(self) -> Iterator[Said]:
        """Arguments, engine, weights, compilation, pool, graphs, routes."""
        a = self.asked
        yield Said(self._api("api_utils.py:286", f"non-default args: {self._arguments()}"), 5.0, "process")
        if a.ranks.number:
            # Not recorded: the words of run_headless in vllm/entrypoints/cli/serve.py.
            meet = f"with head node address {a.ranks.host}:{a.ranks.port} for torch.distributed process group."
            yield Said(self._api("serve.py:215", f"Launching vLLM (v0.32.0) headless multiproc executor, {meet}"), 1.0)
        yield Said(self._api("model.py:2152", f"Using max model len {a.context_len}"), 2.0, "process")
        yield Said(self._core("core.py:133", self._dump()), 6.0, "process", meets=True)
        yield from nccl_meets(a)
        yield Said(self._core("cuda.py:300", "Using FLASH_ATTN attention backend out of potential backends."), 2.0)
        yield Said(self._core("gpu_model_runner.py:3021", f"Starting to load model {a.model}..."), 1.0, "weights")
        yield from shards("Loading safetensors checkpoint shards", 4, 8.0)
        yield Said(self._core("default_loader.py:501", "Loading weights took 8.02 seconds"))
        if a.draft_model:
            yield Said(self._core("gpu_model_runner.py:3050", "Loading drafter model..."), 1.0, "weights")
        took = "Model loading took 13.77 GiB memory and 9.10 seconds"
        yield Said(self._core("gpu_model_runner.py:3090", took), 1.0)
        yield Said(self._core("backends.py:612", "Dynamo bytecode transform time: 4.10 s"), 4.0)
        yield Said(self._core("monitor.py:34", "torch.compile took 9.20 s in total"), 5.0)
        yield Said(self._core("gpu_worker.py:298", "Available KV cache memory: 83.60 GiB"), 1.0)
        yield Said(
            self._core(
                "kv_cache_utils.py:2327",
                f"GPU KV cache size: {KV_TOKENS:,} tokens, Maximum concurrency for {a.context_len:,} tokens per request: "
                f"{KV_TOKENS / a.context_len:.2f}x",
            )
        )
        if a.costs.graphs:
            yield from self._capture(15.0)
        settled = "Warming up kernels that the capture did not"
        yield Said(self._core("kernel_warmup.py:40", settled), 0.5, "warmup")
        if a.ranks.number:
            return
        yield Said(self._core("core.py:402", "init engine (profile, create kv cache, warmup model) took 32.41 s"), 2.0)
        yield Said(self._api("entry.py:140", f"Starting vLLM server on http://{a.host}:{a.port}"), 1.0)
        yield Said(f"INFO:     Started server process [{self.pid}]\nINFO:     Waiting for application startup.\n")
        yield Said("INFO:     Application startup complete.\n", 0.2, listens=True)

    def step(self, step: Step) -> list[str]:
        """Nothing: vLLM goes by the clock."""
        return []

    def tick(self, now_s: float) -> list[str]:
        """The line on load and, where anything was drafted, the one on speculation."""
        seconds = now_s - self._at_s
        if seconds < self.interval_s:
            return []
        ledger = self.ledger
        now = (ledger.prompt_tokens, ledger.generated, ledger.verified, ledger.drafted, ledger.accepted)
        prompt, generated, verified, drafted, accepted = (b - a for a, b in zip(self._counts, now, strict=True))
        before = self._positions or (0,) * len(ledger.by_position)
        positions = tuple(b - a for a, b in zip(before, ledger.by_position, strict=True))
        self._at_s, self._counts, self._positions = now_s, now, tuple(ledger.by_position)
        idle = not (prompt or generated or self.batch.running or self.batch.waiting)
        was_idle, self._idle = self._idle, idle
        if (idle and was_idle) or not self.asked.metrics:
            return []
        lines = [
            self._api(
                "loggers.py:335",
                f"Engine 000: Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
                f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
                f"Running: {len(self.batch.running)} reqs, Waiting: {self.batch.queued} reqs, "
                f"GPU KV cache usage: {100 * self.tokens_held / KV_TOKENS:.1f}%, Prefix cache hit rate: 0.0%",
            )
        ]
        if verified:
            rates = ", ".join(f"{count / verified:.3f}" for count in positions)
            lines.append(
                self._api(
                    "metrics.py:120",
                    f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / verified:.2f}, "
                    f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
                    f"Drafted throughput: {drafted / seconds:.2f} tokens/s, Accepted: {accepted} tokens, "
                    f"Drafted: {drafted} tokens, Per-position acceptance rate: {rates}, "
                    f"Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%",
                )
            )
        return lines

    def access(self, peer: str, method: str, path: str, status: int) -> str:
        """Uvicorn's own line."""
        words = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}.get(status, "Bad Request")
        return f'INFO:     {peer} - "{method} {path} HTTP/1.1" {status} {words}\n'

    def stopping(self, *, noisy: bool) -> list[str]:
        """As recorded: it force-kills its own processes on a healthy way down."""
        core = self.pid + 1
        killing = "[shutdown] Process manager: force killing remaining"
        lines = [
            self._api("launcher.py:254", "[shutdown] API server: shutdown triggered"),
            self._api("launcher.py:270", "[shutdown] API server: stopping engine client mode=abort timeout=0s"),
            self._core("core.py:1454", "[shutdown] EngineCore: trigger received signal=SIGTERM"),
            self._api("utils.py:648", f"{killing} processes count=1", "WARNING"),
            self._api("utils.py:653", f"{killing} process EngineCore pid {core}", "WARNING"),
            self._api("launcher.py:304", "[shutdown] API server: shutting down FastAPI HTTP server"),
            "INFO:     Shutting down\nINFO:     Waiting for application shutdown.\n",
            "INFO:     Application shutdown complete.\n",
        ]
        if noisy:
            leaked = "resource_tracker: There appear to be 1 leaked semaphore objects to clean up at shutdown"
            lines.append(
                'nanobind: leaked 4 instances!\n - leaked instance 0x7fdc48450c68 of type "triton._C.libtriton.ir"\n'
            )
            lines.append(f"/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: {leaked}\n")
        return lines

    def out_of_memory(self, stage: LoadStage) -> list[str]:
        """The engine's traceback, then the front end's echo."""
        gone = f"CUDA out of memory. {OUT_OF_MEMORY}"
        where = "capture_model" if stage == "capture" else "load_model"
        return self._ended_by(
            f'  File "/opt/venv/lib/python3.12/site-packages/vllm/v1/worker/gpu_model_runner.py", line 4010, in {where}',
            f"torch.OutOfMemoryError: {gone}",
        )

    def failed(self, error: str) -> list[str]:
        """The same, from where ranks find each other."""
        where = '  File "/opt/venv/lib/python3.12/site-packages/vllm/v1/worker/gpu_worker.py", line 212, in init_device'
        return self._ended_by(where, error)

    def _ended_by(self, where: str, error: str) -> list[str]:
        head = ["EngineCore failed to start.", "Traceback (most recent call last):"]
        lines = [self._core("core.py:1020", text, "ERROR") for text in (*head, where, error)]
        echo = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}\n"
        return [*lines, f"(APIServer pid={self.pid}) Traceback (most recent call last):\n", echo]

    def engine_died(self) -> list[str]:
        """The engine's last words, and the front end's clean way out, with exit code 0."""
        fatal = [
            "EngineCore encountered a fatal error.",
            "Traceback (most recent call last):",
            "RuntimeError: Worker proc VllmWorker-0 died unexpectedly (exit code: -11)",
        ]
        lines = [self._core("core.py:1040", text, "ERROR") for text in fatal]
        dead = "AsyncLLM output_handler failed: EngineDeadError: EngineCore encountered an issue."
        lines.append(self._api("async_llm.py:701", dead, "ERROR"))
        return [*lines, "INFO:     Shutting down\nINFO:     Application shutdown complete.\n"]

    def metrics(self) -> str:
        """The series that are read, each counter with its `_created` sample."""
        batch, ledger, a = self.batch, self.ledger, self.asked
        labels = f'engine="0",model_name="{a.model}"'
        lines = [
            f"vllm:num_requests_running{{{labels}}} {float(len(batch.running))}",
            f"vllm:num_requests_waiting{{{labels}}} {float(batch.queued)}",
            f"vllm:kv_cache_usage_perc{{{labels}}} {self.tokens_held / KV_TOKENS}",
        ]
        counters = {
            "prefix_cache_hits": 0,
            "num_preemptions": 0,
            "prompt_tokens": ledger.prompt_tokens,
            "prompt_tokens_cached": 0,
            "generation_tokens": ledger.generated,
        }
        if a.method:
            counters |= {
                "spec_decode_num_drafts": ledger.verified,
                "spec_decode_num_draft_tokens": ledger.drafted,
                "spec_decode_num_accepted_tokens": ledger.accepted,
            }
        for name, value in counters.items():
            lines.append(f"# TYPE vllm:{name}_total counter\nvllm:{name}_total{{{labels}}} {float(value)}")
            lines.append(f"vllm:{name}_created{{{labels}}} 1.7959687527544e+09")
        for position, count in enumerate(ledger.by_position):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{{labels},position="{position}"}} {float(count)}')
        return "\n".join(lines) + "\n"

    def _capture(self, seconds: float) -> Iterator[Said]:
        yield Said(self._core("gpu_model_runner.py:3900", "Profiling CUDA graph memory: PIECEWISE=20"), 1.0, "capture")
        label = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE): "
        for done in range(GRAPHS + 1):
            each_s = seconds / GRAPHS if done else 0.0
            yield Said(tqdm(label, done, GRAPHS, done * each_s), each_s, "capture")
        finished = f"Graph capturing finished in {seconds:.0f} secs, took 0.62 GiB"
        yield Said("\n" + self._core("gpu_model_runner.py:3950", finished), 0.1)

    def _arguments(self) -> dict[str, object]:
        a = self.asked
        shown: dict[str, object] = {"model_tag": a.model, "host": a.host, "port": a.port, "max_num_seqs": a.cap}
        if a.method:
            shown["speculative_config"] = {"method": a.method, "num_speculative_tokens": a.draft_tokens}
        return shown

    def _dump(self) -> str:
        a = self.asked
        spec = "None"
        if a.method:
            drafter = a.draft_model or None
            spec = f"SpeculativeConfig(method={a.method!r}, model={drafter!r}, num_spec_tokens={a.draft_tokens})"
        graphs = a.costs.graph_max_batch * (1 + (a.draft_tokens if a.method else 0))
        return (
            f"Initializing a V1 LLM engine (v0.32.0) with config: model={a.model!r}, speculative_config={spec}, "
            f"max_seq_len={a.context_len}, enforce_eager={not a.costs.graphs}, "
            f"compilation_config={{'max_cudagraph_capture_size': {graphs}}}"
        )

    def _api(self, where: str, text: str, level: str = "INFO") -> str:
        if self.asked.ranks.number:  # headless: there is no such process
            return f"{level} {self.stamps.wall('%m-%d %H:%M:%S')} [{where}] {text}\n"
        return f"(APIServer pid={self.pid}) {level} {self.stamps.wall('%m-%d %H:%M:%S')} [{where}] {text}\n"

    def _core(self, where: str, text: str, level: str = "INFO") -> str:
        who = f"Worker_TP{self.asked.ranks.first_gpu}" if self.asked.ranks.number else "EngineCore"
        return f"({who} pid={self.pid + 1}) {level} {self.stamps.wall('%m-%d %H:%M:%S')} [{where}] {text}\n"
