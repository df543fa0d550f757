"""The rules looking at one level, window after window: what ends it, what settles it, what it proposes. Pure but for its state.

The daemon, the replay of recorded campaigns and the simulator all look through this, so that they cannot differ.
"""

from dataclasses import dataclass, field

from autotuner.core.policy import ENDS_LEVEL, Facts, Fired, Policy, Watch, When, built_in
from autotuner.core.state import Verdict
from autotuner.engines.base import Diagnosis


@dataclass
class Look:
    """One look of the rules, kept so that a verdict can be recomputed."""

    on: str
    facts: Facts
    fired: list[str] = field(default_factory=list)


class LevelRules:
    """The rules over one level. `ended` is the rule that ended it, `settled` the one that found it measured well enough.

    `proposed` are the rules that proposed a candidate.
    """

    def __init__(self, policies: tuple[Policy, ...]) -> None:
        self.looks: list[Look] = []
        self.ended: Fired | None = None
        self.settled: Fired | None = None
        self.proposed: list[Fired] = []
        self._watch = Watch(policies)

    @property
    def over(self) -> bool:
        """Whether the level need not go on."""
        return self.ended is not None or self.settled is not None

    def look(self, on: When, facts: Facts) -> Fired | None:
        """Have the rules look; return the first that ends the level now."""
        look, ends = Look(on, facts), None
        for fired in self._watch.look(on, facts):
            look.fired.append(f"{fired.file}/{fired.rule}" + (" (dry run)" if fired.dry_run else ""))
            if fired.dry_run:
                continue
            if fired.action == "propose":
                self.proposed.append(fired)
            elif fired.action == "settle":
                self.settled = self.settled or fired
            elif fired.action in ENDS_LEVEL:
                ends = ends or fired
        self.looks.append(look)
        self.ended = self.ended or ends
        return ends


def server_ended(diagnosis: Diagnosis) -> Fired:
    """What a trial ends by if its server died and no rule in force names that."""
    return built_in("server-ended", f"the server ended: {diagnosis.sentence}", Verdict.FAIL, diagnosis.advice)
