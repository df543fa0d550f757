"""Stop rules over recorded levels: where each level would have ended under them, and what that saves or loses. Pure.

A level that ended early has no looks after its end, so a rule that lets it go on is known to do that and no more: how
the level had ended then is on no record.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotuner.bench.benchmark import Level, LoadKind
from autotuner.core.policy import ENDS_LEVEL, Policy, Watch


@dataclass(frozen=True)
class End:
    """Where a level ended: the rule, empty if none ended it, and the seconds of load until then.

    `settled` says that the rule found the level known well enough, so that its figures count as a whole level's.
    """

    rule: str
    load_s: float
    settled: bool = False

    @property
    def lost(self) -> bool:
        """Whether a rule ended the level to the candidate's loss."""
        return bool(self.rule) and not self.settled


@dataclass(frozen=True)
class Outcome:
    """One recorded level under the rules of then and under others. `won` says that its trial passed."""

    trial: int
    name: str
    level: Level
    won: bool
    then: End
    now: End
    load: LoadKind = "concurrency"

    @property
    def changed(self) -> bool:
        """Whether the level ends otherwise: by another rule, at another time, or no more."""
        return self.then != self.now

    @property
    def goes_on(self) -> bool:
        """Whether a level that a rule ended is ended by none now."""
        return bool(self.then.rule) and not self.now.rule

    @property
    def loses_winner(self) -> bool:
        """Whether the rules would now lose a level of a trial that passed."""
        return self.won and self.now.lost and not self.then.lost

    @property
    def saved_s(self) -> float:
        """Seconds of load that are saved; below 0 where the level ends later. Unknown, and 0, where it goes on."""
        return 0.0 if self.goes_on else self.then.load_s - self.now.load_s


def end_of(policies: tuple[Policy, ...], looks: Sequence[Mapping[str, Any]]) -> End:
    """Given policies and the looks of a level, return where it ends under them."""
    watch = Watch(policies)
    load_s = 0.0
    for look in looks:
        facts = look["facts"]
        load_s = float(facts.get("level.load_s", load_s))
        for fired in watch.look(look["on"], facts):
            if (fired.action in ENDS_LEVEL or fired.action == "settle") and not fired.dry_run:
                return End(f"{fired.file}/{fired.rule}", load_s, settled=fired.action == "settle")
    return End("", load_s)
