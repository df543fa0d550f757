"""What NCCL chose is read out of its own lines, recorded on two H200 under one variable after another, and held against what was asked."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from unit.core.test_effective import FULL, candidate

from autotuner.core.effective import Configuration, identity
from autotuner.core.nccl import Nccl, absorb
from autotuner.core.nccl_effect import differences
from autotuner.edge.rows import configuration_json
from autotuner.engines import engine_for
from autotuner.engines.base import NcclSaid
from autotuner.engines.nccl_log import read_line, transport

FILE = Path(__file__).parents[1] / "engines" / "recordings" / "sglang-nccl-2.28.9.log"
RECORDED = {part.partition("\n")[0]: part.partition("\n")[2] for part in re.split(r"(?m)^=== ", FILE.read_text())[1:]}


def read(variant: str, engine: str = "sglang") -> Nccl:
    reader = engine_for(engine)
    facts = [fact for line in RECORDED[variant].splitlines() for fact in reader.read_line(line)]
    return absorb(Nccl(), (fact for fact in facts if isinstance(fact, NcclSaid)))


def asked(variant: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in variant.split())


@pytest.mark.parametrize("engine", ["sglang", "vllm", "command"])
def test_version_channels_and_links_are_read_whatever_engine_prints_them(engine: str) -> None:
    found = read("default", engine)
    assert (found.version, found.channels, found.nvls_channels) == ("2.28.9", 24, 0)
    assert found.links == {"0->1": "P2P/CUMEM", "1->0": "P2P/CUMEM"}
    assert found.connected == ("rings",)
    assert found.settings == {"NCCL_NVLS_ENABLE": "0"}
    assert str(found) == "NCCL 2.28.9, 24 channels, P2P/CUMEM on 2 links, rings"


@pytest.mark.parametrize(
    ("variant", "channels", "ways", "connected"),
    [
        ("NCCL_ALGO=Ring", 24, ("P2P/CUMEM",), ("rings",)),
        ("NCCL_ALGO=Tree", 24, ("P2P/CUMEM",), ("trees",)),
        ("NCCL_P2P_DISABLE=1", 4, ("SHM",), ("rings",)),
        ("NCCL_P2P_LEVEL=LOC", 4, ("SHM",), ("rings",)),
        ("NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1", 2, ("NET/Socket",), ("rings",)),
        ("NCCL_MIN_NCHANNELS=4 NCCL_MAX_NCHANNELS=4", 4, ("P2P/CUMEM",), ("rings",)),
    ],
)
def test_a_variant_that_nccl_follows_differs_in_nothing(
    variant: str, channels: int, ways: tuple[str, ...], connected: tuple[str, ...]
) -> None:
    found = read(variant)
    assert (found.channels, found.transports, found.connected) == (channels, ways, connected)
    assert asked(variant).items() <= found.settings.items()
    assert differences(asked(variant), found) == ()


def test_a_value_that_nccl_passes_over_in_silence_is_named() -> None:
    (difference,) = differences(asked("NCCL_P2P_LEVEL=BOG"), read("NCCL_P2P_LEVEL=BOG"))
    assert str(difference).startswith(
        "NCCL_P2P_LEVEL: asked BOG, in force NCCL's own choice; NCCL reports no such setting"
    )


def test_what_nccl_warns_of_is_kept() -> None:
    assert read("NCCL_ALGO=NVLS").warned == (
        "Error : no algorithm/protocol available for function AllReduce with datatype ncclBfloat16. NCCL_ALGO was set to NVLS.",
    )
    assert 'Unrecognized element token "Bogus"' in read("NCCL_PROTO=Bogus").warned[0]


def test_what_nccl_tells_of_each_collective_is_kept_once_a_kind() -> None:
    found = read("NCCL_PROTO=LL128")
    assert found.chose == ("TREE LL128", "RING LL128")
    assert differences({"NCCL_PROTO": "LL128"}, found) == ()
    (difference,) = differences({"NCCL_PROTO": "LL128"}, read("NCCL_ALGO=Ring"))
    assert str(difference).startswith("NCCL_PROTO: asked LL128, in force NCCL's own choice")
    otherwise = replace(found, settings={"NCCL_PROTO": "Simple,LL"})
    (difference,) = differences({"NCCL_PROTO": "Simple,LL"}, otherwise)
    assert str(difference).startswith("NCCL_PROTO: asked Simple,LL, in force TREE LL128, RING LL128; all-reduces go by")


@pytest.mark.parametrize(
    ("env", "variant", "says"),
    [
        ({"NCCL_ALGO": "Tree"}, "NCCL_ALGO=Ring", "NCCL_ALGO: asked Tree, in force Ring; NCCL was told otherwise"),
        (
            {"NCCL_P2P_DISABLE": "1"},
            "default",
            "peer-to-peer: asked off, in force P2P/CUMEM; NCCL uses it all the same",
        ),
        ({"NCCL_P2P_LEVEL": "SYS"}, "NCCL_P2P_DISABLE=1", "peer-to-peer: asked up to SYS, in force SHM"),
        ({"NCCL_MIN_NCHANNELS": "32"}, "default", "channels: asked 32 at least, in force 24"),
        ({"NCCL_MAX_NCHANNELS": "4"}, "default", "channels: asked 4 at most, in force 24"),
        ({"NCCL_NVLS_ENABLE": "1"}, "default", "NCCL_NVLS_ENABLE: asked 1, in force 0"),
    ],
)
def test_what_nccl_did_otherwise_is_a_difference(env: dict[str, str], variant: str, says: str) -> None:
    assert any(str(difference).startswith(says) for difference in differences(env, read(variant)))


def test_rings_alone_contradict_a_tree_although_the_variable_was_read() -> None:
    """From 2.22 on NCCL connects an algorithm when it first uses it."""
    seen = Nccl("2.28.9", 24, 0, {"0->1": "P2P/CUMEM"}, {"NCCL_ALGO": "allreduce:tree"}, ("rings",))
    (difference,) = differences({"NCCL_ALGO": "allreduce:tree"}, seen)
    assert str(difference).startswith("NCCL_ALGO: asked allreduce:tree, in force rings; NCCL connected nothing")
    both = Nccl("2.20.5", 24, 0, {}, {"NCCL_ALGO": "allreduce:tree"}, ("rings", "trees"))
    assert differences({"NCCL_ALGO": "allreduce:tree"}, both) == (), "older releases connect both whatever they use"


def test_a_silent_nccl_contradicts_nothing() -> None:
    assert differences({"NCCL_ALGO": "Tree", "NCCL_P2P_DISABLE": "1"}, Nccl()) == ()


def test_two_ways_of_switching_peers_off_are_one_server_and_two_algorithms_are_two() -> None:
    def of(env: dict[str, str], seen: Nccl | None) -> str:
        return identity(candidate(env=env), FULL, seen)

    off = of({"NCCL_P2P_DISABLE": "1"}, read("NCCL_P2P_DISABLE=1"))
    assert off == of({"NCCL_P2P_LEVEL": "LOC"}, read("NCCL_P2P_LEVEL=LOC")) != ""
    assert off != of({"NCCL_P2P_LEVEL": "PIX"}, read("NCCL_P2P_LEVEL=PIX"))
    assert of({"NCCL_P2P_LEVEL": "PIX"}, read("NCCL_P2P_LEVEL=PIX")) == of(
        {"NCCL_P2P_LEVEL": "BOG"}, read("NCCL_P2P_LEVEL=BOG")
    )
    assert of({"NCCL_ALGO": "Ring"}, read("NCCL_ALGO=Ring")) != of({"NCCL_ALGO": "Tree"}, read("NCCL_ALGO=Tree"))
    assert of({"NCCL_P2P_LEVEL": "PIX"}, None) != of({"NCCL_P2P_LEVEL": "SYS"}, None), "a doubt keeps two apart"


@pytest.mark.parametrize(
    ("way", "kept"),
    [
        ("P2P/CUMEM/read", "P2P/CUMEM"),
        ("P2P/IPC", "P2P/IPC"),
        ("SHM/direct/direct", "SHM"),
        ("NET/IB/0/GDRDMA", "NET/IB/GDRDMA"),
        ("NET/Socket/0", "NET/Socket"),
        ("C2C", "C2C"),
    ],
)
def test_a_transport_is_kept_without_what_changes_from_run_to_run(way: str, kept: str) -> None:
    assert transport(way) == kept


def test_other_lines_say_nothing_of_nccl() -> None:
    for line in ("Init torch distributed begin.", "[2026-11-29] Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", ""):
        assert read_line(line) == ()


def test_what_nccl_said_survives_its_column() -> None:
    kept = Configuration(FULL, nccl=read("NCCL_PROTO=LL128"))
    assert '"version":"2.28.9"' in configuration_json(kept)
