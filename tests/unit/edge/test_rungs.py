"""Each rung of the ladder: nothing of a launch outlives its stop, a later daemon finds it again, and the choice is tried, not guessed."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import units

from autotuner.edge import ladder, procfs, rungs
from autotuner.edge.host import LaunchSpec
from autotuner.edge.host_local import LocalHost
from autotuner.errors import HostError

RUNGS = ("systemd", "cgroup", "shim")
ENDED = {"claimed.json", "identity.json", "exit.json", "server.log"}


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The fake manager with the shipped unit; the folder that configures it."""
    need_groups()
    for name, value in units.install(tmp_path / "systemd", tmp_path / "launches").items():
        monkeypatch.setenv(name, value)
    yield tmp_path / "systemd"
    units.remove(tmp_path / "systemd")


@pytest.fixture(params=RUNGS)
def on(request: pytest.FixtureRequest, bench: Any) -> Any:
    """A bench whose launches live on one rung."""
    if request.param == "systemd":
        request.getfixturevalue("systemd")
    elif request.param == "cgroup":
        need_groups()
    bench.host = LocalHost(bench.folder / "launches", request.param)
    return bench


def need_groups() -> None:
    if not units.can_make_groups():
        print("skipped: control groups of version 2 cannot be made here")
        pytest.skip("control groups of version 2 cannot be made here (needs root)")


def claimed(bench: Any, spec: LaunchSpec) -> dict[str, Any]:
    return dict(json.loads(bench.path(spec, "claimed.json").read_text()))


# --- stopped means stopped, on each rung


@pytest.mark.parametrize("mode", ["tree", "hopper", "bare-tree"])
def test_a_hostile_tree_is_gone_after_its_stop(on: Any, mode: str) -> None:
    async def work() -> None:
        spec, fifo = on.hostile(mode, 12)
        await on.host.start(spec)
        await on.ready(spec)
        assert (await on.host.inspect(spec.launch_id)).alive
        assert not (await on.host.stop(spec.launch_id, 0.3)).alive
        assert not on.held(fifo)
        assert procfs.in_group_of(spec.launch_id) == []

    asyncio.run(work())


@pytest.mark.parametrize("rung", ["systemd", "cgroup"])
def test_also_when_the_shim_was_killed_and_the_workers_show_no_environment(
    rung: str, bench: Any, request: pytest.FixtureRequest
) -> None:
    """What the lowest rung cannot do: by then nothing leads to the workers but their control group."""
    on_it = request.getfixturevalue("systemd") if rung == "systemd" else need_groups()
    bench.host = LocalHost(bench.folder / "launches", rung)
    assert on_it is None or on_it.is_dir()

    async def work() -> None:
        spec, fifo = bench.hostile("bare-tree", 12)
        await bench.host.start(spec)
        await bench.ready(spec)
        os.kill(json.loads(bench.path(spec, "identity.json").read_text())["shim"]["pid"], signal.SIGKILL)
        seen = await bench.host.stop(spec.launch_id, 0.3)
        assert (seen.alive, seen.exit_code) == (False, None)
        assert not bench.held(fifo, 3.0)  # systemd does it by itself, as soon as the shim is gone

    asyncio.run(work())


def test_whoever_wiped_its_environment_is_still_known_by_its_group(bench: Any) -> None:
    need_groups()
    bench.host = LocalHost(bench.folder / "launches", "cgroup")

    async def work() -> None:
        spec, _ = bench.hostile("bare-tree", 2)
        await bench.host.start(spec)
        await bench.ready(spec)
        shim = json.loads(bench.path(spec, "identity.json").read_text())["shim"]["pid"]
        os.kill(shim, signal.SIGKILL)
        while procfs.start_ticks(shim) is not None:
            await asyncio.sleep(0.01)
        bare = [pid for pid in procfs.in_group_of(spec.launch_id) if procfs.launch_id_of(pid) is None]
        assert bare
        assert {procfs.launch_above(pid) for pid in bare} == {spec.launch_id}
        seen = await bench.host.inspect(spec.launch_id)
        assert (seen.alive, seen.error) == (True, "its shim is gone or has recorded nothing")
        await bench.host.stop(spec.launch_id, 0.3)

    asyncio.run(work())


