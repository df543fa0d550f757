"""Stopped means stopped, a launch starts once or never, its end is on record, and no stranger is ever signalled."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from patience import FOR_EVER_S, PATIENCE_S, comes_true, soon

from autotuner.edge import clock, commands, files, ladder, procfs, rungs
from autotuner.edge.host import ServerSeen
from autotuner.edge.host_local import LocalHost
from autotuner.edge.rungs import ShimAlone
from autotuner.errors import DiskFull, HostError


def sh(text: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", text)


def identity(bench: Any, spec: Any) -> dict[str, Any]:
    return json.loads(bench.path(spec, "identity.json").read_text())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# --- stopped means stopped


async def start_and_stop(bench: Any, mode: str, count: int, wait_s: float = 0.0) -> ServerSeen:
    spec, fifo = bench.hostile(mode, count)
    await bench.host.start(spec)
    await bench.ready(spec)
    await asyncio.sleep(wait_s)
    seen = await bench.host.stop(spec.launch_id, 0.3)
    assert not seen.alive, seen
    assert not bench.held(fifo), f"something of {mode} {count} outlived its stop"
    assert procfs.of_launch(spec.launch_id) == []
    return seen


async def in_groups(works: list[Any], size: int) -> list[Any]:
    found = []
    for i in range(0, len(works), size):
        found += await asyncio.gather(*works[i : i + size])
    return found


def test_nothing_of_20_hostile_trees_outlives_a_stop(bench: Any) -> None:
    seed = random.Random(1)
    works = [start_and_stop(bench, "tree", seed.randrange(8, 17), seed.uniform(0, 0.15)) for _ in range(16)]
    works += [start_and_stop(bench, "tree-that-listens", seed.randrange(8, 17)) for _ in range(4)]
    seen = asyncio.run(in_groups(works, 10))
    assert [s.exit_code for s in seen] == [-signal.SIGKILL] * 16 + [-signal.SIGTERM] * 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_of_300_hostile_trees_outlives_a_stop(bench: Any) -> None:
    seed = random.Random(2)
    works = [start_and_stop(bench, "tree", seed.randrange(10, 50), seed.uniform(0, 0.4)) for _ in range(280)]
    works += [start_and_stop(bench, "hopper", 1, seed.uniform(0, 0.1)) for _ in range(20)]
    assert len(asyncio.run(in_groups(works, 5))) == 300


def test_a_process_that_forks_and_ends_all_the_time_is_caught(bench: Any) -> None:
    asyncio.run(in_groups([start_and_stop(bench, "hopper", 1, 0.05) for _ in range(3)], 3))


def test_a_process_whose_first_thread_has_ended_lives_and_is_stopped(bench: Any) -> None:
    async def work() -> None:
        spec, fifo = bench.hostile("first-thread-ends")
        await bench.host.start(spec)
        await bench.ready(spec)
        server = identity(bench, spec)["server"]
        while procfs.stat_fields(server["pid"])[0] != "Z":  # type: ignore[index]
            await asyncio.sleep(0.01)
        assert procfs.lives(**server)
        assert server["pid"] in procfs.of_launch(spec.launch_id)
        assert server["pid"] in procfs.descendants(identity(bench, spec)["shim"]["pid"])
        os.kill(identity(bench, spec)["shim"]["pid"], signal.SIGSTOP)  # the shim cannot help here
        (bench.path(spec, "identity.json")).unlink()
        seen = await bench.host.stop(spec.launch_id, 0.0)
        assert not seen.alive
        assert not bench.held(fifo)

    asyncio.run(work())


def test_workers_of_a_server_that_ended_by_itself_follow_it(bench: Any) -> None:
    async def work() -> None:
        spec, fifo = bench.hostile("leaves-workers", 5)
        await bench.host.start(spec)
        await bench.ready(spec)
        assert (await bench.host.inspect(spec.launch_id)).alive  # not over while its workers live
        seen = await bench.ended(spec)
        assert (seen.exit_code, bench.held(fifo)) == (5, False)

    asyncio.run(work())


def test_a_killed_shim_takes_its_server_along_and_stop_finds_the_detached_workers(bench: Any) -> None:
    async def work() -> None:
        spec, fifo = bench.hostile("detached-workers", 6)
        await bench.host.start(spec)
        await bench.ready(spec)
        who = identity(bench, spec)
        os.kill(who["shim"]["pid"], signal.SIGKILL)
        await soon(lambda: not procfs.lives(**who["server"]))
        assert not procfs.lives(**who["server"])
        assert len(procfs.of_launch(spec.launch_id)) == 6
        seen = await bench.host.inspect(spec.launch_id)
        assert seen.alive
        assert "shim" in seen.error
        seen = await bench.host.stop(spec.launch_id, 5.0)
        assert (seen.alive, seen.exit_code, seen.error) == (False, None, "its end was not recorded")
        assert not bench.held(fifo)

    asyncio.run(work())


def test_strays_are_killed_after_the_grace_however_long_it_is(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was recorded of who they are, they are deaf, and the grace is longer than any fixed number of looks."""
    ahead = 0.0
    real_now, real_sleep = clock.monotonic_s, asyncio.sleep

    async def sleep(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds * 20  # waiting passes fast here
        await real_sleep(seconds / 10)

    async def work() -> None:
        spec, fifo = bench.hostile("detached-workers", 3)
        await bench.host.start(spec)
        await bench.ready(spec)
        who = identity(bench, spec)
        os.kill(who["shim"]["pid"], signal.SIGKILL)
        bench.path(spec, "identity.json").unlink()
        monkeypatch.setattr(clock, "monotonic_s", lambda: real_now() + ahead)
        monkeypatch.setattr(clock, "sleep", sleep)
        began = clock.monotonic_s()
        assert not (await bench.host.stop(spec.launch_id, 120.0)).alive
        assert clock.monotonic_s() - began >= 120.0
        assert not bench.held(fifo)

    asyncio.run(work())


def test_what_sigkill_does_not_end_keeps_its_launch_alive(bench: Any) -> None:
    async def work() -> None:
        spec = bench.spec("/bin/true")
        await bench.host.start(spec)
        await bench.ended(spec)
        hanging = subprocess.Popen(["/bin/sleep", "600"])
        try:
            left = {"pid": hanging.pid, "start_ticks": procfs.start_ticks(hanging.pid)}
            end = bench.path(spec, "exit.json")
            end.write_text(json.dumps({"code": None, "left": [left], "error": ""}))
            seen = await bench.host.inspect(spec.launch_id)
            assert seen.alive
            assert str(hanging.pid) in seen.error
            end.write_text(json.dumps({"code": -9, "left": [{**left, "start_ticks": 1}], "error": ""}))
            assert not (await bench.host.inspect(spec.launch_id)).alive
        finally:
            hanging.kill()
            hanging.wait()

    asyncio.run(work())


def test_stopping_what_is_dead_or_never_was_is_fine(bench: Any) -> None:
    async def work() -> None:
        spec = bench.spec(*sh("exit 7"))
        await bench.host.start(spec)
        await bench.ended(spec)
        for _ in range(2):
            seen = await bench.host.stop(spec.launch_id, 0.2)
            assert (seen.alive, seen.exit_code) == (False, 7)
        assert (await bench.host.stop("0123456789abcdef", 0.2)).error == "it was never started"

    asyncio.run(work())


def test_a_stop_that_comes_before_the_server_is_not_lost(bench: Any) -> None:
    async def work() -> None:
        spec = bench.spec("/bin/sleep", "600")
        task = asyncio.create_task(bench.host.start(spec))
        while not bench.path(spec, "claimed.json").exists():
            await asyncio.sleep(0)
        seen = await bench.host.stop(spec.launch_id, 0.3)
        await task
        assert not seen.alive
        assert procfs.of_launch(spec.launch_id) == []

    for _ in range(5):
        asyncio.run(work())


# --- its end is on record


@pytest.mark.parametrize(
    ("argv", "code"),
    [(sh("exit 3"), 3), (sh("kill -SEGV $$"), -11), (sh("kill -KILL $$"), -9), (("/bin/true",), 0)],
)
def test_the_exit_code_or_signal_is_recorded(bench: Any, argv: tuple[str, ...], code: int) -> None:
    async def work() -> None:
        spec = bench.spec(*argv)
        await bench.host.start(spec)
        seen = await bench.ended(spec)
        assert (seen.exit_code, seen.error) == (code, "")

    asyncio.run(work())


@pytest.mark.parametrize(
    ("argv", "secret_files", "code", "said"),
    [
        (("no-such-program", "x"), {}, 127, "no-such-program: No such file or directory"),
        (("/no/such/program",), {}, 127, "/no/such/program: No such file or directory"),
        (("{tmp}",), {}, 126, "Permission denied"),
        (("{tmp}/orphan",), {}, 127, "{tmp}/orphan: the interpreter that its first line names does not exist"),
        (("/bin/tr\0ue",), {}, 126, "null byte"),
        (("/bin/true",), {"API_KEY": "{tmp}/missing"}, 126, "secret file {tmp}/missing for API_KEY: No such file"),
        (("/bin/true",), {"API_KEY": "{tmp}/binary"}, 126, "secret file {tmp}/binary for API_KEY: it is no UTF-8 text"),
    ],
)
def test_a_server_that_cannot_be_started_says_why_at_once(
    bench: Any, argv: tuple[str, ...], secret_files: dict[str, str], code: int, said: str
) -> None:
    tmp = str(bench.folder)
    script = bench.folder / "orphan"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)
    (bench.folder / "binary").write_bytes(b"\xff\xfe\x00secret")

    async def work() -> None:
        named = {name: path.replace("{tmp}", tmp) for name, path in secret_files.items()}
        spec = bench.spec(*(word.replace("{tmp}", tmp) for word in argv), secret_files=named)
        await bench.host.start(spec)
        seen = await bench.ended(spec)
        assert (seen.alive, seen.exit_code) == (False, code)
        assert said.replace("{tmp}", tmp) in seen.error
        assert said.replace("{tmp}", tmp) in (await bench.host.read_log(spec.launch_id, 0)).decode()

    asyncio.run(work())


