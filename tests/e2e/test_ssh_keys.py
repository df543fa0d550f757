"""A real OpenSSH server that shows no pinned key is not connected to, whatever it or the user's own files say."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.sshd import Sshd, make_key

from autotuner.edge.destination import Destination
from autotuner.edge.host_ssh import SshHost
from autotuner.errors import HostKeyRefused

pytestmark = pytest.mark.ssh

HOSTILE_CONFIG = "Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile none\n  GlobalKnownHostsFile /dev/null\n"


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    server = Sshd(tmp_path / "sshd").start()
    yield server
    server.stop()


def pinned(sshd: Sshd, host_key: str, port: int | None = None) -> Destination:
    return Destination(
        address="127.0.0.1", port=port or sshd.port, user=sshd.user, host_key=host_key,
        identity_file=sshd.client_key, folder=str(sshd.folder / "remote"),
    )  # fmt: skip


def refused(sshd: Sshd, host_key: str, port: int | None = None) -> None:
    async def work() -> None:
        host = SshHost([("far", pinned(sshd, host_key, port))], "me")
        try:
            with pytest.raises(HostKeyRefused, match="host key changed"):
                await host.free_disk_mib()
        finally:
            host.close()

    before = sshd.log().count("Accepted publickey")
    asyncio.run(work())
    assert sshd.log().count("Accepted publickey") == before


def test_nine_ways_to_be_another_host_are_refused(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, other = sshd.host_key, make_key(tmp_path / "other")
    refused(sshd, other)  # 1: another key of the same type
    refused(sshd, make_key(tmp_path / "ecdsa", "ecdsa"))  # 2: of a type that the host does not have
    home = tmp_path / "home" / ".ssh"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home.parent))
    (home / "known_hosts").write_text(f"[127.0.0.1]:{sshd.port} {right}\n* {right}\n")
    refused(sshd, other)  # 3: a key that the user's known_hosts has
    (home / "config").write_text(HOSTILE_CONFIG)
    refused(sshd, other)  # 4: a user's config that checks nothing
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    monkeypatch.setenv("SSH_ASKPASS", "/bin/true")
    refused(sshd, other)  # 5: an environment that has its own ideas
    second = Sshd(tmp_path / "second").start()
    try:
        refused(sshd, right, second.port)  # 6: the same address at another port
    finally:
        second.stop()
    _certify(sshd, tmp_path)
    refused(
        sshd, (tmp_path / "authority.pub").read_text()
    )  # 7: a certificate of an authority that is taken for the key
    (home / "known_hosts").write_text(f"@cert-authority * {(tmp_path / 'authority.pub').read_text()}")
    refused(sshd, other)  # 8: one that the user trusts
    asyncio.run(_changed(sshd, right))  # 9: a key that changes while we are connected


def _certify(sshd: Sshd, folder: Path) -> None:
    """Have an authority certify the server's key, and the server show that."""
    make_key(folder / "authority")
    sign = ["ssh-keygen", "-q", "-s", str(folder / "authority"), "-I", "far", "-h", "-n", "127.0.0.1"]
    subprocess.run([*sign, str(sshd.folder / "host.pub")], check=True)
    sshd.stop()
    sshd._options = (f"HostCertificate {sshd.folder / 'host-cert.pub'}",)
    sshd.start()


async def _changed(sshd: Sshd, right: str) -> None:
    host = SshHost([("far", pinned(sshd, right))], "me")
    try:
        assert await host.free_disk_mib() > 0  # a certificate beside the pinned key changes nothing
        sshd.stop()
        sshd._options = ()
        sshd.new_host_key()
        sshd.start()
        with pytest.raises(HostKeyRefused):
            await host.free_disk_mib()
    finally:
        host.close()
