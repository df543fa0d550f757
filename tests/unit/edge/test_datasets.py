"""A dataset is what the settings saw: found beside them, told by its content, checked before anything is measured."""

import hashlib
import json
from pathlib import Path

import pytest

from autotuner.bench.benchmark import Benchmark
from autotuner.edge import datasets
from autotuner.edge.datasets import load_records, with_dataset
from autotuner.errors import InvalidInput
from autotuner.settings import Settings, load_settings

LINES = '{"prompt": "a", "timestamp": 0}\n{"prompt": "b", "timestamp": 100}\n'


def settings(folder: Path, keys: str = "", *, whole: bool = False) -> Settings:
    path = folder / "autotuner.toml"
    path.write_text(f'state_dir = "s"\n[slots.a]\nport = 1\n[benchmarks.own]\ndataset = "data/mine.jsonl"\n{keys}')
    return load_settings(path, whole=whole)


def write(folder: Path, text: str = LINES) -> Path:
    (folder / "data").mkdir(exist_ok=True)
    path = folder / "data" / "mine.jsonl"
    path.write_text(text)
    return path


def wrong(folder: Path, keys: str = "", *, whole: bool = False) -> str:
    with pytest.raises(InvalidInput) as caught:
        settings(folder, keys, whole=whole)
    return str(caught.value)


def test_a_dataset_is_found_beside_the_settings_and_told_by_its_content(tmp_path: Path) -> None:
    path = write(tmp_path)
    found = settings(tmp_path).benchmarks["own"]
    assert found.dataset == str(path)
    assert found.dataset_sha256 == hashlib.sha256(LINES.encode()).hexdigest()
    records = load_records(found)
    assert records is not None
    assert [records[i].texts for i in range(len(records))] == [("a",), ("b",)]


def test_another_content_is_another_benchmark_and_the_same_elsewhere_is_not(tmp_path: Path) -> None:
    path = write(tmp_path)
    before = settings(tmp_path).benchmarks["own"].hash
    copy = tmp_path / "copy"
    copy.mkdir()
    write(copy)
    assert settings(copy).benchmarks["own"].hash == before
    path.write_text(LINES + '{"prompt": "c"}\n')
    assert settings(tmp_path).benchmarks["own"].hash != before


def test_a_dataset_that_changed_since_the_settings_were_read_is_not_measured_as_if_it_had_not(tmp_path: Path) -> None:
    path = write(tmp_path)
    found = settings(tmp_path).benchmarks["own"]
    path.write_text(LINES.replace("a", "z"))
    with pytest.raises(InvalidInput, match=r"other content than the benchmark's.*reload the settings"):
        load_records(found)


def test_a_hash_in_the_settings_pins_the_content(tmp_path: Path) -> None:
    write(tmp_path)
    right = hashlib.sha256(LINES.encode()).hexdigest()
    assert settings(tmp_path, f'dataset_sha256 = "{right}"').benchmarks["own"].dataset_sha256 == right
    assert f"sha256 {right}" in wrong(tmp_path, f'dataset_sha256 = "{64 * "0"}"')


def test_a_missing_file_is_named_with_the_line_of_the_settings_and_what_would_be_accepted(tmp_path: Path) -> None:
    said = wrong(tmp_path)
    assert f"autotuner.toml:5: benchmarks.own.dataset: there is no file {tmp_path}/data/mine.jsonl" in said
    assert "accepted are JSON lines" in said


def test_a_wrong_line_is_named_in_the_dataset_itself(tmp_path: Path) -> None:
    path = write(tmp_path, LINES + '{"promt": "c"}\n')
    assert f"{path}:3: has none of prompt, messages" in wrong(tmp_path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    assert f"{path}: holds no request" in wrong(tmp_path)


def test_a_trace_needs_a_time_for_each_request(tmp_path: Path) -> None:
    write(tmp_path)
    assert settings(tmp_path, 'load = "trace"\nlevels = [1]').benchmarks["own"].load == "trace"
    path = write(tmp_path, LINES + '{"prompt": "c"}\n')
    assert f"{path}:3: this request has no timestamp" in wrong(tmp_path, 'load = "trace"\nlevels = [1]')


def test_each_command_looks_at_the_beginning_and_validate_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotuner.settings.CHECKED", 2)
    path = write(tmp_path, LINES + "oops\n")
    assert settings(tmp_path).benchmarks["own"].dataset
    assert f"{path}:3: not valid JSON" in wrong(tmp_path, whole=True)


@pytest.mark.parametrize("as_list", [False, True])
def test_of_a_file_without_end_the_beginning_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_list: bool
) -> None:
    monkeypatch.setattr(datasets, "BYTES_MAX", 1000)
    items = [{"prompt": f"number {i}"} for i in range(500)]
    path = tmp_path / "big"
    path.write_text(json.dumps(items) if as_list else "".join(json.dumps(item) + "\n" for item in items))
    found = load_records(with_dataset(Benchmark(dataset="big"), tmp_path))
    assert found is not None
    assert 30 < len(found) < 50
    assert found[len(found) - 1].texts == (f"number {len(found) - 1}",)


def test_a_mark_at_the_beginning_as_windows_writes_it_is_no_content(tmp_path: Path) -> None:
    path = tmp_path / "bom"
    path.write_bytes(b"\xef\xbb\xbf" + LINES.encode())
    found = load_records(with_dataset(Benchmark(dataset="bom"), tmp_path))
    assert found is not None
    assert len(found) == 2


def test_without_a_dataset_there_are_no_records() -> None:
    assert load_records(Benchmark()) is None
