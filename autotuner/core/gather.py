"""Gathers what is read while a level runs, and says at any moment what it amounts to. Pure but for its own lists.

Three sources are joined: the client's progress, the server's log, and deltas of its counters. Where counters give the
verify steps they are exact and win; otherwise the log's own decode lines do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autotuner.bench.benchmark import Level, LoadKind
from autotuner.bench.measurement import Figures, Progress, interim_figures, steady_rates
from autotuner.bench.settling import settled_line
from autotuner.core.contradiction import contradictions
from autotuner.core.facts import LevelSoFar
from autotuner.core.keeping_up import answered_ratio
from autotuner.core.objective import Constraints, Standing, score_bound
from autotuner.core.ranks import RankJoiner
from autotuner.core.speculation import USUAL_DOUBT, Doubt, assess, busy_windows, decode_rate, steady_windows
from autotuner.core.statistics import Interval
from autotuner.core.verdict import LevelResult
from autotuner.engines.accept_rate import accepted_share, definition_by_fit, definition_of
from autotuner.engines.base import Counters, LogFact, Prefill, Speculation, Window, window_between


@dataclass(frozen=True)
class LevelPlan:
    """What is known before a level begins. `baseline_steps_s` maps running requests to a plain server's step time.

    `busy_steps_s` are the same with the prefills between its steps; at this level nothing else is known of it unless
    `baseline_clean`.
    `load` says what the level is, a concurrency or a rate.
    `ranks` are the data-parallel ones, each with graphs up to `graph_max_batch`. `pays_up_to` and `loses_from` are levels of
    this trial at which speculation paid or lost, as far as they are measured. `silence_limit_s` is how long a serving server of
    this engine may be silent while requests wait.
    """

    level: Level
    decides: bool
    cap: int | None
    speculation: Speculation | None
    baseline_steps_s: dict[float, float]
    best: Figures | None
    doubt: Doubt = USUAL_DOUBT
    graph_max_batch: int | None = None
    engine_version: str | None = None
    ranks: int = 1
    pays_up_to: Level | None = None
    loses_from: Level | None = None
    standing: Standing | None = None
    constraints: Constraints | None = None
    latency_counts: bool = False
    load: LoadKind = "concurrency"
    best_answered_ratio: float | None = None
    busy_steps_s: dict[float, float] = field(default_factory=dict)
    baseline_clean: bool = True
    silence_limit_s: float | None = None

    @property
    def concurrency(self) -> int | None:
        """The requests kept in flight; None where they are sent at a rate, whatever is in flight."""
        return int(self.level) if self.load == "concurrency" else None


@dataclass
class Gather:
    """The evidence of one level in progress. `settles` says that its steady part begins once its rate stands still."""

    plan: LevelPlan
    settles: bool = False
    progress: list[Progress] = field(default_factory=list)
    log_windows: list[Window] = field(default_factory=list)
    metric_windows: list[Window] = field(default_factory=list)
    _scrape: tuple[float, Counters] | None = None
    _progress_at_scrape: int = 0
    _scrape_in_steady: bool = False
    _prefill_ranks: set[str] = field(default_factory=set)
    _spoken_ranks: set[str] = field(default_factory=set)
    _ranks: RankJoiner = field(default_factory=RankJoiner)
    _known_at: list[tuple[int, int]] = field(
        default_factory=list
    )  # windows of log and metrics by each line of progress
    _moved_at_s: float = 0.0

    @property
    def silent_s(self) -> float | None:
        """Seconds since the last token, or the last line that tells of work, while requests wait for theirs; else None."""
        last = self.progress[-1] if self.progress else None
        return max(0.0, last.at_s - self._moved_at_s) if last is not None and last.in_flight else None

    @property
    def steady(self) -> bool:
        """Whether the warm-up is over."""
        return bool(self.progress) and self.progress[-1].phase == "steady"

    @property
    def steady_s(self) -> float:
        """Seconds measured since the warm-up."""
        return self.progress[-1].at_s - self._cold.at_s if self.steady and self._cold else 0.0

    @property
    def answered(self) -> int:
        """Requests answered since the warm-up."""
        return self.progress[-1].done - self._cold.done if self.steady and self._cold else 0

    @property
    def _cold(self) -> Progress | None:
        """The last line of the warm-up; the first line at all where there was none."""
        cold = [p for p in self.progress if p.phase == "warm-up"]
        return cold[-1] if cold else next(iter(self.progress), None)

    def add_progress(self, progress: Progress) -> bool:
        """Take in one line of the worker; tell whether the steady part begins later than was thought, since the rate rose."""
        done = self.progress[-1].done if self.progress else 0
        self.progress.append(progress)
        if progress.events or progress.done > done or not progress.in_flight:
            self._moved_at_s = progress.at_s
        self._known_at.append((len(self.log_windows), len(self.metric_windows)))
        return self._settles()

    def _settles(self) -> bool:
        concurrency, cold = self.plan.concurrency, self._cold
        if concurrency is None or not self.settles or not self.steady or cold is None:
            return False
        start = next(i for i, line in enumerate(self.progress) if line is cold)
        lines = settled_line(self.progress[start:], concurrency)
        if not lines:
            return False
        end = start + lines
        for i in range(start, end + 1):
            self.progress[i] = self.progress[i].model_copy(update={"phase": "warm-up"})
        log, metrics = (known + 1 for known in self._known_at[end])  # and the one that holds some of both
        del self.log_windows[:log], self.metric_windows[:metrics]
        self._known_at = [(max(0, of_log - log), max(0, of_metrics - metrics)) for of_log, of_metrics in self._known_at]
        return True

    def add_log(self, facts: tuple[LogFact, ...]) -> None:
        """Take in the facts of new log lines.

        A prefill taints the decode window that it falls into; the first window of a rank covers the time before the
        load; and a line that states acceptance alone belongs to the line on the load before it.
        """
        for fact in facts:
            if isinstance(fact, Prefill) or (isinstance(fact, Window) and (fact.gen_tok_s or fact.prompt_tok_s)):
                self._moved_at_s = self.progress[-1].at_s if self.progress else 0.0
            if isinstance(fact, Prefill):
                self._prefill_ranks.add(fact.rank)
            elif isinstance(fact, Window):
                window = fact._replace(
                    prefill=fact.prefill or bool(fact.prompt_tok_s) or fact.rank in self._prefill_ranks,
                    after_idle=fact.after_idle or (fact.gen_tok_s is not None and fact.rank not in self._spoken_ranks),
                )
                self._prefill_ranks.discard(fact.rank)
                if fact.gen_tok_s is not None:
                    self._spoken_ranks.add(fact.rank)
                for whole in self._ranks.add(window):
                    if self.steady:
                        self._keep(whole)

    def _keep(self, window: Window) -> None:
        last = self.log_windows[-1] if self.log_windows else None
        alone = window.running is None and window.gen_tok_s is None and window.accept_len is not None
        if alone and last is not None and last.accept_len is None and last.gen_tok_s is not None:
            self.log_windows[-1] = last._replace(
                accept_len=window.accept_len,
                accept_rate=window.accept_rate,
                drafts=window.drafts,
                drafted=window.drafted,
                accepted=window.accepted,
                seconds=window.seconds,
                certainty=window.certainty,
            )
        else:
            self.log_windows.append(window)

    def add_scrape(self, at_s: float, counters: Counters) -> None:
        """Take in one scrape of the metrics; two of them bound a window.

        The client's rate is taken over the client's own clock: on a busy host its lines arrive late and in lumps, and
        tokens of one stretch over the seconds of another would be no rate. Without a new line there is no window yet.
        """
        if self.steady and self._scrape_in_steady and self._scrape is not None and at_s > self._scrape[0]:
            rate = self._rate_since(self._progress_at_scrape)
            if rate is None:
                return
            self.metric_windows.append(window_between(self._scrape[1], counters, at_s - self._scrape[0], rate))
        self._scrape, self._progress_at_scrape = (at_s, counters), len(self.progress)
        self._scrape_in_steady = self.steady  # a window that began in the warm-up would mix both

    def _rate_since(self, line: int) -> float | None:
        """Tokens a second over the client's lines from this one on; None where they span no time."""
        since = self.progress[max(0, line - 1) :]
        seconds = since[-1].at_s - since[0].at_s if since else 0.0
        events = sum(p.events for p in self.progress[line:])
        return events * self.progress[-1].tokens_per_event / seconds if seconds > 0 else None

    @property
    def windows(self) -> tuple[Window, ...]:
        """The windows to judge by: one source, never both, so that nothing counts twice."""
        counted = any(w.drafts for w in self.metric_windows)
        stated = any(w.running is not None and w.gen_tok_s is not None for w in self.log_windows)
        return tuple(self.log_windows if stated and not counted else self.metric_windows)

    def so_far(self, figures: Figures | None = None) -> LevelSoFar:
        """Return what policies look at; with the level's own figures once it is over, else with interim ones."""
        plan, progress = self.plan, self.progress
        found = so_far(
            plan,
            self.windows,
            figures or interim_figures(plan.level, progress, plan.doubt.alpha, plan.load),
            load_s=progress[-1].at_s if progress else 0.0,
            prompts=self.answered + progress[-1].in_flight if self.steady else 0,
            rates=tuple(steady_rates(progress)),
            over=figures is not None,
            preempted=self._preempted,
        )
        in_flight = progress[-1].in_flight if progress else None
        silent_s = self.silent_s if figures is None else None
        return replace(found, in_flight=in_flight, answered_ratio=self.answered_ratio, silent_s=silent_s)

    @property
    def answered_ratio(self) -> Interval | None:
        """Answered / sent requests of late, at a request rate; None where that cannot be told."""
        return answered_ratio(self.progress, self.plan.level) if self.plan.load == "request-rate" else None

    @property
    def _preempted(self) -> int | None:
        """Requests that the server put back: log and counters tell of the same ones, so the larger number counts."""
        told = [sum(w.preemptions for w in windows) for windows in (self.log_windows, self.metric_windows) if windows]
        return max(told, default=None)

    def result(self, figures: Figures) -> LevelResult:
        """Given the level's final figures, return its result, not yet judged."""
        found = contradictions(self.log_windows, self.metric_windows, figures, self.plan.graph_max_batch)
        ratio = self.answered_ratio
        more = {"contradictions": found, "answered_ratio": ratio.mean if ratio is not None else None}
        return level_result(self.plan, self.windows, figures).model_copy(update=more)


