"""`enqueue` and `validate` refuse problems and let warnings through, in words and in JSON, and quickly the second time."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from autotuner.cli import main

PROGRAM = """\
#!/bin/sh
echo asked >> "$0.asked"
cat <<'END'
-c,    --ctx-size N                     size of the context
-np,   --parallel N                     number of slots
--draft-max N                           the argument has been removed. use --spec-draft-n-max
--spec-draft-n-max N                    how many tokens to draft
END
"""


@pytest.fixture
def port() -> Iterator[int]:
    """A port that a stranger, this very process, listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "llama-server"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (tmp_path / "autotuner.toml").write_text('state_dir = "state"\n[slots.a]\nport = 9\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home-cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def candidate(house: Path, name: str, args: str = "", env: str = "") -> str:
    launch = f'[launch]\nmodel = "/m.gguf"\nbinary = "{house}/llama-server"\n'
    text = f'name = "{name}"\nengine = "llamacpp"\n{launch}[launch.args]\n{args}\n[launch.env]\n{env}\n'
    (house / f"{name}.toml").write_text(text)
    return f"{name}.toml"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["-s", "autotuner.toml", *arguments])


def asked(house: Path) -> int:
    log = house / "llama-server.asked"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_warning_is_printed_and_let_through(house: Path) -> None:
    name = candidate(house, "a", "ctx-size = 8", 'NCCL_PROTOO = "LL"')
    ran = run("enqueue", name)
    assert ran.exit_code == 0
    assert "a queued as trial 1" in ran.output
    assert "  warning: env.NCCL_PROTOO is no variable that is known here; did you mean NCCL_PROTO?" in ran.output


def test_a_problem_refuses_and_both_are_in_the_data(house: Path) -> None:
    name = candidate(house, "a", "draft-max = 8", 'NCCL_PROTOO = "LL"')
    ran = run("enqueue", name, "--json")
    (item,) = json.loads(ran.output)
    assert (ran.exit_code, item["status"]) == (4, "refused")
    assert "spec-draft-n-max" in item["problems"][0]
    assert "NCCL_PROTO" in item["warnings"][0]


def test_the_program_is_asked_by_the_first_command_and_not_by_the_next(house: Path) -> None:
    name = candidate(house, "a", "parallel = 2")
    for _ in range(3):
        assert run("enqueue", name, "--dry-run").exit_code == 0
    assert run("validate", name).exit_code == 0
    assert asked(house) == 1
    (house / "llama-server").write_text(PROGRAM.replace("--parallel", "--slots-of-it"))
    assert "has no flag --parallel" in run("enqueue", name, "--dry-run").output
    assert asked(house) == 2


def test_a_stranger_on_the_slots_port_is_named_and_refuses_nothing(house: Path, port: int) -> None:
    (house / "autotuner.toml").write_text(f'state_dir = "state"\n[slots.a]\nport = {port}\n')
    name = candidate(house, "a")
    for command in (("enqueue", name, "--dry-run"), ("validate", name)):
        ran = run(*command)
        assert ran.exit_code == 0
        assert f"port {port} of the slot is held by pid " in ran.output


def test_validate_says_what_is_wrong_and_what_is_worth_knowing(house: Path) -> None:
    good, bad = candidate(house, "good", env='LD_PRELOAD = "/x.so"'), candidate(house, "bad", "ctx-sise = 1")
    ran = run("validate", good, bad)
    assert ran.exit_code == 3
    assert "good.toml: candidate ok: good (" in ran.output
    assert "good.toml: warning: env.LD_PRELOAD" in ran.output
    assert "bad.toml: bad: args.ctx-sise" in ran.output
    assert "did you mean --ctx-size?" in ran.output
    rows: list[dict[str, Any]] = json.loads(run("validate", good, "--json").output)
    assert "LD_PRELOAD" in rows[0]["warnings"][0]


def test_validate_needs_neither_settings_nor_the_program(house: Path) -> None:
    (house / "autotuner.toml").unlink()
    name = candidate(house, "a", "ctx-sise = 1")
    (house / "llama-server").unlink()
    ran = CliRunner().invoke(main, ["validate", name])
    assert ran.exit_code == 0
    assert "flags were not checked against the program" in ran.output
    assert CliRunner().invoke(main, ["validate", "--no-preflight", name]).output.count("warning") == 0
    assert not (house / "state").exists()


def test_validate_without_settings_keeps_answers_in_the_users_cache(house: Path) -> None:
    (house / "autotuner.toml").unlink()
    name = candidate(house, "a", "parallel = 2")
    for _ in range(2):
        assert CliRunner().invoke(main, ["validate", name]).exit_code == 0
    assert asked(house) == 1
    assert list((house / "home-cache" / "autotuner").glob("help-*.json"))


def test_what_all_candidates_of_a_sweep_share_is_warned_of_once(house: Path) -> None:
    name = candidate(house, "a", env='LD_PRELOAD = "/x.so"')
    with (house / name).open("a") as f:
        f.write('[sweep]\n"args.parallel" = [1, 2, 3]\n"env.CUDA_VISIBLE_DEVICE" = ["", "0"]\n')
    for command in (("validate", name), ("enqueue", name, "--dry-run")):
        said = run(*command).output
        assert said.count("LD_PRELOAD") == 1
        assert said.count("did you mean CUDA_VISIBLE_DEVICES") == 1


def test_what_is_true_of_a_slot_is_said_once_for_all_that_would_run_there(house: Path, port: int) -> None:
    (house / "autotuner.toml").write_text(f'state_dir = "state"\n[slots.a]\nport = {port}\n')
    names = [candidate(house, name) for name in "abc"]
    assert run("enqueue", *names, "--dry-run").output.count("is held by") == 1
    rows = json.loads(run("enqueue", *names, "--dry-run", "--json").output)
    assert all("is held by" in row["warnings"][-1] for row in rows)
