"""`autotuner proposals` tells of each proposal where it comes from, why, what it should bring, and what became of it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from unit.core.building import fired

from autotuner.bench.benchmark import Benchmark
from autotuner.cli import main
from autotuner.core.candidate import Candidate, Launch, derive, parse_candidates
from autotuner.core.source import Source
from autotuner.core.state import ProposalState
from autotuner.edge.store import Store

AT = "2026-11-29 15:02:14Z"
BASE = Candidate(name="base", engine="sglang", launch=Launch(model="/m"))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    settings = tmp_path / "autotuner.toml"
    settings.write_text('state_dir = "state"\n[slots.kimi]\nport = 8000\n')
    monkeypatch.setenv("AUTOTUNER_SETTINGS", str(settings))
    store = Store(tmp_path / "state" / "state.db")
    store.put_candidate(BASE, "", "base.toml")
    store.add_trial("kimi", BASE, ("chat", Benchmark()), AT)
    return store


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["proposals", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def propose(store: Store, rule: str, state: ProposalState, why: str = "", file: str = "") -> None:
    store.proposals.want("kimi", 1, [fired("propose", rule=rule, move="graphs-on")], 8, None, AT)
    changed = derive(BASE, {"args.tp-size": 2}, "because")
    row = store.proposals.of_slot()[-1]
    columns = {"state": state, "why": why, "file": file, "said": "the cap: 30 %", "gain": 0.26, "gpu_s": 600.0}
    store.proposals.update(row.id, changed, **columns)


def test_nothing_proposed_is_said(store: Store) -> None:
    assert run() == "nothing was proposed\n"
    assert json.loads(run("--json")) == []


def test_each_proposal_is_listed_with_its_reason_and_what_became_of_it(store: Store) -> None:
    propose(store, "one", ProposalState.SUGGESTED, file="/state/proposals/base+tp-size-2.toml")
    propose(store, "two", ProposalState.REFUSED, why="it was tried before: trial 7")
    said = run()
    assert "base+tp-size-2  base (1)  +26 %     10 min 0 s  suggested  house.toml / one" in said
    assert "base+tp-size-2: It is too slow (the cap: 30 %)" in said
    assert "  autotuner enqueue /state/proposals/base+tp-size-2.toml" in said
    assert "  refused: it was tried before: trial 7" in said


def test_programs_get_the_candidate_itself(store: Store) -> None:
    propose(store, "one", ProposalState.QUEUED)
    (row,) = json.loads(run("--json"))
    assert (row["parent"], row["parent_trial"], row["state"], row["gain"]) == ("base", 1, "queued", 0.26)
    (candidate,) = parse_candidates(Source("x.toml", row["toml"]))
    assert candidate.arg("tp-size") == 2
