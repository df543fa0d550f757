"""The H200 campaign's own scripts, rehearsed: both runs, a kill between, and what is kept of it verifies and replays."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from unit.test_kept_campaigns import check

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "h200"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_campaign_survives_its_kill_names_every_cause_and_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "campaign.py"), str(tmp_path / "work"), "--rehearse", "--seconds", "5"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=1100)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "ended by signal 9" in ran.stdout
    spec = importlib.util.spec_from_file_location("keep", SCRIPTS / "keep.py")
    assert spec is not None
    assert spec.loader is not None
    keep = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(keep)
    archives = [tmp_path / "work" / f"{name}.tgz" for name in ("rules", "exhaustive")]
    keep.keep(archives, tmp_path / "kept", [], [])  # a rehearsal's command line names this machine's interpreter
    for name in ("rules", "exhaustive"):
        check(tmp_path / "kept" / name, tmp_path / name)
    report = [sys.executable, str(SCRIPTS / "report.py"), str(tmp_path / "kept"), "--chart", str(tmp_path / "c.svg")]
    told = subprocess.run(report, check=True, capture_output=True, text=True, env=env).stdout
    for cause in (
        "without CUDA graphs",
        "cap of 48 running",
        "accept length of 1.6",
        "a broken drafter",
        "oom-in-",
        "bad-flag",
    ):
        assert cause in told, cause
    assert "Stopped and would have won: none." in told
    assert "</svg>" in (tmp_path / "c.svg").read_text(encoding="utf-8")
