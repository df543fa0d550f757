"""Which cores a load client is bound to, so that it and the server do not take them from each other. Pure.

Only the client is ever bound: a server that is tuned must not be changed by being measured. Where the server is kept to some
cores, the client takes others. Where it may use all, as most may, the kernel moves it out of the client's way as long as there
are cores enough; so the client takes the last ones, on which the server's main threads and everything else were not.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from autotuner.bench.samples import Placement

AUTO, OFF = "auto", "off"
ACCEPTED = '"auto", "off", or numbers of cores as in "4-7,12"'
MANY = 8  # with fewer cores a server that may use all is left to share them as the kernel sees fit
_CORE_MAX = 8192  # more than any kernel knows


@dataclass(frozen=True, slots=True)
class Core:
    """A core that this process may use; `whole` has the numbers of all hardware threads of the physical core it is on."""

    number: int
    whole: frozenset[int]
    node: int = 0  # of memory (NUMA)


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a machine before a level; cores are numbers.

    `server` are those that any thread of the server may use, None where no process of it was found. `main` are those that its
    busiest threads used last, `busy` those on which anything ran just now, `taken` those of other load clients.
    """

    cores: tuple[Core, ...]
    server: frozenset[int] | None
    main: frozenset[int] = frozenset()
    busy: frozenset[int] = frozenset()
    gpu_nodes: frozenset[int] = frozenset()
    taken: frozenset[int] = frozenset()

    @property
    def ours(self) -> frozenset[int]:
        """The cores that this process may use."""
        return frozenset(core.number for core in self.cores)


def core_numbers(text: str) -> frozenset[int]:
    """Given cores as the kernel writes them, `0-3,8`, return their numbers; raise ValueError for anything else."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if not 0 <= low <= high < _CORE_MAX:
            raise ValueError(f"{part} is no range of cores")
        found |= set(range(low, high + 1))
    return frozenset(found)


def checked(wanted: str) -> str:
    """Given what an operator wants of the client's cores, return it; raise ValueError that says what is accepted."""
    if wanted not in {AUTO, OFF}:
        try:
            core_numbers(wanted)
        except ValueError:
            raise ValueError(f"{wanted!r} names no cores; accepted: {ACCEPTED}") from None
    return wanted


def place(wanted: str, seen: Seen, processes: int) -> Placement:
    """Given what is wanted (`auto`, `off` or cores) and what was seen, return where so many processes of a client go."""
    if wanted == OFF:
        return _unpinned(seen, "cores for it are switched off")
    if wanted != AUTO:
        return _as_asked(core_numbers(wanted), seen)
    if len(seen.cores) < 2:
        return _unpinned(seen, "it may use one core only")
    if seen.server is None:
        return _unpinned(seen, "no process of the server could be found on this machine")
    chosen = _ranked(seen)[:processes]
    if len(chosen) < processes:
        return _unpinned(seen, f"{len(chosen)} cores are left for its {processes} processes beside other load clients")
    apart = not any(core.whole & seen.server for core in chosen)
    if not apart and len(seen.cores) < MANY:
        return _unpinned(seen, _too_few(seen, processes))
    if any(core.whole & seen.busy for core in chosen):
        # Bound to a core that something else uses the client would wait for that, and its level be void.
        which = "may not use" if apart else "may use"
        return _unpinned(seen, f"too few of the cores that the server {which} were idle when the level began")
    both = "; the server may use it, too, but did not when the level began"
    return _pinned(chosen, seen, ", which the server may not use" if apart else both)


def _too_few(seen: Seen, processes: int) -> str:
    apart = sum(not core.whole & (seen.server or frozenset()) for core in seen.cores)
    if apart:
        return (
            f"{apart} of its cores {'is' if apart == 1 else 'are'} not the server's, too few for {processes} processes"
        )
    return f"the server may use all of its {len(seen.cores)} cores, too few to set some aside"


def _ranked(seen: Seen) -> list[Core]:
    """The cores that are not another client's, best first."""
    main_nodes = {core.node for core in seen.cores if core.number in seen.main}

    def rank(core: Core) -> tuple[bool, bool, bool, int, int]:
        return (
            bool(core.whole & seen.busy),
            bool(core.whole & seen.main),
            core.node in main_nodes | seen.gpu_nodes,
            -min(core.whole),  # the last ones: interrupts and whatever is started first are on the first
            core.number,
        )

    free = sorted((core for core in seen.cores if not core.whole & seen.taken), key=rank)
    apart = [core for core in free if not core.whole & (seen.server or frozenset())]
    return _spread(apart) + _spread([core for core in free if core not in apart])


def _spread(cores: list[Core]) -> list[Core]:
    """Given cores, return one of each physical core in their order, and only then what is left of those."""
    first, used = list[Core](), set[int]()
    for core in cores:
        if not core.whole & used:
            first.append(core)
            used |= core.whole
    return first + [core for core in cores if core not in first]


def _as_asked(wanted: frozenset[int], seen: Seen) -> Placement:
    """An operator's cores are one set for all processes: whoever names them knows why."""
    cores = sorted(wanted & seen.ours)
    if not cores:
        return _unpinned(seen, f"it may not use {named(wanted)}, as it was asked to")
    shares = None if seen.server is None else bool(set(cores) & seen.server)
    them = "it" if len(cores) == 1 else "them"
    what = {None: "", True: f"; the server may use {them}, too", False: f"; the server may not use {them}"}[shares]
    return Placement(
        cores=tuple(cores),
        one_each=False,
        shares=shares,
        server_cores=_count(seen),
        said=f"the load client was pinned to {named(cores)}, as asked{what}",
    )


def _pinned(chosen: list[Core], seen: Seen, why: str) -> Placement:
    numbers = tuple(core.number for core in chosen)
    if len(numbers) > 1:
        why = why.replace(" use it,", " use them,")
    return Placement(
        cores=numbers,
        shares=any(core.whole & (seen.server or frozenset()) for core in chosen),
        server_cores=_count(seen),
        said=f"the load client was pinned to {named(numbers)}{why}",
    )


def _unpinned(seen: Seen, why: str) -> Placement:
    return Placement(
        shares=None if seen.server is None else bool(seen.ours & seen.server),
        server_cores=_count(seen),
        said=f"the load client was not pinned: {why}",
    )


def _count(seen: Seen) -> int | None:
    return None if seen.server is None else len(seen.server)


def named(numbers: Iterable[int]) -> str:
    """Given numbers of cores, return them as a sentence names them: `core 7`, `cores 4-7 and 12`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if not runs or (len(runs) == 1 and len(runs[0]) == 1):
        return f"core {parts[0]}" if parts else "no core"
    return f"cores {parts[0]}" if len(parts) == 1 else f"cores {', '.join(parts[:-1])} and {parts[-1]}"
