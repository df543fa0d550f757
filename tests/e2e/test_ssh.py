"""Slots on hosts over a real OpenSSH server: verdicts as on this machine, and whatever happens to the connection, one server."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.house import House
from fakes.sshd import Sshd

from autotuner.edge import procfs

pytestmark = [pytest.mark.ssh, pytest.mark.e2e]


class FarHouse(House):
    """A house whose slot is on a host over SSH: the daemon here, the servers there, which is loopback too."""

    def __init__(self, folder: Path, sshd: Sshd) -> None:
        super().__init__(folder)
        self.sshd = sshd
        self.remote = folder / "remote"
        self.slot["host"] = '"far"'
        self.host = {
            "address": '"127.0.0.1"',
            "port": str(sshd.port),
            "user": json.dumps(sshd.user),
            "host_key": json.dumps(sshd.host_key),
            "identity_file": json.dumps(str(sshd.client_key)),
            "folder": json.dumps(str(self.remote)),
        }

    def write_settings(self) -> None:
        super().write_settings()
        text = "\n[hosts.far]\n" + "\n".join(f"{k} = {v}" for k, v in self.host.items()) + "\n"
        with self.settings_file.open("a") as f:
            f.write(text)

    def known(self) -> set[str]:
        return {path.name for path in (self.remote / "launches").glob("*")}

    def servers(self) -> list[int]:
        """The fake servers that live on the host."""
        found = []
        for pid in procfs.pids():
            if procfs.launch_id_of(pid) in self.known() and procfs.start_ticks(pid) is not None:
                try:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes()
                except OSError:
                    continue
                if b"shim-" not in command and str(self.port).encode() in command:
                    found.append(pid)
        return found

    def close(self) -> None:
        super().close()
        for pid in procfs.pids():
            if procfs.launch_id_of(pid) in self.known():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    server = Sshd(tmp_path / "sshd").start()
    yield server
    server.stop()


@pytest.fixture
def far(tmp_path: Path, sshd: Sshd) -> Iterator[FarHouse]:
    house = FarHouse(tmp_path, sshd)
    yield house
    house.close()


def campaign(house: House) -> dict[str, str]:
    """Four candidates, one of each fate; return their verdicts once the best-known serves again."""
    files = [
        house.candidate("plain", tok_s=20),
        house.candidate("faster", tok_s=60),
        house.candidate("slower", tok_s=8),
        house.candidate("broken", mode="crash"),
    ]
    house.start()
    house.cli("enqueue", "--no-preflight", *files)
    house.wait_settled(180)
    return house.verdicts()


def test_a_campaign_there_has_the_verdicts_of_one_here(far: FarHouse, tmp_path: Path) -> None:
    (tmp_path / "near").mkdir()
    near = House(tmp_path / "near")
    try:
        here = campaign(near)
    finally:
        near.close()
    there = campaign(far)
    assert there == here
    assert far.serving() == "faster"
    assert len(far.servers()) == 1
    assert not list(far.state.glob("launches/*"))  # nothing of a server is on the daemon's machine
    shown = far.cli("show", "faster").stdout
    assert "a port forwarded to host far" in shown
    assert "on host far" in far.cli("restore-best", "--wait").stdout
