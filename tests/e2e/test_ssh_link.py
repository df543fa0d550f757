"""Hosts in network namespaces of their own: the link really goes down, the server dies, TCP is reset; and two hosts work at once."""

import asyncio
import json
import os
import random
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from e2e.far import FarHouse, clear, lines
from e2e.house import SLOT, House
from fakes import netns
from fakes.netns import Namespace
from fakes.sshd import Sshd
from patience import PATIENCE_S, comes_true

from autotuner.cli.common import State
from autotuner.cli.status import slot_status
from autotuner.edge.destination import Destination
from autotuner.edge.host import LaunchSpec
from autotuner.edge.host_ssh import SshHost
from autotuner.errors import HostError
from autotuner.settings import load_settings

pytestmark = [pytest.mark.ssh, pytest.mark.e2e, pytest.mark.timeout(1200)]

MOMENTS = int(os.environ.get("AUTOTUNER_MOMENTS", "50"))
WAYS = ("link down", "server killed", "reset")
WHILES = ("Launch", "AwaitServing", "RunLevel", "Stop", "Wait")  # what the daemon is to be doing just then
AIM_S = 10.0  # a moment that does not come by then is another one
LONG_S = 50.0  # longer than a connection may be silent: 15 s of keepalive, three times
COUNTS = "import time\nn = 0\nwhile True:\n    print('line', n, flush=True)\n    n += 1\n    time.sleep(0.005)\n"


@pytest.fixture
def far_away() -> Iterator[Namespace]:
    netns.needed()
    with Namespace() as there:
        yield there


class Watching:
    """Looks all the time, in a thread, at how many servers live; `most` is the most that were ever seen at once."""

    def __init__(self, house: FarHouse) -> None:
        self._house = house
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.most = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            self.most = max(self.most, len(self._house.servers()))


class Tailing:
    """Follows the log of a server there over the same link all the while, in a loop and a thread of its own; `read` is what came."""

    def __init__(self, to: Destination) -> None:
        self._host = SshHost([("far", to)], "tailing")
        self._launch = LaunchSpec(uuid.uuid4().hex[:16], "log", (sys.executable, "-I", "-c", COUNTS), {})
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._follow()))
        self._log = Path(to.folder) / "launches" / self._launch.launch_id / "server.log"
        self.read = b""
        self.written = b""
        self.cuts = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert comes_true(lambda: self.read)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def connected(self) -> bool:
        return self._host._link is not None and not self._host._link.lost

    async def _follow(self) -> None:
        try:
            await self._host.start(self._launch)
            while not self._over.is_set():
                await self._more()
                await asyncio.sleep(0.01)
            await self._host.stop(self._launch.launch_id, 5.0)
            while await self._more():
                continue
            self.written, self.cuts = self._log.read_bytes(), self._host.cuts
        finally:
            self._host.close()

    async def _more(self) -> bool:
        """One question for what is new; a host that does not answer for long is asked again."""
        try:
            piece = await self._host.read_log(self._launch.launch_id, len(self.read), 4096)
        except HostError:
            return True
        self.read += piece
        return bool(piece)


def cut(way: str, sshd: Sshd, there: Namespace, rng: random.Random, *, long: bool) -> None:
    if way == "link down":
        there.down(LONG_S if long else rng.uniform(0.1, 3.0), near=rng.random() < 0.5)
    elif way == "reset":
        there.reset(sshd.port)
    elif rng.random() < 0.5:
        sshd.cut()  # the processes of the connections alone
    else:
        sshd.stop()
        time.sleep(rng.uniform(0.1, 2.0))
        sshd.start()


class Hearing:
    """What the daemon's log has last told: whether it has a connection, and what it decided to do."""

    def __init__(self, house: House) -> None:
        self._path = house.folder / "daemon.log"
        self._read = 0
        self.connected = False
        self.action = ""

    def look(self) -> Self:
        with self._path.open("rb") as f:
            f.seek(self._read)
            whole, newline, _ = f.read().rpartition(b"\n")
        self._read += len(whole + newline)
        for line in whole.splitlines():
            told = json.loads(line) if line.startswith(b"{") else {}
            if told.get("event") in {"connected", "connection lost"}:
                self.connected = told["event"] == "connected"
            elif told.get("event") == "decided":
                self.action = told["action"]
        return self