def so_far(
    plan: LevelPlan,
    windows: tuple[Window, ...],
    figures: Figures,
    *,
    load_s: float,
    prompts: int = 0,
    rates: tuple[float, ...] = (),
    over: bool = False,
    preempted: int | None = None,
) -> LevelSoFar:
    """Given a level's plan, windows and figures, return what policies look at.

    `load_s` is the time since its load began, `prompts` the requests begun in the steady part, `rates` are output tok/s
    over consecutive stretches of it, `preempted` how often a request was put back, where the server tells.
    """
    spec = (
        assess(
            windows,
            plan.concurrency,
            plan.cap,
            plan.speculation,
            plan.baseline_steps_s,
            plan.doubt,
            plan.busy_steps_s,
            baseline_clean=plan.baseline_clean,
        )
        if plan.speculation
        else None
    )
    bounded = over or plan.concurrency is not None  # part of what is sent at a rate compares with nothing
    return LevelSoFar(
        figures=figures,
        load_s=load_s,
        decides=plan.decides,
        running=_decode(plan, windows)[0],
        speculates=plan.speculation is not None,
        speculation=spec,
        accept_ratio=_accept_ratio(windows, plan),
        best=plan.best,
        doubt=plan.doubt,
        prompts=prompts,
        rates=rates,
        over=over,
        running_cap=plan.cap,
        graph_max_batch=None if plan.graph_max_batch is None else plan.graph_max_batch * plan.ranks,
        preempted=preempted,
        pays_up_to=None if plan.concurrency is None else plan.pays_up_to,
        loses_from=None if plan.concurrency is None else plan.loses_from,
        tree=plan.speculation is not None and plan.speculation.is_tree,
        depth=plan.speculation.num_steps if plan.speculation else None,
        score_high=score_bound(plan.standing, figures, over=over) if plan.standing and bounded else None,
        constraints=plan.constraints,
        latency_counts=plan.latency_counts,
        queued=next((w.queued for w in reversed(windows) if w.queued is not None), None),
        best_answered_ratio=plan.best_answered_ratio,
        silence_limit_s=plan.silence_limit_s,
    )


