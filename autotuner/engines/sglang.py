"""SGLang: argv, environment, endpoints, facts from its log and metrics, and why it died.

Three readings are traps. "accept rate" had three definitions and the line does not say which, so it is kept as
printed and only the accept length is judged by. `Traceback` may stand in the dump of the server's arguments. After
our own SIGTERM the log speaks of a crash.
"""

import re
from dataclasses import replace

from autotuner.core.candidate import Candidate, flag_argv
from autotuner.engines import nccl_log, nodes, prometheus, sglang_flags, sglang_info, sglang_moves
from autotuner.engines.answers import dtype, word
from autotuner.engines.base import (
    Counters,
    Diagnosis,
    Effective,
    Endpoints,
    LogFact,
    Note,
    Place,
    Prefill,
    Rank,
    ServerExit,
    Speculation,
    Stage,
    StageSeen,
    Window,
)
from autotuner.engines.diagnosis import choose
from autotuner.engines.fields import NOTE_MAX, bar, group_of, is_raised, number, pairs, whole
from autotuner.engines.sglang_failures import BENIGN, DRAFT_SIGNATURES, DRAFTING, SIGNATURES
from autotuner.engines.wishes import Answer, Wish

# Seconds without any sign of progress. SGLang's own limits set the scale: below them it has not given up.
_SILENCE_S = {
    Stage.PROCESS: 600.0,  # torch's time limit for the ranks to find each other
    Stage.WEIGHTS: 600.0,  # a rank may be 480 s behind the first one (300 s up to 0.5.3) before SGLang raises
    Stage.DRAFT_WEIGHTS: 600.0,  # the same barrier
    Stage.KV_POOL: 300.0,  # seconds of work, but requantising after the last shard is silent for minutes
    Stage.JIT: 1200.0,  # "typically 10-20 mins" says the line that announces DeepGEMM's compilation
    Stage.GRAPH_CAPTURE: 600.0,  # a capture of 1334 s was seen, yet its bar moved; the first tick is slowest
    Stage.WARM_UP: 600.0,  # SGLANG_WARMUP_TIMEOUT
    Stage.HTTP_UP: 600.0,  # the warm-up request follows once HTTP is up, and prints nothing
    Stage.GENERATING: 450.0,  # --watchdog-timeout of 300 s, looked at every 150 s
}

_BATCH = re.compile(r"\b(Decode|Prefill) batch\b")
_RANK = re.compile(r"\b(?:ATTN_CP|MOE_DP|DP|PP|TP|EP|CP)\d+\b")
_ENVELOPE = re.compile(r"^\[\d{4}-[^\]]*\] ")
_RETRACTED = re.compile(r"#retracted_reqs?: (\d+)")
# Requests written out by --log-requests: text of users, in which any of the words below may stand.
_QUOTED = re.compile(r"\b(?:Receive|Finish)(?: request)?: (?:rid|obj)=")

_STAGES: tuple[tuple[re.Pattern[str], StageSeen], ...] = (
    (re.compile(r"Init (?:torch distributed|parallel) (?:begin|ends)"), StageSeen(Stage.PROCESS)),
    (re.compile(r"Load weight begin"), StageSeen(Stage.WEIGHTS)),
    (
        # Only the drafter's class gives it away: its load is announced in the same words as the target's.
        re.compile(r"Load weight end.{0,200}type=\w*(?:Eagle|NextN|Nextn|MTP|Mtp|DFlash|DSpark)"),
        StageSeen(Stage.DRAFT_WEIGHTS, ended=True),
    ),
    (re.compile(r"Load weight end|Committed real weights"), StageSeen(Stage.WEIGHTS, ended=True)),
    (re.compile(r"Using draft model load_format"), StageSeen(Stage.DRAFT_WEIGHTS)),
    (re.compile(r"Using KV cache dtype|KV Cache is allocated"), StageSeen(Stage.KV_POOL)),
    (re.compile(r"Memory pool end"), StageSeen(Stage.KV_POOL, ended=True)),
    (re.compile(r"(?i:finished loading) JIT ops"), StageSeen(Stage.JIT, ended=True)),
    (re.compile(r"Entering DeepGEMM JIT|FlashInfer autotun|Loading JIT ops"), StageSeen(Stage.JIT)),
    (re.compile(r"Capture [\w ]{0,40}graph begin", re.IGNORECASE), StageSeen(Stage.GRAPH_CAPTURE)),
    (re.compile(r"Capture [\w ]{0,40}graph end", re.IGNORECASE), StageSeen(Stage.GRAPH_CAPTURE, ended=True)),
    (re.compile(r"Application startup complete|Uvicorn running on"), StageSeen(Stage.HTTP_UP)),
    # SGLang warms up over its own HTTP port, so here the warm-up ends after HTTP came up.
    (re.compile(r"The server is fired up and ready to roll"), StageSeen(Stage.WARM_UP, ended=True)),
)
_BARS: tuple[tuple[re.Pattern[str], Stage], ...] = (
    (re.compile(r"^$|Capturing"), Stage.GRAPH_CAPTURE),  # its bar is drawn once before it gets its label
    (re.compile(r"loading", re.IGNORECASE), Stage.WEIGHTS),
    (re.compile(r"warm-?up|jit|autotun|compil", re.IGNORECASE), Stage.JIT),
)

