"""Bugs to plant, one at a time: the harness is believed because each of them turns its promise red.

A planted bug is a patch of the running code, never a switch in the product. `plant` is called in the process that runs the part;
a part that starts real daemons passes the bug's name on to `torture.daemon`, which plants it in them.
"""

import asyncio
import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Bug:
    """A bug, how it is planted (for the life of the process), the promise that it breaks, and the part that notices."""

    name: str
    plant: Callable[[], None]
    promise: str
    module: str
    seconds: float = 20.0


def _killpg() -> None:
    """The shim kills the process group that it is in, and believes that this was all."""
    from autotuner.edge import rungs

    text = rungs.SHIM.read_text(encoding="utf-8")
    folder = Path(tempfile.mkdtemp(prefix="autotuner-planted-"))
    atexit.register(shutil.rmtree, folder)
    rungs.SHIM = folder / "shim.py"
    rungs.SHIM.write_text(text.replace('if __name__ == "__main__":', f'{_KILLPG}\n\nif __name__ == "__main__":'))


_KILLPG = """
def clear(server, code):
    for name in os.listdir("/proc"):
        fields = stat_fields(int(name)) if name.isdigit() else None
        if fields and int(fields[2]) == os.getpgrp() and int(name) != os.getpid():
            send(int(name), int(fields[19]), signal.SIGKILL)
    time.sleep(0.1)
    ended, _ = reap(server)
    return (ended if code is None else code), []
"""


def _timer() -> None:
    """A timer feeds the watchdog, whatever the cycles do."""
    from autotuner.daemon import Daemon
    from torture import wedged

    wedged.bug = "watchdog from a timer"  # for the daemons that the part starts
    run = Daemon.run

    async def feed(daemon: Daemon) -> None:
        while True:
            daemon._notifier.cycle_completed()
            await asyncio.sleep(0.2)

    async def run_and_feed(daemon: Daemon) -> None:
        feeding = asyncio.create_task(feed(daemon))
        await run(daemon)
        feeding.cancel()

    Daemon.run = run_and_feed  # type: ignore[method-assign]


BUGS: tuple[Bug, ...] = (
    Bug("killpg instead of clearing", _killpg, "P5", "trees", 15.0),
    Bug("watchdog from a timer", _timer, "P23", "wedged", 30.0),
)
