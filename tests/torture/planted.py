"""Bugs to plant, one at a time: the harness is believed because each of them turns its promise red.

A planted bug is a patch of the running code, never a switch in the product. `plant` is called in the process that runs the part;
a part that starts real daemons passes the bug's name on to `torture.daemon`, which plants it in them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torture.sabotage import in_daemons


@dataclass(frozen=True)
class Bug:
    """A bug, how it is planted (for the life of the process), the promise that it breaks, and the part that notices."""

    name: str
    plant: Callable[[], None]
    promise: str
    module: str
    seconds: float = 20.0


BUGS: tuple[Bug, ...] = (
    Bug("publish before commit", in_daemons("publish before commit"), "P10", "kills", 90.0),
    Bug("retry fsync", in_daemons("retry fsync"), "P16", "bad_disk", 120.0),
    Bug("inheritable lock fd", in_daemons("inheritable lock fd"), "P17", "races", 5.0),
)
