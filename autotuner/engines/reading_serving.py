"""Readings of a server that answers: what its windows say, and why they may not be used as they are.

First what makes a figure unusable (leaked requests, a defect, a gap), then what caps the server beside the candidate's
merit (slots, KV, graphs), then speculation, then the prefix cache.
"""

import re
from itertools import pairwise

from autotuner.engines import reading_speculation as speculation
from autotuner.engines.evidence import FRIGHTENING, Evidence, Line, Reading, reading
from autotuner.engines.reading_arms import COMPARING
from autotuner.engines.vocabulary import Action, State

COLLAPSE_RATIO = 4.0
HIT_PCT_MAX = 1.0  # on prompts that are meant to be all different
FULL_RATIO = 0.97
SLOTS_RATIO = 0.8
LASTING_MIN = 3
WAITING_MIN = 0.05  # of the level's requests; fewer wait for a moment without any cap
FILLING_RATIO = 100.0  # prompt tokens worked for each one generated
ALIKE_MIN = 2
OFFERED_RATIO = 0.9
CHANGED_RATIO = 1.2
TAINTED_SHARE = 0.25  # of a long log a few such lines say nothing
NOISE_SHARE = 0.1  # in a long log a few such words are no finding
HARMLESS_RATIO = 0.8
GAP_RATIO = 0.2  # the first line after idling holds a tiny share of what the next one shows

_S = State.SERVING
_PLAIN_FALLBACK = re.compile(r"plain decode fallback|fall(?:ing|s)? back to plain decod")
_RETRACT = re.compile(
    r"Retract requests|Decode out of memory|find free space in the KV cache|Context size has been exceeded"
)
_TRANSFER = re.compile(r"KVTransferError|[Tt]ransfer failed|Failed to get kvcache")
_PREEMPT = re.compile(r"is preempted by|[Pp]reempt\w* (?:because|due)")
_SLOWDOWN_SAID = re.compile(r"(?:Power Cap|Slowdown)\s*: Active")
_SLOWDOWN = re.compile(r"slowdown|thermal|power_cap|power_brake")
_JIT_IN_LEVEL = re.compile(
    r"JIT compilation during inference|Loading JIT ops|JIT Pre-Compile session|Compiling a graph"
)
_NO_STATS = re.compile(r"disabling stats logging|stats logging (?:is )?disabled")
_OURS = re.compile(r"sglang::|VLLM::|vllm|sglang|llama-server", re.IGNORECASE)
_GRAPHS_OFF_ARGS = ("--disable-cuda-graph", "--disable-decode-cuda-graph", "--enforce-eager")
_GRAPH_BATCH_ARGS = ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode")


def _unlogged(evidence: Evidence) -> Reading | None:
    line = next((line.text for line in evidence.lines if _NO_STATS.search(line.text)), None)
    if line is None or evidence.decode:
        return None
    sentence, advice = "this server prints no figures in its log", "read /metrics and add its engines"
    return reading(_S, "metric-scope", sentence, advice, evidence=(line,))


def _neighbour(evidence: Evidence) -> Reading | None:
    """The same load and acceptance, and another step time: something beside the candidate changed."""
    context = evidence.context
    foreign = [str(p) for p in context.gpu.processes or () if not _OURS.search(str(p))]
    lines = [line for line in evidence.decode if line.get("gen_tok_s") and line.running]
    rates = [line.get("gen_tok_s") or 0.0 for line in lines if line.running == lines[0].running]
    rates = rates or [arm.speed for arm in context.arms if arm.run is not None and arm.speed]
    changed = len(rates) > 1 and rates[0] > CHANGED_RATIO * rates[-1]
    quiet = not evidence.having("new_tokens") and not any(line.known.after for line in evidence.lines)
    same = ("boot" in context.same and "load" in context.same) or (context.recovered_after_s is not None and quiet)
    if not changed or not (same or foreign):
        return None
    if foreign:
        sentence = f"another process is on the GPU ({foreign[0]}), and the same load became slower"
        advice = "get it off the GPU, then measure again; the candidate is not to blame"
        return reading(_S, "host-contention", sentence, advice, action=Action.LOOK_OUTSIDE)
    sentence = "the same load on the same boot became slower: look at clocks, memory and neighbours"
    return reading(_S, "host-contention", sentence, "measure again, arms interleaved")


