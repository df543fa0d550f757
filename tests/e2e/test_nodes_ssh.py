"""One server over two hosts behind real OpenSSH servers: a cut costs nothing, a dead rank ends both, never two servers."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.test_nodes import NodesHouse
from fakes.sshd import Sshd

from autotuner.core.state import LaunchState
from autotuner.edge import procfs
from autotuner.edge.host import launch_of_rank, rank_id

pytestmark = [pytest.mark.ssh, pytest.mark.e2e, pytest.mark.timeout(900)]

HOSTS = ("gpu1", "gpu2")


class FarNodesHouse(NodesHouse):
    """The daemon here, rank 0 on host gpu1 and rank 1 on gpu2, which are loopback too, each with a folder of its own."""

    def __init__(self, folder: Path, servers: tuple[Sshd, Sshd]) -> None:
        super().__init__(folder, HOSTS)
        self.remotes = [folder / "remote" / name for name in HOSTS]
        for name, sshd, remote in zip(HOSTS, servers, self.remotes, strict=True):
            host = {
                "address": '"127.0.0.1"',
                "port": str(sshd.port),
                "user": json.dumps(sshd.user),
                "host_key": json.dumps(sshd.host_key),
                "identity_file": json.dumps(str(sshd.client_key)),
                "folder": json.dumps(str(remote)),
            }
            self.extra += f"[hosts.{name}]\n" + "\n".join(f"{key} = {value}" for key, value in host.items()) + "\n"

    def folders(self) -> list[Path]:
        return [remote / "launches" for remote in self.remotes]

    def close(self) -> None:
        super().close()
        known = {path.name for folder in self.folders() for path in folder.glob("*")}
        for pid in procfs.pids():
            if procfs.launch_id_of(pid) in known:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Sshd, Sshd]]:
    both = (Sshd(tmp_path / "sshd1").start(), Sshd(tmp_path / "sshd2").start())
    yield both
    for server in both:
        server.stop()


@pytest.fixture
def far(tmp_path: Path, servers: tuple[Sshd, Sshd]) -> Iterator[FarNodesHouse]:
    house = FarNodesHouse(tmp_path, servers)
    yield house
    house.close()


def test_each_rank_is_on_its_host_and_its_log_is_read_there(far: FarNodesHouse) -> None:
    far.start()
    far.cli("enqueue", "--no-preflight", far.write("base"), far.write("oom", env="oom-load@1"))
    far.wait_settled(480)
    assert far.verdicts() == {"base": "pass", "oom": "fail"}
    launch = far.serving_launch()
    assert (far.folders()[0] / launch / "server.log").exists()
    assert (far.folders()[1] / rank_id(launch, 1) / "server.log").exists()
    assert not (far.folders()[0] / rank_id(launch, 1)).exists()
    assert "rank 1 on gpu2: the GPU ran out of memory" in far.cli("why", "oom").stdout
    log = far.cli("show", "oom", "--log").stdout.splitlines()
    assert any(line.startswith("rank 0 on gpu1 | ") for line in log)
    assert any(line.startswith("rank 1 on gpu2 | ") and "CUDA out of memory" in line for line in log)
    assert "rank 1 on gpu2 (lives)" in far.cli("status").stdout


def test_a_cut_to_either_host_at_any_stage_costs_nothing(far: FarNodesHouse, servers: tuple[Sshd, Sshd]) -> None:
    far.start()
    far.cli("enqueue", "--no-preflight", far.write("base"))
    for number in range(8):  # through the load and the level
        time.sleep(1.0)
        servers[number % 2].cut()
    far.wait_settled(480)
    assert far.verdicts() == {"base": "pass"}
    launch = far.serving_launch()
    for sshd in servers:
        sshd.cut()
    time.sleep(3.0)
    assert far.serving_launch() == launch
    assert len(far.launches()) == 1


def test_while_a_host_is_away_nothing_is_ended_or_launched_and_then_all_is(
    far: FarNodesHouse, servers: tuple[Sshd, Sshd]
) -> None:
    far.start()
    far.cli("enqueue", "--no-preflight", far.write("base"))
    far.wait_settled(480)
    launch = far.serving_launch()
    servers[1].stop()
    far.wait(lambda: "gpu2" in far.status()["decision"], 120, "the host's absence to be said")
    os.kill(far.ranks()[launch], signal.SIGKILL)
    time.sleep(5.0)
    assert set(far.ranks()) == {rank_id(launch, 1)}  # nobody can say how rank 1 is, so there is no second server
    assert len(far.launches()) == 1
    servers[1].start()
    far.wait(lambda: far.is_gone(launch), 180, "rank 1 ended, too")
    far.wait(lambda: len(far.launches()) == 2, 120, "the next launch")
    assert far.serving_launch() != launch
    assert next(row for row in far.launches() if row.id == launch).state is LaunchState.ENDED


def test_a_daemon_killed_while_it_starts_the_ranks_takes_up_or_ends_both(far: FarNodesHouse) -> None:
    far.start()
    far.cli("enqueue", "--no-preflight", far.write("base"))
    far.wait_settled(480)
    before = far.serving_launch()
    os.kill(far.ranks()[before], signal.SIGKILL)
    until = time.monotonic() + 120
    while not any(launch_of_rank(rank) != before for rank in far.ranks()):
        assert time.monotonic() < until
    far.kill()
    far.start()
    far.serving_launch()
