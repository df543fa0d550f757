"""Slots over several nodes: a file says which, where the ranks meet, and takes no port or GPU twice; a launch has each rank's part."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotuner.cli import main
from autotuner.context import SlotContext
from autotuner.core.candidate import Candidate, Launch
from autotuner.edge.host import RankSeen, ServerSeen
from autotuner.engines import engine_for
from autotuner.engines.base import Place, Rank, Window
from autotuner.errors import HostError, HostUnreachable, InvalidInput
from autotuner.launching import spec_of
from autotuner.nodes import Node
from autotuner.serverlog import LogReader
from autotuner.settings import Settings, load_settings, needs_restart

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"
HOST = '[hosts.{0}]\naddress = "10.0.0.{1}"\nuser = "ops"\nhost_key = "' + KEY + '"\nidentity_file = "id"\n'
TOP = 'state_dir = "s"\n' + HOST.format("gpu1", 1) + HOST.format("gpu2", 2)
NODES = '[[slots.big.nodes]]\nhost = "gpu1"\ngpus = [0, 1]\n[[slots.big.nodes]]\nhost = "gpu2"\ngpus = [2, 3]\n'
BIG = "[slots.big]\nport = 30000\n"


def load(folder: Path, text: str) -> Settings:
    path = folder / "autotuner.toml"
    path.write_text(text)
    return load_settings(path)


def wrong(folder: Path, text: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        load(folder, text)
    return str(caught.value)


def test_the_first_node_is_where_the_slot_serves_and_where_the_ranks_meet(tmp_path: Path) -> None:
    found = load(tmp_path, TOP + BIG + NODES)
    slot = found.slots["big"]
    assert (slot.host, slot.gpus, slot.gpu_count) == ("gpu1", (0, 1), 4)
    assert slot.ports == (30000, 30000)
    assert [found.rank_of("big", n) for n in (0, 1)] == [Rank(n, 2, Place("10.0.0.1", 31000)) for n in (0, 1)]
    second = slot.on(1)
    assert (second.host, second.gpus, second.port, second.nodes) == ("gpu2", (2, 3), 30000, ())
    named = load(tmp_path, TOP + BIG + 'dist_addr = "192.168.9.1"\ndist_port = 20000\n' + NODES)
    assert named.rank_of("big", 1) == Rank(1, 2, Place("192.168.9.1", 20000))


def test_a_slot_on_one_host_has_no_ranks(tmp_path: Path) -> None:
    found = load(tmp_path, TOP + '[slots.a]\nport = 1\nhost = "gpu1"\ngpus = [0]\n')
    assert found.rank_of("a", 0) is None
    assert found.slots["a"].members == (Node(host="gpu1", gpus=(0,)),)
    assert (found.slots["a"].ports, found.slots["a"].gpu_count) == ((1,), 1)


def test_ranks_that_share_a_host_have_ports_of_their_own_and_meet_on_loopback(tmp_path: Path) -> None:
    text = 'state_dir = "s"\n[slots.a]\nport = 65000\n[[slots.a.nodes]]\ngpus = [0]\n[[slots.a.nodes]]\ngpus = [1]\n'
    found = load(tmp_path, text)
    assert found.slots["a"].ports == (65000, 65001)
    assert found.rank_of("a", 0) == Rank(0, 2, Place("127.0.0.1", 64000))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BIG + 'host = "gpu2"\n' + NODES, "slots.big.host: belongs into each of the slot's nodes"),
        (BIG + "gpus = [0]\n" + NODES, "slots.big.gpus: belongs into each of the slot's nodes"),
        (BIG + '[[slots.big.nodes]]\nhost = "gpu1"\n', "has one node"),
        (BIG + NODES.replace("gpu2", "gpu9"), "slots.big.nodes[1].host: there is no host gpu9"),
        (
            BIG + NODES.replace("gpu2", "gpu1").replace("2, 3", "1"),
            "slots.big.nodes[1].gpus: is taken twice on one host: GPU 1",
        ),
        (BIG + NODES + '[slots.other]\nhost = "gpu2"\nport = 1\ngpus = [3]\n', "slots big and other share GPU 3"),
        (BIG + NODES + '[slots.other]\nhost = "gpu2"\nport = 30000\n', "slots big and other share port 30000"),
        (BIG + NODES + '[slots.other]\nhost = "gpu1"\nport = 31000\n', "slots big and other share port 31000"),
        (BIG + "dist_port = 30000\n" + NODES, "slots.big.dist_port: is taken twice on one host: port 30000"),
        (BIG + NODES.replace('host = "gpu1"', 'host = "local"'), "needs dist_addr"),
        (BIG + NODES + "rank = 1\n", "rank"),
    ],
)
def test_what_cannot_be_is_said_with_its_key(tmp_path: Path, text: str, said: str) -> None:
    assert said in wrong(tmp_path, TOP + text)


def test_nodes_and_where_they_meet_need_a_restart(tmp_path: Path) -> None:
    old = load(tmp_path, TOP + BIG + NODES)
    other = load(tmp_path, TOP + BIG + "dist_port = 2000\n" + NODES.replace("2, 3", "4, 5"))
    assert set(needs_restart(old, other)) == {"slots.big.nodes", "slots.big.dist_port"}


def context(settings: Settings) -> SlotContext:
    return SlotContext("big", settings, (), None, None)  # type: ignore[arg-type]


def test_each_rank_is_launched_with_its_flags_its_gpus_and_its_nodes_variables(tmp_path: Path) -> None:
    settings = load(tmp_path, TOP + BIG + NODES + 'env = {NCCL_SOCKET_IFNAME = "ib7"}\n')
    args = Launch(model="/m", args={"tp": 4}, env={"NCCL_SOCKET_IFNAME": "ib0"})
    spec = spec_of(context(settings), Candidate(name="c", engine="sglang", launch=args), "abc")
    (other,) = spec.others
    assert [s.launch_id for s in (spec, other)] == ["abc", "abc.1"]
    assert [s.slot for s in (spec, other)] == ["big", "big.1"]
    assert [s.argv[-1] for s in (spec, other)] == ["0", "1"]
    assert spec.argv[:-1] == other.argv[:-1]
    assert [s.env["CUDA_VISIBLE_DEVICES"] for s in (spec, other)] == ["0,1", "2,3"]
    assert [s.env["NCCL_SOCKET_IFNAME"] for s in (spec, other)] == ["ib0", "ib7"]
    llama = Candidate(name="c", engine="llamacpp", launch=Launch(model="/m", binary="/b"))
    with pytest.raises(HostError, match="cannot be launched over 2 nodes"):
        spec_of(context(settings), llama, "abc")


class Logs:
    """A host of which only the ranks' logs are told."""

    def __init__(self, *texts: str) -> None:
        self.logs = {"abc" if n == 0 else f"abc.{n}": text.encode() for n, text in enumerate(texts)}

    async def read_log(self, launch_id: str, offset: int, limit: int = 1 << 20) -> bytes:
        return self.logs[launch_id][offset : offset + 64]  # in small pieces, as it grows


