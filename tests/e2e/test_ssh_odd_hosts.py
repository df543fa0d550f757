"""Hosts as they are found: shells that talk or are not POSIX, SSH servers that allow little, full disks, folders of others.

Each either works, or says in one sentence what is wrong and what to do.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.person import PYTHON, FullDisk, Person
from fakes.sshd import Sshd, make_key
from patience import comes_true

from autotuner.edge import procfs
from autotuner.edge.destination import Destination
from autotuner.edge.host import LaunchSpec
from autotuner.edge.host_ssh import SshHost
from autotuner.errors import HostDiskFull, HostError, HostUnreachable

pytestmark = pytest.mark.ssh

NOISE = {
    ".bashrc": "echo hi from bashrc\necho oops >&2\n",
    ".cshrc": "echo hi from cshrc\n",
    ".config/fish/config.fish": "echo hi from fish\n",
}


@contextlib.asynccontextmanager
async def host_of(sshd: Sshd, folder: Path | str, **changes: Any) -> AsyncIterator[SshHost]:
    known = {"address": sshd.address, "port": sshd.port, "user": sshd.user, "host_key": sshd.host_key}
    own = {"identity_file": sshd.client_key, "folder": str(folder), **changes}
    host = SshHost([("far", Destination.model_validate({**known, **own}))], "me")
    try:
        yield host
    finally:
        host.close()


def served(person: Person, *options: str) -> Sshd:
    sshd = Sshd(person.ground / "sshd", *options)
    sshd.user = person.name
    return sshd.start()


async def one_life(host: SshHost) -> None:
    """Start, read and stop a server there."""
    one = LaunchSpec(uuid.uuid4().hex[:16], "t", ("/bin/sh", "-c", "echo 'a \\ b'; while :; do sleep 0.05; done"), {})
    await host.start(one)
    try:
        while not (text := await host.read_log(one.launch_id, 0)):
            await asyncio.sleep(0.02)
        assert text == b"a \\ b\n"
    finally:
        assert not (await host.stop(one.launch_id, 5.0)).alive


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/dash", "/usr/bin/fish", "/bin/tcsh", "/bin/zsh"])
def test_a_login_shell_that_talks_or_is_no_posix_shell_is_no_hindrance(shell: str) -> None:
    async def work(sshd: Sshd) -> None:
        async with host_of(sshd, ".autotuner", bench_python=PYTHON) as host:
            await one_life(host)
            assert "pydantic" in (state := await host.bench_state()) or state == "missing"

    with Person(shell) as person:
        for path, text in NOISE.items():
            person.write(path, text)
        banner = person.ground / "banner"
        banner.write_text("Authorised use only.\n{}\n")
        sshd = served(person, f"Banner {banner}")
        try:
            asyncio.run(work(sshd))
        finally:
            sshd.stop()


@pytest.mark.parametrize("shell", ["/bin/bash", "/usr/bin/fish", "/bin/tcsh"])
def test_a_host_without_python_says_so_whatever_its_shell_answers(shell: str) -> None:
    async def work(sshd: Sshd) -> None:
        async with host_of(sshd, ".autotuner", python="python3.99") as host:
            with pytest.raises(HostError, match=r"there is no python3\.99 on host far .*\[hosts\.far\] python"):
                await host.free_disk_mib()

    with Person(shell) as person:
        sshd = served(person)
        try:
            asyncio.run(work(sshd))
        finally:
            sshd.stop()


def test_a_user_without_a_shell_is_told_as_such() -> None:
    async def work(sshd: Sshd) -> None:
        async with host_of(sshd, ".autotuner") as host:
            with pytest.raises(HostError, match=r"runs no programs for .*login shell"):
                await host.free_disk_mib()

    with Person("/usr/sbin/nologin") as person:
        sshd = served(person)
        try:
            asyncio.run(work(sshd))
        finally:
            sshd.stop()


def test_a_folder_that_the_user_may_not_write_to_is_named_with_what_to_do() -> None:
    async def work(sshd: Sshd, folder: Path) -> None:
        for taken in (folder / "locked", folder / "locked" / "below"):
            async with host_of(sshd, taken) as host:
                with pytest.raises(HostError, match=rf"{taken}.*user may write to \(?.*folder") as refused:
                    await host.free_disk_mib()
                assert not isinstance(refused.value, HostUnreachable | HostDiskFull)

    with Person() as person:
        (person.ground / "locked").mkdir()
        sshd = served(person)
        try:
            asyncio.run(work(sshd, person.ground))
        finally:
            sshd.stop()


def test_a_folder_that_became_read_only_after_the_agent_was_copied_is_named_too() -> None:
    async def work(sshd: Sshd, folder: Path) -> None:
        async with host_of(sshd, folder) as host:
            await host.free_disk_mib()
        (folder / "controller.lock").chmod(0)
        for path in (folder / "controller.lock", folder):
            os.chown(path, 0, 0)
        async with host_of(sshd, folder) as host:
            with pytest.raises(HostError, match=rf"{folder}.* cannot be used: Permission denied.*folder"):
                await host.free_disk_mib()

    with Person() as person:
        sshd = served(person)
        try:
            asyncio.run(work(sshd, person.home / "own"))
        finally:
            sshd.stop()


def test_a_home_on_a_full_disk_is_told_as_such_and_taken_into_use_once_there_is_room() -> None:
    async def work(sshd: Sshd, disk: FullDisk) -> None:
        async with host_of(sshd, ".autotuner") as host:
            disk.fill()
            with pytest.raises(HostDiskFull, match=r"the disk of host far is full: .*\.autotuner there.*free space"):
                await host.free_disk_mib()
            assert not list(disk.folder.glob(".autotuner/*")), "no piece of a copy is left"
            disk.free()
            host._refused = None
            await one_life(host)
            disk.fill()
            assert await host.free_disk_mib() == 0
            with pytest.raises(HostDiskFull):
                await one_life(host)
            sshd.cut()  # the next agent starts on a full disk, too
            with pytest.raises(HostDiskFull):
                await one_life(host)
            disk.free()
            await one_life(host)

    with Person() as person, FullDisk(person.home, 1024) as disk:
        sshd = served(person)
        try:
            asyncio.run(work(sshd, disk))
        finally:
            sshd.stop()


def test_an_ssh_server_that_takes_no_files_is_told_what_it_needs(tmp_path: Path) -> None:
    async def work(sshd: Sshd) -> None:
        async with host_of(sshd, tmp_path / "remote") as host:
            with pytest.raises(HostError, match="Subsystem sftp internal-sftp"):
                await host.free_disk_mib()

    sshd = Sshd(tmp_path / "sshd", "Subsystem other /bin/true").start()
    try:
        asyncio.run(work(sshd))
    finally:
        sshd.stop()


def test_an_ssh_server_with_one_session_a_connection_serves_all_but_the_load_client(tmp_path: Path) -> None:
    async def work(sshd: Sshd) -> None:
        async with host_of(sshd, tmp_path / "remote", bench_python=PYTHON) as host:
            await one_life(host)
            await host.reach("127.0.0.1", sshd.port)
            with pytest.raises(HostError, match=r"MaxSessions"):
                await (await host._linked()).connection.start(("true",))

    sshd = Sshd(tmp_path / "sshd", "MaxSessions 1").start()
    try:
        asyncio.run(work(sshd))
    finally:
        sshd.stop()


def test_an_ssh_server_that_turns_connections_away_is_tried_again(tmp_path: Path) -> None:
    async def work(sshd: Sshd) -> None:
        waiting = []
        while True:  # until one is turned away
            reader, writer = await asyncio.open_connection(sshd.address, sshd.port)
            waiting.append(writer)
            if not (await reader.readline()).startswith(b"SSH-2.0"):
                break
        async with host_of(sshd, tmp_path / "remote") as host:
            asked = asyncio.create_task(host.free_disk_mib())
            await asyncio.sleep(1.0)
            assert not asked.done()
            for writer in waiting:
                writer.close()
            assert await asked > 0

    sshd = Sshd(tmp_path / "sshd", "MaxStartups 2:100:2").start()
    try:
        asyncio.run(work(sshd))
    finally:
        sshd.stop()


def test_an_ssh_server_that_forwards_no_ports_is_told_what_it_needs(tmp_path: Path) -> None:
    async def work(sshd: Sshd) -> None:
        async with host_of(sshd, tmp_path / "remote") as host:
            await one_life(host)
            with pytest.raises(HostError, match=r"forwards no ports .*AllowTcpForwarding"):
                await host.reach("127.0.0.1", sshd.port)
            assert (await host.port_holder(sshd.port)) is not None  # it can still be looked at

    sshd = Sshd(tmp_path / "sshd", "AllowTcpForwarding no").start()
    try:
        asyncio.run(work(sshd))
    finally:
        sshd.stop()


AN_HOUR_OFF = """\
#!/usr/bin/env python3
import sys, time
now, ns, of = time.time, time.time_ns, time.clock_gettime
time.time = lambda: now() + 3600
time.time_ns = lambda: ns() + 3600 * 10**9
time.clock_gettime = lambda which: of(which) + (3600 if which == time.CLOCK_REALTIME else 0)
program, sys.argv = sys.argv[3], ["-c", *sys.argv[4:]]
exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
"""


def test_a_host_whose_clock_is_an_hour_off_works_all_the_same(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(AN_HOUR_OFF.replace("/usr/bin/env python3", PYTHON))
    python.chmod(0o755)

    async def work(sshd: Sshd) -> None:
        async with host_of(sshd, tmp_path / "remote", python=str(python)) as host:
            loop_off_s = (await host.facts())["time_s"] - __import__("time").time()
            assert 3500 < loop_off_s < 3700
            await one_life(host)
            assert await host.forget_programs() == 0
            sshd.cut()
            await one_life(host)

    sshd = Sshd(tmp_path / "sshd").start()
    try:
        asyncio.run(work(sshd))
    finally:
        sshd.stop()
        _clear(tmp_path / "remote")


@contextlib.contextmanager
def an_agent(socket: Path, *keys: Path) -> Iterator[Path]:
    """A real ssh-agent that has these keys."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("there is no ssh-agent here (Debian: apt-get install openssh-client)")
    with subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL) as agent:
        try:
            assert comes_true(socket.exists)
            for key in keys:
                env = {**os.environ, "SSH_AUTH_SOCK": str(socket)}
                subprocess.run(["ssh-add", "-q", str(key)], env=env, check=True, capture_output=True)
            yield socket
        finally:
            agent.terminate()


