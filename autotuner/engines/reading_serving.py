"""Readings of a server that answers: what its windows say, and why they may not be used as they are.

First what makes a figure unusable (leaked requests, a defect, a gap), then what caps the server beside the candidate's
merit (slots, KV, graphs), then speculation, then the prefix cache.
"""

import re
from itertools import pairwise

from autotuner.engines.evidence import Evidence, Line, Reading, reading
from autotuner.engines.reading_arms import COMPARING
from autotuner.engines.vocabulary import Action, State

BROKEN_WITHIN = 0.005  # 1.00 as printed, two decimals
VERIFY_STEPS_MIN = 100  # fewer say little: at one request a window of 40 steps has a standard error of 0.1 to 0.2
STEPS_A_WINDOW = 40  # SGLang's default decode-log-interval
MISMATCH_LEN = 1.1  # with many drafts and nearly nothing accepted, the drafter reads other features than it learnt
MISMATCH_DRAFTED = 1000
DRAFTED_MIN = 100
COLLAPSE_RATIO = 4.0
HIT_PCT_MAX = 1.0  # on prompts that are meant to be all different
FULL_RATIO = 0.97
SLOTS_RATIO = 0.8
GAP_RATIO = 0.2  # the first line after idling holds a tiny share of what the next one shows
CLASS_RATIO = 1.3  # accept lengths of two classes of prompts that differ by more are not one figure

_S = State.SERVING
_PLAIN_FALLBACK = re.compile(r"plain decode fallback|fall(?:ing|s)? back to plain decod")
_RETRACT = re.compile(r"Retract requests|Decode out of memory")
_PREEMPT = re.compile(r"is preempted by|[Pp]reempt\w* (?:because|due)")
_ADAPTIVE = re.compile(r"Adaptive spec params updated")
_INACTIVE_SLOTS = re.compile(r'"speculative"\s*:\s*false')
_SLOWDOWN = re.compile(r"MHz,\s*(?:Active|Not Active)")
_GRAPHS_OFF_ARGS = ("--disable-cuda-graph", "--disable-decode-cuda-graph", "--enforce-eager")
_GRAPH_BATCH_ARGS = ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode")
_NOISE = re.compile(
    r"leaked (?:shared_memory|semaphore)|destroy_process_group|Ignore import error|freeze_gc failed|Using default MoE"
    r"|[Pp]erformance might be sub-?optimal|resource_tracker|py-spy|errno: 97"
)


def _hot(evidence: Evidence) -> Reading | None:
    hot = [line.text for line in evidence.lines if _SLOWDOWN.search(line.text) and ", Active" in line.text]
    if not hot:
        return None
    advice = "warm the GPUs to a steady state before comparing, or interleave the arms; record clocks and caps"
    sentence = "the driver holds the clocks down for heat or power"
    return reading(_S, "thermal-or-power-limit", sentence, advice, evidence=tuple(hot))


def _leaked(evidence: Evidence) -> Reading | None:
    ours = evidence.context.in_flight_reqs
    running = [line for line in evidence.decode if line.running > 0]
    if ours is None or not running or running[-1].running <= max(ours, 0) or ours > 0:
        return None
    sentence = f"{running[-1].running:.0f} requests run and none of them is ours"
    advice = "restart it; nobody waits for these requests, and they take their share of every step"
    return reading(State.DEGRADED, "leaked-requests", sentence, advice, evidence=(running[-1].text,))


def _unservable(evidence: Evidence) -> Reading | None:
    context = evidence.context
    stuck = [line for line in evidence.decode if line.running == 0 and (line.get("queue_reqs") or 0) >= 1]
    alone = context.prompts.longer_than_kv_pool or (context.line_repeats and context.in_flight_reqs)
    if not stuck or not alone:
        return None
    advice = "limit the context, or refuse such requests; abort it and the others are served"
    sentence = "a request waits that can never be admitted: nothing runs and the pool is empty"
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
    advice = "do not serve it; forced NCCL protocols and lossy settings are the first suspects"
    return reading(_S, "output-corrupt", f"the generated text is {evidence.context.output_text}", advice)


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


def _capped(evidence: Evidence) -> Reading | None:
    """More wait than run although the pool has room: a limit on running requests, the engine's own or ours."""
    context = evidence.context
    for line in reversed(evidence.decode):
        queued = line.get("queue_reqs") or 0
        caps = {v for row in evidence.lines if (v := row.get("max_running_reqs"))}
        at_cap = line.running in caps
        plateau = not caps and queued > 0 and (line.running < (context.concurrency or 0) or context.windows_alike)
        room = _fullest(line) < 0.9
        if line.running and queued > 0 and room and (at_cap or plateau):
            sentence = f"{line.running:.0f} run and {queued:.0f} wait while the KV pool has room: a cap binds"
            advice = "set max-running-requests (max-num-seqs, parallel) to the level's concurrency and repeat"
            return reading(_S, "admission-cap", sentence, advice, evidence=(line.text,))
    return None


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


