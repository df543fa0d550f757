"""A wrong flag is found before a slot is taken, with the nearest right one; a bad moment of the host is not remembered."""

import asyncio
from typing import Any

import pytest

from autotuner.core.candidate import Candidate, Launch
from autotuner.edge.host import Ran
from autotuner.errors import HostError
from autotuner.preflight import Preflight, slot_problems
from autotuner.settings import Slot

HELP = "usage: server\n  --ctx-size N, -c N   context\n  --flash-attn [on|off]\n  --port PORT\n  --model FILE\n"


class Host:
    def __init__(self, *answers: Ran | HostError) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, ...]] = []

    async def run(self, argv: tuple[str, ...], timeout_s: float) -> Ran:
        self.asked.append(argv)
        answer = self.answers.pop(0)
        if isinstance(answer, HostError):
            raise answer
        return answer


def candidate(**args: Any) -> Candidate:
    return Candidate(name="a", engine="llamacpp", launch=Launch(model="/m.gguf", binary="/bin/llama-server", args=args))


def problems(preflight: Preflight, **args: Any) -> str:
    return "\n".join(asyncio.run(preflight.check(candidate(**args))).problems)


def test_a_flag_that_the_program_knows_is_fine_in_any_spelling() -> None:
    preflight = Preflight(Host(Ran(0, HELP)))  # type: ignore[arg-type]
    assert problems(preflight, **{"ctx-size": 1, "-c": 2, "flash_attn": "on"}) == ""


def test_a_flag_that_it_does_not_know_is_named_with_the_nearest() -> None:
    preflight = Preflight(Host(Ran(0, HELP)))  # type: ignore[arg-type]
    found = problems(preflight, **{"ctx-sise": 1})
    assert "args.ctx-sise" in found
    assert "--ctx-size" in found


def test_a_program_is_asked_once() -> None:
    host = Host(Ran(0, HELP))
    preflight = Preflight(host)  # type: ignore[arg-type]
    for _ in range(3):
        problems(preflight)
    assert len(host.asked) == 1


@pytest.mark.parametrize("bad", [HostError("it did not end"), Ran(1, "Traceback\nImportError: libcuda"), Ran(2, "")])
def test_a_bad_moment_is_a_problem_now_and_forgotten_then(bad: Ran | HostError) -> None:
    preflight = Preflight(Host(bad, Ran(0, HELP)))  # type: ignore[arg-type]
    found = problems(preflight)
    assert any(said in found for said in ("it did not end", "ImportError: libcuda", "no output"))
    assert problems(preflight) == ""


@pytest.mark.parametrize(
    ("args", "env", "says"),
    [
        ({"tp-size": 8}, {}, "asks for 8 GPUs"),
        ({"tensor_parallel_size": 2, "pp": 2}, {}, "asks for 4 GPUs"),
        ({}, {"CUDA_VISIBLE_DEVICES": "4,5"}, "the slot's GPUs are 0,1"),
        ({"tp-size": 2}, {}, ""),
        ({}, {}, ""),
    ],
)
def test_gpus_that_are_not_the_slots_are_refused(args: dict[str, int], env: dict[str, str], says: str) -> None:
    candidate = Candidate(name="x", engine="sglang", launch=Launch(model="/m", args=args, env=env))
    found = slot_problems(candidate, Slot(port=8000, gpus=(0, 1)))
    assert says in "; ".join(found)
    assert bool(found) == bool(says)
    assert not slot_problems(candidate, Slot(port=8000)), "a slot that names no GPUs says nothing about them"