def test_no_look_falls_between_the_end_of_a_server_and_its_record(bench: Any) -> None:
    async def work() -> None:
        spec = bench.spec(*sh("exit 7"))
        await bench.host.start(spec)
        while (seen := await bench.host.inspect(spec.launch_id)).alive:
            await asyncio.sleep(0)
        assert (seen.exit_code, seen.error) == (7, "")

    for _ in range(3):
        asyncio.run(in_groups([work() for _ in range(8)], 8))


def test_a_slot_is_free_as_soon_as_the_end_is_on_record(bench: Any) -> None:
    async def work() -> None:
        for _ in range(15):
            spec = bench.spec(*sh("exit 7"), slot="one")
            await bench.host.start(spec)
            while not bench.path(spec, "exit.json").exists():
                await asyncio.sleep(0)
            end = json.loads(bench.path(spec, "exit.json").read_text())
            assert end["code"] == 7, end

    asyncio.run(work())


def test_a_full_disk_costs_the_record_of_an_end_and_nothing_else(bench: Any, small_disk: Any, fill: Any) -> None:
    place = small_disk(256)
    bench.host = LocalHost(place / "launches")
    bench.folder = place

    async def work() -> None:
        spec = bench.spec("/bin/sleep", "600", slot="one")
        await bench.host.start(spec)
        filler = fill(place)
        seen = await bench.host.stop(spec.launch_id, 0.3)
        assert (seen.alive, seen.error) == (False, "its end was not recorded")
        assert not bench.path(spec, ".exit.json").exists()
        filler.unlink()
        again = bench.spec(*sh("exit 4"), slot="one")
        await bench.host.start(again)
        assert (await bench.ended(again)).exit_code == 4

    asyncio.run(work())


