"""Campaigns from enqueue to journal, with the daemon as a real process and a fake server in a real one."""

import json
import time

import pytest
from e2e.house import SLOT, House

from autotuner.edge.store import Store

HARSH = """
description = "ends whatever runs"
[[rule]]
name = "anything"
on = "window"
when = "level.concurrency > 1"
action = "abandon"
sentence = "it runs"
"""

pytestmark = pytest.mark.e2e


def test_the_faster_server_is_promoted_and_serves_at_the_end(house: House) -> None:
    house.write_settings()
    files = [
        house.candidate("base", tok_s=100),
        house.candidate("faster", tok_s=200),
        house.candidate("slower", tok_s=50),
    ]
    house.cli("enqueue", *files)
    house.start()
    house.wait_settled()
    house.wait_serving("faster")
    assert house.verdicts() == {"base": "pass", "faster": "pass", "slower": "fail"}
    assert house.status()["best_known"]["name"] == "faster"
    verified = house.cli("journal", "verify").stdout
    assert "entries intact" in verified
    replayed = house.cli("journal", "replay").stdout.splitlines()
    assert [line.partition(": ")[2].split(",")[0] for line in replayed] == ["pass", "pass", "fail"]
    assert all(line.endswith(": as recorded") for line in replayed), replayed
    assert "0 of 3 levels on record would end otherwise" in house.cli("policies", "test").stdout
    rules = house.folder / "harsh"
    rules.mkdir()
    (rules / "harsh.toml").write_text(HARSH)
    tried = house.cli("policies", "test", rules).stdout
    assert "would lose faster at concurrency 4: harsh.toml/anything" in tried


def test_a_record_that_was_changed_does_not_replay(house: House) -> None:
    house.write_settings()
    house.cli("enqueue", house.candidate("base", tok_s=100))
    house.start()
    house.wait_settled()
    house.end()
    store = Store(house.state / "state.db")
    store.db.run("UPDATE trials SET promoted = 0")
    store.close()
    ran = house.cli("journal", "replay", "--json", check=False)
    assert ran.returncode == 8
    assert json.loads(ran.stdout)[0]["differences"] == ["promoted was False, now True"]
    assert house.cli("journal", "replay", "99", check=False).returncode == 5


def test_every_decision_is_explained_once_and_why_finds_it(house: House) -> None:
    house.write_settings()
    house.cli("enqueue", house.candidate("base", tok_s=100), house.candidate("same", tok_s=101))
    house.start()
    house.wait_settled()
    titles = house.titles()
    assert titles.count("promoted base") == 1
    assert "inconclusive same" in titles
    said = house.cli("why", "same").stdout
    assert "no difference to act on" in said
    shown = json.loads(house.cli("show", "base", "--json", "--evidence").stdout)
    assert shown["evidence"]["4"]["samples"]["requests"]
    assert shown["results"][0]["figures"]["tokens_counted"]
    compared = json.loads(house.cli("compare", "--json").stdout)
    assert [row["name"] for row in compared] == ["base", "same"]


def test_a_server_that_dies_hangs_or_fails_requests_costs_a_trial_and_nothing_else(house: House) -> None:
    house.write_settings()
    house.cli("enqueue", house.candidate("base", tok_s=100))
    house.start()
    house.wait_serving("base")
    files = [
        house.candidate("dies", mode="die-after", die_after=20),
        house.candidate("never", timeout_s=2, mode="never-ready"),
        house.candidate("mute", timeout_s=2, mode="empty-stream"),
        house.candidate("errors", mode="http-500", timeout_s=2),
    ]
    house.cli("enqueue", *files)
    house.wait(lambda: not house.status()["queue"], 60)
    house.wait_settled()
    house.wait_serving("base")
    assert house.verdicts() == {"base": "pass", **dict.fromkeys(("dies", "never", "mute", "errors"), "fail")}


def test_restore_always_puts_the_best_known_back_between_trials(house: House) -> None:
    house.settings["restore"] = '"always"'
    house.write_settings()
    files = [house.candidate("base", tok_s=200), house.candidate("b", tok_s=50), house.candidate("c", tok_s=40)]
    house.cli("enqueue", *files)
    house.start()
    house.wait_settled()
    served = [row.name for row in house.launches()]
    assert served == ["base", "b", "base", "c", "base"]