def test_a_later_daemon_finds_and_stops_it_where_it_lives(on: Any) -> None:
    """Whatever that daemon would choose for its own launches, and wherever it runs itself."""

    async def work() -> None:
        spec, fifo = on.hostile("tree", 8)
        await on.host.start(spec)
        await on.ready(spec)
        later = LocalHost(on.folder / "launches", "shim")
        assert (await later.inspect(spec.launch_id)).alive
        seen = await later.stop(spec.launch_id, 0.3)
        assert (seen.alive, seen.exit_code, on.held(fifo)) == (False, -signal.SIGKILL, False)

    asyncio.run(work())


def test_a_launch_of_an_older_version_is_stopped_as_it_was_started(bench: Any) -> None:
    """Its record knows neither rungs nor what a server must not inherit."""
    bench.host = LocalHost(bench.folder / "launches", "shim")

    async def work() -> None:
        spec, fifo = bench.hostile("tree", 6)
        where = ladder.write_down(bench.folder / "launches", spec, rungs.ShimAlone())
        body = json.loads((where / "launch.json").read_text())
        del body["rung"], body["dropped"], body["env"][procfs.LAUNCH_VARIABLE]
        (where / "launch.json").write_text(json.dumps(body))
        await rungs.ShimAlone().start(where, spec.launch_id)
        await bench.ready(spec)
        later = LocalHost(bench.folder / "launches")
        assert (await later.inspect(spec.launch_id)).alive
        assert not (await later.stop(spec.launch_id, 0.3)).alive
        assert not bench.held(fifo)

    asyncio.run(work())


def test_the_end_of_a_server_is_on_record_and_nothing_else_is_left(on: Any) -> None:
    async def work() -> None:
        spec = on.spec("/bin/sh", "-c", "exit 7")
        await on.host.start(spec)
        seen = await on.ended(spec)
        assert (seen.exit_code, seen.error) == (7, "")
        assert {path.name for path in on.path(spec).iterdir()} == ENDED
        assert not Path(claimed(on, spec).get("group", "/nonexistent")).exists()

    asyncio.run(work())


def test_a_stop_before_the_server_runs_leaves_nothing(on: Any) -> None:
    async def work() -> None:
        await on.host.rung()
        spec = on.spec("/bin/sleep", "60")
        task = asyncio.create_task(on.host.start(spec))
        while not on.path(spec, "claimed.json").exists():
            await asyncio.sleep(0)
        assert not (await on.host.stop(spec.launch_id, 0.3)).alive
        await task
        assert procfs.of_launch(spec.launch_id) == []
        assert not Path(claimed(on, spec).get("group", "/nonexistent")).exists()

    for _ in range(3):
        asyncio.run(work())


# --- what a server in a unit is given