def test_a_launch_for_which_there_is_no_room_is_a_full_disk_and_never_starts(
    bench: Any, small_disk: Any, fill: Any
) -> None:
    place = small_disk(64)
    host = LocalHost(place / "launches")

    async def work() -> None:
        (place / "launches" / "slots").mkdir(parents=True)
        spec = bench.spec("/bin/sleep", "600", env={"LONG": "x" * 5000})
        (place / "launches" / spec.launch_id).mkdir()
        filler = fill(place)
        with pytest.raises(DiskFull, match="cannot be written down"):
            await host.start(spec)
        assert list((place / "launches" / spec.launch_id).iterdir()) == []
        assert (await host.inspect(spec.launch_id)).error == "it was never started"
        filler.unlink()
        assert (await host.inspect(spec.launch_id)).error == "it was never started"

    asyncio.run(work())


@pytest.mark.parametrize("program", ["/bin/false", "/no/such/python"])
def test_a_shim_that_cannot_run_is_an_error_at_once(bench: Any, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(rungs.sys, "executable", program)

    async def work() -> None:
        spec = bench.spec("/bin/sleep", "600")
        with pytest.raises(HostError, match="the shim"):
            await asyncio.wait_for(bench.host.start(spec), PATIENCE_S)
        assert (await bench.host.inspect(spec.launch_id)).error == "it was never started"

    asyncio.run(work())


def test_a_shim_that_cannot_fork_says_so(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = tmp_path / "shim.py"
    text = rungs.SHIM.read_text()
    shim.write_text(
        text.replace(
            "import time\n", "import time\n\ndef fork():\n    raise OSError(11, 'Try again')\n\nos.fork = fork\n", 1
        )
    )
    monkeypatch.setattr(rungs, "SHIM", shim)

    async def work() -> None:
        spec = bench.spec("/bin/sleep", "600")
        with pytest.raises(HostError, match=r"ended with exit code 1: .*Try again"):
            await bench.host.start(spec)
        assert (await bench.host.inspect(spec.launch_id)).error == "it was never started"

    asyncio.run(work())


# --- once or never


def test_of_a_claim_and_a_revocation_exactly_one_wins(tmp_path: Path) -> None:
    """The two renames alone, 2,000 times as near to each other as threads can be."""
    host = LocalHost(tmp_path)
    gate = threading.Barrier(2)
    rounds = [tmp_path / str(i) for i in range(2000)]
    claimed: list[bool] = []

    def claim() -> None:
        for where in rounds:
            gate.wait()
            try:
                os.rename(where / "launch.json", where / "claimed.json")
                claimed.append(True)
            except FileNotFoundError:
                claimed.append(False)

    for where in rounds:
        where.mkdir()
        (where / "launch.json").write_text("{}")
    thread = threading.Thread(target=claim)
    thread.start()
    revoked = []
    for where in rounds:
        gate.wait()
        revoked.append(host._revoke(where))
    thread.join()
    assert all(a != b for a, b in zip(claimed, revoked, strict=True))
    assert all(host._revoke(where) == was for where, was in zip(rounds, revoked, strict=True))  # and so it stays


def test_a_launch_said_to_be_never_started_never_starts(bench: Any) -> None:
    """Real shims against looks at the launch at any time: whoever is told "never" finds no trace of a server, ever."""
    seed = random.Random(3)

    async def work(slower: int) -> bool:
        marker = bench.folder / f"ran-{seed.random()}"
        spec = bench.spec("/bin/sh", "-c", f"touch {marker}; exec sleep 600")
        rung = await bench.host.rung()
        where = ladder.write_down(bench.folder / "launches", spec, rung)
        shim = asyncio.create_task(rung.start(where, spec.launch_id))
        await asyncio.sleep(slower * seed.choice([0, seed.uniform(0, 0.1), seed.uniform(0.1, 0.5)]))
        seen = await bench.host.inspect(spec.launch_id)
        await shim
        if seen.error == "it was never started":
            await asyncio.sleep(0.3)
            assert not marker.exists()
            assert procfs.of_launch(spec.launch_id) == []
            assert not bench.path(spec, "claimed.json").exists()
            return False
        assert seen.alive, seen
        assert not (await bench.host.stop(spec.launch_id, 0.3)).alive
        return True

    ran: set[bool] = set()
    for slower in (1, 4, 16, 64):
        ran |= set(asyncio.run(in_groups([work(slower) for _ in range(24)], 8)))
        if len(ran) == 2:
            break
    assert ran == {True, False}  # both happened, so the race was one


def test_a_second_shim_finds_the_slot_taken(bench: Any) -> None:
    async def work() -> None:
        first, second = bench.spec("/bin/sleep", "600", slot="one"), bench.spec("/bin/sleep", "600", slot="one")
        await bench.host.start(first)
        await bench.host.start(second)
        seen = await bench.ended(second)
        assert (seen.exit_code, seen.error) == (None, "another server holds the slot")
        assert (await bench.host.inspect(first.launch_id)).alive
        await bench.host.stop(first.launch_id, 0.3)

    asyncio.run(work())


def test_eight_starts_at_once_for_one_slot_make_one_server(bench: Any) -> None:
    async def work() -> None:
        specs = [bench.spec("/bin/sleep", "600", slot="one") for _ in range(8)]
        await asyncio.gather(*(bench.host.start(s) for s in specs))
        seen = [await bench.host.inspect(s.launch_id) for s in specs]
        await asyncio.gather(*(bench.host.stop(s.launch_id, 0.3) for s in specs))
        assert sum(s.alive for s in seen) == 1

    asyncio.run(work())


def test_a_server_outlives_its_starter(bench: Any, tmp_path: Path) -> None:
    """The starter is killed in the middle of its life; another finds the server and stops it."""
    program = (
        "import asyncio, sys; from pathlib import Path; from autotuner.edge.host import LaunchSpec\n"
        "from autotuner.edge.host_local import LocalHost\n"
        "async def main():\n"
        "    await LocalHost(Path(sys.argv[1])).start(LaunchSpec(sys.argv[2], 's', ('/bin/sleep', '600'), {}))\n"
        "    print('started', flush=True); await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    spec = bench.spec()
    starter = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "launches"), spec.launch_id], stdout=subprocess.PIPE
    )
    with starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"started\n"
        starter.kill()
        starter.wait()
    seen = asyncio.run(bench.host.inspect(spec.launch_id))
    assert seen.alive
    server = identity(bench, spec)["server"]
    seen = asyncio.run(bench.host.stop(spec.launch_id, 0.3))
    assert (seen.alive, seen.exit_code, procfs.lives(**server)) == (False, -signal.SIGTERM, False)


