"""A benchmark client that hangs costs its level a second try, and then the level is void; it never holds the slot."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from autotuner import measure, outcome, standalone
from autotuner.bench.benchmark import Benchmark
from autotuner.bench.measurement import LevelSamples, Progress
from autotuner.bench.samples import RequestSample
from autotuner.context import SlotContext
from autotuner.core import decide
from autotuner.core.candidate import Candidate, Launch
from autotuner.core.state import LaunchState, Purpose
from autotuner.edge.host import ServerSeen
from autotuner.edge.rows import LaunchRow
from autotuner.edge.store import Store
from autotuner.errors import HostError
from autotuner.settings import Settings
from autotuner.standalone import Standalone

AT = "2026-11-29 15:02:14Z"
MADE = Candidate(name="a", engine="command", launch=Launch(command=("serve",)))
SENTENCE = "the benchmark's client hung: it said nothing for 120 s, and was killed"


class Host:
    """A host on which the server lives; nothing listens where it is asked."""

    here, cuts, can_bench = False, 0, False

    async def inspect(self, launch_id: str) -> ServerSeen:
        return ServerSeen(launch_id, alive=True)

    async def read_log(self, launch_id: str, offset: int, limit: int = 1 << 20) -> bytes:
        return b""

    async def free_disk_mib(self) -> float:
        return 1e6

    async def reach(self, address: str, port: int) -> tuple[str, int]:
        return "127.0.0.1", 1


class Hung:
    """A load that hangs as often as is said, and then does its work."""

    left, begun = 0, 0

    def __init__(self, *_arguments: Any, **_more: Any) -> None:
        self.void, self.hung = "", False

    async def __aenter__(self) -> Self:
        Hung.begun += 1
        return self

    async def __aexit__(self, *_error: object) -> None:
        return None

    async def messages(self) -> Any:
        yield Progress(at_s=0.5, phase="steady", events=2, in_flight=1, done=1, failed=0)
        if Hung.left:
            Hung.left -= 1
            self.hung, self.void = True, SENTENCE
            yield LevelSamples(concurrency=1, stopped_early=True)
            return
        answered = tuple(RequestSample(sent_s=0.1, first_s=0.2, end_s=0.5, events=2, output_tokens=2) for _ in range(9))
        yield LevelSamples(concurrency=1, steady_from_s=0.0, steady_to_s=1.0, requests=answered, bins=(1,) * 10)

    def stop(self) -> None:
        """It does not matter."""

    finish = stop


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[SlotContext]:
    settings = Settings.model_validate({"state_dir": tmp_path, "slots": {"t": {"port": 8000}}})
    store = Store(tmp_path / "state.db")
    store.put_candidate(MADE, "", "x.toml")
    ctx = SlotContext("t", settings, (), store, host=Host())  # type: ignore[arg-type]
    trial = store.add_trial("t", MADE, ("quick", Benchmark(levels=(1,), seconds=1.0)), AT)
    outcome.begin_trial(ctx, trial)
    store.add_launch(
        LaunchRow(
            id="l1", slot="t", candidate_id=MADE.id, name="a", purpose=Purpose.TRIAL, trial_id=trial, state=LaunchState.SERVING,
            intended_at=AT, boot_id="b", mono_s=1.0, ready_s=None, gpu_used_mib={}, ended_at=None, exit_code=None,
            end_asked=False, diagnosis=None,
        )
    )  # fmt: skip
    yield ctx
    store.close()


@pytest.mark.parametrize(("times", "begun", "void"), [(0, 1, False), (1, 2, False), (2, 2, True)])
def test_a_level_whose_client_hangs_is_begun_once_more_and_then_void(
    ctx: SlotContext, monkeypatch: pytest.MonkeyPatch, times: int, begun: int, void: bool
) -> None:
    monkeypatch.setattr(measure, "load_for", Hung)
    Hung.left, Hung.begun = times, 0
    asyncio.run(measure.run_level(ctx, decide.RunLevel(1, "l1", 1)))
    assert Hung.begun == begun
    (result,) = ctx.store.results(1)
    assert (result.figures.void == SENTENCE) is void


@pytest.mark.parametrize(("times", "failure"), [(1, ""), (2, SENTENCE)])
def test_so_it_is_without_a_daemon(monkeypatch: pytest.MonkeyPatch, times: int, failure: str) -> None:
    monkeypatch.setattr(standalone, "Load", Hung)
    Hung.left = times
    run = Standalone("http://far.invalid:1", Benchmark(levels=(1,), seconds=1.0), None, lambda *_: None)
    asyncio.run(run.run())
    assert len(run.measured) == (not failure)
    assert str(run.failure or "") == failure
    assert run.failure is None or isinstance(run.failure, HostError)