def _hot(evidence: Evidence) -> Reading | None:
    hot = [
        line.text
        for line in evidence.lines
        if _SLOWDOWN.search(str(line.figures.get("active_reasons", ""))) or _SLOWDOWN_SAID.search(line.text)
    ]
    if not hot:
        return None
    advice = "warm the GPUs to a steady state before comparing, or interleave the arms; record clocks and caps"
    sentence = "the driver holds the clocks down for heat or power"
    return reading(_S, "thermal-or-power-limit", sentence, advice, evidence=tuple(hot))


def _leaked(evidence: Evidence) -> Reading | None:
    ours = evidence.context.in_flight_reqs
    running = [line for line in evidence.loads if line.running > 0]
    lasting = ours == 0 or (evidence.context.windows_alike or 0) >= LASTING_MIN
    if ours is None or not running or running[-1].running <= ours or not lasting:
        return None
    sentence = f"{running[-1].running:.0f} requests run, {ours} of them are ours"
    advice = "restart it; nobody waits for these requests, and they take their share of every step"
    return reading(State.DEGRADED, "leaked-requests", sentence, advice, evidence=(running[-1].text,))


def _unservable(evidence: Evidence) -> Reading | None:
    context = evidence.context
    stuck = [line for line in evidence.decode if line.running == 0 and (line.get("queue_reqs") or 0) >= 1]
    if context.prompts.longer_than_kv_pool:
        stuck += [line for line in evidence.lines if FRIGHTENING.search(line.text)]
    alone = context.prompts.longer_than_kv_pool or (context.line_repeats and context.in_flight_reqs)
    if not stuck or not alone:
        return None
    advice = "limit the context, or refuse such requests; abort it and the others are served"
    sentence = "a request can never be admitted: it is longer than the pool"
    return reading(_S, "request-unservable", sentence, advice, evidence=(stuck[-1].text,))


def _collapsed(evidence: Evidence) -> Reading | None:
    """Fast once, slow ever since at about the same load: the engine's own state has gone bad."""
    context = evidence.context
    lines = [line for line in evidence.decode if line.get("gen_tok_s")]
    if context.restart_restores:
        advice = "restart it and measure early and late; the drift is not the candidate's"
        return reading(State.DEGRADED, "engine-state-bad", "a restart brings the first figure back", advice)
    if len(lines) < 2 or context.recovered_after_s is not None:
        return None
    first, last = lines[0], lines[-1]
    fell = (first.get("gen_tok_s") or 0) > COLLAPSE_RATIO * max(last.get("gen_tok_s") or 0, *context.later_tok_s, 0.01)
    alike = last.running >= 0.5 * first.running > 0
    lasting = bool(context.later_tok_s) or (context.windows_alike or 0) >= 3
    if not (fell and alike and lasting):
        return None
    sentence = f"it fell from {first.get('gen_tok_s'):.0f} to {last.get('gen_tok_s'):.0f} tok/s and did not recover"
    advice = "restart it, and keep the KV pool below full: fewer requests at once, or shorter ones"
    return reading(State.DEGRADED, "engine-state-bad", sentence, advice, evidence=(first.text, last.text))


def _wrong_text(evidence: Evidence) -> Reading | None:
    if evidence.context.output_text not in {"empty", "one-repeated-token"}:
        return None
    if any((line.get("reasoning_tokens") or 0) >= (line.get("completion_tokens") or 1) for line in evidence.lines):
        sentence = "all of its tokens are in the reasoning channel, where no text is looked for"
        return reading(_S, "metric-scope", sentence, "count the tokens of usage; allow more of them for an answer")
    advice = "do not serve it; forced NCCL protocols and lossy settings are the first suspects"
    return reading(State.DEGRADED, "output-corrupt", f"the generated text is {evidence.context.output_text}", advice)


def _defect(evidence: Evidence) -> Reading | None:
    """A figure that cannot be: more accepted than drafted, longer than the depth allows, a share above one."""
    for line in evidence.lines:
        accepted, drafted = line.get("accepted_tokens"), line.get("drafted_tokens")
        more = accepted is not None and drafted is not None and accepted > drafted
        longest = (evidence.context.depth or 10**6) + 1.01
        beyond = (line.get("accept_len_tokens") or 0) > longest
        share = (line.get("accept_rate_ratio") or 0) > 1.001 or (line.get("accept_rate_pct") or 0) > 100.1
        if more or beyond or share:
            advice = "take acceptance from another source: counters, the reply's own figures, end-of-request totals"
            return reading(
                _S, "metric-defect", "the engine prints a figure that cannot be", advice, evidence=(line.text,)
            )
    return None


