"""How busy this process is: what it used of a core, and how long it was ready to run while something else ran."""

import resource
from pathlib import Path
from typing import NamedTuple

_SCHEDSTAT = Path("/proc/self/schedstat")  # nanoseconds run, nanoseconds waited for a core, time slices


class Used(NamedTuple):
    """Seconds on a core, and seconds of waiting for one, since the process began."""

    cpu_s: float
    waited_s: float

    def since(self, before: "Used", seconds: float) -> "Share":
        """Return what this is of a stretch of so many seconds that began at `before`."""
        if seconds <= 0:
            return Share(0.0, 0.0)
        return Share((self.cpu_s - before.cpu_s) / seconds, (self.waited_s - before.waited_s) / seconds)


class Share(NamedTuple):
    """Shares of a stretch of time, 0 to 1."""

    cpu: float
    waited: float

    @property
    def busy(self) -> float:
        """The share in which nothing more could have been done."""
        return min(1.0, self.cpu + self.waited)


def used() -> Used:
    """Return what was used so far. Where the kernel does not tell the waiting, that is 0."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    try:
        waited_s = int(_SCHEDSTAT.read_text().split()[1]) / 1e9  # of the main thread, which carries the load
    except (OSError, ValueError, IndexError):
        waited_s = 0.0
    return Used(usage.ru_utime + usage.ru_stime, waited_s)
