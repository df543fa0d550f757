"""`bench` measures a server alone, says what was wrong, keeps what it measured when it is stopped, and hands keys to nobody."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from click.testing import CliRunner, Result
from fakes import fake_openai
from fakes.fake_nvml import FakeNvml
from patience import PATIENCE_S

from autotuner import standalone
from autotuner.bench.benchmark import Benchmark
from autotuner.bench.measurement import LevelSamples, Progress, RequestSample
from autotuner.cli import main
from autotuner.cli.benching import bench
from autotuner.cli.benchlive import LiveLevels
from autotuner.edge.endpoint import base_url
from autotuner.errors import Refused

OTHER_CLIENTS = ("client", "client_command", "tokenizer")
QUICK = ("--seconds", "1", "--prompt-tokens", "16", "--output-tokens", "8")


class Server:
    """The fake server as a process of its own, since the command runs a loop of its own."""

    def __init__(self, **behaviour: Any) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        flags = [word for key, value in behaviour.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        argv = [sys.executable, fake_openai.__file__, "--port", str(port), "--max-seconds", "600", *flags]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert b"listening" in self.process.stdout.readline()
        self.url = f"http://127.0.0.1:{port}"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(tok_s=1000, ttft_ms=5)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_gpus_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(None))
    monkeypatch.delenv("AUTOTUNER_API_KEY", raising=False)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *(str(a) for a in arguments)])


def test_levels_are_measured_and_stand_in_a_table_and_in_files(server: Server, tmp_path: Path) -> None:
    rows, result = tmp_path / "rows.csv", tmp_path / "result.json"
    limits = ("--goodput", "ttft:5000,tpot:5000")
    ran = run(server.url, "-c", "2,4", *QUICK, *limits, "--csv", rows, "-o", result, "--format", "vllm")
    assert ran.exit_code == 0, ran.output
    lines = ran.stdout.splitlines()
    assert lines[0].split()[:4] == ["level", "output", "tok/s", "total"]
    assert "goodput req/s" in lines[0]
    assert [line.split()[0] for line in lines[2:4]] == ["2", "4"]
    assert "prompts were exact: 16 tokens each" in ran.stdout
    assert "no figures of GPUs: NVML cannot be used: Driver Not Loaded" in ran.stdout
    assert "fake at http://127.0.0.1" in ran.stderr
    assert len(rows.read_text().splitlines()) > 20
    assert [json.loads(line)["max_concurrency"] for line in result.read_text().splitlines()] == [2, 4]


def test_json_has_the_figures_with_their_intervals_and_the_machine(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([{"power": 300_000}, {"power": 500_000}]))
    ran = run(server.url, "-c", "2", *QUICK, "--gpus", "1", "--json")
    assert ran.exit_code == 0, ran.output
    data = json.loads(ran.stdout)
    (level,) = data["levels"]
    assert (data["model"], data["interrupted"], data["benchmark"]["ignore_eos"]) == ("fake", False, True)
    assert level["figures"]["ttft_ms"]["p50_low"] <= level["figures"]["ttft_ms"]["p50"]
    assert level["machine"]["gpu_power_w"]["mean"] == 500
    assert level["client"]["said"] in "\n".join(level["remarks"]), "where the client ran"
    assert level["machine"]["joules_per_output_token"] == pytest.approx(500 / level["figures"]["output_tok_s"])


def test_every_field_of_a_benchmark_has_an_option() -> None:
    """All but the windows of the daemon's rules, the hash of a dataset, and what belongs to other clients than this one."""
    options = {p.name for p in bench.params}
    wanted = set(Benchmark.model_fields) - {"levels", "load", "window_s", "dataset_sha256", *OTHER_CLIENTS}
    assert wanted <= options
    assert {"concurrency", "request_rate", "trace_speed"} <= options
    assert not any(p.name == "api_key" for p in bench.params), "a key in argv is seen by every user of the host"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["-c", "1,x"], 2, "no list of numbers like 1,8,32"),
        (["-c", "1.5"], 2, "--concurrency: whole numbers; a rate is --request-rate"),
        (["-c", "1", "--request-rate", "2"], 2, "give one of them"),
        (["--goodput", "e2e:5"], 2, "no limit like ttft:500,tpot:50"),
        (["--prompt-tokens", "0"], 2, "--prompt-tokens: Input should be greater than or equal to 1"),
        (["--trace-speed", "1"], 2, "needs --dataset"),
        (["--client-cores", "all"], 2, '\'all\' names no cores; accepted: "auto", "off"'),
        (["--model", "other"], 5, "has no model other; it offers fake"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_load(
    server: Server, arguments: list[str], code: int, said: str
) -> None:
    ran = run(server.url, *arguments)
    assert ran.exit_code == code
    assert said in ran.output


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("http://127.0.0.1:1", 7, "nothing listens at http://127.0.0.1:1"),
        ("ftp://127.0.0.1", 4, "is no URL of a server"),
        ("http://", 4, "is no URL of a server"),
        ("http://127.0.0.1:port", 4, "is no URL of a server"),
        ("http://me:secret@127.0.0.1", 4, "a key goes into --api-key-file"),
    ],
)
def test_a_url_that_is_no_server_is_said(url: str, code: int, said: str) -> None:
    ran = run(url)
    assert ran.exit_code == code
    assert said in ran.output


