"""SSH connections: the one module that opens any. A host must show a pinned key; nothing outside the settings has a say.

No known_hosts file, no `~/.ssh/config`, no variable of the environment and no question at a terminal is ever looked at:
every option that asyncssh would take from one of them is given here.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import PurePosixPath
from typing import Any, TypeVar

import asyncssh

from autotuner.core.redact import one_line
from autotuner.core.shell import command_line
from autotuner.edge import clock
from autotuner.edge.bundle import Bundle
from autotuner.edge.destination import KEY_TYPES, Destination, fingerprint, public_key
from autotuner.errors import HostDiskFull, HostError, HostKeyRefused, HostUnreachable

CONNECT_TIMEOUT_S = 15.0
LOGIN_TIMEOUT_S = 30.0
KEEPALIVE_S = 15.0
KEEPALIVES_MAX = 3
SANDBOXED = "a service may need IPAddressAllow= for it in `systemctl edit autotuner`"
Opened = TypeVar("Opened")
LOST = (OSError, asyncssh.Error)  # what a stream raises whose connection is gone
_KEX_FAILED = "host key"  # in what either side says where the server has no key of a type that is pinned

# What asyncssh would look for itself: in the user's home, in the environment, on smart cards, in Kerberos tickets.
_NOTHING_ELSE: dict[str, Any] = {
    "x509_trusted_certs": None,
    "x509_trusted_cert_paths": None,
    "client_certs": (),
    "host_based_auth": False,
    "client_host_keysign": None,
    "kbdint_auth": False,
    "password_auth": False,
    "password": None,
    "gss_host": None,
    "gss_auth": False,
    "gss_kex": False,
    "pkcs11_provider": None,
    "proxy_command": None,
    "agent_forwarding": False,
    "preferred_auth": "publickey",
    "disable_trivial_auth": True,
}


# A load that is stopped hangs up on its forwarded port while answers still come through it: asyncio warns of each.
logging.getLogger("asyncio").addFilter(lambda record: record.getMessage() != "socket.send() raised exception.")


class Connection:
    """An open connection to a host, and those to the jump hosts before it."""

    def __init__(self, name: str, hops: Sequence[asyncssh.SSHClientConnection]) -> None:
        self.name = name
        self._hops = hops

    @property
    def ssh(self) -> asyncssh.SSHClientConnection:
        """The connection to the host itself."""
        return self._hops[-1]

    def abort(self) -> None:
        """Let go at once, the host itself first."""
        for hop in reversed(self._hops):
            hop.abort()

    async def start(self, argv: tuple[str, ...]) -> asyncssh.SSHClientProcess[bytes]:
        """Start a program there, without a terminal; its words reach it as they are, whatever they hold.

        Raise HostUnreachable if the connection is lost, HostError if the host starts no programs.
        """
        try:
            return await _opened(
                lambda: self.ssh.create_process(
                    command_line(argv), encoding=None, request_pty=False, x11_forwarding=False, send_env=(), env=()
                )
            )
        except asyncssh.ChannelOpenError as error:
            raise HostError(
                f"host {self.name} runs no more programs for us on this connection: {said(error)}; MaxSessions in its "
                "sshd_config must be 2 or more"
            ) from None
        except (OSError, asyncssh.Error) as error:
            raise HostUnreachable(f"host {self.name}: {said(error)}") from None

    async def put(self, folder: str, program: Bundle) -> None:
        """Copy a program by SFTP: under a name of its own first, so that whoever starts it finds it whole or not at all.

        Raise HostUnreachable if the connection is lost, HostDiskFull for want of room, HostError for all else.
        """
        try:
            async with await _opened(self.ssh.start_sftp_client) as sftp:
                try:
                    await _put(sftp, folder, program)
                except (asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection):
                    raise
                except asyncssh.SFTPError as error:
                    if await _room(sftp, folder) < len(program.data):  # the protocol has no word for a full disk
                        raise full(self.name, folder) from None
                    raise HostError(
                        f"{program.file_name} cannot be copied to {folder} on host {self.name}: {said(error)}; that must be a "
                        f"folder that the user may write to ([hosts.{self.name}] folder)"
                    ) from None
        except (asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection, asyncssh.DisconnectError, OSError) as error:
            raise HostUnreachable(f"host {self.name}: {said(error)}") from None
        except (asyncssh.SFTPError, asyncssh.ChannelOpenError) as error:
            raise HostError(
                f"host {self.name} takes no files: {said(error)}; its sshd_config needs `Subsystem sftp internal-sftp`"
            ) from None

    async def forward(self, local_port: int, address: str, port: int) -> asyncssh.SSHListener:
        """Listen on loopback here for what listens there; on any port if the local one is 0 or taken.

        Raise HostUnreachable if the connection is lost, HostError if the host forwards nothing: whoever connects here would
        just be hung up on.
        """
        listen = self.ssh.forward_local_port
        try:
            await self._may_forward(address, port)
            try:
                return await listen("127.0.0.1", local_port, address, port)
            except OSError:
                return await listen("127.0.0.1", 0, address, port)
        except (OSError, asyncssh.Error) as error:
            raise HostUnreachable(f"host {self.name}: {said(error)}") from None

    async def _may_forward(self, address: str, port: int) -> None:
        """Open one connection through the host, which need not find anybody listening."""
        try:
            _, writer = await self.ssh.open_connection(address, port)
            writer.close()
        except asyncssh.ChannelOpenError as error:
            if error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
                raise HostError(
                    f"host {self.name} forwards no ports to {address} port {port}: {said(error)}; its sshd_config needs "
                    "AllowTcpForwarding local, and our line in authorized_keys no restrict"
                ) from None


async def _opened(open_one: Callable[[], Awaitable[Opened]]) -> Opened:
    """Open a channel; a host that allows few at a time may take a while to notice that the last one has ended."""
    for wait_s in (0.1, 0.4, 1.0, 2.0):
        try:
            return await open_one()
        except asyncssh.ChannelOpenError as error:
            if error.code != asyncssh.OPEN_CONNECT_FAILED:
                raise
        await clock.sleep(wait_s)
    return await open_one()


async def _put(sftp: asyncssh.SFTPClient, folder: str, program: Bundle) -> None:
    """Write a program as a whole; of one that cannot be written nothing is left."""
    path = str(PurePosixPath(folder) / program.file_name)
    temporary = f"{path}.{secrets.token_hex(8)}"
    await sftp.makedirs(folder, exist_ok=True)
    try:
        async with sftp.open(temporary, "wb") as file:
            await file.write(program.data)
        await sftp.posix_rename(temporary, path)
    except asyncssh.SFTPError:
        with contextlib.suppress(asyncssh.SFTPError):
            await sftp.remove(temporary)
        raise


async def _room(sftp: asyncssh.SFTPClient, folder: str) -> float:
    """The bytes that may still be written to a folder, or to the nearest above it; infinite where the host does not tell."""
    for path in (PurePosixPath(folder), *PurePosixPath(folder).parents):
        with contextlib.suppress(asyncssh.SFTPError):
            seen = await sftp.statvfs(str(path))
            return float(seen.bavail * seen.frsize)
    return float("inf")


def full(name: str, folder: str) -> HostDiskFull:
    """The same words each time, whatever had no room: they are shown for as long as it is so."""
    return HostDiskFull(
        f"the disk of host {name} is full: nothing can be written to {folder} there, and nothing launched; free space on it, "
        "the daemon goes on by itself"
    )


async def connect(way: Sequence[tuple[str, Destination]]) -> Connection:
    """Given the way to a host, jump hosts first, return an open connection.

    Raise HostKeyRefused if one of them shows no pinned key, HostError if our own key cannot be used, and HostUnreachable
    for all that may pass by itself.
    """
    hops: list[asyncssh.SSHClientConnection] = []
    try:
        for name, destination in way:
            hops.append(await _hop(name, destination, hops[-1] if hops else None))
    except BaseException:
        for hop in reversed(hops):
            hop.abort()
        raise
    return Connection(way[-1][0], hops)


async def _hop(name: str, to: Destination, tunnel: asyncssh.SSHClientConnection | None) -> asyncssh.SSHClientConnection:
    async with _own_keys(name, to) as keys:
        return await _logged_in(name, to, keys, tunnel)


@contextlib.asynccontextmanager
async def _own_keys(name: str, to: Destination) -> AsyncIterator[Sequence[Any]]:
    """Our keys for a host: those of its agent first, then its file; for as long as the block runs. Raise HostError.

    asyncssh would ask an agent by itself only where it may also take keys from the user's home.
    """
    keys: list[Any] = [str(to.identity_file.expanduser())] if to.identity_file is not None else []
    if to.agent is None:
        yield keys
        return
    try:
        agent = await asyncssh.connect_agent(str(to.agent.expanduser()))
    except OSError as error:
        raise HostError(f"the SSH agent at {to.agent} for host {name} cannot be asked: {said(error)}") from None
    try:
        try:
            keys = [*await agent.get_keys(), *keys]
        except (OSError, ValueError) as error:
            raise HostError(f"the SSH agent at {to.agent} for host {name} shows no keys: {said(error)}") from None
        if not keys:
            raise HostError(f"the SSH agent at {to.agent} has no key for host {name}: give it one with ssh-add")
        yield keys
    finally:
        agent.close()


async def _logged_in(
    name: str, to: Destination, keys: Sequence[Any], tunnel: asyncssh.SSHClientConnection | None
) -> asyncssh.SSHClientConnection:
    pinned = [asyncssh.import_public_key(key) for key in to.host_key]
    try:
        return await asyncssh.connect(
            to.address,
            to.port,
            username=to.user,
            tunnel=tunnel,
            config=None,
            known_hosts=(pinned, [], []),  # no certificate authority, and no name that could match another key
            server_host_key_algs=_algorithms(to.host_key),
            client_keys=keys,
            agent_path=None,
            connect_timeout=CONNECT_TIMEOUT_S,
            login_timeout=LOGIN_TIMEOUT_S,
            keepalive_interval=KEEPALIVE_S,
            keepalive_count_max=KEEPALIVES_MAX,
            **_NOTHING_ELSE,
        )
    except asyncssh.HostKeyNotVerifiable:
        raise _refused(name, to) from None
    except asyncssh.KeyExchangeFailed as error:
        if _KEX_FAILED in str(error):
            raise _refused(name, to) from None
        raise HostUnreachable(f"host {name}: {said(error)}") from None
    except asyncssh.PermissionDenied:
        raise HostError(
            f"host {name} does not let {to.user} in with our key: put the public key of {to.identity_file or to.agent} "
            f"into ~{to.user}/.ssh/authorized_keys there"
        ) from None
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        raise HostError(
            f"{to.identity_file} cannot be used as our key for host {name}: {said(error)}; a key with a passphrase "
            "belongs into an SSH agent ([hosts.NAME] agent)"
        ) from None
    except (OSError, asyncssh.Error) as error:
        if isinstance(error, FileNotFoundError) and to.identity_file is not None:
            raise HostError(f"there is no key {to.identity_file} for host {name}") from None
        hint = f"; {SANDBOXED}" if isinstance(error, PermissionError) else ""
        raise HostUnreachable(f"host {name} cannot be reached at {to.described}: {said(error)}{hint}") from None


async def fetch_keys(address: str, port: int, before: Connection | None) -> tuple[str, ...]:
    """Return the public keys that a host shows, best type first, without logging in; nothing is checked, nothing is sent.

    For a person to compare by their fingerprints. Raise HostUnreachable.
    """
    found = []
    failure = ""
    for algorithm in ("ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512"):
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                key = await asyncssh.get_server_host_key(
                    address,
                    port,
                    tunnel=before.ssh if before is not None else None,
                    proxy_command=None,
                    server_host_key_algs=[algorithm],
                    config=None,
                )
        except asyncssh.Error as error:  # it has no key of this type, and hangs up with or without saying so
            failure = failure or said(error)
        except OSError as error:
            raise HostUnreachable(f"{address} port {port} cannot be reached: {said(error)}") from None
        else:
            found += [public_key(key.export_public_key().decode())] if key is not None else []
    if not found:
        raise HostUnreachable(f"{address} port {port} shows no key that can be pinned: {failure}")
    return tuple(found)


async def lines(stream: asyncssh.SSHReader[bytes]) -> AsyncIterator[bytes]:
    """Yield a stream's whole lines, however long: asyncssh's own hand out one that exceeds its window in pieces."""
    begun: list[bytes] = []
    while piece := await stream.read(1 << 18):
        *whole, rest = piece.split(b"\n")
        for line in whole:
            yield b"".join([*begun, line])
            begun.clear()
        begun.append(rest)


def said(error: BaseException) -> str:
    """What an error says, in a line; its kind where it says nothing."""
    reason = getattr(error, "reason", "") or getattr(error, "strerror", "") or str(error)
    return one_line(str(reason), 200) or type(error).__name__


def _algorithms(pinned: Sequence[str]) -> list[str]:
    """All that a key may sign by, those of the pinned keys first.

    A host that has no pinned key must show another, and be refused for it: it would just hang up if we took no other type.
    Certificates are not among them.
    """
    first = [key.split()[0] for key in pinned]
    types = dict.fromkeys([*first, *KEY_TYPES])
    return [name for kind in types for name in (("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,))]


def _refused(name: str, to: Destination) -> HostKeyRefused:
    shown = ", ".join(fingerprint(key) for key in to.host_key)
    return HostKeyRefused(
        f"host key changed: host {name} ({to.described}) does not show its pinned key ({shown}). Nothing is started there. If "
        f"the host was installed anew, compare and pin its new key: autotuner hosts pin {name}; if not, somebody else answers"
    )
