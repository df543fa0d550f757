"""The rehearsal's engines: only the launch goes elsewhere, and the shipped campaign knows no flag that it does not."""

import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from click.testing import CliRunner

from autotuner.cli import main
from autotuner.core.candidate import Candidate, Launch, parse_candidates
from autotuner.engines import ENGINES
from autotuner.engines.base import Engine, Place, Stage, flags_in_help
from autotuner.rehearsal.asked import known_flags, options_of
from autotuner.rehearsal.engine import LOAD_SCALE, REHEARSED, RehearsalEngine
from autotuner.rehearsal.personalities import PERSONALITIES
from autotuner.settings import read_source

ROOT = Path(__file__).resolve().parents[2]
PLACE = Place("127.0.0.1", 30000)
CAMPAIGN = [c for path in sorted((ROOT / "examples").rglob("[0-9]*.toml")) for c in parse_candidates(read_source(path))]


def rehearsed(name: str) -> Engine:
    return cast(Engine, RehearsalEngine(ENGINES[name]))


def candidate(engine: str) -> Candidate:
    return Candidate.model_validate({"name": "c", "engine": engine, "launch": Launch(model="/m", args={"seed": 1})})


@pytest.mark.parametrize("name", REHEARSED)
def test_the_server_gets_the_engines_own_argv_as_it_is(name: str) -> None:
    argv = rehearsed(name).argv(candidate(name), PLACE)
    cut = argv.index("--")
    assert argv[cut + 1 :] == ENGINES[name].argv(candidate(name), PLACE)
    assert argv[:4] == (sys.executable, "-u", "-m", "autotuner.rehearsal.server")
    assert ("--as", name) == argv[4:6]


@pytest.mark.parametrize("name", REHEARSED)
def test_all_else_is_the_engines_own(name: str) -> None:
    own, other = ENGINES[name], rehearsed(name)
    c = candidate(name)
    assert other.name == name
    assert other.environment(c) == own.environment(c)
    assert other.endpoints(c) == own.endpoints(c)
    assert other.check(c) == own.check(c)
    assert other.read_line("x") == own.read_line("x")
    assert other.silence_limit_s(Stage.WEIGHTS) == pytest.approx(own.silence_limit_s(Stage.WEIGHTS) / LOAD_SCALE)


@pytest.mark.parametrize("name", REHEARSED)
def test_its_help_names_the_flags_that_it_takes(name: str) -> None:
    argv = rehearsed(name).help_argv(candidate(name))
    assert argv is not None
    ran = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    assert known_flags(name) <= flags_in_help(ran.stdout)


@pytest.mark.parametrize(
    "c", [c for c in CAMPAIGN if c.engine in REHEARSED and "wrong" not in c.name], ids=lambda c: c.name
)
def test_every_shipped_candidate_can_be_rehearsed(c: Candidate) -> None:
    assert options_of(c.engine, list(ENGINES[c.engine].argv(c, PLACE)))


def test_nothing_but_its_command_knows_of_the_rehearsal() -> None:
    package = ROOT / "autotuner"
    said = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "autotuner.rehearsal" in path.read_text()
    }
    assert {name for name in said if not name.startswith("rehearsal/")} == {"cli/rehearsing.py"}


def test_the_guide_lists_the_personalities_as_they_are() -> None:
    guide = (ROOT / "docs/guide.md").read_text(encoding="utf-8").split("| personality |")[1].split("\n## ")[0]
    assert [line for line in guide.splitlines() if line.startswith("| `")] == [
        f"| `{p.name}` | {p.says} |" for p in PERSONALITIES.values()
    ]


def test_a_folder_of_policies_that_is_wrong_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = tmp_path / "base.toml"
    path.write_text('name = "base"\nengine = "sglang"\n[launch]\nmodel = "/m"\n')
    ran = CliRunner().invoke(main, ["rehearse", str(path), "--policies", str(tmp_path / "none")])
    assert ran.exit_code == 5, ran.output
    assert "no policies folder" in ran.output
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / "x.toml").write_text('description = "x"\n[[rule]]\nname = "x"\n')
    ran = CliRunner().invoke(main, ["rehearse", str(path), "--policies", str(rules)])
    assert ran.exit_code == 3, ran.output
    assert "x.toml" in ran.output
    assert not list(tmp_path.glob("autotuner-rehearsal-*"))


def test_levels_that_are_no_numbers_are_a_wrong_command_line(tmp_path: Path) -> None:
    path = tmp_path / "base.toml"
    path.write_text('name = "base"\nengine = "sglang"\n[launch]\nmodel = "/m"\n')
    ran = CliRunner().invoke(main, ["rehearse", str(path), "--levels", "one"])
    assert ran.exit_code == 2
    assert "--levels" in ran.output
