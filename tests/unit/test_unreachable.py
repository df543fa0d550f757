"""A connection that is lost fails no trial and stops no server; a host that is not itself any more ends its trial, and no more."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotuner import act, measure, outcome
from autotuner.bench.benchmark import Benchmark
from autotuner.context import SlotContext
from autotuner.core import decide
from autotuner.core.candidate import Candidate, Launch
from autotuner.core.state import LaunchState, Purpose
from autotuner.edge.host import PortHolder, Ran, ServerSeen
from autotuner.edge.rows import LaunchRow
from autotuner.edge.store import Store
from autotuner.errors import HostError, HostKeyRefused, HostUnreachable
from autotuner.settings import Settings
from autotuner.slotworker import SlotWorker

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDIKiIpGpLLeFwHnRTAGRIw+cCSrqcCAVUUiFnEuOeHm"
HOSTS = {"far": {"address": "10.0.0.7", "user": "ops", "host_key": KEY, "identity_file": "/k"}}
SETTINGS = Settings.model_validate(
    {"state_dir": "/nowhere", "slots": {"t": {"port": 1, "host": "far"}}, "hosts": HOSTS}
)
AT = "2026-11-29 15:02:14Z"
MADE = Candidate(name="a", engine="command", launch=Launch(command=("serve", "{port}")))


class FarHost:
    """A host whose connection is as the test says; `stopped` counts the servers it was told to stop."""

    here = can_bench = False

    def __init__(self) -> None:
        self.cuts = 0
        self.error: HostError | None = None
        self.seen = ServerSeen("x", alive=True)
        self.stopped = 0
        self.cut_by_inspect = False
        self.asked: list[tuple[str, ...]] = []

    def _ask(self) -> None:
        if self.error is not None:
            raise self.error

    async def inspect(self, launch_id: str) -> ServerSeen:
        self._ask()
        self.cuts += self.cut_by_inspect
        return self.seen

    async def stop(self, launch_id: str, grace_s: float) -> ServerSeen:
        self._ask()
        self.stopped += 1
        return ServerSeen(launch_id, alive=False)

    async def start(self, spec: Any) -> None:
        self._ask()

    async def run(self, argv: tuple[str, ...], timeout_s: float) -> Ran:
        self._ask()
        self.asked.append(argv)
        return Ran(0, "s3cr3t-of-far\n") if argv == ("cat", "/there/key") else Ran(1, "no such file")

    async def gpus(self, indices: Any) -> tuple[()]:
        return ()

    async def port_holder(self, port: int) -> PortHolder | None:
        self._ask()
        return None

    async def free_disk_mib(self) -> float:
        self._ask()
        return 1e6

    async def read_log(self, launch_id: str, offset: int, limit: int = 1 << 20) -> bytes:
        self._ask()
        return b""

    async def reach(self, address: str, port: int) -> tuple[str, int]:
        self._ask()
        return "127.0.0.1", 1  # nothing listens there


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[SlotContext]:
    store = Store(tmp_path / "state.db")
    yield SlotContext("t", SETTINGS, (), store, host=FarHost())  # type: ignore[arg-type]
    store.close()


def host(ctx: SlotContext) -> FarHost:
    assert isinstance(ctx.host, FarHost)
    return ctx.host


def begin(ctx: SlotContext, state: LaunchState = LaunchState.SERVING) -> LaunchRow:
    """A trial in hand with its launch."""
    ctx.store.put_candidate(MADE, "", "x.toml")
    trial_id = ctx.store.add_trial("t", MADE, ("quick", Benchmark(levels=(1,))), AT)
    outcome.begin_trial(ctx, trial_id)
    row = LaunchRow(
        id="launch1", slot="t", candidate_id=MADE.id, name="a", purpose=Purpose.TRIAL, trial_id=trial_id, state=state,
        intended_at=AT, boot_id="b", mono_s=1.0, ready_s=None, gpu_used_mib={}, ended_at=None, exit_code=None,
        end_asked=False, diagnosis=None,
    )  # fmt: skip
    ctx.store.add_launch(row)
    return row


async def failed(worker: SlotWorker, error: Exception, trial_id: int | None) -> None:
    """An action of the worker has failed by an error; the next cycle takes that in."""

    async def fail() -> None:
        raise error

    worker._begin(fail(), "measuring", trial_id)
    await asyncio.sleep(0)


def test_a_slot_whose_host_is_away_waits_and_says_so(ctx: SlotContext) -> None:
    row = begin(ctx)
    host(ctx).error = HostUnreachable("host far cannot be reached")
    worker = SlotWorker(ctx)
    decision = asyncio.run(worker.cycle())
    assert (decision.action, decision.reason) == (decide.Wait(), "host far cannot be reached")
    assert ctx.store.launch(row.id).state is LaunchState.SERVING
    assert ctx.store.trial_in_hand("t") is not None


@pytest.mark.parametrize("error", [HostUnreachable("away"), HostError("the benchmark worker ended without a result")])
def test_an_action_that_lost_its_connection_leaves_the_trial_in_hand(ctx: SlotContext, error: HostError) -> None:
    row = begin(ctx)
    worker = SlotWorker(ctx)

    async def work() -> None:
        await failed(worker, error, row.trial_id)
        host(ctx).cuts += 1
        await worker.cycle()

    asyncio.run(work())
    trial = ctx.store.trial_in_hand("t")
    assert trial is not None
    assert not trial.ended


def test_an_error_without_a_lost_connection_ends_the_trial_as_ever(ctx: SlotContext) -> None:
    row = begin(ctx)
    worker = SlotWorker(ctx)

    async def work() -> None:
        await failed(worker, HostError("no such program"), row.trial_id)
        await worker.cycle()

    asyncio.run(work())
    [trial] = ctx.store.trials("t")
    assert str(trial.verdict or "error") == "error"
    assert ctx.store.trial_in_hand("t") is None or ctx.store.trial_in_hand("t").ended  # type: ignore[union-attr]


def test_a_host_that_shows_another_key_ends_its_trial_and_is_left_alone(ctx: SlotContext) -> None:
    begin(ctx)
    host(ctx).error = HostKeyRefused("host key changed: host far does not show its pinned key")
    worker = SlotWorker(ctx)
    for _ in range(3):
        assert asyncio.run(worker.cycle()).action == decide.Wait()
    [trial] = ctx.store.trials("t")
    assert str(trial.verdict) == "error"
    said = "".join(entry.text for entry in ctx.store.entries())
    assert "ost key changed" in said, said
    assert host(ctx).stopped == 0


def test_a_server_that_could_not_be_asked_is_not_stopped(ctx: SlotContext, monkeypatch: Any) -> None:
    monkeypatch.setattr(act, "DYING_S", 0.0)
    row = begin(ctx)
    host(ctx).cut_by_inspect = True
    with pytest.raises(HostUnreachable):
        asyncio.run(act.verify(ctx, decide.Verify(row.id)))
    assert host(ctx).stopped == 0
    host(ctx).cut_by_inspect = False
    asyncio.run(act.verify(ctx, decide.Verify(row.id)))  # the connection held, and the server generated nothing
    assert host(ctx).stopped == 1


def test_an_order_that_never_arrived_says_nothing_of_the_candidate(ctx: SlotContext) -> None:
    begin(ctx, LaunchState.ENDED)
    trial = ctx.store.trial_in_hand("t")
    assert trial is not None
    host(ctx).error = HostUnreachable("away")
    with pytest.raises(HostUnreachable):
        asyncio.run(act.launch(ctx, decide.Launch(MADE.id, "a", Purpose.TRIAL, trial.id)))
    [row] = ctx.store.open_launches("t")
    host(ctx).error = None
    host(ctx).seen = ServerSeen(row.id, alive=False, error="it was never started", started=False)
    asyncio.run(act.record_end(ctx, decide.RecordEnd(row.id)))
    assert not ctx.store.open_launches("t")
    again = ctx.store.trial_in_hand("t")
    assert again is not None
    assert not again.ended


def test_a_daemon_that_is_killed_before_it_gave_the_order_fails_no_trial(ctx: SlotContext) -> None:
    row = begin(ctx, LaunchState.INTENDED)
    host(ctx).seen = ServerSeen(row.id, alive=False, error="it was never started", started=False)
    worker = SlotWorker(ctx)
    worker.start_up()
    done = [type(asyncio.run(worker.cycle()).action) for _ in range(2)]
    assert done == [decide.RecordEnd, decide.Requeue]
    [trial] = ctx.store.queue("t")
    assert (trial.verdict, trial.ended) == (None, None)


def test_a_start_that_the_host_refuses_counts_against_the_candidate(ctx: SlotContext) -> None:
    begin(ctx, LaunchState.ENDED)
    host(ctx).error = HostError("the shim cannot be run")
    with pytest.raises(HostError):
        asyncio.run(act.launch(ctx, decide.Launch(MADE.id, "a", Purpose.RESTORE, None)))
    [row] = ctx.store.open_launches("t")
    host(ctx).error = None
    host(ctx).seen = ServerSeen(row.id, alive=False, error="it was never started", started=False)
    asyncio.run(act.record_end(ctx, decide.RecordEnd(row.id)))
    assert len(ctx.store.restore_failures("t", MADE.id, row.boot_id)) == 1


def test_a_secret_of_another_host_is_hidden_before_anything_of_it_is_read(ctx: SlotContext) -> None:
    slot = ctx.slot.model_copy(update={"secret_files": {"KEY": "/there/key", "OTHER": "/there/none"}})
    ctx.settings = ctx.settings.model_copy(update={"slots": {"t": slot}})
    worker = SlotWorker(ctx)
    host(ctx).error = HostUnreachable("away")
    asyncio.run(worker.cycle())
    host(ctx).error = None
    for _ in range(2):
        asyncio.run(worker.cycle())
    assert sorted(host(ctx).asked) == [("cat", "/there/key"), ("cat", "/there/none")]  # once each
    ctx.store.put_candidate(MADE, "", "x.toml")
    asyncio.run(act.launch(ctx, decide.Launch(MADE.id, "a", Purpose.RESTORE, None)))
    assert host(ctx).asked.count(("cat", "/there/key")) == 2  # before a launch again: it may be another one by now
    outcome.note(ctx, "x", "it printed s3cr3t-of-far")
    [entry] = ctx.store.entries()
    assert "s3cr3t" not in entry.text


def test_a_lost_connection_is_not_taken_for_a_server_without_requests(ctx: SlotContext) -> None:
    row = begin(ctx)
    assert row.trial_id is not None
    ctx.store.promote("t", MADE.id, "a", row.trial_id, AT)
    host(ctx).cut_by_inspect = True
    with pytest.raises(HostUnreachable):
        asyncio.run(act.traffic(ctx, row.trial_id))
    with pytest.raises(HostUnreachable):
        asyncio.run(act.stop(ctx, decide.Stop(row.id)))
    assert host(ctx).stopped == 0
    host(ctx).cut_by_inspect = False
    assert asyncio.run(act.traffic(ctx, row.trial_id)) == ""


def test_a_server_that_ended_while_it_was_asked_for_tokens_is_not_said_to_live_and_say_nothing(
    ctx: SlotContext,
) -> None:
    row = begin(ctx)
    host(ctx).seen = ServerSeen("x", alive=False, exit_code=-9)
    asyncio.run(act.verify(ctx, decide.Verify(row.id)))
    assert ctx.store.launch(row.id).state is LaunchState.SERVING  # the next cycle records its end, with its cause
    assert not host(ctx).stopped


def test_a_server_whose_end_is_on_record_a_moment_after_its_port_closed_is_not_said_to_live_and_say_nothing(
    ctx: SlotContext, monkeypatch: Any
) -> None:
    row, looks = begin(ctx), iter([True, True, False])

    async def inspect(_: str) -> ServerSeen:
        return ServerSeen("x", alive=next(looks), exit_code=-9)

    monkeypatch.setattr(host(ctx), "inspect", inspect)
    asyncio.run(act.verify(ctx, decide.Verify(row.id)))
    assert next(looks, None) is None
    assert ctx.store.launch(row.id).state is LaunchState.SERVING
    assert not host(ctx).stopped


def test_a_level_on_a_server_of_which_a_rank_has_ended_tells_of_that(ctx: SlotContext, monkeypatch: Any) -> None:
    async def never_idle(*_: object) -> bool:
        return False  # the others stand still, and so do their requests

    monkeypatch.setattr(measure, "becomes_idle", never_idle)
    row = begin(ctx)
    host(ctx).seen = ServerSeen("x", alive=False, exit_code=-9)
    asyncio.run(measure.run_level(ctx, decide.RunLevel(row.trial_id or 0, row.id, 1)))
    assert ctx.store.launch(row.id).state is LaunchState.ENDED
    trial = ctx.store.trial(row.trial_id or 0)
    assert trial.ended is not None
    assert trial.ended.rule == "server-ended"
