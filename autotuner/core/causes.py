"""The loss against the best-known at a level, split between its causes, in tok/s. Pure.

A waterfall: from the baseline's rate to what a plain server would give at the requests that really ran (a cap, a full KV
pool), from there to what this draft would give at a usual step time (acceptance), and the rest to the step itself
(missing graphs, a kernel that fell back, or the cost of drafting and verifying). The parts add up to the loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from autotuner.bench import benchmark
from autotuner.core.gather import busy_steps
from autotuner.core.speculation import STEADY_RATIO, SpeculationAtLevel, baseline_step, prior_needed
from autotuner.core.verdict import LevelResult

# What makes every step dearer, in the words of engines/vocabulary.py, and how an entry says it.
_DEARER_STEP = {
    "graphs-off": "decoding without CUDA graphs",
    "graph-batch": "a batch above the largest CUDA graph",
    "capture-failed-other": "a graph capture that failed",
    "effective-differs": "a backend that is not the one asked for",
    "collective-cost": "communication between the GPUs",
    "host-contention": "contention on the host",
    "thermal-or-power-limit": "clocks held down by heat or power",
}


@dataclass(frozen=True)
class Share:
    """One cause's part of a loss: a word, tok/s, and the cause as an entry says it."""

    cause: str
    tok_s: float
    words: str


EAGER_RATIO = 0.5  # of the steady windows without a CUDA graph: below, the odd batch that fell off one


@dataclass(frozen=True)
class Level:
    """What a level's loss is explained by. Rates in tok/s, `base_step_s` is the plain step time at `running`.

    `step_cause` is the word for what made the steps dearer, empty where nothing was seen; `preempted` that requests were
    put back for want of KV memory.
    """

    concurrency: int
    baseline_tok_s: float
    measured_tok_s: float
    running: float
    base_step_s: float
    speculation: SpeculationAtLevel | None = None
    step_cause: str = ""
    preempted: bool = False


def split_loss(level: Level) -> tuple[Share, ...]:
    """Given a level that lost, return the shares of its loss, largest first; empty where nothing was lost.

    A plain server held at the same running requests gives running / step. What its rate lacks to the baseline's is the
    share of whatever kept requests from running; the rest belongs to speculation, or to dearer steps.
    """
    if level.measured_tok_s >= level.baseline_tok_s:
        return ()
    held = min(level.running / level.base_step_s, level.baseline_tok_s)
    shares = []
    if level.running < STEADY_RATIO * level.concurrency:
        shares.append(_not_running(level, held))
    rest = (held if shares else level.baseline_tok_s) - level.measured_tok_s
    shares += _of_steps(level, rest) if rest > 0 else [_gained(level, rest)]
    return tuple(sorted((s for s in shares if s.tok_s != 0), key=lambda s: -s.tok_s))


def _gained(level: Level, rest: float) -> Share:
    if level.speculation is None:
        return Share("step-gain", rest, "steps that take less time gained")
    return Share("speculation-gain", rest, "speculation itself gained")


def _not_running(level: Level, held: float) -> Share:
    lost = level.baseline_tok_s - held
    there = f"(a plain server held there would give about {held:,.0f} tok/s)"
    if level.preempted:
        return Share("kv-pressure", lost, f"the KV pool, in which only {level.running:.0f} requests fit {there}")
    return Share("admission-cap", lost, f"the server's cap of {level.running:.0f} running requests {there}")


def _of_steps(level: Level, rest: float) -> list[Share]:
    spec = level.speculation
    dearer = _DEARER_STEP.get(level.step_cause)
    if spec is None or spec.accept_len is None or spec.needed is None:
        return [Share(level.step_cause or "slower-step", rest, dearer or "steps that take longer")]
    if dearer and spec.ceiling is not None:
        usual = prior_needed(round(spec.ceiling) - 1, level.running)
        of_step = min(rest, max(0.0, level.measured_tok_s * (spec.needed / usual - 1)))
        words = f"{dearer} (a usual speculative step costs {usual:.1f} plain ones here, this one {spec.needed:.1f})"
        left = _broken(spec, rest - of_step) or Share(
            "acceptance", rest - of_step, f"an accept length of {spec.accept_len.mean:.2f}"
        )
        return [Share(level.step_cause, of_step, words), left]
    if broken := _broken(spec, rest):
        return [broken]
    best = level.measured_tok_s * (spec.ceiling or spec.needed) / spec.accept_len.mean
    acceptance = min(rest, max(0.0, best - level.measured_tok_s))
    cost = Share(
        "step-cost", rest - acceptance, f"the cost of a step, which even {spec.ceiling or 0:.2f} would not pay"
    )
    return [
        Share("acceptance", acceptance, f"speculation at an accept length of {spec.accept_len.mean:.2f}"),
        cost,
    ]


def _broken(spec: SpeculationAtLevel, tok_s: float) -> Share | None:
    """All that speculation costs, where nothing drafted is accepted: what a better drafter would cost it does not tell."""
    if not spec.nothing_accepted or spec.accept_len is None:
        return None
    seen = f"accept length {spec.accept_len.mean:.2f} over {spec.drafts} verify steps"
    return Share("draft-broken", tok_s, f"a broken drafter, of which nothing is accepted ({seen})")


def level_of(result: LevelResult, baseline: Mapping[benchmark.Level, LevelResult]) -> Level | None:
    """Given a measured level and the best-known's levels, return what its loss is explained by; None if it cannot be.

    At a request rate it never is: how many requests run is then what comes of a server's speed, and no cause of it.
    """
    base = baseline.get(result.concurrency)
    if base is None or result.figures.load != "concurrency":
        return None
    if result.figures.void or base.figures.void or result.running is None:
        return None
    step = result.speculation.baseline_step if result.speculation else None
    if step is None or step.known == "prior":
        step = baseline_step(busy_steps(baseline), result.running)
    if step is None:
        return None
    return Level(
        concurrency=int(result.concurrency),
        baseline_tok_s=base.figures.output_tok_s,
        measured_tok_s=result.figures.output_tok_s,
        running=result.running,
        base_step_s=step.seconds,
        speculation=result.speculation,
        step_cause=_step_cause(result, base),
        preempted=result.preemptions > 0,
    )


def _step_cause(result: LevelResult, base: LevelResult) -> str:
    """What made the steps dearer: what the server's lines say, else that its windows had no graph and the baseline's had."""
    if result.reading is not None and result.reading.cause in _DEARER_STEP:
        return result.reading.cause
    eager = result.graph_ratio is not None and result.graph_ratio < EAGER_RATIO
    if not eager or (base.graph_ratio is not None and base.graph_ratio < EAGER_RATIO):
        return ""
    above = result.graph_max_batch and result.running and result.running > result.graph_max_batch
    return "graph-batch" if above else "graphs-off"
