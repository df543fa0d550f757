"""A server's recorded log and the client's results -> what was recorded of a candidate. Pure.

Windows come from the log through the engine's own reader and `Gather`, as in the daemon. The client's results say which
levels there were, in their order; the requests in the server's access log tell them apart, or what ran and waited does.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from autotuner.bench.measurement import Progress
from autotuner.core.candidate import Candidate, Launch, Scalar
from autotuner.core.effective import merge
from autotuner.core.gather import Gather, LevelPlan
from autotuner.core.recorded import RecordedLevel, RecordedTrial, progress_of
from autotuner.core.statistics import median
from autotuner.engines.base import Effective, Engine, ServerExit, Window
from autotuner.engines.logtext import split_lines
from autotuner.errors import InvalidInput, Problem

STEPS_A_LINE = 40  # SGLang's --decode-log-interval, unless it is set
LINE_EVERY_S = 10.0  # vLLM's VLLM_LOG_STATS_INTERVAL
# An answer that begins, as uvicorn logs it: of every engine whose access log is on.
_REQUEST = re.compile(r'"POST /(?:generate|v1/(?:chat/)?completions)\b[^"]*" 200')


class Point(BaseModel):
    """One level as the client saw it: requests, seconds, tokens, and latencies in ms. Other keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    concurrency: int = Field(ge=1)
    requests: int = Field(ge=1)
    wall_s: float = Field(gt=0)
    output_tokens: int = Field(gt=0)
    failed: int = Field(default=0, ge=0)
    kind: str = ""
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p99_ms: float | None = None


class Results(BaseModel):
    """One run: the server's arguments and variables, how it started and ended, and its levels in their order.

    `ready_s` is None for a server that never came up; then `exit` is its exit code.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    ready_s: float | None = None
    exit: int | None = None
    points: tuple[Point, ...] = ()


def candidate_of(name: str, engine: str, results: Results) -> Candidate:
    """Given a run's arguments and variables, return the candidate that launches the same."""
    args: dict[str, Any] = {}
    words = list(results.args)
    while words:
        flag = words.pop(0).lstrip("-")
        values = list(itertools.takewhile(lambda word: not _is_flag(word), words))
        del words[: len(values)]
        key, equals, value = flag.partition("=")
        values = [value, *values] if equals else values
        typed = [_typed(text) for text in values]
        args[key] = True if not typed else typed[0] if len(typed) == 1 else tuple(typed)
    model = args.pop("model-path", None) or args.pop("model", None) or "unknown"
    return Candidate.model_validate(
        {"name": name, "engine": engine, "launch": Launch(model=str(model), args=args, env=results.env)}
    )


def trial_of(
    source: str, candidate: Candidate, engine: Engine, log: bytes, results: Results, void: Mapping[int, str]
) -> RecordedTrial:
    """Given a candidate, its server's log (named `source`) and the client's results, return what was recorded of it.

    Where several levels have one concurrency (another kind of prompts), the first counts. `void` names levels that must
    not be used, and why. Raise InvalidInput where the levels cannot be told apart.
    """
    lines = split_lines(log)
    facts = [fact for line in lines for fact in engine.read_line(line)]
    effective = merge(fact for fact in facts if isinstance(fact, Effective))
    trial = RecordedTrial(candidate, engine.speculation(candidate), effective=effective, ready_s=results.ready_s)
    if results.ready_s is None:
        ended = ServerExit(results.exit, asked=False, became_ready=False)
        return replace(trial, diagnosis=engine.diagnose(ended, tuple(lines)), exit_code=results.exit)
    levels: dict[int, RecordedLevel] = {}
    for point, piece in zip(results.points, _pieces(source, engine, lines, results.points), strict=True):
        if point.concurrency not in levels:
            levels[point.concurrency] = _level(candidate, engine, point, piece, void.get(point.concurrency, ""))
    return replace(trial, levels=tuple(levels.values()))


def _pieces(source: str, engine: Engine, lines: list[str], points: Sequence[Point]) -> list[list[str]]:
    """The lines of each level: from its first request on, up to the next one's.

    The last requests of the log are the levels'; what came before them was the server's own warm-up and the client's.
    Without an access log a level begins when more runs and waits than the one before has in flight.
    """
    begun = [at for at, line in enumerate(lines) if _REQUEST.search(line)]
    wanted = sum(point.requests for point in points)
    if not points:
        return []
    if not begun:
        return _pieces_by_load(source, engine, lines, points)
    if len(begun) < wanted:
        message = f"the results name {wanted} requests, the log has {len(begun)}: they are not of one run"
        raise InvalidInput([Problem(source, message)])
    firsts = itertools.accumulate((point.requests for point in points[:-1]), initial=len(begun) - wanted)
    cuts = [begun[first] for first in firsts]
    return [lines[a:b] for a, b in zip(cuts, [*cuts[1:], len(lines)], strict=True)]