def _cut_off(evidence: Evidence) -> Reading | None:
    failed = next((line.text for line in evidence.lines if _TRANSFER.search(line.text)), None)
    if evidence.context.role != "decode" or failed is None:
        return None
    advice = "look at the prefill workers and the transfer between them; this side is fine"
    return reading(_S, "upstream-starved", "the transfer from the prefill side fails", advice, evidence=(failed,))


def _starved(evidence: Evidence) -> Reading | None:
    if evidence.context.role != "decode" or not evidence.decode:
        return None
    waits = any((line.get("transfer_reqs") or 0) > 0 for line in evidence.decode)
    empty = all((line.get("queue_reqs") or 0) == 0 and line.running <= 2 for line in evidence.decode)
    if not (waits or empty):
        return None
    advice = "look at the prefill workers and the transfer between them"
    return reading(_S, "upstream-starved", "the decode side has nothing to do: it waits for prefills", advice)


def _slots(evidence: Evidence) -> Reading | None:
    for line in evidence.decode:
        used = line.get("mamba_usage_ratio")
        pool = line.get("full_usage_ratio") or line.get("token_usage_ratio") or 0.0
        if used is not None and used >= SLOTS_RATIO and used > 2 * pool:
            sentence = f"recurrent-state slots are {used:.0%} full, the KV pool {pool:.0%}: the slots are the limit"
            advice = "raise max-mamba-cache-size or mamba-full-memory-ratio, not the KV pool"
            return reading(_S, "state-slots-limit", sentence, advice, evidence=(line.text,))
    return None


def _kv_pressure(evidence: Evidence) -> Reading | None:
    signs = [
        line.text
        for line in evidence.lines
        if _RETRACT.search(line.text)
        or _PREEMPT.search(line.text)
        or (line.get("preemptions_count") or 0) > 0
        or (line.get("retracted_reqs") or 0) > 0
        or _fullest(line) >= FULL_RATIO
    ]
    if not signs:
        return None
    if evidence.context.recovered_after_s is not None:
        sentence = "the KV pool was full for a moment, and the rate came back by itself"
        return reading(
            _S, "kv-pressure", sentence, "leave this window out", action=Action.IGNORE, evidence=tuple(signs)
        )
    advice = "lower the concurrency or the context, or give the KV pool more memory; count by deltas"
    return reading(
        _S, "kv-pressure", "the KV pool is full, and requests are thrown out of it", advice, evidence=tuple(signs)
    )


def _fullest(line: Line) -> float:
    """The share of the KV pool in use, 0 to 1."""
    percent = (line.get("kv_usage_pct") or 0.0) / 100
    return max(percent, line.get("token_usage_ratio") or 0.0, line.get("full_usage_ratio") or 0.0)


def _filling(evidence: Evidence) -> Reading | None:
    """Prompts are being worked and nothing is decoded yet to speak of: the level has not begun."""
    lines = [line for line in evidence.decode if line.get("input_tok_s") and line.get("gen_tok_s")]
    if len(lines) < LASTING_MIN or len(lines) < len(evidence.decode):
        return None
    if any((line.get("input_tok_s") or 0) < FILLING_RATIO * (line.get("gen_tok_s") or 0) for line in lines):
        return None
    queue = [line.get("queue_reqs") or 0 for line in lines]
    rates = [line.get("input_tok_s") or 0 for line in lines]
    if queue == sorted(set(queue)) and max(rates) < 1.05 * min(rates):
        sentence = "prompts come faster than they can be worked: the queue grows at a steady prompt rate"
        return reading(_S, "saturated", sentence, "do not raise the load further")
    if [line.running for line in lines] == sorted({line.running for line in lines}):
        sentence = "the level is still filling: prompts are worked, and more run from line to line"
        return reading(_S, "window-spans-gap", sentence, "wait until the prompt rate falls", action=Action.WAIT)
    return None


def _capped(evidence: Evidence) -> Reading | None:
    """More wait than run although the pool has room: a limit on running requests, the engine's own or ours."""
    context = evidence.context
    most = max((line.running for line in evidence.loads), default=0)
    for line in reversed(evidence.loads):
        queued = line.get("queue_reqs") or 0
        caps = {v for row in evidence.lines if (v := row.get("max_running_reqs"))}
        at_cap = line.running in caps
        # Without a cap a few wait for a moment, while others end; what is held back by one is never exceeded.
        held = line.running == most and queued >= WAITING_MIN * (context.concurrency or 0)
        below = line.running < (context.concurrency or 0) or context.windows_alike
        plateau = not caps and queued > 0 and held and below
        room = _fullest(line) < 0.9
        if line.running and queued > 0 and room and (at_cap or plateau):
            sentence = f"{line.running:.0f} run and {queued:.0f} wait while the KV pool has room: a cap binds"
            advice = "set max-running-requests (max-num-seqs, parallel) to the level's concurrency and repeat"
            return reading(_S, "admission-cap", sentence, advice, evidence=(line.text,))
    return None


