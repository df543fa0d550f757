"""`hosts`: a key is pinned only once it was compared, the settings file keeps all else, and `test` says what is to be done."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest
from click.testing import CliRunner, Result
from fakes.ssh_server import USER, SshServer
from unit.core.test_topology import RECORDED

from autotuner.cli import main
from autotuner.cli.hosts import _slot_checks
from autotuner.edge.destination import fingerprint
from autotuner.edge.host import GpuUse, Ran, Readings
from autotuner.errors import HostError
from autotuner.settings import Slot, load_settings

SETTINGS = """\
# What we are told; this line stays.
state_dir = "state"   # and so does this

[slots.a]
port = 30999
"""


class Running:
    """An SSH server in a thread of its own: the commands have their own loop."""

    def __init__(self, server: SshServer) -> None:
        self.server = server
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.do(server.start())

    def do(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(30)  # type: ignore[arg-type]

    def close(self) -> None:
        self.do(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(SshServer(tmp_path / "server"))
    yield running
    running.close()


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "autotuner.toml"
    path.write_text(SETTINGS)
    path.chmod(0o640)
    return path


def call(settings: Path, *words: object, said: str | None = None) -> Result:
    return CliRunner().invoke(main, ["-s", str(settings), "hosts", *map(str, words)], input=said)


def added(settings: Path, running: Running, *words: object, said: str | None = None) -> Result:
    server = running.server
    where = (f"{USER}@127.0.0.1", "--port", server.port, "--identity", server.client_key)
    return call(settings, "add", "far", *where, *words, said=said)


def test_a_host_is_added_once_its_key_was_compared(settings: Path, running: Running) -> None:
    print_ = fingerprint(running.server.host_key)
    said = added(settings, running, said="n\n")
    assert said.exit_code == 4
    assert print_ in said.output
    assert settings.read_text() == SETTINGS
    wrong = added(settings, running, "--fingerprint", fingerprint(running.server.host_key)[:-1] + "_")
    assert wrong.exit_code == 4
    assert settings.read_text() == SETTINGS
    said = added(settings, running, "--fingerprint", print_)
    assert said.exit_code == 0, said.output
    text = settings.read_text()
    assert text.startswith(SETTINGS)
    assert settings.stat().st_mode & 0o777 == 0o640
    host = load_settings(settings).hosts["far"]
    assert (host.host_key, host.user, host.port) == ((running.server.host_key,), USER, running.server.port)
    assert added(settings, running).exit_code == 4  # there is one already
    [row] = json.loads(call(settings, "list", "--json").output)
    assert row["keys"] == [print_]
    assert print_ in call(settings, "list").output


def test_a_host_is_added_by_yes(settings: Path, running: Running) -> None:
    assert added(settings, running, said="y\n").exit_code == 0
    assert "far" in load_settings(settings).hosts


@pytest.mark.parametrize("name", ["local", "a b", "x]\n[y", "-", ""])
def test_a_name_that_cannot_be_one_changes_nothing(settings: Path, running: Running, name: str) -> None:
    words = (f"{USER}@127.0.0.1", "--port", running.server.port, "--identity", running.server.client_key)
    said = call(settings, "add", "--fingerprint", fingerprint(running.server.host_key), "--", name, *words[:1])
    said = said if said.exit_code else call(settings, "add", name, *words, said="y\n")
    assert said.exit_code != 0
    assert settings.read_text() == SETTINGS


def test_test_looks_at_all_that_a_slot_needs(settings: Path, running: Running) -> None:
    assert added(settings, running, said="y\n").exit_code == 0
    server = running.server
    text = settings.read_text().replace("port = 30999", 'port = 30999\nhost = "far"')
    settings.write_text(f"{text}folder = {json.dumps(str(server.remote))}\n")
    said = call(settings, "test", "far")
    assert said.exit_code == 0, said.output
    for what in (
        "connection",
        "python",
        "agent",
        "disk",
        "time",
        "benchmark: through a forwarded port",
        "slot a: port 30999 is free",
    ):
        assert f"ok      {what}" in said.output
    assert list(server.remote.glob("agent-*.pyz"))
    settings.write_text(settings.read_text().replace("port = 30999", f"port = {server.port}"))
    said = call(settings, "test", "far", "--json")
    assert said.exit_code == 7
    assert [c["what"] for c in json.loads(said.output) if not c["ok"]] == ["slot a"]
    settings.write_text(settings.read_text() + f"bench_python = {json.dumps(sys.executable)}\n")
    assert "ok      benchmark: on the host itself" in call(settings, "test", "far").output
    settings.write_text(settings.read_text().replace(json.dumps(sys.executable), '"/nowhere/python3"'))
    assert "NOT OK  benchmark: /nowhere/python3 cannot be run" in call(settings, "test", "far").output
    running.do(server.stop())
    said = call(settings, "test", "far")
    assert said.exit_code == 7
    assert "NOT OK  connection: host far cannot be reached" in said.output
    running.do(server.start())


def test_a_changed_key_is_pinned_anew_once_it_was_compared(settings: Path, running: Running) -> None:
    assert added(settings, running, said="y\n").exit_code == 0
    server, old = running.server, running.server.host_key
    before = settings.read_text()
    assert "nothing is changed" in call(settings, "pin", "far", said="y\n").output
    running.do(server.stop())
    server.key = asyncssh.generate_private_key("ssh-ed25519")
    running.do(server.start())
    said = call(settings, "test", "far")
    assert said.exit_code == 7
    assert "host key changed" in said.output
    assert "autotuner hosts pin far" in said.output
    said = call(settings, "pin", "far", said="n\n")
    assert said.exit_code == 4
    assert settings.read_text() == before
    said = call(settings, "pin", "far", said="y\n")
    assert said.exit_code == 0, said.output
    assert f"pinned:  {fingerprint(old)}" in said.output
    assert f"present: {fingerprint(server.host_key)}" in said.output
    assert settings.read_text() == before.replace(old, server.host_key)


def test_how_the_gpus_of_a_host_are_joined_is_told_and_a_host_that_cannot_say_is_no_worse() -> None:
    class Gpus:
        def __init__(self, said: Ran | HostError) -> None:
            self.said = said

        async def port_holder(self, port: int) -> None:
            return None

        async def gpus(self, indices: tuple[int, ...]) -> tuple[GpuUse, ...]:
            return tuple(GpuUse(index, 0.0, 1.0) for index in indices)

        async def reach(self, address: str, port: int) -> tuple[str, int]:
            return address, port

        async def readings(self, gpus: tuple[int, ...]) -> Readings:
            return Readings()

        async def run(self, argv: tuple[str, ...], timeout_s: float) -> Ran:
            if isinstance(self.said, HostError):
                raise self.said
            return self.said

    def told(said: Ran | HostError) -> str:
        checks = asyncio.run(_slot_checks(Gpus(said), "kimi", Slot(port=8000, gpus=(0, 1))))
        assert all(check.ok for check in checks)
        return next(check.said for check in checks if "GPU 0, 1" in check.said)

    assert told(Ran(0, RECORDED)) == "GPU 0, 1 seen; GPUs 0, 1 joined by NVLink (NV18)"
    assert told(Ran(9, "")) == told(HostError("no nvidia-smi")) == "GPU 0, 1 seen"
