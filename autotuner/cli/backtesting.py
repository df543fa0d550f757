"""What `policies test` shows: recorded campaigns told again, and every level on record in a store under other rules."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from autotuner.bench.benchmark import level_cell, level_name
from autotuner.cli.common import table
from autotuner.core.backtest import Outcome, end_of
from autotuner.core.objective import Objective
from autotuner.core.policy import Policy
from autotuner.core.recorded import Campaign
from autotuner.core.report import duration, loss_in_words
from autotuner.core.state import Verdict
from autotuner.core.story import Change, LevelTold, Story, Told, changes, ending, tell
from autotuner.edge.store import Store
from autotuner.engines import ENGINES
from autotuner.errors import NotFound

DATABASE = "state.db"


def wanted_objective(ctx: click.Context, param: click.Parameter, value: str | None) -> Objective | None:
    """Given `level=N` (output tok/s at that concurrency) or `mean` (over all levels), return the objective; BadParameter."""
    if value is None:
        return None
    kind, _, level = value.partition("=")
    if value == "mean":
        return Objective(maximise="geometric_mean")
    if kind == "level" and level.isdigit() and int(level) >= 1:
        return Objective(level=int(level))
    raise click.BadParameter(f"{value!r} is neither level=N nor mean", ctx, param)


def with_objective(campaign: Campaign, wanted: Objective | None) -> Campaign:
    """Given a campaign and another objective, return it under that one and its own limits; BadParameter."""
    if wanted is None:
        return campaign
    if wanted.level is not None and wanted.level not in campaign.levels:
        levels = ", ".join(map(str, campaign.levels))
        raise click.BadParameter(
            f"{campaign.name} has no level {wanted.level} (levels: {levels})", param_hint="'--objective'"
        )
    old = campaign.objective
    limits = {"constraints": old.constraints, "min_gain_ratio": old.min_gain_ratio}
    return replace(campaign, objective=wanted.model_copy(update=limits))


class Backtest:
    """One recorded campaign under the rules to try and under the shipped ones."""

    def __init__(
        self, campaign: Campaign, rules: tuple[Policy, ...], shipped: tuple[Policy, ...], error_budget: float
    ) -> None:
        self.campaign = campaign
        self.story = tell(campaign, rules, error_budget, ENGINES)
        same = [p.sha256 for p in rules] == [p.sha256 for p in shipped]
        self.shipped = None if same else tell(campaign, shipped, error_budget, ENGINES)

    def as_data(self) -> dict[str, Any]:
        """The story as JSON has it."""
        data = _story_data(self.story)
        if self.shipped is not None:
            found = changes(self.shipped, self.story)
            data["against_shipped"] = {
                "changes": [asdict(change) for change in found],
                "saved_gpu_min": round(_saved_min(found), 2),
                "wrong_stops_then": list(self.shipped.wrong_stops),
            }
        return data

    def show(self) -> None:
        """The story as text, and what the rules change."""
        story = self.story
        click.echo(f"{story.campaign}: {self.campaign.description}")
        click.echo(f"objective: {story.objective}")
        for told in story.told:
            _show_told(told)
        click.echo(f"\nbest-known at the end: {story.best or 'none'}")
        for told in story.told:
            if told.wrong_stop:
                ratio = f"reached {told.full_ratio:.2f} of {told.best}'s" if told.full_ratio else "been the best-known"
                click.echo(f"WRONG STOP: {told.name} would have {ratio}")
        if self.shipped is None:
            return
        found = changes(self.shipped, story)
        rows = [(c.name, c.then, c.now, _signed(c.saved_gpu_s)) for c in found]
        if rows:
            click.echo("\n" + table(rows, ("candidate", "shipped rules", "these rules", "GPU time saved")))
        minutes = _saved_min(found)
        click.echo(
            f"\n{sum(c.decision for c in found)} of {len(story.told)} decisions change against the shipped rules: "
            f"{abs(minutes):.1f} GPU minutes of load {'saved' if minutes >= 0 else 'more'}; "
            f"wrong stops: {', '.join(story.wrong_stops) or 'none'} "
            f"(shipped rules: {', '.join(self.shipped.wrong_stops) or 'none'})"
        )


def open_store(folder: Path) -> Store:
    """Given a state folder, open its store. Raise NotFound if there is none."""
    if not (folder / DATABASE).is_file():
        raise NotFound(f"{folder} is neither a recorded campaign (campaign.toml) nor a state folder ({DATABASE})")
    return Store(folder / DATABASE)


def outcomes_of(store: Store, rules: tuple[Policy, ...]) -> tuple[list[Outcome], int]:
    """Every level on record under the rules of then and under these; and how many cannot be replayed."""
    kept, found, unknown = store.kept_policies(), [], 0
    for trial in store.trials():
        for result in store.results(trial.id):
            evidence = store.evidence(trial.id, result.concurrency)
            hashes = evidence.get("policies", {}).values()
            if not hashes or any(sha256 not in kept for sha256 in hashes):
                unknown += 1
                continue
            then = end_of(tuple(kept[sha256] for sha256 in hashes), evidence["looks"])
            now = end_of(rules, evidence["looks"])
            won = trial.verdict is Verdict.PASS
            found.append(Outcome(trial.id, trial.name, result.concurrency, won, then, now, result.figures.load))
    return found, unknown


def outcomes_data(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Levels on record as JSON has them."""
    return [{**asdict(o), "saved_s": round(o.saved_s, 1), "changed": o.changed} for o in outcomes]