# Per data-parallel rank, as are the key-value tokens: a server with N such ranks runs N times as many.
_CAP = re.compile(
    r"\bmax_running_requests=(\d+)|[Mm]ax running requests is reset to (\d+)"
    r"|max_running_requests is capped to (\d+)"
)
_KV_TOKENS = re.compile(r"\bmax_total_num_tokens=(\d+)|KV Cache is allocated.{0,200}#tokens: (\d+)")
_CONTEXT = re.compile(r"\bcontext_len=(\d+)")
_BACKEND = re.compile(r"Attention backend not [^.]{0,40}\. Use (\w+) backend")
_NO_CUSTOM_ALL_REDUCE = re.compile(r"Custom allreduce is disabled|Setup Custom allreduce failed")
_KV_DTYPE = re.compile(r"Using KV cache dtype: ([\w.]+)")
_DP = re.compile(r"\b(DP\d{1,4})\b")
# The target's own decode or verify graphs; a drafter's and the prefill's say nothing about the decode batch.
_GRAPHS = re.compile(
    r"Capture (?:cuda graph|target (?:decode|verify) CUDA graph begin.{0,300}?) ?\bbs ?=? ?\[([\d, ]+)\]"
)

_WARNING = re.compile(
    r"is reset to \d+ for speculative|max_running_requests (?:was reduced|is capped)|Retract requests"
    r"|Decode out of memory|Custom allreduce is disabled|Setup Custom allreduce failed"
    r"|memory capacity is unbalanced|KV pool holds|[Pp]erformance might be sub-?optimal"
    r"|speculative_num_draft_tokens is adjusted|overlap schedul.{0,80} disabled|Adaptive spec params updated"
    r"|Health check failed"
)
_ERROR = re.compile(
    r"hit an exception|graph failed:|[Ww]atchdog timeout \(|Watchdog caught collective|Initialization failed"
    r"|crashed with exit code (?!-15\b)|other ranks that didn't finish|scheduler (?:is dead|died)"
)


