"""What a part of the harness found: how often each promise was tried, how often it was broken, and how to see it again."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

SHOWN = 5  # violations kept of each promise; the first is the one to look at


@dataclass
class Tally:
    """Counts of one part. `counts` has what was done ("campaigns", "faults", "kills", …), for the line at the end."""

    tried: Counter[str] = field(default_factory=Counter)
    violated: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def held(self, promise: str, times: int = 1) -> None:
        """A promise was tried and kept."""
        self.tried[promise] += times

    def broken(self, promise: str, how: str) -> None:
        """A promise was tried and broken; `how` says what was seen and names the seed that shows it."""
        self.tried[promise] += 1
        self.violated[promise] += 1
        kept = self.examples.setdefault(promise, [])
        if len(kept) < SHOWN:
            kept.append(how)

    def check(self, promise: str, *, kept: bool, how: str) -> None:
        """A promise was tried; say whether it was kept."""
        if kept:
            self.held(promise)
        else:
            self.broken(promise, how)

    def add(self, other: "Tally") -> None:
        """Take another part's counts in."""
        self.tried += other.tried
        self.violated += other.violated
        self.counts += other.counts
        for promise, shown in other.examples.items():
            kept = self.examples.setdefault(promise, [])
            kept += shown[: SHOWN - len(kept)]

    def as_json(self) -> str:
        """One line, for the pipe between a part's process and the harness."""
        return json.dumps(
            {"tried": self.tried, "violated": self.violated, "examples": self.examples, "counts": self.counts}
        )

    @classmethod
    def from_json(cls, line: str) -> "Tally":
        """Read what `as_json` wrote."""
        value: dict[str, Any] = json.loads(line)
        return cls(
            Counter(value["tried"]), Counter(value["violated"]), dict(value["examples"]), Counter(value["counts"])
        )
