"""Many simulated campaigns -> the figures that say whether the rules decide right, and what they save. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotuner.core.statistics import median
from autotuner.simulation.campaign import CampaignEnd


@dataclass(frozen=True)
class Tally:
    """Figures over campaigns. Ratios are 0..1; `*_s` are benchmark seconds.

    `wrong_stops` are candidates that a rule ended though they would have won by 3 % or more, of all that a rule ended;
    `wrong_promotions` are those promoted though truly worse, of all promoted; `missed` campaigns end on a server that a
    candidate beats by 3 % or more. `time_ratio` is the median benchmark time against everything to its end, `launch_ratio`
    the same of launches, `hopeless_ratio` the median share of their full benchmark that candidates took whose depth could
    pay nowhere, `hopeless_worst` the largest. `found` is the true objective of the best-known at the end over the best
    there was, `found_at_random` that of random order in the same time, each to its end.
    """

    campaigns: int
    candidates: int
    stopped: int
    wrong_stops: int
    promoted: int
    wrong_promotions: int
    missed: int
    time_ratio: float
    launch_ratio: float
    hopeless: int
    hopeless_ratio: float
    hopeless_worst: float
    found: float
    found_at_random: float

    @property
    def wrong_stop_ratio(self) -> float:
        """Wrong stops of all candidates."""
        return self.wrong_stops / max(1, self.candidates)

    @property
    def wrong_promotion_ratio(self) -> float:
        """Wrong promotions of all promotions."""
        return self.wrong_promotions / max(1, self.promoted)


def tally(ends: Sequence[CampaignEnd]) -> Tally:
    """Given how campaigns ended (at least one), return the figures over them."""
    trials = [trial for end in ends for trial in end.trials]
    hopeless = [trial.seconds / trial.full_s for trial in trials if trial.hopeless] or [0.0]
    return Tally(
        campaigns=len(ends),
        candidates=len(trials),
        stopped=sum(bool(trial.rule) for trial in trials),
        wrong_stops=sum(trial.wrongly_stopped for trial in trials),
        promoted=sum(trial.promoted for trial in trials),
        wrong_promotions=sum(trial.wrongly_promoted for trial in trials),
        missed=sum(end.missed for end in ends),
        time_ratio=median([end.seconds / end.full_s for end in ends]),
        launch_ratio=median([end.launches / end.full_launches for end in ends]),
        hopeless=sum(trial.hopeless for trial in trials),
        hopeless_ratio=median(hopeless),
        hopeless_worst=max(hopeless),
        found=sum(end.best_ratio for end in ends) / len(ends),
        found_at_random=sum(end.at_random for end in ends) / len(ends),
    )
