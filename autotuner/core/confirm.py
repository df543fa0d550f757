"""What must still be measured before a win may promote, and which launches of the best-known it is held against. Pure.

Owns two promises: the figure on record of a best-known comes from launches that did not select it, and confirming ends:
every win costs a bounded number of launches.
"""

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from autotuner.bench.benchmark import Level, level_name
from autotuner.bench.measurement import Figures
from autotuner.core.objective import unusable
from autotuner.core.statistics import Z95, Z99, between_launches, launch_noise


class Noise(BaseModel):
    """How sure a promotion has to be. `confirm_launches` 0 promotes on the first trial's figures, as they are.

    `baseline_launches`: launches of the best-known on record that a promotion needs. `open_launches`: how often a candidate
    that leads by PROMISING, but is not proven to be better, is launched again beside the best-known. `baseline_max_age_s`:
    none of them being younger than this, it is launched once more. `error_budget`: the probability with which a campaign
    may have a wrong stop or promotion by chance.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    baseline_launches: int = Field(default=2, ge=1, le=20)
    confirm_launches: int = Field(default=1, ge=0, le=20)
    open_launches: int = Field(default=3, ge=0, le=20)
    baseline_max_age_s: float = Field(default=14400.0, gt=0)
    error_budget: float = Field(default=0.05, gt=0, lt=1)


PROMISING = 1.03  # a lead worth two more launches: nobody changes a server for less


@dataclass(frozen=True)
class Run:
    """One launch of a server as far as it was measured, under the number of its trial.

    `age_s` is the seconds since then, None if the host was booted in between.
    """

    trial: int
    figures: dict[Level, Figures]
    age_s: float | None = 0.0


@dataclass(frozen=True)
class Record:
    """What is held against a candidate: the best-known's launches that count, oldest first, and the noise between them.

    `said` tells of launches that do not count any more.
    """

    runs: tuple[Run, ...]
    noise: float
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class Owed:
    """One launch that must still be measured: of the best-known (`baseline`) or of the winner (`confirm`), and why."""

    what: Literal["baseline", "confirm"]
    why: str


def owed(noise: Noise, best: Record, best_tries: int, confirmed: int) -> tuple[Owed, ...]:
    """Given the best-known's record, return what must be measured before a win may promote, in this order; () if nothing.

    `best_tries` are the launches of the best-known that this win has cost already, measured or not; `confirmed` the
    launches on which the winner was measured since it won. The last one owed is always a confirming one, since its verdict
    is the one that promotes; before it the two sides take turns, so that a host that drifts does so for both.

    The best-known is launched at most `baseline_launches` times for one win: one that does not come up, or drifts for ever,
    must not keep a winner waiting for ever. What is on record then has to do; fewer launches make a wider interval.
    """
    if not noise.confirm_launches:
        return ()
    missing = noise.baseline_launches - len(best.runs)
    why = f"it has {_launches(len(best.runs))} on record, {noise.baseline_launches} are asked"
    if missing <= 0:
        old = not any(run.age_s is not None and run.age_s <= noise.baseline_max_age_s for run in best.runs)
        missing = 1 if old else 0
        why = f"its last measurement is older than {noise.baseline_max_age_s / 3600:g} h or of another boot"
    baselines = [Owed("baseline", why)] * max(0, min(missing, noise.baseline_launches - best_tries))
    again = "" if confirmed < noise.confirm_launches else ", once more beside the best-known's new one"
    asked = max(noise.confirm_launches - confirmed, 1 if baselines else 0)
    confirms = [Owed("confirm", f"a win is promoted on a fresh launch only{again}")] * asked
    ahead = max(0, len(baselines) - len(confirms))
    found = baselines[:ahead]
    for turn, confirm in enumerate(confirms):
        found += [*baselines[ahead + turn : ahead + turn + 1], confirm]
    return tuple(found)


def owed_if_open(noise: Noise, best_tries: int, confirmed: int) -> tuple[Owed, ...]:
    """Return what may still be measured for a candidate that leads without being proven better, in this order.

    `best_tries` and `confirmed` as for `owed`. The two sides take turns, and the verdict after each pair asks anew.
    """
    if not noise.confirm_launches or confirmed >= noise.open_launches:
        return ()
    why = f"a lead of {100 * (PROMISING - 1):.0f} % or more that may be noise: one more launch of each side narrows it"
    confirm = Owed("confirm", why)
    return (Owed("baseline", why), confirm) if best_tries <= confirmed else (confirm,)


def noise_between(record: Record, fresh: tuple[dict[Level, Figures], ...], levels: tuple[Level, ...]) -> float:
    """Given the best-known's record and the launches that confirm a win, return the noise between launches of both.

    Where the record says that the host has changed, its own noise stands.
    """
    counts = [run for run in fresh if complete(run, levels)]
    if record.said or len(counts) < 2:
        return record.noise
    sides = [[run.figures for run in record.runs], counts]
    return max((_noise_at(level, *sides) for level in levels), default=record.noise)


def owed_again(figures: dict[Level, Figures], levels: tuple[Level, ...], *, is_repeat: bool) -> tuple[Owed, ...]:
    """Given a measurement of the best-known, return the one that must replace it because its rate drifted; once only."""
    drifting = drifted(figures, levels)
    if not drifting or is_repeat:
        return ()
    at = level_name(figures[drifting[0]].load, *drifting)
    return (Owed("baseline", f"its rate drifted within the level at {at}"),)


def first_leg(owing: tuple[Owed, ...]) -> tuple[Owed, ...]:
    """Given what is owed, return it up to the first confirming launch: after that one's verdict it is asked anew."""
    end = next((i for i, one in enumerate(owing) if one.what == "confirm"), len(owing))
    return owing[: end + 1]


