"""Now and then: keeps the logs of living servers, the folders of old launches and copied programs within bounds, on every host.

On another host it is a task of its own beside the cycles, so that one that does not answer holds up nobody.
"""

import asyncio
from collections.abc import Sequence

from autotuner import log
from autotuner.edge.destination import LOCAL
from autotuner.edge.host import Host, OneHost, launch_of_rank, rank_id
from autotuner.edge.host_nodes import members_of
from autotuner.edge.store import Store
from autotuner.errors import AutotunerError, HostUnreachable
from autotuner.hosts import Hosts
from autotuner.settings import Settings
from autotuner.slotworker import SlotWorker

END_S = 5.0


class Tidying:
    """The housekeeping of every host that has slots, and of this machine. `uncut` are the logs that cannot be cut."""

    def __init__(self, hosts: Hosts, store: Store, workers: Sequence[SlotWorker]) -> None:
        self.uncut: set[str] = set()
        self._hosts = hosts
        self._store = store
        self._workers = workers
        self._far: dict[str, asyncio.Task[None]] = {}
        self._log = log.get()

    async def go(self, settings: Settings) -> None:
        """Tidy this machine up, and begin with every other host where that is not still being done.

        Raise HostError or OSError for what could not be done here. The record is read here alone, on the daemon's own turn.
        """
        slots = [settings.slots[worker.ctx.name] for worker in self._workers]
        names = dict.fromkeys(node.host for slot in slots for node in slot.members)
        for name in names:
            host = self._hosts.named(name)
            if not host.here and name not in self._far:
                self._far[name] = asyncio.create_task(self._tidy_far(name, host, settings), name=f"tidying {name}")
        host = self._hosts.named(LOCAL)
        if host.here:
            await self._tidy(host, settings, self._living(host))

    async def end(self) -> None:
        """Let go of what is being done on other hosts."""
        tasks = list(self._far.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_S)

    async def _tidy_far(self, name: str, host: OneHost, settings: Settings) -> None:
        try:
            await self._tidy(host, settings, self._living(host), f" on host {name}")
            if gone := await host.forget_programs():
                self._log.info(f"programs of earlier versions removed on host {name}", files=gone)
        except HostUnreachable:
            return  # its slots say so
        except AutotunerError as error:
            self._log.warning(f"host {name} could not be tidied up", error=str(error))
        finally:
            self._far.pop(name, None)

    async def _tidy(self, host: OneHost, settings: Settings, living: Sequence[str], where: str = "") -> None:
        """Cut long logs; remove folders of launches that ended long ago: none that lives, or that is not on record."""
        for launch, why_not in (await host.cut_logs(living, settings.log_mib_max << 20)).items():
            if not why_not:
                self._log.warning(f"a server's log was too long{where}; its middle was cut out", launch=launch)
            elif launch not in self.uncut:  # said once, not every minute; `doctor` says it, too
                self._log.warning(f"a server's log is too long and cannot be cut{where}", launch=launch, error=why_not)
                self.uncut.add(launch)
        kept = self._store.launches_to_keep(settings.slots, settings.keep_launches)
        old = [launch for launch in await host.old_launches(kept) if self._store.has_ended(launch_of_rank(launch))]
        if gone := await host.remove_launches(old):
            self._log.info(f"folders of old launches removed{where}", launches=gone)

    def _living(self, host: Host) -> list[str]:
        """The launches, or ranks of them, that live there."""
        parts = ((w, rank) for w in self._workers for rank, part in enumerate(members_of(w.ctx.host)) if part is host)
        return sorted({rank_id(launch, rank) for w, rank in parts for launch in w.ctx.living})
