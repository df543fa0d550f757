"""The simulation of the loop: some of its campaigns keep every promise, a seed is one course of events, and planted bugs are noticed.

It replaces the clock and other edges of the process that it runs in, so each test runs it in one of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
PARTS = ("P1", "P4", "P5", "P9", "P10", "P11", "P13", "P14", "P18", "P19", "P24")


def run(*words: str, **environment: str) -> Any:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), **environment}
    ran = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=280, check=False, env=env, cwd=TESTS
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.strip().splitlines()[-1])


def worked(seeds: str, **environment: str) -> Any:
    code = f"import json; from torture import sim; t, h = sim.some({seeds}); print(json.dumps([json.loads(t.as_json()), h]))"
    return run("-c", code, **environment)


@pytest.mark.timeout(300)
def test_forty_campaigns_under_faults_keep_every_promise() -> None:
    found, _ = worked("range(40)")
    assert found["violated"] == {}, found["examples"]
    assert set(PARTS) <= set(found["tried"]), "each promise was tried"
    assert found["counts"]["campaigns"] == 40
    assert found["counts"]["faults"] > 400


@pytest.mark.timeout(300)
def test_a_seed_is_one_course_of_events_in_any_process() -> None:
    first, again = (worked("(3, 7, 11)", PYTHONHASHSEED=seed)[1] for seed in ("1", "2"))
    assert first == again
    assert len(set(first)) == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("bug", "promise"),
    [("port-only stop check", "P1"), ("wall-clock budget", "P14"), ("promote on inconclusive", "P13")],
)
def test_a_planted_bug_turns_its_promise_red(bug: str, promise: str) -> None:
    found = run("-m", "torture", "--inside", "sim", "--seed", "1", "--seconds", "60", "--bug", bug)
    assert found["violated"][promise] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_part_of_a_year_leaves_nothing_but_its_record() -> None:
    found = run("-m", "torture", "--inside", "soak", "--seed", "1", "--seconds", "30")
    assert not found["violated"], found["examples"]
    assert found["counts"]["soaked trials"] > 0
