"""A host over SSH does what this machine does; a lost connection loses nothing and doubles nothing; one daemon at a time."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_openai import FakeOpenAI
from fakes.ssh_server import SshServer

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.machine import machine_figures
from autotuner.bench.samples import LevelSamples
from autotuner.edge import agent, host_ssh, procfs
from autotuner.edge.host import LaunchSpec, Readings
from autotuner.edge.host_ssh import SshHost
from autotuner.edge.load_far import FarLoad
from autotuner.edge.machine_far import FarWatch
from autotuner.errors import HostDiskFull, HostError, HostUnreachable

STAYS = "trap 'exit 3' TERM; while :; do sleep 0.05; done"


def spec(text: str, launch_id: str = "") -> LaunchSpec:
    return LaunchSpec(launch_id or uuid.uuid4().hex[:16], "t", ("/bin/sh", "-c", text), {})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    server = SshServer(tmp_path)
    yield server
    launches = server.remote / "launches"
    known = {path.name for path in launches.glob("*")} if launches.exists() else set()
    for pid in procfs.pids():
        if procfs.launch_id_of(pid) in known:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def host_of(server: SshServer, controller: str = "me", **changes: Any) -> Iterator[SshHost]:
    host = SshHost([("far", server.destination(**changes))], controller)
    try:
        yield host
    finally:
        host.close()


async def until(done: Any, why: str, timeout_s: float = 30.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if got := done():
            return got
        await asyncio.sleep(0.02)
    raise AssertionError(f"in vain: {why}")


def test_a_server_is_started_read_and_stopped_there(server: SshServer) -> None:
    async def work() -> None:
        async with server:
            with host_of(server) as host:
                one = spec(f"echo hello; {STAYS}")
                await host.start(one)
                assert (await host.inspect(one.launch_id)).alive
                while not (text := await host.read_log(one.launch_id, 0)):
                    await asyncio.sleep(0.02)
                assert text == b"hello\n"
                claimed = json.loads((server.remote / "launches" / one.launch_id / "claimed.json").read_text())
                assert claimed["rung"] == "shim"
                identity = json.loads((server.remote / "launches" / one.launch_id / "identity.json").read_text())
                words = Path(f"/proc/{identity['shim']['pid']}/cmdline").read_bytes().split(b"\0")
                [shim] = server.remote.glob("shim-*.py")  # the one that was copied, not that of this package
                assert os.fsencode(shim) in words
                assert await host.read_log(one.launch_id, 6) == b""
                assert (await host.activity(one.launch_id)).log_bytes == 6
                seen = await host.stop(one.launch_id, 5.0)
                assert (seen.alive, seen.exit_code) == (False, 3)
                assert not (await host.inspect("0123456789abcdef")).started
                assert (await host.run(("printf", "%s", "$(id) 'x' \n*"), 10.0)).output == "$(id) 'x' \n*"
                assert await host.free_disk_mib() > 0
                assert await host.gpus(()) == ()
                with pytest.raises(HostError, match="did not end"):
                    await host.run(("sleep", "30"), 0.2)
                with pytest.raises(HostError, match="cannot be run"):
                    await host.run(("/nowhere/at-all",), 5.0)

    asyncio.run(work())


def test_the_port_of_our_server_is_known_there_and_reached_from_here(server: SshServer) -> None:
    async def work() -> None:
        async with server:
            with host_of(server) as host:
                holder = await host.port_holder(server.port)
                assert holder is not None
                assert holder.pid == os.getpid()
                assert await host.launch_of(os.getpid()) is None
                address, port = await host.reach("127.0.0.1", server.port)
                reader, writer = await asyncio.open_connection(address, port)
                assert (await reader.readline()).startswith(b"SSH-2.0")
                writer.close()
                server.cut()
                await host.free_disk_mib()
                assert await host.reach("127.0.0.1", server.port) == (address, port)
                reader, writer = await asyncio.open_connection(address, port)
                assert (await reader.readline()).startswith(b"SSH-2.0")
                writer.close()

    asyncio.run(work())


def test_the_agent_is_copied_once_and_again_where_it_is_damaged(server: SshServer) -> None:
    async def work() -> None:
        async with server:
            marks = []
            for _ in range(2):
                with host_of(server) as host:
                    await host.free_disk_mib()
                [program] = server.remote.glob("agent-*.pyz")
                marks.append(program.stat().st_ino)
            before = marks[0]
            assert marks == [before, before]
            program.write_bytes(program.read_bytes()[:-1])
            with host_of(server) as host:
                await host.free_disk_mib()
            assert program.stat().st_ino != before
            assert {p.name for p in server.remote.glob("agent-*")} == {program.name}  # no piece of a copy is left

    asyncio.run(work())


def test_a_connection_lost_during_a_start_leaves_one_server(server: SshServer) -> None:
    """Cut at other moments of the start each time: before it is written down, at the shim, at the answer."""

    async def work() -> None:
        async with server:
            with host_of(server) as host:
                await host.free_disk_mib()
                for round_ in range(12):
                    one = spec(STAYS)
                    start = asyncio.create_task(host.start(one))
                    await asyncio.sleep(0.012 * round_)
                    server.cut()
                    await start
                    assert (await host.inspect(one.launch_id)).alive
                    assert len(procfs.of_launch(one.launch_id)) <= 4  # shim, sh, sleep, and a sleep about to be one
                    where = server.remote / "launches" / one.launch_id
                    assert not (where / "exit.json").exists()
                    assert (await host.stop(one.launch_id, 5.0)).exit_code == 3
                assert host.cuts >= 10

    asyncio.run(work())


def test_no_byte_of_a_log_is_lost_or_doubled_over_lost_connections(server: SshServer) -> None:
    async def work() -> None:
        async with server:
            with host_of(server) as host:
                one = spec("i=0; while [ $i -lt 4000 ]; do echo line $i; i=$((i+1)); done; sleep 60")
                await host.start(one)
                read, pieces = b"", 0
                while not read.endswith(b"line 3999\n"):
                    piece = await host.read_log(one.launch_id, len(read), 1999)
                    read, pieces = read + piece, pieces + bool(piece)
                    if pieces in {3, 9, 15}:
                        asyncio.get_running_loop().call_later(0.003 * pieces, server.cut)
                assert read == b"".join(b"line %d\n" % i for i in range(4000))
                assert host.cuts > 0
                await host.stop(one.launch_id, 0.1)

    asyncio.run(work())


def test_a_host_that_stays_away_is_said_to_and_comes_back(server: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with server:
            with host_of(server) as host:
                await host.free_disk_mib()
                monkeypatch.setattr(host_ssh, "PATIENCE_S", 0.5)
                await server.stop()
                with pytest.raises(HostUnreachable, match=r"host far cannot be reached.*hosts test far"):
                    await host.free_disk_mib()
                began = time.monotonic()
                with pytest.raises(HostUnreachable):
                    await host.free_disk_mib()
                assert time.monotonic() - began < 5  # known to be away: nobody waits for it again
                await server.start()
                deadline = time.monotonic() + 60
                while time.monotonic() < deadline:
                    with contextlib.suppress(HostUnreachable):
                        assert await host.free_disk_mib() > 0
                        break
                    await asyncio.sleep(0.05)
                else:
                    raise AssertionError("it did not come back")
                assert host.cuts == 1

    asyncio.run(work())


def test_one_daemon_at_a_time_works_a_folder(server: SshServer) -> None:
    async def work() -> None:
        async with server:
            with host_of(server, "first") as first:
                one = spec(STAYS)
                await first.start(one)
                with host_of(server, "second") as second, pytest.raises(HostError, match="another autotuner daemon"):
                    await second.free_disk_mib()
                with host_of(server, "") as looking:
                    assert await looking.free_disk_mib() > 0
                    with pytest.raises(HostError, match="only looks"):
                        await looking.stop(one.launch_id, 0.1)
                assert (await first.inspect(one.launch_id)).alive
            # Its connection is gone, but its server lives: the folder is still its own.
            with host_of(server, "second") as second, pytest.raises(HostError, match="another autotuner daemon"):
                await second.free_disk_mib()
            with host_of(server, "first") as first:
                assert not (await first.stop(one.launch_id, 5.0)).alive
            with host_of(server, "second") as second:
                await until(lambda: _agents(server) == 0, "the first one's agent to end")
                second._refused = None
                assert await second.free_disk_mib() > 0

    asyncio.run(work())


def test_an_agent_whose_connection_hangs_is_replaced(server: SshServer) -> None:
    async def work() -> None:
        async with server:
            with host_of(server) as stale, host_of(server) as fresh:
                await stale.free_disk_mib()
                assert _agents(server) == 1
                await fresh.free_disk_mib()
                await until(lambda: _agents(server) == 1, "one agent to be left")

    asyncio.run(work())


def _agents(server: SshServer) -> int:
    folder = str(server.remote).encode()
    found = 0
    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found += folder in words and b"-I" in words and procfs.start_ticks(pid) is not None
    return found


def test_a_login_shell_that_talks_does_not_disturb(server: SshServer, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "Welcome! {not json}"\nexec python3 "$@"\n')
    python.chmod(0o755)

    async def work() -> None:
        async with server:
            with host_of(server, python=str(python)) as host:
                assert await host.free_disk_mib() > 0

    asyncio.run(work())


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/nowhere/python3", r"there is no /nowhere/python3 on host far .*\[hosts.far\] python"),
        ("OLD", r"is Python 3\.6\.9; autotuner needs 3\.10"),
    ],
)
def test_a_host_without_the_right_python_says_what_to_do(
    server: SshServer, tmp_path: Path, python: str, said: str
) -> None:
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\necho \'{"autotuner": "old", "python": "3.6.9"}\'\n')
    old.chmod(0o755)

    async def work() -> None:
        async with server:
            with host_of(server, python=python.replace("OLD", str(old))) as host, pytest.raises(HostError, match=said):
                await host.free_disk_mib()

    asyncio.run(work())


def test_a_key_that_is_not_let_in_says_where_it_belongs(server: SshServer, tmp_path: Path) -> None:
    other = SshServer(tmp_path / "other").client_key

    async def work() -> None:
        async with server:
            with (
                host_of(server, identity_file=other) as host,
                pytest.raises(HostError, match=r"authorized_keys there"),
            ):
                await host.free_disk_mib()
            with (
                host_of(server, identity_file=tmp_path / "none") as host,
                pytest.raises(HostError, match="there is no key"),
            ):
                await host.free_disk_mib()

    asyncio.run(work())


def test_a_host_behind_another_is_reached_through_it(server: SshServer, tmp_path: Path) -> None:
    async def work() -> None:
        async with server, SshServer(tmp_path / "jump") as jump:
            way = [("gate", jump.destination()), ("far", server.destination())]
            host = SshHost(way, "me")
            try:
                assert await host.free_disk_mib() > 0
                jump.cut()
                assert await host.free_disk_mib() > 0
                assert host.cuts == 1
            finally:
                host.close()
            assert server.commands
            assert not jump.commands

    asyncio.run(work())


# --- what is looked at and tidied up there


def test_old_launches_long_logs_and_programs_of_before_are_tidied_up_there(server: SshServer) -> None:
    async def work() -> None:
        async with server:
            with host_of(server) as host:
                lives, dead = spec(STAYS), spec("echo over")
                await host.start(lives)
                await host.start(dead)
                while (await host.inspect(dead.launch_id)).alive:
                    await asyncio.sleep(0.02)
                launches = server.remote / "launches"
                assert set(await host.old_launches({"x"})) == {lives.launch_id, dead.launch_id}
                assert await host.old_launches({lives.launch_id}) == [dead.launch_id]
                assert await host.remove_launches([lives.launch_id, dead.launch_id]) == 1
                assert not (launches / dead.launch_id).exists()
                assert (await host.inspect(lives.launch_id)).alive
                log = launches / lives.launch_id / "server.log"
                log.write_bytes(b"x" * (2 << 20))
                cut = await host.cut_logs([lives.launch_id, "gone"], 1 << 20)
                assert list(cut) == [lives.launch_id]  # where the file system cannot do it, with why not
                assert (log.stat().st_blocks * 512 <= 1 << 20) == (cut[lives.launch_id] == "")
                old = [server.remote / name for name in ("agent-0.pyz", "agent-0.pyz.0123", "bench-0.pyz", "shim-0.py")]
                for path in (*old, server.remote / "agent-today.pyz", server.remote / "notes.txt"):
                    path.touch()
                for path in (
                    *old,
                    server.remote / "notes.txt",
                    *server.remote.glob("agent-*"),
                    *server.remote.glob("shim-*"),
                ):
                    if path.name != "agent-today.pyz":
                        os.utime(path, (1e9, 1e9))
                assert await host.forget_programs() == len(old)
                assert not any(path.exists() for path in old)
                assert (server.remote / "notes.txt").exists()
                assert len(list(server.remote.glob("agent-*.pyz"))) == 2  # the one in use, and that of today
                server.cut()
                assert (await host.inspect(lives.launch_id)).alive  # all that is in use is still there
                await host.stop(lives.launch_id, 5.0)

    asyncio.run(work())


def test_an_agent_that_only_looks_removes_nothing(server: SshServer) -> None:
    async def work() -> None:
        async with server:
            with host_of(server, "") as host:
                for ask in (host.remove_launches(["a"]), host.cut_logs(["a"], 1), host.forget_programs()):
                    with pytest.raises(HostError, match="only looks"):
                        await ask

    asyncio.run(work())


def test_what_a_host_does_beside_a_level_is_read_there_and_gpus_that_are_not_there_are_said_to_be_absent(
    server: SshServer,
) -> None:
    async def work() -> None:
        async with server:
            with host_of(server) as host:
                async with FarWatch(host, (0,)) as watch:
                    watch._every_s = 0.05
                    watch.begin()
                    await until(lambda: len(watch.samples) >= 3, "three samples")
                assert watch.samples[0].cpu_ratio is None
                assert 0.0 <= (watch.samples[2].cpu_ratio or 0.0) <= 1.0
                assert (watch.samples[2].memory_mib or 0.0) > 1.0
                if not Path("/dev/nvidiactl").exists():
                    assert "no NVIDIA driver" in watch.why_no_gpus
                    said = str(machine_figures(watch.samples, 1.0, watch.why_no_gpus))
                    assert said.startswith("no figures of GPUs (there is no NVIDIA driver")
                async with FarWatch(host, ()) as watch:
                    await until(lambda: watch.samples, "a sample")
                assert watch.why_no_gpus == ""

    asyncio.run(work())


def test_a_host_that_cannot_be_read_ends_the_reading_and_not_the_level() -> None:
    class Cannot:
        async def readings(self, gpus: tuple[int, ...]) -> Readings:
            raise HostError("the driver does not answer")

    async def work() -> None:
        async with FarWatch(Cannot(), (0,)) as watch:  # type: ignore[arg-type]
            await until(lambda: watch.why_no_gpus, "the reason")
        assert (watch.samples, watch.why_no_gpus) == ((), "the driver does not answer")
        assert str(machine_figures((), 1.0, watch.why_no_gpus)) == "no figures of GPUs (the driver does not answer)"

    asyncio.run(work())


def test_a_full_disk_there_is_the_hosts_and_named(server: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with server:
            with host_of(server) as host:
                link = await host._linked()
                monkeypatch.setattr(link, "_waiting", Answers({"error": "no room", "kind": "DiskFull"}))
                with pytest.raises(HostDiskFull, match=r"the disk of host far is full.*free space on it"):
                    await host.start(spec(STAYS))

    asyncio.run(work())


class Answers(dict[int, Any]):
    """Whoever waits for an answer has this one."""

    def __init__(self, reply: dict[str, Any]) -> None:
        self._reply = reply

    def __setitem__(self, number: int, waiting: asyncio.Future[dict[str, Any]]) -> None:
        waiting.set_result(self._reply)


# --- the load client there


BENCHMARK = Benchmark(levels=(2,), prompt_tokens=8, output_tokens=4, seconds=1.0, warmup_requests=0)


def test_a_load_is_driven_on_the_host_itself(server: SshServer) -> None:
    async def work() -> None:
        async with server, FakeOpenAI() as openai:
            with host_of(server, bench_python=sys.executable) as host:
                assert host.can_bench
                for _ in range(2):  # copied, then found
                    async with FarLoad(host, openai.url, openai.url, BENCHMARK, 2, "fake") as load:
                        last = [message async for message in load.messages()][-1]
                    assert isinstance(last, LevelSamples)
                    assert len(last.requests) > 2
                assert len(list(server.remote.glob("bench-*.pyz"))) == 1
                assert any("bench-" in command for command in server.commands)

    asyncio.run(work())


def test_a_load_that_is_stopped_brings_what_it_measured(server: SshServer) -> None:
    long = BENCHMARK.model_copy(update={"seconds": 60.0})

    async def work() -> None:
        async with server, FakeOpenAI() as openai:
            with host_of(server, bench_python=sys.executable) as host:
                async with FarLoad(host, openai.url, openai.url, long, 2, "fake") as load:
                    heard: list[object] = []
                    async for message in load.messages():
                        heard.append(message)
                        load.stop()
                assert isinstance(heard[-1], LevelSamples)

    asyncio.run(work())


async def _cut_at_the_first_word(server: SshServer, load: FarLoad) -> None:
    async for _ in load.messages():
        server.cut()


def test_a_load_whose_connection_is_lost_ends_as_a_lost_connection(server: SshServer) -> None:
    long = BENCHMARK.model_copy(update={"seconds": 60.0})

    async def work() -> None:
        async with server, FakeOpenAI() as openai:
            with host_of(server, bench_python=sys.executable) as host:
                cuts = host.cuts
                async with FarLoad(host, openai.url, openai.url, long, 2, "fake") as load:
                    with pytest.raises(HostError):
                        await _cut_at_the_first_word(server, load)
                assert host.cuts == cuts + 1
                await until(lambda: openai.seen.processing == 0, "the load to end with its connection")

    asyncio.run(work())


def test_a_python_that_cannot_run_the_load_client_is_named(server: SshServer, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text('#!/bin/sh\necho "it has no pydantic"\n')
    bare.chmod(0o755)

    async def work() -> None:
        async with server:
            with host_of(server, bench_python=str(bare)) as host, pytest.raises(HostError, match="it has no pydantic"):
                await host.start_bench()

    asyncio.run(work())


# --- the agent itself


def test_a_launch_that_was_claimed_is_not_started_again(tmp_path: Path) -> None:
    async def work() -> None:
        host = agent.AgentHost(tmp_path, "shim")
        one = spec(STAYS)
        await host.start(one)
        first = json.loads((tmp_path / one.launch_id / "identity.json").read_text())
        await host.start(one)
        assert json.loads((tmp_path / one.launch_id / "identity.json").read_text()) == first
        assert not (tmp_path / one.launch_id / "launch.json").exists()
        await host.stop(one.launch_id, 5.0)
        await host.start(one)  # asked for a third time, after its end: it has ended, and that is the answer
        assert not (await host.inspect(one.launch_id)).alive

    asyncio.run(work())


def test_a_launch_that_was_given_up_is_not_started(tmp_path: Path) -> None:
    async def work() -> None:
        host = agent.AgentHost(tmp_path, "shim")
        one = spec(STAYS)
        host._write_down(one, await host.rung())
        assert not (await host.inspect(one.launch_id)).started
        with pytest.raises(HostError, match="given up"):
            await host.start(one)
        assert not procfs.of_launch(one.launch_id)

    asyncio.run(work())