def _admits_fewer(evidence: Evidence) -> Reading | None:
    """What the server says that it admits is less than the level offers."""
    context = evidence.context
    each = [v for line in evidence.lines if (v := line.get("max_running_reqs"))]
    if context.phase != "level" or not context.concurrency or not each or "server-info" not in evidence.sources:
        return None
    admitted = min(each) * (context.dp_size or 1)
    if admitted >= context.concurrency:
        return None
    sentence = f"{admitted:.0f} requests are admitted of the {context.concurrency} that the level offers"
    return reading(_S, "admission-cap", sentence, "set max-running-requests to the level's concurrency and repeat")


def _unoffered(evidence: Evidence) -> Reading | None:
    """Fewer run than the level offers and none waits: the load does not reach the server."""
    context = evidence.context
    lines = evidence.loads
    wanted = context.concurrency
    lasting = len(lines) >= ALIKE_MIN or (context.windows_alike or 0) >= ALIKE_MIN
    if context.phase != "level" or wanted is None or not lines or not lasting or context.load_falling:
        return None
    ranks = len({line.rank for line in lines})
    if ranks > 1 or any((line.get("queue_reqs") or 0) > 0 or line.running > OFFERED_RATIO * wanted for line in lines):
        return None
    if min(line.running for line in lines) <= 0:
        return None
    sentence = f"{lines[-1].running:.0f} of {wanted} requests reach the server, and none waits there"
    advice = "use more client processes or another client, and measure again"
    return reading(_S, "client-bound", sentence, advice, evidence=(lines[-1].text,))


def _compiled_meanwhile(evidence: Evidence) -> Reading | None:
    line = next((line.text for line in evidence.lines if _JIT_IN_LEVEL.search(line.text)), None)
    if line is None or evidence.context.phase != "level":
        return None
    advice = "warm up with the level's own shapes first, then measure again"
    sentence = "kernels were compiled inside the measured window"
    return reading(_S, "cold-start-window", sentence, advice, action=Action.REMEASURE, evidence=(line,))


def _graphs_off(evidence: Evidence) -> Reading | None:
    context = evidence.context
    if _PLAIN_FALLBACK.search(evidence.text):
        return reading(_S, "by-design", "plain decoding is this request class's fallback, and the figure is its own")
    if context.has_arg(*_GRAPHS_OFF_ARGS):
        return reading(_S, "graphs-off", "CUDA graphs are switched off", "switch them on and measure again")
    off = [line for line in evidence.decode if line.graph == "false" and line.running > 0]
    largest = context.arg(*_GRAPH_BATCH_ARGS)
    small = [line for line in evidence.decode if largest and largest.isdigit() and line.running > int(largest)]
    if not off and not small:
        return None
    line = (off or small)[-1]
    sentence = f"at {line.running:.0f} running the batch is above the largest captured graph, or graphs are off"
    advice = "raise the largest graph batch size to the concurrency; compare only windows with graphs"
    return reading(_S, "graphs-off", sentence, advice, evidence=(line.text,))


def _cached(evidence: Evidence) -> Reading | None:
    """Prompts that should be new were found in the prefix cache."""
    prompts = evidence.context.prompts
    if not (prompts.unique or prompts.same_seed or prompts.dataset in {"random", "random-ids"}):
        return None
    hits = [line for line in evidence.lines if _hit_pct(line) > HIT_PCT_MAX]
    if not hits:
        return None
    sentence = f"{max(map(_hit_pct, hits)):.0f} % of prompts that should be new came from the prefix cache"
    advice = "flush the cache or change the seed for each point, and measure again"
    return reading(_S, "warm-prefix-cache", sentence, advice, evidence=tuple(line.text for line in hits))


def _hit_pct(line: Line) -> float:
    cached, new = line.get("cached_tokens"), line.get("new_tokens")
    if cached is not None and new is not None and cached + new > 0:
        return 100 * cached / (cached + new)
    return max(line.get("prefix_hit_pct") or 0.0, line.get("external_hit_pct") or 0.0)


