"""llama-server's lines and metrics. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from autotuner.rehearsal.batch import Step, Work
from autotuner.rehearsal.personalities import LoadStage
from autotuner.rehearsal.voice import Mouth, Said


@dataclass
class LlamaVoice(Mouth):
    """Speaks as llama-server does: hardly a word while it loads, then some lines for each request that ends."""

    exit_code_stopped: int = 0
    exit_code_failed: int = 1
    _tasks: int = 0

    def starting(self) -> Iterator[Said]:
        """The port first, then the load."""
        a = self.asked
        yield Said(self._line(f"srv          main: starting on {a.host}:{a.port}"), 0.2, "process", listens=True)
        yield Said(self._line(f"srv    load_model: loading model '{a.model}'"), 0.5, "weights")
        if a.draft_model:
            yield Said(self._line(f"srv    load_model: loading draft model '{a.draft_model}'"), 6.0, "weights")
        if a.method and a.acceptance and a.acceptance.mean_len is not None:
            said = (
                f"synthetic acceptance: n_max = {a.draft_tokens}, mean length = {a.acceptance.mean_len:.2f}: "
                "output is invalid"
            )
            yield Said(self._line(f"srv    load_model: {said}", "W"))
        slots = f"initializing, n_slots = {a.cap}, n_ctx_slot = {a.context_len}, kv_unified = 'false'"
        yield Said(self._line(f"srv    load_model: {slots}"), 8.0, "capture")
        yield Said(self._line("srv    load_model: warming up the model with an empty run"), 0.5, "warmup")
        yield Said(self._line("srv          main: model loaded"), 1.0)
        yield Said(self._line(f"srv          main: server is listening on http://{a.host}:{a.port}"))

    def step(self, step: Step) -> list[str]:
        """The timings of each request that ended with this step."""
        return [line for work in step.ended for line in self._timings(work)]

    def tick(self, now_s: float) -> list[str]:
        """Nothing: llama-server has no line for the whole server."""
        return []

    def access(self, peer: str, method: str, path: str, status: int) -> str:
        """Nothing at the usual verbosity."""
        return ""

    def stopping(self, *, noisy: bool) -> list[str]:
        """A clean end; some builds let an exception escape on the way."""
        lines = [self._line("srv    operator(): cleaning up before exit...")]
        return [*lines, "terminate called without an active exception\n"] if noisy else lines

    def out_of_memory(self, stage: LoadStage) -> list[str]:
        """Weights that do not fit, or a pool that does not."""
        what = "unable to allocate CUDA0 buffer" if stage == "weights" else "failed to allocate buffer for kv cache"
        lines = [
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 2304.00 MiB on device 0: cudaMalloc failed: out of memory",
            f"llama_model_load: error loading model: {what}",
            f"srv    load_model: failed to load model, '{self.asked.model}'",
            "srv          main: exiting due to model loading error",
        ]
        return [self._line(line, "E") for line in lines]

    def failed(self, error: str) -> list[str]:
        """One line."""
        return [self._line(error, "E")]

    def engine_died(self) -> list[str]:
        """There is only one process: it aborts."""
        return [self._line("CUDA error: an illegal memory access was encountered", "E")]

    def metrics(self) -> str:
        """Counters rise when a request ends; those of speculation exist without it, at 0."""
        ledger, batch = self.ledger, self.batch
        counters = {
            "prompt_tokens_total": ledger.prompt_tokens_ended,
            "prompt_tokens_cached_total": 0,
            "tokens_predicted_total": ledger.generated_ended,
            "n_decode_total": ledger.steps,
            "spec_decode_num_drafts_total": ledger.verified_ended,
            "spec_decode_num_draft_tokens_total": ledger.drafted_ended,
            "spec_decode_num_accepted_tokens_total": ledger.accepted_ended,
        }
        gauges = {"requests_processing": len(batch.running), "requests_deferred": batch.queued}
        lines = [f"# TYPE llamacpp:{name} counter\nllamacpp:{name} {value}" for name, value in counters.items()]
        lines += [f"# TYPE llamacpp:{name} gauge\nllamacpp:{name} {value}" for name, value in gauges.items()]
        return "\n".join(lines) + "\n"

    def _timings(self, work: Work) -> list[str]:
        self._tasks += 1
        head = f"slot print_timing: id {self._tasks % self.asked.cap:2d} | task {self._tasks} | "
        prompt_ms = 1000 * max(1e-6, work.began_s - work.ready_s)
        eval_ms = 1000 * max(1e-6, work.ended_s - work.began_s)
        lines = [
            _timing("prompt eval time", prompt_ms, work.prompt_tokens),
            _timing("       eval time", eval_ms, work.made),
            f"      total time = {prompt_ms + eval_ms:10.2f} ms / {work.prompt_tokens + work.made:5d} tokens",
            f"   graphs reused = {work.verified or work.made:10d}",
        ]
        if work.drafted:
            ratio, mean = work.accepted / work.drafted, 1 + work.accepted / work.verified
            drafts = f"({work.accepted:5d} accepted / {work.drafted:5d} generated), mean len = {mean:5.2f}"
            lines.append(f"draft acceptance = {ratio:.5f} {drafts}")
        return [self._line(head + line) for line in lines]

    def _line(self, text: str, level: str = "I") -> str:
        spent_us = int(self.stamps.since_start_s() * 1_000_000)
        minutes, rest = divmod(spent_us, 60_000_000)
        seconds, below = divmod(rest, 1_000_000)
        return f"{minutes}.{seconds:02d}.{below // 1000:03d}.{below % 1000:03d} {level} {text}\n"


def _timing(what: str, spent_ms: float, tokens: int) -> str:
    each_ms = spent_ms / max(1, tokens)
    rates = f"({each_ms:8.2f} ms per token, {1000 / each_ms:8.2f} tokens per second)"
    return f"{what} = {spent_ms:10.2f} ms / {tokens:5d} tokens {rates}"
