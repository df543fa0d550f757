"""Readings of a start and of an end: died, stopped, hung, loading, ready.

A slow load is never called a hang: that takes a silence beyond the stage's own limit, or a sign that what should move
does not. A word alone ends nothing: what was survived is noise.
"""

import re

from autotuner.engines.base import Diagnosis, Stage, StageSeen
from autotuner.engines.command import SIGNATURES as COMMAND
from autotuner.engines.diagnosis import find, since_ready
from autotuner.engines.evidence import FRIGHTENING, Evidence, Reading, reading
from autotuner.engines.llamacpp import SIGNATURES as LLAMACPP
from autotuner.engines.sglang_failures import BENIGN as SGLANG_BENIGN
from autotuner.engines.sglang_failures import DRAFT_SIGNATURES as SGLANG_DRAFT
from autotuner.engines.sglang_failures import SIGNATURES as SGLANG
from autotuner.engines.stages import silence_limit_s, stages_of
from autotuner.engines.vllm_failures import BENIGN as VLLM_BENIGN
from autotuner.engines.vllm_failures import DRAFT_SIGNATURES as VLLM_DRAFT
from autotuner.engines.vllm_failures import SIGNATURES as VLLM
from autotuner.engines.vocabulary import CAUSES, Action, State

HEARTBEAT_S = 120.0  # a repeated complaint this old is no busy moment any more
ITEM_FACTOR = 5  # an item that takes this many times its predecessor is stuck; below HEARTBEAT_S nothing is
USUAL_FACTOR = 5
SILENT_S = 30.0
REPEATS_MANY = 5

_BY_ENGINE = {"sglang": SGLANG, "vllm": VLLM, "llamacpp": LLAMACPP, "llama.cpp": LLAMACPP}
_READY = re.compile(r"fired up and ready to roll|Application startup complete|listening on http|server is listening")
_HEARTBEAT = re.compile(r"Health check failed|couldn't get a response from detokenizer")
_WAITING = re.compile(
    r"No available shared memory broadcast block|still waiting|Waiting for .{0,60}(?:engine|core|rank)"
)
_PARALLEL_INIT = re.compile(r"Init (?:torch distributed|parallel) begin|Init START|vLLM is using nccl|ncclCommInitRank")
_INIT_ENDS = re.compile(r"Init (?:torch distributed|parallel) ends|Init COMPLETE|Load weight begin|Starting to load")
_NO_IMPLEMENTATION = re.compile(
    r"no implementations specified for speculative|failed to initialize speculative decoding context"
    r"|speculative decoding (?:is )?(?:not supported|disabled|not enabled|turned off)|[Ii]gnoring speculative"
)
_VOCABULARY = re.compile(r"vocab\w*.{0,40}(?:must match|mismatch|does not match)")
_SLOTS = re.compile(r"is capped to \d+ by the mamba state cache|state cache is too small")
_GRAPHS_LOST = re.compile(
    r"setting cudagraph_mode=(?:PIECEWISE|NONE)|[Cc](?:uda|UDA) ?graphs? (?:is|are|will be) disabled|cudagraph.{0,40}overrid"
)
_DEFAULT_CAP = re.compile(r"[Mm]ax running requests is reset to \d+ for speculative")
_RESOLVED = re.compile(
    r"was reduced from (?:the )?requested|size reduced from \d+ to|is adjusted to|Unknown vLLM environment variable"
    r"|[Aa]ttention backend not"
    r"|max_model_len .{0,40}(?:reduced|capped)|fall(?:ing|s)? back to .{0,40}(?:backend|runner)|will be ignored"
    r"|n_ctx_slot .{0,40}capping|does not yet support|[Ff]alling back to V\d"
)
_DRAFTER_FLAG = "--speculative-draft-model-path"
_DRIVER_FAULT = re.compile(
    r"\bXid\b|GPU is probably locked|fallen off the bus|uncorrectable ECC|GPU is lost"
    r"|Unable to determine the device handle|No devices were found"
)
_P2P_HINT = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
SPEC_DEFAULT_CAP = 48  # SGLang 0.4.6 to 0.5.23 under speculation, where --max-running-requests is not given


