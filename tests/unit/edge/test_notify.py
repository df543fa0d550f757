"""The service manager hears the protocol's words, in its datagrams, and nobody else learns its address."""

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S

from autotuner.edge import clock
from autotuner.edge.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        if request.param == "path":
            s.bind(str(tmp_path / "notify"))
            monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        else:
            name = f"autotuner-test-{os.getpid()}"
            s.bind("\0" + name)
            monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        s.setblocking(False)
        yield s


def heard(manager: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(manager.recv(4096).decode())
        except BlockingIOError:
            return found


def test_the_words_of_a_life(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    notifier = Notifier()
    assert notifier.watchdog_s == 3.0
    notifier.ready()
    notifier.status("serves sglang-base,\n  STATUS=forged\nREADY=1 " + "x" * 400)
    notifier.cycle_completed()
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.reloading()
    notifier.ready()
    notifier.stopping()
    said = heard(manager)
    assert [s.split("=")[0] for s in said] == ["READY", "STATUS", "WATCHDOG", "RELOADING", "READY", "STOPPING"]
    assert "\n" not in said[1]
    assert said[1].startswith("STATUS=serves sglang-base, STATUS=forged READY=1 xxx")
    assert len(said[1]) == len("STATUS=") + 300
    reloading = re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=(\d+)", said[3])
    assert reloading is not None
    assert before <= int(reloading.group(1)) <= clock.monotonic_us()


def test_the_daemon_is_ready_when_its_first_cycle_is_complete_and_says_so_once(manager: socket.socket) -> None:
    notifier = Notifier()
    notifier.status("starting up")
    assert heard(manager) == ["STATUS=starting up"]
    notifier.cycle_completed()
    notifier.cycle_completed()
    assert heard(manager) == ["READY=1"]


def test_no_child_learns_the_managers_address(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "1")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    Notifier().ready()
    assert heard(manager) == ["READY=1"]
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & set(os.environ)


@pytest.mark.parametrize(("asked", "pid"), [("", ""), ("0", ""), ("nonsense", ""), ("3000000", "1")])
def test_the_watchdog_is_fed_only_where_it_is_ours(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, asked: str, pid: str
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", asked)
    if pid:
        monkeypatch.setenv("WATCHDOG_PID", pid)
    notifier = Notifier()
    notifier.cycle_completed()
    assert (notifier.watchdog_s, heard(manager)) == (0.0, ["READY=1"])


def test_a_manager_that_vanished_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in (str(tmp_path / "gone"), "@gone", "", "vsock:2:1", "x" * 500):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notifier = Notifier()
        notifier.ready()
        notifier.stopping()
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    Notifier().ready()


def test_a_manager_that_does_not_read_does_not_hold_the_daemon_up(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotuner.edge.notify.SEND_TIMEOUT_S", 0.001)
    notifier = Notifier()
    begun = time.monotonic()
    for i in range(600):  # more than any queue of datagrams holds
        notifier.status(str(i))
    assert time.monotonic() - begun < PATIENCE_S  # the usual limit of a second each would make ten minutes
    assert heard(manager)[0] == "STATUS=0"


def test_text_that_is_no_text_is_told_all_the_same(manager: socket.socket) -> None:
    notifier = Notifier()
    notifier.status("file \udcff name")
    assert heard(manager) == ["STATUS=file ? name"]
