"""A user of this machine who is made for a test and removed after it: with a home, and a login shell of any kind.

Needs root and useradd. The home is below a folder that everybody may enter, as pytest's own folders are not.
"""

import os
import shutil
import subprocess
import tempfile
from itertools import count
from pathlib import Path
from typing import Self

import pytest

PYTHON = "/usr/bin/python3"  # the tests' own may be where only root may look
_number = count()


class Person:
    """One user; skips the test that needs one where none can be made. `ground` is a folder around the home."""

    def __init__(self, shell: str = "/bin/sh") -> None:
        if os.getuid() != 0 or shutil.which("useradd") is None:
            pytest.skip("a user of its own needs root and useradd")
        if not Path(shell).exists():
            pytest.skip(f"there is no {shell} here (Debian: apt-get install {Path(shell).name})")
        asked = [PYTHON, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]
        if not Path(PYTHON).exists() or subprocess.run(asked, check=False).returncode:
            pytest.skip(f"there is no {PYTHON} of 3.10 or newer for another user")
        self.name = f"at{os.getpid()}n{next(_number)}"
        self.shell = shell

    def __enter__(self) -> Self:
        self.ground = Path(tempfile.mkdtemp(prefix="autotuner-person-"))
        self.ground.chmod(0o755)
        self.home = self.ground / "home"
        self.home.mkdir()
        words = ["--no-create-home", "--home-dir", str(self.home), "--shell", self.shell, "--password", "*", self.name]
        subprocess.run(["useradd", *words], check=True, capture_output=True)
        shutil.chown(self.home, self.name, self.name)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["userdel", "--force", self.name], check=False, capture_output=True)
        shutil.rmtree(self.ground, ignore_errors=True)

    def write(self, path: str, text: str) -> None:
        """Write a file of theirs below the home."""
        where = self.home / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)
        for each in (where, *[above for above in where.parents if above.is_relative_to(self.home)]):
            shutil.chown(each, self.name, self.name)


class FullDisk:
    """A small disk of its own at a folder, in memory; `fill` leaves no room on it. Skips the test where none can be mounted."""

    def __init__(self, folder: Path, kib: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={kib}k,mode=0777", "none", str(folder)]
        if os.getuid() != 0 or subprocess.run(words, check=False, capture_output=True).returncode:
            pytest.skip("a disk of its own needs root, and a kernel that mounts one for us")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=False, capture_output=True)

    def fill(self) -> None:
        """Take all the room that is left."""
        with (self.folder / "ballast").open("ab", buffering=0) as f:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        f.write(b"x" * size)
                except OSError:
                    continue

    def free(self) -> None:
        """Give the room back."""
        (self.folder / "ballast").unlink(missing_ok=True)
