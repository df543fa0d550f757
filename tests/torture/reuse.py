"""P6: pids used again, by force: a stranger gets the pid of a shim, a server or a worker between two looks. A program, too.

As root of a PID namespace one can say which pid comes next. There, launches are killed behind the daemon's back, strangers take their
pids, and then the launch is looked at and stopped: no stranger may get a signal.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torture.tally import Tally

HERE = Path(__file__).parent
NEXT_PID = Path("/proc/sys/kernel/ns_last_pid")
OVERRUN_S = 120.0


def run(tally: Tally, seed: int, seconds: float) -> None:
    """Work in a PID namespace for so long; where none can be made, say so and try nothing."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "torture.reuse"]
    ran = subprocess.run(
        [*command, str(seed), f"{seconds:.1f}"],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + OVERRUN_S,
    )
    if ran.returncode:
        if "unshare" not in ran.stderr:
            raise RuntimeError(ran.stderr[-2000:])
        tally.counts["reuses not tried: no PID namespace"] += 1
        return
    tally.add(Tally.from_json(ran.stdout.strip().splitlines()[-1]))


def inside(seed: int, seconds: float) -> Tally:
    """Round after round, until the time is over."""
    tally, until = Tally(), time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="autotuner-reuse-") as folder:
        number = 0
        while number == 0 or time.monotonic() < until:
            asyncio.run(_round(tally, Path(folder), seed * 1_000_003 + number))
            number += 1
    return tally


async def _round(tally: Tally, folder: Path, seed: int) -> None:
    """Launch, kill shim and server, put strangers in their places, stop the launch."""
    from autotuner.edge import procfs
    from autotuner.edge.host import LaunchSpec
    from autotuner.edge.host_local import LocalHost

    draw = random.Random(seed)
    host = LocalHost(folder / "launches", "shim")
    launch_id = f"{draw.getrandbits(64):016x}"
    # One that ends in the shim's hands first leaves an end on record, with workers that could not be killed, made up here.
    await host.start(LaunchSpec(launch_id, launch_id, ("/bin/sleep", "60"), {}, stop_grace_s=0.2))
    where = folder / "launches" / launch_id
    known = json.loads((where / "identity.json").read_text())
    pids = [known["shim"]["pid"], known["server"]["pid"]]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    _collect(pids)
    if draw.random() < 0.3:
        (where / "exit.json").write_text(json.dumps({"code": None, "left": [known["server"]], "error": ""}))
    strangers = [(pid, stranger) for pid in pids if (stranger := _take(pid)) is not None]
    if draw.random() < 0.5:
        await host.inspect(launch_id)
    seen = await host.stop(launch_id, 0.05)
    for pid, stranger in strangers:
        hit = stranger.poll() is not None
        how = f"reuse seed {seed}: the stranger with pid {pid} was signalled; python -m torture --part trees --seed {seed // 1_000_003}"
        tally.check("P6", kept=not hit, how=how)
        stranger.kill()
        stranger.wait()
    tally.check("P6", kept=not seen.alive, how=f"reuse seed {seed}: a stranger is taken for the launch ({seen})")
    tally.counts["pids used again"] += len(strangers)
    assert procfs.of_launch(launch_id) == []


def _collect(pids: list[int]) -> None:
    """Wait for the ends of orphans, which are ours here: this process is the namespace's first."""
    waiting = set(pids)
    while waiting:
        for pid in list(waiting):
            try:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    waiting.discard(pid)
            except ChildProcessError:
                if not Path(f"/proc/{pid}").exists():
                    waiting.discard(pid)
        time.sleep(0.001)
    time.sleep(0.02)  # a start within the tick of another cannot be told from it


def _take(pid: int) -> subprocess.Popen[bytes] | None:
    """Start a stranger with this pid; None if somebody else was faster."""
    NEXT_PID.write_text(str(pid - 1))
    stranger = subprocess.Popen(["/bin/sleep", "60"], start_new_session=True)
    if stranger.pid == pid:
        return stranger
    stranger.kill()
    stranger.wait()
    return None


if __name__ == "__main__":
    print(inside(int(sys.argv[1]), float(sys.argv[2])).as_json(), flush=True)