def test_a_server_that_ignores_sigterm_is_stopped_all_the_same(house: House) -> None:
    house.slot["stop_grace_s"] = "1"
    house.write_settings()
    house.cli("enqueue", house.candidate("stubborn", mode="ignore-term", tok_s=50), house.candidate("b", tok_s=200))
    house.start()
    house.wait_settled()
    house.wait_serving("b")


def test_a_changed_benchmark_measures_the_best_known_first(house: House) -> None:
    house.write_settings()
    house.cli("enqueue", house.candidate("base", tok_s=100))
    house.start()
    house.wait_serving("base")
    house.end()
    house.benchmark["levels"] = "[2]"
    house.write_settings()
    house.cli("enqueue", house.candidate("faster", tok_s=300))
    house.start()
    house.wait_settled()
    house.wait_serving("faster")
    assert "queued baseline base" in house.titles()
    names = [(t.name, t.is_baseline) for t in house.read(lambda s: s.trials())]
    assert names == [("base", False), ("faster", False), ("base", True)]


def test_enqueue_of_a_thousand_files_is_quick_and_loses_none(house: House) -> None:
    house.write_settings()
    for i in range(1000):
        house.candidate(f"c{i}", tok_s=50 + i)
    began = time.monotonic()
    ran = house.cli("enqueue", str(house.folder / "c*.toml"))
    assert time.monotonic() - began < 20
    assert "1000 candidates" in ran.stdout
    assert len(json.loads(house.cli("queue", "--json").stdout)) == 1000


def test_the_same_file_twice_is_one_trial_and_a_done_one_needs_again(house: House) -> None:
    house.write_settings()
    file = house.candidate("base", tok_s=300)
    assert "already queued" in house.cli("enqueue", file, file).stdout + house.cli("enqueue", file).stdout
    assert len(house.read(lambda s: s.trials())) == 1
    house.start()
    house.wait_serving("base")
    refused = house.cli("enqueue", file, check=False)
    assert refused.returncode == 4
    assert "--again" in refused.stderr
    house.cli("enqueue", file, "--again", "--wait", "--timeout", "60")
    assert [str(t.verdict) for t in house.read(lambda s: s.trials())] == ["pass", "inconclusive"]


def test_good_files_are_queued_although_one_is_broken_and_the_exit_code_tells(house: House) -> None:
    house.write_settings()
    good = house.candidate("good", tok_s=100)
    broken = house.folder / "broken.toml"
    broken.write_text('name = "x"\nengine = "command"\n[launch]\ncomand = ["a"]\n')
    ran = house.cli("enqueue", good, broken, house.folder / "missing.toml", check=False)
    assert ran.returncode == 3
    assert f"{broken}:4: launch.comand: unknown key (did you mean command?)" in ran.stderr
    assert "missing.toml: cannot be read" in ran.stderr
    assert [t.name for t in house.read(lambda s: s.queue(SLOT))] == ["good"]


def test_queue_can_be_listed_moved_and_cancelled(house: House) -> None:
    house.write_settings()
    house.cli("enqueue", *(house.candidate(n, tok_s=50 + i) for i, n in enumerate("abc")))
    house.cli("queue", "move", "c", "--first")
    house.cli("queue", "cancel", "a")
    assert [row["name"] for row in json.loads(house.cli("queue", "list", "--json").stdout)] == ["c", "b"]
    assert house.cli("queue", "cancel", "a", check=False).returncode == 4
    assert house.cli("queue", "cancel", "nothing", check=False).returncode == 5


def test_a_budget_of_trials_ends_the_campaign_with_the_best_known_serving(house: House) -> None:
    house.extra = "[budget]\ntrials = 2"
    house.write_settings()
    house.cli("enqueue", *(house.candidate(n, tok_s=r) for n, r in (("a", 200), ("b", 50), ("c", 400))))
    house.start()
    house.wait(lambda: "trials is spent" in house.status()["decision"], 60)
    house.wait_serving("a")
    assert [t["name"] for t in house.status()["queue"]] == ["c"]
    house.cli("resume", "--new-campaign")
    house.wait_serving("c", 60)
