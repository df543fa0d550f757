"""The disk does not fill with what nobody reads any more, and who still writes a log does not notice that it was cut."""

import os
from pathlib import Path

import pytest

from autotuner.edge import housekeeping

MIB = 1 << 20


def write(path: Path, mib: int, byte: bytes = b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    line = byte * 127 + b"\n"
    with path.open("wb") as f:
        for _ in range(mib):
            f.write(line * (MIB // len(line)))
        f.flush()
        os.fsync(f.fileno())


def cut(path: Path, most: int) -> bool:
    try:
        return housekeeping.cut_log(path, most)
    except OSError as error:
        pytest.skip(f"this file system cannot give back a file's middle: {error}")


def test_a_log_that_is_too_long_loses_its_middle_and_no_more_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    write(path, 40)
    writer = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.pwrite(writer, b"", 0)
    size = path.stat().st_size
    assert cut(path, 16 * MIB)
    assert path.stat().st_size == size, "offsets stay"
    assert path.stat().st_blocks * 512 < 12 * MIB
    os.write(writer, b"the last words\n")
    os.close(writer)
    left = housekeeping.read_log(path)
    assert left.startswith(b"x" * 127 + b"\n")
    assert left.endswith(b"x\nthe last words\n")
    assert housekeeping.CUT in left
    assert b"\0" not in left
    assert len(left) > 8 * MIB
    assert not cut(path, 16 * MIB), "it is short enough now"


def test_a_log_within_its_bounds_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    write(path, 2)
    before = path.read_bytes()
    assert not housekeeping.cut_log(path, 4 * MIB)
    assert path.read_bytes() == before == housekeeping.read_log(path)


def test_a_further_rank_of_a_server_over_several_nodes_stays_with_its_launch(tmp_path: Path) -> None:
    (tmp_path / "abc.1").mkdir()
    assert housekeeping.unprotected(tmp_path, {"abc"}) == []
    assert housekeeping.unprotected(tmp_path, {"abcd"}) == ["abc.1"]


def test_the_oldest_folders_that_nothing_protects_come_first_and_the_locks_are_no_launch(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old", "older", "oldest", "slots")):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    (tmp_path / "a-file").touch()
    (tmp_path / "elsewhere").symlink_to(tmp_path.parent)
    assert housekeeping.unprotected(tmp_path, {"older"}) == ["oldest", "old", "new"]
    assert housekeeping.unprotected(tmp_path / "none", set()) == []
    write(tmp_path / "old" / "core", 1)
    assert housekeeping.remove(tmp_path, "old")
    assert not (tmp_path / "old").exists()


def test_room_counts_what_the_disk_has_given(tmp_path: Path) -> None:
    write(tmp_path / "a" / "server.log", 40)
    write(tmp_path / "b" / "server.log", 1)
    (tmp_path / "slots").mkdir()
    before = housekeeping.room(tmp_path)
    assert (before.folders, before.bytes >= 41 * MIB) == (2, True)
    assert cut(tmp_path / "a" / "server.log", 16 * MIB)
    assert housekeeping.room(tmp_path).bytes < 20 * MIB


def test_of_files_that_can_be_made_again_the_newest_stay(tmp_path: Path) -> None:
    for age in range(5):
        (tmp_path / f"{age}.toml").touch()
        os.utime(tmp_path / f"{age}.toml", (1e9 - age, 1e9 - age))
    assert housekeeping.bound(tmp_path, "*.toml", 2) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.toml", "1.toml"]
    assert housekeeping.bound(tmp_path / "none", "*", 2) == 0
