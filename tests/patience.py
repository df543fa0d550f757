"""How long tests wait for what must come.

A wait that succeeds costs nothing, so it is as long as a slow machine that others share may need; what shows that something
does not end takes longer than that, or for ever.
"""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 120.0
FOR_EVER_S = 600  # of a process that is to be ended by something else


def comes_true(what: Callable[[], object]) -> bool:
    """Wait until it is true; tell whether it came true."""
    until = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


async def soon(what: Callable[[], object]) -> None:
    """Wait until it is true, in a loop; raise TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        while not what():
            await asyncio.sleep(0.02)