def starting(evidence: Evidence) -> bool:
    """Tell whether the evidence is of a server that does not yet serve."""
    context = evidence.context
    if context.phase in {"level", "idle"} or evidence.decode or evidence.having("accept_len_tokens"):
        return False
    if context.phase == "starting" or context.became_ready is not None:
        return True
    return bool(stages_of(evidence)) or bool(_WAITING.search(evidence.text))


def _own_stop(evidence: Evidence) -> Reading | None:
    context = evidence.context
    if not (context.asked_to_stop or context.phase == "stopping"):
        return None
    return reading(State.STOPPED, "own-stop", "the server ended because it was told to")


def _host_gone(evidence: Evidence) -> Reading | None:
    if not evidence.context.host.rebooted:
        return None
    return reading(
        State.CRASHED,
        "host-down",
        "the host rebooted under the server",
        "find out why (power, heat, PCIe) before the queue goes on",
    )


def _gpu_fault(evidence: Evidence) -> Reading | None:
    fault = next((line.text for line in evidence.lines if _DRIVER_FAULT.search(line.text)), None)
    if fault is None:
        return None
    advice = "stop the queue: look at the kernel log, reset or reboot the host before this GPU is used again"
    return reading(State.CRASHED, "gpu-fault", "the GPU or its driver has failed", advice, evidence=(fault,))


def _no_fraction_fits(evidence: Evidence) -> Reading | None:
    """One fraction is too high for the GPU and one just below too low for the KV pool: between them is nothing."""
    by_server: dict[str | None, list[str]] = {}
    for line in evidence.lines:
        if line.known.mem_fraction_ratio is not None:
            by_server.setdefault(line.known.server, []).append(line.text)
    causes = {found.cause for lines in by_server.values() if (found := _fault(evidence, tuple(lines)))}
    if not ({"oom-in-load", "oom-in-capture"} & causes and "kv-too-small" in causes):
        return None
    sentence = "one memory fraction runs out of memory and a slightly lower one leaves no KV pool"
    return reading(State.CRASHED, "no-feasible-memory", sentence, "use more GPUs, a shorter context or no drafter")


def _died(evidence: Evidence) -> Reading | None:
    if not {"server-log", "kernel-log"} & set(evidence.sources):
        return None
    lines = _unsurvived(evidence)
    found = _fault(evidence, lines)
    died = evidence.context.exit_code is not None and not evidence.context.asked_to_stop
    if found is None and not died:
        return None
    if found is None or (found.cause == "unknown" and evidence.context.host.oom_killer):
        return _ended_unexplained(evidence)
    if _HEARTBEAT.search(found.evidence[0] if found.evidence else ""):
        return None  # a complaint about silence, not an end: see _silent_output
    found = _in_context(evidence, found)
    action = found.action or CAUSES[found.cause].action
    return reading(State.CRASHED, found.cause, found.sentence, found.advice, action=action, evidence=found.evidence)


def _ended_unexplained(evidence: Evidence) -> Reading:
    context = evidence.context
    if context.host.oom_killer:
        sentence = "the host's OOM killer ended a process of the server"
        return reading(State.CRASHED, "host-oom", sentence, "load with fewer workers at once, or a smaller model")
    if context.exit_code == 0:
        sentence = "the server ended with exit code 0 although nobody asked it to"
        return reading(State.CRASHED, "unknown", sentence, "an engine may end so after its workers died: read the log")
    sentence = f"the server ended (exit code {context.exit_code}) and its log names no cause"
    return reading(State.CRASHED, "unknown", sentence, "look at the kernel log (dmesg), and at lines further up")


