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
        "sim",
        ("P1", "P4", "P5", "P9", "P10", "P11", "P13", "P14", "P18", "P19", "P24"),
        0.45,
        "the loop in virtual time",
    ),
    Part("soak", ("P25",), 0.11, "a simulated year of one daemon"),
)