def on_record(runs: tuple[Run, ...], levels: tuple[Level, ...]) -> Record:
    """Given a best-known's launches, oldest first, and the levels that decide, return those that count.

    A launch counts if every deciding level is usable; one whose rate drifted within such a level only while there is no
    better one. If a launch differs from those before it by more than the noise explains, the ones before it stop to count.
    While only one launch is left after such a jump nobody can tell drift from noise, and the noise is that of all of them.
    """
    whole = tuple(run for run in runs if complete(run.figures, levels))
    steady = tuple(run for run in whole if not drifted(run.figures, levels)) or whole
    kept: list[Run] = []
    said: list[str] = []
    for run in steady:
        jump = next((text for level in levels if (text := _jump(kept, run, level))), "")
        if jump:
            said.append(jump)
            kept = []
        kept.append(run)
    noisy = kept if len(kept) > 1 else list(steady)
    return Record(tuple(kept), _noise(noisy, levels), tuple(said))


def complete(figures: dict[Level, Figures], levels: tuple[Level, ...]) -> bool:
    """Tell whether all these levels were measured and are usable."""
    return not any(unusable(figures.get(level)) for level in levels)


def drifted(figures: dict[Level, Figures], levels: tuple[Level, ...]) -> tuple[Level, ...]:
    """Given a launch's figures, return those of the levels within which its rate drifted."""
    return tuple(level for level in levels if level in figures and figures[level].drift_ratio is not None)


def pool(runs: tuple[dict[Level, Figures], ...]) -> dict[Level, Figures]:
    """Given the figures of each launch of one server, oldest first, return one set: by level the newest with the mean rate.

    So is its goodput, where all of them have that under the same limits. The half width is that of a mean of independent
    ones, sqrt(sum of squares) / n. Void levels count only where a level has nothing else.
    """
    pooled = {}
    for level in sorted({level for run in runs for level in run}):
        every = [run[level] for run in runs if level in run]
        good = [f for f in every if not unusable(f)]
        if len(good) < 2:
            pooled[level] = (good or every)[-1]
            continue
        means = _means(good, "output_tok_s")
        if all(f.goodput_req_s is not None and f.goodput_limits == good[-1].goodput_limits for f in good):
            means |= _means(good, "goodput_req_s")
        pooled[level] = good[-1].model_copy(update=means)
    return pooled


def _means(launches: list[Figures], key: str) -> dict[str, float]:
    """The mean of a figure that has bounds, with the bounds of the mean."""
    values = [(getattr(f, key), getattr(f, f"{key}_low") or 0.0, getattr(f, f"{key}_high") or 0.0) for f in launches]
    mean = sum(value for value, _, _ in values) / len(values)
    half = math.sqrt(sum(((high - low) / 2) ** 2 for _, low, high in values)) / len(values)
    return {key: mean, f"{key}_low": max(0.0, mean - half), f"{key}_high": mean + half}


def _jump(before: list[Run], run: Run, level: Level) -> str:
    """Say that a launch's rate is outside the 99 % band around the mean of those before it; empty if it is inside."""
    if not before:
        return ""
    rates = [b.figures[level].output_tok_s for b in before]
    mean, now = sum(rates) / len(rates), run.figures[level]
    within = (_half(now) / Z95 / now.output_tok_s) ** 2
    within += sum((_half(b.figures[level]) / Z95 / mean) ** 2 for b in before) / len(before) ** 2
    noise = launch_noise(rates)
    band = Z99 * math.sqrt(within + between_launches(noise, (1, len(rates))))
    change = math.log(now.output_tok_s / mean)
    if abs(change) <= band:
        return ""
    return (
        f"the best-known's launch of trial {run.trial} gave {now.output_tok_s:.1f} tok/s at {now.level_name}, "
        f"{mean:.1f} before ({100 * (math.exp(change) - 1):+.0f} %): more than {100 * noise:.1f} % noise between launches "
        "explains, so the host has changed and only launches since then count"
    )


def _noise(runs: list[Run], levels: tuple[Level, ...]) -> float:
    return max((_noise_at(level, [run.figures for run in runs]) for level in levels), default=launch_noise([]))


def _noise_at(level: Level, *servers: list[dict[Level, Figures]]) -> float:
    """The noise between launches at a level: of the rate, or of goodput where that is more.

    Goodput is the steeper one near its limits, and it is what is compared where figures have it.
    """
    every = [[run[level] for run in runs] for runs in servers]
    good = [[f.goodput_req_s or 0.0 for f in launches] for launches in every]
    counted = [of_server for of_server in good if sum(of_server) > 0]
    of_rate = launch_noise(*([f.output_tok_s for f in launches] for launches in every))
    return max(of_rate, launch_noise(*counted)) if counted else of_rate


def _half(figures: Figures) -> float:
    return (figures.output_tok_s_high - figures.output_tok_s_low) / 2


def _launches(count: int) -> str:
    return f"{count} launch" if count == 1 else f"{count} launches"
