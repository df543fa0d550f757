"""Bugs to plant, one at a time: the harness is believed because each of them turns its promise red.

A planted bug is a patch of the running code, never a switch in the product. `plant` is called in the process that runs the part;
a part that starts real daemons passes the bug's name on to `torture.daemon`, which plants it in them.
"""

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


def _known_hosts_none() -> None:
    from autotuner.edge import ssh

    connect = ssh.asyncssh.connect
    ssh.asyncssh.connect = lambda *given, **named: connect(*given, **{**named, "known_hosts": None})


def _f_string_command() -> None:
    from autotuner.edge import ssh

    ssh.command_line = lambda argv, env=None: " ".join(argv)


BUGS: tuple[Bug, ...] = (
    Bug("known_hosts=None", _known_hosts_none, "P20", "hosts", 6.0),
    Bug("f-string command", _f_string_command, "P21", "hosts", 6.0),
)
