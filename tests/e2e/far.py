"""A house whose slot is on a host over SSH: the daemon here, the servers there, which is this machine too."""

import json
import os
import signal
import sys
from pathlib import Path

from e2e.house import House
from fakes.sshd import Sshd

from autotuner.edge import procfs


def lines(table: dict[str, str]) -> str:
    return "\n".join(f"{key} = {value}" for key, value in table.items())


def clear(remote: Path) -> None:
    """Kill what a test left on a "host"."""
    known = {path.name for path in (remote / "launches").glob("*")}
    for pid in procfs.pids():
        if procfs.launch_id_of(pid) in known:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


class FarHouse(House):
    """One state folder here; on the host, whose folder is `remote`, the servers. `port` and `address` are where a link begins."""

    def __init__(self, folder: Path, sshd: Sshd, port: int | None = None, address: str = "") -> None:
        super().__init__(folder)
        self.sshd = sshd
        self.remote = folder / "remote"
        self.slot["host"] = '"far"'
        self.host = {
            "address": json.dumps(address or sshd.address),
            "port": str(port or sshd.port),
            "user": json.dumps(sshd.user),
            "host_key": json.dumps(sshd.host_key),
            "identity_file": json.dumps(str(sshd.client_key)),
            "folder": json.dumps(str(self.remote)),
        }

    def write_settings(self, *, bench_on_host: bool = True) -> None:
        super().write_settings()
        self.host["bench_python"] = json.dumps(sys.executable if bench_on_host else "")
        self.host = {key: value for key, value in self.host.items() if value != '""'}
        text = f"\n[hosts.far]\n{lines(self.host)}\n"
        with self.settings_file.open("a") as f:
            f.write(text)

    def known(self) -> set[str]:
        return {path.name for path in (self.remote / "launches").glob("*")}

    def servers(self) -> list[int]:
        """The fake servers that live on the host."""
        found = []
        for pid in procfs.pids():
            if procfs.launch_id_of(pid) in self.known() and procfs.start_ticks(pid) is not None:
                command = command_line(pid)
                if b"shim-" not in command and str(self.port).encode() in command:
                    found.append(pid)
        return found

    def close(self) -> None:
        super().close()
        clear(self.remote)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it ended while we looked
        return b""