class SGLang:
    """Reader of SGLang 0.4.6 to 0.5.23; older decode lines are read too."""

    name = "sglang"

    def argv(self, candidate: Candidate, place: Place, rank: Rank | None = None) -> tuple[str, ...]:
        """`python -m sglang.launch_server`, which every release has; metrics are off unless asked for."""
        launch = candidate.launch
        metrics = () if candidate.arg("enable-metrics") is not None else ("--enable-metrics",)
        return (
            *self._program(candidate),
            *("--model-path", launch.model or "", "--host", place.host, "--port", str(place.port)),
            *metrics,
            *flag_argv(launch.args),
            *(nodes.sglang_flags(rank) if rank else ()),
        )

    def environment(self, candidate: Candidate) -> dict[str, str]:
        """Plain, ordered log lines, and processes that can be recognised."""
        return {
            "NO_COLOR": "1",  # escapes in a log that nobody watches on a terminal
            "PYTHONUNBUFFERED": "1",  # stdout and stderr go to one file and must keep their order
            "SPT_NOENV": "1",  # else setproctitle erases /proc/PID/environ, by which strays are recognised
            **candidate.launch.env,
        }

    def endpoints(self, candidate: Candidate) -> Endpoints:
        """The same in every release that is read here."""
        metrics = None if candidate.arg("enable-metrics") is False else "/metrics"
        return Endpoints(health="/health", metrics=metrics, flush_cache="/flush_cache")

    def info_paths(self, candidate: Candidate) -> tuple[str, ...]:
        """One answer that tells everything, under its two names."""
        return sglang_info.PATHS

    def read_info(self, path: str, text: str) -> Effective:
        """Limits, arguments as they were resolved, and the version."""
        return sglang_info.read(text)

    def asked(self, candidate: Candidate) -> Effective:
        """What the flags ask for."""
        return sglang_info.asked(candidate)

    def help_argv(self, candidate: Candidate) -> tuple[str, ...] | None:
        """`--help` of the very interpreter's SGLang."""
        return (*self._program(candidate), "--help")

    def check(self, candidate: Candidate) -> tuple[str, ...]:
        """Flags that contradict each other or the slot."""
        return sglang_flags.problems(candidate)

    def check_nodes(self, candidate: Candidate, count: int) -> tuple[str, ...]:
        """See nodes."""
        return nodes.problems(candidate, count)

    def speculation(self, candidate: Candidate) -> Speculation | None:
        """What --speculative-algorithm and its companions ask for."""
        return sglang_flags.speculation(candidate)

    def change(self, candidate: Candidate, wish: Wish, version: str | None) -> Answer:
        """See sglang_moves."""
        return sglang_moves.change(candidate, wish, version)

    def silence_limit_s(self, stage: Stage) -> float:
        """See the table."""
        return _SILENCE_S[stage]

    def read_line(self, line: str) -> tuple[LogFact, ...]:
        """Telemetry, stages, resolved limits and warnings on one line."""
        if "server_args=" in line:
            return (StageSeen(Stage.PROCESS), *_resolved(line.partition("server_args=")[2]))
        if _QUOTED.search(line):
            return ()
        if nccl_log.is_said(line):
            return nccl_log.read_line(line)
        return (*_telemetry(line), *_stage(line), *_effective(line), *_notes(line))

    def read_metrics(self, text: str) -> Counters:
        """Gauges and counters; `accepted` stays unknown: generated tokens include one of each prefill."""
        scrape = prometheus.samples(text)

        def total(name: str) -> float | None:
            return prometheus.total(scrape, f"sglang:{name}")

        return Counters(
            running=_over_ranks(scrape, "num_running_reqs"),
            queued=_over_ranks(scrape, "num_queue_reqs"),
            generated_tokens=total("generation_tokens_total"),
            prompt_tokens=total("prompt_tokens_total"),
            cached_prompt_tokens=total("cached_tokens_total"),
            drafts=total("spec_verify_calls_total"),  # 0.5.13 and later; raised when a request ends
            preemptions=_over_ranks(scrape, "num_retracted_requests_total"),
            accept_len=_accept_len(scrape),
        )

    def diagnose(self, exit_: ServerExit, lines: tuple[str, ...]) -> Diagnosis:
        """Why SGLang ended. Its exit status tells nothing: it ends itself with SIGKILL, as PID 1 with 0."""
        telling = tuple(line for line in lines if is_raised(line) or not _is_noise(line))
        drafting = any(DRAFTING.search(line) for line in lines)
        return choose((*DRAFT_SIGNATURES, *SIGNATURES) if drafting else SIGNATURES, exit_, telling)

    def _program(self, candidate: Candidate) -> tuple[str, ...]:
        return (candidate.launch.python or "python3", "-m", "sglang.launch_server")


def _is_noise(line: str) -> bool:
    return bool(BENIGN.search(line) or _QUOTED.search(line))


def _telemetry(line: str) -> tuple[LogFact, ...]:
    if retracted := whole(group_of(_RETRACTED, line)):
        return (Window(source="log", preemptions=retracted, rank=_rank(line)),)
    batch = _BATCH.search(line)
    if batch is None:
        return ()
    fields = pairs(line[batch.end() :])
    rank = _rank(line[: batch.start()])
    if batch.group(1) == "Prefill":
        return (_prefill(fields, rank),) if "#new-token" in fields else ()
    return _decode(fields, rank)


def _decode(fields: dict[str, str], rank: str) -> tuple[Window, ...]:
    """`accept rate` is kept as printed: 0.25 is nothing accepted in one release and a quarter in another."""
    window = Window(
        source="log",
        running=number(fields.get("#running-req")),
        queued=number(fields.get("#queue-req")),
        gen_tok_s=number(fields.get("gen throughput (token/s)")),
        accept_len=number(fields.get("accept len")),
        printed_rate=number(fields.get("accept rate")),
        graph=_graph(fields),
        rank=rank,
    )
    return (window,) if window != Window(source="log", rank=rank) else ()


def _prefill(fields: dict[str, str], rank: str) -> Prefill:
    return Prefill(
        tokens=whole(fields.get("#new-token")),
        cached=whole(fields.get("#cached-token")),
        running=number(fields.get("#running-req")),
        queued=number(fields.get("#queue-req")),
        rank=rank,
    )


def _graph(fields: dict[str, str]) -> bool | None:
    """The label names the device: `cuda graph`, `npu graph`. Releases before 0.4.6 do not print it."""
    value = next((value for key, value in fields.items() if key.endswith(" graph")), "")
    return {"T": True, "F": False}.get(value[:1])


