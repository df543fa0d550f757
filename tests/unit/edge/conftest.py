"""What the tests of the edges share: a host whose launches all end with the test, and disks too small for anything."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S

from autotuner.edge import procfs
from autotuner.edge.host import LaunchSpec
from autotuner.edge.host_local import LocalHost

HOSTILE = Path(__file__).with_name("hostile_server.py")


class Bench:
    """A local host with what a test needs around it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = LocalHost(folder / "launches")
        self.launches: list[str] = []
        self._readers: dict[Path, int] = {}

    def spec(self, *argv: str, slot: str = "", grace_s: float = 0.3, **more: object) -> LaunchSpec:
        launch_id = uuid.uuid4().hex[:16]
        self.launches.append(launch_id)
        env = more.pop("env", {"SPT_NOENV": "1"})
        return LaunchSpec(launch_id, slot or launch_id, argv, env, stop_grace_s=grace_s, **more)  # type: ignore[arg-type]

    def hostile(self, mode: str, count: int = 10, **more: object) -> tuple[LaunchSpec, Path]:
        """A launch of the hostile server, and the FIFO that all its processes hold."""
        fifo = self.folder / f"held-{uuid.uuid4().hex[:8]}"
        os.mkfifo(fifo)
        self._readers[fifo] = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return self.spec(sys.executable, "-I", "-S", str(HOSTILE), mode, str(fifo), str(count), **more), fifo

    def held(self, fifo: Path, patience_s: float = 0.0) -> bool:
        """Whether any process still holds the FIFO: true as long as its end of file does not come."""
        poll = select.poll()
        poll.register(self._readers[fifo], select.POLLIN)
        return not any(event & select.POLLHUP for _, event in poll.poll(patience_s * 1000))

    async def ready(self, spec: LaunchSpec, word: str = "ready") -> str:
        """Wait until the server has said a word; return its log."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            log = (await self.host.read_log(spec.launch_id, 0)).decode()
            if word in log:
                return log
            await asyncio.sleep(0.01)
        raise AssertionError(f"the server of {spec.argv} never said {word!r}: {log}")

    async def ended(self, spec: LaunchSpec) -> object:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            seen = await self.host.inspect(spec.launch_id)
            if not seen.alive:
                return seen
            await asyncio.sleep(0.01)
        raise AssertionError("it does not end")

    def path(self, spec: LaunchSpec, name: str = "") -> Path:
        return self.folder / "launches" / spec.launch_id / name

    def clean_up(self) -> None:
        """End what a failed test left, by pid: by launch id and by the FIFOs held."""
        held = {str(fifo) for fifo in self._readers}
        for _ in range(20):
            left = [pid for launch in self.launches for pid in procfs.of_launch(launch)]
            left += [pid for pid in procfs.pids() if pid != os.getpid() and held & _open_files(pid)]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
            time.sleep(0.02)
        for fd in self._readers.values():
            os.close(fd)


def _open_files(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.clean_up()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a tmpfs of so many KiB."""
    mounted: list[Path] = []

    def mount(kib: int) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(place)], capture_output=True, check=False
        )
        if done.returncode != 0:
            print("skipped: a tmpfs cannot be mounted here:", done.stderr.decode().strip())
            pytest.skip("a tmpfs cannot be mounted here (needs root)")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=False)


@pytest.fixture
def fill() -> Callable[..., Path]:
    """Fills a disk to the last byte, but for `leave`."""

    def to_the_brim(place: Path, leave: int = 0) -> Path:
        filler = place / "filler"
        fd = os.open(filler, os.O_WRONLY | os.O_CREAT)
        try:
            with contextlib.suppress(OSError):
                while os.write(fd, b"x" * 4096):
                    pass
            os.ftruncate(fd, max(0, os.fstat(fd).st_size - leave))
        finally:
            os.close(fd)
        return filler

    return to_the_brim
