"""The unit and its installer: what systemd would refuse, what the daemon relies on, what an installation puts where."""

import json
import os
import re
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from autotuner.daemon import CYCLE_DEADLINE_S
from autotuner.edge.ladder import AUTO_VARIABLE
from autotuner.edge.procfs import LAUNCH_VARIABLE
from autotuner.edge.rungs import STOP_S
from autotuner.errors import InvalidInput, Locked, NotFound
from autotuner.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = ROOT / "systemd"
INSTALLED = {
    "etc/autotuner/autotuner.toml",
    "etc/polkit-1/rules.d/50-autotuner.rules",
    "etc/systemd/system/autotuner-devices.service",
    "etc/systemd/system/autotuner-server@.service",
    "etc/systemd/system/autotuner.service",
    "etc/sysusers.d/autotuner.conf",
    "etc/tmpfiles.d/autotuner.conf",
}


class _Unit(RawConfigParser):
    """Unit files have directive names with capitals, and values with `=`."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def _read(*names: str) -> RawConfigParser:
    """A unit, and the drop-ins that change it."""
    unit = _Unit(delimiters=("=",), comment_prefixes=("#",), strict=False)
    unit.read([SYSTEMD / name for name in names], encoding="utf-8")
    return unit


@pytest.fixture(name="unit")
def _unit() -> RawConfigParser:
    return _read("autotuner.service")


@pytest.fixture(name="server")
def _server() -> RawConfigParser:
    return _read("autotuner-server@.service")


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


def test_servers_outlive_a_restart_of_the_daemon(unit: RawConfigParser, server: RawConfigParser) -> None:
    service = unit["Service"]
    assert service["KillMode"] == "process"  # what an older version left in this unit, and where servers inherit
    assert service["OOMPolicy"] == "continue"
    for lost_at_stop in ("PrivateIPC", "RemoveIPC", "DynamicUser", "RuntimeDirectory"):
        assert lost_at_stop not in service
        assert lost_at_stop not in server["Service"]
    for tied in ("BindsTo", "PartOf", "Requires", "StopPropagatedFrom"):
        assert tied not in server["Unit"]
    assert service["Slice"] == server["Service"]["Slice"]  # and not the one in which an older version left a server


def test_a_server_goes_with_its_unit_as_a_whole_and_is_never_restarted_by_it(server: RawConfigParser) -> None:
    service = server["Service"]
    assert (service["Type"], service["KillMode"], service["Restart"], service["OOMPolicy"]) == (
        *("exec", "control-group", "no"),
        "stop",
    )
    assert float(service["TimeoutStopSec"]) < STOP_S  # a stop that we wait for ends by systemd's patience, not ours
    assert service["Environment"] == f"{LAUNCH_VARIABLE}=%i"
    assert service["ExecStart"].startswith("@PYTHON@ -I -m autotuner.edge.shim --foreground ")


def test_the_sandbox_of_servers_leaves_gpus_and_compilers_alone(server: RawConfigParser) -> None:
    # ProtectClock implies a DeviceAllow=, and so denies every other device.
    breaks_cuda = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute"}
    assert not breaks_cuda & set(server["Service"])
    opened = _read("autotuner.service", "autotuner-inherit.conf")["Service"]
    assert (opened["DevicePolicy"], opened["DeviceAllow"], opened["ProtectClock"]) == ("auto", "", "no")
    assert (opened["MemoryDenyWriteExecute"], opened["SystemCallFilter"], opened["PrivateTmp"]) == ("no", "", "no")
    assert opened["Environment"] == f"{AUTO_VARIABLE}=shim"


def test_the_daemon_reads_what_its_sandbox_must_not_hide(unit: RawConfigParser) -> None:
    service = unit["Service"]
    for hides in ("ProtectProc", "ProcSubset", "PrivateDevices", "PrivateUsers", "PrivateNetwork"):
        assert hides not in service
    assert "char-nvidia*" in service["DeviceAllow"]
    assert service["IPAddressAllow"] == "localhost"
    assert service["Environment"] == f"{AUTO_VARIABLE}=systemd"


def test_daemon_and_servers_read_the_same_environment_and_work_the_same_folder(
    unit: RawConfigParser, server: RawConfigParser
) -> None:
    daemons, servers = unit["Service"], server["Service"]
    for same in ("User", "Group", "StateDirectory", "EnvironmentFile", "WorkingDirectory"):
        assert daemons[same] == servers[same]
    launches = load_settings(SYSTEMD / "autotuner.toml").launches
    assert servers["ExecStart"].endswith(f" {launches}/%i")


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


def _installed(tmp_path: Path, **variables: str) -> Path:
    """The folder with the units as installed, their programs standing in place."""
    prefix = tmp_path / "prefix"
    for name in ("autotuner", "python"):
        (prefix / "bin").mkdir(parents=True, exist_ok=True)
        (prefix / "bin" / name).write_text("#!/bin/sh\n")
        (prefix / "bin" / name).chmod(0o755)
    ran = _install(tmp_path / "root", PREFIX=str(prefix), **variables)
    assert ran.returncode == 0, ran.stderr
    return tmp_path / "root/etc/systemd/system"


def _analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        print("skipped: systemd-analyze is not installed")
        pytest.skip("systemd-analyze is not installed: the units were not looked at")
    return subprocess.run([analyze, *arguments], capture_output=True, text=True, check=False, timeout=120)


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    folder = _installed(tmp_path)
    instance = folder / "autotuner-server@0123456789abcdef.service"
    shutil.copy(folder / "autotuner-server@.service", instance)
    units = (folder / "autotuner.service", folder / "autotuner-devices.service", instance)
    ran = _analyze("verify", "--man=no", *map(str, units))
    about_them = [line for line in ran.stderr.splitlines() if "autotuner" in line]
    assert (ran.returncode, about_them) == (0, []), ran.stderr


@pytest.mark.parametrize(("name", "most"), [("autotuner.service", 15), ("autotuner-server@.service", 35)])
def test_the_units_ship_sandboxed(tmp_path: Path, name: str, most: int) -> None:
    unit = _installed(tmp_path) / name
    ran = _analyze("security", "--offline=true", "--no-pager", f"--threshold={most}", str(unit))
    assert ran.returncode == 0, ran.stdout[-300:]
    bare = tmp_path / "bare.service"
    bare.write_text("[Service]\nExecStart=/bin/true\n")
    assert _analyze("security", "--offline=true", f"--threshold={most}", str(bare)).returncode != 0  # the gate is one


@pytest.mark.parametrize(
    ("action", "user", "unit", "verb", "allowed"),
    [
        ("manage-units", "autotuner", "autotuner-server@0123456789abcdef.service", "start", True),
        ("manage-units", "autotuner", "autotuner-server@0123456789abcdef.service", "stop", True),
        ("manage-units", "autotuner", "autotuner-server@0123456789abcdef.service", "kill", True),
        ("manage-units", "autotuner", "autotuner-server@0123456789abcdef.service", "set-property", False),
        ("manage-units", "autotuner", "autotuner-server@x.service", "start", False),
        ("manage-units", "autotuner", "sshd.service", "start", False),
        ("manage-units", "autotuner", "autotuner-server@0123456789abcdef.1.service", "start", True),  # a further rank
        ("manage-units", "autotuner", "autotuner-server@0123456789abcdef.x.service", "start", False),
        ("manage-units", "autotuner", "autotuner-server@0123456789abcdef.service.service", "start", False),
        ("manage-units", "autotuner", "a\\nautotuner-server@0123456789abcdef.service", "start", False),
        ("manage-units", "autotuner", None, "start", False),
        ("manage-units", "somebody", "autotuner-server@0123456789abcdef.service", "start", False),
        ("manage-unit-files", "autotuner", "autotuner-server@0123456789abcdef.service", "start", False),
    ],
)
def test_polkit_allows_the_daemon_its_servers_units_and_nothing_else(
    action: str, user: str, unit: str | None, verb: str, allowed: bool
) -> None:
    node = shutil.which("node")
    if node is None:
        print("skipped: node is not installed, which stands in for polkit")
        pytest.skip("node is not installed: the polkit rule was not run")
    asked = json.dumps({"id": f"org.freedesktop.systemd1.{action}", "unit": unit, "verb": verb, "user": user})
    script = f"""
        const asked = {asked}; let rule;
        const polkit = {{ addRule: (f) => {{ rule = f; }}, Result: {{ YES: "yes", NOT_HANDLED: undefined }} }};
        {(SYSTEMD / "autotuner.polkit.rules").read_text(encoding="utf-8")}
        const action = {{ id: asked.id, lookup: (name) => asked[name] === null ? undefined : asked[name] }};
        console.log(rule(action, {{ user: asked.user }}) === "yes");
    """
    ran = subprocess.run([node, "-e", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(allowed).lower()


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


def test_where_servers_must_inherit_the_daemons_unit_is_opened_and_closed_again(tmp_path: Path) -> None:
    drop_in = _installed(tmp_path, SERVERS="inherit") / "autotuner.service.d/10-servers-inherit.conf"
    assert drop_in.read_text() == (SYSTEMD / "autotuner-inherit.conf").read_text()
    assert not (tmp_path / "root/etc/polkit-1").exists()
    _installed(tmp_path)
    assert not drop_in.exists()
    ran = _install(tmp_path / "root", SERVERS="both")
    assert (ran.returncode, "SERVERS" in ran.stderr) == (1, True)


def test_a_program_elsewhere_is_run_by_the_interpreter_that_its_first_line_names(tmp_path: Path) -> None:
    (tmp_path / "prefix/bin").mkdir(parents=True)
    (tmp_path / "prefix/bin/autotuner").write_text("#! /usr/bin/python3.12 -I\nimport sys\n")
    _install(tmp_path / "root", PREFIX=str(tmp_path / "prefix"))
    text = (tmp_path / "root/etc/systemd/system/autotuner-server@.service").read_text(encoding="utf-8")
    assert "ExecStart=/usr/bin/python3.12 -I -m autotuner.edge.shim" in text


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