def _pieces_by_load(source: str, engine: Engine, lines: list[str], points: Sequence[Point]) -> list[list[str]]:
    if any(a.concurrency >= b.concurrency for a, b in itertools.pairwise(points)):
        message = "has no access log, and its levels do not rise, so they cannot be told apart"
        raise InvalidInput([Problem(source, message)])
    pieces: list[list[str]] = [[] for _ in points]
    at = 0
    for line in lines:
        for fact in engine.read_line(line):
            if isinstance(fact, Window) and fact.running is not None:
                load = fact.running + (fact.queued or 0)
                at = next((i for i in range(at, len(points)) if load <= points[i].concurrency), len(points) - 1)
        pieces[at].append(line)
    return pieces


def _level(candidate: Candidate, engine: Engine, point: Point, lines: list[str], void: str) -> RecordedLevel:
    gather = Gather(
        LevelPlan(point.concurrency, decides=True, cap=None, speculation=None, baseline_steps_s={}, best=None)
    )
    gather.add_progress(Progress(at_s=0.0, phase="steady", events=0, in_flight=0, done=0, failed=0))
    begun, started = 0, list[int]()  # requests that had begun when each window ended
    for line in lines:
        begun += bool(_REQUEST.search(line))
        gather.add_log(engine.read_line(line))
        started += [begun] * (len(gather.log_windows) - len(started))
    busy = [i for i, w in enumerate(gather.log_windows) if w.running != 0]
    windows = tuple(gather.log_windows[i] for i in busy)
    ends_s, tokens = _paced(candidate, point, windows)
    share = [at_s / point.wall_s for at_s in ends_s]
    flying = [round((w.running or 0) + (w.queued or 0)) for w in windows]
    done = [max(0, started[i] - flying[n]) if begun else int(point.requests * share[n]) for n, i in enumerate(busy)]
    done = [max(done[: n + 1]) for n in range(len(done))]
    return RecordedLevel(
        concurrency=point.concurrency,
        windows=windows,
        progress=progress_of(point.concurrency, ends_s, tokens, [*done[:-1], point.requests] if done else [], flying),
        requests_failed=point.failed,
        ttft_ms=_stated(p50=point.ttft_p50_ms, p99=point.ttft_p99_ms),
        tpot_ms=_stated(p50=point.tpot_p50_ms, p99=point.tpot_p99_ms),
        void=void or ("" if windows else "the log has no line on its load"),
    )


def _paced(candidate: Candidate, point: Point, windows: tuple[Window, ...]) -> tuple[list[float], list[float]]:
    """When each window ended and how many tokens it brought, so that they sum to what the client saw.

    SGLang prints a line every so many steps, so a window's tokens are steps x running x accept length, and its seconds
    those over its rate; other engines print at fixed times. The first window counts from before the load: it has what
    the others leave of the level's time, but no less than they usually take.
    """
    seconds, tokens = [], []
    for window in windows:
        rate = window.gen_tok_s or 0.0
        if candidate.engine == "sglang":
            made = _steps_a_line(candidate) * (window.running or 0) * (window.accept_len or 1) if rate else 0.0
            length = made / rate if rate else 0.0
        else:
            length = window.seconds or LINE_EVERY_S
            made = length * rate
        tokens.append(made)
        seconds.append(length)
    usual = [length for length, window in zip(seconds, windows, strict=True) if not window.after_idle and length]
    if windows and windows[0].after_idle and usual:
        seconds[0] = max(median(usual), point.wall_s - sum(seconds[1:]))
    of_time = point.wall_s / sum(seconds) if sum(seconds) else 0.0
    of_tokens = point.output_tokens / sum(tokens) if sum(tokens) else 0.0
    return list(itertools.accumulate(s * of_time for s in seconds)), [t * of_tokens for t in tokens]


def _steps_a_line(candidate: Candidate) -> float:
    asked = candidate.arg("decode-log-interval")
    return float(asked) if isinstance(asked, int) and asked > 0 else STEPS_A_LINE


def _stated(**latencies: float | None) -> dict[str, float]:
    return {name: value for name, value in latencies.items() if value is not None}


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit() and len(word) > 1


def _typed(text: str) -> Scalar:
    """A number where its text comes back unchanged, so that the candidate launches the same words."""
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if str(value) == text:
            return value
    return text
