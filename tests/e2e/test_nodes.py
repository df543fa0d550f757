"""One server over two nodes: both ranks or none, whichever of them or of the daemon is killed, and the log says whose fault it was."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.house import SLOT, TESTS, House, free_port

from autotuner.core.state import LaunchState
from autotuner.edge import procfs
from autotuner.edge.host import launch_of_rank, rank_id

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PROGRAM = (sys.executable, "-m", "e2e.undisturbed_rehearsal")
HEAD = 'engine = "{engine}"\n[launch]\nmodel = "/models/m"\npython = "/opt/engine/bin/python3"\n'
ARGS = "[launch.args]\ntensor-parallel-size = 4\n"


class NodesHouse(House):
    """A house whose slot has two nodes, by default both on this machine; its engines are in rehearsal."""

    def __init__(self, folder: Path, hosts: tuple[str, str] = ("local", "local")) -> None:
        super().__init__(folder)
        self.program = PROGRAM
        self.port = two_free_ports()
        self.hosts = hosts
        # A session over SSH does not have our environment, and the servers are this very copy of the program.
        env = f'env = {{PYTHONPATH = "{TESTS.parent}"}}'
        self.slot["nodes"] = "[" + ", ".join(f'{{host = "{host}", {env}}}' for host in hosts) + "]"
        self.slot["dist_port"] = str(free_port())
        self.slot["start_timeout_s"] = "240"
        self.benchmark["levels"] = "[8]"

    def write(self, name: str, more: str = "", engine: str = "sglang", env: str = "") -> Path:
        path = self.folder / f"{name}.toml"
        variables = f"[launch.env]\nAUTOTUNER_FAKE_PERSONALITY = {env!r}\n" if env else ""
        path.write_text(f'name = "{name}"\n{HEAD.format(engine=engine)}{ARGS}{more}{variables}')
        return path

    def folders(self) -> list[Path]:
        """Where the launches of the nodes are."""
        return [self.state / "launches"]

    def ranks(self, launch: str | None = None) -> dict[str, int]:
        """The servers that live, by the id of their rank; of one launch if one is named."""
        known = {path.name for folder in self.folders() for path in folder.glob("*")}
        found = {}
        for pid in procfs.pids():
            rank = procfs.launch_id_of(pid)
            if rank in known and procfs.start_ticks(pid) is not None and b"--node-rank" in _command_line(pid):
                assert rank not in found, f"two servers of rank {rank}"
                found[rank] = pid
        return {r: pid for r, pid in found.items() if launch is None or launch_of_rank(r) == launch}

    def serving_launch(self) -> str:
        """The launch that serves, of which both ranks must live."""
        self.wait(lambda: self.serving() == "base", 240, "base serving")
        launch = next(row.id for row in self.launches() if row.state is LaunchState.SERVING)
        assert set(self.ranks()) == {launch, rank_id(launch, 1)}
        return launch

    def is_gone(self, launch: str) -> bool:
        return not self.ranks(launch)


def two_free_ports() -> int:
    """A free port whose next one is free, too: ranks that share a machine count on from the slot's."""
    while True:
        port = free_port()
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port + 1)):
                return port


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[NodesHouse]:
    house = NodesHouse(tmp_path)
    yield house
    house.close()


@pytest.mark.slow
def test_a_campaign_tells_whose_rank_failed_and_restores_both(nodes: NodesHouse) -> None:
    files = [
        nodes.write("base"),
        nodes.write("oom", env="oom-load@1"),
        nodes.write("dies", env="dies-silently@1"),
        nodes.write("fast", "max-num-seqs = 64\n", engine="vllm", env="oom-capture@0"),
    ]
    nodes.start()
    nodes.cli("enqueue", "--no-preflight", *files)
    nodes.wait_settled(480)
    assert nodes.verdicts() == {"base": "pass", "oom": "fail", "dies": "fail", "fast": "fail"}
    nodes.serving_launch()
    assert "rank 1 on local: the GPU ran out of memory" in nodes.cli("why", "oom").stdout
    assert "rank 1 on local: the server was killed (SIGKILL)" in nodes.cli("why", "dies").stdout
    assert "rank 0 on local: the GPU ran out of memory" in nodes.cli("why", "fast").stdout
    log = nodes.cli("show", "oom", "--log").stdout
    assert "rank 0 on local | " in log
    failed = [line for line in log.splitlines() if "CUDA out of memory" in line]
    assert failed
    assert all(line.startswith("rank 1 on local | ") for line in failed)
    status = nodes.cli("status").stdout
    assert "nodes:      rank 0 on local (lives), rank 1 on local (lives)" in status
    assert [node["alive"] for node in nodes.status()["nodes"]] == [True, True]


