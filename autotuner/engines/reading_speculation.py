"""Readings of speculation in a server that answers: whether anything is drafted, accepted, and comparable."""

import re
from collections.abc import Callable
from itertools import pairwise

from autotuner.engines.context import Arm
from autotuner.engines.evidence import Evidence, Line, Reading, reading, way_of_measuring
from autotuner.engines.vocabulary import State

BROKEN_WITHIN = 0.005  # 1.00 as printed, two decimals
VERIFY_STEPS_MIN = 100  # fewer say little: at one request a window of 40 steps has a standard error of 0.1 to 0.2
STEPS_A_WINDOW = 40  # SGLang's default decode-log-interval
MISMATCH_LEN = 1.1  # with many drafts and nearly nothing accepted, the drafter reads other features than it learnt
MISMATCH_DRAFTED = 1000
DRAFTED_MIN = 100
SELF_TEST_RATIO = 1.25
CLASS_RATIO = 1.3  # accept lengths of two classes of prompts that differ by more are not one figure

_S = State.SERVING
_ADAPTIVE = re.compile(r"Adaptive spec params updated")
_SYNTHETIC = re.compile(r"synthetic|spec-synth")
_INACTIVE_SLOTS = re.compile(r'"speculative"\s*:\s*false')


def simulated(evidence: Evidence) -> Reading | None:
    """The acceptance was asked for and not earned: only the step time is a finding."""
    context = evidence.context
    asked = "SGLANG_SIMULATE_ACC_LEN" in context.env or any(_SYNTHETIC.search(word) for word in context.args)
    if not asked or not evidence.speculates:
        return None
    sentence = "the acceptance is simulated, as asked for, and the text is garbage"
    return reading(_S, "by-design", sentence, "use the step time, never the acceptance; never promote it")


def by_class(evidence: Evidence) -> Reading | None:
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


def builds(evidence: Evidence) -> Reading | None:
    """Accept length by build of the engine: a release may have changed it."""
    lengths: dict[str, float] = {}
    counted: dict[str, dict[str, float]] = {}
    for line in evidence.lines:
        if line.known.build and (length := line.get("accept_len_tokens")):
            lengths.setdefault(line.known.build, length)
        for name in ("accepted_tokens", "drafts_count"):
            if line.known.build and (value := line.get(name)):
                counted.setdefault(line.known.build, {}).setdefault(name, value)
    for build, of in counted.items():
        if len(of) == len(("accepted", "drafts")):
            lengths.setdefault(build, 1 + of["accepted_tokens"] / of["drafts_count"])
    if len(lengths) < 2 or max(lengths.values()) < 1.05 * min(lengths.values()):
        return None
    shown = ", ".join(f"{build} {value:.2f}" for build, value in lengths.items())
    sentence = f"accept length differs between builds of the engine: {shown}"
    return reading(_S, "engine-regression", sentence, "pin the build, and compare again on both")


def unlike_itself(evidence: Evidence) -> Reading | None:
    """A step counts only if it had drafts (vLLM): then accepted + drafts a second is less than what was generated."""
    for load, spec in pairwise(evidence.lines):
        rate, accepted, drafted = load.get("gen_tok_s"), spec.get("accepted_tok_s"), spec.get("drafted_tok_s")
        depth = evidence.context.depth
        if not rate or accepted is None or drafted is None or not depth or spec.rank not in {"", load.rank}:
            continue
        if rate > SELF_TEST_RATIO * (accepted + drafted / depth):
            sentence = f"{rate:g} tok/s were generated, {accepted + drafted / depth:.0f} by steps that drafted"
            advice = "most steps had no draft and are not counted: take tokens a step from the generated tokens"
            return reading(_S, "metric-scope", sentence, advice, evidence=(load.text, spec.text))
    return None


def no_sample(evidence: Evidence) -> Reading | None:
    """Nothing was drafted: an idle window, or speculation that is off."""
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


def inactive(evidence: Evidence) -> Reading | None:
    """Speculation is configured, requests were served, and no figure of it is anywhere."""
    context = evidence.context
    seen = any(
        line.get(name) is not None
        for line in evidence.lines
        for name in ("accept_len_tokens", "drafted_tokens", "drafts_count", "accepted_tokens")
    )
    served = evidence.decode or evidence.having("completion_tokens") or context.requests_done
    if not context.speculates or seen or not served:
        return None
    if evidence.engine == "vllm" and "metrics" not in evidence.sources:
        return None  # its line on speculation is a line of its own, which may not be among these
    sentence = "speculation is configured, but the server reports no drafts"
    return reading(_S, "speculation-inactive", sentence, "check the flags and the start's warnings")


def switched_off(evidence: Evidence) -> Reading | None:
    """Plain decoding from a batch size up is what was asked for; an accept length of 1 there is no finding."""
    off_from = evidence.context.spec_off_from_batch
    if not off_from:
        return None
    above = [line for line in evidence.loads if line.running >= off_from]
    if not above or any((line.get("accept_len_tokens") or 1.0) > 1 + BROKEN_WITHIN for line in above):
        return None
    return reading(_S, "by-design", f"no drafts are made from {off_from} running requests up, as configured")