def test_fifty_moments_of_link_down_server_killed_and_reset_leave_one_server_whole_logs_and_the_best_known(
    tmp_path: Path, far_away: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("AUTOTUNER_SEED", "11"))
    rng = random.Random(seed)
    sshd = Sshd(tmp_path / "sshd", on=far_away).start()
    if not far_away.resets(sshd.port):
        sshd.stop()
        pytest.skip("this kernel closes no sockets for `ss -K` (CONFIG_INET_DIAG_DESTROY)")
    house = FarHouse(tmp_path, sshd)
    house.benchmark |= {
        "seconds": "1.0",
        "output_tokens": "8",
    }  # short levels, so that the rest of a trial is met as well
    to = Destination(
        address=sshd.address, port=sshd.port, user=sshd.user, host_key=sshd.host_key, identity_file=sshd.client_key,
        folder=str(tmp_path / "tailed"),
    )  # fmt: skip
    ways = [WAYS[number % 3] for number in range(MOMENTS)]
    whiles = [WHILES[number % len(WHILES)] for number in range(MOMENTS)]
    rng.shuffle(ways)
    rng.shuffle(whiles)
    long = ways.index("link down")
    moments: Counter[str] = Counter()
    try:
        files = [house.candidate("plain", tok_s=10), house.candidate("faster", tok_s=40)]
        slower = house.candidate("slower", tok_s=4)
        house.start()
        house.cli("enqueue", "--no-preflight", *files, house.candidate("broken", mode="crash"), slower)
        heard = Hearing(house)
        with Watching(house) as watching, Tailing(to) as tailing:
            for number, (way, during) in enumerate(zip(ways, whiles, strict=True)):
                house.wait(
                    lambda: heard.look().connected and tailing.connected, PATIENCE_S, "both to be connected again"
                )
                if not (house.status()["queue"] or house.status()["trial"]) and during != "Wait":
                    house.cli("enqueue", "--no-preflight", "--again", slower)
                until = time.monotonic() + AIM_S
                while heard.look().action != during and time.monotonic() < until:
                    time.sleep(0.01)
                time.sleep(rng.uniform(0.0, 0.3) if during != "RunLevel" else rng.uniform(0.0, 2.0))
                moments[heard.look().action] += 1
                cut(way, sshd, far_away, rng, long=number == long)
            house.wait_settled(3 * PATIENCE_S)
            house.wait_serving("faster")
        assert watching.most == 1, f"{watching.most} servers at once; AUTOTUNER_SEED={seed}"
        known = {"plain": "pass", "faster": "pass", "broken": "fail", "slower": "fail"}
        assert house.verdicts() == known, f"AUTOTUNER_SEED={seed}"
        assert tailing.read == tailing.written, f"AUTOTUNER_SEED={seed}"
        told = tailing.read.splitlines()
        assert told == [b"line %d" % n for n in range(len(told))], f"AUTOTUNER_SEED={seed}"
        assert "entries intact" in house.cli("journal", "verify").stdout
        assert tailing.cuts >= MOMENTS // 2
        with capsys.disabled():
            print(
                f"\n{dict(Counter(ways))}; {tailing.cuts} connections lost; {len(told)} log lines; while: {dict(moments)}"
            )
    finally:
        house.close()
        sshd.stop()
        clear(tmp_path / "tailed")


def shown(house: House, slot: str) -> dict[str, Any]:
    settings = load_settings(house.settings_file)
    return dict(house.read(lambda store: slot_status(State(settings, store), slot)))


def verdicts(house: House, slot: str) -> dict[str, str]:
    return {t.name: str(t.verdict or t.state) for t in house.read(lambda s: s.trials(slot))}


def measuring(house: House, slot: str) -> bool:
    return str(shown(house, slot)["live"].get("stage", "")).startswith("measuring")


def test_two_hosts_are_worked_at_once_and_one_whose_link_is_down_holds_up_nobody(
    tmp_path: Path, far_away: Namespace
) -> None:
    """Two hosts in two namespaces, with one port number for both slots, since each has its own."""
    with Namespace() as other_there:
        sshd, other = Sshd(tmp_path / "one", on=far_away).start(), Sshd(tmp_path / "two", on=other_there).start()
        house = FarHouse(tmp_path, sshd)
        try:
            there = {**house.host, "address": json.dumps(other.address), "port": str(other.port)}
            there |= {"host_key": json.dumps(other.host_key), "identity_file": json.dumps(str(other.client_key))}
            there |= {"folder": json.dumps(str(tmp_path / "remote2")), "bench_python": json.dumps(sys.executable)}
            slot = {"host": '"other"', "port": str(house.port), "stop_grace_s": "2", "drain_s": "1"}
            house.extra = f"[hosts.other]\n{lines(there)}\n[slots.u]\n{lines(slot)}"
            files = [
                house.candidate(name, tok_s=tok_s) for name, tok_s in (("base", 10), ("faster", 40), ("slower", 4))
            ]
            house.write_settings()
            for name in (SLOT, "u"):
                house.cli("enqueue", "--no-preflight", "--slot", name, *files)
            house.start()
            house.wait(lambda: measuring(house, SLOT) and measuring(house, "u"), 2 * PATIENCE_S, "both to be measured")
            other_there.link(up=False)
            house.wait_settled(3 * PATIENCE_S)
            assert house.serving() == "faster"
            assert verdicts(house, "u") != verdicts(house, SLOT)
            house.wait(
                lambda: "host other" in shown(house, "u")["decision"], PATIENCE_S, "the slot to say what is wrong"
            )
            assert "cannot be reached" in shown(house, "u")["decision"]
            other_there.link(up=True)
            house.wait(
                lambda: not house.read(lambda s: s.queue("u") or s.trial_in_hand("u")), 3 * PATIENCE_S, "the rest"
            )
            assert verdicts(house, "u") == verdicts(house, SLOT) == {"base": "pass", "faster": "pass", "slower": "fail"}
        finally:
            house.close()
            clear(tmp_path / "remote2")
            sshd.stop()
            other.stop()
