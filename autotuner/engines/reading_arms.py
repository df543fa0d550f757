"""Readings of measured rows set side by side: whether speculation pays, where, and what else tells the rows apart.

Arithmetic over our own rows decides. What separates the gains from the losses (class of prompts, context, load, ranks,
depth) is the cause; published figures are checked against what is possible, and never decide.
"""

from collections.abc import Callable, Hashable

from autotuner.engines.context import Arm
from autotuner.engines.evidence import NEAR_RATIO, Evidence, Gain, Reading, reading
from autotuner.engines.vocabulary import Action, State

SATURATED_GAIN = 0.10  # less than this much more output ...
SATURATED_TTFT = 10.0  # ... for this many times the time to the first token is queueing
SPREAD_RUNS = 4
SPREAD_RATIO = 0.1
MISLEADING_RATIO = 1.5
UNEQUAL_RATIO = 1.2
THROTTLED_PCT = 50.0
AT_CAP_RATIO = 0.98
IDENTITY_SLACK = 0.25


def _state(evidence: Evidence) -> State:
    return State.SERVING if evidence.observed else State.UNOBSERVED


def _power(evidence: Evidence) -> Reading | None:
    held = [
        arm
        for arm in evidence.context.arms
        if (arm.throttled_pct or 0) >= THROTTLED_PCT
        or (arm.power_w and arm.power_cap_w and arm.power_w >= AT_CAP_RATIO * arm.power_cap_w)
    ]
    if not held:
        return None
    advice = "the cap belongs to the result: compare rows of one cap, warmed to a steady state"
    return reading(_state(evidence), "thermal-or-power-limit", "the power cap holds the clocks down", advice)


def _saturated(evidence: Evidence) -> Reading | None:
    rows = sorted(
        (arm for arm in evidence.context.arms if arm.concurrency and arm.speed and arm.ttft_ms),
        key=lambda arm: arm.concurrency or 0,
    )
    if len(rows) < 2:
        return None
    queueing = [
        (low, high)
        for at, low in enumerate(rows)
        for high in rows[at + 1 :]
        if (high.speed or 0) <= (1 + SATURATED_GAIN) * (low.speed or 0)
        and (high.ttft_ms or 0) >= SATURATED_TTFT * (low.ttft_ms or 1)
    ]
    if not queueing:
        return None
    first, last = queueing[0]
    gain = (last.speed or 0) / (first.speed or 1) - 1
    sentence = f"{gain:+.0%} output for {(last.ttft_ms or 0) / (first.ttft_ms or 1):.0f} times the TTFT: it queues"
    return reading(
        _state(evidence), "saturated", sentence, f"do not go above {first.concurrency} to {last.concurrency}"
    )


def _unequal(evidence: Evidence) -> Reading | None:
    """The same prompts at temperature 0 must give the same text: unequal lengths make unequal work."""
    arms = [arm for arm in evidence.context.arms if arm.output_tokens is not None]
    lengths = [arm.output_tokens or 0 for arm in arms]
    same = "prompts" in evidence.context.same or evidence.context.temperature == 0
    if len(arms) < 2 or not same or max(lengths) < UNEQUAL_RATIO * max(1, min(lengths)):
        return None
    sentence = f"the outputs are of {min(lengths)} and {max(lengths)} tokens, so the work was not the same"
    return reading(
        _state(evidence), "unequal-outputs", sentence, "ask for equal lengths (ignore_eos), compare the text"
    )


def _by_chance(evidence: Evidence) -> Reading | None:
    """The same arm came up once and hung once: a single launch of it says nothing."""
    outcomes: dict[Hashable, set[str]] = {}
    for arm in evidence.context.arms:
        if arm.outcome is not None and arm.mode is not None:
            outcomes.setdefault(arm.mode, set()).add(arm.outcome)
    if not any("hung" in seen and len(seen) > 1 for seen in outcomes.values()):
        return None
    sentence = "the same launch hangs at times: so few of them say nothing about the other arm"
    return reading(
        _state(evidence), "sample-too-small", sentence, "launch each arm many more times", action=Action.REMEASURE
    )


def _spread(evidence: Evidence) -> Reading | None:
    """Repeats of one arm lie far apart, and not because the first one was cold."""
    runs = [arm for arm in evidence.context.arms if arm.run is not None and arm.speed]
    speeds = [arm.speed or 0.0 for arm in sorted(runs, key=lambda arm: arm.run or 0)]
    if len(speeds) < SPREAD_RUNS or len(speeds) < len(evidence.context.arms) or "args" not in evidence.context.same:
        return None
    later = speeds[1:]
    if max(later) - min(later) < SPREAD_RATIO * sum(speeds) / len(speeds) or later == sorted(later, reverse=True):
        return None
    sentence = f"repeats of the same work lie between {min(speeds):g} and {max(speeds):g}"
    advice = "repeat on several launches: the unit of repetition is the launch; see who else runs on the host"
    return reading(_state(evidence), "sample-too-small", sentence, advice, action=Action.REMEASURE)