def test_a_launch_of_another_boot_is_not_alive(bench: Any) -> None:
    async def work() -> None:
        spec = bench.spec("/bin/sleep", "600")
        await bench.host.start(spec)
        true = bench.path(spec, "identity.json").read_text()
        forged = {**json.loads(true), "boot_id": "00000000-0000-0000-0000-000000000000"}
        bench.path(spec, "identity.json").write_text(json.dumps(forged))
        seen = await bench.host.inspect(spec.launch_id)
        assert (seen.alive, seen.error) == (False, "the host was booted since")
        bench.path(spec, "identity.json").write_text(true)
        await bench.host.stop(spec.launch_id, 0.3)

    asyncio.run(work())


# --- what a server is given


def test_a_server_gets_its_own_environment_and_nothing_of_the_daemons_manager(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "LISTEN_FDS",
        "LLAMA_ARG_PORT",
        "LLAMA_ARG_MODEL",
        "AUTOTUNER_SETTINGS",
    ):
        monkeypatch.setenv(name, "leak")
    monkeypatch.setenv("HF_TOKEN", "daemons-own-secret")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/kept")
    inheritable = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(inheritable, True)

    async def work() -> None:
        spec = bench.spec(*sh("exec 3</dev/null; ls /proc/self/fd | tr '\\n' ' '; exec env"), env={"MINE": "1"})
        await bench.host.start(spec)
        await bench.ended(spec)
        log = (await bench.host.read_log(spec.launch_id, 0)).decode()
        lines = log.splitlines()
        assert "leak" not in log
        assert {"MINE=1", "LD_LIBRARY_PATH=/kept", f"AUTOTUNER_LAUNCH_ID={spec.launch_id}"} <= set(lines)
        assert "HF_TOKEN=daemons-own-secret" in lines
        assert log.startswith("0 1 2 3 4 ")  # 3 is the shell's, 4 the listing itself: none is inherited
        assert not log.startswith("0 1 2 3 4 5")
        for file in bench.path(spec).iterdir():
            if file.name != "server.log":
                assert b"daemons-own-secret" not in file.read_bytes()

    try:
        asyncio.run(work())
    finally:
        os.close(inheritable)