def _by_class(evidence: Evidence) -> Reading | None:
    """Accept length by class of prompts or by context: one figure for all of them would mislead."""
    for attribute, cause in (("context", "long-context"), ("prompts", "workload-dependent")):
        known: dict[str, list[float]] = {}
        for line in evidence.having("accept_len_tokens"):
            if value := getattr(line.known, attribute):
                known.setdefault(value, []).append(line.get("accept_len_tokens") or 0.0)
        means = {name: sum(values) / len(values) for name, values in known.items()}
        if len(means) > 1 and max(means.values()) >= CLASS_RATIO * min(means.values()):
            shown = ", ".join(f"{name} {value:.2f}" for name, value in means.items())
            advice = "judge each class by itself, and keep speculation where it was measured to win"
            return reading(_S, cause, f"accept length differs by {attribute}: {shown}", advice)
    trained = evidence.context.draft_context_tokens
    if trained and (evidence.context.context_tokens or 0) > trained and evidence.speculates:
        sentence = f"the drafter was made for {trained} positions, the requests have more"
        return reading(_S, "long-context", sentence, "keep speculation to contexts that the drafter knows")
    return None


def _builds(evidence: Evidence) -> Reading | None:
    lengths: dict[str, float] = {}
    for line in evidence.having("accept_len_tokens"):
        if line.known.build:
            lengths.setdefault(line.known.build, line.get("accept_len_tokens") or 0.0)
    if len(lengths) < 2 or max(lengths.values()) < 1.05 * min(lengths.values()):
        return None
    shown = ", ".join(f"{build} {value:.2f}" for build, value in lengths.items())
    sentence = f"accept length differs between builds of the engine: {shown}"
    return reading(_S, "engine-regression", sentence, "pin the build, and compare again on both")


def _no_sample(evidence: Evidence) -> Reading | None:
    drafted = [line.get("drafted_tokens") for line in evidence.having("drafted_tokens")]
    if drafted and not any(drafted):
        if "metrics" in evidence.sources and evidence.context.requests_done:
            sentence = "requests were answered and nothing was drafted: speculation is off"
            return reading(_S, "speculation-inactive", sentence, "check the flags; do not benchmark it as it is")
        return reading(_S, "no-sample", "nothing was drafted in this window", "let more samples come in")
    if _INACTIVE_SLOTS.search(evidence.text) and evidence.context.speculates:
        return reading(
            _S,
            "speculation-inactive",
            "the server says that its slots do not speculate",
            "name the method, or use a drafter that fits",
        )
    return None


def _inactive(evidence: Evidence) -> Reading | None:
    """Speculation is configured, requests were served, and no figure of it is anywhere."""
    context = evidence.context
    seen = any(
        line.get(name) is not None
        for line in evidence.lines
        for name in ("accept_len_tokens", "drafted_tokens", "drafts_count", "accepted_tokens")
    )
    off_from = context.spec_off_from_batch
    if off_from and any(line.running >= off_from for line in evidence.decode) and not seen:
        sentence = f"no drafts are made from {off_from} running requests up, as configured"
        return reading(_S, "by-design", sentence)
    if not context.speculates or seen or not (evidence.decode or evidence.having("completion_tokens")):
        return None
    if evidence.engine == "vllm" and "metrics" not in evidence.sources:
        return None  # its line on speculation is a line of its own, which may not be among these
    sentence = "speculation is configured, but the server reports no drafts"
    return reading(_S, "speculation-inactive", sentence, "check the flags and the start's warnings")


def _broken(evidence: Evidence) -> Reading | None:
    lines = evidence.having("accept_len_tokens")
    if not lines or not evidence.speculates:
        return None
    lengths = [line.get("accept_len_tokens") or 0.0 for line in lines]
    if max(lengths) > 1 + BROKEN_WITHIN:
        return None
    steps = _verify_steps(evidence, lines)
    if steps < VERIFY_STEPS_MIN:
        return reading(_S, "sample-too-small", f"nothing was accepted, over about {steps:.0f} verify steps only")
    advice = "check the method's name, the drafter's weights and their quantisation; it is no matter of the workload"
    return reading(
        _S,
        "draft-broken",
        f"nothing of about {steps:.0f} drafts was accepted",
        advice,
        evidence=tuple(line.text for line in lines),
    )


