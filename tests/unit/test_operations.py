"""What an operator relies on: running requests are respected, secrets learnt in time, old folders go, a host is looked at."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes.fake_openai import Behaviour, FakeOpenAI
from patience import PATIENCE_S

from autotuner import act, outcome
from autotuner.bench.benchmark import Benchmark
from autotuner.cli import main
from autotuner.context import SlotContext
from autotuner.core.candidate import Candidate, Launch
from autotuner.core.decide import RESTORE_FAILURES_MAX
from autotuner.core.state import LaunchState, Purpose
from autotuner.daemon import Daemon
from autotuner.edge import clock, housekeeping, procfs
from autotuner.edge.destination import Destination
from autotuner.edge.host_local import LocalHost
from autotuner.edge.rows import LaunchRow
from autotuner.edge.store import Store
from autotuner.errors import DiskFull
from autotuner.settings import Settings, needs_restart
from autotuner.slotworker import SlotWorker

AT = "2026-11-29 15:02:14Z"
BEST = Candidate(name="best", engine="llamacpp", launch=Launch(model="/m.gguf", binary="/bin/llama-server"))
OTHER = Candidate(name="other", engine="llamacpp", launch=Launch(model="/n.gguf", binary="/bin/llama-server"))


def settings(folder: Path, port: int = 1, **slot: Any) -> Settings:
    return Settings.model_validate({"state_dir": folder, "slots": {"a": {"port": port, "drain_s": 0.5, **slot}}})


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[SlotContext]:
    store = Store(tmp_path / "state.db")
    yield SlotContext("a", settings(tmp_path), (), store, LocalHost(tmp_path / "launches"))
    store.close()


def launched(ctx: SlotContext, launch_id: str, made: Candidate = BEST, **columns: Any) -> LaunchRow:
    ctx.store.put_candidate(made, "", "x.toml")
    row = LaunchRow(
        id=launch_id, slot="a", candidate_id=made.id, name=made.name, purpose=Purpose.RESTORE, trial_id=None,
        state=LaunchState.SERVING, intended_at=AT, boot_id=clock.boot_id(), mono_s=clock.monotonic_s(), ready_s=1.0,
        gpu_used_mib={}, ended_at=None, exit_code=None, end_asked=False, diagnosis=None,
    )  # fmt: skip
    ctx.store.add_launch(dataclasses.replace(row, **columns))
    return ctx.store.launch(launch_id)


def queued(ctx: SlotContext, *, force: bool = False) -> int:
    ctx.store.put_candidate(OTHER, "", "x.toml")
    trial = ctx.store.add_trial("a", OTHER, ("default", Benchmark()), AT)
    ctx.store.update_trial(trial, force=force)
    return trial


# --- requests that run


async def with_a_request(ctx: SlotContext, ask: Any) -> Any:
    """Ask something of a best-known on which one long request runs."""
    async with FakeOpenAI(Behaviour(tok_s=2)) as server:
        ctx.settings = settings(Path(ctx.settings.state_dir), int(server.url.rpartition(":")[2]))
        reader, writer = await asyncio.open_connection("127.0.0.1", ctx.slot.port)
        body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        await reader.readuntil(b"data:")
        try:
            return await ask()
        finally:
            writer.close()


def test_what_runs_on_the_best_known_is_seen_before_a_trial_begins_but_not_by_one_that_is_forced(
    ctx: SlotContext,
) -> None:
    launched(ctx, "l1")
    ctx.store.promote("a", BEST.id, BEST.name, 0, AT)
    patient, forced = queued(ctx), queued(ctx, force=True)

    async def ask() -> tuple[str, str]:
        return await act.traffic(ctx, patient), await act.traffic(ctx, forced)

    assert asyncio.run(with_a_request(ctx, ask)) == ("1 requests run on best", "")


def test_requests_on_a_server_that_is_not_the_best_known_keep_no_trial_waiting(ctx: SlotContext) -> None:
    launched(ctx, "l1", OTHER)
    trial = queued(ctx)
    assert asyncio.run(with_a_request(ctx, lambda: act.traffic(ctx, trial))) == ""


def test_a_server_that_says_nothing_of_its_requests_keeps_no_trial_waiting(ctx: SlotContext) -> None:
    launched(ctx, "l1")
    ctx.store.promote("a", BEST.id, BEST.name, 0, AT)
    assert asyncio.run(act.traffic(ctx, queued(ctx))) == "", "nobody listens on port 1"


@pytest.mark.parametrize("who", ["nobody", "the operator", "the trial"])
def test_a_stop_waits_for_requests_as_long_as_the_settings_say_unless_it_is_forced(ctx: SlotContext, who: str) -> None:
    row = launched(ctx, "l1")
    trial = queued(ctx, force=who == "the trial")
    outcome.begin_trial(ctx, trial)
    ctx.store.update_slot("a", force=who == "the operator")

    began = clock.monotonic_s()
    asyncio.run(with_a_request(ctx, lambda: act._drain(ctx, row)))
    assert (ctx.live.stage == "draining") == (who == "nobody")
    assert who != "nobody" or clock.monotonic_s() - began >= ctx.slot.drain_s


def test_a_stop_that_somebody_asked_for_has_an_entry_and_one_that_makes_room_has_none(ctx: SlotContext) -> None:
    row = launched(ctx, "l1")
    outcome.stopped(ctx, row)
    assert ctx.store.entries() == []
    ctx.store.update_slot("a", stopped="by me, new driver", force=True)
    outcome.stopped(ctx, row)
    (entry,) = ctx.store.entries()
    assert (entry.title, "by me, new driver" in entry.text, "autotuner resume" in entry.text) == (
        "stopped best",
        True,
        True,
    )
    assert not ctx.store.slot("a").force, "it was for this stop alone"


# --- the record of an idle slot, and the restart budget


def test_what_another_process_writes_is_seen_in_the_next_cycle_though_the_record_of_an_idle_slot_is_kept(
    ctx: SlotContext,
) -> None:
    worker = SlotWorker(ctx)
    first = worker._recorded()
    assert worker._recorded() is first, "nothing was written"
    other = Store(Path(ctx.settings.state_dir) / "state.db")
    other.update_slot("a", paused="by me")
    other.close()
    assert worker._recorded().paused == "by me"
    queued(ctx)
    assert worker._recorded().queued is not None
    assert worker._recorded() is not worker._recorded(), "with a queue time counts: windows, budgets"


def test_a_best_known_that_spent_its_budget_takes_no_healthy_ones_place_once_the_window_has_passed(
    ctx: SlotContext,
) -> None:
    for made in (OTHER, BEST):
        ctx.store.put_candidate(made, "", "")
        ctx.store.promote("a", made.id, made.name, 0, AT)
    long_ago = clock.monotonic_s() - 1e6
    for number in range(RESTORE_FAILURES_MAX):
        launched(ctx, f"l{number}", mono_s=long_ago + number)
        ctx.store.update_launch(f"l{number}", state=LaunchState.ENDED)
    assert [rung.failures for rung in SlotWorker(ctx)._recorded().ladder] == [RESTORE_FAILURES_MAX, 0]


@pytest.mark.parametrize("held", ["hands_off", "stopped", "degraded"])
def test_a_start_of_the_daemon_asks_for_no_restore_where_hands_off_or_no_server_is_wanted(
    ctx: SlotContext, held: str
) -> None:
    ctx.store.put_candidate(BEST, "", "")
    ctx.store.promote("a", BEST.id, BEST.name, 0, AT)
    ctx.store.update_slot("a", **{held: "by me"})
    SlotWorker(ctx).start_up()
    assert ctx.store.slot("a").restore_wanted == ""
    ctx.store.update_slot("a", **{held: ""})
    SlotWorker(ctx).start_up()
    assert ctx.store.slot("a").restore_wanted == "the daemon was started"


def test_a_launch_that_found_no_room_on_the_disk_costs_no_budget(
    ctx: SlotContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(self: LocalHost, spec: Any) -> None:
        raise DiskFull("no space left on device")

    monkeypatch.setattr(LocalHost, "start", full)
    ctx.store.put_candidate(BEST, "", "")
    with pytest.raises(DiskFull):
        asyncio.run(act.launch(ctx, act.decide.Launch(BEST.id, BEST.name, Purpose.RESTORE)))
    (row,) = ctx.store.open_launches("a")
    asyncio.run(act.record_end(ctx, act.decide.RecordEnd(row.id)))
    assert ctx.store.open_launches("a") == []
    assert ctx.store.restore_failures("a", BEST.id, clock.boot_id()) == []


# --- settings and secrets


def test_a_reload_takes_what_the_next_start_or_stop_uses_and_names_what_needs_a_restart(tmp_path: Path) -> None:
    old = settings(tmp_path, 8000)
    tunable = {
        "drain_s": 1,
        "stop_grace_s": 2,
        "start_timeout_s": 3,
        "secret_files": {"KEY": "/k"},
        "benchmark": "default",
        "client_cores": "off",
    }
    assert needs_restart(old, settings(tmp_path, 8000, **tunable)) == ()
    assert needs_restart(old, settings(tmp_path, 8001, gpus=[1])) == ("slots.a.port", "slots.a.gpus")
    assert needs_restart(old, settings(tmp_path / "x", 8000))[0] == "state_dir"
    two = Settings.model_validate({"state_dir": tmp_path, "slots": {"b": {"port": 1}}})
    assert needs_restart(old, two) == ("[slots.a] (removed)", "[slots.b] (added)")


def test_a_host_that_comes_goes_or_changes_needs_a_restart(tmp_path: Path) -> None:
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDIKiIpGpLLeFwHnRTAGRIw+cCSrqcCAVUUiFnEuOeHm"
    far = {"address": "10.0.0.7", "user": "ops", "host_key": key, "identity_file": "/k"}
    none, one, other = (
        settings(tmp_path).model_copy(update={"hosts": hosts})
        for hosts in (
            {},
            {"far": Destination.model_validate(far)},
            {"far": Destination.model_validate({**far, "port": 2222})},
        )
    )
    assert needs_restart(one, one) == ()
    assert {needs_restart(*pair) for pair in ((none, one), (one, none), (one, other))} == {("[hosts.far]",)}


def test_a_key_that_was_changed_is_hidden_from_the_next_launch_on(ctx: SlotContext, tmp_path: Path) -> None:
    key = tmp_path / "key"
    ctx.settings = settings(tmp_path, secret_files={"KEY": str(key), "NONE": str(tmp_path / "none")})
    for value in ("the-first-key", "the-second-key"):
        key.write_text(value + "\n")
        ctx.take_secrets()
        outcome.note(ctx, "said", f"The server printed {value}.")
    text = "".join(entry.text for entry in ctx.store.entries())
    assert text.count("printed ***") == 2
    assert "key" not in text


# --- the host


def house(tmp_path: Path) -> Path:
    file = tmp_path / "autotuner.toml"
    file.write_text('state_dir = "state"\nkeep_launches = 2\n[slots.a]\nport = 1\n')
    return file


def test_the_daemon_removes_folders_of_launches_that_ended_long_ago_and_no_other(tmp_path: Path) -> None:
    daemon = Daemon(house(tmp_path))
    try:
        (worker,) = daemon._workers
        folder = worker.ctx.settings.launches
        for number in range(6):
            launched(worker.ctx, f"l{number}")
            (folder / f"l{number}").mkdir(parents=True)
            (folder / f"l{number}" / "exit.json").write_text('{"code": 0}')
            os.utime(folder / f"l{number}", (1e9 + number, 1e9 + number))
            if number != 1:
                worker.ctx.store.update_launch(f"l{number}", state=LaunchState.ENDED)
        (folder / "nobody-knows").mkdir()
        asyncio.run(daemon._tidy())
        assert {path.name for path in folder.iterdir()} == {"l1", "l4", "l5", "nobody-knows"}
    finally:
        daemon.close()


def test_the_middle_of_a_log_that_was_cut_is_no_text_for_its_reader(ctx: SlotContext, tmp_path: Path) -> None:
    where = tmp_path / "launches" / "l1"
    where.mkdir(parents=True)
    (where / housekeeping.LOG).write_bytes(b"first\n" + b"\0" * (3 << 20) + b"last\n")
    assert asyncio.run(ctx.log("l1", ctx.engine(BEST)).rest()) == ("first", "last")


def test_doctor_finds_a_process_whose_launch_is_over_and_says_what_to_do(tmp_path: Path) -> None:
    file = house(tmp_path)
    store = Store(tmp_path / "state" / "state.db")
    launched(SlotContext("a", settings(tmp_path), (), store, LocalHost(tmp_path)), "feedface00000000")
    store.update_launch("feedface00000000", state=LaunchState.ENDED)
    store.close()
    env = {**os.environ, procfs.LAUNCH_VARIABLE: "feedface00000000"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env) as forgotten:
        ran = CliRunner().invoke(main, ["-s", str(file), "doctor", "--json"])
        forgotten.communicate(b"\n")
    found = {finding["about"]: finding for finding in json.loads(ran.output)}
    assert f"process {forgotten.pid} belongs to launch feedface00000000" in found["orphans"]["sentence"]
    assert found["orphans"]["level"] == "problem"
    assert str(forgotten.pid) in found["orphans"]["do"]
    assert found["record"]["level"] == "ok"
    assert ran.exit_code == 1


def test_doctor_makes_nothing_on_a_host_that_it_looks_at_and_names_settings_that_are_wrong(tmp_path: Path) -> None:
    file = house(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    ran = CliRunner().invoke(main, ["-s", str(file), "doctor"])
    assert "no daemon works this state folder" in ran.output
    assert sorted(tmp_path.rglob("*")) == before
    file.write_text("state_dirr = 3\n")
    wrong = CliRunner().invoke(main, ["-s", str(file), "doctor"])
    assert (wrong.exit_code, "state_dirr" in wrong.output) == (1, True)


def test_a_log_that_cannot_be_cut_is_told_once_and_keeps_nothing_else_from_being_tidied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(path: Path, most: int) -> bool:
        raise OSError(95, "not supported")

    monkeypatch.setattr(housekeeping, "cut_log", cannot)
    daemon = Daemon(house(tmp_path))
    try:
        (worker,) = daemon._workers
        worker.ctx.living = frozenset({"l0"})
        folder = worker.ctx.settings.launches
        for number in range(4):
            launched(worker.ctx, f"l{number}", state=LaunchState.SERVING if number == 0 else LaunchState.ENDED)
            (folder / f"l{number}").mkdir(parents=True)
            (folder / f"l{number}" / "exit.json").write_text('{"code": 0}')
        asyncio.run(daemon._tidy())
        assert {path.name for path in folder.iterdir()} == {"l0", "l2", "l3"}
        assert daemon._tidying.uncut == {"l0"}
    finally:
        daemon.close()


class FarTidied:
    """Another host as housekeeping sees it; `hangs` until told otherwise."""

    here = False

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.hangs = asyncio.Event()

    async def cut_logs(self, launch_ids: list[str], most_bytes: int) -> dict[str, str]:
        await self.hangs.wait()
        self.asked.append(("cut", list(launch_ids), most_bytes >> 20))
        return {"l3": ""}

    async def old_launches(self, protected: set[str]) -> list[str]:
        return [name for name in ("l0", "l1", "l2", "l3", "nobody-knows") if name not in protected]

    async def remove_launches(self, launch_ids: list[str]) -> int:
        self.asked.append(("remove", launch_ids))
        return len(launch_ids)

    async def forget_programs(self) -> int:
        self.asked.append("forget")
        return 0

    def close(self) -> None:
        """Nothing is open."""


def test_another_host_is_tidied_up_as_this_machine_is_and_one_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    daemon = Daemon(house(tmp_path))
    (worker,) = daemon._workers
    own = worker.ctx.host
    far = FarTidied()
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDIKiIpGpLLeFwHnRTAGRIw+cCSrqcCAVUUiFnEuOeHm"
    there = Destination.model_validate({"address": "10.0.0.7", "user": "ops", "host_key": key, "identity_file": "/k"})
    slot = worker.ctx.slot.model_copy(update={"host": "far"})
    daemon._settings = daemon._settings.model_copy(update={"hosts": {"far": there}, "slots": {"a": slot}})
    daemon._hosts._made |= {"far": far, "local": own}  # type: ignore[dict-item]
    worker.ctx.host, worker.ctx.living = far, frozenset({"l3"})  # type: ignore[assignment]
    (worker.ctx.settings.launches / "of-before").mkdir(parents=True)

    async def work() -> None:
        await asyncio.wait_for(daemon._tidy(), PATIENCE_S)
        daemon._tidy_at_s = 0.0
        await asyncio.wait_for(daemon._tidy(), PATIENCE_S)  # begun once, however long it takes
        assert far.asked == []
        far.hangs.set()
        while "forget" not in far.asked:
            await asyncio.sleep(0.01)

    try:
        for number in range(4):
            launched(worker.ctx, f"l{number}", state=LaunchState.SERVING if number == 3 else LaunchState.ENDED)
        asyncio.run(asyncio.wait_for(work(), PATIENCE_S))
        most = daemon._settings.log_mib_max
        assert far.asked == [("cut", ["l3"], most), ("remove", ["l0", "l1"]), "forget"]
    finally:
        daemon.close()


def test_a_daemon_that_is_given_a_host_has_it_for_every_slot(tmp_path: Path) -> None:
    given = LocalHost(tmp_path / "elsewhere")
    daemon = Daemon(house(tmp_path), given)
    try:
        assert [worker.ctx.host for worker in daemon._workers] == [given]
    finally:
        daemon.close()


def test_doctor_says_which_slots_it_does_not_look_at(tmp_path: Path) -> None:
    file = house(tmp_path)
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDIKiIpGpLLeFwHnRTAGRIw+cCSrqcCAVUUiFnEuOeHm"
    host = f'[hosts.far]\naddress = "10.0.0.7"\nuser = "ops"\nhost_key = "{key}"\nidentity_file = "/k"\n'
    slot = '[slots.b]\nhost = "far"\nport = 1\ngpus = [5]\nsecret_files = { KEY = "/only/there" }\n'
    file.write_text(file.read_text() + slot + host)
    found = json.loads(CliRunner().invoke(main, ["-s", str(file), "doctor", "--json"]).output)
    [hosts] = [finding for finding in found if finding["about"] == "hosts"]
    assert "slot b is on host far" in hosts["sentence"]
    assert "/only/there" not in json.dumps(found)
    assert not [finding for finding in found if finding["about"] == "GPUs" and finding["level"] != "ok"]