def _depths(evidence: Evidence) -> Reading | None:
    """Depths set side by side at one load, without a plain row: which one is worth its drafts."""
    wanted = evidence.context.concurrency
    rows = [
        arm
        for arm in evidence.context.arms
        if not arm.plain and arm.depth and arm.speed and (wanted is None or arm.concurrency in {None, wanted})
    ]
    if len({arm.depth for arm in rows}) < 2 or len({arm.concurrency for arm in rows}) > 1:
        return None
    if "draft-depth" not in evidence.context.differs or evidence.gains():
        return None
    best = max(rows, key=lambda arm: arm.speed or 0)
    worst = min(rows, key=lambda arm: arm.speed or 0)
    if (best.speed or 0) < (1 + SPREAD_RATIO) * (worst.speed or 0):
        return None
    sentence = f"{best.depth} drafts a step give {best.speed:g} tok/s here, {worst.depth} give {worst.speed:g}"
    return reading(_state(evidence), "draft-depth", sentence, f"draft {best.depth} tokens a step at this load")


def _builds(evidence: Evidence) -> Reading | None:
    by_build: dict[str, list[float]] = {}
    for arm in evidence.context.arms:
        if arm.build and arm.speed:
            by_build.setdefault(arm.build, []).append(arm.speed)
    best = [max(values) for values in by_build.values()]
    if len(best) < 2 or max(best) < (1 + NEAR_RATIO) * min(best) or "build" not in evidence.context.differs:
        return None
    sentence = "the same candidate differs in speed between builds of the engine"
    return reading(_state(evidence), "engine-regression", sentence, "pin the build, and compare again on both")


def _ranks_cost(evidence: Evidence) -> Reading | None:
    """More ranks, and single streams are slower: the step waits for communication."""
    single = [arm for arm in evidence.context.arms if arm.tp_size and arm.speed and (arm.concurrency or 1) == 1]
    for small in single:
        slower = [a for a in single if (a.tp_size or 0) > (small.tp_size or 0) and (a.speed or 0) < (small.speed or 0)]
        if slower and (small.plain or small.speculation is None or small.speculation == slower[0].speculation):
            advice = "use fewer ranks for single streams, longer drafts, or a faster all-reduce"
            sentence = f"tensor parallel {slower[0].tp_size} is slower than {small.tp_size} for a single stream"
            return reading(_state(evidence), "collective-cost", sentence, advice, action=Action.REMEASURE)
    return None


def _impossible(evidence: Evidence) -> Reading | None:
    """Published figures that break a roofline or their own identities, or that another engine's code reached."""
    context = evidence.context
    why = next((said for claim in context.claims if (said := _why_impossible(claim))), "")
    ours = [arm.speedup_ratio for arm in context.arms if arm.speedup_ratio is not None]
    theirs = [arm.speedup_ratio for arm in context.claims if arm.speedup_ratio is not None]
    if not why and ours and theirs and max(theirs) > (1 + 3 * NEAR_RATIO) * max(ours):
        why = f"a speed-up of {max(theirs):g} was claimed, {max(ours):g} is measured here; its baseline was another one"
    if not why:
        return None
    return reading(_state(evidence), "unsuitable-prior", why, "do not store it: a prior must be of this very engine")


def _why_impossible(claim: Arm) -> str:
    if claim.params_b and claim.weight_bits and claim.gpu_bandwidth_tb_s and claim.speed and claim.concurrency:
        gigabytes = claim.params_b * claim.weight_bits / 8
        steps_per_s = claim.gpu_bandwidth_tb_s * 1000 * (claim.gpu_count or 1) / gigabytes
        most = steps_per_s * claim.concurrency * (claim.accept_len_tokens or 1)
        if claim.speed > most:
            return f"{claim.speed:.0f} tok/s are claimed, reading the weights each step allows {most:.0f}"
    length, rate = claim.accept_len_tokens, claim.accept_rate_ratio
    if length and rate and claim.draft_tokens:
        possible = (length / claim.draft_tokens, (length - 1) / max(1, claim.draft_tokens - 1))
        if all(abs(rate - value) > IDENTITY_SLACK * max(rate, value) for value in possible):
            return f"accept length {length:g} of {claim.draft_tokens} draft tokens is no acceptance of {rate:g}"
    depth = claim.depth
    if length and depth and length > depth + 1.01:
        return f"accept length {length:g} is more than {depth} drafts a step can give"
    return ""


