"""Campaigns that are kept in examples/campaigns: whatever their kind, they are read, verify and replay."""

import gzip
import importlib.util
import json
import re
import shutil
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from unit.core.building import level
from unit.test_confirming import BENCHMARK, SLOT, House, launch_row

from autotuner import known, outcome
from autotuner.cli import main
from autotuner.core.candidate import Candidate, Launch
from autotuner.core.state import LaunchState
from autotuner.core.verdict import next_level
from autotuner.edge.campaigns import FILE, read_campaign
from autotuner.errors import Refused
from autotuner.publishing import Publishing

ROOT = Path(__file__).resolve().parents[2]
CAMPAIGNS = ROOT / "examples" / "campaigns"
RECORDED = sorted(path.parent for path in CAMPAIGNS.rglob(FILE))
KEPT = sorted(path.parent for path in CAMPAIGNS.rglob("state.db.gz"))
SIZE_MAX = 2_000_000


def script(name: str) -> ModuleType:
    """A script of examples/h200, which is no package."""
    spec = importlib.util.spec_from_file_location(f"h200_{name}", ROOT / "examples" / "h200" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def opened(kept: Path, where: Path) -> str:
    """Lay a kept campaign out as a daemon has it; return the settings' path."""
    shutil.copytree(kept / "journal", where / "state" / "journal")
    shutil.copytree(kept / "policies", where / "policies")
    shutil.copy(kept / "autotuner.toml", where)
    (where / "state" / "state.db").write_bytes(gzip.decompress((kept / "state.db.gz").read_bytes()))
    return str(where / "autotuner.toml")


def asked(settings: str, *words: str) -> Any:
    ran = CliRunner().invoke(main, ["-s", settings, *words, "--json"])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.output)


def check(kept: Path, where: Path) -> None:
    """Nothing of the journal was changed or lost, and every verdict comes out again as it was recorded."""
    settings = opened(kept, where)
    assert asked(settings, "journal", "verify")["entries"] > 0
    replayed = asked(settings, "journal", "replay")
    assert replayed
    assert [trial for trial in replayed if trial["differences"]] == []


@pytest.mark.parametrize("folder", RECORDED, ids=lambda path: str(path.relative_to(CAMPAIGNS)))
def test_every_recorded_campaign_is_read_whole(folder: Path) -> None:
    assert read_campaign(folder).trials


@pytest.mark.parametrize("folder", KEPT, ids=lambda path: str(path.relative_to(CAMPAIGNS)))
def test_every_kept_campaign_verifies_and_replays(folder: Path, tmp_path: Path) -> None:
    check(folder, tmp_path)


def test_the_case_study_quotes_the_journals_and_has_the_reports_figures() -> None:
    page = " ".join((ROOT / "docs" / "case-study-h200.md").read_text(encoding="utf-8").split())
    kept = CAMPAIGNS / "h200-first"
    journals = " ".join(path.read_text(encoding="utf-8") for path in sorted(kept.glob("*/journal/*.md")))
    told = page.split("## Told from the journal")[1].split("## What surprised")[0]
    quoted = re.findall(r'"([^"]+)"', told)
    assert len(quoted) >= 8
    for words in quoted:
        plain = words[:1].lower() + words[1:]  # a quotation may begin a sentence of its own
        assert words in journals or plain in journals or _without_bracket(plain) in _without_bracket(journals), words
    report = script("report")
    rules, full = (report.read_run(kept / name) for name in ("rules", "exhaustive"))
    found = " ".join(report.findings(rules, full))
    assert "84 s with rules, 3 min 26 s without: 41 %" in found
    assert "84 s with rules, 206 s without: 41 %" in page
    assert "Stopped and would have won: none." in found
    assert "Void levels: none." in found
    for name, one in rules.worked.items():
        other = full.worked.get(name)
        if other is not None and other.ratio is not None:
            assert (
                f"| {other.ratio:.2f} | {one.load_s:.0f} s | {one.benchmark_s:.0f} | {other.benchmark_s:.0f} |" in page
            )