def test_a_server_in_a_unit_gets_the_units_environment_and_the_candidates(
    systemd: Path, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.host = LocalHost(bench.folder / "launches", "systemd")
    monkeypatch.setenv("DAEMONS_OWN", "canary-of-the-daemon")
    (systemd / "environment").write_text('HF_HOME="/data/hf"\nLLAMA_ARG_PORT=1\n# a remark\n')
    secret = bench.folder / "key"
    secret.write_text("canary-of-the-secret\n")

    async def work() -> None:
        shown = 'test "$API_KEY" = canary-of-the-secret && echo same; unset API_KEY; exec env'
        spec = bench.spec("/bin/sh", "-c", shown, env={"MINE": "1"}, secret_files={"API_KEY": str(secret)})
        await bench.host.start(spec)
        await bench.ended(spec)
        log = (await bench.host.read_log(spec.launch_id, 0)).decode()
        lines = set(log.splitlines())
        assert {"same", "MINE=1", "HF_HOME=/data/hf", f"AUTOTUNER_LAUNCH_ID={spec.launch_id}"} <= lines
        assert "canary" not in log
        assert not any(line.startswith(("LLAMA_ARG_", "INVOCATION_ID", "AUTOTUNER_SETTINGS")) for line in lines)
        assert bench.path(spec, "claimed.json").stat().st_mode & 0o777 == 0o600
        for file in bench.path(spec).iterdir():
            assert b"canary-of-the-secret" not in file.read_bytes().replace(b"= canary-of-the-secret", b"")

    asyncio.run(work())


def test_an_engine_is_asked_where_its_servers_run(systemd: Path, bench: Any) -> None:
    (systemd / "environment").write_text("HF_HOME=/data/hf\n")
    host = LocalHost(bench.folder / "launches", "systemd")

    async def work() -> None:
        await host.rung()
        ran = await host.run(
            ("/bin/sh", "-c", "echo $HF_HOME; grep -o autotuner-server@ /proc/self/cgroup; exit 3"), 20
        )
        assert (ran.code, ran.output) == (3, "/data/hf\nautotuner-server@\n")
        with pytest.raises(HostError, match=r"no-such-program cannot be run: .*No such file"):
            await host.run(("no-such-program",), 20)
        with pytest.raises(HostError, match="did not end within 0 s"):
            await host.run(("/bin/sleep", "60"), 0.2)
        assert [path.name for path in (bench.folder / "launches").iterdir()] == ["slots"]
        assert list((bench.folder / "launches" / "slots").iterdir()) == []

    asyncio.run(work())


# --- the choice


def chosen(folder: Path, wanted: str = "auto") -> rungs.Rung:
    return asyncio.run(ladder.choose(wanted, folder))


def test_units_are_chosen_where_systemd_runs_the_host_and_starts_one(
    systemd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "BOOTED", tmp_path / "no-systemd")
    rung = chosen(tmp_path / "launches")
    assert (rung.name, rung.why.split(";")[0]) == ("cgroup", "systemd: systemd does not run this host")
    monkeypatch.setattr(ladder, "BOOTED", tmp_path)
    assert chosen(tmp_path / "launches").name == "systemd"
    assert list((tmp_path / "launches" / "slots").iterdir()) == []  # the trial leaves nothing


def test_a_unit_that_does_not_do_is_passed_over_with_its_reason(
    systemd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "BOOTED", tmp_path)
    (systemd / "refused").touch()
    assert "Access denied" in chosen(tmp_path / "launches").why
    (systemd / "refused").unlink()
    elsewhere = chosen(tmp_path / "other" / "launches")
    assert (elsewhere.name, "of another folder" in elsewhere.why) == ("cgroup", True)
    (systemd / "autotuner-server@.service").unlink()
    assert "not found" in chosen(tmp_path / "launches").why
    with pytest.raises(HostError, match=r"in units of their own: systemctl start .* not found"):
        chosen(tmp_path / "launches", "systemd")


def test_a_daemon_in_its_own_unit_never_gives_its_servers_that_units_sandbox(
    systemd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ladder.AUTO_VARIABLE, "systemd")
    (systemd / "refused").touch()
    with pytest.raises(HostError, match="Access denied"):
        chosen(tmp_path / "launches")
    monkeypatch.setenv(ladder.AUTO_VARIABLE, "shim")
    assert chosen(tmp_path / "launches").name == "shim"


def test_without_control_groups_the_shim_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "BOOTED", tmp_path / "no-systemd")
    monkeypatch.setattr(rungs, "own_group", lambda: None)
    rung = chosen(tmp_path / "launches")
    assert (rung.name, "no control groups of version 2" in rung.why) == ("shim", True)
    with pytest.raises(HostError, match="control groups of their own"):
        chosen(tmp_path / "launches", "cgroup")
    assert "not ours to make" in rungs.cannot_group(tmp_path)


def test_groups_that_ended_unseen_are_swept_and_full_ones_are_not(bench: Any) -> None:
    need_groups()
    bench.host = LocalHost(bench.folder / "launches", "cgroup")

    async def work() -> None:
        spec = bench.spec("/bin/sleep", "60")
        await bench.host.start(spec)
        group = Path(claimed(bench, spec)["group"])
        old = group.with_name("autotuner-" + "0" * 16)
        (old / "made-by-the-server").mkdir(parents=True)
        assert (await ladder.choose("cgroup", bench.folder / "launches")).name == "cgroup"
        assert (old.exists(), group.exists()) == (False, True)
        await bench.host.stop(spec.launch_id, 0.3)
        assert not group.exists()

    asyncio.run(work())


def test_a_group_that_cannot_be_entered_starts_nothing_and_says_why(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung = rungs.ControlGroup(bench.folder)  # no control group at all
    bench.host._rung = rung
    (bench.folder / "autotuner-x").write_text("")
    monkeypatch.setattr(rung, "_group", lambda launch_id: bench.folder / "autotuner-x" / launch_id)

    async def work() -> None:
        marker = bench.folder / "ran"
        spec = bench.spec("/bin/sh", "-c", f"touch {marker}")
        await bench.host.start(spec)
        seen = await bench.ended(spec)
        assert "cannot be entered" in seen.error
        assert not marker.exists()

    asyncio.run(work())