def decode(second: int, rank: int, running: int) -> str:
    head = f"[2026-11-29 12:00:{second:02d} DP{rank} TP{rank}] Decode batch, "
    return f"{head}#running-req: {running}, gen throughput (token/s): {100 + rank}.00, #queue-req: 0\n"


def reader(*texts: str) -> LogReader:
    return LogReader(Logs(*texts), "abc", engine_for("sglang"), ranks=len(texts))  # type: ignore[arg-type]


def test_every_line_of_every_rank_is_read_once() -> None:
    texts = ["".join(decode(second, rank, second) for second in range(20)) for rank in (0, 1)]
    log = reader(*texts)
    facts = asyncio.run(log.facts())
    windows = [fact for fact in facts if isinstance(fact, Window)]
    assert len(windows) == 40
    assert {w.rank for w in windows} == {"DP0 TP0", "DP1 TP1"}
    assert [w.running for w in windows if w.rank == "DP1 TP1"] == list(map(float, range(20)))
    assert log.lines == 40
    assert len(log.since(30)) == 10


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_host_that_is_away_for_a_while_loses_no_line_of_any_rank(ranks: int) -> None:
    class Away(Logs):
        asked = 0

        async def read_log(self, launch_id: str, offset: int, limit: int = 1 << 20) -> bytes:
            self.asked += 1
            if self.asked % 3 == 0:
                raise HostUnreachable("host gpu2 cannot be reached")
            return await super().read_log(launch_id, offset, limit)

    texts = ["".join(decode(second, rank, second) for second in range(9)) for rank in range(ranks)]
    log = LogReader(Away(*texts), "abc", engine_for("sglang"), ranks=ranks)  # type: ignore[arg-type]
    windows: list[Window] = []
    for _ in range(300):
        with contextlib.suppress(HostUnreachable):
            windows += [fact for fact in asyncio.run(log.facts()) if isinstance(fact, Window)]
    for rank in range(ranks):
        assert [w.running for w in windows if w.rank == f"DP{rank} TP{rank}"] == list(map(float, range(9)))
    assert len(log.since(0)) == log.lines == 9 * ranks


@pytest.mark.parametrize("first", [0, 1, None])
def test_a_server_ended_by_what_one_rank_says(first: int | None) -> None:
    quiet = "[2026-11-29 12:00:01 TP0] Load weight begin. avail mem=139.13 GB\n"
    broken = "[2026-11-29 12:00:02 TP2] Scheduler hit an exception: Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n"
    ranks = tuple(
        RankSeen(f"gpu{n + 1}", ServerSeen("abc", alive=False, exit_code=-9), first=n == first) for n in (0, 1)
    )
    seen = ServerSeen("abc", alive=False, exit_code=-9, ranks=ranks)
    found = asyncio.run(reader(quiet, broken).why_ended(seen, asked=False, became_ready=False))
    assert found.sentence.startswith("rank 1 on gpu2: the GPU ran out of memory")
    assert found.cause == "oom-in-load"
    asked: Any = asyncio.run(reader(quiet, broken).why_ended(seen, asked=True, became_ready=False))
    assert asked.cause == "own-stop"


def test_commands_show_each_ranks_host(tmp_path: Path) -> None:
    load(tmp_path, TOP + BIG + NODES)

    def said(*words: str) -> str:
        ran = CliRunner().invoke(main, ["-s", str(tmp_path / "autotuner.toml"), *words])
        assert ran.exit_code in {0, 1}, ran.output
        return ran.output

    assert "nodes:      rank 0 on gpu1, rank 1 on gpu2" in said("status")
    (first, second) = json.loads(said("status", "--json"))["slots"]["big"]["nodes"]
    assert first == {"rank": 0, "host": "gpu1", "gpus": [0, 1], "alive": None}
    assert second["host"] == "gpu2"
    assert [row["slots"] for row in json.loads(said("hosts", "list", "--json"))] == [["big"], ["big"]]
    assert "slot big, rank 1, is on host gpu2" in said("doctor", "--all")