def _fault(evidence: Evidence, lines: tuple[str, ...]) -> Diagnosis | None:
    """The first cause in time that the engine's own signatures name; then those of the other engines."""
    own = _BY_ENGINE.get(evidence.engine, COMMAND)
    others = tuple(s for group in (SGLANG, VLLM, LLAMACPP) if group is not own for s in group)
    draft = (*SGLANG_DRAFT, *VLLM_DRAFT) if evidence.context.speculates else ()
    return find((*draft, *own, *others), lines)


def _unsurvived(evidence: Evidence) -> tuple[str, ...]:
    """The lines that may tell of an end: none that the server outlived, none that only sound like one."""
    lines = since_ready(tuple(line.text for line in evidence.lines))
    alive = [number for number, text in enumerate(lines) if "Decode batch" in text or "Avg generation" in text]
    lines = lines[alive[-1] + 1 :] if alive else lines
    alone = "exiting due to" not in evidence.text  # llama-server goes on without speculation
    return tuple(t for t in lines if not (_is_benign(t) or (alone and _NO_IMPLEMENTATION.search(t))))


def _is_benign(text: str) -> bool:
    return bool(SGLANG_BENIGN.search(text) or VLLM_BENIGN.search(text))


def _in_context(evidence: Evidence, found: Diagnosis) -> Diagnosis:
    """What else is known may name the cause behind the one on the line."""
    context = evidence.context
    if found.cause in {"watchdog-timeout", "collective-timeout", "unknown"} and _p2p_decides(evidence):
        return Diagnosis(
            "p2p-blocked",
            "steps time out only with peer-to-peer transfer between the GPUs",
            "set NCCL_P2P_DISABLE=1 and disable custom all-reduce",
            found.evidence,
        )
    if found.cause in {"oom-in-load", "kv-too-small"} and _others_hold_memory(evidence):
        return Diagnosis(
            "device-busy",
            "another process holds the GPU's memory",
            "launch again once the memory is back; look with nvidia-smi",
            found.evidence,
        )
    last = last_stage(evidence)
    if found.cause == "collective-timeout" and last is not None and last.stage is Stage.WEIGHTS and not last.ended:
        advice = "put the model on a fast local disk, or load once to warm the page cache; then launch again"
        return Diagnosis("rank-skew", "ranks timed out while one still loaded its weights", advice, found.evidence)
    if found.cause == "unknown" and context.speculates and _DRAFTER_FLAG in context.args_absent:
        advice = f"give the drafter's path ({_DRAFTER_FLAG}): without it the target is taken for its own drafter"
        return Diagnosis(
            "bad-flag-combination", "the method needs a drafter and none was given", advice, found.evidence
        )
    if found.cause == "unknown" and context.host.oom_killer:
        return Diagnosis("host-oom", "the host's OOM killer ended a process of the server", "", found.evidence)
    return found


def _p2p_decides(evidence: Evidence) -> bool:
    arms = [arm for arm in evidence.context.arms if arm.p2p is not None and arm.outcome is not None]
    hung = any(arm.p2p and arm.outcome == "hung" for arm in arms)
    return hung and any(not arm.p2p and arm.outcome in {"served", "ready"} for arm in arms)


def _others_hold_memory(evidence: Evidence) -> bool:
    previous = evidence.context.previous
    if previous is not None and previous.gone is False:
        return True
    return bool(evidence.context.gpu.processes)


