"""A file of nothing that is given up when the disk is full, so that the last decisions can still be recorded."""

import contextlib
import os
import shutil
from pathlib import Path

NAME = "ballast"
BALLAST_BYTES = 4 << 20


class Ballast:
    """Room held back for bad times."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._held = False

    def take(self) -> bool:
        """Hold the room; false if there is none to hold, or not as much again beside it, so that it is not given up at once."""
        if not self._held:
            self._held = self._take()
        return self._held

    def _take(self) -> bool:
        if self._path.exists() and self._path.stat().st_size == BALLAST_BYTES:
            return True
        try:
            if shutil.disk_usage(self._path.parent).free < 2 * BALLAST_BYTES:
                return False
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            os.posix_fallocate(fd, 0, BALLAST_BYTES)
        except OSError:
            self.drop()
            return False
        finally:
            os.close(fd)
        return True

    def drop(self) -> None:
        """Give the room up."""
        self._held = False
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