def test_a_server_ignores_and_blocks_no_signal(bench: Any) -> None:
    async def work() -> None:
        spec = bench.spec("/bin/cat", "/proc/self/status")
        await bench.host.start(spec)
        await bench.ended(spec)
        log = (await bench.host.read_log(spec.launch_id, 0)).decode()
        masks = {line.split()[0]: line.split()[1] for line in log.splitlines() if line.startswith("Sig")}
        # Signals 32 and 33 belong to the C library: what it inherited of them no program can change.
        ours = [int(masks[name], 16) & ~(0b11 << 31) for name in ("SigBlk:", "SigIgn:", "SigCgt:")]
        assert ours == [0, 0, 0]

    asyncio.run(work())


def test_the_end_is_recorded_also_for_a_starter_that_ignores_its_children(bench: Any) -> None:
    spec = bench.spec(*sh("exit 9"))
    where = ladder.write_down(bench.folder / "launches", spec, ShimAlone())
    subprocess.run(
        [sys.executable, "-I", str(rungs.SHIM), str(where)],
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        env={procfs.LAUNCH_VARIABLE: spec.launch_id},
        check=True,
    )
    assert comes_true(bench.path(spec, "exit.json").exists)
    seen = asyncio.run(bench.host.inspect(spec.launch_id))
    assert (seen.exit_code, seen.error) == (9, "")


