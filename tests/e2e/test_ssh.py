"""Slots on hosts over a real OpenSSH server: verdicts as on this machine, and whatever happens to the connection, one server."""

import asyncio
import os
import random
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e.far import FarHouse, clear, command_line
from e2e.house import House
from fakes.link import Link
from fakes.sshd import Sshd

from autotuner.edge import procfs
from autotuner.edge.destination import Destination
from autotuner.edge.host import LaunchSpec
from autotuner.edge.host_ssh import SshHost

pytestmark = [pytest.mark.ssh, pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    server = Sshd(tmp_path / "sshd").start()
    yield server
    server.stop()


@pytest.fixture
def far(tmp_path: Path, sshd: Sshd) -> Iterator[FarHouse]:
    house = FarHouse(tmp_path, sshd)
    yield house
    house.close()


def campaign(house: House) -> dict[str, str]:
    """Four candidates, one of each fate; return their verdicts once the best-known serves again."""
    files = [
        house.candidate("plain", tok_s=10),
        house.candidate("faster", tok_s=40),
        house.candidate("slower", tok_s=4),
        house.candidate("broken", mode="crash"),
    ]
    house.start()
    house.cli("enqueue", "--no-preflight", *files)
    house.wait_settled(180)
    return house.verdicts()


def test_a_campaign_there_has_the_verdicts_of_one_here(far: FarHouse, tmp_path: Path) -> None:
    (tmp_path / "near").mkdir()
    near = House(tmp_path / "near")
    try:
        with ThreadPoolExecutor(2) as pool:  # at once: neither of them has to be fast
            here, there = pool.map(campaign, (near, far))
    finally:
        near.close()
    assert there == here
    assert far.serving() == "faster"
    assert len(far.servers()) == 1
    assert not list(far.state.glob("launches/*"))  # nothing of a server is on the daemon's machine
    shown = far.cli("show", "faster").stdout
    assert "the load was driven on host far itself" in shown
    far.end()
    far.write_settings(bench_on_host=False)
    far.start()
    far.cli("enqueue", "--no-preflight", "--again", far.candidate("slower", tok_s=4))
    far.wait_settled(60)
    assert "the load came through a port forwarded to host far" in far.cli("show", "slower").stdout
    assert "on host far" in far.cli("restore-best", "--wait").stdout


CUTS = 18  # three of each kind; 50 of others in test_ssh_link.py
LIVES = 50


def test_a_campaign_over_a_link_that_is_cut_again_and_again_ends_as_one_without(tmp_path: Path, sshd: Sshd) -> None:
    """Reset, hung, refused, its session killed, the whole SSH server gone for a while: in turn, at random moments."""
    seed = int(os.environ.get("AUTOTUNER_SEED", "7"))
    rng = random.Random(seed)
    with Link(sshd.port) as link:
        house = FarHouse(tmp_path, sshd, link.port)
        try:
            files = [
                house.candidate("plain", tok_s=10),
                house.candidate("faster", tok_s=40),
                house.candidate("broken", mode="crash"),
            ]
            house.start()
            house.cli("enqueue", "--no-preflight", *files)
            for number in range(CUTS):
                until = time.monotonic() + rng.uniform(0.2, 5.0)
                while time.monotonic() < until:
                    assert len(house.servers()) <= 1, f"two servers after cut {number}; AUTOTUNER_SEED={seed}"
                    time.sleep(0.05)
                _break(number % 6, link, sshd, rng)
            house.wait_settled(240)
            assert house.verdicts() == {"plain": "pass", "faster": "pass", "broken": "fail"}, f"AUTOTUNER_SEED={seed}"
            house.wait_serving("faster", 60)
            assert "entries intact" in house.cli("journal", "verify").stdout
        finally:
            house.close()


def _break(kind: int, link: Link, sshd: Sshd, rng: random.Random) -> None:
    if kind == 0:
        link.reset()
    elif kind == 1:
        link.reset_after(rng.randrange(20_000))
    elif kind == 2:
        sshd.cut()
    elif kind == 4:
        link.hang(3.0)
        time.sleep(rng.uniform(0.1, 2.0))
        link.reset()
    elif kind == 3:
        link.refuses = True
        link.reset()
        time.sleep(rng.uniform(0.1, 3.0))
        link.refuses = False
    else:
        sshd.stop()
        time.sleep(rng.uniform(0.1, 1.0))
        sshd.start()


def test_a_link_cut_after_any_number_of_bytes_leaves_one_server_and_its_whole_log(tmp_path: Path, sshd: Sshd) -> None:
    """Start, read and stop a server over a link that is reset after 1, 2, ... times so many bytes: each message in turn."""

    async def work() -> None:
        with Link(sshd.port) as link:
            to = Destination(
                address="127.0.0.1", port=link.port, user=sshd.user, host_key=sshd.host_key,
                identity_file=sshd.client_key, folder=str(tmp_path / "remote"),
            )  # fmt: skip
            host = SshHost([("far", to)], "me")
            try:
                await host.free_disk_mib()
                for step in range(LIVES):
                    link.reset_after(37 * step)
                    await _one_life(host, uuid.uuid4().hex[:16], tmp_path / "remote")
                assert host.cuts >= LIVES // 2
            finally:
                host.close()
                clear(tmp_path / "remote")

    asyncio.run(work())


async def _one_life(host: SshHost, launch_id: str, remote: Path) -> None:
    text = (
        "trap 'exit 3' TERM; i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); done; while :; do sleep 0.05; done"
    )
    await host.start(LaunchSpec(launch_id, "t", ("/bin/sh", "-c", text), {}))
    read = b""
    while not read.endswith(b"line 199\n"):
        read += await host.read_log(launch_id, len(read), 500)
    assert read == b"".join(b"line %d\n" % i for i in range(200))
    assert (await host.inspect(launch_id)).alive
    shell = [pid for pid in procfs.of_launch(launch_id) if b"line $i" in command_line(pid)]
    assert len(shell) == 1
    seen = await host.stop(launch_id, 5.0)
    assert (seen.alive, seen.exit_code) == (False, 3)
    assert not procfs.of_launch(launch_id)
    assert not (remote / "launches" / launch_id / "revoked.json").exists()
