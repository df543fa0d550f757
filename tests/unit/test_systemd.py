"""The unit and its installer: what systemd would refuse, what the daemon relies on, what an installation puts where."""

import os
import re
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from autotuner.daemon import CYCLE_DEADLINE_S
from autotuner.errors import InvalidInput, Locked, NotFound
from autotuner.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = ROOT / "systemd"
INSTALLED = {
    "etc/autotuner/autotuner.toml",
    "etc/systemd/system/autotuner.service",
    "etc/sysusers.d/autotuner.conf",
    "etc/tmpfiles.d/autotuner.conf",
}


class _Unit(RawConfigParser):
    """Unit files have directive names with capitals, and values with `=`."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.fixture(name="unit")
def _unit() -> RawConfigParser:
    unit = _Unit(delimiters=("=",), comment_prefixes=("#",), strict=True)
    unit.read(SYSTEMD / "autotuner.service", encoding="utf-8")
    return unit


def _install(destdir: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "DESTDIR": str(destdir), **variables}
    return subprocess.run(["sh", str(SYSTEMD / "install.sh")], env=env, capture_output=True, text=True, check=False)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_daemon_speaks_and_the_manager_listens(unit: RawConfigParser) -> None:
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert service["NotifyAccess"] == "main"
    assert "HUP" in service["ExecReload"]
    assert re.match(r"@PREFIX@/bin/autotuner .* daemon\b", service["ExecStart"])


def test_a_failed_cycle_is_forgiven_before_the_watchdog_bites(unit: RawConfigParser) -> None:
    assert float(unit["Service"]["WatchdogSec"]) >= 2 * CYCLE_DEADLINE_S


def test_servers_outlive_a_restart_of_the_daemon(unit: RawConfigParser) -> None:
    service = unit["Service"]
    assert service["KillMode"] == "process"
    assert service["OOMPolicy"] == "continue"
    for lost_at_stop in ("PrivateTmp", "PrivateIPC", "RemoveIPC", "DynamicUser", "RuntimeDirectory"):
        assert lost_at_stop not in service


def test_the_sandbox_that_servers_inherit_leaves_gpus_and_compilers_alone(unit: RawConfigParser) -> None:
    # ProtectClock implies a DeviceAllow=, and so denies every other device.
    breaks_cuda = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute"}
    assert not breaks_cuda & set(unit["Service"])


def test_the_service_is_no_root_and_owns_its_state_folder(unit: RawConfigParser) -> None:
    service = unit["Service"]
    assert service["User"] == "autotuner"
    assert service["StateDirectory"] == "autotuner"
    assert load_settings(SYSTEMD / "autotuner.toml").state_dir == Path("/var/lib/autotuner")
    assert re.search(r"^u autotuner ", (SYSTEMD / "autotuner.sysusers.conf").read_text(), re.MULTILINE)


def test_restarts_are_bounded_and_spare_what_a_restart_cannot_mend(unit: RawConfigParser) -> None:
    assert unit["Service"]["Restart"] == "on-failure"
    assert int(unit["Unit"]["StartLimitBurst"]) > 0
    assert int(unit["Unit"]["StartLimitIntervalSec"]) > 0
    prevented = {int(code) for code in unit["Service"]["RestartPreventExitStatus"].split()}
    assert {InvalidInput.exit_code, NotFound.exit_code, Locked.exit_code} <= prevented


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed: the unit was not verified")
    program = tmp_path / "bin" / "autotuner"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = (SYSTEMD / "autotuner.service").read_text(encoding="utf-8")
    unit = tmp_path / "autotuner.service"
    unit.write_text(text.replace("@PREFIX@", str(tmp_path)))
    ran = subprocess.run(
        [analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False, timeout=120
    )
    about_it = [line for line in ran.stderr.splitlines() if "autotuner" in line]
    assert (ran.returncode, about_it) == (0, []), ran.stderr


def test_the_installer_is_plain_sh() -> None:
    script = SYSTEMD / "install.sh"
    assert script.read_text(encoding="utf-8").startswith("#!/bin/sh\n")
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", str(script)], check=True)


def test_a_dry_installation_puts_exactly_these_files_below_destdir(tmp_path: Path) -> None:
    ran = _install(tmp_path / "root", PREFIX="/opt/tuner")
    assert ran.returncode == 0, ran.stderr
    assert _files(tmp_path / "root") == INSTALLED
    unit = (tmp_path / "root/etc/systemd/system/autotuner.service").read_text(encoding="utf-8")
    assert "ExecStart=/opt/tuner/bin/autotuner " in unit
    assert "@PREFIX@" not in unit.replace("fills in @PREFIX@", "")
    assert "systemctl enable --now autotuner" in ran.stdout


def test_installing_again_changes_nothing_and_keeps_the_operators_settings(tmp_path: Path) -> None:
    root = tmp_path / "root"
    _install(root)
    settings = root / "etc/autotuner/autotuner.toml"
    settings.write_text("# mine\n")
    before = {name: (root / name).stat().st_mtime_ns for name in INSTALLED}
    ran = _install(root)
    assert ran.returncode == 0, ran.stderr
    assert {name: (root / name).stat().st_mtime_ns for name in INSTALLED} == before
    assert settings.read_text() == "# mine\n"
    assert f"kept      {settings}" in ran.stdout


@pytest.mark.parametrize("prefix", ["opt/tuner", "/opt/a b", "/opt/$(id)", "/opt/a|b"])
def test_a_prefix_that_would_not_survive_the_unit_file_is_refused(tmp_path: Path, prefix: str) -> None:
    ran = _install(tmp_path / "root", PREFIX=prefix)
    assert ran.returncode == 1
    assert "PREFIX" in ran.stderr
    assert not (tmp_path / "root").exists()


def test_without_root_and_destdir_it_refuses(tmp_path: Path) -> None:
    stub = tmp_path / "id"
    stub.write_text("#!/bin/sh\necho 1000\n")
    stub.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PREFIX": str(tmp_path / "prefix")}
    ran = subprocess.run(["sh", str(SYSTEMD / "install.sh")], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "as root" in ran.stderr
    assert not (tmp_path / "prefix").exists()