def _silent_output(evidence: Evidence) -> Reading | None:
    """Requests are there, the server lives, and nothing comes out for longer than any step takes."""
    context = evidence.context
    silent = context.seconds_since_tokens
    complains = bool(_HEARTBEAT.search(evidence.text))
    wanted = bool(context.load_present or context.in_flight_reqs)
    last = evidence.lines[-1] if evidence.lines else None
    works = last is not None and (last.get("new_tokens") is not None or last.get("progress_ratio") is not None)
    if works and (context.seconds_since_output or HEARTBEAT_S) < SILENT_S:
        return None  # a long prompt: no token comes before its end
    if silent is not None and silent >= HEARTBEAT_S and (wanted or complains):
        return reading(State.HUNG, "no-output", f"requests are waiting and no token came for {silent:.0f} s")
    if context.http.health == 200 and context.http.generate in {"timeout", "no-answer"}:
        return reading(State.HUNG, "no-output", "it answers its health check and generates nothing")
    many = (context.repeats_per_min or 0) * HEARTBEAT_S / 60 >= REPEATS_MANY and wanted
    if _WAITING.search(evidence.text) and wanted and (many or _all_busy(evidence)):
        return reading(State.HUNG, "no-output", "requests are in flight and the ranks wait for each other")
    if complains and not context.line_repeats:
        return reading(State.SERVING, "benign-noise", "one health probe found the server busy")
    return None


def _all_busy(evidence: Evidence) -> bool:
    used = evidence.context.gpu.utilisation_pct
    values = used if isinstance(used, list) else [used] if used is not None else []
    return bool(values) and min(values) >= 99 and (evidence.context.seconds_since_tokens or 0) >= HEARTBEAT_S


def _storage_stalls(evidence: Evidence) -> Reading | None:
    host = evidence.context.host
    if not (host.read_bytes_flat or host.process_state == "D") or not starting(evidence):
        return None
    last = last_stage(evidence)
    reads = last is None or (last.stage in {Stage.WEIGHTS, Stage.DRAFT_WEIGHTS} and not last.ended)
    if not reads or host.process_state == "R":
        return None  # there is nothing left to read, or it computes
    on = f" ({host.waits_for})" if host.waits_for else ""
    advice = "read the files without mmap (weight-loader-disable-mmap), or copy the model to a local disk"
    return reading(State.HUNG, "io-stall", f"it waits for storage that delivers nothing{on}", advice)


def _stuck(evidence: Evidence) -> Reading | None:
    """Silent beyond what the stage may be, judged by its own item time, its usual time, or the engine's limits."""
    context = evidence.context
    silence = context.silence_s
    if silence is None or not starting(evidence) or _ready_said(evidence):
        return None
    stages = stages_of(evidence)
    stage = stages[-1].stage if stages else Stage.PROCESS
    limit = silence_limit_s(evidence.engine, stage)
    usual = _usual_s(evidence)
    if usual is not None:
        limit = min(max(limit, usual), max(HEARTBEAT_S, USUAL_FACTOR * usual))
    item = _item_s(evidence)
    if item is not None and context.looks_unchanged:
        limit = min(limit, max(HEARTBEAT_S, ITEM_FACTOR * item))
    waits = _PARALLEL_INIT.search(evidence.text) and not _INIT_ENDS.search(evidence.text)
    if silence <= limit and not (waits and silence >= 2 * HEARTBEAT_S):
        return None
    if waits or _p2p_suspect(evidence):
        advice = "set NCCL_P2P_DISABLE=1 and disable custom all-reduce; check NCCL_SOCKET_IFNAME"
        cause = "p2p-blocked" if context.gpu.interconnect == "pcie" or not waits else "rendezvous-timeout"
        sentence = f"the ranks have said nothing since they began to connect, {silence:.0f} s ago"
        return reading(State.HUNG, cause, sentence, advice, action=Action.FIX_FLAGS)
    sentence = f"{stage.value} has been silent for {silence:.0f} s, more than this stage can be"
    return reading(State.HUNG, "silent-stage", sentence, action=Action.RELAUNCH_SAME)


def _item_s(evidence: Evidence) -> float | None:
    """Seconds an item of the bar that runs takes; None where the last bar is full: what comes after it has no items."""
    bars = evidence.having("done_count", "total_count")
    if not bars or (bars[-1].get("done_count") or 0) >= (bars[-1].get("total_count") or 0):
        return None
    return bars[-1].get("item_s")


