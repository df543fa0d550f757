"""A daemon is killed and another finds the server again, untouched, wherever servers live on this host."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.house import House
from fakes import units

from autotuner.core.state import LaunchState
from autotuner.edge import procfs

pytestmark = pytest.mark.e2e


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    if not units.can_make_groups():
        print("skipped: control groups of version 2 cannot be made here")
        pytest.skip("control groups of version 2 cannot be made here (needs root)")
    made = House(tmp_path)
    for name, value in units.install(tmp_path / "systemd", made.state / "launches").items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()
    units.remove(tmp_path / "systemd")


@pytest.mark.parametrize("rung", ["systemd", "cgroup"])
def test_a_server_outlives_its_daemon_and_is_stopped_by_the_next_where_it_lives(house: House, rung: str) -> None:
    house.settings = {"launcher": f'"{rung}"'}
    house.start()
    house.cli("enqueue", house.candidate("base"), "--no-preflight")
    house.wait_serving("base", 90)
    before = house.servers()
    assert {procfs.launch_by_group(pid) for pid in before} == {house.launches()[-1].id}
    house.kill()
    house.settings = {"launcher": '"shim"'}  # what the next one launches itself is another matter
    house.write_settings()
    house.start()
    house.wait_serving("base", 90)
    assert house.servers() == before
    house.cli("enqueue", house.candidate("next", tok_s=400), "--no-preflight")
    house.wait(lambda: len(house.launches()) > 1 and house.launches()[0].state is LaunchState.ENDED, 90, "the next")
    assert not procfs.in_group_of(house.launches()[0].id)
    assert "could not be stopped" not in (house.folder / "daemon.log").read_text()