def test_an_agent_of_the_settings_is_asked_and_that_of_the_environment_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key(tmp_path / "other")

    async def work(sshd: Sshd, socket: Path, empty: Path) -> None:
        async with host_of(sshd, tmp_path / "remote", identity_file=None, agent=socket) as host:
            assert await host.free_disk_mib() > 0
            sshd.cut()
            assert await host.free_disk_mib() > 0
        async with host_of(sshd, tmp_path / "remote", identity_file=tmp_path / "other", agent=socket) as host:
            assert await host.free_disk_mib() > 0
        async with host_of(sshd, tmp_path / "remote", identity_file=None, agent=empty) as host:
            with pytest.raises(HostError, match=r"has no key for host far.*ssh-add"):
                await host.free_disk_mib()
        async with host_of(sshd, tmp_path / "remote", identity_file=None, agent=tmp_path / "none") as host:
            with pytest.raises(HostError, match="cannot be asked"):
                await host.free_disk_mib()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        async with host_of(sshd, tmp_path / "remote", identity_file=tmp_path / "other") as host:
            with pytest.raises(HostError, match="does not let"):
                await host.free_disk_mib()

    sshd = Sshd(tmp_path / "sshd").start()
    try:
        with an_agent(tmp_path / "agent", sshd.client_key) as socket, an_agent(tmp_path / "empty") as empty:
            asyncio.run(work(sshd, socket, empty))
    finally:
        sshd.stop()


def _clear(remote: Path) -> None:
    known = {path.name for path in (remote / "launches").glob("*")}
    for pid in procfs.pids():
        if procfs.launch_id_of(pid) in known:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
