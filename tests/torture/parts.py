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
        0.53,
        "the loop in virtual time",
    ),
    Part(
        "kills", ("P2", "P3", "P4", "P7", "P10", "P11", "P18"), 0.13, "kill -9 of real daemons at chosen system calls"
    ),
    Part("soak", ("P25",), 0.06, "a simulated year of one daemon"),
    Part(
        "trees",
        ("P5", "P6"),
        0.085,
        "stops hostile process trees on each launch rung, beside bystanders; pids used again",
    ),
    Part("crashstates", ("P7", "P9", "P16"), 0.075, "power loss at every operation of the journal's own code"),
    Part("full_disk", ("P15",), 0.03, "a disk without a byte, in each phase; a host without a benchmark client"),
    Part("bad_disk", ("P16",), 0.03, "failing syncs of real daemons, and power cuts after them"),
    Part("races", ("P17", "P18"), 0.025, "eight daemons on one folder, enqueuers that are killed"),
    Part("wedged", ("P23",), 0.04, "stops the daemon at each await of its loop in turn, before a manager that listens"),
    Part("forgeries", ("P8",), 0.01, "a journal of 200 entries forged in every way, by three attackers"),
    Part("records", ("P11",), 0.01, "generated trials judged, kept, and judged again from the record"),
    Part("texts", ("P12", "P22"), 0.01, "hostile text and secrets through everything that keeps or shows text"),
    Part("databases", ("P7",), 0.01, "power loss at every commit of the state database"),
    Part("shells", ("P20", "P21"), 0.01, "hostile words through a real shell; connections in the source"),
    Part(
        "hosts", ("P20", "P21"), 0.01, "wrong host keys are refused; words reach a program through a shell as they are"
    ),
    Part("probes", ("P24",), 0.01, "servers that lie, on the real host: at the start, later, and while no daemon runs"),
    Part("sandbox", ("P26",), 0.002, "the units as installed, scored by systemd-analyze"),
)
