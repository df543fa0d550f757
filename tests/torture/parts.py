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
        "kills", ("P2", "P3", "P4", "P7", "P10", "P11", "P18"), 0.20, "kill -9 of real daemons at chosen system calls"
    ),
    Part("full_disk", ("P15",), 0.04, "a disk without a byte, in each phase; a host without a benchmark client"),
    Part("bad_disk", ("P16",), 0.04, "failing syncs of real daemons, and power cuts after them"),
    Part("races", ("P17", "P18"), 0.03, "eight daemons on one folder, enqueuers that are killed"),
)
