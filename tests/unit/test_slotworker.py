"""What a slot makes of launches that never began, and of a disk that is nearly full."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotuner import act, outcome
from autotuner.bench.benchmark import Benchmark
from autotuner.context import SlotContext
from autotuner.core import decide
from autotuner.core.candidate import Candidate, Launch
from autotuner.core.decide import decide as next_action
from autotuner.core.state import LaunchState, Purpose, TrialState, Verdict
from autotuner.edge.host import ServerSeen
from autotuner.edge.rows import LaunchRow
from autotuner.edge.store import Store
from autotuner.errors import HostDiskFull, HostError
from autotuner.settings import Settings
from autotuner.slotworker import SlotWorker

AT = "2026-11-29 15:02:14Z"
CANDIDATE = Candidate(name="base", engine="command", launch=Launch(command=("serve",)))


class Host:
    """Has started nothing, and has `free_mib` of room."""

    free_mib = 1000.0
    here, cuts = True, 0

    async def inspect(self, launch_id: str) -> ServerSeen:
        return ServerSeen(launch_id, alive=False, error="it was never started", started=False)

    async def read_log(self, launch_id: str, offset: int, limit: int = 1 << 20) -> bytes:
        return b""

    async def free_disk_mib(self) -> float:
        return self.free_mib


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[SlotContext]:
    store = Store(tmp_path / "state.db")
    store.put_candidate(CANDIDATE, "", "x.toml")
    settings = Settings.model_validate({"state_dir": tmp_path, "slots": {"kimi": {"port": 8000}}})
    yield SlotContext("kimi", settings, (), store, host=Host())  # type: ignore[arg-type]
    store.close()


def in_hand(ctx: SlotContext) -> int:
    trial = ctx.store.add_trial("kimi", CANDIDATE, ("chat", Benchmark()), AT)
    outcome.begin_trial(ctx, trial)
    return trial


def intend(ctx: SlotContext, trial: int | None, launch: str = "l1") -> None:
    row: dict[str, Any] = {
        "id": launch, "slot": "kimi", "candidate_id": CANDIDATE.id, "name": "base", "trial_id": trial, "state": LaunchState.INTENDED,
        "purpose": Purpose.TRIAL if trial else Purpose.RESTORE, "intended_at": AT, "boot_id": "b", "mono_s": 1.0, "ready_s": None,
        "gpu_used_mib": {}, "ended_at": None, "exit_code": None, "end_asked": False, "diagnosis": None,
    }  # fmt: skip
    ctx.store.add_launch(LaunchRow(**row))


def test_a_trial_whose_launch_died_with_the_daemon_before_it_began_is_not_held_against_the_candidate(
    ctx: SlotContext,
) -> None:
    trial = in_hand(ctx)
    intend(ctx, trial)
    asyncio.run(act.record_end(ctx, decide.RecordEnd("l1")))
    assert ctx.store.trial(trial).ended is None
    assert ctx.store.open_launches("kimi") == []


def test_a_restore_that_died_with_the_daemon_before_it_began_costs_nothing_of_its_budget(ctx: SlotContext) -> None:
    intend(ctx, None)
    asyncio.run(act.record_end(ctx, decide.RecordEnd("l1")))
    assert ctx.store.restore_failures("kimi", CANDIDATE.id, "b") == []


def test_a_launch_that_the_host_refused_counts_as_a_failure(ctx: SlotContext) -> None:
    intend(ctx, None)
    ctx.refused.add("l1")
    asyncio.run(act.record_end(ctx, decide.RecordEnd("l1")))
    assert len(ctx.store.restore_failures("kimi", CANDIDATE.id, "b")) == 1


def test_why_the_host_did_not_start_a_trial_stays_its_reason(ctx: SlotContext) -> None:
    trial = in_hand(ctx)
    intend(ctx, trial)
    ctx.refused.add("l1")
    SlotWorker(ctx)._end_trial(trial, HostError("no rung can be used"))
    asyncio.run(act.record_end(ctx, decide.RecordEnd("l1")))
    ended = ctx.store.trial(trial).ended
    assert ended is not None
    assert (ended.sentence, ended.verdict) == ("no rung can be used", Verdict.ERROR)


@pytest.mark.parametrize(("free_mib", "does"), [(1000.0, decide.BeginTrial), (50.0, decide.Wait)])
def test_no_trial_is_begun_on_a_disk_that_is_nearly_full(ctx: SlotContext, free_mib: float, does: type) -> None:
    ctx.store.add_trial("kimi", CANDIDATE, ("chat", Benchmark()), AT)
    decision = worked(ctx, free_mib)
    assert isinstance(decision.action, does)
    assert ("50 MiB of disk are free, 64 are asked for" in decision.reason) == (does is decide.Wait)


@pytest.mark.parametrize(("free_mib", "yields"), [(50.0, False), (30.0, True)])
def test_a_trial_in_hand_yields_to_the_best_known_when_the_disk_is_nearly_full(
    ctx: SlotContext, free_mib: float, yields: bool
) -> None:
    trial = in_hand(ctx)
    assert (worked(ctx, free_mib).action == decide.Requeue(trial)) == yields


def worked(ctx: SlotContext, free_mib: float) -> decide.Decision:
    """What a slot with this room decides; nothing lives and nobody holds the port."""
    worker = SlotWorker(ctx)
    worker._free_mib = free_mib
    return next_action(worker._record(), decide.Observed())


class Told(Host):
    """Its servers have ended by the signal with which people and service managers end one."""

    async def inspect(self, launch_id: str) -> ServerSeen:
        return ServerSeen(launch_id, alive=False, exit_code=-15)


def test_a_server_that_somebody_else_ended_is_not_held_against_its_candidate_but_not_for_ever(ctx: SlotContext) -> None:
    ctx.host = Told()  # type: ignore[assignment]
    trial = in_hand(ctx)
    for number in range(decide.INTERRUPTIONS_MAX + 1):
        intend(ctx, trial, f"l{number}")
        asyncio.run(act.record_end(ctx, decide.RecordEnd(f"l{number}")))
        assert ctx.store.trial_in_hand("kimi") is None, "it is first in the queue again"
        assert "somebody other than autotuner ended the server" in ctx.store.outbox("kimi").entries_after(0)[-1].text
        outcome.begin_trial(ctx, trial)
    intend(ctx, trial, "last")
    asyncio.run(act.record_end(ctx, decide.RecordEnd("last")))
    ended = ctx.store.trial(trial).ended
    assert ended is not None
    assert (ended.rule, ended.verdict) == ("stopped-from-outside", Verdict.ERROR)


def test_a_start_of_the_daemon_cuts_short_the_trial_in_hand_and_none_after_it(ctx: SlotContext) -> None:
    worker, first = SlotWorker(ctx), in_hand(ctx)
    worker.start_up()
    slot = ctx.store.slot("kimi")
    assert worker._interrupt(slot, ctx.store.trial(first)) == "the daemon ended during it"
    ctx.store.move_trial(first, TrialState.DONE)  # by what its server had ended by, before it could be put back
    second = in_hand(ctx)
    assert worker._interrupt(slot, ctx.store.trial(second)) == ""


# --- a slot on another host


def far(ctx: SlotContext, host: Host) -> SlotWorker:
    host.here = False  # type: ignore[misc]
    ctx.host = host  # type: ignore[assignment]
    return SlotWorker(ctx)


def test_the_daemons_own_disk_counts_for_a_slot_on_another_host_too(
    ctx: SlotContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotuner.slotworker.free_mib", lambda path: 7.0)
    worker = far(ctx, Host())
    asyncio.run(worker._look_at_disks())
    assert "only 7 MiB of disk are free on the daemon's own machine" in worker._disk_low("x", 1.0)
    monkeypatch.setattr("autotuner.slotworker.free_mib", lambda path: 5000.0)
    asyncio.run(worker._look_at_disks())
    assert worker._disk_low("x", 1.0) == ""


def test_a_disk_that_is_nearly_full_is_named_by_its_host(ctx: SlotContext) -> None:
    host = Host()
    host.free_mib = 9.0
    worker = far(ctx, host)
    asyncio.run(worker._look_at_disks())
    assert "only 9 MiB of disk are free on host local" in worker._disk_low("x", 1.0)


def test_a_host_without_room_fails_no_trial_and_is_told_once_however_often_it_is_tried(ctx: SlotContext) -> None:
    trial = in_hand(ctx)
    worker = far(ctx, Host())

    async def full() -> None:
        raise HostDiskFull("the disk of host far is full: free space on it")

    async def works() -> None:
        return

    async def collect(work: Any) -> None:
        worker._begin(work, "launching", trial)
        assert worker.task is not None
        await asyncio.wait([worker.task])
        await worker._collect()
        await worker._carry_out(
            decide.Decision(decide.Wait(), "next try in a moment"), worker._record(), decide.Observed()
        )

    async def work() -> None:
        for _ in range(3):
            await collect(full())
        assert ctx.store.trial(trial).ended is None
        await collect(works())

    asyncio.run(work())
    entries = ctx.store.outbox("kimi").entries_after(0)
    assert [entry.title for entry in entries] == ["blocked", "unblocked"]
    assert "The disk of host far is full: free space on it." in entries[0].text
    assert "autotuner does not touch" not in entries[0].text


def test_a_restore_that_its_host_refuses_is_told_once_and_not_taken_back_at_once(ctx: SlotContext) -> None:
    worker = far(ctx, Host())

    async def refused() -> None:
        raise HostError("it cannot be started there")

    async def work() -> None:
        for _ in range(2):
            worker._begin(refused(), "restoring", None)
            assert worker.task is not None
            await asyncio.wait([worker.task])
            await worker._collect()
            await worker._carry_out(decide.Decision(decide.Wait(), "later"), worker._record(), decide.Observed())

    asyncio.run(work())
    assert [entry.title for entry in ctx.store.outbox("kimi").entries_after(0)] == ["blocked"]


# --- what the record says of a slot that cannot go on


def kept_from(ctx: SlotContext) -> str:
    return ctx.store.slot("kimi").blocked


async def goes_wrong(*_given: Any) -> None:
    raise HostError("the host did not answer")


async def ended(ctx: SlotContext, action: decide.Stop) -> None:
    ctx.store.move_launch(action.launch_id, LaunchState.ENDED, ended_at=AT)


async def carried_out(worker: SlotWorker, action: Any, observed: decide.Observed | None = None, why: str = "") -> None:
    await worker._carry_out(decide.Decision(action, why), worker._record(), observed or decide.Observed())
    if worker.task is not None:
        await asyncio.wait([worker.task])
        await worker._collect()


def test_why_a_server_could_not_be_stopped_is_over_once_it_was(
    ctx: SlotContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    intend(ctx, None)
    worker = SlotWorker(ctx)

    async def work() -> None:
        monkeypatch.setattr(act, "stop", goes_wrong)
        for _ in range(2):
            await carried_out(worker, decide.Stop("l1"))
            await carried_out(worker, decide.Wait())
        assert kept_from(ctx) == "the host did not answer"
        monkeypatch.setattr(act, "stop", ended)
        await carried_out(worker, decide.Stop("l1"))
        await carried_out(worker, decide.Wait())

    asyncio.run(work())
    assert kept_from(ctx) == ""
    assert [entry.title for entry in ctx.store.outbox("kimi").entries_after(0)] == ["blocked", "unblocked"]


def test_what_went_wrong_about_a_server_is_over_once_that_has_ended_by_itself(
    ctx: SlotContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    intend(ctx, None)
    worker = SlotWorker(ctx)
    monkeypatch.setattr(act, "verify", goes_wrong)

    async def work() -> None:
        await carried_out(worker, decide.Verify("l1"))
        await carried_out(worker, decide.Wait())
        assert kept_from(ctx) == "the host did not answer"
        await carried_out(worker, decide.RecordEnd("l1"))
        await carried_out(worker, decide.Wait())

    asyncio.run(work())
    assert kept_from(ctx) == ""


def test_why_nothing_could_be_launched_outlives_a_stop_in_between(
    ctx: SlotContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    intend(ctx, None)
    worker = SlotWorker(ctx)
    launch = decide.Launch(CANDIDATE.id, "base", Purpose.RESTORE)

    async def work() -> None:
        monkeypatch.setattr(act, "launch", goes_wrong)
        await carried_out(worker, launch)
        monkeypatch.setattr(act, "stop", ended)
        await carried_out(worker, decide.Stop("l1"))
        await carried_out(worker, decide.Wait())

    asyncio.run(work())
    assert kept_from(ctx) == "the host did not answer"


def test_who_holds_a_slot_now_is_told_whatever_went_wrong_before(
    ctx: SlotContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = SlotWorker(ctx)
    why = "cannot launch base: GPU 0 is used by pid 9 (jupyter, 9000 MiB)"
    monkeypatch.setattr(act, "launch", goes_wrong)

    async def work() -> None:
        await carried_out(worker, decide.Launch(CANDIDATE.id, "base", Purpose.RESTORE))
        await carried_out(worker, decide.Wait(), decide.Observed(strangers="GPU 0 is used by pid 9"), why)

    asyncio.run(work())
    assert kept_from(ctx) == why
    assert "autotuner does not touch what it did not launch" in ctx.store.entries()[-1].text
