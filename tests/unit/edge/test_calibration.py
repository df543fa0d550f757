"""What the client can take on this host is measured once, kept, and never stands in a benchmark's way."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S

from autotuner.bench import worker
from autotuner.bench.measurement import LevelSamples
from autotuner.edge import calibration
from autotuner.edge.calibration import capacity_tok_s


def measured(monkeypatch: pytest.MonkeyPatch, *answers: float | None) -> list[float | None]:
    """Have measuring give these answers in turn; what is left was not asked for."""
    left = list(answers)

    async def measure(_cores: str | None) -> float | None:
        answer = left.pop(0)
        if answer == -1.0:
            raise RuntimeError("it ended early")
        return answer

    monkeypatch.setattr(calibration, "_measure", measure)
    return left


def capacity(cache: Path | None) -> float | None:
    return asyncio.run(capacity_tok_s(cache))


def test_it_is_measured_once_and_then_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, 200_000.0)
    assert [capacity(tmp_path / "new") for _ in range(3)] == [200_000.0] * 3


def test_without_a_cache_it_is_measured_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, 1.0, 2.0)
    assert (capacity(None), capacity(None)) == (1.0, 2.0)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"capacity_tok_s": "many"}', '{"capacity_tok_s": 0}', '{"capacity_tok_s": null}']
)
def test_a_cache_that_says_nothing_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / f"client-{calibration._key()}.json").write_text(text)
    measured(monkeypatch, 7.0)
    assert (capacity(tmp_path), capacity(tmp_path)) == (7.0, 7.0)


@pytest.mark.parametrize("answer", [None, -1.0])
def test_what_cannot_be_measured_is_not_known_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: float | None
) -> None:
    measured(monkeypatch, answer, 5.0)
    assert (capacity(tmp_path), capacity(tmp_path)) == (None, 5.0)


def test_a_cache_that_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    measured(monkeypatch, 5.0, 6.0)
    assert (capacity(tmp_path / "file" / "x"), capacity(tmp_path / "file" / "x")) == (5.0, 6.0)


def test_another_host_python_or_release_is_measured_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    here = calibration._key()
    assert here == calibration._key()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "version", "3.99")
        assert calibration._key() != here
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "_processor", lambda: "model name: abacus")
        assert calibration._key() != here
    assert len({calibration._key(cores) for cores in ("auto", "off", "4-7", None)}) == 4, "cores need not be alike"


def test_capacity_is_what_a_whole_core_would_take() -> None:
    fields: dict[str, Any] = {"concurrency": 64, "steady_from_s": 1.0, "steady_to_s": 3.0, "bins": (10_000, 30_000)}
    assert calibration._capacity(LevelSamples(**fields, cpu_ratio=0.1)) == 200_000
    assert calibration._capacity(LevelSamples(**fields)) is None
    assert calibration._capacity(LevelSamples(concurrency=1, cpu_ratio=0.5)) is None


def test_a_worker_that_hangs_is_given_up_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    monkeypatch.setattr(worker, "command", lambda: (sys.executable, "-I", "-S", "-c", code))
    monkeypatch.setattr(calibration, "LIMIT_S", 1.5)
    began = time.monotonic()
    assert capacity(None) is None
    assert time.monotonic() - began < PATIENCE_S
    if pid_file.exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)


def test_a_real_measurement_gives_a_figure_and_keeps_it(tmp_path: Path) -> None:
    found = capacity(tmp_path)
    assert found is not None
    assert 1000 < found < 100_000_000
    assert [json.loads(p.read_text()) for p in tmp_path.iterdir()] == [{"capacity_tok_s": found}]