def _usual_s(evidence: Evidence) -> float | None:
    """How long the stage that runs took before, in seconds; None where that is not known."""
    context = evidence.context
    stage = last_stage(evidence)
    if context.usual_step_s is None and stage is not None and stage.stage is Stage.GRAPH_CAPTURE:
        return context.previous.capture_s if context.previous is not None else None
    return context.usual_step_s


def _p2p_suspect(evidence: Evidence) -> bool:
    context = evidence.context
    return context.gpu.interconnect == "pcie" and any(name in context.env for name in _P2P_HINT)


def _inactive(evidence: Evidence) -> Reading | None:
    said = next((line.text for line in evidence.lines if _NO_IMPLEMENTATION.search(line.text)), None)
    if said is None:
        return None
    state = State.READY if _is_ready(evidence) else State.LOADING
    unlike = next((line.text for line in evidence.lines if _VOCABULARY.search(line.text)), None)
    if unlike is not None and '"speculative":' not in evidence.text:
        sentence = "drafter and target have different vocabularies, and it serves without speculation"
        return reading(
            state, "draft-mismatch", sentence, "use a drafter of the target's own family", evidence=(unlike,)
        )
    advice = "name the method (llama-server: --spec-type), or use a drafter that fits; do not benchmark it as it is"
    state = State.READY if _is_ready(evidence) else State.LOADING
    return reading(
        state, "speculation-inactive", "a drafter is configured, but nothing will be drafted", advice, evidence=(said,)
    )


def _limits(evidence: Evidence) -> Reading | None:
    """What the server says it resolved, against what was asked for or is documented."""
    context = evidence.context
    state = State.READY if _is_ready(evidence) else State.LOADING
    if slots := next((line.text for line in evidence.lines if _SLOTS.search(line.text)), None):
        advice = "raise max-mamba-cache-size or mamba-full-memory-ratio, or halve the state's type"
        sentence = "recurrent-state slots, not KV, limit the running requests"
        return reading(state, "state-slots-limit", sentence, advice, evidence=(slots,))
    if capped := next((line.text for line in evidence.lines if _DEFAULT_CAP.search(line.text)), None):
        advice = "set max-running-requests to the largest concurrency that is to be served"
        sentence = "the engine's default under speculation caps the running requests"
        return reading(state, "admission-cap", sentence, advice, evidence=(capped,))
    if lost := next((line.text for line in evidence.lines if _GRAPHS_LOST.search(line.text)), None):
        sentence = "the engine took CUDA graphs back that were asked for or are its default"
        advice = "use an attention backend that captures them with speculation, or judge without"
        return reading(state, "graphs-off", sentence, advice, evidence=(lost,))
    if resolved := next((line.text for line in evidence.lines if _RESOLVED.search(line.text)), None):
        sentence = "the server resolved a setting to another value than the one asked for"
        ours = any(name in resolved for name in context.env) or any(
            word.strip("-") in resolved for word in context.args
        )
        advice = "it has no effect as it is: take it away, or use what replaced it"
        action = Action.FIX_FLAGS if ours else None
        return reading(state, "effective-differs", sentence, advice, action=action, evidence=(resolved,))
    for line in evidence.having("kv_tokens", "context_tokens"):
        if (line.get("kv_tokens") or 0) < (line.get("context_tokens") or 0):
            sentence = f"the KV pool holds {line.get('kv_tokens'):.0f} tokens, less than one context"
            advice = "raise the memory fraction, or shrink the context or the drafter"
            return reading(state, "kv-too-small", sentence, advice, evidence=(line.text,))
    if differs := _cap_differs(evidence):
        return reading(state, "effective-differs", differs, "believe the start's own summary line, not the docs")
    return None


