"""Before each launch the slot is looked at: what a server left on the GPUs is waited for, a while, whichever way it ended."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from unit.told import ToldSlot

from autotuner import act, slotworker
from autotuner.core.candidate import Candidate, Launch
from autotuner.core.decide import Launch as LaunchAction
from autotuner.core.state import LaunchState, Purpose
from autotuner.edge import clock
from autotuner.edge.host import GpuUse, PortHolder
from autotuner.edge.probes import Generated
from autotuner.edge.rows import LaunchRow
from autotuner.settings import Settings
from autotuner.slotworker import SlotWorker

AT = "2026-11-29 15:02:14Z"
MADE = Candidate(name="new", engine="command", launch=Launch(command=("server", "{port}")))


class Host:
    """A host of which only port and GPUs are asked; a launch is told."""

    here, cuts = True, 0

    def __init__(self) -> None:
        self.used_mib = 400.0
        self.processes: tuple[tuple[int, str, float], ...] = ()
        self.started: list[str] = []

    async def port_holder(self, port: int) -> PortHolder | None:
        return None

    async def gpus(self, indices: tuple[int, ...]) -> tuple[GpuUse, ...]:
        return (GpuUse(0, self.used_mib, 80_000.0, self.processes),)

    async def start(self, spec: Any) -> None:
        self.started.append(spec.launch_id)


class House(ToldSlot):
    """A slot with one GPU."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(clock, "monotonic_s", lambda: self.now_s)
        settings = Settings.model_validate({"state_dir": folder, "slots": {"a": {"port": 8000, "gpus": (0,)}}})
        super().__init__("a", folder / "autotuner.toml", settings)
        self.host = Host()
        self.ctx.host = self.host
        self.worker = SlotWorker(self.ctx)
        self.store.put_candidate(MADE, "", "new.toml")

    def ended(self, launch_id: str, boot_id: str, *, asked: bool = False) -> None:
        row = LaunchRow(
            id=launch_id, slot="a", candidate_id=MADE.id, name="old", purpose=Purpose.RESTORE, trial_id=None,
            state=LaunchState.ENDED, intended_at=AT, boot_id=boot_id, mono_s=1.0, ready_s=None, gpu_used_mib={0: 400.0},
            ended_at=AT, exit_code=1, end_asked=asked, diagnosis=None,
        )  # fmt: skip
        self.store.add_launch(row)

    def others(self) -> tuple[str, str]:
        return asyncio.run(self.worker._others())


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = House(tmp_path, monkeypatch)
    yield made
    made.store.close()


@pytest.mark.parametrize("asked", [False, True])
def test_memory_of_the_last_server_is_waited_for_however_it_ended(house: House, asked: bool) -> None:
    house.ended("l1", clock.boot_id(), asked=asked)
    house.host.used_mib = 60_400.0
    assert house.others() == (
        "",
        "the GPU memory of old, which has ended, is not free yet (GPU 0: 60400 MiB, 400 before)",
    )
    house.host.used_mib = 500.0  # a driver's own bookkeeping
    assert house.others() == ("", "")


def test_memory_that_never_comes_back_is_taken_for_somebody_elses(house: House) -> None:
    house.ended("l1", clock.boot_id())
    house.host.used_mib = 60_400.0
    assert house.others()[1]
    house.now_s += slotworker.GPU_WAIT_S + 1
    assert house.others() == ("", "")


def test_a_server_of_an_earlier_boot_has_left_nothing(house: House) -> None:
    house.ended("l1", "another boot")
    house.host.used_mib = 60_400.0
    assert house.others() == ("", "")


def test_an_answer_counts_only_if_the_launch_held_the_port_before_it_and_after(house: House) -> None:
    class Probe:
        async def healthy(self) -> bool:
            return True

        async def model(self) -> str | None:
            return "m"

        async def generate(self, model: str | None) -> Generated:
            return Generated(ok=True, tokens=8)

    ours, stranger = PortHolder(5, "server", "l1"), PortHolder(9, "nginx", None)
    for holders, serves in (((ours, ours), True), ((stranger, ours), False), ((ours, stranger), False)):
        coming = iter(holders)
        house.host.port_holder = lambda _port, coming=coming: asyncio.sleep(0, next(coming))
        assert asyncio.run(act._serves(house.ctx, Probe(), "l1")) is serves


def test_who_comes_between_the_look_and_the_launch_is_not_launched_upon(house: House) -> None:
    action = LaunchAction(MADE.id, "new", Purpose.RESTORE)
    house.host.processes = ((9, "jupyter", 1000.0),)
    asyncio.run(act.launch(house.ctx, action))
    assert not house.host.started
    assert not house.store.launches()
    house.host.processes = ()
    asyncio.run(act.launch(house.ctx, action))
    assert len(house.host.started) == 1
