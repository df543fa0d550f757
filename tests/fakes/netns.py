"""A host of its own kind: a network namespace with one cable to it, whose link can really be taken down and whose TCP reset.

Needs root and iproute2; `why_not` says what is missing. Processes and files are the test's own, only the network is another.
"""

import os
import shutil
import socket
import subprocess
import time
from itertools import count
from typing import Self

import pytest

_number = count()


def why_not() -> str:
    """Why no namespace can be made here; empty if one can."""
    if os.getuid() != 0:
        return "network namespaces need root: run these tests as root (in a container: with CAP_NET_ADMIN and CAP_SYS_ADMIN)"
    missing = [name for name in ("ip", "ss") if shutil.which(name) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} here (Debian: apt-get install iproute2)"
    try:
        with Namespace():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        return f"no network namespace can be made here: {said.decode(errors='replace').strip()}"


def needed() -> None:
    """Skip the test that needs them where there are none."""
    if reason := why_not():
        pytest.skip(reason)


class Namespace:
    """One namespace: `address` is the host's, as seen from here; `prefix` is put before a command that runs on it."""

    def __init__(self) -> None:
        number = os.getpid() % 4096 * 16 + next(_number) % 16
        self.name = f"autotuner-{os.getpid()}-{number}"
        self._near, self._far = f"at{number}n", f"at{number}f"
        net = f"198.18.{number // 64 % 256}.{number % 64 * 4}".rsplit(".", 1)  # a range that is set aside for tests
        self._here, self.address = (f"{net[0]}.{int(net[1]) + place}" for place in (1, 2))
        self.prefix = ("ip", "netns", "exec", self.name)

    def __enter__(self) -> Self:
        try:
            _ip("netns", "add", self.name)
            _ip("-n", self.name, "link", "set", "lo", "up")
            _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self.name)
            _ip("addr", "add", f"{self._here}/30", "dev", self._near)
            _ip("-n", self.name, "addr", "add", f"{self.address}/30", "dev", self._far)
            self.link(up=True)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for words in (("link", "del", self._near), ("netns", "del", self.name)):
            subprocess.run(["ip", *words], capture_output=True, check=False)

    def link(self, *, up: bool, near: bool = True, far: bool = True) -> None:
        """Take the link up or down, at either end."""
        state = "up" if up else "down"
        if near:
            _ip("link", "set", self._near, state)
        if far:
            _ip("-n", self.name, "link", "set", self._far, state)

    def reset(self, port: int) -> None:
        """Have the kernel reset every connection to a port there, as a router between us would, and tell both sides."""
        subprocess.run(
            ["ss", "-K", "dst", self.address, "dport", "=", f":{port}"], capture_output=True, check=False, timeout=30
        )

    def resets(self, port: int) -> bool:
        """Whether `reset` really does, shown on a connection to a server there: a kernel may have been built without it."""
        with socket.create_connection((self.address, port), timeout=30) as s:
            s.recv(100)
            self.reset(port)
            try:
                s.settimeout(1.0)
                while s.recv(4096):
                    continue
            except TimeoutError:
                return False
            except OSError:
                return True
        return False

    def down(self, seconds: float, *, near: bool) -> None:
        """Take the link down at one end for so long."""
        self.link(up=False, near=near, far=not near)
        time.sleep(seconds)
        self.link(up=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True, timeout=30)
