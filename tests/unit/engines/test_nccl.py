"""A variant of NCCL's variables that cannot work, contradicts itself, or changes nothing costs no launch."""

from typing import Any

import pytest
from unit.core.test_topology import PCIE, RECORDED

from autotuner.core.candidate import Candidate, Launch, parse_candidates
from autotuner.core.source import Source
from autotuner.core.topology import parse
from autotuner.engines.base import Diagnosis
from autotuner.engines.nccl import SETTINGS, WATCHING, blame, check, corrupting, unchecked, wants_topology, watching
from autotuner.engines.variables import KNOWN


def candidate(env: dict[str, str], engine: Any = "sglang", **args: Any) -> Candidate:
    args = {"tp-size": 4, **{key.replace("_", "-"): value for key, value in args.items()}}
    if engine == "command":
        return Candidate(name="x", engine=engine, launch=Launch(command=("serve", "{port}"), env=env))
    return Candidate(name="x", engine=engine, launch=Launch(model="/m", args=args, env=env))


def problems(env: dict[str, str], topology: str = "", **more: Any) -> str:
    return "\n".join(check(candidate(env, **more), parse(topology)).problems)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"NCCL_ALGO": "Rign"}, "did you mean Ring?"),
        ({"NCCL_ALGO": "allreduce:tree,colnet"}, "NCCL knows no 'colnet'"),
        ({"NCCL_ALGO": "allreduse:tree"}, "did you mean AllReduce?"),
        ({"NCCL_ALGO": "allreduce:tree;ring"}, "every entry but the first needs a function"),
        ({"NCCL_ALGO": ""}, "NCCL knows no ''"),
        ({"NCCL_PROTO": "LL64"}, "did you mean LL"),
        ({"NCCL_P2P_LEVEL": "PIXX"}, "NCCL ignores it without a word: did you mean PIX?"),
        ({"NCCL_P2P_DISABLE": "yes"}, "is no value of it"),
        ({"NCCL_NTHREADS": "300"}, "is no value of it"),
        ({"NCCL_MIN_NCHANNELS": "many"}, "is no whole number"),
        ({"NCCL_P2P_LEVEL": "SYS", "NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE = 1 switches off what it would allow"),
        ({"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "4"}, "is more than env.NCCL_MAX_NCHANNELS = 4"),
        ({"NCCL_ALGO": "PAT"}, "none of these carries an all-reduce at all"),
        ({"NCCL_ALGO": "NVLSTree,CollnetChain"}, "none of these carries an all-reduce on one node"),
        ({"NCCL_ALGO": "allreduce:nvls"}, "set args.enable-nccl-nvls = true"),
        ({"NCCL_ALGO": "NVLS", "NCCL_NVLS_ENABLE": "0"}, "NVLink SHARP is switched off"),
    ],
)
def test_what_nccl_would_refuse_ignore_or_contradict_is_refused_with_the_reason(env: dict[str, str], says: str) -> None:
    assert says in problems(env)


@pytest.mark.parametrize(
    "env",
    [
        {"NCCL_ALGO": "Ring"},
        {"NCCL_ALGO": "ring,Tree"},
        {"NCCL_ALGO": "allreduce:tree"},
        {"NCCL_ALGO": "allreduce:tree;broadcast:ring"},
        {"NCCL_ALGO": "^NVLS"},
        {"NCCL_PROTO": "^LL128"},
        {"NCCL_PROTO": "Simple"},
        {"NCCL_P2P_LEVEL": "phb"},
        {"NCCL_P2P_LEVEL": "3"},
        {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "LOC"},
        {"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"},
        {"NCCL_MIN_NCHANNELS": "4", "NCCL_MAX_NCHANNELS": "4"},
        {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0"},
    ],
)
def test_what_nccl_takes_is_let_through(env: dict[str, str]) -> None:
    assert check(candidate(env)).problems == ()
    assert check(candidate(env)).warnings == ()


def test_on_one_gpu_there_is_nothing_to_communicate() -> None:
    said = problems({"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}, tp_size=1)
    assert said.startswith("env.NCCL_ALGO, env.NCCL_PROTO: no effect on one GPU")
    assert problems({"NCCL_ALGO": "Ring"}, tp_size=1, pp_size=2) == ""
    assert problems({"NCCL_ALGO": "Ring"}, engine="command") == "", "nobody knows what a command does with its GPUs"
    assert not wants_topology(candidate({"NCCL_ALGO": "Ring"}, tp_size=1))
    assert wants_topology(candidate({"NCCL_ALGO": "Ring"}))
    assert not wants_topology(candidate({"NCCL_DEBUG": "INFO"}))


def test_several_nodes_have_more_algorithms() -> None:
    assert problems({"NCCL_ALGO": "NVLSTree,Ring"}, nnodes=2) == problems({"NCCL_ALGO": "NVLSTree,Ring"}) == ""
    assert "on one node" not in problems({"NCCL_ALGO": "allreduce:collnetchain"}, nnodes=2)


def test_an_algorithm_that_leaves_nothing_for_other_collectives_is_said_with_what_to_write() -> None:
    (said,) = check(candidate({"NCCL_ALGO": "Tree"})).warnings
    assert "it leaves nothing for AllGather and Broadcast" in said
    assert "write allreduce:tree, or add Ring" in said


def test_what_a_pcie_host_cannot_do_is_refused() -> None:
    assert "can corrupt answers here: LL128 is made for NVLink" in problems({"NCCL_PROTO": "LL128"}, PCIE)
    assert problems({"NCCL_PROTO": "LL128"}, RECORDED) == ""
    nvls = {"NCCL_ALGO": "allreduce:nvls", "NCCL_NVLS_ENABLE": "1"}
    assert "needs an NVSwitch" in problems(nvls, PCIE)
    assert problems(nvls, RECORDED) == ""


@pytest.mark.parametrize(
    ("level", "topology", "says"),
    [
        ("NVL", PCIE, "it is the same as NCCL_P2P_DISABLE = 1"),
        ("LOC", RECORDED, "it is the same as NCCL_P2P_DISABLE = 1"),
        ("SYS", RECORDED, "it allows what is done anyway"),
        ("PHB", PCIE, ""),
        ("SYS", PCIE, ""),
    ],
)
def test_a_level_that_comes_to_another_one_on_this_host_is_named(level: str, topology: str, says: str) -> None:
    said = "\n".join(check(candidate({"NCCL_P2P_LEVEL": level}), parse(topology)).warnings)
    assert says in said
    assert bool(said) == bool(says)


def test_only_the_slots_own_gpus_count() -> None:
    near = check(candidate({"NCCL_P2P_LEVEL": "SYS"}, tp_size=2), parse(PCIE), (0, 1))
    assert "no two of these GPUs are farther apart than PIX" in near.warnings[0]


@pytest.mark.parametrize(
    ("value", "risky"),
    [("LL128", True), ("LL,LL128", True), ("allreduce:ll128", True), ("^LL", False), ("^LL128", False), ("LL", False),
     ("Simple;allreduce:LL128", True)],
)  # fmt: skip
def test_forced_ll128_is_known_to_be_able_to_corrupt(value: str, risky: bool) -> None:
    assert bool(corrupting({"NCCL_PROTO": value})) is risky


def test_what_can_corrupt_answers_needs_the_answer_check_of_the_objective() -> None:
    made = candidate({"NCCL_PROTO": "LL128"})
    (said,) = unchecked(made, 0.0)
    assert "set constraints.answers_agree_min" in said
    assert unchecked(made, 0.25) == ()
    assert unchecked(candidate({"NCCL_PROTO": "LL"}), 0.0) == ()
    assert "never promoted without" in check(made).warnings[0]


def test_nccl_is_made_to_talk_only_where_it_is_varied_and_nobody_said_how() -> None:
    assert watching(candidate({"NCCL_ALGO": "Ring"})) == WATCHING
    assert "TUNING" not in WATCHING["NCCL_DEBUG_SUBSYS"], "it would print a line for each collective of a prefill"
    assert watching(candidate({"NCCL_ALGO": "Ring", "NCCL_DEBUG": "WARN"})) == {}
    assert watching(candidate({"NCCL_ALGO": "Ring"}, tp_size=1)) == {}
    assert watching(candidate({"NCCL_SOCKET_IFNAME": "eth0"})) == {}


STARTS = "vm:1:1 [0] NCCL INFO ncclCommInitRankConfig comm 0x1 rank 0 nranks 2 - Init START"
FORMED = STARTS.replace("START", "COMPLETE")
TIMEOUT = "[rank0]:[E] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE)"
WARNED = "[2026] vm:1:1 [0] enqueue.cc:1859 NCCL WARN Error : no algorithm/protocol available for function AllReduce."


@pytest.mark.parametrize(
    ("lines", "hangs", "says"),
    [
        ((STARTS,), False, "NCCL's ranks began to connect and never did, and this candidate sets NCCL_ALGO = Tree"),
        ((STARTS, FORMED, TIMEOUT), False, "a collective operation of NCCL timed out, and this candidate sets"),
        (
            (STARTS, FORMED, WARNED),
            False,
            "NCCL warns: Error : no algorithm/protocol available for function AllReduce, and",
        ),
        ((STARTS, FORMED), True, "its log does not say why, but this candidate sets NCCL_ALGO = Tree"),
        ((STARTS, FORMED), False, ""),
        ((), False, ""),
    ],
)
def test_nccl_is_named_where_the_candidate_varies_it_and_the_log_points_there(
    lines: tuple[str, ...], hangs: bool, says: str
) -> None:
    plain = Diagnosis("silent-stage", "the start hangs", "read its log")
    found = blame(plain, candidate({"NCCL_ALGO": "Tree"}), lines, hangs=hangs)
    assert says in found.sentence
    assert (found == plain) == (not says)
    assert blame(plain, candidate({}), lines, hangs=hangs) == plain
    if says:
        assert found.advice == "try it without NCCL_ALGO first; read its log"


def test_a_sweep_names_its_variants_apart_even_where_only_a_sign_differs() -> None:
    text = 'name = "n"\nengine = "sglang"\n[launch]\nmodel = "/m"\n[sweep]\n"env.NCCL_PROTO" = ["LL", "LL128", "^LL128", "^LL"]\n'
    found = parse_candidates(Source("c.toml", text))
    assert [c.name for c in found] == [
        "n+NCCL-PROTO-LL",
        "n+NCCL-PROTO-LL128",
        "n+NCCL-PROTO-not-LL128",
        "n+NCCL-PROTO-not-LL",
    ]
    long = text.replace('["LL", "LL128", "^LL128", "^LL"]', str(["x" * 130, "x" * 131]).replace("'", '"'))
    names = [c.name for c in parse_candidates(Source("c.toml", long))]
    assert len(set(names)) == 2
    assert all(len(name) <= 120 for name in names)


def test_every_setting_is_a_known_variable_and_says_what_it_does() -> None:
    assert set(SETTINGS) <= KNOWN
    assert all(row.does for row in SETTINGS.values())
