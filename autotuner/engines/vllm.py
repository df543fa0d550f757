"""vLLM: argv, environment, endpoints, facts from its log and metrics, and why it died.

Its statistics come as two lines, one on load and one on speculation, and an idle server prints neither. Only
the text of a message is matched: the prefix, the file name and the process name changed between releases.
"""

import re
from dataclasses import replace

from autotuner.core.candidate import Candidate, flag_argv
from autotuner.engines import nccl_log, nodes, prometheus, vllm_flags, vllm_info, vllm_moves
from autotuner.engines.answers import dtype, word
from autotuner.engines.base import (
    Counters,
    Diagnosis,
    Effective,
    Endpoints,
    LogFact,
    Note,
    Place,
    Rank,
    ServerExit,
    Speculation,
    Stage,
    StageSeen,
    Window,
)
from autotuner.engines.diagnosis import choose
from autotuner.engines.fields import NOTE_MAX, bar, group_of, is_raised, number, pairs, whole
from autotuner.engines.vllm_failures import BENIGN, DRAFT_SIGNATURES, DRAFTING, SIGNATURES
from autotuner.engines.wishes import Answer, Wish

# Seconds without any sign of progress; vLLM has no limit on a load, so what can be silent sets them.
_SILENCE_S = {
    Stage.PROCESS: 600.0,  # torch's time limit for the ranks to find each other
    Stage.WEIGHTS: 600.0,  # a line a shard, but requantising after the last one is silent for minutes
    Stage.DRAFT_WEIGHTS: 600.0,  # the same
    Stage.KV_POOL: 300.0,  # seconds of work; profiling comes before it
    Stage.JIT: 1200.0,  # a cold torch.compile or FlashInfer autotuning prints nothing of use for many minutes
    Stage.GRAPH_CAPTURE: 600.0,  # its bar moves every few seconds, the first tick being the slowest
    Stage.WARM_UP: 600.0,  # compiles kernels that the capture did not
    Stage.HTTP_UP: 120.0,  # comes last and does no work
    Stage.GENERATING: 360.0,  # VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS of 300 s, then it takes the engine down
}

_ENGINE = re.compile(r"\bEngine (\d+): ")
_LOAD = re.compile(r"Avg (?:prompt|generation) throughput: ")
_SPECULATION = re.compile(r"SpecDecoding metrics: |(?=Mean acceptance length: )")
_POSITIONS = re.compile(r"Per-position acceptance rate: ((?:[\d.]+|nan)(?:, (?:[\d.]+|nan))*)")
_LEVEL = re.compile(r"(?:^|\s)(INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]{8} (?:\[[^\]]*\]|[\w./]+:\d+\]) ?(.*)")
# Requests written out by --enable-log-requests: text of users, in which any of the words below may stand.
_QUOTED = re.compile(r"\b(?:Received request|Generated response) \S+: ")

_STAGES: tuple[tuple[re.Pattern[str], StageSeen], ...] = (
    (
        re.compile(r"non-default args:|Initializing a V1 LLM engine|vLLM is using nccl"),
        StageSeen(Stage.PROCESS),
    ),
    (re.compile(r"Starting to load model"), StageSeen(Stage.WEIGHTS)),
    (re.compile(r"Loading drafter model"), StageSeen(Stage.DRAFT_WEIGHTS)),
    (re.compile(r"Loading weights took|Model loading took"), StageSeen(Stage.WEIGHTS, ended=True)),
    (
        re.compile(
            r"Dynamo bytecode transform|Compiling a graph|compiled graph\(s\)|saved AOT compiled"
            r"|Entering DeepGEMM|FlashInfer autotun|Warming up model for the comp|Using cache directory"
        ),
        StageSeen(Stage.JIT),
    ),
    (re.compile(r"Initial profiling/warmup run took|torch\.compile took"), StageSeen(Stage.JIT, ended=True)),
    (re.compile(r"Available KV cache memory"), StageSeen(Stage.KV_POOL)),
    (re.compile(r"KV cache size: "), StageSeen(Stage.KV_POOL, ended=True)),
    (re.compile(r"Profiling CUDA graph memory"), StageSeen(Stage.GRAPH_CAPTURE)),
    (re.compile(r"Graph capturing finished"), StageSeen(Stage.GRAPH_CAPTURE, ended=True)),
    (re.compile(r"init engine \([^()]{0,80}\) took"), StageSeen(Stage.WARM_UP, ended=True)),
    # Not "Starting vLLM server on", which is printed before anything listens.
    (re.compile(r"Application startup complete"), StageSeen(Stage.HTTP_UP)),
)
_BARS: tuple[tuple[re.Pattern[str], Stage], ...] = (
    (re.compile(r"Capturing"), Stage.GRAPH_CAPTURE),
    (re.compile(r"warm-?up|jit|autotun|compil", re.IGNORECASE), Stage.JIT),
    (re.compile(r"loading", re.IGNORECASE), Stage.WEIGHTS),
)

