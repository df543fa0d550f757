"""Bugs to plant, one at a time: the harness is believed because each of them turns its promise red.

A planted bug is a patch of the running code, never a switch in the product. `plant` is called in the process that runs the part;
a part that starts real daemons passes the bug's name on to `torture.daemon`, which plants it in them.
"""

import importlib
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


def _from(module: str, name: str) -> Callable[[], None]:
    """A bug of another module, imported where it is planted, since the product is imported with it."""

    def plant() -> None:
        getattr(importlib.import_module(f"torture.{module}"), name)()

    return plant


BUGS: tuple[Bug, ...] = (
    Bug("drop the directory fsync", _from("filebugs", "drop_folder_fsync"), "P7", "crashstates"),
    Bug("drop tail truncation", _from("filebugs", "drop_tail_truncation"), "P9", "crashstates"),
    Bug("retry fsync", in_daemons("retry fsync"), "P16", "bad_disk", 120.0),
    Bug("retry fsync of a file", _from("filebugs", "retry_fsync"), "P16", "crashstates", 60.0),
    Bug("killpg instead of clearing", _from("processbugs", "killpg"), "P5", "trees", 15.0),
    Bug("publish before commit", in_daemons("publish before commit"), "P10", "kills", 90.0),
    Bug("port-only stop check", _from("simbugs", "port_only_stop_check"), "P1", "sim"),
    Bug("stop that does not wait for memory", _from("simbugs", "stop_without_memory"), "P5", "sim", 50.0),
    Bug("launch onto memory that did not come back", _from("simbugs", "launch_onto_memory"), "P1", "sim", 50.0),
    Bug("restore without a pause", _from("simbugs", "restore_without_pause"), "P14", "sim", 50.0),
    Bug("wall-clock budget", _from("simbugs", "wall_clock_budget"), "P14", "sim", 40.0),
    Bug("inheritable lock fd", in_daemons("inheritable lock fd"), "P17", "races", 5.0),
    Bug("known_hosts=None", _from("hostbugs", "trust_any_host"), "P20", "hosts", 6.0),
    Bug("f-string command", _from("filebugs", "f_string_command"), "P21", "shells", 5.0),
    Bug("f-string command to a host", _from("hostbugs", "f_string_command"), "P21", "hosts", 6.0),
    Bug("watchdog from a timer", _from("processbugs", "watchdog_from_a_timer"), "P23", "wedged", 30.0),
    Bug("promote on inconclusive", _from("simbugs", "promote_on_inconclusive"), "P13", "sim"),
    Bug("seals verify under any key", _from("filebugs", "accept_newer_keys"), "P8", "forgeries", 10.0),
)
