"""Bugs to plant in the code that clears process trees and feeds the watchdog."""

import asyncio
import atexit
import shutil
import tempfile
from pathlib import Path


def killpg() -> None:
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


def watchdog_from_a_timer() -> None:
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
