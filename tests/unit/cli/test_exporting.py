"""`export` writes what a trial measured, by number or name, level by level, and says what is not there."""

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from unit.core.building import level

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.machine import MachineSample, machine_figures
from autotuner.bench.measurement import LevelSamples, RequestSample, figures
from autotuner.bench.samples import pack_gaps
from autotuner.cli import main
from autotuner.core.candidate import Candidate, Launch
from autotuner.core.verdict import LevelResult
from autotuner.edge.store import Store

AT = "2026-11-29 15:02:14Z"


@pytest.fixture(autouse=True)
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial with two levels on record, and one of whose level nothing was kept."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "autotuner.toml").write_text('state_dir = "state"\n[slots.a]\nport = 9\n')
    store = Store(tmp_path / "state" / "state.db")
    made = Candidate(name="base", engine="llamacpp", launch=Launch(model="/m.gguf"))
    store.put_candidate(made, "", "base.toml")
    benchmark = ("chat", Benchmark(levels=(1, 4)))
    first, second = (store.add_trial("a", made, benchmark, AT) for _ in range(2))
    for concurrency in (1, 4):
        requests = tuple(
            RequestSample(sent_s=1.0 + i, first_s=1.1 + i, end_s=1.5 + i, events=3, prompt_tokens=9, output_tokens=3)
            for i in range(concurrency)
        )
        samples = LevelSamples(
            concurrency=concurrency, steady_from_s=1.0, steady_to_s=9.0, requests=requests, bins=(1,) * 80,
            gaps=pack_gaps([[200_000, 200_000]] * concurrency),
        )  # fmt: skip
        seen = MachineSample(at_s=1.0, cpu_ratio=0.5, memory_mib=512.0)
        result = LevelResult(concurrency=concurrency, figures=figures(samples), machine=machine_figures([seen], 10.0))
        kept = {"samples": samples.model_dump(mode="json"), "machine": [seen.model_dump(mode="json")]}
        store.put_result(first, result, kept)
    store.put_result(second, level(1, 10.0), {"samples": None})
    store.close()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["-s", "autotuner.toml", *arguments])


def test_everything_is_in_the_json_machine_and_gaps_included() -> None:
    ran = run("export", "1")
    assert ran.exit_code == 0, ran.output
    data = json.loads(ran.stdout)
    assert [one["samples"]["concurrency"] for one in data] == [1, 4]
    assert data[1]["samples"]["requests"][3]["gaps_us"] == [200_000, 200_000]
    assert data[0]["machine"]["cpu_ratio"]["mean"] == 0.5
    assert data[0]["machine_samples"][0]["memory_mib"] == 512.0
    assert data[0]["model"] == "/m.gguf"


def test_one_level_goes_to_a_file_in_another_programs_format(tmp_path: Path) -> None:
    ran = run("export", "1", "--format", "vllm", "--level", "4", "-o", "result.json")
    assert (ran.exit_code, ran.output) == (0, "")
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["max_concurrency"], found["completed"], found["itls"][0]) == (4, 4, [0.2, 0.2])
    assert [json.loads(line)["completed"] for line in run("export", "1", "--format", "sglang").stdout.splitlines()] == [
        1,
        4,
    ]
    assert len(list(csv.reader(io.StringIO(run("export", "1", "--format", "csv").stdout)))) == 6


def test_what_is_not_there_is_said() -> None:
    assert "measured: 1, 4" in run("export", "1", "--level", "9").output
    assert run("export", "1", "--level", "9").exit_code == 5
    assert "were not kept" in run("export", "2").output
    assert run("export", "nobody").exit_code == 5
    refused = run("export", "1", "-o", "no/such/folder.json")
    assert (refused.exit_code, "cannot be written" in refused.output) == (7, True)


def test_show_prints_the_same_figures_and_the_machine() -> None:
    said = run("show", "1").stdout
    assert "ITL p50/p99 ms" in said
    assert "200/200" in said
    assert "C=4: host CPU 50 %, host memory 0.5 GiB" in said
    (first, _) = json.loads(run("show", "1", "--json").stdout)["results"]
    assert first["figures"]["itl_ms"]["p50"] == 200.0
    assert first["machine"]["samples"] == 1
