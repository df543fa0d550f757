"""The same promises on real vLLM, on the CPU, with a real small model. Run by `make test-vllm`, which makes what it needs.

vLLM's CPU build refuses synthetic acceptance, so the drafters here are real: one that is always right because the
model drafts for itself, and one of a single layer that was never trained.
"""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e.house import SLOT, House

from autotuner.edge.store import LaunchRow
from autotuner.engines.base import Counters, Effective, Stage, StageSeen, Window
from autotuner.engines.logtext import split_lines
from autotuner.engines.vllm import VLLM

VENV = Path(__file__).parents[2] / ".venv-vllm"
MODEL, UNTRAINED = VENV / "smollm2", VENV / "untrained"
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1500)]

ENGINE = VLLM()
CAP, CONTEXT, DEPTH = 4, 1024, 2
NOT_TO_BLAME = {"asked-to-stop", "own-stop", "bad-weights", "out-of-memory", "model-not-found"}
START_S = 300  # a minute where nothing else wants the cores


@pytest.fixture
def vllm(house: House) -> House:
    if not (VENV / ".ready").is_file():
        pytest.fail(f"{VENV.name}, the environment with real vLLM, is not there or not finished: run `make test-vllm`")
    house.benchmark = {
        "levels": "[1, 4]",
        "seconds": "15",
        "window_s": "1",
        "output_tokens": "64",  # shorter, and no second passes without a prompt: no window would be steady
        "prompt_tokens": "24",
    }
    house.slot |= {"start_timeout_s": str(START_S), "stop_grace_s": "20"}
    house.write_settings()
    return house


def candidate(house: House, name: str, speculation: dict[str, Any] | None = None, **args: object) -> str:
    """Write a candidate. Without compilation, which takes minutes on two cores."""
    flags = {"max-model-len": CONTEXT, "max-num-seqs": CAP, "enforce-eager": True}
    flags |= {key.replace("_", "-"): value for key, value in args.items()}
    if speculation:
        flags["speculative-config"] = json.dumps({"num_speculative_tokens": DEPTH, **speculation})
    launch = {"model": str(MODEL), "python": str(VENV / "bin" / "python")}
    env = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    env["VLLM_LOG_STATS_INTERVAL"] = "1"  # the levels are short
    path = house.folder / f"{name}.toml"
    path.write_text(
        f'name = "{name}"\nengine = "vllm"\n[launch]\n{toml(launch)}\n[launch.args]\n{toml(flags)}\n[launch.env]\n{toml(env)}\n'
    )
    return str(path)


def toml(table: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())


