"""P5 and P6: hostile trees of 56 to 65 processes, stopped on each rung that this machine has, beside processes that look alike.

The judge of "nothing is left" is the kernel: all processes of a tree hold the write end of one FIFO, whose reader gets its end of
file when the last of them is gone, whatever they call themselves and wherever they are. Bystanders report every signal they get.
"""

import asyncio
import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from fakes import units

from autotuner.edge import procfs, rungs
from autotuner.edge.host import LaunchSpec
from autotuner.edge.host_local import LocalHost
from autotuner.errors import HostError
from torture import reuse
from torture.tally import Tally

HERE = Path(__file__).parent
LEAST, MOST = 56, 65
READY_S = 60.0
SHIM_KILLED = 0.25  # of the trees
REUSE_SHARE = 0.1  # of the time
AT_ONCE = 3  # on each rung; most of a stop is waiting for workers that are asked first


def run(seed: int, seconds: float) -> Tally:
    """Stop trees on one rung after the other until the time is over, at least one on each; then have pids used again."""
    tally, began = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="autotuner-trees-") as folder, _on_path(Path(folder)) as places:
        until = began + seconds * (1 - REUSE_SHARE)
        hosts = {rung: LocalHost(Path(folder) / "launches", rung) for rung in places}
        number = 0
        while number == 0 or time.monotonic() < until:
            some = [seed * 1_000_003 + number + i for i in range(AT_ONCE)]
            asyncio.run(_some(tally, Path(folder), hosts, some))
            number += AT_ONCE
    reuse.run(tally, seed, max(1.0, seconds * REUSE_SHARE))
    return tally


async def _some(tally: Tally, folder: Path, hosts: dict[str, LocalHost], seeds: list[int]) -> None:
    await asyncio.gather(*(_one(tally, folder, host, rung, seed) for seed in seeds for rung, host in hosts.items()))


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[tuple[str, ...]]:
    """The rungs that can be tried here; the fake manager, where it can work, in front of PATH."""
    if not units.can_make_groups():
        yield ("shim",)
        return
    before = dict(os.environ)
    os.environ.update(units.install(folder / "systemd", folder / "launches"))
    try:
        yield ("systemd", "cgroup", "shim")
    finally:
        os.environ.clear()
        os.environ.update(before)
        units.remove(folder / "systemd")


async def _one(tally: Tally, folder: Path, host: LocalHost, rung: str, seed: int) -> None:
    """One tree's life: grown, perhaps robbed of its shim, stopped; then the kernel is asked."""
    draw = random.Random(f"{rung} {seed}")
    again = f"tree seed {seed} on rung {rung}: python -m torture --part trees --seed {seed // 1_000_003}"
    rob = draw.random() < SHIM_KILLED
    launch_id = f"{draw.getrandbits(64):016x}"
    with Tree(folder, launch_id) as tree, Bystanders(draw, launch_id) as bystanders:
        # On the lowest rung nothing but their environment leads to the workers of a shim that was killed.
        spec = tree.spec(seed, draw.randint(LEAST, MOST), keep=rung == "shim" and rob)
        ready = await tree.grow(host, spec)
        await asyncio.sleep(draw.uniform(0, 0.15))
        if rob:
            tree.kill_shim()
        seen = await host.stop(launch_id, draw.choice([0.0, 0.1, 0.3]))
        tally.check("P5", kept=not seen.alive and not tree.held(), how=f"{again}: {_told(tree, seen)}")
        told = bystanders.told()
        tally.check("P6", kept=not told, how=f"{again}: {'; '.join(told)}")
        tally.counts[f"trees on rung {rung}" if ready else "trees for which the machine was too slow"] += 1
        tally.counts["shims killed"] += rob
    if not rob:
        left = [path.name for path in (folder / "launches" / launch_id).glob(".*")]
        tally.check("P5", kept=not left, how=f"{again}: half-written files are left: {left}")
    shutil.rmtree(folder / "launches" / launch_id, ignore_errors=True)


def _told(tree: "Tree", seen: object) -> str:
    living = tree.holders()
    return f"{len(living)} processes live after the stop ({seen}): {[procfs.name_of(pid) for pid in living][:8]}"