def show_outcomes(outcomes: list[Outcome], unknown: int) -> None:
    """Levels on record as text: winners that would be lost first."""
    for outcome in (o for o in outcomes if o.loses_winner):
        at = level_name(outcome.load, outcome.level)
        click.echo(f"would lose {outcome.name} at {at}: {outcome.now.rule} ends a trial that passed")
    changed = [o for o in outcomes if o.changed]
    if changed:
        columns = ("trial", "name", "level", "then", "now", "saved")
        click.echo(table([_row(o) for o in changed], columns))
    saved = duration(abs(sum(o.saved_s for o in outcomes)))
    more = "saved" if sum(o.saved_s for o in outcomes) >= 0 else "more"
    on = sum(o.goes_on for o in outcomes)
    click.echo(
        f"{len(changed)} of {len(outcomes)} levels on record would end otherwise: {saved} of load {more}, {on} would go on"
    )
    if unknown:
        click.echo(f"{unknown} levels were left out: the rules they were looked at with are not kept")


def _row(outcome: Outcome) -> tuple[str, ...]:
    then, now = (f"{end.rule or 'to its end'} at {duration(end.load_s)}" for end in (outcome.then, outcome.now))
    saved = "unknown: it goes on" if outcome.goes_on else duration(abs(outcome.saved_s))
    sign = "-" if outcome.saved_s < 0 else ""
    return (str(outcome.trial), outcome.name, level_cell(outcome.load, outcome.level), then, now, f"{sign}{saved}")


def _show_told(told: Told) -> None:
    click.echo(f"\n{told.name}: {ending(told)}")
    for reason in told.judgement.reasons:
        click.echo(f"  {reason[0].upper()}{reason[1:]}")
    losses = [t for t in told.levels if sum(share.tok_s for share in t.causes) > 0]
    if losses:
        busiest = max(losses, key=lambda t: t.result.concurrency)
        click.echo(f"  Causes: {loss_in_words(busiest.result.figures.level_name, busiest.causes)}")
    for proposal in told.proposals:
        known = f", which is on record as {proposal.recorded_as}" if proposal.recorded_as else ""
        click.echo(f"  Proposes {proposal.name}{known}: {proposal.why}")
    if told.not_recorded:
        click.echo(f"  Not on record: concurrency {', '.join(map(str, told.not_recorded))}")
    if told.full_s:
        click.echo(f"  Load: {duration(told.used_s)} of {duration(told.full_s)} ({_ends(told.levels)})")


def _ends(levels: tuple[LevelTold, ...]) -> str:
    return ", ".join(
        f"{t.result.concurrency}: {duration(t.used_s)}" + (f" until {t.rule.rule}" if t.rule else "") for t in levels
    )


def _story_data(story: Story) -> dict[str, Any]:
    return {
        "campaign": story.campaign,
        "objective": story.objective,
        "gpus": story.gpus,
        "best": story.best,
        "wrong_stops": list(story.wrong_stops),
        "candidates": [_told_data(told) for told in story.told],
    }


def _told_data(told: Told) -> dict[str, Any]:
    rule = told.judgement.rule
    return {
        "name": told.name,
        "compared_with": told.best,
        "verdict": told.judgement.verdict,
        "promoted": told.judgement.promote,
        "rule": rule.rule if rule else None,
        "ended_at": next((t.result.concurrency for t in told.levels if rule and t.result.fired == rule), None),
        "reasons": list(told.judgement.reasons),
        "used_s": round(told.used_s, 2),
        "full_s": round(told.full_s, 2),
        "full_ratio": told.full_ratio,
        "wrong_stop": told.wrong_stop,
        "proposals": [asdict(proposal) for proposal in told.proposals],
        "not_recorded": list(told.not_recorded),
        "levels": [_level_data(level) for level in told.levels],
    }


def _level_data(level: LevelTold) -> dict[str, Any]:
    result, spec = level.result, level.result.speculation
    return {
        "concurrency": result.concurrency,
        "output_tok_s": round(result.figures.output_tok_s, 1),
        "void": result.figures.void,
        "running": result.running,
        "accept_len": spec.accept_len.mean if spec and spec.accept_len else None,
        "needed": spec.needed if spec else None,
        "ceiling": spec.ceiling if spec else None,
        "rule": level.rule.rule if level.rule else None,
        "used_s": round(level.used_s, 2),
        "full_s": round(level.full_s, 2),
        "causes": [asdict(share) for share in level.causes],
    }


def _saved_min(found: tuple[Change, ...]) -> float:
    return sum(change.saved_gpu_s for change in found) / 60


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else ''}{duration(abs(seconds))}"
