"""From a rule that proposes to the candidate it proposes: what to change, what it should bring, and what speaks against it.

Owns two promises: nothing is proposed that was tried or that failed before in the same family, and every proposal says
its reason with numbers. Names of flags are the engines'; here are wishes. Pure.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autotuner.bench.benchmark import Level
from autotuner.core.candidate import Candidate, Scalar, derive, flag_name, merged_json
from autotuner.core.causes import level_of, split_loss
from autotuner.core.depth import best_depth
from autotuner.core.policy import Fired, Move
from autotuner.core.report import rate
from autotuner.core.speculation import Pays
from autotuner.core.state import Verdict
from autotuner.core.verdict import LevelResult
from autotuner.engines.base import Effective, Engine, Speculation
from autotuner.engines.renamed import replacement
from autotuner.engines.wishes import (
    CannotChange,
    Changed,
    DraftSteps,
    GraphBatch,
    GraphsOn,
    MemoryShare,
    RunAtOnce,
    SpeculateUpTo,
)

USUAL_GAIN = 0.10  # of a follow-up whose gain nothing predicts: it only ranks them
REPAIR_CHANCE = 0.5  # that a start which is mended serves; what it then brings is unknown, so half a usual gain
GAIN_MIN = 0.03  # the noise between launches: a predicted gain below it could not be measured
MEMORY_DOWN, MEMORY_UP = -0.05, 0.03

_MEMORY_FLAGS = {"args.mem-fraction-static", "args.gpu-memory-utilization"}
_DEPTH_FLAGS = {
    *("args.speculative-num-steps", "args.speculative-num-draft-tokens", "args.speculative-eagle-topk"),
    *("args.spec-tokens", "args.speculative-config.num-speculative-tokens", "args.spec-draft-n-max", "args.draft-max"),
}
_AT_A_RATE = "the benchmark's levels are rates, so it is not known how many requests are to run at once"
_Answered = tuple[Changed | CannotChange, str, float]  # the change, its reason with numbers, the expected gain

# What each move is for, as entries say it.
PURPOSE: dict[Move | None, str] = {
    None: "to isolate the cause",
    "lift-running-cap": "to isolate the cause",
    "raise-graph-batch": "to decode with CUDA graphs at every batch",
    "graphs-on": "to decode with CUDA graphs",
    "tune-draft-tokens": "to try the depth that its step times speak for",
    "no-speculation-above": "to speculate only where it pays",
    "memory-down": "to leave more memory beside weights and KV cache",
    "memory-up": "to give the KV cache more memory",
    "replace-flag": "to start with the flag as this release calls it",
}


@dataclass(frozen=True)
class Situation:
    """What is known where a rule proposed. `level` is the one at which it fired, None at a start.

    `levels` are the benchmark's concurrencies; there are none where its levels are rates, and what is proposed for so many
    requests in flight is not proposed then.

    `depths` maps draft steps to R (step time over the plain one's) measured there in this family. `refused` are the
    lines with which a start ended.
    """

    candidate: Candidate
    engine: Engine
    levels: tuple[int, ...]
    request_tokens: int = 0
    level: Level | None = None
    effective: Effective | None = None
    version: str | None = None
    results: tuple[LevelResult, ...] = ()
    baseline: Mapping[Level, LevelResult] = field(default_factory=dict)
    depths: Mapping[int, float] = field(default_factory=dict)
    refused: tuple[str, ...] = ()

    @property
    def result(self) -> LevelResult | None:
        """The level at which the rule fired."""
        return next((r for r in self.results if r.concurrency == self.level), None)

    @property
    def speculation(self) -> Speculation | None:
        """What the candidate asks of speculation."""
        return self.engine.speculation(self.candidate)


@dataclass(frozen=True)
class Proposal:
    """A candidate to try: why, in words with numbers, and what it should bring (0.05 is 5 %) for how many GPU seconds."""

    candidate: Candidate
    change: Mapping[str, Scalar]
    said: str
    gain: float
    gpu_s: float = 0.0


@dataclass(frozen=True)
class NotProposed:
    """Why a rule's proposal came to nothing."""

    why: str
    name: str = ""


@dataclass(frozen=True)
class Tried:
    """An earlier trial of the slot. `started` says that its server came to serve, `cause` why it ended, if it did."""

    id: int
    candidate: Candidate
    parent: int | None
    same_benchmark: bool
    verdict: Verdict | None
    started: bool
    cause: str = ""


@dataclass(frozen=True)
class Limits:
    """How far follow-ups may go: how many more in this campaign, and how deep a chain of them."""

    left: int
    depth: int


def work_out(fired: Fired, situation: Situation) -> Proposal | NotProposed | None:
    """Given a rule that proposes and what is known, return the candidate, or why there is none; None if nothing applies."""
    found = _MOVES[fired.move](situation) if fired.move else (Changed(dict(fired.set)), "", USUAL_GAIN)
    if found is None:
        return None
    answer, said, gain = found
    if isinstance(answer, CannotChange):
        return NotProposed(answer.why)
    said = "; ".join(part for part in (said, answer.note) if part)
    reason = f"proposed by {fired.file} / {fired.rule}: {fired.sentence}" + (f" ({said})" if said else "")
    changed = derive(situation.candidate, answer.settings, reason, answer.label)
    if changed.id == situation.candidate.id:
        return NotProposed("the candidate has these settings already")
    return Proposal(changed, answer.settings, said, gain)


def objection(proposal: Proposal, parent: Tried, history: Sequence[Tried], limits: Limits) -> str:
    """Given a proposal, the trial it comes from and every trial of the slot, return what speaks against it; else empty."""
    by_id = {tried.id: tried for tried in (*history, parent)}
    if len(_ancestors(parent, by_id)) >= limits.depth:
        return (
            f"it would be follow-up {limits.depth + 1} in a chain, {limits.depth} is the most (budget.proposal_depth)"
        )
    same = [t for t in history if t.candidate.id == proposal.candidate.id and t.same_benchmark]
    if same:
        return (
            f"it was tried before: trial {same[-1].id}"
            if same[-1].verdict
            else f"it waits already: trial {same[-1].id}"
        )
    change = {_plain(key): value for key, value in proposal.change.items()}
    family = _root(parent, by_id)
    for tried in history:
        older = by_id.get(tried.parent) if tried.parent is not None else None
        if older is None or tried.started or tried.verdict is not Verdict.FAIL or _root(tried, by_id) != family:
            continue
        did = _difference(older.candidate, tried.candidate)
        if did and did.items() <= change.items():
            return f"the same change kept trial {tried.id} of this family from starting ({tried.cause or 'unknown'})"
    if limits.left <= 0:
        return "the campaign's follow-ups are used up (budget.proposals)"
    return _memory_objection(proposal, (*history, parent))


def depths_measured(
    situation: Situation, measured: Sequence[tuple[Candidate, Sequence[LevelResult]]]
) -> dict[int, float]:
    """Given a situation and other measured candidates, return R by draft steps at its level.

    Only candidates that differ in nothing but their depth count.
    """
    found: dict[int, float] = {}
    own = _without_depth(situation.candidate)
    for candidate, results in measured:
        asked = situation.engine.speculation(candidate) if candidate.engine == situation.candidate.engine else None
        if asked is None or asked.num_steps is None or asked.is_tree or _without_depth(candidate) != own:
            continue
        for result in results:
            spec = result.speculation
            if result.concurrency == situation.level and spec and spec.needed and not result.figures.void:
                found[asked.num_steps] = spec.needed
    return found


def ordered(proposals: Sequence[Proposal]) -> list[Proposal]:
    """Given the proposals of one trial, return them with the most expected gain for a second of GPU time first."""
    return sorted(proposals, key=lambda p: (-p.gain / max(p.gpu_s, 1.0), p.candidate.name))


def speculation_by_level(results: Sequence[LevelResult]) -> tuple[list[Level], list[Level]]:
    """Given a trial's levels, return those at which speculation pays, and those that it lost, by figures or by a rule."""
    paid, lost = [], []
    for result in results:
        spec = result.speculation
        if spec is None or result.figures.void:
            continue
        ended = result.fired is not None and result.fired.action == "skip-level"
        if ended or spec.pays in {Pays.NO, Pays.HOPELESS}:
            lost.append(result.concurrency)
        elif spec.pays is Pays.YES:
            paid.append(result.concurrency)
    return sorted(paid), sorted(lost)


def _lift_running_cap(s: Situation) -> _Answered:
    if not s.levels:
        return CannotChange(_AT_A_RATE), "", 0.0
    busiest = max(s.levels)
    slot = s.effective.context_len if s.effective else None
    answer = s.engine.change(s.candidate, RunAtOnce(busiest, s.request_tokens, slot), s.version)
    result = s.result
    if result is None or not result.running:
        return answer, "", USUAL_GAIN
    lost = level_of(result, s.baseline)
    shares = split_loss(lost) if lost is not None else ()
    of_cap = sum(share.tok_s for share in shares if share.cause in {"admission-cap", "kv-pressure"})
    if lost is not None and shares and lost.measured_tok_s > 0:
        total = lost.baseline_tok_s - lost.measured_tok_s
        said = (
            f"the cap: {100 * min(1.0, of_cap / total):.0f} % of the {rate(total)} tok/s lost at concurrency {s.level}"
        )
        # What a plain server gains without the cap, in proportion: where speculation loses, it loses there as well.
        return answer, said, of_cap / (lost.baseline_tok_s - of_cap)
    # Without a baseline at what ran: more requests a step bring more, though less than in proportion.
    return (
        answer,
        f"{result.running:.0f} of {s.level} requests ran",
        0.5 * max(0.0, (s.level or 0) / result.running - 1),
    )


def _raise_graph_batch(s: Situation) -> _Answered:
    ranks = (s.effective.dp if s.effective else None) or 1
    busiest = max(s.levels) if s.levels else _most_running(s.results)
    if busiest is None:
        return CannotChange(_AT_A_RATE), "", 0.0
    cap = (s.effective.running_cap if s.effective else None) or busiest  # no batch is larger than what may run
    batch = -(-min(busiest, cap) // ranks)
    largest = s.effective.graph_max_batch if s.effective else None
    said = f"the largest CUDA graph holds {largest} requests" if largest is not None else ""
    return s.engine.change(s.candidate, GraphBatch(batch), s.version), said, USUAL_GAIN


def _most_running(results: Sequence[LevelResult]) -> int | None:
    """The requests that run at once at most where they are sent at a rate; None where no server told of any.

    How many do is about Poisson distributed (exactly so of M/G/inf): three standard deviations above the mean.
    """
    running = max((r.running for r in results if r.running), default=None)
    return None if running is None else math.ceil(running + 3 * math.sqrt(running))


def _graphs_on(s: Situation) -> _Answered:
    return s.engine.change(s.candidate, GraphsOn(), s.version), "", USUAL_GAIN


def _tune_draft_tokens(s: Situation) -> _Answered:
    asked, spec = s.speculation, s.result.speculation if s.result else None
    if asked is None or asked.num_steps is None or spec is None or spec.accept_len is None or spec.needed is None:
        return CannotChange("its depth or its step times are not known"), "", 0.0
    if asked.is_tree:
        answer = s.engine.change(s.candidate, DraftSteps(asked.num_steps), s.version)
        said = (
            f"a chain of {asked.num_steps} verifies {asked.num_steps + 1} tokens a step instead of {asked.draft_tokens}"
        )
        return answer, said, USUAL_GAIN
    measured = {**s.depths, asked.num_steps: spec.needed}
    best = best_depth(spec.accept_len.mean, asked.num_steps, measured)
    if best is None or best.gain <= GAIN_MIN:
        known = f"step times of {len(measured)} depths" if len(measured) > 1 else "its step time"
        return CannotChange(f"no other depth promises more than {100 * GAIN_MIN:.0f} %, by {known}"), "", 0.0
    said = (
        f"draft depth {best.steps} instead of {asked.num_steps}: accept length {best.accept_len:.2f} predicted, "
        f"{spec.accept_len.mean:.2f} measured"
    )
    return s.engine.change(s.candidate, DraftSteps(best.steps), s.version), said, best.gain


def _no_speculation_above(s: Situation) -> _Answered | None:
    if not s.levels:
        return CannotChange(_AT_A_RATE), "", 0.0
    paid, lost = speculation_by_level(s.results)
    below = [level for level in paid if level < min(lost, default=0)]
    if not below:
        return None
    gains = [
        r.figures.output_tok_s / base.figures.output_tok_s - 1
        for r in s.results
        if r.concurrency in below and (base := s.baseline.get(r.concurrency)) and base.figures.output_tok_s > 0
    ]
    said = f"it pays up to concurrency {below[-1]} and loses from {min(lost)}"
    wish = SpeculateUpTo(int(below[-1]), max(s.levels))
    return s.engine.change(s.candidate, wish, s.version), said, max(gains, default=USUAL_GAIN)


def _memory_down(s: Situation) -> _Answered:
    return _memory(s, MEMORY_DOWN)


def _memory_up(s: Situation) -> _Answered:
    return _memory(s, MEMORY_UP)


def _memory(s: Situation, step: float) -> _Answered:
    known = s.effective.memory_share if s.effective else None
    answer = s.engine.change(s.candidate, MemoryShare(step, known), s.version)
    return answer, "", USUAL_GAIN * (REPAIR_CHANCE if s.level is None else 1.0)


def _replace_flag(s: Situation) -> _Answered | None:
    """Only what the server itself refused, by its own words, is replaced."""
    # Not "[--flag", which is how a usage text names every flag there is.
    words = {word.partition("=")[0].strip("'\",;:()") for line in s.refused for word in line.split()}
    settings: dict[str, Scalar] = {}
    said = []
    for key, value in s.candidate.launch.args.items():
        name = flag_name(key)
        if not {f"--{name}", f"-{name}", f"--{key.lstrip('-')}"} & words:
            continue
        found = replacement(s.candidate.engine, name, value)
        if found is None:
            continue
        new, given = found
        settings[f"args.{key}"] = False
        if new:
            settings[f"args.{new}"] = given
        said.append(f"--{name} is called --{new} there" if new else f"--{name} is gone")
    if not settings:
        return None
    label = {key: value for key, value in settings.items() if value is not False}
    gone = [flag_name(key.removeprefix("args.")) for key, value in settings.items() if value is False]
    if not label:
        label = {"without": "-".join(gone)}
    return Changed(settings, label), ", ".join(said), USUAL_GAIN * REPAIR_CHANCE


_MOVES: dict[Move, Callable[[Situation], _Answered | None]] = {
    "lift-running-cap": _lift_running_cap,
    "raise-graph-batch": _raise_graph_batch,
    "graphs-on": _graphs_on,
    "tune-draft-tokens": _tune_draft_tokens,
    "no-speculation-above": _no_speculation_above,
    "memory-down": _memory_down,
    "memory-up": _memory_up,
    "replace-flag": _replace_flag,
}


def _ancestors(tried: Tried, by_id: Mapping[int, Tried]) -> list[Tried]:
    """The trials that a trial was proposed from, nearest first."""
    found: list[Tried] = []
    while tried.parent is not None and tried.parent in by_id and by_id[tried.parent] not in found:
        tried = by_id[tried.parent]
        found.append(tried)
    return found


def _root(tried: Tried, by_id: Mapping[int, Tried]) -> str:
    """The candidate that a family of follow-ups began with."""
    return [tried, *_ancestors(tried, by_id)][-1].candidate.id


def _difference(older: Candidate, newer: Candidate) -> dict[str, object]:
    """The settings that a follow-up changed; one that was taken out is false."""
    before, after = _settings(older), _settings(newer)
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    return {**changed, **{key: False for key in before if key not in after}}


def _settings(candidate: Candidate) -> dict[str, object]:
    launch = candidate.launch
    args: dict[str, object] = {f"args.{flag_name(key)}": value for key, value in launch.args.items()}
    env = {f"env.{key}": value for key, value in launch.env.items()}
    return {**args, **env, "model": launch.model, "python": launch.python, "binary": launch.binary}


def _plain(key: str) -> str:
    group, _, name = key.partition(".")
    return f"args.{flag_name(name)}" if group == "args" else key


def _memory_objection(proposal: Proposal, history: Sequence[Tried]) -> str:
    """Out of memory at one share and too little for the KV cache at another: then no share fits, and none is searched for."""
    if not any(_plain(key) in _MEMORY_FLAGS for key in proposal.change):
        return ""
    family = _without_memory(proposal.candidate)
    causes = {t.cause: t.id for t in history if _without_memory(t.candidate) == family}
    full = next((causes[cause] for cause in ("oom-in-capture", "oom-in-load") if cause in causes), None)
    small = causes.get("kv-too-small")
    if full is None or small is None:
        return ""
    return (
        f"no share of the memory fits: trial {full} ran out of it, and trial {small} had too little for the KV cache; "
        "take a smaller drafter, a shorter context, or more GPUs"
    )


def _without_depth(candidate: Candidate) -> tuple[tuple[str, object], ...]:
    settings = {key: value for key, value in _settings(candidate).items() if key not in _DEPTH_FLAGS}
    for key in ("args.speculative-config", "args.sc"):
        if key in settings:
            settings[key] = merged_json(str(settings[key]), {"num_speculative_tokens": None})
    return tuple(sorted(settings.items(), key=lambda item: item[0]))


def _without_memory(candidate: Candidate) -> tuple[str, tuple[tuple[str, object], ...]]:
    settings = {key: value for key, value in _settings(candidate).items() if key not in _MEMORY_FLAGS}
    return candidate.engine, tuple(sorted(settings.items(), key=lambda item: item[0]))