_CAP = re.compile(r"'max_num_seqs': (\d+)|Defaulting max_num_seqs to (\d+)")
_KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_CONTEXT = re.compile(r"Using max model len (\d+)|\bmax_seq_len=(\d+)|Maximum concurrency for ([\d,]+) tokens")
_BACKEND = re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+) attention backend")
_DUMP = re.compile(r"Initializing a V1 LLM engine [^:]{0,80} with config: ")
_EAGER = re.compile(r"\benforce_eager=True|'cudagraph_mode': <CUDAGraphMode\.(NONE)\b")
_LARGEST_GRAPH = re.compile(r"'max_cudagraph_capture_size': (\d+)")
_SPEC_TOKENS = re.compile(r"\bnum_spec_tokens=(\d+)")
_CONFIGURED = re.compile(r"\bspeculative_config=(None|SpeculativeConfig)")
_METHOD = re.compile(r"\bSpeculativeConfig\(method='([\w.-]+)'")
_VERSION = re.compile(r"\bengine \(v([^()\s]{1,40})\) with config")
_ARGUMENT = {
    name: re.compile(rf"\b{name}='?([\w.-]+)")
    for name in (
        *("tensor_parallel_size", "data_parallel_size", "disable_custom_all_reduce"),
        *("quantization", "kv_cache_dtype", "device_config"),
    )
}
_ALL_REDUCE = re.compile(r"Using \[([^\]]{1,200})\] all-reduce backends \(in dispatch order\) for (?:group )?'tp\b")
_NO_CUSTOM_ALL_REDUCE = re.compile(r"Custom allreduce is disabled|Setup Custom allreduce failed")
_CORE = re.compile(r"\bEngineCore_DP(\d{1,4})\b")

# Warnings of every healthy start, and the server's own words while we stop it.
_ROUTINE = re.compile(
    r"LD_PRELOAD|ulimit|Triton is not|\[shutdown\]|min_p and logit_bias|Reset SSM cache"
    r"|Inductor compilation was disabled"
)
# At level INFO, and printed by long compilations and by real hangs alike.
_UNCERTAIN = re.compile(r"No available shared memory broadcast block")


