"""The hosts that the settings name, each made when a slot first needs it; this machine is one of them."""

import secrets
from pathlib import Path

from autotuner.edge.destination import LOCAL
from autotuner.edge.files import write_atomically
from autotuner.edge.host import Host, OneHost
from autotuner.edge.host_local import LocalHost
from autotuner.edge.host_nodes import Member, NodesHost
from autotuner.errors import StoreError
from autotuner.settings import Settings


class Hosts:
    """Every host of the settings, one object each. `controller` is empty where hosts are only looked at.

    `every` is the host of all slots, whatever the settings say, if it is given.
    """

    def __init__(self, settings: Settings, controller: str = "", every: OneHost | None = None) -> None:
        self._settings = settings
        self._controller = controller
        self._every = every
        self._made: dict[str, OneHost] = {}
        self._several: dict[str, NodesHost] = {}

    def of(self, slot: str) -> Host:
        """Given a slot, return its host, or the hosts of its nodes as one."""
        own = self._settings.slots[slot]
        if not own.nodes or self._every is not None:
            return self.named(own.host)
        if slot not in self._several:
            self._several[slot] = NodesHost(self._members(slot), own.stop_grace_s)
        return self._several[slot]

    def named(self, name: str) -> OneHost:
        """Given a host's name, return it. Raise NotFound."""
        if self._every is not None:
            return self._every
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def close(self) -> None:
        """Let go of every host; the servers live on."""
        for several in self._several.values():
            several.close()
        self._several.clear()
        for host in self._made.values():
            host.close()
        self._made.clear()

    def _members(self, slot: str) -> tuple[Member, ...]:
        own, first = self._settings.slots[slot], self._settings.rank_of(slot, 0)
        meet = (first.meet.port,) if first else ()
        return tuple(
            Member(node.host, self.named(node.host), node.gpus, (port, *(meet if rank == 0 else ())))
            for rank, (node, port) in enumerate(zip(own.nodes, own.ports, strict=True))
        )

    def _make(self, name: str) -> OneHost:
        if name == LOCAL:
            return LocalHost(self._settings.launches, self._settings.launcher)
        from autotuner.edge.host_ssh import SshHost  # noqa: PLC0415 - SSH takes a fifth of a second to import

        return SshHost(self._settings.way_to(name), self._controller)


def controller_id(state_dir: Path) -> str:
    """Given a state folder, return the id under which its daemon works hosts over SSH; made once, and kept there.

    Raise StoreError if it can be neither read nor kept.
    """
    path = state_dir / "controller"
    try:
        if path.exists():
            return path.read_text(encoding="ascii").strip()
        made = secrets.token_hex(8)
        write_atomically(path, f"{made}\n".encode())
    except (OSError, ValueError) as error:
        raise StoreError(f"the id of this daemon cannot be kept in {path}: {error}") from None
    return made
