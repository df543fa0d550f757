"""What a server left on the GPUs is waited for, in its stop and before each launch; what stays there is launched upon by nobody."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from unit.told import ToldSlot

from autotuner import act, freeing
from autotuner.context import Given
from autotuner.core.candidate import Candidate, Launch
from autotuner.core.decide import GoOn, Stop, Wait
from autotuner.core.decide import Launch as LaunchAction
from autotuner.core.gpumemory import GPU_WAIT_S, held, not_back
from autotuner.core.state import LaunchState, Purpose
from autotuner.edge import clock
from autotuner.edge.host import GpuUse, PortHolder, ServerSeen
from autotuner.edge.probes import Generated
from autotuner.edge.rows import LaunchRow
from autotuner.errors import HostError
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
        self.ours: dict[int, str] = {}
        self.error: HostError | None = None
        self.blind = False
        self.slept_s, self.back_after_s = 0.0, float("inf")

    async def port_holder(self, port: int) -> PortHolder | None:
        return None

    async def gpus(self, indices: tuple[int, ...]) -> tuple[GpuUse, ...]:
        if self.error is not None:
            raise self.error
        return () if self.blind else (GpuUse(0, self.used_mib, 80_000.0, self.processes),)

    async def launch_of(self, pid: int) -> str | None:
        return self.ours.get(pid)

    async def inspect(self, launch_id: str) -> ServerSeen:
        return ServerSeen(launch_id, alive=False)

    async def stop(self, launch_id: str, grace_s: float) -> ServerSeen:
        return ServerSeen(launch_id, alive=False, exit_code=0)

    async def free_disk_mib(self) -> float:
        return 9_000.0

    async def start(self, spec: Any) -> None:
        self.started.append(spec.launch_id)


class House(ToldSlot):
    """A slot with one GPU."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(clock, "monotonic_s", lambda: self.now_s)
        settings = Settings.model_validate(
            {"state_dir": folder, "slots": {"a": {"port": 8000, "gpus": (0,), "drain_s": 0}}}
        )
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
        around = asyncio.run(freeing.look(self.ctx))
        return around.strangers, around.freeing or around.held


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


def test_memory_that_never_comes_back_is_launched_upon_by_nobody_but_a_person(house: House) -> None:
    house.ended("l1", clock.boot_id())
    house.host.used_mib = 60_400.0
    assert house.others()[1]
    house.now_s += GPU_WAIT_S + 1
    said = (
        "GPU memory did not come back within 60 s after old had ended: "
        "GPU 0 has 60400 MiB in use, 400 were expected; no process is shown on it"
    )
    assert house.others() == ("", said)
    house.now_s += 86_400.0
    assert house.others() == ("", said), "however long it takes"
    house.store.update_slot("a", force=True)
    assert house.others() == ("", ""), "a person said that it is somebody else's"
    house.store.update_slot("a", force=False)
    house.host.used_mib = 500.0
    assert house.others() == ("", "")


def test_what_comes_after_the_memory_was_back_is_somebody_elses(house: House) -> None:
    house.ended("l1", clock.boot_id())
    assert house.others() == ("", "")
    house.host.used_mib = 9_000.0
    assert house.others() == ("", "")


def test_who_holds_it_is_named_as_far_as_it_shows() -> None:
    own, other = (5, "VLLM::EngineCore", 60_000.0), (9, "jupyter", 9_000.0)
    late = not_back({0: 400.0}, (GpuUse(0, 69_400.0, 80_000.0, (own, other)),), own={5})
    assert held("old", late).endswith(
        "GPU 0 has 69400 MiB in use, 400 were expected; held by pid 5 (VLLM::EngineCore, 60000 MiB), pid 9 (jupyter, 9000 MiB)"
    )
    assert not not_back({0: 400.0}, (GpuUse(0, 9_400.0, 80_000.0, (other,)),)), "a stranger's memory is not waited for"
    untold = (9, "jupyter", 0.0)  # as in a container
    assert not not_back({0: 400.0}, (GpuUse(0, 9_400.0, 80_000.0, (untold,)),)), "nor where it does not tell how much"


def stopping(house: House, pids: tuple[int, ...] = ()) -> None:
    """A best-known that serves and is stopped on purpose; an earlier daemon saw these processes of it on the GPUs."""
    house.store.update_slot("a", stopped="by me")
    house.ended("l1", clock.boot_id())
    house.store.db.run("UPDATE launches SET state = 'serving', ended_at = NULL")
    house.store.note_gpu_pids("l1", pids)

    async def sleep(seconds: float) -> None:
        house.now_s += seconds
        house.host.slept_s += seconds
        if house.host.slept_s >= house.host.back_after_s:
            house.host.used_mib = 400.0

    house.monkeypatch.setattr(clock, "sleep", sleep)
    house.host.used_mib = 60_400.0
    asyncio.run(act.stop(house.ctx, Stop("l1")))


def test_a_stop_has_ended_once_its_memory_is_back(house: House) -> None:
    house.host.back_after_s = 42.0
    stopping(house)
    assert house.host.slept_s == 42.0
    assert house.store.launch("l1").state is LaunchState.ENDED
    assert not house.store.slot("a").degraded