def test_secrets_reach_the_server_and_no_file_and_no_command_line(bench: Any) -> None:
    canary = "canary-5e7a9c-secret"
    secret = bench.folder / "key"
    secret.write_text(canary + "\n")

    async def work() -> None:
        spec = bench.spec(
            *sh('test "$API_KEY" = "$(cat ' + str(secret) + ')" && echo same; exec sleep 600'),
            secret_files={"API_KEY": str(secret)},
        )
        await bench.host.start(spec)
        await bench.ready(spec, "same")
        for pid in procfs.pids():
            try:
                assert canary.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
        await bench.host.stop(spec.launch_id, 0.3)
        for file in (bench.folder / "launches").rglob("*"):
            assert not file.is_file() or canary.encode() not in file.read_bytes(), file
        assert bench.path(spec, "claimed.json").stat().st_mode & 0o777 == 0o600

    asyncio.run(work())


def test_starts_leak_no_descriptor_and_no_zombie(bench: Any) -> None:
    async def one() -> None:
        spec = bench.spec("/bin/true")
        await bench.host.start(spec)
        await bench.ended(spec)
        await bench.host.stop(spec.launch_id, 0.1)

    async def work(count: int) -> None:
        await in_groups([one() for _ in range(count)], 10)

    asyncio.run(work(2))
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(work(30))
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.slow
def test_a_thousand_starts_leak_no_descriptor(bench: Any) -> None:
    async def one() -> None:
        spec = bench.spec("/bin/true")
        await bench.host.start(spec)
        await bench.ended(spec)

    async def work() -> None:
        before = len(os.listdir("/proc/self/fd"))
        await in_groups([one() for _ in range(1000)], 10)
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(work())