def _cap_differs(evidence: Evidence) -> str:
    context = evidence.context
    cap = next((v for line in evidence.lines if (v := line.get("max_running_reqs"))), None)
    if cap is None:
        return ""
    asked = context.arg("--max-running-requests", "--max-num-seqs", "--parallel", "-np")
    if asked is not None and asked.isdigit():
        each = max(1, int(asked) // (context.dp_size or 1))
        return (
            f"{asked} running requests were asked for, {cap:.0f} are in force" if cap not in {each, int(asked)} else ""
        )
    default = max(1, SPEC_DEFAULT_CAP // (context.dp_size or 1))
    if evidence.engine == "sglang" and context.speculates and cap != default:
        return f"{cap:.0f} running requests are in force, not the documented {default} under speculation"
    return ""


def _all_reduce(evidence: Evidence) -> Reading | None:
    line = next((line.text for line in evidence.lines if "Custom allreduce is disabled" in line.text), None)
    if line is None:
        return None
    state = State.READY if _is_ready(evidence) else State.LOADING
    sentence = "all-reduce goes through NCCL, as it must between more than two GPUs on PCIe"
    return reading(state, "collective-cost", sentence, "here NCCL variables matter", evidence=(line,))


def _ready(evidence: Evidence) -> Reading | None:
    if not _is_ready(evidence) or any(line.get("gen_tok_s") for line in evidence.lines):
        return None
    return reading(State.READY, "none", "the start is complete", action=Action.KEEP)


def _loading(evidence: Evidence) -> Reading | None:
    """Alive and not ready. Which stage is silent by nature, and which one moves, decides what to say."""
    context = evidence.context
    stages = stages_of(evidence)
    silence = context.silence_s or 0.0
    compiling = bool(stages) and stages[-1].stage is Stage.JIT and not stages[-1].ended
    if compiling and silence < HEARTBEAT_S:
        return reading(State.LOADING, "jit-compile", "kernels are being compiled, which takes minutes the first time")
    if _WAITING.search(evidence.text):
        busy = context.phase == "starting" and (context.seconds_since_output or 0) < HEARTBEAT_S
        state = State.LOADING if busy and not context.line_repeats else State.AMBIGUOUS
        return reading(state, "silent-stage", "ranks wait for one that is busy or hung; look at CPU and GPU")
    if compiling:
        return reading(State.LOADING, "jit-compile", "kernels are being compiled, which takes minutes the first time")
    if context.looks_unchanged and not _within_usual(evidence):
        sentence = f"the same progress was seen {context.looks_unchanged} times; one item may take that long"
        return reading(State.AMBIGUOUS, "silent-stage", sentence)
    if silence >= SILENT_S:
        return reading(State.LOADING, "silent-stage", "the stage prints nothing; a slow load is no hang")
    return reading(State.LOADING, "none", "it loads", action=Action.WAIT)


def _within_usual(evidence: Evidence) -> bool:
    usual, silence = _usual_s(evidence), evidence.context.silence_s
    return usual is not None and silence is not None and silence <= usual


def _survived(evidence: Evidence) -> Reading | None:
    """A start in which something sounds like a failure and is none."""
    noise = tuple(line.text for line in evidence.lines if FRIGHTENING.search(line.text))
    if not noise:
        return None
    state = State.READY if _is_ready(evidence) else State.LOADING
    action = Action.KEEP if state is State.READY else None
    return reading(state, "benign-noise", "frightening words that ended nothing", action=action, evidence=noise)


def _is_ready(evidence: Evidence) -> bool:
    return bool(evidence.context.became_ready) or _ready_said(evidence)


def _ready_said(evidence: Evidence) -> bool:
    return bool(_READY.search(evidence.text)) or evidence.context.http.health == 200


def last_stage(evidence: Evidence) -> StageSeen | None:
    """Given the evidence, return the last stage of a start that it shows, or None."""
    stages = stages_of(evidence)
    return stages[-1] if stages else None


ENDED = (_own_stop, _host_gone, _gpu_fault, _no_fraction_fits, _died, _silent_output, _storage_stalls, _stuck)
RESOLVED = (_inactive, _limits)
STARTING = (*RESOLVED, _all_reduce, _survived, _ready, _loading)