def test_a_stop_whose_memory_does_not_come_back_is_told_to_a_person_until_it_does(house: House) -> None:
    stopping(house)
    assert house.host.slept_s <= GPU_WAIT_S + 1
    assert house.store.launch("l1").state is LaunchState.ENDED
    assert house.store.slot("a").degraded.startswith("GPU memory did not come back within 60 s after old had ended")
    entry = house.last_entry()
    assert "60400 MiB in use, 400 were expected" in entry
    assert "nvidia-smi --gpu-reset" in entry
    assert asyncio.run(house.worker.cycle()).action == Wait()
    house.host.used_mib = 400.0
    house.now_s += 60.0
    assert asyncio.run(house.worker.cycle()).action == GoOn()
    assert not house.store.slot("a").degraded
    assert "goes on" in house.last_entry()


def test_a_server_on_the_gpus_is_known_as_ours_before_it_is_stopped(house: House) -> None:
    """A driver may list a process after its end: then it is no stranger, and its memory is still owed."""
    house.host.processes, house.host.ours = ((5, "VLLM::EngineCore", 60_000.0),), {5: "l1"}
    stopping(house)
    assert "held by pid 5" in house.store.slot("a").degraded


def restarted(house: House) -> None:
    """Another daemon, which remembers nothing but what is on record."""
    house.ctx.given = Given()


def test_a_server_on_the_gpus_is_known_as_ours_by_a_daemon_that_never_saw_it_alive(house: House) -> None:
    """The daemon was killed while it waited for memory that a process which has ended still holds: that is no stranger's."""
    house.ended("l1", clock.boot_id())
    house.host.used_mib, house.host.processes = 60_400.0, ((5, "VLLM::EngineCore", 60_000.0),)
    house.host.ours = {5: "l1"}
    asyncio.run(freeing.note_own(house.ctx, house.store.launch("l1")))
    restarted(house)
    house.host.ours = {}  # it has ended: nothing but the driver knows of it
    assert house.others()[1].startswith("the GPU memory of old, which has ended, is not free yet")
    house.now_s += GPU_WAIT_S + 1
    strangers, held_ = house.others()
    assert not strangers
    assert "held by pid 5 (VLLM::EngineCore, 60000 MiB)" in held_


def test_a_stop_that_another_daemon_ends_waits_for_that_memory_too(house: House) -> None:
    house.host.processes = ((5, "VLLM::EngineCore", 60_000.0),)
    stopping(house, pids=(5,))
    assert "held by pid 5" in house.store.slot("a").degraded


def test_once_the_memory_was_back_such_a_pid_is_anybodys(house: House) -> None:
    house.ended("l1", clock.boot_id())
    house.host.processes, house.host.ours = ((5, "VLLM::EngineCore", 60_000.0),), {5: "l1"}
    asyncio.run(freeing.note_own(house.ctx, house.store.launch("l1")))
    house.host.processes, house.host.ours = (), {}
    assert house.others() == ("", "")
    restarted(house)
    house.host.used_mib, house.host.processes = 9_400.0, ((5, "jupyter", 9_000.0),)
    assert house.others() == ("GPU 0 is used by pid 5 (jupyter, 9000 MiB)", "")


def test_memory_that_a_person_gave_up_is_launched_beside_also_where_its_process_is_listed(house: House) -> None:
    house.ended("l1", clock.boot_id())
    house.host.used_mib, house.host.processes = 20_400.0, ((5, "VLLM::EngineCore", 20_000.0),)
    house.host.ours = {5: "l1"}
    asyncio.run(freeing.note_own(house.ctx, house.store.launch("l1")))
    house.others()
    house.now_s += GPU_WAIT_S + 1
    action = LaunchAction(MADE.id, "new", Purpose.RESTORE)
    asyncio.run(act.launch(house.ctx, action))
    assert not house.host.started, "nobody has given it up"
    house.store.update_slot("a", force=True)
    assert house.others() == ("", "")
    asyncio.run(act.launch(house.ctx, action))
    assert len(house.host.started) == 1


def test_the_time_for_its_memory_begins_with_a_servers_end(house: House) -> None:
    house.ended("l1", clock.boot_id())
    asyncio.run(freeing.note_own(house.ctx, house.store.launch("l1")))  # as when it begins to serve
    house.now_s += 3600.0
    house.host.used_mib = 60_400.0
    assert house.others()[1].startswith("the GPU memory of old, which has ended, is not free yet")


def test_gpus_that_cannot_be_read_are_not_free_for_a_while_and_then_it_is_told(house: House) -> None:
    house.ended("l1", clock.boot_id())
    house.host.error = HostError("nvidia-smi failed with exit code 9: no devices were found")
    assert house.others() == (
        "",
        "whether the slot's GPUs are free cannot be told: nvidia-smi failed with exit code 9: no devices were found",
    )
    action = LaunchAction(MADE.id, "new", Purpose.RESTORE)
    asyncio.run(act.launch(house.ctx, action))
    assert not house.host.started
    house.now_s += GPU_WAIT_S + 1
    assert house.others() == ("", "")
    asyncio.run(act.launch(house.ctx, action))
    assert len(house.host.started) == 1
    assert "cannot be read: nvidia-smi failed" in house.last_entry()
    assert house.store.launches()[-1].gpu_used_mib == {0: 400.0}, "the levels of before stand in"


def test_where_gpus_could_never_be_read_nobody_waits_and_one_entry_says_so(house: House) -> None:
    house.host.blind = True
    for count in (1, 2):
        assert house.others() == ("", "")
        asyncio.run(act.launch(house.ctx, LaunchAction(MADE.id, "new", Purpose.RESTORE)))
        assert len(house.host.started) == count
        house.store.db.run("UPDATE launches SET state = 'ended'")
    assert len(house.store.outbox(house.ctx.name).entries_after(0)) == 1


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
