"""A wrong flag is found before a slot is taken, with the nearest right one; a bad moment of the host is not remembered."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from unit.core.test_topology import PCIE

from autotuner.core.candidate import Candidate, Launch
from autotuner.core.topology import QUERY
from autotuner.edge import gpu
from autotuner.edge.helpcache import HelpCache
from autotuner.edge.host import GpuUse, PortHolder, Ran
from autotuner.edge.host_nodes import Member, NodesHost
from autotuner.engines.flags import Findings
from autotuner.errors import HostError
from autotuner.preflight import Preflight, place_warnings, slot_problems
from autotuner.settings import Slot

HELP = "usage: server\n  --ctx-size N, -c N   context\n  --flash-attn [on|off]\n  --port PORT\n  --model FILE\n"


class Host:
    here = True

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


# --- answers kept on disk


class Sglang(Host):
    """A host with an SGLang whose version and help can be changed under it."""

    def __init__(self, version: str = "0.5.12", help_text: str = HELP) -> None:
        super().__init__()
        self.version, self.help_text = version, help_text

    async def run(self, argv: tuple[str, ...], timeout_s: float) -> Ran:
        self.asked.append(argv)
        if argv[:2] == gpu.NVLINK_QUERY[:2]:
            return Ran(0, "GPU 0: NVIDIA H200\n\t Link 0: 26.562 GB/s\n")
        return Ran(0, self.help_text) if argv[-1] == "--help" else Ran(0, f"a warning\n{self.version}\n")

    @property
    def helps(self) -> int:
        return sum(argv[-1] == "--help" for argv in self.asked)


def sglang(env: dict[str, str] | None = None, **args: Any) -> Candidate:
    launch = Launch(model="/m", python=sys.executable, args=args, env=env or {})
    return Candidate(name="s", engine="sglang", launch=launch)


def check(host: Host, folder: Path | None, which: Candidate, **more: Any) -> Findings:
    """One command: nothing is left of it in memory."""
    return asyncio.run(Preflight(host, HelpCache(folder)).check(which, **more))  # type: ignore[arg-type]


def test_the_second_command_does_not_ask_the_program_again(tmp_path: Path) -> None:
    host = Sglang()
    first = check(host, tmp_path, sglang(port=1, **{"ctx-sise": 1}))
    assert (host.helps, check(host, tmp_path, sglang(port=1, **{"ctx-sise": 1}))) == (1, first)
    assert host.helps == 1
    assert any("sglang 0.5.12 has no flag --ctx-sise" in problem for problem in first.problems)


def test_another_version_is_asked_again(tmp_path: Path) -> None:
    host = Sglang()
    check(host, tmp_path, sglang())
    host.version, host.help_text = "0.5.15", HELP.replace("--ctx-size", "--context-length")
    assert check(host, tmp_path, sglang(**{"context-length": 1})).problems == ()
    assert host.helps == 2


def test_a_broken_cache_is_asked_again_and_mended(tmp_path: Path) -> None:
    host = Sglang()
    check(host, tmp_path, sglang())
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    for _ in range(2):
        assert check(host, tmp_path, sglang()).problems == ()
    assert host.helps == 2


def test_without_a_version_nothing_is_kept_for_an_upgrade_would_go_unnoticed(tmp_path: Path) -> None:
    host = Sglang(version="no such distribution")
    for _ in range(2):
        check(host, tmp_path, sglang())
    assert host.helps == 2


def test_a_failed_help_is_never_kept(tmp_path: Path) -> None:
    host = Sglang()
    host.help_text = ""

    async def fails(argv: tuple[str, ...], timeout_s: float) -> Ran:
        return Ran(1, "ImportError: libcuda") if argv[-1] == "--help" else Ran(0, "0.5.12")

    host.run = fails  # type: ignore[method-assign]
    assert "libcuda" in check(host, tmp_path, sglang()).problems[0]
    assert not list(tmp_path.iterdir())


def test_a_program_that_is_not_installed_is_a_warning_where_only_files_are_checked(tmp_path: Path) -> None:
    host = Sglang(version="")
    found = check(host, tmp_path, sglang(**{"cuda-graph-max-bs": 4}), strict=False)
    assert host.helps == 0
    assert found.problems == ()
    assert "sglang is not installed" in found.warnings[-1]
    assert "cuda-graph-max-bs-decode" in found.warnings[0]
    missing = candidate()
    assert "there is no /bin/llama-server" in check(Host(), tmp_path, missing, strict=False).warnings[-1]


def test_what_an_engine_says_of_a_flag_is_said_once() -> None:
    found = check(Sglang(), None, sglang(**{"speculative-num-steps": 3}))
    assert [p for p in found.problems if "speculative-num-steps" in p] == list(found.problems)
    assert len(found.problems) == 1


def test_contradictions_environment_and_nvlink_come_together() -> None:
    host = Sglang(help_text=HELP + "  --tp-size N  x\n  --speculative-algorithm A  x\n")
    env = {"NCCL_ALGO": "Ring", "SGLANG_IS_IN_CI": "1"}
    found = check(host, None, sglang(env, **{"tp-size": 8, "speculative-algorithm": "NGRAM"}))
    assert [p.split(":")[0] for p in found.problems] == ["env.SGLANG_IS_IN_CI"]
    assert any("48 requests" in warning for warning in found.warnings)
    assert any("over NVLink" in warning for warning in found.warnings)


def test_how_the_gpus_are_joined_is_asked_once_and_only_where_nccl_is_varied() -> None:
    class Pcie(Sglang):
        async def run(self, argv: tuple[str, ...], timeout_s: float) -> Ran:
            said = await super().run(argv, timeout_s)
            return Ran(0, PCIE) if argv == QUERY else said

    host = Pcie(help_text=HELP + "  --tp-size N  x\n")
    preflight = Preflight(host)  # type: ignore[arg-type]
    plain = asyncio.run(preflight.check(sglang(**{"tp-size": 4})))
    assert plain.problems == ()
    assert QUERY not in host.asked
    for _ in range(2):
        found = asyncio.run(preflight.check(sglang({"NCCL_PROTO": "LL128"}, **{"tp-size": 4})))
        assert "LL128 is made for NVLink" in found.problems[0]
    near = asyncio.run(preflight.check(sglang({"NCCL_P2P_LEVEL": "SYS"}, **{"tp-size": 2}), gpus=(0, 1)))
    assert any("farther apart than PIX" in warning for warning in near.warnings)
    assert host.asked.count(QUERY) == 1


@pytest.mark.parametrize(
    ("status", "joined"),
    [
        ("GPU 0: NVIDIA H200\n\t Link 0: 26.562 GB/s\n", True),
        ("GPU 0: NVIDIA L40S\n", False),
        ("GPU 0: NVIDIA A100\n\t Link 0: <inactive>\n", False),
        ("", False),
    ],
)
def test_a_link_that_is_up_joins_the_gpus(status: str, joined: bool) -> None:
    assert gpu.has_nvlink(status) is joined


# --- who holds the slot


class Held:
    """A host whose port and GPUs are held."""

    def __init__(self, port: PortHolder | None = None, processes: tuple[tuple[int, str, float], ...] = ()) -> None:
        self.port, self.processes = port, processes

    async def port_holder(self, port: int) -> PortHolder | None:
        return self.port

    async def gpus(self, indices: tuple[int, ...]) -> tuple[GpuUse, ...]:
        return tuple(GpuUse(index, 1.0, 2.0, self.processes) for index in indices)

    async def launch_of(self, pid: int) -> str | None:
        return {10: "mine", 11: "foreign"}.get(pid)


def held(host: Any, ours: set[str] | None) -> tuple[str, ...]:
    return asyncio.run(place_warnings(host, Slot(port=8000, gpus=(0,)), ours))


def test_a_stranger_on_the_slots_port_or_gpus_is_named() -> None:
    port, use = held(Held(PortHolder(7, "nginx", None), ((12, "python3", 900.0),)), {"mine"})
    assert "port 8000 of the slot is held by pid 7 (nginx)" in port
    assert "GPU 0 of the slot is used by pid 12 (python3, 900 MiB)" in use


@pytest.mark.parametrize("ours", [{"mine"}, None])
def test_our_own_server_there_is_fine(ours: set[str] | None) -> None:
    assert held(Held(PortHolder(10, "python3", "mine"), ((10, "python3", 900.0),)), ours) == ()
    assert held(Held(), ours) == ()


def test_a_server_of_another_state_folder_is_a_stranger() -> None:
    port, _ = held(Held(PortHolder(11, "python3", "foreign"), ((11, "python3", 900.0),)), {"mine"})
    assert "pid 11 (python3, launch foreign of another state folder)" in port


def test_a_hidden_process_is_taken_for_ours_only_while_a_server_of_ours_is_up() -> None:
    hidden = Held(PortHolder(None, "a process of another user", None))
    assert held(hidden, {"mine"}) == ()
    assert held(hidden, None) == ()
    assert "a process of another user" in held(hidden, set())[0]


def test_a_host_that_does_not_answer_is_said_and_refuses_nothing() -> None:
    class Mute(Held):
        async def gpus(self, indices: tuple[int, ...]) -> tuple[GpuUse, ...]:
            raise HostError("nvidia-smi did not end within 30 s")

    assert "nvidia-smi did not end" in held(Mute(), None)[0]


NODES = Slot(port=30000, nodes=[{"host": "gpu1", "gpus": [0, 1]}, {"host": "gpu2", "gpus": [0]}])


def spread(**args: Any) -> Candidate:
    return Candidate(name="a", engine="sglang", launch=Launch(model="/m", python="/py", args=args))


def test_a_server_over_nodes_must_fit_each_of_them() -> None:
    assert slot_problems(spread(tp=2), NODES) == ()
    assert slot_problems(spread(tp=4), NODES) == ("it asks for 2 GPUs on each node, node gpu2 has 1",)
    assert "do not divide by 2 nodes" in slot_problems(spread(tp=3), NODES)[0]
    assert "args.nnodes" in slot_problems(spread(tp=2, nnodes=2), NODES)[0]
    assert slot_problems(candidate(), NODES) == ("llama.cpp serves from one node; take a slot on one host for it",)
    visible = spread(tp=2).model_copy(
        update={"launch": Launch(model="/m", args={"tp": 2}, env={"CUDA_VISIBLE_DEVICES": "0"})}
    )
    assert "0,1 on gpu1; 0 on gpu2" in slot_problems(visible, NODES)[0]


def test_a_node_with_another_release_is_named() -> None:
    class Node(Host):
        here = False

        def __init__(self, version: str) -> None:
            super().__init__()
            self.version = version

        async def run(self, argv: tuple[str, ...], timeout_s: float) -> Ran:
            return Ran(0, "  --tp N  ranks\n  --port P  port\n" if "--help" in argv else self.version)

    def found(first: str, second: str) -> str:
        members = [Member("gpu1", Node(first)), Member("gpu2", Node(second))]  # type: ignore[arg-type]
        return "\n".join(asyncio.run(Preflight(NodesHost(members, 1.0)).check(spread(tp=2))).problems)

    assert found("0.5.12", "0.5.12") == ""
    assert "rank 1 would be sglang 0.5.10 on gpu2, and rank 0 is 0.5.12" in found("0.5.12", "0.5.10")


def test_strangers_on_any_node_are_said_with_it() -> None:
    class Node(Host):
        def __init__(self, holder: PortHolder | None) -> None:
            super().__init__()
            self.holder = holder

        async def port_holder(self, port: int) -> PortHolder | None:
            return self.holder

        async def gpus(self, indices: tuple[int, ...]) -> tuple[GpuUse, ...]:
            return ()

    members = [Member("gpu1", Node(PortHolder(5, "x", "abc"))), Member("gpu2", Node(PortHolder(6, "y", None)))]  # type: ignore[arg-type]
    said = asyncio.run(place_warnings(NodesHost(members, 1.0), NODES, {"abc"}))
    assert said == (
        "port 30000 of the slot is held by pid 6 (y): nothing can be launched until it is free (node gpu2)",
    )
    members[1] = Member("gpu2", Node(PortHolder(6, "y", "abc.1")))  # type: ignore[arg-type]
    assert asyncio.run(place_warnings(NodesHost(members, 1.0), NODES, {"abc"})) == ()