@pytest.mark.parametrize("name", ["h200-sglang"])
def test_the_case_study_has_the_reports_table_of_a_campaign_that_ran_to_its_end(name: str) -> None:
    """Savings, quotations and each row are those of what is kept, and what is said of every candidate is so."""
    page = " ".join((ROOT / "docs" / "case-study-h200.md").read_text(encoding="utf-8").split())
    told = page.split("## Nine candidates, both runs at once")[1].split("## The first campaign")[0]
    journals = " ".join(path.read_text(encoding="utf-8") for path in sorted(CAMPAIGNS.glob("h200-s*/*/journal/*/*.md")))
    quoted = re.findall(r'"([^"]+)"', told)
    assert len(quoted) >= 8
    assert [words for words in quoted if words not in journals] == []
    report = script("report")
    rules, full = (report.read_run(CAMPAIGNS / name / run) for run in ("rules", "exhaustive"))
    found = " ".join(report.findings(rules, full))
    assert "2 min 12 s with rules, 10 min 39 s without: 21 %" in found
    assert "132 s with rules, 639 s without: 21 %" in told
    for sentence in ("the exhaustive run finds the same.", "Stopped and would have won: none.", "Void levels: none."):
        assert sentence in found
    assert rules.worked.keys() == full.worked.keys()
    for one, other in ((rules.worked[made], full.worked[made]) for made in rules.worked):
        ratio = "" if other.ratio is None else f"{other.ratio:.2f}"
        cells = [ratio, "" if one.load_s is None else f"{one.load_s:.0f} s"]
        row = next(row for row in told.split("| `")[1:] if row.startswith(f"{one.trial.name}`"))
        assert [cell.split(" (")[0].strip() for cell in row.split("|")[3:5]] == cells
        assert [cell.strip() for cell in row.split("|")[5:7]] == [f"{one.benchmark_s:.0f}", f"{other.benchmark_s:.0f}"]


def _without_bracket(text: str) -> str:
    """What an entry adds in brackets a page may leave out."""
    return re.sub(r" \([^()]*\)", "", text)


@pytest.mark.parametrize("folder", sorted(CAMPAIGNS.iterdir()), ids=lambda path: path.name)
def test_no_campaign_weighs_more_than_the_repository_should_carry(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < SIZE_MAX


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """What a run leaves: a campaign of two candidates, published, and packed as examples/h200/campaign.py does it."""
    folder = tmp_path / "run"
    folder.mkdir()
    house = House(folder)
    for name in ("a", "b"):
        made = Candidate(
            name=name, engine="llamacpp", launch=Launch(model="m", binary="/opt/llama-server", args={"alias": name})
        )
        house.store.put_candidate(made, "", f"/scratch/somewhere/{name}.toml")
        house.store.add_trial(SLOT, made, ("chat", BENCHMARK), "2026-11-29 15:02:14Z")
    for rate in (100.0, 70.0):
        trial = house.begin()
        row = launch_row(trial)
        house.store.add_launch(row)
        log = folder / "launches" / row.id / "server.log"
        log.parent.mkdir(parents=True)
        log.write_text(f'loaded from /scratch/models\n"POST /v1/completions HTTP/1.1" 200 OK\nserves {trial.name}\n')
        while (at := next_level(known.trial_so_far(house.ctx, house.store.trial(trial.id)))) is not None:
            house.store.put_result(trial.id, level(at, rate), {"policies": {}, "looks": []})
        outcome.conclude(house.ctx, trial.id)
        house.store.move_launch(row.id, LaunchState.ENDED)
    Publishing(house.ctx.settings.model_copy(update={"journal_dir": folder / "journal"}), house.store).publish()
    house.store.close()
    shutil.copy(folder / "state" / "state.db", folder / "state.db")
    (folder / "policies").mkdir()
    packed = tmp_path / "run.tgz"
    with tarfile.open(packed, "w:gz") as tar:
        for name in ("state.db", "autotuner.toml", "policies", "journal", "launches"):
            tar.add(folder / name, f"run/{name}")
    return packed


def test_what_a_run_packed_is_kept_small_neutral_and_replays(archive: Path, tmp_path: Path) -> None:
    keep = script("keep")
    size = keep.keep([archive], tmp_path / "kept", [("/scratch/models", "/models")], list(keep.FORBIDDEN))
    kept = tmp_path / "kept" / "run"
    assert size < SIZE_MAX
    assert b"/scratch" not in gzip.decompress((kept / "state.db.gz").read_bytes())
    logs = {path.name: gzip.decompress(path.read_bytes()).decode() for path in (kept / "logs").iterdir()}
    assert logs["01-a-trial.log.gz"] == "loaded from /models\nserves a\n", "the load's own requests are not kept"
    check(kept, tmp_path / "opened")


def test_a_path_of_one_machine_is_not_kept(archive: Path, tmp_path: Path) -> None:
    keep = script("keep")
    with pytest.raises(Refused, match=r"logs/01-a-trial.log.gz has '/scratch/'"):
        keep.keep([archive], tmp_path / "kept", [], list(keep.FORBIDDEN))
    assert not (tmp_path / "kept").exists()


def test_a_run_in_which_nothing_was_concluded_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with tarfile.open(tmp_path / "empty.tgz", "w:gz") as tar:
        tar.add(tmp_path / "empty", "empty")
    with pytest.raises(Refused, match="nothing was concluded"):
        script("keep").keep([tmp_path / "empty.tgz"], tmp_path / "kept", [], [])
