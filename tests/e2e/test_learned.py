"""What one start took is shown while the next one of the same model loads."""

from pathlib import Path

import pytest
from e2e.house import House

from autotuner.core.state import LaunchState

pytestmark = pytest.mark.e2e


def of_one_model(path: Path) -> Path:
    path.write_text(path.read_text().replace("[launch]", '[launch]\nmodel = "m"'))
    return path


def test_the_second_start_of_a_model_says_how_long_it_still_takes(house: House) -> None:
    house.write_settings()
    house.cli("enqueue", of_one_model(house.candidate("first", tok_s=100, mode="slow-start", start_s=2)))
    house.start()
    house.wait_serving("first")
    (row,) = house.launches()
    assert row.stages[0] == ("process up", 0.0)
    assert row.ready_s is not None
    house.cli("enqueue", of_one_model(house.candidate("second", tok_s=50, mode="slow-start", start_s=60)))

    def loading() -> bool:
        live = house.status()["live"]
        return any(r.name == "second" and r.state is LaunchState.STARTING for r in house.launches()) and bool(
            live.get("remaining_s") and live["stage_usual_s"] and live["usual_s"]
        )

    house.wait(loading, why="an estimate while the second one loads")
    house.wait(lambda: house.status()["live"].get("overdue"), why="a start that takes longer than the first did")