def _idle(evidence: Evidence) -> Reading | None:
    """Nothing runs and nothing was to run: what is printed or kept from before says nothing of now."""
    context = evidence.context
    if context.phase != "idle" or context.in_flight_reqs or not evidence.loads:
        return None
    if evidence.loads[-1].running > 0:
        return None
    if "metrics" in evidence.sources:
        sentence = "gauges keep the last window they saw, and nothing runs"
        return reading(_S, "metric-scope", sentence, "use counters", action=Action.IGNORE)
    return reading(_S, "window-spans-gap", "the server is idle", "leave these lines out", action=Action.IGNORE)


def _gap(evidence: Evidence) -> Reading | None:
    """The first line after idle or after a prefill covers time in which nothing was decoded."""
    clean = [v for line in evidence.decode if line.known.after is None and (v := line.get("gen_tok_s"))]
    known = [line for line in evidence.decode if line.known.after is not None]
    tainted = [line for line in known if not clean or (line.get("gen_tok_s") or 0) < HARMLESS_RATIO * max(clean)]
    if not known:
        lines = [line for line in evidence.decode if line.get("gen_tok_s") is not None]
        pairs = pairwise(lines)
        tainted = [
            a
            for a, b in pairs
            if a.running == b.running > 0 and (a.get("gen_tok_s") or 0) < GAP_RATIO * (b.get("gen_tok_s") or 0)
        ]
    if not tainted or len(tainted) < TAINTED_SHARE * len(evidence.decode):
        return None
    return reading(
        _S,
        "window-spans-gap",
        "a window covers time in which nothing was decoded",
        "leave that line out and use the next one",
        evidence=(tainted[0].text,),
    )


def _prefilling(evidence: Evidence) -> Reading | None:
    """A long prompt is being worked, piece by piece: no token comes meanwhile, and nothing is wrong."""
    last = evidence.lines[-1] if evidence.lines else None
    if last is None or evidence.decode or not evidence.context.in_flight_reqs:
        return None
    if last.get("new_tokens") is None and last.get("progress_ratio") is None:
        return None
    return reading(_S, "none", "a prompt is being worked piece by piece", action=Action.WAIT, evidence=(last.text,))


def _lifetime(evidence: Evidence) -> Reading | None:
    """An average since the server was born says nothing of this level."""
    if evidence.context.counters != "since-start" or "avg_spec_accept_length" not in evidence.text:
        return None
    advice = "take differences of counters, the level's own lines, or the replies' figures"
    return reading(_S, "metric-scope", "the accept length is an average over the server's life", advice)


def _ranks(evidence: Evidence) -> Reading | None:
    ranks = evidence.ranks
    asked = evidence.context.requests_dp_rank
    if asked is not None and ranks - {str(asked)}:
        sentence = f"only rank {asked} served the requests; other ranks' figures are older or of others"
        return reading(_S, "metric-scope", sentence, "read that rank's figures, or the replies' own")
    per_position = any("_per_pos" in line.text for line in evidence.lines)
    if len(ranks) > 1 or per_position:
        sentence = "the figures belong to several ranks or positions: add them as their scope says"
        return reading(_S, "metric-scope", sentence, action=Action.KEEP)
    return None


def _noise(evidence: Evidence) -> Reading | None:
    noise = tuple(line.text for line in evidence.lines if FRIGHTENING.search(line.text))
    if len(noise) < NOISE_SHARE * max(1, len(evidence.lines)) or not noise:
        return None
    return reading(_S, "benign-noise", "frightening words without consequence", evidence=noise)


SERVING = (
    *(
        _hot,
        _unlogged,
        _leaked,
        _unservable,
        _cut_off,
        _collapsed,
        _wrong_text,
        _defect,
        _starved,
        _slots,
        _kv_pressure,
    ),
    *(
        speculation.drafting_baseline,
        speculation.switched_off,
        speculation.broken,
        _filling,
        _capped,
        _admits_fewer,
        _unoffered,
    ),
    *(_compiled_meanwhile, _graphs_off, speculation.simulated, speculation.by_class, speculation.builds),
    *(*COMPARING, _neighbour),
    *(
        speculation.unlike_itself,
        speculation.no_sample,
        speculation.inactive,
        speculation.adaptive,
        speculation.mismatched,
    ),
    *(
        speculation.barely_tried,
        _idle,
        _cached,
        speculation.baseline,
        _gap,
        speculation.too_small,
        _prefilling,
        _lifetime,
        _ranks,
        _noise,
    ),
)