def broken(evidence: Evidence) -> Reading | None:
    """An accept length of exactly 1 over enough verify steps: nothing is ever accepted."""
    lines, steps = _unaccepted(evidence)
    if steps < VERIFY_STEPS_MIN:
        return None
    advice = "check the method's name, the drafter's weights and their quantisation; it is no matter of the workload"
    return reading(
        _S,
        "draft-broken",
        f"nothing of about {steps:.0f} drafts was accepted",
        advice,
        evidence=tuple(line.text for line in lines),
    )


def barely_tried(evidence: Evidence) -> Reading | None:
    """An accept length of exactly 1, over too few steps to say why."""
    lines, steps = _unaccepted(evidence)
    if not lines:
        return None
    return reading(_S, "sample-too-small", f"nothing was accepted, over about {steps:.0f} verify steps only")


def _unaccepted(evidence: Evidence) -> tuple[tuple[Line, ...], float]:
    """The lines on acceptance if all of them say that nothing was accepted, and the verify steps behind them."""
    lines = tuple(
        line
        for line in evidence.lines
        if line.get("accept_len_tokens") is not None
        or (line.get("drafted_tokens") and line.get("accept_rate_ratio") == 0)
    )
    lengths = [line.get("accept_len_tokens") or 1.0 for line in lines]
    accepted = sum(line.get("accepted_tokens") or 0 for line in lines)
    if not lines or not evidence.speculates or max(lengths) > 1 + BROKEN_WITHIN or accepted:
        return (), 0.0
    return lines, _verify_steps(evidence, lines)


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


def mismatched(evidence: Evidence) -> Reading | None:
    """Almost nothing of very many drafts is accepted, though not nothing."""
    lines = evidence.having("accept_len_tokens")
    counted = sum(line.get("drafted_tokens") or 0 for line in lines)
    drafted = counted or _verify_steps(evidence, lines) * (evidence.context.depth or 1)
    if not lines or not evidence.speculates or drafted < MISMATCH_DRAFTED:
        return None
    if max(line.get("accept_len_tokens") or 0 for line in lines) >= MISMATCH_LEN:
        return None
    sentence = f"almost nothing of {drafted:.0f} drafted tokens was accepted, though not nothing"
    advice = "the drafter was made for other features or another model: check its layers, or take another one"
    return reading(_S, "draft-mismatch", sentence, advice, evidence=tuple(line.text for line in lines))


def adaptive(evidence: Evidence) -> Reading | None:
    """The depth moves while it runs, and with it what a rate is a share of."""
    if not (evidence.context.has_arg("--speculative-adaptive") or _ADAPTIVE.search(evidence.text)):
        return None
    advice = "use accept length and tok/s; the rate's denominator moves"
    return reading(_S, "adaptive-depth", "the engine changes the draft depth by itself", advice)


def baseline(evidence: Evidence) -> Reading | None:
    """No plain server was measured under this load."""
    rows = evidence.context.arms
    apart = _disjoint(rows, way_of_measuring) or _disjoint(rows, lambda arm: arm.engine)
    if (evidence.context.baseline is None and not apart) or not (evidence.speculates or apart):
        return None
    measured = evidence.context.baseline
    wanted = evidence.context.concurrency
    if evidence.gains() or (measured and (wanted is None or str(wanted) in measured)):
        return None
    state = _S if evidence.observed else State.UNOBSERVED
    missing = "no plain server was measured" if not measured else f"no plain server was measured at {wanted}"
    return reading(
        state,
        "baseline-mismatch",
        f"{missing}, so nothing can be said of speculation",
        "measure the plain server at the same concurrency first",
    )


def drafting_baseline(evidence: Evidence) -> Reading | None:
    """A server that was to be plain reports drafts."""
    drafts = [
        line.text
        for line in evidence.lines
        if line.known.speculation == "none"
        and ((line.get("drafted_tokens") or 0) > 0 or (line.get("accept_len_tokens") or 1.0) > 1 + BROKEN_WITHIN)
    ]
    if not drafts:
        return None
    sentence = "the server that was to be the baseline drafts too"
    return reading(
        _S,
        "baseline-mismatch",
        sentence,
        "start it without speculation and see that no drafts are reported",
        evidence=tuple(drafts),
    )


def _disjoint(rows: tuple[Arm, ...], of: Callable[[Arm], str | None]) -> bool:
    """Whether the plain rows and the speculative ones have nothing in common in this respect, as far as it is known."""
    plain = {of(arm) for arm in rows if arm.plain}
    drafting = {of(arm) for arm in rows if not arm.plain and arm.speculation is not None}
    return bool(plain and drafting) and not (plain & drafting) and None not in (plain | drafting)


def too_small(evidence: Evidence) -> Reading | None:
    """Too few drafts to say anything."""
    drafted = [line.get("drafted_tokens") or 0 for line in evidence.having("drafted_tokens")]
    if "server-log" not in evidence.sources or not drafted or max(drafted) >= DRAFTED_MIN:
        return None
    return reading(_S, "sample-too-small", f"{max(drafted):.0f} drafted tokens are too few for a verdict")
