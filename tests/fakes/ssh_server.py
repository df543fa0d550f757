"""An SSH server inside the test's own process, by asyncssh: starts in milliseconds, and can be cut off at any moment.

It runs commands by a real /bin/sh, as OpenSSH does, and serves files by SFTP. `tests/fakes/sshd.py` is the real thing.
"""

import asyncio
import subprocess
from pathlib import Path
from typing import Any, Self

import asyncssh

from autotuner.edge.destination import Destination

USER = "ops"


class _Login(asyncssh.SSHServer):
    def __init__(self, server: "SshServer") -> None:
        self._server = server

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._server.connections.append(conn)

    def connection_requested(self, *where: Any) -> bool:
        return True  # forwarded ports and jumps


class SshServer:
    """One server on loopback. `folder` holds keys; `remote` is the folder that is ours on the "host"."""

    def __init__(self, folder: Path, kind: str = "ssh-ed25519") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.remote = folder / "remote"
        self.key = asyncssh.generate_private_key(kind)
        self.client_key = folder / "client"
        self.commands: list[str] = []
        self.connections: list[asyncssh.SSHServerConnection] = []
        self.port = 0
        self.extra: dict[str, Any] = {}
        client = asyncssh.generate_private_key("ssh-ed25519")
        client.write_private_key(str(self.client_key))
        self._authorized = asyncssh.import_authorized_keys(client.export_public_key().decode())
        self._server: asyncssh.SSHAcceptor | None = None

    @property
    def host_key(self) -> str:
        return " ".join(self.key.export_public_key().decode().split()[:2])

    def destination(self, **changes: Any) -> Destination:
        """The settings under which this server is reached."""
        known = {"address": "127.0.0.1", "port": self.port, "user": USER, "host_key": self.host_key}
        own = {"identity_file": self.client_key, "folder": str(self.remote)}
        return Destination(**{**known, **own, **changes})

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, at the same port as before."""
        self._server = await asyncssh.listen(
            "127.0.0.1",
            self.port,
            server_host_keys=[self.key],
            server_factory=lambda: _Login(self),
            authorized_client_keys=self._authorized,
            process_factory=self._run,
            sftp_factory=True,
            encoding=None,
            **self.extra,
        )
        self.port = self._server.get_port()

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
            self.cut()
            await self._server.wait_closed()
            await asyncio.sleep(0.05)  # both sides clean up after their connections
            self._server = None

    def cut(self) -> None:
        """Cut every connection, without a word."""
        for connection in self.connections:
            connection.abort()
        self.connections.clear()

    async def _run(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        """Run a command; a client that is gone ends its stdin, as OpenSSH's server does, and no more."""
        self.commands.append(process.command or "")
        pipe = subprocess.PIPE
        child = subprocess.Popen(["/bin/sh", "-c", process.command or "true"], stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            await process.redirect(stdin=child.stdin, stdout=child.stdout, stderr=child.stderr)
            while child.poll() is None and not process.channel.is_closing():
                await asyncio.sleep(0.01)
            if child.returncode is not None:
                await asyncio.wait_for(process.stdout.drain(), 5.0)
                process.exit(child.returncode if child.returncode >= 0 else 255)
        except (OSError, asyncssh.Error):
            pass
        finally:
            child.kill()
            child.wait()
            process.close()
            await process.wait_closed()