def _rank(head: str) -> str:
    """The ranks in front of a message, as printed: `DP1 TP0`; which ones there are and their order vary."""
    return " ".join(_RANK.findall(head[-160:]))


def _stage(line: str) -> tuple[StageSeen, ...]:
    """A bar is drawn in front of whatever is glued to it, so what the line itself says comes last."""
    found = []
    progress = bar(line)
    if progress is not None:
        stage = next((stage for pattern, stage in _BARS if pattern.search(progress.label)), None)
        ended = progress.done == progress.total
        found.append(StageSeen(stage, progress.done, progress.total, ended) if stage else None)
    found.append(next((seen for pattern, seen in _STAGES if pattern.search(line)), None))
    return tuple(seen for seen in found if seen)


def _effective(line: str) -> tuple[Effective, ...]:
    """A rank's own limits carry its data-parallel rank; the tensor-parallel ranks of one say the same again."""
    sizes = [whole(size) or 0 for size in (group_of(_GRAPHS, line) or "").split(",")]
    found = Effective(
        running_cap=whole(group_of(_CAP, line)),
        kv_tokens=whole(group_of(_KV_TOKENS, line)),
        context_len=whole(group_of(_CONTEXT, line)),
        attention_backend=group_of(_BACKEND, line),
        graph_max_batch=max(sizes) or None,
        all_reduce="nccl" if _NO_CUSTOM_ALL_REDUCE.search(line) else None,
        kv_cache_dtype=dtype(group_of(_KV_DTYPE, line)),
    )
    envelope = _ENVELOPE.match(line)
    rank = group_of(_DP, envelope.group() if envelope else "") or ""
    return (replace(found, rank=rank),) if found != Effective() else ()


def _resolved(dump: str) -> tuple[Effective, ...]:
    """From the dump of the arguments, a ServerArgs(...) or a dict; its limits are requests, not facts."""
    algorithm = _argument(dump, "speculative_algorithm")
    off = "True" in {_argument(dump, name) for name in ("disable_cuda_graph", "disable_decode_cuda_graph")}
    # Custom all-reduce is the default wherever there is one to do; a later line says so if it could not be set up.
    custom = None if _argument(dump, "disable_custom_all_reduce") == "True" else "custom, nccl"
    found = Effective(
        attention_backend=_said(dump, "attention_backend"),
        graph_max_batch=0 if off or _argument(dump, "cuda_graph_backend_decode") == "disabled" else None,
        speculating=algorithm not in {"None", "null", ""} if algorithm is not None else None,
        spec_method=_said(dump, "speculative_algorithm"),
        spec_steps=whole(_said(dump, "speculative_num_steps")),
        draft_tokens=whole(_said(dump, "speculative_num_draft_tokens")),
        draft_quantization=_said(dump, "speculative_draft_model_quantization"),
        all_reduce=(custom or "nccl") if (whole(_argument(dump, "tp_size")) or 1) > 1 else None,
        quantization=_said(dump, "quantization"),
        kv_cache_dtype=dtype(_argument(dump, "kv_cache_dtype")),
        dp=whole(_argument(dump, "dp_size")),
        memory_share=number(_argument(dump, "mem_fraction_static")),
        source="arguments",
    )
    return (found,) if found != Effective(source="arguments") else ()


def _said(dump: str, name: str) -> str | None:
    """An argument that is not left open."""
    return word(_argument(dump, name))


def _argument(dump: str, name: str) -> str | None:
    return group_of(re.compile(rf"""\b{name}['"]?\s*[=:]\s*(?:'([^']*)'|"([^"]*)"|([\w.-]+))"""), dump)


def _notes(line: str) -> tuple[Note, ...]:
    text = _ENVELOPE.sub("", line)[:NOTE_MAX]
    if _ERROR.search(line) or is_raised(line):
        return (Note("error", text),)
    return (Note("warning", text),) if _WARNING.search(line) else ()


def _over_ranks(scrape: list[prometheus.Sample], name: str) -> float | None:
    """The sum over data-parallel ranks; the tensor-parallel ranks of one count the same requests again."""
    by_group: dict[str, float] = {}
    for sample in scrape:
        if sample.name == f"sglang:{name}":
            group = sample.labels.get("dp_rank", "")
            by_group[group] = max(sample.value, by_group.get(group, 0.0))
    return sum(by_group.values()) if by_group else None


def _accept_len(scrape: list[prometheus.Sample]) -> float | None:
    """The gauge holds the last window, 0 where nothing was ever verified; over ranks there is only a mean."""
    gauges = (sample.value for sample in scrape if sample.name == "sglang:spec_accept_length")
    known = [value for value in gauges if value >= 1]
    return sum(known) / len(known) if known else None
