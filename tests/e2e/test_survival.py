"""What happens to the daemon, its servers, its disk and its port, and that the best-known serves afterwards."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from functools import partial

import pytest
from e2e.house import SLOT, House
from patience import PATIENCE_S

from autotuner.bench.benchmark import Benchmark
from autotuner.core.candidate import Candidate, parse_candidates
from autotuner.core.decide import RESTORE_FAILURES_MAX
from autotuner.core.source import Source
from autotuner.core.state import LaunchState, Purpose, TrialState
from autotuner.edge.store import Store

pytestmark = pytest.mark.e2e


def with_best_known(house: House, **behaviour: object) -> None:
    """A house in which `base` is the best-known and serves, and in which a win promotes at once."""
    house.extra = "[noise]\nconfirm_launches = 0"
    house.write_settings()
    house.cli("enqueue", house.candidate("base", **{"tok_s": 100, **behaviour}))
    house.start()
    house.wait_serving("base")


def test_killed_during_a_launch_the_daemon_comes_back_to_the_best_known(house: House) -> None:
    with_best_known(house)
    house.cli("enqueue", house.candidate("slow", mode="slow-start", start_s=8))
    house.wait(lambda: any(r.name == "slow" and r.state is LaunchState.STARTING for r in house.launches()))
    house.kill()
    house.cli("pause")
    house.start()
    house.wait_serving("base")


def test_killed_during_a_level_the_daemon_comes_back_to_the_best_known(house: House) -> None:
    house.benchmark["seconds"] = "4"
    with_best_known(house)
    house.cli("enqueue", house.candidate("b", tok_s=150))
    house.wait_measuring("b")
    house.kill()
    house.cli("pause")
    house.start()
    house.wait_serving("base")
    assert "put back b" in house.titles()
    house.cli("resume")
    house.wait_serving("b")


def test_killed_during_a_restore_the_daemon_comes_back_to_the_best_known(house: House) -> None:
    with_best_known(house, mode="slow-start", start_s=2)
    house.cli("enqueue", house.candidate("b", tok_s=20))

    def restoring() -> bool:
        rows = [r for r in house.launches() if r.purpose is Purpose.RESTORE]
        return any(r.state in {LaunchState.INTENDED, LaunchState.STARTING} for r in rows)

    house.wait(restoring)
    house.kill()
    house.start()
    house.wait_serving("base")


def test_killed_three_times_in_a_row_it_still_comes_back(house: House) -> None:
    with_best_known(house, mode="slow-start", start_s=1)
    house.cli("enqueue", house.candidate("b", tok_s=20))
    house.cli("pause")
    for _ in range(3):
        time.sleep(0.7)
        house.kill()
        house.start()
    house.wait_serving("base")


def test_a_trial_that_ends_the_daemon_again_and_again_is_given_up(house: House) -> None:
    house.benchmark["seconds"] = "4"
    with_best_known(house)
    house.cli("enqueue", house.candidate("cursed", tok_s=150))
    for _ in range(3):
        house.wait_measuring("cursed")
        house.kill()
        house.start()
    house.wait_settled()
    house.wait_serving("base")
    assert house.verdicts()["cursed"] == "error"


def test_sigterm_ends_the_daemon_in_seconds_and_leaves_the_server_to_be_adopted(house: House) -> None:
    with_best_known(house)
    before = house.servers()
    assert house.end() < 25
    assert house.servers() == before
    house.start()
    house.wait_serving("base")
    assert house.servers() == before, "the serving server must not be launched anew"


def test_a_server_killed_during_a_level_gets_an_entry_and_the_best_known_is_back(house: House) -> None:
    house.benchmark["seconds"] = "4"
    with_best_known(house)
    house.cli("enqueue", house.candidate("b", tok_s=150))
    house.wait_measuring("b")
    os.kill(house.servers()[0], signal.SIGKILL)
    house.wait_settled()
    house.wait_serving("base")
    assert house.verdicts()["b"] == "fail"
    assert "abandoned b" in house.titles()
    assert "SIGKILL" in house.cli("why", "b").stdout


def test_a_best_known_that_dies_is_restored_with_an_entry(house: House) -> None:
    with_best_known(house)
    os.kill(house.servers()[0], signal.SIGKILL)
    house.wait(lambda: "restored base" in house.titles())
    house.wait_serving("base")
    assert "server ended base" in house.titles()
    entry = next(e for e in house.read(lambda s: s.entries()) if e.title == "restored base")
    assert "- Verified: generated 8 tokens at http://127.0.0.1:" in entry.text


def test_a_best_known_that_keeps_dying_degrades_the_slot_and_restore_best_mends_it(house: House) -> None:
    with_best_known(house)
    for _ in range(3):  # the one that won its trial, and two restores: its whole budget
        house.wait(lambda: house.serving() == "base" and house.servers())
        victim = house.servers()[0]
        os.kill(victim, signal.SIGKILL)
        house.wait(lambda victim=victim: victim not in house.servers())
    house.wait(lambda: house.status()["degraded"])
    assert "degraded" in house.titles()
    assert not house.servers()
    time.sleep(1)
    assert not house.servers(), "nothing is launched until a person says so"
    house.cli("restore-best", "--wait", "--timeout", "120")
    house.wait_serving("base")


def test_a_port_held_by_a_stranger_is_named_and_left_alone(house: House) -> None:
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", house.port))
        stranger.listen()
        house.write_settings()
        house.cli("enqueue", house.candidate("base", tok_s=200))
        house.start()
        house.wait(lambda: "blocked" in house.titles())
        assert str(os.getpid()) in house.status()["blocked"]
        assert not house.servers()
    house.wait_serving("base")
    assert "unblocked" in house.titles()


def test_a_second_daemon_on_one_state_folder_refuses_and_names_the_first(house: House) -> None:
    with_best_known(house)
    first = house.daemons[0]
    second = house.start()
    assert second.wait(PATIENCE_S) == 6
    assert f"pid {first.pid}" in (house.folder / "daemon.log").read_text()
    assert first.poll() is None


def test_sighup_takes_good_settings_and_keeps_the_old_ones_for_a_broken_file(house: House) -> None:
    with_best_known(house)
    good = house.settings_file.read_text()
    house.settings_file.write_text(good + "\n[objektive]\nlevel = 1\n")
    house.daemons[-1].send_signal(signal.SIGHUP)
    house.wait(lambda: "settings kept" in house.titles())
    assert "objektive" in house.read(lambda s: s.entries())[-1].text
    house.settings_file.write_text(good + "\n[objective]\nmin_gain_ratio = 0.1\n")
    house.daemons[-1].send_signal(signal.SIGHUP)
    house.wait(lambda: "settings taken over" in (house.folder / "daemon.log").read_text())
    assert house.daemons[-1].poll() is None
    house.wait_serving("base")


def test_restore_best_interrupts_a_trial_holds_the_queue_and_resume_goes_on(house: House) -> None:
    house.benchmark["seconds"] = "20"  # the command must come before its end
    with_best_known(house)
    house.cli("enqueue", house.candidate("b", tok_s=400))
    house.wait_measuring("b")
    said = house.cli("restore-best", "--wait", "--timeout", "120").stdout
    assert "base serves at" in said
    house.wait_serving("base")
    time.sleep(1)
    assert house.status()["trial"] is None
    assert house.status()["paused"]
    house.cli("resume")
    house.wait_serving("b")


def test_restore_best_works_without_a_daemon(house: House) -> None:
    with_best_known(house)
    house.kill()
    os.kill(house.servers()[0], signal.SIGKILL)
    house.wait(lambda: not house.servers())
    said = house.cli("restore-best", "--timeout", "120").stdout
    assert "base serves at" in said
    assert len(house.servers()) == 1
    assert "entries intact" in house.cli("journal", "verify").stdout


def test_hands_off_means_that_nothing_is_started_or_stopped(house: House) -> None:
    with_best_known(house)
    house.cli("pause", "--hands-off", "--reason", "maintenance")
    house.wait(lambda: "hands off" in house.status()["decision"])
    os.kill(house.servers()[0], signal.SIGKILL)
    time.sleep(1.5)
    assert not house.servers()
    house.cli("resume")
    house.wait_serving("base")


def test_an_altered_journal_is_kept_aside_and_written_anew_from_the_record(house: House) -> None:
    with_best_known(house)
    house.end()
    path = next((house.state / "journal").rglob("*.md"))
    path.write_text(path.read_text().replace("promoted base", "promoted bose"))
    assert house.cli("journal", "verify", check=False).returncode == 8
    house.start()
    house.wait(lambda: "journal altered" in house.titles())
    house.wait(lambda: house.cli("journal", "verify", check=False).returncode == 0)
    assert list((house.state / "journal").rglob("*.altered-*"))


def test_a_journal_whose_database_was_lost_is_kept_aside_and_a_new_one_begun(house: House) -> None:
    with_best_known(house)
    house.end()
    for path in house.state.glob("state.db*"):
        path.unlink()
    for pid in house.servers():
        os.kill(pid, signal.SIGKILL)
    house.wait(lambda: not house.servers())
    house.cli("enqueue", house.folder / "base.toml")
    house.start()
    house.wait_serving("base")
    house.wait(lambda: house.cli("journal", "verify", check=False).returncode == 0)
    assert list((house.state / "journal").rglob("*.altered-*"))


def test_a_full_disk_ends_nothing_and_the_queue_goes_on_once_there_is_room(house: House) -> None:
    mount = house.folder / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        house.state = mount / "state"
        with_best_known(house)
        house.cli("pause")
        house.cli("enqueue", house.candidate("b", tok_s=300))
        filler = mount / "filler"
        with (
            filler.open("wb", buffering=0) as f,
            contextlib.suppress(OSError),
        ):  # what a buffer kept would fail at its close
            while True:
                f.write(b"x" * 65536)
        house.cli("resume", check=False)
        time.sleep(6)
        assert house.daemons[-1].poll() is None
        assert len(house.servers()) <= 1
        filler.unlink()
        house.cli("resume")
        house.wait(lambda: house.verdicts().get("b") == "pass")
        house.wait_serving("b")
        house.wait(lambda: house.cli("journal", "verify", check=False).returncode == 0)
    finally:
        house.close()
        subprocess.run(["umount", "-l", str(mount)], check=False)


def test_what_was_never_launched_by_autotuner_is_never_in_its_record(house: House) -> None:
    with_best_known(house)
    rows = house.read(lambda s: s.open_launches(SLOT))
    assert len(rows) == 1
    assert rows[0].state is LaunchState.SERVING


def _make_best_known(store: Store, made: Candidate) -> None:
    at = "2026-01-01 00:00:00Z"
    store.put_candidate(made, "", made.name)
    trial = store.add_trial(SLOT, made, ("earlier", Benchmark()), at)
    for state in (TrialState.RUNNING, TrialState.DONE):
        store.move_trial(trial, state)
    store.promote(SLOT, made.id, made.name, trial, at)


def with_known(house: House, *names: str) -> None:
    """A house in which these are best-known, the last one now, and serves; without a trial, which a busy machine may void."""
    house.write_settings()
    for number, name in enumerate(names):
        path = house.candidate(name, tok_s=100 + number)
        (made,) = parse_candidates(Source(path.name, path.read_text()))
        house.read(partial(_make_best_known, made=made))
    house.start()
    house.wait_serving(names[-1], 60)


def test_stop_empties_the_slot_also_over_a_restart_of_the_daemon_until_somebody_resumes(house: House) -> None:
    with_known(house, "base")
    said = house.cli("stop", "--reason", "new driver", "--wait", "--timeout", "60").stdout
    assert "no server runs" in said
    assert house.servers() == []
    assert "stopped base" in house.titles()
    assert "new driver" in house.status()["stopped"]
    house.end()
    house.start()
    house.wait(lambda: "stopped on purpose" in house.status()["decision"])
    assert house.servers() == []
    house.cli("resume")
    house.wait_serving("base")


def test_stop_and_restore_best_work_half_way_through_a_trial_and_without_a_daemon(house: House) -> None:
    house.benchmark["seconds"] = "6"
    with_known(house, "base")
    house.cli("enqueue", house.candidate("b", tok_s=400))
    house.wait_measuring("base")  # its baseline comes first
    house.kill()
    assert len(house.servers()) == 1, "the trial's server outlives the daemon"
    house.cli("stop", "--force")
    assert house.servers() == []
    assert [t["name"] for t in house.status()["queue"]] == ["base", "b"]
    assert "base serves" in house.cli("restore-best").stdout
    assert not house.status()["stopped"]
    assert len(house.servers()) == 1


def test_a_best_known_that_serves_and_dies_again_and_again_gives_way_to_the_one_before_it(house: House) -> None:
    with_known(house, "base", "b")
    for number in range(RESTORE_FAILURES_MAX):
        house.wait_serving("b")
        assert [r.name for r in house.launches()] == ["b"] * (number + 1)
        os.kill(house.servers()[0], signal.SIGKILL)
        house.wait(lambda n=number: [r.state for r in house.launches()].count(LaunchState.ENDED) > n)
    house.wait(lambda: (house.status()["serving"] or {}).get("name") == "base")
    assert [r.name for r in house.launches()] == ["b"] * RESTORE_FAILURES_MAX + ["base"]
    entries = house.read(lambda s: s.entries())
    text = next(e.text for e in entries if e.title == "restored base")
    assert "autotuner restore-best" in text, "the entry says how the newest is tried again"