def level_result(plan: LevelPlan, windows: tuple[Window, ...], figures: Figures) -> LevelResult:
    """Given a level's plan, windows and final figures, return its result, not yet judged."""
    running, tok_s = _decode(plan, windows)
    steady = steady_windows(windows, plan.concurrency, plan.cap)
    graphs = [w.graph for w in steady if w.graph is not None]
    busy = decode_rate(busy_windows(windows, plan.concurrency, plan.cap)) or (None, None)
    return LevelResult(
        concurrency=plan.level,
        figures=figures,
        running=running,
        decode_tok_s=tok_s,
        busy_running=busy[0],
        busy_tok_s=busy[1],
        clean=not any(w.prefill for w in steady),
        speculation=so_far(plan, windows, figures, load_s=0.0, over=True).speculation,
        graph_ratio=sum(graphs) / len(graphs) if graphs else None,
        graph_max_batch=plan.graph_max_batch,
        preemptions=sum(w.preemptions for w in windows),
    )


def _decode(plan: LevelPlan, windows: tuple[Window, ...]) -> tuple[float | None, float | None]:
    return decode_rate(steady_windows(windows, plan.concurrency, plan.cap)) or (None, None)


def baseline_steps(baseline: Mapping[Level, LevelResult]) -> dict[float, float]:
    """Given the best-known's results by level, return its plain step times by running requests.

    Empty where the best-known itself speculates: its steps are no plain steps.
    """
    found = {}
    for result in baseline.values():
        if result.speculation is not None or result.figures.void:
            continue
        step = result.step_s
        if step is not None and result.running is not None:
            found[result.running] = step
        elif result.figures.output_tok_s > 0 and result.figures.load == "concurrency":
            found[float(result.concurrency)] = result.concurrency / result.figures.output_tok_s
    return found


