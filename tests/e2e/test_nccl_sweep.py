"""A sweep over NCCL's variables, end to end: what NCCL chose is in the entries, wrong variants cost no launch, hanging ones end."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e.test_rehearse import left, rehearse
from patience import PATIENCE_S

pytestmark = pytest.mark.e2e

SERVER = """engine = "sglang"
[launch]
model = "/models/m"
python = "/opt/sglang/bin/python3"
[launch.args]
tp-size = 2
disable-custom-all-reduce = true
"""


def file(folder: Path, name: str, more: str = "") -> str:
    path = folder / f"{name}.toml"
    path.write_text(f'name = "{name}"\n{SERVER}{more}')
    return str(path)


def told(folder: Path, *arguments: str) -> tuple[dict[str, Any], str, str]:
    code, out, err = rehearse(folder, *arguments, "--keep", "--json")
    assert code in {0, 4}, out + err
    said: dict[str, Any] = json.loads(out)
    return said, Path(said["journal"]).read_text(), err


def entry(journal: str, title: str) -> str:
    return next(part for part in journal.split("\n## ") if title in part.partition("\n")[0])


@pytest.mark.timeout(1000)
def test_a_sweep_tells_what_nccl_chose_and_launches_nothing_that_cannot_work(tmp_path: Path) -> None:
    sweep = '[sweep]\n"env.NCCL_ALGO" = ["allreduce:tree", "NVLSTree", "Rign"]\n'
    said, journal, _ = told(tmp_path, file(tmp_path, "nccl", sweep), "--levels", "8", "--seconds", "1")
    (tree,) = said["trials"]
    assert tree["name"] == "nccl+NCCL-ALGO-allreduce-tree"
    refused = json.dumps(said["refused"])
    assert "none of these carries an all-reduce on one node" in refused
    assert "did you mean Ring?" in refused
    of_tree = entry(journal, tree["name"])
    assert "- NCCL: NCCL 2.28.9, 24 channels, P2P/CUMEM on 2 links, trees; autotuner set NCCL_DEBUG=INFO" in of_tree
    assert "Requested against effective: NCCL_ALGO" not in of_tree
    shown = subprocess.run(
        [sys.executable, "-m", "autotuner", "-s", said["settings"], "show", "1"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert "nccl:       NCCL 2.28.9" in shown.stdout
    assert not left(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_variants_that_hang_are_ended_and_their_cause_names_nccl_and_the_variable(tmp_path: Path) -> None:
    hanging = '[launch.env]\nNCCL_PROTO = "LL"\n[sweep]\n"env.AUTOTUNER_FAKE_PERSONALITY" = ["hang-nccl", "hang-collective"]\n'
    said, journal, _ = told(
        tmp_path, file(tmp_path, "base"), file(tmp_path, "hang", hanging), "--levels", "32", "--seconds", "2"
    )
    verdicts = {trial["name"].rpartition("-hang-")[2]: trial["verdict"] for trial in said["trials"]}
    assert verdicts == {"base": "pass", "nccl": "fail", "collective": "fail"}
    start = entry(journal, "FAKE-PERSONALITY-hang-nccl")
    assert "NCCL's ranks began to connect and never did, and this candidate sets NCCL_PROTO = LL" in start
    assert "- Advice: try it without NCCL_PROTO first" in start
    level = entry(journal, "FAKE-PERSONALITY-hang-collective")
    assert "The level hangs at concurrency 32: no token and no word of work" in level
    assert "a collective operation of NCCL timed out, and this candidate sets NCCL_PROTO = LL" in level
    assert "2 of 2 variants of hang.toml are tried" in level
    assert "restored base" in journal
    assert not left(tmp_path)