class VLLM:
    """Reader of vLLM 0.19 to 0.33."""

    name = "vllm"

    def argv(self, candidate: Candidate, place: Place, rank: Rank | None = None) -> tuple[str, ...]:
        """`vllm serve`; the older module vllm.entrypoints.openai.api_server warns that it will go away."""
        launch = candidate.launch
        return (
            *self._program(candidate),
            *("serve", launch.model or "", "--host", place.host, "--port", str(place.port)),
            *flag_argv(launch.args),
            *(nodes.vllm_flags(rank, candidate) if rank else ()),
        )

    def environment(self, candidate: Candidate) -> dict[str, str]:
        """Plain, ordered, frequent log lines; no early end to a load; processes that can be recognised."""
        return {
            "NO_COLOR": "1",  # FORCE_COLOR in the daemon's environment would put escapes into the log
            "PYTHONUNBUFFERED": "1",  # vLLM logs to stdout and its bars to stderr: one file, one order
            "SPT_NOENV": "1",  # else setproctitle erases /proc/PID/environ, by which strays are recognised
            "VLLM_ENGINE_READY_TIMEOUT_S": "3600",  # 600 by default, less than a load of 500 GB takes
            "VLLM_LOG_STATS_INTERVAL": "2",  # 10 by default: too few windows in a level of half a minute
            "VLLM_NO_USAGE_STATS": "1",  # a tuning host sends nothing to anybody
            **candidate.launch.env,
        }

    def endpoints(self, candidate: Candidate) -> Endpoints:
        """Without VLLM_SERVER_DEV_MODE there is neither /server_info nor a way to flush the prefix cache."""
        metrics = None if candidate.arg("disable-log-stats") else "/metrics"
        return Endpoints(health="/health", metrics=metrics)

    def info_paths(self, candidate: Candidate) -> tuple[str, ...]:
        """Each tells a part: the version, the context, the KV cache."""
        return vllm_info.paths(candidate)

    def read_info(self, path: str, text: str) -> Effective:
        """The part that is told at this path."""
        return vllm_info.read(path, text)

    def asked(self, candidate: Candidate) -> Effective:
        """What the flags ask for."""
        return vllm_info.asked(candidate)

    def help_argv(self, candidate: Candidate) -> tuple[str, ...] | None:
        """Plain `--help` names only the groups of flags."""
        return (*self._program(candidate), "serve", "--help=all")

    def check(self, candidate: Candidate) -> tuple[str, ...]:
        """Flags that contradict each other or the slot, or that no release reads."""
        return vllm_flags.problems(candidate)

    def check_nodes(self, candidate: Candidate, count: int) -> tuple[str, ...]:
        """See nodes."""
        return nodes.problems(candidate, count)

    def speculation(self, candidate: Candidate) -> Speculation | None:
        """What --speculative-config or its shortcuts ask for."""
        return vllm_flags.speculation(candidate)

    def change(self, candidate: Candidate, wish: Wish, version: str | None) -> Answer:
        """See vllm_moves."""
        return vllm_moves.change(candidate, wish, version)

    def silence_limit_s(self, stage: Stage) -> float:
        """See the table."""
        return _SILENCE_S[stage]

    def read_line(self, line: str) -> tuple[LogFact, ...]:
        """Telemetry, stages, resolved limits and warnings on one line."""
        if _is_quoted(line):
            return ()
        if nccl_log.is_said(line):
            return nccl_log.read_line(line)
        if spoken := _SPECULATION.search(line):
            return (_speculation_window(line[spoken.end() :]),)
        if _LOAD.search(line):
            return (_load_window(line),)
        notes = () if _DUMP.search(line) or "non-default args:" in line else _notes(line)
        return (*_stage(line), *_effective(line), *notes)

    def read_metrics(self, text: str) -> Counters:
        """Exact names only: every counter has a `_created` sample too, and acceptance one a position."""
        scrape = prometheus.samples(text)

        def total(name: str) -> float | None:
            return prometheus.total(scrape, f"vllm:{name}")

        cached = total("prompt_tokens_cached_total")
        return Counters(
            running=total("num_requests_running"),
            queued=total("num_requests_waiting"),
            generated_tokens=total("generation_tokens_total"),
            prompt_tokens=total("prompt_tokens_total"),
            cached_prompt_tokens=cached if cached is not None else total("prefix_cache_hits_total"),
            drafts=total("spec_decode_num_drafts_total"),
            drafted=total("spec_decode_num_draft_tokens_total"),
            accepted=total("spec_decode_num_accepted_tokens_total"),
            preemptions=total("num_preemptions_total"),
        )

    def diagnose(self, exit_: ServerExit, lines: tuple[str, ...]) -> Diagnosis:
        """Why vLLM ended. Its exit status tells nothing: it is 0 after the engine died while serving."""
        telling = tuple(line for line in lines if is_raised(line) or not _is_noise(line))
        drafting = any(DRAFTING.search(line) for line in lines)
        return choose((*DRAFT_SIGNATURES, *SIGNATURES) if drafting else SIGNATURES, exit_, telling)

    def _program(self, candidate: Candidate) -> tuple[str, ...]:
        """The operator's `vllm`, or the module behind it, for which no script needs to be on PATH."""
        launch = candidate.launch
        return (launch.binary,) if launch.binary else (launch.python or "python3", "-m", "vllm.entrypoints.cli.main")


def _is_quoted(line: str) -> bool:
    """The plain words first: the expression alone costs more than all else on a line of figures."""
    return ("Received request" in line or "Generated response" in line) and bool(_QUOTED.search(line))


def _is_noise(line: str) -> bool:
    return bool(BENIGN.search(line) or _is_quoted(line))


def _load_window(line: str) -> Window:
    fields = pairs(line[line.index("Avg ") :])
    return Window(
        source="log",
        running=number(fields.get("Running")),
        queued=number(fields.get("Waiting", fields.get("Pending"))),  # Pending: releases before V1
        gen_tok_s=number(fields.get("Avg generation throughput")),
        cache_hit=_hit(fields.get("Prefix cache hit rate")),
        prompt_tok_s=number(fields.get("Avg prompt throughput")),
        preemptions=whole(fields.get("Preemptions")) or 0,
        rank=_rank(line),
    )


def _speculation_window(text: str) -> Window:
    """The line names no engine; with several in one process it belongs to the load line before it."""
    fields = pairs(text)
    accept_len = number(fields.get("Mean acceptance length"))
    accepted, drafted = whole(fields.get("Accepted")), whole(fields.get("Drafted"))
    drafted_tok_s = number(fields.get("Drafted throughput"))
    return Window(
        source="log",
        accept_len=accept_len,
        # Both counts stand on the line, so here the rate has one definition.
        accept_rate=accepted / drafted if drafted and accepted is not None else None,
        certainty="derived",  # the verify steps are: the line does not state them
        drafts=_drafts(text, accept_len, accepted, drafted),
        drafted=drafted,
        accepted=accepted,
        seconds=round(drafted / drafted_tok_s, 2) if drafted and drafted_tok_s else None,
    )