def _verify_steps(evidence: Evidence, lines: tuple[Line, ...]) -> float:
    """At least this many requests x steps stand behind the lines."""
    alike = max(1, evidence.context.windows_alike or 1)
    steps = 0.0
    for line in lines:
        drafted = line.get("drafted_tokens")
        counted = line.get("drafts_count") or line.get("verify_count")
        if counted is None and drafted is not None:
            counted = drafted / max(1, evidence.context.depth or 1)
        steps += counted if counted is not None else STEPS_A_WINDOW * max(1.0, line.running)
    return steps * alike


def _mismatched(evidence: Evidence) -> Reading | None:
    lines = evidence.having("accept_len_tokens", "drafted_tokens")
    drafted = sum(line.get("drafted_tokens") or 0 for line in lines)
    if not lines or drafted < MISMATCH_DRAFTED:
        return None
    if max(line.get("accept_len_tokens") or 0 for line in lines) >= MISMATCH_LEN:
        return None
    sentence = f"almost nothing of {drafted:.0f} drafted tokens was accepted, though not nothing"
    advice = "the drafter was made for other features or another model: check its layers, or take another one"
    return reading(_S, "draft-mismatch", sentence, advice, evidence=tuple(line.text for line in lines))


def _adaptive(evidence: Evidence) -> Reading | None:
    if not (evidence.context.has_arg("--speculative-adaptive") or _ADAPTIVE.search(evidence.text)):
        return None
    advice = "use accept length and tok/s; the rate's denominator moves"
    return reading(_S, "adaptive-depth", "the engine changes the draft depth by itself", advice)


def _baseline(evidence: Evidence) -> Reading | None:
    if evidence.context.baseline is None or not evidence.speculates:
        return None
    measured = evidence.context.baseline
    wanted = evidence.context.concurrency
    if any(arm.plain for arm in evidence.context.arms) or (measured and (wanted is None or str(wanted) in measured)):
        return None
    missing = "no plain server was measured" if not measured else f"no plain server was measured at {wanted}"
    return reading(
        _S,
        "baseline-mismatch",
        f"{missing}, so nothing can be said of speculation",
        "measure the plain server at the same concurrency first",
    )


def _too_small(evidence: Evidence) -> Reading | None:
    drafted = [line.get("drafted_tokens") or 0 for line in evidence.having("drafted_tokens")]
    if "server-log" not in evidence.sources or not drafted or max(drafted) >= DRAFTED_MIN:
        return None
    return reading(_S, "sample-too-small", f"{max(drafted):.0f} drafted tokens are too few for a verdict")


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


def _gap(evidence: Evidence) -> Reading | None:
    """The first line after idle or after a prefill covers time in which nothing was decoded."""
    tainted = [line for line in evidence.decode if line.known.after is not None]
    if not tainted:
        lines = [line for line in evidence.decode if line.get("gen_tok_s") is not None]
        pairs = pairwise(lines)
        tainted = [
            a
            for a, b in pairs
            if a.running == b.running > 0 and (a.get("gen_tok_s") or 0) < GAP_RATIO * (b.get("gen_tok_s") or 0)
        ]
    if not tainted:
        return None
    return reading(
        _S,
        "window-spans-gap",
        "a window covers time in which nothing was decoded",
        "leave that line out and use the next one",
        evidence=(tainted[0].text,),
    )


def _ranks(evidence: Evidence) -> Reading | None:
    ranks = {line.rank for line in evidence.lines if line.rank}
    asked = evidence.context.requests_dp_rank
    if asked is not None and ranks and str(asked) not in ranks:
        sentence = f"the lines are of other ranks than {asked}, which served the requests"
        return reading(_S, "metric-scope", sentence, "read that rank's lines, or the sum over all of them")
    per_position = any("_per_pos" in line.text for line in evidence.lines)
    if len(ranks) > 1 or per_position:
        sentence = "the figures belong to several ranks or positions: add them as their scope says"
        return reading(_S, "metric-scope", sentence, action=Action.KEEP)
    return None


def _noise(evidence: Evidence) -> Reading | None:
    noise = tuple(line.text for line in evidence.lines if _NOISE.search(line.text))
    if not noise or len(noise) < len(evidence.lines):
        return None
    return reading(_S, "benign-noise", "frightening words without consequence", evidence=noise)


SERVING = (
    _hot, _leaked, _unservable, _collapsed, _wrong_text, _defect, _starved, _slots, _kv_pressure, _capped,
    _graphs_off, _by_class, _builds, *COMPARING, _no_sample, _inactive, _adaptive, _broken, _mismatched, _cached,
    _baseline, _gap, _too_small, _ranks, _noise,
)  # fmt: skip
