"""What is wrong with a host is found, called by its weight, and comes with what to do; a sound host has no finding but ok."""

import dataclasses
from typing import Any

import pytest

from autotuner.core.doctor import (
    FileSeen,
    GpuSeen,
    Level,
    Seen,
    UnitSeen,
    examine,
    exposure,
    read_gpus,
    worst,
)

SERVICE = UnitSeen("autotuner.service", installed=True, enabled="enabled", active="active", exposure=1.4)
SERVER = UnitSeen("autotuner-server@.service", installed=True, exposure=3.2)
GPUS = (GpuSeen(0, "570.1", "Disabled", "Enabled"), GpuSeen(1, "570.1", "Disabled", "Enabled"))
SOUND = Seen(
    daemon_pid=7,
    systemd=True,
    units=(SERVICE, SERVER),
    rung="servers are launched by: systemd",
    slot_gpus=frozenset({0, 1}),
    gpus=GPUS,
    disk_free_mib=90_000.0,
    disk_least_mib=64,
    launch_folders=3,
    launch_bytes=5 << 20,
    ntp="yes",
    clock_jumped_s=0.4,
    engines=(("base", "sglang", "0.5.12"),),
    secret_files=(FileSeen("/etc/autotuner/secrets/key", readable=True, mode=0o640),),
    state_mode=0o750,
    journal_entries=12,
    states={"main": ""},
)

JOINED = "GPUs 0, 1 joined by NVLink (NV18)"


def test_how_the_gpus_of_a_slot_are_joined_is_said() -> None:
    said = [finding for finding in examine(dataclasses.replace(SOUND, topology=(JOINED,))) if finding.about == "GPUs"]
    assert [finding.sentence for finding in said] == ["2 GPUs are there, driver 570.1", JOINED]
    assert all(finding.level is Level.OK for finding in said)


WRONG: dict[str, tuple[dict[str, Any], Level, str]] = {
    "settings": ({"settings_error": "autotuner.toml:3: slots: unknown"}, Level.PROBLEM, "unknown"),
    "a warning of the settings": ({"warnings": ("few requests",)}, Level.WARNING, "few requests"),
    "the record": ({"record_error": "state.db is damaged"}, Level.PROBLEM, "damaged"),
    "the database": ({"database": "row 3 missing"}, Level.PROBLEM, "row 3 missing"),
    "the journal": ({"journal_flaws": ("entry 3 was changed", "x")}, Level.PROBLEM, "entry 3 was changed (and 1 more)"),
    "the state folder": ({"state_mode": 0o777}, Level.PROBLEM, "everybody may write"),
    "no daemon": ({"daemon_pid": None}, Level.PROBLEM, "no daemon"),
    "no unit": ({"units": (UnitSeen("autotuner.service", installed=False),)}, Level.WARNING, "not installed"),
    "a failed unit": ({"units": (dataclasses.replace(SERVICE, active="failed"),)}, Level.PROBLEM, "is failed"),
    "a disabled unit": ({"units": (dataclasses.replace(SERVICE, enabled="disabled"),)}, Level.WARNING, "disabled"),
    "an exposed unit": ({"units": (dataclasses.replace(SERVICE, exposure=3.6),)}, Level.WARNING, "3.6, more than 1.5"),
    "an exposed server": ({"units": (dataclasses.replace(SERVER, exposure=9.6),)}, Level.WARNING, "9.6, more than 3.5"),
    "no driver": ({"gpus": None}, Level.PROBLEM, "nvidia-smi does not answer"),
    "a driver that fails": (
        {"gpus": None, "gpu_nodes": ("/dev/nvidia0",)},
        Level.PROBLEM,
        "/dev/nvidia0 is there, and nvidia-smi does not answer",
    ),
    "a sandbox without GPUs": (
        {"gpus_unread": {"main": "nvidia-smi failed with exit code 9"}},
        Level.PROBLEM,
        "the daemon cannot read the GPUs of slot main",
    ),
    "a lost GPU": ({"gpus": GPUS[:1]}, Level.PROBLEM, "GPU 1, which a slot names, is not there"),
    "a split GPU": ({"gpus": (GpuSeen(0, mig="Enabled"), GPUS[1])}, Level.WARNING, "MIG"),
    "a bad GPU": ({"gpus": (GpuSeen(0, uncorrected=2), GPUS[1])}, Level.PROBLEM, "2 uncorrected"),
    "a stranger": ({"strangers": ("port 8000 is held by pid 9",)}, Level.WARNING, "pid 9"),
    "an orphan": (
        {"orphans": ((9, "l1", "which is on record as ended"),)},
        Level.PROBLEM,
        "process 9 belongs to launch l1",
    ),
    "a full disk": ({"disk_free_mib": 3.0}, Level.PROBLEM, "only 3 MiB"),
    "no ballast": ({"ballast_bytes": 0}, Level.WARNING, "ballast"),
    "logs that cannot be cut": ({"cuts_logs": False}, Level.WARNING, "middle"),
    "a clock that was set": ({"clock_jumped_s": -3600.0}, Level.WARNING, "-3600 s"),
    "a clock alone": ({"ntp": "no"}, Level.WARNING, "not synchronised"),
    "no engine": ({"engines": (("b", "vllm", None),)}, Level.WARNING, "version of vllm"),
    "no secret": ({"secret_files": (FileSeen("/k", readable=False, mode=None),)}, Level.PROBLEM, "no secret file"),
    "an open secret": ({"secret_files": (FileSeen("/k", readable=True, mode=0o644),)}, Level.PROBLEM, "everybody"),
    "a closed secret": (
        {"secret_files": (FileSeen("/k", readable=False, mode=0o600),)},
        Level.PROBLEM,
        "cannot be read",
    ),
    "degraded": ({"states": {"main": "all failed"}}, Level.PROBLEM, "slot main is degraded: all failed"),
}


def test_a_sound_host_has_nothing_but_ok() -> None:
    assert {finding.level for finding in examine(SOUND)} == {Level.OK}
    assert worst(examine(SOUND)) is Level.OK
    assert any("3 launches take 5 MiB" in finding.sentence for finding in examine(SOUND))


@pytest.mark.parametrize("name", WRONG)
def test_each_thing_that_is_wrong_is_the_one_finding_and_comes_with_what_to_do(name: str) -> None:
    changes, level, words = WRONG[name]
    (found,) = [f for f in examine(dataclasses.replace(SOUND, **changes)) if f.level is not Level.OK]
    assert (found.level, found.do != "") == (level, True)
    assert words in found.sentence
    assert worst((found,)) is level


def test_a_host_without_systemd_gpus_and_clock_service_is_no_worse_for_it() -> None:
    plain = dataclasses.replace(SOUND, systemd=False, units=(), slot_gpus=frozenset(), gpus=None, ntp="", rung="")
    assert worst(examine(plain)) is Level.OK


def test_programs_answers_are_taken_apart() -> None:
    assert exposure("→ Overall exposure level for autotuner.service: 1.4 OK 🙂\n") == 1.4
    assert exposure("Failed to connect to bus") is None
    said = "0, 570.86.15, Disabled, Enabled, 0\n1, 570.86.15, [N/A], [N/A], [N/A]\nnonsense\n2, 570.86.15, Enabled, Enabled, 4\n"
    assert read_gpus(said) == (
        GpuSeen(0, "570.86.15", "Disabled", "Enabled", 0),
        GpuSeen(1, "570.86.15"),
        GpuSeen(2, "570.86.15", "Enabled", "Enabled", 4),
    )
