"""A recorded campaign: its file, and what was recorded of each candidate, whatever it was imported from. Pure.

A recorded level is its windows in order and, for each, what the client had seen by then, so that the daemon's own code can
look at it again one window at a time and compute its figures to any point.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from autotuner.bench.measurement import Figures, Progress
from autotuner.core.candidate import Candidate
from autotuner.core.objective import Objective
from autotuner.core.source import wrong_at
from autotuner.core.statistics import correlation_factor, mean_interval, relative_half_width
from autotuner.engines.base import Diagnosis, Effective, Speculation, Window


class CandidateEntry(BaseModel):
    """One candidate of a campaign file: its candidate file, and the server's log and the client's results, if recorded.

    `void` names levels that must not be used, and why.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    log: str | None = None
    results: str | None = None
    void: dict[int, str] = Field(default_factory=dict)


class BenchmarkUsed(BaseModel):
    """What a campaign was measured with, as far as telling it again needs it: named as in a benchmark of the settings.

    Its levels are concurrencies: at a rate what is told again depends on when each request came, which is not recorded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    levels: tuple[Annotated[int, Field(ge=1)], ...] = ()
    load: Literal["concurrency"] = "concurrency"
    output_tokens: int = Field(default=128, ge=1)
    seconds: float = Field(default=60.0, gt=0)
    window_s: float = Field(default=2.0, gt=0)


class CampaignFile(BaseModel):
    """`campaign.toml`: the candidates in the order in which they were tried, and where their figures are.

    Figures are either in one `table` (CSV) or in each candidate's `log` and `results`. `benchmark` is what the campaign was
    measured with; of a table, a level is taken to have lasted its `seconds`, and to have been looked at every `window_s`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str
    gpus: int = Field(default=1, ge=1)
    table: str | None = None
    benchmark: BenchmarkUsed = BenchmarkUsed()
    objective: Objective = Objective()
    candidate: tuple[CandidateEntry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _figures_are_somewhere(self) -> "CampaignFile":
        for index, entry in enumerate(self.candidate):
            if self.table is None and (entry.log is None or entry.results is None):
                raise wrong_at(("candidate", index), "needs log and results, since the campaign has no table")
            if self.table is not None and (entry.log or entry.results):
                raise wrong_at(
                    ("candidate", index), "has its figures in the campaign's table; leave log and results out"
                )
        return self


@dataclass(frozen=True)
class RecordedLevel:
    """One recorded level. `progress` holds what the client had seen at the start and at the end of each of `windows`.

    `ttft_ms` and `tpot_ms` are the whole level's, as {"p50": …, "p99": …}; `void` says why it must not be used.
    """

    concurrency: int
    windows: tuple[Window, ...]
    progress: tuple[Progress, ...]
    requests_failed: int = 0
    ttft_ms: Mapping[str, float] = field(default_factory=dict)
    tpot_ms: Mapping[str, float] = field(default_factory=dict)
    void: str = ""
    note: str = ""

    @property
    def seconds(self) -> float:
        """How long the whole level took."""
        return self.progress[-1].at_s

    def figures(self, windows: int | None = None) -> Figures:
        """Return the figures after so many windows, of the whole level if not given.

        Tokens over time, as the daemon's; but the bounds come from the spread between windows, correlation of neighbours
        counted, since a recorded level is often too short for stretches of a second. The first window holds the ramp and
        counts for the rate alone. Latencies are the whole level's: no recording tells when each request was answered.
        """
        seen = self.progress if windows is None else self.progress[: windows + 1]
        seconds, tokens = seen[-1].at_s, sum(line.events for line in seen)
        rate = tokens / seconds if seconds > 0 else 0.0
        half = rate * _spread(seen)
        return Figures(
            concurrency=self.concurrency,
            seconds=seconds,
            requests_ok=seen[-1].done,
            requests_failed=self.requests_failed,
            errors={"recorded": self.requests_failed} if self.requests_failed else {},
            output_tok_s=rate,
            output_tok_s_low=max(0.0, rate - half),
            output_tok_s_high=rate + half,
            tokens_per_event=1.0,
            tokens_counted=True,
            ttft_ms=dict(self.ttft_ms),
            tpot_ms=dict(self.tpot_ms),
            void=self.void or ("" if rate else "nothing was recorded of it"),
        )


@dataclass(frozen=True)
class RecordedTrial:
    """What was recorded of one candidate; `diagnosis` is set where its server did not come up or died."""

    candidate: Candidate
    speculation: Speculation | None = None
    levels: tuple[RecordedLevel, ...] = ()
    effective: Effective = field(default_factory=Effective)
    ready_s: float | None = None
    diagnosis: Diagnosis | None = None
    exit_code: int | None = None

    def level(self, concurrency: int) -> RecordedLevel | None:
        """Return the level of this concurrency, None if it is not on record."""
        return next((level for level in self.levels if level.concurrency == concurrency), None)


@dataclass(frozen=True)
class Campaign:
    """A recorded campaign: its trials in their order, and what they were judged by."""

    name: str
    description: str
    gpus: int
    levels: tuple[int, ...]
    objective: Objective
    trials: tuple[RecordedTrial, ...]


def assembled(name: str, file: CampaignFile, trials: Sequence[RecordedTrial]) -> Campaign:
    """Given a campaign file and its trials, return the campaign; its levels are those on record unless the file names them."""
    recorded = sorted({level.concurrency for trial in trials for level in trial.levels})
    levels = tuple(sorted(set(file.benchmark.levels or recorded or (1,))))
    return Campaign(name, file.description, file.gpus, levels, file.objective, tuple(trials))


def progress_of(
    concurrency: int, ends_s: Sequence[float], tokens: Sequence[float], done: Sequence[int], in_flight: Sequence[int]
) -> tuple[Progress, ...]:
    """Given the end of each window in seconds, its tokens, and the answers and open requests then, return the client's lines.

    The line before the first window ends a warm-up of no length, since rates are over what comes after one.
    """
    first = Progress(at_s=0.0, phase="warm-up", events=0, in_flight=concurrency, done=0, failed=0)
    lines, before, total = [first], 0, 0.0
    for at_s, more, answered, flying in zip(ends_s, tokens, done, in_flight, strict=True):
        total += more
        events = round(total) - before
        before += events
        lines.append(Progress(at_s=at_s, phase="steady", events=events, in_flight=flying, done=answered, failed=0))
    return tuple(lines)


def _spread(seen: Sequence[Progress]) -> float:
    """The relative 95 % half width of the mean rate over the windows but the first; infinite from one alone."""
    rates = [b.events / (b.at_s - a.at_s) for a, b in itertools.pairwise(seen[1:]) if b.at_s > a.at_s]
    if len(rates) < 2:
        return math.inf
    return math.sqrt(correlation_factor(rates)) * relative_half_width(mean_interval(rates))
