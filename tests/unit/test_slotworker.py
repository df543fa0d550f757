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
from autotuner.errors import HostError
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
        assert "somebody other than autotuner ended the server" in ctx.store.entries_after(0)[-1].text
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
