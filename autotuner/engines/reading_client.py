"""Readings of what a load generator or a table says: nothing of the server's state, much about the figures' worth."""

from autotuner.engines.evidence import Evidence, Reading, reading
from autotuner.engines.vocabulary import Action, State

PROMPTS_MIN = 20  # fewer prompts of a class tell nothing of its acceptance
BOUND_RATIO = 1.5  # a client that reports this much less than the server's own counters is the limit
OFFERED_RATIO = 0.9
WAVES_MIN = 3
CHUNK_RATIO = 1.3
COLD_TTFT = 2.0
COLD_RATIO = 1.2
_U = State.UNOBSERVED


def _plain_run(evidence: Evidence) -> Reading | None:
    lengths = [line.get("accept_len_tokens") for line in evidence.having("accept_len_tokens")]
    if evidence.context.speculates is not False or not lengths or max(v or 0 for v in lengths) > 1.005:
        return None
    sentence = "an accept length of 1 is what a plain server has"
    return reading(_U, "by-design", sentence, "store it as a baseline")


def _format(evidence: Evidence) -> Reading | None:
    prompts = evidence.context.prompts
    differs = None not in (prompts.template, prompts.drafter_template) and prompts.template != prompts.drafter_template
    random = prompts.dataset in {"random", "random-ids"} and evidence.speculates
    if not differs and not random:
        return None
    why = "their format is not the one that the drafter learnt" if differs else "random tokens are like no real text"
    advice = "measure again with the real traffic's prompts and template before the drafter is judged"
    return reading(_U, "prompts-unlike-traffic", f"the prompts are unlike the traffic: {why}", advice)


def _server_disagrees(evidence: Evidence) -> Reading | None:
    server = evidence.context.server_tok_s
    client = next((v for line in evidence.lines if (v := line.get("output_tok_s"))), None)
    if server is None or client is None or server < BOUND_RATIO * client:
        return None
    sentence = f"the client reports {client:.0f} tok/s, the server's counters {server:.0f}"
    return reading(_U, "client-bound", sentence, "trust the server's counters, and use another client")


def _chunks(evidence: Evidence) -> Reading | None:
    """Under speculation one event holds several tokens: what counts events is no token figure."""
    found = {name: v for line in evidence.lines for name in _CHUNKED if (v := line.get(name)) is not None}
    peak, mean = found.get("peak_output_tok_s"), found.get("output_tok_s")
    itl, tpot = found.get("itl_ms"), found.get("tpot_ms")
    below = peak is not None and mean is not None and peak < mean
    apart = itl is not None and tpot is not None and tpot > 0 and itl > CHUNK_RATIO * tpot
    if not below and not apart:
        return None
    sentence = "the client counts events, and each holds several tokens"
    advice = "use TPOT, usage-based output tok/s and E2E latency; ITL / TPOT is about the accept length"
    return reading(_U, "metric-scope", sentence, advice)


_CHUNKED = ("peak_output_tok_s", "output_tok_s", "itl_ms", "tpot_ms")


def _same_stamp(evidence: Evidence) -> Reading | None:
    """Half of the gaps are zero: the client reads several events at once, so it is behind."""
    median = next((v for line in evidence.lines if (v := line.get("median_itl_ms")) is not None), None)
    mean = next((v for line in evidence.lines if (v := line.get("itl_ms")) is not None), None)
    if median is None or not mean or median > 0.01 * mean or evidence.speculates:
        return None
    sentence = "most events came with the same time stamp: the client reads them late"
    return reading(_U, "client-bound", sentence, "use another client, or more processes")


def _identical(evidence: Evidence) -> Reading | None:
    kinds = {line.known.prompts for line in evidence.lines if line.known.prompts}
    prompts = evidence.context.prompts
    if not ({"identical", "repeated", "same"} & kinds) and not (prompts.same_seed or prompts.unique is False):
        return None
    sentence = "the same prompts were sent again and came from the prefix cache"
    return reading(_U, "warm-prefix-cache", sentence, "use other prompts for each point, or flush the cache")


