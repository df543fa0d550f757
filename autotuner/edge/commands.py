"""Short commands, run to their end: a deadline, and whatever a command started itself goes with it.

Where a driver or a disk hangs, SIGKILL does not end what waits for it. Such a command is left behind, and is not begun again
before it has ended: else each look would leave another.
"""

import asyncio
import contextlib
import os
import signal

from autotuner.edge import procfs
from autotuner.edge.host import Ran
from autotuner.errors import HostError

OUTPUT_BYTES_MAX = 16 << 20
KILLED_WAIT_S = 2.0  # what SIGKILL has not ended by then hangs in the kernel

_hanging: dict[str, tuple[int, int]] = {}  # by program: pid and start ticks


async def run(argv: tuple[str, ...], timeout_s: float) -> Ran:
    """Run a command. Raise HostError if it cannot be run or does not end in time.

    Its output goes to memory and not through a pipe, whose end would be waited for as long as any process that the
    command left behind holds it.
    """
    stuck = _hanging.get(argv[0])
    if stuck is not None and procfs.lives(*stuck):
        raise HostError(
            f"{argv[0]} hangs in the kernel since it was last asked (pid {stuck[0]}); SIGKILL does not end it"
        )
    output = os.memfd_create("output")
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        await _end_of(process, timeout_s, argv[0])
        said = os.pread(output, OUTPUT_BYTES_MAX, 0).decode("utf-8", "replace")
    except TimeoutError:
        raise HostError(f"{argv[0]} did not end within {timeout_s:.0f} s") from None
    except (OSError, ValueError) as error:
        raise HostError(f"{argv[0]} cannot be run: {getattr(error, 'strerror', None) or error}") from None
    finally:
        os.close(output)
    return Ran(process.returncode or 0, said)


async def _end_of(process: asyncio.subprocess.Process, timeout_s: float, program: str) -> None:
    """Wait for a command's end; one that is late, or that nobody waits for any more, is killed with its session."""
    try:
        await asyncio.wait_for(process.wait(), timeout_s)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                await asyncio.wait_for(process.wait(), KILLED_WAIT_S)
            except TimeoutError:
                _hanging[program] = (process.pid, procfs.start_ticks(process.pid) or 0)