def test_a_rank_that_is_killed_takes_the_others_with_it_and_the_best_known_comes_back(nodes: NodesHouse) -> None:
    nodes.start()
    nodes.cli("enqueue", "--no-preflight", nodes.write("base"))
    nodes.wait_settled(240)
    for rank in (1, 0):
        before = nodes.serving_launch()
        os.kill(nodes.ranks()[rank_id(before, rank)], signal.SIGKILL)
        nodes.wait(lambda launch=before: nodes.is_gone(launch), 120, "both ranks gone")
        nodes.wait(lambda launch=before: _ended(nodes, launch), 120, "the end on record")
        row = next(row for row in nodes.launches() if row.id == before)
        assert row.diagnosis is not None
        assert row.diagnosis.sentence.startswith(f"rank {rank} on local: ")


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_loads_ends_the_start_on_all_nodes(nodes: NodesHouse) -> None:
    nodes.start()
    nodes.cli("enqueue", "--no-preflight", nodes.write("base"))
    nodes.wait_settled(240)
    before = nodes.serving_launch()
    os.kill(nodes.ranks()[before], signal.SIGKILL)
    nodes.wait(lambda: nodes.launches()[-1].id != before and len(nodes.ranks()) == 2, 120, "the next launch")
    loading = nodes.launches()[-1].id
    os.kill(nodes.ranks(loading)[rank_id(loading, 1)], signal.SIGKILL)
    nodes.wait(lambda: nodes.is_gone(loading) and _ended(nodes, loading), 120, "the start given up on both")
    row = next(row for row in nodes.launches() if row.id == loading)
    assert row.diagnosis is not None
    assert row.diagnosis.sentence.startswith("rank 1 on local: ")
    nodes.serving_launch()


@pytest.mark.slow
def test_a_daemon_killed_while_it_starts_the_ranks_leaves_one_server_or_none(nodes: NodesHouse) -> None:
    nodes.start()
    nodes.cli("enqueue", "--no-preflight", nodes.write("base"))
    nodes.wait_settled(240)
    for wanted in (1, 2):  # as soon as one rank is there, or both
        before = nodes.serving_launch()
        os.kill(nodes.ranks()[before], signal.SIGKILL)
        nodes.wait(lambda launch=before: _ended(nodes, launch), 120, "the end on record")
        until = time.monotonic() + 120
        while len([r for r in nodes.ranks() if launch_of_rank(r) != before]) < wanted:
            assert time.monotonic() < until
        nodes.kill()
        nodes.start()
        nodes.serving_launch()


def test_what_cannot_be_one_server_over_the_nodes_is_refused(nodes: NodesHouse) -> None:
    nodes.write_settings()
    own = nodes.write("own", "nnodes = 2\nnode-rank = 0\n")
    odd = nodes.folder / "odd.toml"
    odd.write_text(f'name = "odd"\n{HEAD.format(engine="sglang")}[launch.args]\ntensor-parallel-size = 3\n')
    ray = nodes.write("ray", 'distributed-executor-backend = "ray"\n', engine="vllm")
    llama = nodes.folder / "llama.toml"
    llama.write_text('name = "llama"\nengine = "llamacpp"\n[launch]\nmodel = "/models/m.gguf"\nbinary = "/bin/true"\n')
    said = nodes.cli("enqueue", own, odd, ray, llama, check=False)
    assert said.returncode != 0
    text = said.stdout + said.stderr
    assert "args.nnodes is not the candidate's to choose" in text
    assert "3 GPU ranks" in text
    assert "needs a Ray cluster" in text
    assert "llama.cpp serves from one node" in text
    assert not nodes.read(lambda store: store.queue(SLOT))
    # Nor is it launched where nobody checked it.
    nodes.start()
    nodes.cli("enqueue", "--no-preflight", llama)
    nodes.wait(lambda: nodes.verdicts().get("llama") == "error", 120, "llama refused")
    assert "llama.cpp serves from one node" in nodes.cli("why", "llama").stdout
    assert not nodes.launches()


def _ended(house: NodesHouse, launch: str) -> bool:
    return any(row.id == launch and row.state is LaunchState.ENDED for row in house.launches())


@pytest.mark.slow
def test_the_rehearsed_ranks_say_who_did_not_come() -> None:
    flags = ["--nnodes", "2", "--node-rank", "0", "--dist-init-addr", "127.0.0.1:31999", "--port", "31998"]
    server = [sys.executable, "-m", "autotuner.rehearsal.server", "--as", "sglang", "--time-scale", "4000", "--"]
    command = [*server, "python3", "-m", "sglang.launch_server", "--model-path", "/m", "--tp-size", "2", *flags]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=TESTS.parent)
    assert "Timed out after 601 seconds waiting for clients. 1/2 clients joined." in ran.stderr
    assert ran.returncode == -signal.SIGKILL