def _first_run(evidence: Evidence) -> Reading | None:
    """The same work on the same boot: the first pass compiles, or the second finds its prompts cached."""
    context = evidence.context
    runs: dict[int, float] = {}
    for line in evidence.lines:
        if line.known.run is not None and (speed := line.get("output_tok_s")):
            runs.setdefault(line.known.run, speed)
    for arm in context.arms:
        if arm.run is not None and arm.speed:
            runs.setdefault(arm.run, arm.speed)
    waits = {line.known.run: v for line in reversed(evidence.lines) if line.known.run and (v := line.get("ttft_ms"))}
    if not ("boot" in context.same or context.host.kernel_cache_empty):
        return None
    slower = len(runs) > 1 and min(v for n, v in runs.items() if n != min(runs)) >= COLD_RATIO * runs[min(runs)]
    late = len(waits) > 1 and waits[min(waits)] >= COLD_TTFT * max(v for n, v in waits.items() if n != min(waits))
    if not slower and not late:
        return None
    sentence = "the first pass was slower than the same work after it: compilation was inside it"
    advice = "leave the first pass out; warm up with the benchmark's own shapes"
    return reading(_U, "cold-start-window", sentence, advice, action=Action.REMEASURE)


def _few_prompts(evidence: Evidence) -> Reading | None:
    prompts = evidence.context.prompts
    lengths = [arm.accept_len for arm in evidence.context.arms if arm.accept_len is not None]
    few = prompts.count is not None and prompts.count < PROMPTS_MIN
    if not few or not (prompts.repeats_identical or len(lengths) > 1):
        return None
    sentence = f"{prompts.count} prompts are too few: repeats of the same ones add nothing"
    advice = f"use at least {PROMPTS_MIN} prompts a class, and take the interval over prompts"
    return reading(_U, "sample-too-small", sentence, advice, action=Action.REMEASURE)


def _below_offered(evidence: Evidence) -> Reading | None:
    """The server answers fewer requests a second than are sent: the rest waits, and the wait grows."""
    found = {name: v for line in evidence.lines for name in ("offered_per_s", "served_per_s") if (v := line.get(name))}
    offered, served = found.get("offered_per_s"), found.get("served_per_s")
    if not offered or not served or served >= OFFERED_RATIO * offered:
        return None
    sentence = f"{served:g} requests a second are answered of {offered:g} that are sent"
    return reading(_U, "saturated", sentence, "do not raise the rate further")


def _few_waves(evidence: Evidence) -> Reading | None:
    done = next((v for line in evidence.lines if (v := line.get("completed_reqs"))), None)
    wanted = evidence.context.concurrency
    if done is None or wanted is None or done >= WAVES_MIN * wanted:
        return None
    sentence = f"{done:.0f} requests at {wanted} at once: ramp and tail are most of it"
    advice = "send at least five times the concurrency"
    return reading(_U, "sample-too-small", sentence, advice, action=Action.REMEASURE)


def _impossible(evidence: Evidence) -> Reading | None:
    """A time of zero where requests were answered: the client did not see what it reports on."""
    done = any(line.get("completed_reqs") for line in evidence.lines)
    zero = [line.text for line in evidence.lines for name in ("ttft_ms", "tpot_ms") if line.get(name) == 0]
    if not done or not zero:
        return None
    advice = "take it from the server's metrics; throughput and end-to-end times may still hold"
    return reading(_U, "metric-defect", "a time is zero although requests were answered", advice, evidence=tuple(zero))


def _nothing_done(evidence: Evidence) -> Reading | None:
    done = [line.get("completed_reqs") for line in evidence.having("completed_reqs")]
    if not done or any(done):
        return None
    return reading(
        _U,
        "no-output",
        "no request was answered",
        "wait until the server generates, then measure",
        action=Action.REMEASURE,
    )


CLIENT = (
    *(_plain_run, _format, _server_disagrees, _same_stamp, _chunks, _identical, _first_run, _few_prompts),
    *(_impossible, _nothing_done, _below_offered, _few_waves),
)
