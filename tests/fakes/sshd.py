"""A real OpenSSH server on loopback, with keys and a configuration of its own in a folder; ended with what it serves."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from fakes.netns import Namespace

from autotuner.edge import procfs

MISSING = "no sshd here: these tests need OpenSSH's server (Debian: apt-get install openssh-server)"


def program() -> str:
    """The path of sshd. The test that needs it is skipped where there is none."""
    found = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found is None or shutil.which("ssh-keygen") is None:
        pytest.skip(MISSING)
    return found


def make_key(path: Path, kind: str = "ed25519") -> str:
    """Make a key pair without a passphrase; return the public key's type and data."""
    path.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "", "-f", str(path)], check=True)
    return " ".join(path.with_name(f"{path.name}.pub").read_text().split()[:2])


class Sshd:
    """One server; `client_key` is let in as the user that runs the tests. It is on loopback, or in a namespace."""

    def __init__(self, folder: Path, *options: str, on: Namespace | None = None) -> None:
        self.path = program()
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.address = on.address if on is not None else "127.0.0.1"
        self._prefix = on.prefix if on is not None else ()
        self.port = _free_port()
        self.user = getpass.getuser()
        self.host_key = make_key(folder / "host")
        self.client_key = folder / "client"
        (folder / "authorized").write_text(make_key(self.client_key) + "\n")
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Sshd":
        """Start it and wait until it listens."""
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        lines = [
            f"Port {self.port}",
            f"ListenAddress {self.address}",
            f"HostKey {self.folder / 'host'}",
            f"AuthorizedKeysFile {self.folder / 'authorized'}",
            f"PidFile {self.folder / 'pid'}",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "PermitRootLogin prohibit-password",
            *self._options,
        ]
        usual = {"MaxStartups": "100", "Subsystem": "sftp internal-sftp"}
        given = {option.split()[0] for option in self._options}
        lines += [f"{word} {value}" for word, value in usual.items() if word not in given]
        (self.folder / "config").write_text("\n".join(lines) + "\n")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._prefix, self.path, "-D", "-e", "-f", str(self.folder / "config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + 20
        while time.monotonic() < until and self._process.poll() is None:
            with socket.socket() as s:
                if s.connect_ex((self.address, self.port)) == 0:
                    return self
            time.sleep(0.02)
        raise AssertionError(f"sshd did not start: {self.log()}")

    def sessions(self) -> list[int]:
        """The processes that serve connections: the server's children, and theirs of the same program."""
        if self._process is None:
            return []
        below = procfs.descendants(self._process.pid)[1:]
        return [pid for pid in below if procfs.name_of(pid).startswith("sshd")]

    def cut(self) -> None:
        """Kill every session's process, as a host that is short of memory does."""
        for pid in self.sessions():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def stop(self) -> None:
        """End the server and its sessions; what was started through them lives on."""
        if self._process is not None:
            self.cut()
            self._process.kill()
            self._process.wait()
            self._process = None

    def new_host_key(self) -> str:
        """Give the server another key; it shows it from its next start on."""
        self.host_key = make_key(self.folder / "host")
        return self.host_key

    def log(self) -> str:
        """What the server logged."""
        return (self.folder / "log").read_text(errors="replace")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