# --- signs of life, ports, commands


def test_what_detached_itself_counts_as_a_sign_of_life_and_the_shim_does_not(bench: Any) -> None:
    async def work() -> None:
        spec, _ = bench.hostile("busy")
        await bench.host.start(spec)
        await bench.ready(spec)
        first = await bench.host.activity(spec.launch_id)
        await asyncio.sleep(0.3)
        second = await bench.host.activity(spec.launch_id)
        await bench.host.stop(spec.launch_id, 0.3)
        assert second.read_bytes > first.read_bytes
        assert second.rss_bytes > 0
        assert second.log_bytes == 6
        after = await bench.host.activity(spec.launch_id)
        assert (after.cpu_s, after.rss_bytes, after.log_bytes) == (0.0, 0, 6)
        idle = bench.spec("/bin/sleep", "600")
        await bench.host.start(idle)
        shim = identity(bench, idle)["shim"]["pid"]
        assert (await bench.host.activity(idle.launch_id)).rss_bytes < procfs.usage(shim)[2]
        await bench.host.stop(idle.launch_id, 0.3)

    asyncio.run(work())


def test_a_port_is_ours_although_a_detached_worker_without_environment_holds_it(bench: Any) -> None:
    async def work() -> None:
        port = free_port()
        assert await bench.host.port_holder(port) is None
        spec, _ = bench.hostile("listener", port)
        await bench.host.start(spec)
        await bench.ready(spec)
        holder = await bench.host.port_holder(port)
        assert holder is not None
        assert (holder.launch_id, holder.name) == (spec.launch_id, "sleep")
        assert procfs.launch_id_of(holder.pid) is None
        with socket.socket() as stranger:  # one that shares the port takes part of the requests
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            stranger.bind(("127.0.0.1", port))
            stranger.listen()
            both = await bench.host.port_holder(port)
            assert both is not None
            assert (both.pid, both.launch_id) == (os.getpid(), None)
        await bench.host.stop(spec.launch_id, 0.3)
        assert await bench.host.port_holder(port) is None

    asyncio.run(work())


