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
    Part("crashstates", ("P7", "P9", "P16"), 0.055, "power loss at every operation of the journal's own code"),
    Part("databases", ("P7",), 0.01, "power loss at every commit of the state database"),
    Part("forgeries", ("P8",), 0.015, "a journal of 200 entries forged in every way, by three attackers"),
    Part("records", ("P11",), 0.015, "generated trials judged, kept, and judged again from the record"),
    Part("shells", ("P20", "P21"), 0.01, "hostile words through a real shell; connections in the source"),
    Part("texts", ("P12", "P22"), 0.015, "hostile text and secrets through everything that keeps or shows text"),
)
