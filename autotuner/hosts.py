"""The hosts that the settings name, each made when a slot first needs it; this machine is one of them."""

import secrets
from pathlib import Path

from autotuner.edge.destination import LOCAL
from autotuner.edge.files import write_atomically
from autotuner.edge.host import Host
from autotuner.edge.host_local import LocalHost
from autotuner.errors import StoreError
from autotuner.settings import Settings


class Hosts:
    """Every host of the settings, one object each. `controller` is empty where hosts are only looked at.

    `every` is the host of all slots, whatever the settings say, if it is given.
    """

    def __init__(self, settings: Settings, controller: str = "", every: Host | None = None) -> None:
        self._settings = settings
        self._controller = controller
        self._every = every
        self._made: dict[str, Host] = {}

    def of(self, slot: str) -> Host:
        """Given a slot, return its host."""
        return self.named(self._settings.slots[slot].host)

    def named(self, name: str) -> Host:
        """Given a host's name, return it. Raise NotFound."""
        if self._every is not None:
            return self._every
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def close(self) -> None:
        """Let go of every host; the servers live on."""
        for host in self._made.values():
            host.close()
        self._made.clear()

    def _make(self, name: str) -> Host:
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
