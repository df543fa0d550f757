"""A fresh house for each test, cleared afterwards however the test ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.house import House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()
