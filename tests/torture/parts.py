"""The parts of the harness: which promises each tries, and which share of the time it gets.

A part is a module of this package with a function `run(seed, seconds) -> Tally`: it works until its time is over, but does at
least one round, and every violation that it reports names what to run to see it again. A part is run in a process of its own.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A module of this package, the promises that it tries, its share of the harness's time and what it does."""

    module: str
    promises: tuple[str, ...]
    share: float
    what: str


PARTS: tuple[Part, ...] = (
    Part(
        "trees",
        ("P5", "P6"),
        0.1,
        "stops hostile process trees on each launch rung, beside bystanders; pids used again",
    ),
    Part("wedged", ("P23",), 0.02, "stops the daemon at each await of its loop in turn, before a manager that listens"),
    Part("probes", ("P24",), 0.01, "servers that lie, on the real host: at the start, later, and while no daemon runs"),
    Part("sandbox", ("P26",), 0.002, "the units as installed, scored by systemd-analyze"),
)