def _hit(percent: str | None) -> float | None:
    value = number(percent)
    return value / 100 if value is not None else None


def _drafts(text: str, accept_len: float | None, accepted: int | None, drafted: int | None) -> int | None:
    """Verify steps, which the line does not state.

    If every draft had full depth they are drafted / depth, to the step. The printed length (two decimals)
    tells whether that holds; shorter drafts leave accepted / (length - 1), which is coarse near 1.
    """
    positions = group_of(_POSITIONS, text)
    if accepted is None or drafted is None:
        return None
    if not drafted:
        return 0
    if positions and accept_len is not None:
        full = drafted / len(positions.split(", "))
        if abs(1 + accepted / full - accept_len) <= 0.006:
            return round(full)
    return round(accepted / (accept_len - 1)) if accept_len and accept_len > 1 else None


def _rank(line: str) -> str:
    """Engine 0 stays unnamed: most servers have one engine, and the line on speculation names none."""
    engine = whole(group_of(_ENGINE, line))
    return f"DP{engine}" if engine else ""


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
    if _DUMP.search(line):
        return (_resolved(line),)
    found = Effective(
        running_cap=whole(group_of(_CAP, line)),
        kv_tokens=whole(group_of(_KV_TOKENS, line)),
        context_len=whole(group_of(_CONTEXT, line)),
        attention_backend=group_of(_BACKEND, line),
        all_reduce=_all_reduce(line),
    )
    if found == Effective():
        return ()
    if found.running_cap is not None:
        return (replace(found, rank="each"),)
    return (replace(found, rank=f"DP{whole(core)}" if (core := group_of(_CORE, line)) else ""),)


def _resolved(dump: str) -> Effective:
    """From the dump of the configuration, which the engine may have rewritten from what was asked for."""

    def argument(name: str) -> str | None:
        return group_of(_ARGUMENT[name], dump)

    configured = group_of(_CONFIGURED, dump)
    # Who else may serve is in a line of its own; that custom all-reduce is off is certain here.
    off = argument("disable_custom_all_reduce") == "True" and (whole(argument("tensor_parallel_size")) or 1) > 1
    return Effective(
        context_len=whole(group_of(_CONTEXT, dump)),
        graph_max_batch=_graph_max_batch(dump) if argument("device_config") != "cpu" else None,
        speculating=configured != "None" if configured else None,
        spec_method=group_of(_METHOD, dump),
        spec_steps=whole(group_of(_SPEC_TOKENS, dump)),
        all_reduce="nccl" if off else None,
        quantization=word(argument("quantization")),
        kv_cache_dtype=dtype(argument("kv_cache_dtype")),
        dp=whole(argument("data_parallel_size")),
        version=group_of(_VERSION, dump),
        source="arguments",
    )


def _all_reduce(line: str) -> str | None:
    """Who may carry the all-reduces of the tensor-parallel group, in the order in which they are asked."""
    if _NO_CUSTOM_ALL_REDUCE.search(line):
        return "nccl"
    named = group_of(_ALL_REDUCE, line)
    words = [part.strip(" '\"").lower() for part in named.split(",")] if named else []
    return word(", ".join("nccl" if part == "pynccl" else part for part in words if part))


def _graph_max_batch(dump: str) -> int | None:
    """Graphs are sized in tokens; a verify step takes 1 + K of them a request."""
    if _EAGER.search(dump):
        return 0
    tokens = whole(group_of(_LARGEST_GRAPH, dump))
    return tokens // (1 + (whole(group_of(_SPEC_TOKENS, dump)) or 0)) if tokens is not None else None


def _notes(line: str) -> tuple[Note, ...]:
    """Warnings and errors, a traceback's last line included; its frames would crowd out other evidence."""
    spoken = _LEVEL.search(line)
    if spoken is None:
        return (Note("error", line[:NOTE_MAX]),) if is_raised(line) else ()
    level, text = spoken.group(1), spoken.group(2)[:NOTE_MAX]
    if not text or text.startswith((" ", "Traceback (")) or _ROUTINE.search(line):
        return ()
    if level == "INFO":
        return (Note("warning", text),) if _UNCERTAIN.search(text) else ()
    return (Note("warning" if level == "WARNING" else "error", text),)
