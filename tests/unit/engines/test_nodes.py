"""One server over several nodes: each rank gets its flags, what a candidate must leave to us is refused, and a rank is blamed."""

from typing import Any

import pytest

from autotuner.core.candidate import Candidate, Launch
from autotuner.engines import engine_for
from autotuner.engines.base import Diagnosis, Place, Rank
from autotuner.engines.diagnosis import of_ranks

PLACE = Place("127.0.0.1", 30000)
MEET = Place("10.0.0.7", 31000)


def candidate(engine: str, args: dict[str, Any] | None = None, **launch: Any) -> Candidate:
    made = Launch(model="/models/m", args=args or {}, **launch)
    return Candidate(name="c", engine=engine, launch=made)  # type: ignore[arg-type]


def added(engine: str, number: int, args: dict[str, Any] | None = None, meet: Place = MEET) -> list[str]:
    """What a rank is told besides what the whole server would be."""
    asked = candidate(engine, args)
    alone = engine_for(engine).argv(asked, PLACE)
    ranked = engine_for(engine).argv(asked, PLACE, Rank(number, 2, meet))
    assert ranked[: len(alone)] == alone
    return list(ranked[len(alone) :])


def test_sglang_is_told_where_the_ranks_meet_and_which_it_is() -> None:
    for number in (0, 1):
        told = ["--dist-init-addr", "10.0.0.7:31000", "--nnodes", "2", "--node-rank", str(number)]
        assert added("sglang", number) == told
    assert added("sglang", 0, meet=Place("fd00::7", 31000))[1] == "[fd00::7]:31000"


def test_vllm_is_headless_on_every_node_but_the_first() -> None:
    common = ["--nnodes", "2", "--node-rank", "{}", "--master-addr", "10.0.0.7", "--master-port", "31000"]
    assert added("vllm", 0) == [word.format(0) for word in common]
    assert added("vllm", 1) == [*(word.format(1) for word in common), "--headless"]
    assert added("vllm", 1, {"api-server-count": 4})[-2:] == ["--api-server-count", "0"]  # the last one counts


def test_a_command_asks_for_its_rank() -> None:
    words = ("serve", "--rank={rank}/{nodes}", "--meet", "{dist_host}:{dist_port}", "--port", "{port}")
    asked = Candidate(name="c", engine="command", launch=Launch(command=words))
    argv = engine_for("command").argv(asked, PLACE, Rank(1, 2, MEET))
    assert argv == ("serve", "--rank=1/2", "--meet", "10.0.0.7:31000", "--port", "30000")
    assert engine_for("command").check_nodes(asked, 2) == ()
    without = Candidate(name="c", engine="command", launch=Launch(command=("serve", "--port", "{port}")))
    assert "{rank}" in engine_for("command").check_nodes(without, 2)[0]


@pytest.mark.parametrize(
    ("engine", "args", "said"),
    [
        ("sglang", {"tp": 4, "nnodes": 2}, "args.nnodes is not the candidate's"),
        ("sglang", {"tp": 4, "node_rank": 0}, "args.node-rank is not the candidate's"),
        ("sglang", {"tp": 4, "--dist-init-addr": "h:1"}, "args.dist-init-addr is not the candidate's"),
        ("sglang", {"tp": 4, "nccl-init-addr": "h:1"}, "args.nccl-init-addr is not the candidate's"),
        ("sglang", {"tp": 3}, "3 GPU ranks"),
        ("sglang", {}, "1 GPU ranks"),
        ("sglang", {"tp": 4, "dp": 2}, "enable-dp-attention"),
        ("vllm", {"tensor-parallel-size": 4, "headless": True}, "args.headless is not the candidate's"),
        ("vllm", {"tensor-parallel-size": 4, "master-addr": "h"}, "args.master-addr is not the candidate's"),
        ("vllm", {"tensor-parallel-size": 4, "-n": 2}, "args.n is not the candidate's"),
        ("vllm", {"tensor-parallel-size": 4, "distributed-executor-backend": "ray"}, "Ray cluster"),
        ("vllm", {"tensor-parallel-size": 4, "data-parallel-hybrid-lb": True}, "rank 0 alone answers"),
        ("llamacpp", {}, "serves from one node"),
    ],
)
def test_what_is_not_the_candidates_to_say_is_refused(engine: str, args: dict[str, Any], said: str) -> None:
    assert said in "\n".join(engine_for(engine).check_nodes(candidate(engine, args), 2))


@pytest.mark.parametrize(
    ("engine", "args"),
    [
        ("sglang", {"tp-size": 16}),
        ("sglang", {"tp": 8, "pp-size": 2}),
        ("sglang", {"tp": 16, "dp": 16, "enable-dp-attention": True}),
        ("vllm", {"tensor-parallel-size": 8, "pipeline-parallel-size": 2}),
        ("vllm", {"tensor-parallel-size": 4, "data-parallel-size": 2, "distributed-executor-backend": "mp"}),
    ],
)
def test_what_divides_by_the_nodes_may_run(engine: str, args: dict[str, Any]) -> None:
    assert engine_for(engine).check_nodes(candidate(engine, args), 2) == ()


def said(cause: str, sentence: str = "it died") -> Diagnosis:
    return Diagnosis(cause, sentence)


@pytest.mark.parametrize(
    ("causes", "first", "blamed"),
    [
        (["oom-in-load", "unknown"], 0, 0),
        (["rendezvous-timeout", "oom-in-load"], 0, 1),  # who waited ended first; who never came says why
        (["unknown", "unknown"], 1, 1),
        (["rendezvous-timeout", "unknown"], 1, 1),
        (["unknown", "rendezvous-timeout"], None, 1),
        (["oom-in-load", "gpu-fault"], 1, 1),
        (["unknown", "unknown"], None, 0),
    ],
)
def test_the_rank_whose_own_failure_it_was_is_named(causes: list[str], first: int | None, blamed: int) -> None:
    found = of_ranks([(f"gpu{n + 1}", said(cause)) for n, cause in enumerate(causes)], first)
    assert found.cause == causes[blamed]
    assert found.sentence == f"rank {blamed} on gpu{blamed + 1}: it died"
