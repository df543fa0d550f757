"""`autotuner rehearse`: candidates go through the real daemon against the rehearsed server, and get what they deserve."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e.house import PROGRAM, environment
from patience import PATIENCE_S

from autotuner.edge import clock, procfs

pytestmark = pytest.mark.e2e

ARGS = 'model = "/models/m"\npython = "/opt/sglang/bin/python3"\n[launch.args]\nmem-fraction-static = 0.85\n'
EAGLE3 = """speculative-algorithm = "EAGLE3"
speculative-draft-model-path = "/models/eagle3"
speculative-num-steps = 3
speculative-eagle-topk = 1
speculative-num-draft-tokens = 4
max-running-requests = 256
[launch.env]
SGLANG_SIMULATE_ACC_LEN = "1.65"
"""


def candidate(folder: Path, name: str, more: str = "", engine: str = "sglang") -> str:
    path = folder / f"{name}.toml"
    head = f'name = "{name}"\nengine = "{engine}"\nslots = ["kimi"]\nbenchmark.use = "night"\n'
    path.write_text(f"{head}[launch]\n{ARGS}{more}")
    return str(path)


def rehearse(folder: Path, *arguments: str) -> tuple[int, str, str]:
    command = [*PROGRAM, "rehearse", *arguments]
    env = {**environment(), "TMPDIR": str(folder)}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=env, cwd=folder)
    return ran.returncode, ran.stdout, ran.stderr


def left(folder: Path) -> list[int]:
    """Processes whose command line or environment names the folder: daemon, shims, servers."""
    found = []
    for pid in procfs.pids():
        try:
            shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in shown and pid != os.getpid():
            found.append(pid)
    return found


@pytest.mark.timeout(1000)
def test_candidates_get_what_they_deserve_and_nothing_is_left_running(tmp_path: Path) -> None:
    files = [
        candidate(tmp_path, "base"),
        candidate(tmp_path, "eagle3", EAGLE3),
        candidate(tmp_path, "wrong", "cuda-graph-max-batch = 128\n"),
        candidate(tmp_path, "oom", '[launch.env]\nAUTOTUNER_FAKE_PERSONALITY = "oom-capture"\n'),
    ]
    code, out, err = rehearse(tmp_path, *files, "--levels", "64", "--seconds", "6", "--no-preflight", "--json")
    assert code == 0, err
    said: dict[str, Any] = json.loads(out)
    trials = {trial["name"]: trial for trial in said["trials"]}
    verdicts = {name: trial["verdict"] for name, trial in trials.items()}
    assert verdicts == {"base": "pass", "eagle3": "fail", "wrong": "fail", "oom": "fail"}
    assert trials["base"]["promoted"]
    assert 3000 < trials["base"]["output_tok_s"]["64"] < 11000
    assert trials["eagle3"]["output_tok_s"]["64"] < 0.9 * trials["base"]["output_tok_s"]["64"]
    assert "flag" in trials["wrong"]["reason"]
    assert "memory" in trials["oom"]["reason"]
    assert "not from your hardware" in said["note"]
    journal = Path(said["journal"])
    assert "promoted base" in journal.read_text()
    assert {path.name for path in journal.parents[3].iterdir()} == {"state"}
    assert not left(tmp_path)


def test_what_enqueue_would_refuse_is_refused_and_a_sweep_is_expanded(tmp_path: Path) -> None:
    sweep = '[sweep]\n"env.AUTOTUNER_FAKE_PERSONALITY" = ["oom-load", "oom-capture"]\n'
    files = [
        candidate(tmp_path, "grid", sweep),
        candidate(tmp_path, "wrong", "cuda-graph-max-batch = 128\n"),
        candidate(tmp_path, "broken", "= \n"),
    ]
    other = tmp_path / "other.toml"
    other.write_text('name = "other"\nengine = "command"\n[launch]\ncommand = ["serve", "{port}"]\n')
    code, out, err = rehearse(tmp_path, *files, str(other), "--levels", "1", "--keep")
    assert code == 3, out + err  # a file is wrong
    assert "2 queued, 3 refused" in out
    assert "did you mean --cuda-graph-max-bs" in err
    assert "cannot be rehearsed" in out
    assert out.count("  fail  ") == 2
    assert "rehearsed 2 candidates" in out
    assert "not from your hardware" in out
    settings = next(tmp_path.glob("autotuner-rehearsal-*/autotuner.toml"))
    assert f"autotuner -s {settings} status" in out
    shown = subprocess.run(
        [sys.executable, "-m", "autotuner", "-s", str(settings), "show", "1", "--log"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert "CUDA out of memory" in shown.stdout
    assert not left(tmp_path)


@pytest.mark.timeout(1000)
def test_a_capped_drafter_gets_its_cap_lifted_and_a_verdict_of_its_own(tmp_path: Path) -> None:
    """The rule proposes, preflight lets it through, it is queued with its reason, measured, and told from the cap."""
    capped = EAGLE3.replace("max-running-requests = 256\n", "")
    files = [candidate(tmp_path, "base"), candidate(tmp_path, "eagle3", capped)]
    levels = ("--levels", "1,64", "--seconds", "2", "--propose", "queue", "--keep", "--json")
    code, out, err = rehearse(tmp_path, *files, *levels)
    assert code == 0, err
    said: dict[str, Any] = json.loads(out)
    verdicts = {trial["name"]: trial["verdict"] for trial in said["trials"]}
    lifted = "eagle3+max-running-requests-64"
    assert set(verdicts) >= {"base", "eagle3", lifted}
    assert verdicts[lifted] in {"pass", "fail", "inconclusive"}
    text = Path(said["journal"]).read_text()
    assert re.search(rf"- Next: queued {re.escape(lifted)} to isolate the cause \(the cap: \d+ % of the .* lost", text)
    listed = subprocess.run(
        [sys.executable, "-m", "autotuner", "-s", said["settings"], "proposals", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    row = next(row for row in json.loads(listed.stdout) if row["name"] == lifted)
    assert (row["state"], row["parent"], row["move"]) == ("queued", "eagle3", "lift-running-cap")
    assert row["gain"] > 0
    assert Path(row["file"]).read_text() == row["toml"]
    assert not left(tmp_path)


def test_a_rehearsal_that_is_terminated_ends_its_daemon_and_its_servers(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "autotuner",
        "rehearse",
        candidate(tmp_path, "base"),
        "--no-preflight",
        "--levels",
        "4",
    ]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        until = clock.monotonic_s() + PATIENCE_S
        while not any(tmp_path.rglob("identity.json")) and clock.monotonic_s() < until:
            clock.pause(0.1)
        assert len(left(tmp_path)) > 1
        run.terminate()
        assert run.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert not left(tmp_path)
