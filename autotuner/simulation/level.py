"""One level of a simulated launch: windows as a server's counters would give them, looked at by the rules. Seeded, no clock."""

import math
import random
from dataclasses import dataclass

from autotuner.bench.measurement import Figures
from autotuner.core.facts import level_facts, server_facts
from autotuner.core.gather import LevelPlan, level_result, so_far
from autotuner.core.policy import Facts, Policy, holding
from autotuner.core.statistics import Interval, confidence_sequence, mean_interval
from autotuner.core.verdict import LevelResult
from autotuner.core.watching import LevelRules
from autotuner.engines.base import Speculation, Window
from autotuner.simulation.world import OUTPUT_TOKENS, Host, Server

SECONDS, WINDOW_S = 60.0, 1.0
EXTEND_MAX, FEW_ANSWERS_MAX = 3.0, 2.0  # as the daemon's own measuring has them


@dataclass(frozen=True)
class Launch:
    """One start of a server: every rate of it is off by the same factor."""

    server: Server
    factor: float


def launched(server: Server, host: Host, rng: random.Random) -> Launch:
    """Start a server: its rates are off by the noise between launches of this host."""
    return Launch(server, rng.lognormvariate(0, host.launch_noise))


def speculation_of(server: Server) -> Speculation | None:
    """Given a server, return how it speculates, as its candidate file would say."""
    draft = server.draft
    return Speculation("EAGLE3", draft.depth, draft.depth + 1) if draft else None


def warm_up_s(server: Server, level: int) -> float:
    """Given a server and a level, return the seconds before its steady part: one request a stream."""
    return OUTPUT_TOKENS * level / server.tok_s(level)


def steady_s(server: Server, level: int) -> float:
    """Given a server and a level, return the seconds of its steady part where no rule ends it: longer for few answers."""
    enough_s = level * OUTPUT_TOKENS / server.tok_s(level)
    return min(max(SECONDS, WINDOW_S * math.ceil(enough_s / WINDOW_S)), FEW_ANSWERS_MAX * SECONDS)


def measure(
    launch: Launch, host: Host, plan: LevelPlan, policies: tuple[Policy, ...], facts: Facts, rng: random.Random
) -> tuple[LevelResult, float]:
    """Measure one level under the rules, to its end if there are none; return its result and the seconds it took."""
    rules, shifts, prompts_now = LevelRules(policies), _Noise(host, rng), _Prompts(host, rng)
    windows: list[Window] = []
    steady_s = 0.0
    warm_s = warm_up_s(launch.server, int(plan.level))
    while True:
        windows.append(_window(launch, int(plan.level), shifts, prompts_now))
        steady_s += WINDOW_S
        figures = _figures(plan, windows, plan.doubt.alpha)
        if policies:
            prompts = figures.requests_ok - int(plan.level) + launch.server.running(int(plan.level))
            seen = so_far(
                plan,
                tuple(windows),
                figures,
                load_s=warm_s + steady_s,
                prompts=prompts,
                rates=tuple(w.gen_tok_s or 0.0 for w in windows),
            )
            alive = server_facts(alive=True, exit_code=None, diagnosis=None)
            rules.look("window", {**alive, **facts, **level_facts(seen)})
        if rules.over or _ended(plan, policies, rules, figures, steady_s):
            break
    final = _figures(plan, windows, None)
    if policies and rules.ended is None:
        seen = so_far(plan, tuple(windows), final, load_s=warm_s + steady_s, over=True)
        rules.look("level", {**facts, **level_facts(seen)})
    final = final.model_copy(update={"stopped_early": rules.ended is not None})
    result = level_result(plan, tuple(windows), final)
    found = {"fired": rules.ended, "settled": rules.settled}
    return result.model_copy(update=found), warm_s + steady_s


class _Noise:
    """Relative errors of consecutive windows, correlated as the host's are."""

    def __init__(self, host: Host, rng: random.Random) -> None:
        self._host, self._rng = host, rng
        self._last = rng.gauss(0, host.window_noise)

    def next(self) -> float:
        r = self._host.correlation
        self._last = r * self._last + (1 - r * r) ** 0.5 * self._rng.gauss(0, self._host.window_noise)
        return max(0.2, 1 + self._last)


class _Prompts:
    """By how much, relatively, the prompts that happen to run differ in accept length; those not answered yet run on."""

    def __init__(self, host: Host, rng: random.Random) -> None:
        self._host, self._rng = host, rng
        self._last: float | None = None

    def next(self, running: float, tokens: float) -> float:
        """Given the running requests and the tokens of one window, return the window's."""
        answered = tokens / OUTPUT_TOKENS
        drawn = self._rng.gauss(0, self._host.prompt_noise / max(1.0, running, answered) ** 0.5)
        stay = max(0.0, 1 - answered / running)
        self._last = drawn if self._last is None else stay * self._last + (1 - stay * stay) ** 0.5 * drawn
        return self._last


def _window(launch: Launch, level: int, noise: _Noise, prompts: _Prompts) -> Window:
    """One window: the step time varies with the host, the accept length with the prompts that happen to run."""
    server = launch.server
    running = server.running(level)
    step_s = server.step_s(level) / launch.factor / noise.next()
    queued = float(level - running)
    if server.draft is None:
        return Window("metrics", running, queued, running / step_s, seconds=WINDOW_S)
    draft, steps = server.draft, max(1, round(WINDOW_S / step_s * running))
    mean = draft.accept_len
    if mean > 1:  # never below 1, nor above what the depth allows
        mean = min(draft.depth + 1.0, max(1.0, mean * (1 + prompts.next(running, steps * mean))))
    accepted = round((mean - 1) * steps)
    return Window(
        "metrics",
        running,
        queued,
        running * mean / step_s,
        accept_len=1 + accepted / steps,
        drafts=steps,
        drafted=steps * draft.depth,
        accepted=accepted,
        seconds=WINDOW_S,
    )


def _figures(plan: LevelPlan, windows: list[Window], alpha: float | None) -> Figures:
    """Figures as the client would give them; with bounds for every look while the level runs, else with usual ones.

    As there, answers of the warm-up, one a stream, are counted with the others.
    """
    rates = [w.gen_tok_s or 0.0 for w in windows]
    bounds: Interval = mean_interval(rates) if alpha is None else confidence_sequence(rates, alpha)
    seconds = WINDOW_S * len(windows)
    return Figures(
        concurrency=int(plan.level),
        seconds=seconds,
        requests_ok=int(plan.level) + int(bounds.mean * seconds / OUTPUT_TOKENS),
        requests_failed=0,
        output_tok_s=bounds.mean,
        output_tok_s_low=max(0.0, bounds.low),
        output_tok_s_high=bounds.high,
        tokens_per_event=1.0,
        tokens_counted=True,
    )


def _ended(plan: LevelPlan, policies: tuple[Policy, ...], rules: LevelRules, figures: Figures, steady_s: float) -> bool:
    """Whether the level's time is over, by the daemon's own conditions."""
    if steady_s < SECONDS:
        return False
    if figures.requests_ok < 2 * int(plan.level) and steady_s < FEW_ANSWERS_MAX * SECONDS:
        return False
    wanted = holding(policies, "window", rules.looks[-1].facts) if rules.looks else ()
    extends = any(fired.action == "extend" and not fired.dry_run for fired in wanted)
    return not extends or steady_s >= EXTEND_MAX * SECONDS
