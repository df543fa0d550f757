"""nvidia-smi's answers, the ballast, the status file, the clocks."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from autotuner.edge import clock, statusfile
from autotuner.edge.ballast import BALLAST_BYTES, Ballast
from autotuner.edge.gpu import parse
from autotuner.edge.host import GpuUse

MEMORY = "0, GPU-aaaa, 1234, 143771\n1, GPU-bbbb, 0, 143771\n"


def test_gpus_and_their_processes_are_matched() -> None:
    processes = "GPU-aaaa, 4711, python3, 1000\nGPU-aaaa, 4712, /usr/bin/x y, 200\nGPU-cccc, 9, z, 1\n"
    first = GpuUse(0, 1234.0, 143771.0, ((4711, "python3", 1000.0), (4712, "/usr/bin/x y", 200.0)))
    second = GpuUse(1, 0.0, 143771.0)
    assert parse(MEMORY, processes, (0, 1)) == (first, second)
    assert parse(MEMORY, processes, (1,)) == (second,)
    assert parse(MEMORY, processes, ()) == ()
    assert parse(MEMORY, processes, (7,)) == ()


@pytest.mark.parametrize("figure", ["[N/A]", "[Not Supported]", "[Insufficient Permissions]", "", "nan", "inf", "ERR!"])
def test_a_figure_that_is_hidden_is_zero(figure: str) -> None:
    (use,) = parse(f"0, GPU-a, {figure}, 100", f"GPU-a, 7, x, {figure}", (0,))
    assert use == GpuUse(0, 0.0, 100.0, ((7, "x", 0.0),))


def test_a_stranger_with_commas_in_its_name_is_not_overlooked() -> None:
    (use,) = parse("0, GPU-a, 1, 2", "GPU-a, 7, /opt/odd, name, v2, 300", (0,))
    assert use.processes == ((7, "/opt/odd, name, v2", 300.0),)


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "No devices were found\n", "NVIDIA-SMI has failed because it couldn't communicate", "0, GPU-a\n", "x, GPU-a, 1, 2\n",
     "\u00b2, GPU-a, 1, 2", "  MIG 1g.18gb Device 0: (UUID: MIG-1234)", "0, GPU-a, 1, 2, 3", ",,,", "-1, a, b, c", "\0\0"],
)  # fmt: skip
def test_lines_that_make_no_sense_are_left_out(text: str) -> None:
    assert parse(text, text, (0, 1)) == ()
    (use,) = parse("0, GPU-a, 5, 6\n" + text, "MIG-1234, 7, x, 1\nGPU-a, [N/A], x, 1\n" + text, (0,))
    assert use == GpuUse(0, 5.0, 6.0)


# --- ballast


def test_the_ballast_holds_real_room_and_gives_it_up(small_disk: Any, fill: Any) -> None:
    place = small_disk((2 * BALLAST_BYTES >> 10) + 256)
    ballast = Ballast(place)
    ballast.drop()
    assert ballast.take()
    assert ballast.take()
    assert (place / "ballast").stat().st_blocks * 512 >= BALLAST_BYTES
    fill(place)
    with pytest.raises(OSError, match="No space"):
        (place / "x").write_bytes(b"x" * 4096)
    ballast.drop()
    (place / "x").write_bytes(b"x" * (1 << 20))


def test_a_ballast_that_was_given_up_is_taken_again_once_there_is_room_for_it_and_as_much_again(
    small_disk: Any, fill: Any
) -> None:
    place = small_disk((2 * BALLAST_BYTES >> 10) + 256)
    ballast = Ballast(place)
    assert ballast.take()
    fill(place)
    ballast.drop()
    assert not ballast.take(), "it would be given up at once"
    for path in place.iterdir():
        path.unlink()
    assert ballast.take()
    assert (place / "ballast").exists()


def test_there_may_be_no_room_for_ballast(small_disk: Any) -> None:
    place = small_disk(1024)
    assert not Ballast(place).take()
    assert list(place.iterdir()) == []
    assert not Ballast(place / "no" / "folder").take()


def test_a_ballast_of_the_wrong_size_is_made_right(tmp_path: Path) -> None:
    (tmp_path / "ballast").write_bytes(b"short")
    before = len(os.listdir("/proc/self/fd"))
    assert Ballast(tmp_path).take()
    assert (tmp_path / "ballast").stat().st_size == BALLAST_BYTES
    assert len(os.listdir("/proc/self/fd")) == before


# --- status file


def test_the_status_comes_back_as_it_was(tmp_path: Path) -> None:
    assert statusfile.read(tmp_path) == {}
    status = {"pid": 1, "slots": {"é": {"sentence": "\u2028"}}}
    statusfile.write(tmp_path, status)
    assert statusfile.read(tmp_path) == status
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("damaged", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_a_damaged_status_is_none(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "status.json").write_bytes(damaged)
    assert statusfile.read(tmp_path) == {}


def test_a_full_disk_keeps_the_old_status(small_disk: Any, fill: Any) -> None:
    place = small_disk(64)
    statusfile.write(place, {"old": "x" * 100})
    fill(place)
    statusfile.write(place, {"new": "x" * 9000})
    assert statusfile.read(place) == {"old": "x" * 100}
    (place / "filler").unlink()
    statusfile.write(place, {"new": 1})
    assert statusfile.read(place) == {"new": 1}
    statusfile.write(place / "no" / "folder", {})


def test_a_reader_never_sees_half_a_status(tmp_path: Path) -> None:
    statusfile.write(tmp_path, {"n": "0" * 20_000})
    ended, broken = threading.Event(), []

    def read() -> None:
        while not ended.is_set():
            if len(set(statusfile.read(tmp_path).get("n", "01"))) != 1:
                broken.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(200):
        statusfile.write(tmp_path, {"n": str(i % 10) * 20_000})
    ended.set()
    reader.join()
    assert broken == []


# --- clocks


def test_labels_and_clocks() -> None:
    assert len(clock.utc_label()) == len("2026-02-23 00:14:07Z")
    assert clock.utc_label().endswith("Z")
    assert clock.monotonic_s() <= clock.monotonic_s()
    assert len(clock.boot_id()) == 36
    assert clock.local_now().tzinfo is not None
    assert json.dumps(clock.monotonic_us()).isdigit()