def test_what_a_person_types_becomes_the_servers_root() -> None:
    assert base_url("127.0.0.1:8000/v1/") == "http://127.0.0.1:8000"
    assert base_url("https://host/llm/v1") == "https://host/llm"
    with pytest.raises(Refused):
        base_url("http://host?x=1")


def test_a_server_that_fails_every_request_is_named_and_ends_with_an_error() -> None:
    server = Server(mode="http-500")
    try:
        ran = run(server.url, "-c", "1", *QUICK)
    finally:
        server.close()
    assert ran.exit_code == 7
    assert "failed: " in ran.output
    assert "no request was answered: HTTP 500" in ran.output


def test_ctrl_c_ends_the_load_and_still_prints_what_was_measured(server: Server) -> None:
    argv = [sys.executable, "-m", "autotuner", "bench", server.url, "-c", "2,4", *QUICK[2:], "--seconds", "600"]
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
    ) as process:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).startswith(b"concurrency 2: ") or b" of 600 s" not in line:
            assert line, "it ended before it began"
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=PATIENCE_S)
    text = said.decode()
    assert process.returncode == 130, text
    assert [line.split()[0] for line in text.splitlines()[2:3]] == ["2"]
    assert "interrupted: " in text


class Told:
    """A load that is told what it measures, and that keeps what it was given."""

    given: dict[str, Any]
    hung = False

    def __init__(self, *arguments: Any, **more: Any) -> None:
        Told.given = {"arguments": arguments, **more}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def stop(self) -> None:
        return None

    async def messages(self) -> Any:
        answered = RequestSample(sent_s=0.1, first_s=0.2, end_s=0.5, events=2, output_tokens=2)
        yield Progress(at_s=0.5, phase="steady", events=2, in_flight=1, done=1, failed=0)
        yield LevelSamples(concurrency=1, steady_from_s=0.0, steady_to_s=1.0, requests=(answered,), bins=(1,) * 10)


def test_a_key_reaches_the_load_from_the_environment_or_a_file_and_nothing_shows_it(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone, "Load", Told)
    monkeypatch.setenv("AUTOTUNER_API_KEY", "sk-environment")
    ran = run(server.url, "-c", "1")
    assert (ran.exit_code, Told.given["api_key"]) == (0, "sk-environment")
    (tmp_path / "key").write_text("sk-file\n")
    again = run(server.url, "-c", "1", "--api-key-file", tmp_path / "key", "--json")
    assert (again.exit_code, Told.given["api_key"]) == (0, "sk-file")
    assert "sk-" not in ran.output + again.output


def test_rates_reach_the_load_as_levels(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "Load", Told)
    ran = run(
        server.url, "--request-rate", "0.5", "--arrivals", "constant", "--max-concurrency", "4", "--no-ignore-eos"
    )
    assert ran.exit_code == 0, ran.output
    _, benchmark, level, model = Told.given["arguments"]
    assert (level, model) == (0.5, "fake")
    assert (benchmark.load, benchmark.arrivals, benchmark.max_concurrency) == ("request-rate", "constant", 4)
    assert (benchmark.ignore_eos, benchmark.seconds) == (False, 30)


def test_elsewhere_than_on_a_terminal_a_line_comes_at_once_and_every_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LiveLevels(Benchmark(levels=(8,), seconds=30)) as live:
        for half_seconds in range(1, 81):
            at_s, warm = half_seconds / 2, half_seconds <= 20
            phase: Any = "warm-up" if warm else "steady"
            live.show(8, Progress(at_s=at_s, phase=phase, events=50, in_flight=8, done=half_seconds, failed=1))
    assert capsys.readouterr().err.splitlines() == [
        "concurrency 8: warm-up, 8 in flight, 1 done, 1 failed",
        "concurrency 8: 0 of 30 s, 8 in flight, 21 done, 1 failed, 100 tok/s now",
        "concurrency 8: 10 of 30 s, 8 in flight, 41 done, 1 failed, 100 tok/s now",
        "concurrency 8: 20 of 30 s, 8 in flight, 61 done, 1 failed, 100 tok/s now",
    ]
