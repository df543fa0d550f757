"""No host is connected to that shows no pinned key, whatever a user's files, the environment or the server itself say."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from fakes.ssh_server import SshServer
from pydantic import ValidationError

from autotuner.edge import ssh
from autotuner.edge.destination import Destination, fingerprint, public_key
from autotuner.edge.host_ssh import SshHost
from autotuner.errors import HostKeyRefused, HostUnreachable

OTHER = " ".join(asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().split()[:2])
FEW = {"address": "127.0.0.1", "user": "ops", "identity_file": "/nowhere/key"}


@pytest.fixture
def server(tmp_path: Path) -> SshServer:
    return SshServer(tmp_path / "server")


@contextlib.contextmanager
def host_of(destination: Destination) -> Iterator[SshHost]:
    host = SshHost([("far", destination)], "me")
    try:
        yield host
    finally:
        host.close()


async def refused(destination: Destination) -> None:
    with host_of(destination) as host:
        with pytest.raises(HostKeyRefused, match=r"host key changed: host far .*autotuner hosts pin far"):
            await host.free_disk_mib()
        with pytest.raises(HostKeyRefused):  # and it stays refused
            await host.free_disk_mib()


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (None, "host_key"),  # absent
        ([], "host_key"),
        ("", "is empty"),
        (f"@revoked {OTHER}", "must begin with the key's type"),
        (f"@cert-authority * {OTHER}", "must begin with the key's type"),
        ("ssh-ed25519-cert-v01@openssh.com AAAA", "must begin with the key's type"),
        ("none", "must begin with the key's type"),
        ("~/.ssh/known_hosts", "must begin with the key's type"),
        ("*", "must begin with the key's type"),
        ("ssh-ed25519", "no whole ssh-ed25519 key"),
        (OTHER[:-8], "no whole ssh-ed25519 key"),
        (OTHER.replace("ssh-ed25519", "ssh-rsa", 1), "no whole ssh-rsa key"),
        (fingerprint(OTHER), "must begin with the key's type"),
    ],
)
def test_only_whole_public_keys_can_be_pinned(key: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Destination.model_validate({**FEW, **({} if key is None else {"host_key": key})})
    assert public_key(f"{OTHER} a comment") == OTHER


def test_no_key_of_the_settings_switches_checking_off() -> None:
    for key in ("known_hosts", "strict_host_key_checking", "insecure", "password", "config", "options"):
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            Destination.model_validate({**FEW, "host_key": OTHER, key: "none"})


HOSTILE_CONFIG = """\
Host *
  StrictHostKeyChecking no
  UserKnownHostsFile none
  GlobalKnownHostsFile /dev/null
  HostKeyAlias elsewhere
  ProxyCommand false
  NoHostAuthenticationForLocalhost yes
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user whose own SSH files trust everything."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "config").write_text(HOSTILE_CONFIG)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "no-agent"))
    return home


def test_another_key_of_the_same_type_is_refused(server: SshServer) -> None:
    async def work() -> None:
        async with server:
            await refused(server.destination(host_key=OTHER))
            assert not server.commands

    asyncio.run(work())


def test_another_key_of_another_type_is_refused(server: SshServer) -> None:
    other = asyncssh.generate_private_key("ecdsa-sha2-nistp256").export_public_key().decode().strip()

    async def work() -> None:
        async with server:
            await refused(server.destination(host_key=other))

    asyncio.run(work())


def test_a_key_that_only_the_users_own_files_know_is_refused(server: SshServer, home: Path) -> None:
    async def work() -> None:
        async with server:
            known = f"[127.0.0.1]:{server.port} {server.host_key}\n127.0.0.1 {server.host_key}\n* {server.host_key}\n"
            (home / ".ssh" / "known_hosts").write_text(known)
            await refused(server.destination(host_key=OTHER))

    asyncio.run(work())


def test_a_users_own_config_neither_opens_nor_disturbs_a_connection(server: SshServer, home: Path) -> None:
    async def work() -> None:
        async with server:
            with host_of(server.destination()) as host:
                assert await host.free_disk_mib() > 0
            await refused(server.destination(host_key=OTHER))

    asyncio.run(work())


def test_a_key_that_changes_while_we_are_connected_is_refused_at_the_next_connection(server: SshServer) -> None:
    async def work() -> None:
        async with server:
            with host_of(server.destination()) as host:
                assert await host.free_disk_mib() > 0
                await server.stop()
                server.key = asyncssh.generate_private_key("ssh-ed25519")
                await server.start()
                with pytest.raises(HostKeyRefused):
                    await host.free_disk_mib()

    asyncio.run(work())


def test_a_server_at_another_port_of_the_same_host_has_its_own_key(server: SshServer, tmp_path: Path) -> None:
    """A known_hosts file pins a name's key for all of its ports; the settings pin it for the one they name."""

    async def work() -> None:
        async with server, SshServer(tmp_path / "other") as other:
            await refused(server.destination(port=other.port))

    asyncio.run(work())


def test_a_certificate_of_an_authority_is_no_pinned_key(server: SshServer, home: Path) -> None:
    authority = asyncssh.generate_private_key("ssh-ed25519")
    certificate = authority.generate_host_certificate(server.key, "far", principals=["127.0.0.1"])
    public = authority.export_public_key().decode().strip()
    (home / ".ssh" / "known_hosts").write_text(f"@cert-authority * {public}\n")

    async def work() -> None:
        server.extra["server_host_certs"] = [certificate]
        async with server:
            await refused(server.destination(host_key=OTHER))
            await refused(server.destination(host_key=" ".join(public.split()[:2])))
            with host_of(server.destination()) as host:  # the key itself is pinned: the certificate changes nothing
                assert await host.free_disk_mib() > 0

    asyncio.run(work())


def test_a_jump_host_shows_its_pinned_key_too(server: SshServer, tmp_path: Path) -> None:
    async def work() -> None:
        async with server, SshServer(tmp_path / "jump") as jump:
            host = SshHost([("gate", jump.destination(host_key=OTHER)), ("far", server.destination())], "me")
            try:
                with pytest.raises(HostKeyRefused, match="host gate"):
                    await host.free_disk_mib()
            finally:
                host.close()
            assert not server.connections

    asyncio.run(work())


def test_a_connection_that_the_services_sandbox_forbids_says_what_to_do(
    server: SshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(ssh.asyncssh, "connect", forbidden)
    with pytest.raises(HostUnreachable, match=r"Operation not permitted.*IPAddressAllow="):
        asyncio.run(ssh.connect([("far", server.destination(port=22))]))
