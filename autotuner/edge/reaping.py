"""The end of a child process: it is killed with all below it and waited for, but not for ever."""

import asyncio
import contextlib
import signal

from autotuner.edge import procfs

KILLED_WAIT_S = 5.0  # what SIGKILL has not ended by then hangs in the kernel


async def killed(process: asyncio.subprocess.Process, within_s: float = KILLED_WAIT_S) -> bool:
    """Kill a child that may still run, and what it started; tell whether it has ended.

    All of them, since asyncio takes a child for ended only once nobody holds its pipes any more.
    """
    if process.returncode is not None:
        return True
    below = [(pid, procfs.start_ticks(pid)) for pid in procfs.descendants(process.pid)[1:]]
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    for pid, ticks in below:
        if ticks is not None:
            procfs.signal_exactly(pid, ticks, signal.SIGKILL)
    try:
        await asyncio.wait_for(process.wait(), within_s)
    except TimeoutError:
        return False
    return True