def _pays(evidence: Evidence) -> Reading | None:
    """Speculation against the plain rows of the same load."""
    gains = evidence.gains()
    if not gains:
        return None
    wins = [g for g in gains if g.ratio > 1 + NEAR_RATIO]
    losses = [g for g in gains if g.ratio < 1 - NEAR_RATIO]
    state = _state(evidence)
    if wins and losses:
        return _divided(evidence, wins, losses)
    if losses:
        if any(g.arm.graphs is False for g in losses):
            advice = "enable CUDA graphs and measure again: eager draft steps pay the launch cost once each"
            return reading(state, "graphs-off", "the speculative rows ran without CUDA graphs", advice)
        return reading(state, "step-cost", _cost(losses), "abandon it at these loads")
    near = [g for g in gains if g not in wins]
    if wins and near and _separates(lambda arm: arm.power_cap_w, wins, near):
        sentence = "what speculation gains falls to nothing at the lower power cap"
        return reading(
            state, "thermal-or-power-limit", sentence, "the cap belongs to the result's key", action=Action.GATE
        )
    if wins and near and _separates(lambda arm: arm.context_tokens, wins, near):
        sentence = "what speculation gains falls to nothing at the longer contexts"
        return reading(state, "long-context", sentence, "keep it to the contexts at which it wins")
    if wins:
        if _acceptance_misleads(gains):
            best = max(gains, key=lambda g: g.ratio)
            sentence = f"the fastest row ({best.ratio:.2f} of plain) is not the one with the best acceptance"
            return reading(state, "acceptance-not-speed", sentence, "keep the fastest")
        return None
    sentence = f"gains lie between {min(g.ratio for g in gains) - 1:+.1%} and {max(g.ratio for g in gains) - 1:+.1%}"
    return reading(state, "near-break-even", sentence, "measure longer, or on more launches")


def _divided(evidence: Evidence, wins: list[Gain], losses: list[Gain]) -> Reading:
    """It wins here and loses there: by what?"""
    state = _state(evidence)
    for attribute, cause in (
        (lambda arm: arm.prompts, "workload-dependent"),
        (lambda arm: arm.context_tokens, "long-context"),
        (lambda arm: arm.concurrency, "non-monotonic-load"),
        (lambda arm: arm.tp_size, "collective-cost"),
        (lambda arm: arm.power_cap_w, "thermal-or-power-limit"),
    ):
        if _separates(attribute, wins, losses):
            advice = "keep speculation only where it was measured to win"
            sentence = "speculation wins at some and loses at others"
            return reading(state, cause, sentence, advice, action=Action.GATE)
    if _separates(lambda arm: (arm.depth, arm.topk, arm.draft_tokens), wins, losses):
        configured = evidence.context.depth
        best = max(wins, key=lambda g: g.ratio)
        if configured is None and _acceptance_misleads([*wins, *losses]):
            sentence = "the fastest depth is not the one with the best acceptance"
            return reading(state, "acceptance-not-speed", sentence, "keep the fastest")
        sentence = f"at this depth it loses, at {best.arm.depth} it gains {best.ratio - 1:+.1%}"
        return reading(state, "draft-depth", sentence, f"draft {best.arm.depth} tokens a step")
    return reading(state, "workload-dependent", "speculation wins in some rows and loses in others")


def _separates(attribute: Callable[[Arm], Hashable], wins: list[Gain], losses: list[Gain]) -> bool:
    """Whether no value of the attribute is found among both."""
    won, lost = {attribute(g.arm) for g in wins}, {attribute(g.arm) for g in losses}
    return not (won & lost)


def _acceptance_misleads(gains: list[Gain] | tuple[Gain, ...]) -> bool:
    """Whether another row than the fastest has the highest share of drafts accepted."""
    rated = [(g, rate) for g in gains if (rate := _accept_ratio(g.arm)) is not None]
    if len(rated) < 2:
        return False
    rates, ratios = [rate for _, rate in rated], [g.ratio for g, _ in rated]
    if max(rates) <= (1 + NEAR_RATIO) * min(rates):
        return max(ratios) >= MISLEADING_RATIO * min(ratios)  # one acceptance, and the clock says two things
    return max(rated, key=lambda pair: pair[0].ratio)[0] is not max(rated, key=lambda pair: pair[1])[0]


def _accept_ratio(arm: Arm) -> float | None:
    if arm.draft_accept_ratio is not None:
        return arm.draft_accept_ratio
    if arm.accept_len_tokens is not None and arm.depth:
        return (arm.accept_len_tokens - 1) / arm.depth
    return arm.accept_len_tokens


def _cost(losses: list[Gain]) -> str:
    worst = min(losses, key=lambda g: g.ratio)
    length = worst.arm.accept_len
    if length is None:
        return f"speculation runs at {worst.ratio:.2f} of the plain server"
    # R = t_spec / t_base = accept length x base rate / speculative rate, at equal load.
    return f"the step costs {length / worst.ratio:.2f} plain ones and yields {length:.2f} tokens"


COMPARING = (_power, _saturated, _unequal, _impossible, _by_chance, _builds, _pays, _depths, _ranks_cost, _spread)