@dataclass
class Tree:
    """A launch of the hostile server and the FIFO that shows whether anything of it lives."""

    folder: Path
    launch_id: str
    fifo: Path = field(init=False)
    reader: int = field(init=False)

    def __enter__(self) -> Self:
        self.fifo = self.folder / f"held-{self.launch_id}"
        os.mkfifo(self.fifo)
        self.reader = os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        while living := self.holders():  # of a stop that failed: the next tree begins without them
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        os.close(self.reader)
        self.fifo.unlink()

    def spec(self, seed: int, count: int, *, keep: bool) -> LaunchSpec:
        """What to launch."""
        program = (sys.executable, "-I", "-S", str(HERE / "hostile_tree.py"), str(seed), str(count), str(self.fifo))
        return LaunchSpec(
            self.launch_id, self.launch_id, (*program, "1" if keep else "0"), {"SPT_NOENV": "1"}, stop_grace_s=0.3
        )

    async def grow(self, host: LocalHost, spec: LaunchSpec) -> bool:
        """Launch the tree and wait until it has grown; tell whether it has."""
        until = time.monotonic() + READY_S
        with contextlib.suppress(HostError):  # a machine that is too slow for a launch must still clear it away
            await host.start(spec)
        while time.monotonic() < until:
            if b"ready" in await host.read_log(self.launch_id, 0):
                return True
            await asyncio.sleep(0.01)
        return False

    def kill_shim(self) -> None:
        """SIGKILL, and wait until it is gone, so that whoever stops the launch next gets no help from it."""
        identity = self.folder / "launches" / self.launch_id / "identity.json"
        if not identity.exists():
            return
        shim = json.loads(identity.read_text())["shim"]
        procfs.signal_exactly(shim["pid"], shim["start_ticks"], signal.SIGKILL)
        while procfs.lives(shim["pid"], shim["start_ticks"]):
            time.sleep(0.002)

    def held(self) -> bool:
        """Whether any process of the tree lives."""
        poll = select.poll()
        poll.register(self.reader, select.POLLIN)
        return not any(event & select.POLLHUP for _, event in poll.poll(0))

    def holders(self) -> list[int]:
        """Who they are, for people."""
        if not self.held():
            return []
        found = []
        for pid in procfs.pids():
            with contextlib.suppress(OSError):
                if pid != os.getpid() and any(
                    os.readlink(f"/proc/{pid}/fd/{fd}") == str(self.fifo) for fd in os.listdir(f"/proc/{pid}/fd")
                ):
                    found.append(pid)
        return found


class Bystanders:
    """Processes of nobody's, each alike a launch in one way: its name, a launch id in its environment, a group's name, a cgroup."""

    def __init__(self, draw: random.Random, launch_id: str) -> None:
        other = f"{int(launch_id, 16) ^ 1:016x}"
        looks = {
            "VLLM::Worker_TP0": {},
            "another launch": {procfs.LAUNCH_VARIABLE: other},
            "a longer id": {procfs.LAUNCH_VARIABLE: launch_id + "0"},
            "a shorter id": {procfs.LAUNCH_VARIABLE: launch_id[:-1]},
            "the id elsewhere": {"LAUNCH": launch_id, "X": f"{procfs.LAUNCH_VARIABLE}={launch_id}"},
        }
        self._looks = dict(draw.sample(sorted(looks.items()), 1))
        self._group = _own_group(other) if draw.random() < 0.3 else None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for name, env in self._looks.items():
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-I", "-S", str(HERE / "bystander.py"), name],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        for process in self._processes.values():
            assert process.stdout is not None
            os.read(process.stdout.fileno(), 64)
            os.set_blocking(process.stdout.fileno(), False)
            if self._group is not None:
                (self._group / "cgroup.procs").write_text(str(process.pid))
        return self

    def told(self) -> list[str]:
        """What reached them: signals, or an end."""
        found = []
        for name, process in self._processes.items():
            assert process.stdout is not None
            with contextlib.suppress(BlockingIOError):
                found += [f"{name}: {line}" for line in os.read(process.stdout.fileno(), 4096).decode().splitlines()]
            if process.poll() is not None:
                found.append(f"{name}: ended with {process.returncode}")
        return found

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()
        if self._group is not None:
            self._group.rmdir()


def _own_group(launch_id: str) -> Path | None:
    """A group named like another launch's, with a process in it that is none of its."""
    parent = rungs.own_group()
    if parent is None or rungs.cannot_group(parent):
        return None
    group = parent / f"autotuner-{launch_id}"
    with contextlib.suppress(FileExistsError):
        group.mkdir()
    return group
