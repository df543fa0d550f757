"""Another client as the load: its result arrives, its traps are said in words, and nothing of it is left."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S, comes_true

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.measurement import LevelSamples, Progress, figures
from autotuner.edge import foreign_load, leash, procfs
from autotuner.edge.foreign_load import ForeignLoad, load_for
from autotuner.edge.load import Load
from autotuner.errors import HostError

FAKE = Path(__file__).parents[2] / "fakes" / "fake_client.py"
CLIENTS = ("vllm", "sglang", "guidellm")


@pytest.fixture(autouse=True)
def own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FAKE_CLIENT_PID", str(tmp_path / "pid"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(foreign_load, "PROGRESS_S", 0.05)
    monkeypatch.setattr(foreign_load, "GRACE_S", 0.3)
    return tmp_path


def benchmark(client: str, mode: str, **more: Any) -> Benchmark:
    command = (sys.executable, str(FAKE), client, mode)
    given = {"levels": (2,), "seconds": 1.0, "prompt_tokens": 16, "output_tokens": 4, "client": client}
    return Benchmark.model_validate(given | {"client_command": command} | more)


def driven(client: str, mode: str, *, stop: bool = False, **more: Any) -> tuple[list[Any], str]:
    async def work() -> tuple[list[Any], str]:
        found = []
        async with ForeignLoad("http://127.0.0.1:9", benchmark(client, mode, **more), 2, "m") as load:
            async for message in load.messages():
                found.append(message)
                if stop and child_pid():
                    load.stop()
            return found, load.void

    return asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


def child_pid() -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path(os.environ["FAKE_CLIENT_PID"]).read_text())
    return 0


def gone(pid: int) -> bool:
    return comes_true(lambda: procfs.start_ticks(pid) is None)


@pytest.mark.parametrize("client", CLIENTS)
def test_the_result_of_each_client_comes_last_as_samples(client: str, own_places: Path) -> None:
    found, void = driven(client, "good")
    assert void == ""
    assert isinstance(found[-1], LevelSamples)
    assert all(isinstance(m, Progress) and m.phase == "warm-up" and m.events == 0 for m in found[:-1])
    measured = figures(found[-1])
    assert measured.output_tok_s == pytest.approx(2 * 4 / 0.25, rel=0.1)
    assert measured.ttft_ms["p50"] == pytest.approx(100, abs=1)
    assert not list(own_places.glob("autotuner-client-*"))


@pytest.mark.parametrize("client", CLIENTS)
def test_exit_code_0_of_a_client_whose_requests_all_failed_is_no_result(client: str) -> None:
    found, void = driven(client, "all-failed")
    assert "all 12 requests" in void
    assert figures(found[-1]).requests_failed == 12


def test_a_client_that_lacks_its_tokenizer_is_an_error_that_names_the_key() -> None:
    with pytest.raises(HostError, match=r"exit code 1 .*couldn't connect.*set tokenizer in the benchmark"):
        driven("vllm", "no-tokenizer")


def test_a_client_that_is_not_there_is_an_error_that_names_the_key() -> None:
    with pytest.raises(HostError, match=r"guidellm cannot be run: there is no program /no/such.*client_command"):
        driven("guidellm", "good", client_command=("/no/such",))


@pytest.mark.parametrize(("mode", "says"), [("nothing", "left no result"), ("half-file", "another form")])
def test_an_exit_code_0_without_a_whole_result_is_an_error(mode: str, says: str) -> None:
    with pytest.raises(HostError, match=says):
        driven("sglang", mode)


def test_a_level_stopped_early_has_no_figures_and_says_so_and_a_client_deaf_to_signals_is_killed() -> None:
    found, void = driven("sglang", "hangs", stop=True)
    assert found[-1].stopped_early
    assert found[-1].requests == ()
    assert void == "sglang.bench_serving was stopped early, and keeps nothing when it is stopped"
    assert gone(child_pid())


def test_a_client_that_does_not_end_is_ended_and_its_level_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotuner.bench.foreign.START_S", -3.0)  # so that the limit is one second
    found, void = driven("vllm", "hangs")
    assert "did not end within 1 s" in void
    assert found[-1].steady_from_s is None


def test_what_a_client_leaves_behind_is_killed_although_it_ended_well() -> None:
    found, void = driven("guidellm", "child")
    assert void == ""
    assert isinstance(found[-1], LevelSamples)
    assert gone(child_pid())


def test_no_client_is_left_when_the_block_ends() -> None:
    async def work() -> None:
        async with ForeignLoad("http://127.0.0.1:9", benchmark("sglang", "hangs"), 2, "m"):
            while not child_pid():
                await asyncio.sleep(0.02)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        asyncio.run(asyncio.wait_for(work(), PATIENCE_S))
    assert gone(child_pid())


def test_no_client_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    """kill -9 of the daemon: the leash notices, and clears up all the same."""
    words = leash.command(0.2, (sys.executable, str(FAKE), "sglang", "hangs"))
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, time; subprocess.Popen({words!r}); time.sleep(600)"]
    )
    assert comes_true(child_pid)
    leashed = [pid for pid in procfs.descendants(parent.pid) if pid != parent.pid]
    assert len(leashed) == 3  # the leash, the client, its child
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert all(gone(pid) for pid in leashed)


@pytest.mark.parametrize(
    ("code", "says"), [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_a_leash_passes_on_the_exit_code(code: str, says: int) -> None:
    ran = subprocess.run(leash.command(0.2, (sys.executable, "-c", code)), check=False, timeout=PATIENCE_S)
    assert ran.returncode == says


def test_a_leash_says_what_cannot_be_run() -> None:
    ran = subprocess.run(
        leash.command(0.2, ("/no/such",)), check=False, timeout=PATIENCE_S, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (127, "/no/such: No such file or directory\n")


def test_how_many_requests_are_done_is_told_where_the_client_tells_it() -> None:
    found, _ = driven("guidellm", "hangs", stop=True)
    assert (found[-2].done, found[-2].failed) == (3, 1)
    found, _ = driven("vllm", "hangs", stop=True)
    assert (found[-2].done, found[-2].failed) == (0, 0)


def test_the_benchmark_chooses_the_client() -> None:
    own = Benchmark(levels=(2,), seconds=1.0)
    assert isinstance(load_for("http://127.0.0.1:9", own, 2, None, longest_s=3.0, launch=0, cache=None), Load)
    other = benchmark("vllm", "good")
    assert isinstance(load_for("http://127.0.0.1:9", other, 2, None, longest_s=3.0, launch=0, cache=None), ForeignLoad)


def test_a_client_that_was_never_started_says_so() -> None:
    async def work() -> None:
        load = ForeignLoad("http://127.0.0.1:9", benchmark("vllm", "good"), 2, None)
        load.stop()
        async for _ in load.messages():
            pass

    with pytest.raises(HostError, match="was not started"):
        asyncio.run(work())