class Scrapes:
    """The last /metrics of each server of a house, taken while something else is waited for."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.texts: dict[str, str] = {}
        self.versions: set[str] = set()
        self.next = 0.0

    def look(self) -> None:
        if time.monotonic() < self.next:
            return
        self.next = time.monotonic() + 1
        opened = self.house.read(lambda s: s.open_launches(SLOT))
        url = f"http://127.0.0.1:{self.house.port}"
        try:
            text = httpx.get(f"{url}/metrics", timeout=5).text
            self.versions.add(httpx.get(f"{url}/version", timeout=5).json()["version"])
        except (httpx.HTTPError, ValueError, KeyError):
            return
        for launch in opened:
            self.texts[launch.name] = text
            (self.house.folder / f"{launch.name}.metrics").write_text(text)

    def counters(self, name: str) -> Counters:
        return ENGINE.read_metrics(self.texts[name])


def wait_settled(house: House, scrapes: Scrapes, timeout_s: float) -> None:
    def settled() -> bool:
        scrapes.look()
        s = house.status()
        return not s["queue"] and not s["trial"] and bool(house.serving())

    house.wait(settled, timeout_s, "the queue to be worked off")


def log_of(house: House, launch: LaunchRow) -> list[str]:
    return list(split_lines((house.state / "launches" / launch.id / "server.log").read_bytes()))


def facts(house: House, name: str) -> list[Any]:
    launch = next(row for row in house.launches() if row.name == name)
    return [fact for line in log_of(house, launch) for fact in ENGINE.read_line(line)]


def resolved(house: House, name: str) -> Effective:
    """The limits that the log of a server names, taken together."""
    merged: dict[str, Any] = {}
    for fact in facts(house, name):
        if isinstance(fact, Effective):
            merged |= {key: value for key, value in vars(fact).items() if value is not None}
    return Effective(**merged)


def accept_len_of_log(house: House, name: str) -> float:
    windows = [fact for fact in facts(house, name) if isinstance(fact, Window) and fact.drafts]
    return 1 + sum(w.accepted or 0 for w in windows) / sum(w.drafts or 0 for w in windows)


def test_a_campaign_on_real_vllm_ends_with_the_best_known_and_reads_what_the_servers_said(vllm: House) -> None:
    self_draft = {"method": "draft_model", "model": str(MODEL)}
    vllm.cli("enqueue", candidate(vllm, "base"), "--priority", "9", "--no-preflight")
    untrained = {"method": "draft_model", "model": str(UNTRAINED)}
    files = [candidate(vllm, "self-draft", self_draft), candidate(vllm, "untrained", untrained)]
    vllm.cli("enqueue", *files, "--no-preflight")
    wrong = candidate(vllm, "wrong", max_num_sequs=8)
    refused = vllm.cli("enqueue", wrong, check=False)
    assert refused.returncode == 4
    assert "--max-num-seqs" in refused.stderr
    synthetic = {**self_draft, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    vllm.cli("enqueue", wrong, candidate(vllm, "synthetic", synthetic), "--no-preflight")
    vllm.start()
    scrapes = Scrapes(vllm)
    wait_settled(vllm, scrapes, 1200)
    print(vllm.cli("status", "--all").stdout, *vllm.titles(), sep="\n")

    verdicts = vllm.verdicts()
    rules = {row["name"]: row["rule"] for row in vllm.status()["trials"]}
    assert verdicts["base"] == "pass"
    assert verdicts["wrong"] == verdicts["synthetic"] == verdicts["untrained"] == "fail"
    assert rules["untrained"] == "drafter-broken"
    # Whether the model pays as its own drafter is for the clock to say, and a busy machine's clock says many things.
    best = vllm.status()["best_known"]["name"]
    assert best == ("self-draft" if verdicts["self-draft"] == "pass" else "base")
    vllm.wait_serving(best, START_S)

    for name in ("base", "self-draft", "untrained"):
        limits = resolved(vllm, name)
        assert (limits.running_cap, limits.context_len) == (CAP, CONTEXT)
        assert limits.graph_max_batch is None, "a CPU has no graphs to be off"
        assert limits.speculating is (name != "base")
        assert limits.kv_tokens == kv_tokens_of_metrics(scrapes.texts[name])
        stages = [fact.stage for fact in facts(vllm, name) if isinstance(fact, StageSeen)]
        assert {Stage.PROCESS, Stage.WEIGHTS, Stage.KV_POOL, Stage.HTTP_UP} <= set(stages)
    assert scrapes.counters("base").drafts is None
    for name, expected in (("self-draft", 1 + DEPTH), ("untrained", 1.0)):
        counted = scrapes.counters(name)
        assert counted.drafts
        by_counters = 1 + (counted.accepted or 0) / counted.drafts
        print(
            f"{name}: accept length {accept_len_of_log(vllm, name):.3f} by the log, {by_counters:.3f} by the counters"
        )
        assert accept_len_of_log(vllm, name) == pytest.approx(by_counters, rel=0.02)
        assert by_counters == pytest.approx(expected, abs=0.1)
    assert all("0.32" in version for version in scrapes.versions)

    said = vllm.cli("why", "wrong").stdout
    assert "unrecognized arguments: --max-num-sequs" in said
    assert next(row["took_s"] for row in vllm.status()["trials"] if row["name"] == "wrong") < 60
    dead = next(row for row in vllm.launches() if row.name == "synthetic")
    assert any("Synthetic acceptance not supported" in line for line in log_of(vllm, dead))
    assert dead.diagnosis
    assert "Synthetic acceptance not supported" in dead.diagnosis.sentence
    stopped = [row for row in vllm.launches() if row.name in {"base", "self-draft", "untrained"} and row.ended_at]
    assert stopped
    for row in stopped:
        assert row.end_asked
        assert row.diagnosis is None or row.diagnosis.cause in {"asked-to-stop", "own-stop"}, row
    assert "entries intact" in vllm.cli("journal", "verify").stdout


def kv_tokens_of_metrics(text: str) -> int:
    """What /metrics says of the same pool, in a label of one gauge."""
    found = re.search(r'^vllm:cache_config_info\{.*\bkv_cache_size_tokens="(\d+)"', text, re.MULTILINE)
    assert found
    return int(found.group(1))


def test_a_server_that_somebody_kills_while_it_starts_is_said_to_have_been_killed(vllm: House) -> None:
    """Nobody asked us: it must not read as our own stop, nor as the model's fault."""
    vllm.cli("enqueue", candidate(vllm, "base"), "--no-preflight")
    vllm.start()

    def loading() -> list[LaunchRow]:
        opened = [row for row in vllm.launches() if not row.ended_at]
        return [row for row in opened if any("Resolved architecture" in line for line in log_of(vllm, row))]

    vllm.wait(loading, START_S, "vLLM to know its model")
    first = min(vllm.servers())
    os.kill(first, signal.SIGKILL)
    vllm.wait(lambda: vllm.verdicts()["base"] != "running" and any(r.diagnosis for r in vllm.launches()), 120)
    row = next(r for r in vllm.launches() if r.diagnosis)
    print(row.exit_code, row.diagnosis)
    assert row.diagnosis is not None
    assert not row.end_asked
    assert row.diagnosis.cause not in NOT_TO_BLAME
