"""A loop that hangs says where, whether it still turns or is blocked in a call, and says nothing as long as it goes on."""

import asyncio
import subprocess
import sys
from pathlib import Path

from autotuner.edge import hanging
from autotuner.edge.hanging import HangWatch, waiting_tasks

ROOT = Path(hanging.__file__).parents[2]
HERE = Path(__file__).name


async def stuck() -> None:
    await asyncio.get_running_loop().create_future()


async def outer() -> None:
    await stuck()


def test_a_task_is_told_with_the_whole_chain_of_its_awaits() -> None:
    async def work() -> tuple[str, ...]:
        task = asyncio.create_task(outer(), name="slot")
        await asyncio.sleep(0)
        told = waiting_tasks()
        task.cancel()
        return told

    (line,) = [line for line in asyncio.run(work()) if line.startswith("slot: ")]
    first, second, *_ = line.removeprefix("slot: ").split(" > ")
    assert (first.split()[1], second.split()[1]) == ("outer", "stuck")
    assert first.startswith(f"{HERE}:")


def test_what_is_late_is_told_once_and_what_comes_in_time_never() -> None:
    told: list[tuple[str, ...]] = []

    async def work() -> None:
        watch = HangWatch(told.append)
        for _ in range(20):
            watch.expect(60.0)
            await asyncio.sleep(0)
        assert told == []
        watch.expect(0.01)
        while not told:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        watch.rest()

    asyncio.run(work())
    assert len(told) == 1


BLOCKED = """
import asyncio, time
from autotuner.edge import hanging
hanging.BLOCKED_LATER_S = 0.2

def blocks_the_loop():
    time.sleep(END)

async def main():
    hanging.HangWatch(print).expect(0.2)
    blocks_the_loop()

asyncio.run(main())
"""


def run(end: str) -> subprocess.CompletedProcess[str]:
    script = BLOCKED.replace("time.sleep(END)", end)
    return subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )


def test_a_loop_that_is_blocked_in_a_call_is_told_from_outside() -> None:
    ran = run("time.sleep(2)")
    assert "blocks_the_loop" in ran.stderr
    assert "Timeout" in ran.stderr


def test_the_end_by_the_watchdogs_signal_says_where_it_was() -> None:
    ran = run("import os; os.kill(os.getpid(), 6)")
    assert ran.returncode == -6
    assert "blocks_the_loop" in ran.stderr