def busy_steps(baseline: Mapping[Level, LevelResult]) -> dict[float, float]:
    """The same with the prefills between the steps: what a plain server takes for a token of each of its requests."""
    found = baseline_steps({level: r for level, r in baseline.items() if r.busy_step is None})
    for result in baseline.values():
        if result.busy_step is not None and result.speculation is None and not result.figures.void:
            found[result.busy_step[0]] = result.busy_step[1]
    return found


def told_clean(baseline: Mapping[Level, LevelResult], level: Level) -> bool:
    """Whether the best-known's step at a level is one without prefills; also where it was not measured there."""
    best = baseline.get(level)
    return best is None or best.clean


def _accept_ratio(windows: tuple[Window, ...], plan: LevelPlan) -> float | None:
    """Accepted / drafted: counted, else from the engine's printed rate by its release's own definition, else unknown."""
    drafted = sum(w.drafted or 0 for w in windows)
    if drafted:
        return sum(w.accepted or 0 for w in windows) / drafted
    spec = plan.speculation
    rates = [w.printed_rate for w in windows if w.printed_rate is not None]
    if spec is None or spec.num_steps is None or not rates:
        return None
    draft_tokens = spec.draft_tokens or spec.num_steps + 1
    pairs = [(w.accept_len, w.printed_rate) for w in windows if w.accept_len is not None and w.printed_rate is not None]
    definition = definition_of(plan.engine_version or "") or definition_by_fit(pairs, spec.num_steps, draft_tokens)
    return accepted_share(sum(rates) / len(rates), definition, spec.num_steps, draft_tokens)