def test_a_stranger_on_the_port_is_named(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        holder = asyncio.run(bench.host.port_holder(port))
        assert holder is not None
        assert (holder.pid, holder.launch_id) == (os.getpid(), None)
        assert holder.name == procfs.name_of(os.getpid())
        monkeypatch.setattr(procfs, "socket_holders", lambda inodes: [])  # as for a user who may not look
        hidden = asyncio.run(bench.host.port_holder(port))
        assert hidden is not None
        assert (hidden.pid, hidden.launch_id) == (None, None)


def test_a_command_gives_its_code_and_both_its_streams(bench: Any) -> None:
    ran = asyncio.run(bench.host.run(sh("echo out; echo err >&2; exit 3"), PATIENCE_S))
    assert (ran.code, ran.output) == (3, "out\nerr\n")
    with pytest.raises(HostError, match="no-such-program cannot be run: No such file"):
        asyncio.run(bench.host.run(("no-such-program",), 10))


def test_a_command_that_does_not_end_is_killed_with_what_it_started(bench: Any) -> None:
    spec, fifo = bench.hostile("tree", 4)
    del spec
    begun = time.monotonic()
    with pytest.raises(HostError, match="did not end within 3 s"):
        asyncio.run(bench.host.run(sh(f"exec 9>{fifo}; sleep 600 & sleep 600"), 3.0))
    assert time.monotonic() - begun < PATIENCE_S
    assert not bench.held(fifo, PATIENCE_S)


def test_a_command_is_over_when_it_ends_whoever_still_holds_its_output(bench: Any) -> None:
    begun = time.monotonic()
    pidfile = bench.folder / "pid"
    try:
        ran = asyncio.run(
            bench.host.run(sh(f"setsid sh -c 'echo $$ >{pidfile}; exec sleep 600' & echo said; sleep 0.2"), FOR_EVER_S)
        )
        assert (ran.code, ran.output) == (0, "said\n")
        assert time.monotonic() - begun < PATIENCE_S
    finally:
        os.kill(int(pidfile.read_text()), signal.SIGKILL)


def test_a_command_that_nobody_waits_for_any_more_is_killed(bench: Any) -> None:
    spec, fifo = bench.hostile("tree", 4)
    del spec

    async def work() -> None:
        begun = bench.folder / "begun"
        task = asyncio.create_task(bench.host.run(sh(f"exec 9>{fifo}; touch {begun}; exec sleep 600"), FOR_EVER_S))
        await soon(begun.exists)
        assert bench.held(fifo)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not bench.held(fifo, PATIENCE_S)

    asyncio.run(work())


def test_a_command_that_sigkill_does_not_end_is_left_behind_and_not_begun_again(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does nvidia-smi where the driver hangs: whoever asks must not hang with it, and must not leave one more each time."""
    pidfile, program = bench.folder / "pid", bench.folder / "hangs"
    program.write_text(f"#!/bin/sh\necho $$ >>{pidfile}; exec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(commands, "KILLED_WAIT_S", 0.2)
    kill = os.killpg
    monkeypatch.setattr(os, "killpg", lambda *_: None)

    async def work() -> None:
        try:
            with pytest.raises(HostError, match="did not end within 3 s"):
                await bench.host.run((str(program),), 3.0)
            with pytest.raises(HostError, match="hangs in the kernel since it was last asked"):
                await bench.host.run((str(program),), 3.0)
            assert len(pidfile.read_text().split()) == 1
        finally:
            pid = int(pidfile.read_text().split()[0])
            kill(pid, signal.SIGKILL)
            await soon(lambda: not Path(f"/proc/{pid}").exists())  # the loop has collected it
            await asyncio.sleep(0.1)

    asyncio.run(work())


def test_gpus_of_a_host_without_a_driver_are_none(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(bench.folder))
    assert asyncio.run(bench.host.gpus((0,))) == ()
    smi = bench.folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\ncase $1 in *index*) echo '0, GPU-a, 100, 1000';; *) echo 'GPU-a, 7, x, 50';; esac\n")
    smi.chmod(0o755)
    (use,) = asyncio.run(bench.host.gpus((0,)))
    assert (use.used_mib, use.processes) == (100.0, ((7, "x", 50.0),))
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    with pytest.raises(HostError, match="nvidia-smi failed with exit code 9: NVIDIA-SMI has failed"):
        asyncio.run(bench.host.gpus((0,)))
    smi.write_text("#!/bin/sh\ncase $1 in *index*) echo '0, GPU-a, 100, 1000';; *) echo 'no'; exit 4;; esac\n")
    with pytest.raises(HostError, match="exit code 4: no"):
        asyncio.run(bench.host.gpus((0,)))


def test_the_shims_log_is_read_in_pieces(bench: Any) -> None:
    async def work() -> None:
        spec = bench.spec(*sh("echo one; echo two >&2"))
        await bench.host.start(spec)
        await bench.ended(spec)
        assert await bench.host.read_log(spec.launch_id, 0) == b"one\ntwo\n"
        assert await bench.host.read_log(spec.launch_id, 4, 2) == b"tw"
        assert await bench.host.read_log("0" * 16, 0) == b""
        assert await bench.host.free_disk_mib() > 0

    asyncio.run(work())


def test_no_temporary_file_is_left_beside_a_launch(bench: Any) -> None:
    async def work() -> None:
        spec = bench.spec("/bin/true")
        await bench.host.start(spec)
        await bench.ended(spec)
        names = {p.name for p in bench.path(spec).iterdir()}
        assert names == {"claimed.json", "identity.json", "exit.json", "server.log"}
        assert files.lock_holder(bench.folder / "launches" / "slots" / f"{spec.slot}.lock") is None

    asyncio.run(work())
