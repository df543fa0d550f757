"""A process is (boot id, pid, start ticks), lives while any thread of it does, and gets no signal meant for another."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autotuner.edge import procfs


@pytest.fixture
def sleeper() -> Any:
    process = subprocess.Popen(["/bin/sleep", "600"], env={procfs.LAUNCH_VARIABLE: "abc"})
    while procfs.name_of(process.pid) != "sleep":
        time.sleep(0.005)
    yield process
    process.kill()
    process.wait()


def test_only_the_very_process_is_signalled(sleeper: Any) -> None:
    ticks = procfs.start_ticks(sleeper.pid)
    assert ticks is not None
    for forged in (ticks - 1, ticks + 1, 0):
        assert not procfs.signal_exactly(sleeper.pid, forged, signal.SIGKILL)
        assert not procfs.lives(sleeper.pid, forged)
    time.sleep(0.05)
    assert sleeper.poll() is None
    assert procfs.signal_exactly(sleeper.pid, ticks, signal.SIGTERM)
    assert sleeper.wait() == -signal.SIGTERM
    assert not procfs.signal_exactly(sleeper.pid, ticks, signal.SIGTERM)


REUSE = """
import os, signal, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from autotuner.edge import procfs
wrong = reused = 0
for _ in range(50):
    old = subprocess.Popen(["/bin/sleep", "600"])
    ticks = procfs.start_ticks(old.pid)
    old.kill(); old.wait()
    time.sleep(0.02)
    with open("/proc/sys/kernel/ns_last_pid", "w") as f:
        f.write(str(old.pid - 1))
    new = subprocess.Popen(["/bin/sleep", "600"])
    reused += new.pid == old.pid
    told = procfs.signal_exactly(old.pid, ticks, signal.SIGKILL)
    time.sleep(0.002)
    wrong += told or new.poll() is not None
    new.kill(); new.wait()
print(reused, wrong)
"""


def test_a_process_that_got_the_pid_of_another_is_not_signalled() -> None:
    """Reuse forced in a PID namespace of its own."""
    root = str(Path(procfs.__file__).parents[2])
    ran = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", REUSE, root],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ran.returncode != 0 and "unshare" in ran.stderr:
        print("skipped: no PID namespace here:", ran.stderr.strip())
        pytest.skip("no PID namespace can be made here (needs root)")
    reused, wrong = map(int, ran.stdout.split())
    assert reused >= 40, ran.stderr
    assert wrong == 0


def test_a_zombie_does_not_live() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        while procfs.stat_fields(pid)[0] != "Z":  # type: ignore[index]
            time.sleep(0.005)
        ticks = int(procfs.stat_fields(pid)[19])  # type: ignore[index]
        assert procfs.start_ticks(pid) is None
        assert not procfs.lives(pid, ticks)
        assert pid not in procfs.descendants(os.getpid())
        assert not procfs.signal_exactly(pid, ticks, signal.SIGTERM)
    finally:
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("state", "threads", "alive"),
    [
        ("R", 1, True),
        ("S", 1, True),
        ("D", 1, True),
        ("T", 1, True),
        ("t", 1, True),
        ("Z", 1, False),
        ("Z", 2, True),
        ("X", 0, False),
        ("x", 0, False),
    ],
)
def test_what_lives(state: str, threads: int, alive: bool) -> None:
    fields = [state, *["0"] * 16, str(threads), "0", "123"]
    assert procfs.alive(fields) is alive


@pytest.mark.parametrize("name", [") Z 1 1 1 (", "a b", "(", ")))", "Z\n9 9"])
def test_a_name_cannot_pass_for_fields(tmp_path: Path, name: str) -> None:
    program = tmp_path / name
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(program), "600"])
    try:
        while procfs.name_of(process.pid) != name.strip():
            time.sleep(0.005)
        fields = procfs.stat_fields(process.pid)
        assert fields is not None
        assert fields[0] in "SRD"
        assert int(fields[1]) == os.getpid()
        assert procfs.lives(process.pid, int(fields[19]))
    finally:
        process.kill()
        process.wait()


def test_a_launch_is_known_by_its_environment_or_its_ancestors(sleeper: Any) -> None:
    assert procfs.launch_id_of(sleeper.pid) == "abc"
    assert procfs.of_launch("abc") == [sleeper.pid]
    assert procfs.of_launch("ab") == []
    assert procfs.launch_id_of(os.getpid()) is None
    assert procfs.launch_above(os.getpid()) is None
    assert procfs.launch_above(1) is None
    parent = subprocess.Popen(
        ["/bin/sh", "-c", "env -i /bin/sleep 600 & echo $!; wait"],
        env={procfs.LAUNCH_VARIABLE: "xyz", "PATH": os.defpath}, stdout=subprocess.PIPE,
    )  # fmt: skip
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        while procfs.name_of(child) != "sleep":
            time.sleep(0.005)
        assert procfs.launch_id_of(child) is None
        assert procfs.launch_above(child) == "xyz"
        assert procfs.descendants(parent.pid) == [parent.pid, child]
        os.kill(child, signal.SIGKILL)
        parent.kill()


def test_a_process_that_is_gone_has_nothing_to_tell(sleeper: Any) -> None:
    sleeper.kill()
    sleeper.wait()
    pid = sleeper.pid
    assert procfs.stat_fields(pid) is None
    assert procfs.start_ticks(pid) is None
    assert procfs.launch_id_of(pid) is None
    assert procfs.usage(pid) == (0, 0.0, 0)
    assert procfs.name_of(pid) == "?"
    assert procfs.descendants(pid) == [pid]


def test_use_is_counted() -> None:
    read, cpu_s, resident = procfs.usage(os.getpid())
    assert read > 0
    assert cpu_s > 0
    assert resident > 1 << 20


@pytest.mark.parametrize(
    ("group", "launch"),
    [
        ("0::/system.slice/autotuner-server@0123456789abcdef.service", "0123456789abcdef"),
        ("0::/system.slice/autotuner-server@0123456789abcdef.12.service/below", "0123456789abcdef.12"),
        ("0::/user/autotuner-0123456789abcdef", "0123456789abcdef"),
        ("0::/user/autotuner-0123456789abcdef.1", "0123456789abcdef.1"),
        ("0::/user/autotuner-0123456789abcdef.x", None),
        ("0::/user/autotuner-trial-77", None),
    ],
)
def test_a_launch_and_its_further_ranks_are_known_by_their_groups(
    group: str, launch: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "_bytes", lambda _: group.encode() + b"\n")
    assert procfs.launch_by_group(1) == launch
