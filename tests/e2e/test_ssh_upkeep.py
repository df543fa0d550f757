"""What fills up on another host is that host's own trouble, and is kept within bounds there."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.far import FarHouse
from e2e.house import free_port
from fakes.person import FullDisk
from fakes.sshd import Sshd
from patience import PATIENCE_S

pytestmark = [pytest.mark.ssh, pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture
def far(tmp_path: Path) -> Iterator[FarHouse]:
    sshd = Sshd(tmp_path / "sshd").start()
    house = FarHouse(tmp_path, sshd)
    yield house
    house.close()
    sshd.stop()


def test_a_full_disk_of_a_host_makes_its_slot_wait_and_nothing_else(far: FarHouse) -> None:
    """First there is no room even for the agent; then, with a server that serves, none for another launch."""
    far.extra = f"[slots.u]\nport = {free_port()}\nstop_grace_s = 2\ndrain_s = 1"
    base, faster, slower = (far.candidate(name, tok_s=tok_s) for name, tok_s in (("a", 10), ("b", 40), ("c", 4)))

    def says(what: str) -> bool:
        return what in far.status()["decision"]

    def done(slot: str) -> bool:
        return not far.read(lambda s: s.queue(slot) or s.trial_in_hand(slot))

    with FullDisk(far.remote, 8192) as disk, contextlib.closing(far):  # its launches are found while the disk is there
        disk.fill()
        far.start()
        far.cli("enqueue", "--no-preflight", "--slot", "t", base, faster)
        far.cli("enqueue", "--no-preflight", "--slot", "u", base)
        far.wait(lambda: says("the disk of host far is full"), PATIENCE_S, "the host to be named")
        far.wait(lambda: done("u"), 2 * PATIENCE_S, "the slot on this machine to go on")
        assert "trouble" not in far.cli("status").stdout
        disk.free()
        far.wait_settled()
        far.wait_serving("b")
        disk.fill()
        far.cli("enqueue", "--no-preflight", "--slot", "t", slower)
        far.wait(lambda: says("the disk of host far is full"), PATIENCE_S, "the host to be named again")
        before = len(far.launches())
        far.wait(lambda: len(far.launches()) > before + 1, PATIENCE_S, "it to be tried again and again")
        assert far.titles().count("blocked") == 1, "told once, not at each try"
        assert "trouble" not in far.cli("status").stdout
        assert len(far.servers()) <= 1
        disk.free()
        far.wait_settled()
        far.wait_serving("b")
        assert far.verdicts() == {"a": "pass", "b": "pass", "c": "fail"}
        assert far.titles().count("unblocked") == 1
        assert not [title for title in far.titles() if "degraded" in title]
        assert "entries intact" in far.cli("journal", "verify").stdout


def test_old_launches_and_programs_of_before_are_removed_there(far: FarHouse) -> None:
    far.settings["keep_launches"] = "1"
    far.start()
    names = ["a", "b", "c"]
    far.cli(
        "enqueue",
        "--no-preflight",
        *(far.candidate(name, mode="crash", tok_s=n) for n, name in enumerate(names)),
        far.candidate("d", tok_s=9),
    )
    far.wait_settled(2 * PATIENCE_S)
    far.end()
    assert len(far.known() - {"slots"}) >= 4
    old = far.remote / "agent-of-before.pyz"
    old.touch()
    os.utime(old, (time.time() - 200_000,) * 2)
    far.start()
    far.wait(lambda: len(far.known() - {"slots"}) == 1 and not old.exists(), PATIENCE_S, "them to be removed")
    far.wait_serving("d")
