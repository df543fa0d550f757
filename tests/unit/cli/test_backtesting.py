"""`campaign import` makes a folder that `policies test --campaign` tells again; what is wrong is said with what to do."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autotuner.cli import main
from autotuner.edge.campaigns import read_campaign
from autotuner.edge.store import Store

ROOT = Path(__file__).resolve().parents[3]
CAMPAIGNS = ROOT / "examples" / "campaigns"
KIMI = CAMPAIGNS / "kimi-k2.5"
CANDIDATES = ROOT / "examples" / "kimi-k2.5"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNER_SETTINGS", raising=False)
    monkeypatch.setattr("autotuner.settings.PLACES", ())


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_the_story_is_told_with_rule_cause_proposal_and_load() -> None:
    said = run("policies", "test", "--campaign", KIMI)
    assert said.exit_code == 0, said.output
    for words in (
        "eagle3-aq-medai: fail by below-break-even at 128",
        "50 % is the server's cap of 48 running requests",
        "Proposes eagle3-aq-medai+max-running-requests-128",
        "16 s of 6 min 0 s",
        "best-known at the end: sglang-base",
    ):
        assert words in said.output
    assert "decisions change" not in said.output  # the shipped rules are not compared with themselves


def test_as_json_it_is_the_same_story() -> None:
    table = json.loads(run("policies", "test", "--campaign", KIMI, "--objective", "level=1", "--json").output)
    assert [story["best"] for story in table] == ["vllm-baseline"]
    own = table[0]["candidates"][3]
    assert (own["rule"], own["ended_at"], own["verdict"], own["wrong_stop"]) == ("drafter-broken", 1, "fail", False)
    assert own["levels"][0]["accept_len"] == 1.0
    assert "against_shipped" not in table[0]


def test_other_rules_are_held_against_the_shipped_ones(tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    shutil.copytree(ROOT / "policies", rules)
    (rules / "house.toml").write_text(
        'description = "d"\n[[rule]]\nname = "no-vllm"\non = "window"\nwhen = "candidate.engine == \'vllm\'"\n'
        'action = "abandon"\nsentence = "It is vLLM"\n'
    )
    arguments = ("policies", "test", "--campaign", KIMI, "--objective", "level=1")
    said = run(*arguments, "--policies", rules).output
    assert said == run(*arguments, rules).output  # FOLDER is the same thing
    assert "WRONG STOP: vllm-baseline would have reached 1.30 of sglang-base's" in said
    assert "fail by no-vllm at 1" in said
    assert "wrong stops: vllm-baseline (shipped rules: none)" in said
    found = json.loads(run(*arguments, "--policies", rules, "--json").output)[0]["against_shipped"]
    assert found["saved_gpu_min"] > 0
    change = next(c for c in found["changes"] if c["name"] == "vllm-baseline")
    assert (change["then"], change["now"], change["decision"]) == ("promoted", "fail by no-vllm at 1", True)


def test_a_state_folder_is_a_campaign_too_and_anything_else_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    Store(state / "state.db")
    said = run("policies", "test", "--campaign", state)
    assert said.exit_code == 0, said.output
    assert "0 of 0 levels on record would end otherwise" in said.output
    refused = run("policies", "test", "--campaign", tmp_path)
    assert refused.exit_code == 5
    assert "neither a recorded campaign (campaign.toml) nor a state folder (state.db)" in refused.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--campaign", KIMI, "--objective", "fastest"), "neither level=N nor mean"),
        (("--campaign", KIMI, "--objective", "level=0"), "neither level=N nor mean"),
        (("--campaign", KIMI, "--objective", "level=7"), "kimi-k2.5 has no level 7 (levels: 1, 128)"),
        (("--objective", "mean"), "name one with --campaign"),
        (("--policies", ROOT / "policies", str(ROOT / "docs")), "give one"),
    ],
)
def test_a_wrong_command_line_is_said(arguments: tuple[object, ...], said: str) -> None:
    found = run("policies", "test", *arguments)
    assert found.exit_code == 2
    assert said in found.output


def test_without_settings_the_shipped_rules_are_listed_and_explained() -> None:
    assert "below-break-even" in run("policies", "list").output
    assert "skip-level, verdict fail" in run("policies", "explain", "below-break-even").output
    near = run("policies", "explain", "below-break-evn")
    assert near.exit_code == 5
    assert "did you mean below-break-even?" in near.output
    assert run("-s", "/nowhere.toml", "policies", "list").exit_code == 5


def test_a_folder_without_rules_is_refused(tmp_path: Path) -> None:
    for command in (("policies", "test", "--campaign", KIMI, "--policies"), ("simulate", "-n", "1", "--policies")):
        said = run(*command, tmp_path)
        assert said.exit_code == 5
        assert "has no rules (*.toml)" in said.output


def test_a_table_is_imported_with_its_candidates_and_told(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    given = [a for path in sorted(CANDIDATES.glob("[1-4]-*.toml")) for a in ("--candidate", path)]
    said = run("campaign", "import", KIMI / "figures.csv", *given, "--out", out)
    assert said.exit_code == 0, said.output
    assert f"autotuner policies test --campaign {out}" in said.output
    made, original = read_campaign(out), read_campaign(KIMI)
    assert [t.candidate.id for t in made.trials] == [t.candidate.id for t in original.trials]
    assert "best-known at the end: sglang-base" in run("policies", "test", "--campaign", out).output


def test_a_table_alone_is_enough(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    assert run("campaign", "import", KIMI / "figures.csv", "--out", out).exit_code == 0
    trial = read_campaign(out).trials[2]
    assert trial.speculation is not None
    assert trial.speculation.num_steps is None
    assert "best-known at the end: sglang-base" in run("policies", "test", "--campaign", out).output


def test_configs_of_a_table_without_files_are_servers_of_their_own(tmp_path: Path) -> None:
    table, out = tmp_path / "t.csv", tmp_path / "mine"
    table.write_bytes(
        b"\xef\xbb\xbfconfig,engine,level,output_tok_s\nplain,sglang,1,100\nfast,sglang,1,190\n"
    )  # as Excel saves it
    assert run("campaign", "import", table, "--out", out).exit_code == 0
    assert "best-known at the end: fast" in run("policies", "test", "--campaign", out).output


def test_a_table_begins_with_the_config_that_is_named_and_takes_no_options_of_logs(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    for option, value, code, words in (
        ("--first", "nobody", 5, "found: sglang-base, vllm-baseline"),
        ("--only", "sglang*", 2, "--engine and --only are for logs"),
        ("--engine", "vllm", 2, "--engine and --only are for logs"),
        ("--candidate", ROOT / "examples" / "demo" / "1-base.toml", 3, "is of a candidate of this file"),
    ):
        wrong = run("campaign", "import", KIMI / "figures.csv", option, value, "--out", out)
        assert wrong.exit_code == code, wrong.output
        assert words in wrong.output
    assert run("campaign", "import", KIMI / "figures.csv", "--first", "vllm-baseline", "--out", out).exit_code == 0
    assert [t.candidate.name for t in read_campaign(out).trials][:2] == ["vllm-baseline", "sglang-base"]
    logs = run(
        "campaign", "import", tmp_path, "--candidate", CANDIDATES / "1-sglang-base.toml", "--out", tmp_path / "x"
    )
    assert logs.exit_code == 2
    assert "--candidate is for tables" in logs.output


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ("level = 7\n", "objective.level: the campaign has no level 7 (levels: 1, 128)"),
        ('maximise = "goodput"\nttft_ms_max = 500\n', "objective.maximise: goodput needs the times of each request"),
    ],
)
def test_an_objective_that_a_campaign_cannot_tell_is_refused(tmp_path: Path, objective: str, said: str) -> None:
    mine = tmp_path / "mine"
    assert run("campaign", "import", KIMI / "figures.csv", "--out", mine).exit_code == 0
    with (mine / "campaign.toml").open("a") as file:
        file.write(f"\n[objective]\n{objective}")
    refused = run("policies", "test", "--campaign", mine)
    assert refused.exit_code == 3
    assert said in refused.output


def test_logs_are_imported_the_first_one_first(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    big = CAMPAIGNS / "sglang-0.5.12-h200" / "big"
    for name in ("big-base", "big-base-again", "big-no-cg"):
        (logs / f"{name}.log").write_bytes(gzip.decompress((big / f"{name}.log.gz").read_bytes()))
        shutil.copy(big / f"{name}.json", logs)
    out = tmp_path / "mine"
    said = run(
        "campaign", "import", logs, "--first", "big-no-cg", "--only", "big-base", "--only", "*-no-cg", "--out", out
    )
    assert said.exit_code == 0, said.output
    made, original = read_campaign(out), read_campaign(big)
    assert [t.candidate.name for t in made.trials] == ["big-no-cg", "big-base"]
    assert made.trials[1] == original.trials[0]
    assert "big-base: promoted" in run("policies", "test", "--campaign", out, "--objective", "level=8").output


def test_nothing_is_written_over_and_nothing_half(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    table = tmp_path / "t.csv"
    table.write_text("config,engine,level,output_tok_s\na,sglang,1,ten\n")
    wrong = run("campaign", "import", table, "--out", out)
    assert wrong.exit_code == 3
    assert f"{table}:2: output_tok_s: 'ten' is no number" in wrong.output
    table.write_text("config,level,output_tok_s\na,1,10\n")
    assert "a has neither an engine nor a candidate file" in run("campaign", "import", table, "--out", out).output
    table.write_text("config,engine,level,output_tok_s\na,sglan,1,10\n")
    assert run("campaign", "import", table, "--out", out).exit_code == 3
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]
    out.mkdir()
    assert run("campaign", "import", KIMI / "figures.csv", "--out", out).exit_code == 4


def test_what_an_import_lacks_is_named(tmp_path: Path) -> None:
    logs, out = tmp_path / "logs", tmp_path / "mine"
    logs.mkdir()
    assert "no run with both NAME.log and NAME.json" in run("campaign", "import", logs, "--out", out).output
    assert run("campaign", "import", logs, "--first", "x", "--out", out).exit_code == 5
    assert "known: sglang" in run("campaign", "import", logs, "--engine", "x", "--out", out).output


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ({"args": ["--api-key", "sk-1"], "ready_s": 5.0}, "run.json: launch.args.api-key: looks like a secret"),
        (
            {"ready_s": 5.0, "points": [{"concurrency": 1, "requests": 9999, "wall_s": 2, "output_tokens": 9}]},
            "autotuner: run.log.gz: the results name 9999 requests",
        ),
    ],
)
def test_what_is_wrong_with_a_run_is_said_of_its_own_files(tmp_path: Path, results: object, said: str) -> None:
    big = CAMPAIGNS / "sglang-0.5.12-h200" / "big"
    (tmp_path / "run.log").write_bytes(gzip.decompress((big / "big-base.log.gz").read_bytes()))
    (tmp_path / "run.json").write_text(json.dumps(results))
    refused = run("campaign", "import", tmp_path, "--out", tmp_path / "mine")
    assert refused.exit_code == 3
    assert said in refused.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "run.log"]


def test_a_run_that_measured_nothing_is_imported_all_the_same(tmp_path: Path) -> None:
    big = CAMPAIGNS / "sglang-0.5.12-h200" / "big"
    (tmp_path / "run.log").write_bytes(gzip.decompress((big / "big-base.log.gz").read_bytes()))
    (tmp_path / "run.json").write_text('{"ready_s": 5.0, "points": []}')
    assert run("campaign", "import", tmp_path, "--out", tmp_path / "mine").exit_code == 0
    assert read_campaign(tmp_path / "mine").trials[0].levels == ()


def test_a_campaign_names_the_row_file_and_candidate_that_do_not_fit(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    assert run("campaign", "import", KIMI / "figures.csv", "--out", mine).exit_code == 0
    with (mine / "figures.csv").open("a") as file:
        file.write("another,sglang,1,5,,,,\n")
    assert (
        "another is no candidate of campaign.toml" in run("validate", "--no-preflight", mine / "campaign.toml").output
    )
    (mine / "sglang-base.toml").unlink()
    said = run("policies", "test", "--campaign", mine)
    assert said.exit_code == 5
    assert "sglang-base.toml" in said.output
