"""Bugs to plant, one at a time: the harness is believed because each of them turns its promise red.

A planted bug is a patch of the running code, never a switch in the product. `plant` is called in the process that runs the part;
a part that starts real daemons passes the bug's name on to `torture.daemon`, which plants it in them.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """A bug, how it is planted (for the life of the process), the promise that it breaks, and the part that notices."""

    name: str
    plant: Callable[[], None]
    promise: str
    module: str
    seconds: float = 20.0


def _in_simulation(name: str) -> Callable[[], None]:
    """A bug of the simulated daemon; it is imported where it is planted, since the product is imported with it."""

    def plant() -> None:
        getattr(importlib.import_module("torture.simbugs"), name)()

    return plant


BUGS: tuple[Bug, ...] = (
    Bug("port-only stop check", _in_simulation("port_only_stop_check"), "P1", "sim"),
    Bug("wall-clock budget", _in_simulation("wall_clock_budget"), "P14", "sim", 40.0),
    Bug("promote on inconclusive", _in_simulation("promote_on_inconclusive"), "P13", "sim"),
)
