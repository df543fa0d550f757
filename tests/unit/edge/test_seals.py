"""Sealing survives a crash anywhere: no entry is left unsealed, none looks forged, and no old key stays on the host."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from autotuner.core.entry import GENESIS, Draft, Entry, render
from autotuner.core.seal import KeyState, check_seals, key_after
from autotuner.edge import files
from autotuner.edge.seals import Seals, begin, read_all, read_key
from autotuner.errors import DiskFull, JournalBroken, StoreError

KEY = b"k" * 32


def entries(count: int) -> list[Entry]:
    made: list[Entry] = []
    for number in range(1, count + 1):
        made.append(render(Draft("s", "t", "u"), number, "2026-02-23 00:14:07Z", made[-1].sha256 if made else GENESIS))
    return made


class Place:
    """A state folder with a journal of entries that are all committed, and as many of them in the files as are said to be."""

    def __init__(self, folder: Path, count: int = 6) -> None:
        self.key_file, self.folder, self.made = folder / "seal.key", folder / "journal", entries(count)
        self.folder.mkdir()

    def keep_up(self, last: int, seals: Seals | None = None) -> Seals:
        seals = seals or Seals(self.key_file, self.folder)
        seals.keep_up(last, lambda number: self.made[number:])
        return seals

    def flaws(self) -> list[str]:
        found, _ = check_seals(
            KEY, read_all(self.folder), {e.number: e.sha256 for e in self.made}, read_key(self.key_file)
        )
        return [str(flaw) for flaw in found]

    @property
    def sealed(self) -> list[int]:
        return [seal.number for seal in read_all(self.folder).seals]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    begin(made.key_file, 1, KEY)
    return made


def test_nothing_happens_where_sealing_was_never_set_up(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.keep_up(6)
    assert list(place.folder.iterdir()) == []
    assert not place.key_file.exists()


def test_each_entry_is_sealed_once_and_those_that_wait_are_caught_up_with(place: Place) -> None:
    seals = place.keep_up(2)
    place.keep_up(2, seals)
    assert place.sealed == [1, 2]
    place.keep_up(6)
    assert place.sealed == [1, 2, 3, 4, 5, 6]
    assert place.flaws() == []
    assert place.key_file.stat().st_mode & 0o777 == 0o600


def test_only_the_key_for_the_next_entry_is_on_the_host(place: Place) -> None:
    held = os.open(place.key_file, os.O_RDONLY)  # whoever still has the old file open sees zeros
    place.keep_up(6)
    assert read_key(place.key_file) == KeyState(1, 7, key_after(KEY, 6))
    assert set(os.pread(held, 100, 0)) == {0}
    os.close(held)
    everything = b"".join(path.read_bytes() for path in place.key_file.parent.rglob("*") if path.is_file())
    assert not any(key_after(KEY, i).hex().encode() in everything for i in range(6))


def test_sealing_that_begins_late_covers_what_came_before_through_the_chain(tmp_path: Path) -> None:
    place = Place(tmp_path)
    begin(place.key_file, 4, KEY)
    place.keep_up(6)
    assert place.sealed == [4, 5, 6]
    assert place.flaws() == []


def test_a_crash_at_any_step_leaves_nothing_unsealed_and_nothing_that_looks_forged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write, fsync, rename and truncation in turn is the last thing that the process did."""

    class Dead(BaseException):
        pass

    names = ("write", "fsync", "truncate", "pwrite", "ftruncate")
    for at in range(1, 60):
        folder = tmp_path / str(at)
        folder.mkdir()
        place = Place(folder)
        begin(place.key_file, 1, KEY)
        place.keep_up(2)
        calls = 0

        def dying(real: Any, at: int = at) -> Any:
            def call(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > at:
                    raise Dead
                return real(*args)

            return call

        with monkeypatch.context() as m:
            for name in names:
                m.setattr(os, name, dying(getattr(os, name)))
            m.setattr(Path, "replace", dying(Path.replace))
            try:
                place.keep_up(5)
                done = True
            except Dead:
                done = False
        assert place.flaws() == [], at
        place.keep_up(6)
        assert place.sealed == [1, 2, 3, 4, 5, 6], at
        assert place.flaws() == [], at
        assert not list(folder.glob(".seal.key*")), at
        if done:
            break
    assert done
    assert at > 10


@pytest.mark.parametrize("kept", range(70))
def test_a_torn_last_line_is_cut_and_written_again(place: Place, kept: int) -> None:
    place.keep_up(3)
    path, key = place.folder / "seals", read_key(place.key_file)
    whole = path.read_bytes()
    for tail in (b"", bytes(20)):
        place.key_file.write_text(f"1 3 {key_after(KEY, 2).hex()}\n")
        path.write_bytes(whole[: len(whole) - 67 + min(kept, 66)] + tail)
        assert place.flaws() == []
        place.keep_up(3)
        assert path.read_bytes() == whole
        assert read_key(place.key_file) == key


def test_a_first_line_of_garbage_is_no_forgery_before_its_key_was_turned(place: Place) -> None:
    """Power loss leaves anything of what was not synced; only what the key has gone beyond was there for good."""
    for garbage in (b"1 " + b"x" * 64 + b"\n", b"7 " + b"0" * 64 + b"\n", b"\n\n\n"):
        (place.folder / "seals").write_bytes(garbage)
        assert place.flaws() == []
        place.keep_up(1)
        assert place.sealed == [1]
        assert place.flaws() == []
        (place.folder / "seals").unlink()
        begin(place.key_file, 1, KEY)


def test_a_damaged_last_line_is_made_again_whatever_number_it_bears(place: Place) -> None:
    """A bit that power loss turned over makes 2 of 3, which is an earlier seal's number."""
    place.keep_up(3)
    path, key = place.folder / "seals", place.key_file
    whole, turned = path.read_bytes(), key.read_bytes()
    last = whole.rindex(b"\n3 ") + 1
    for position, bit in [(last, bit) for bit in range(8)] + [(at, at % 8) for at in range(last + 1, len(whole))]:
        found = bytearray(whole)
        found[position] ^= 1 << bit
        key.write_text(f"1 3 {key_after(KEY, 2).hex()}\n")
        path.write_bytes(found)
        assert place.flaws() == [], (position, bit)
        place.keep_up(3)
        assert (path.read_bytes(), key.read_bytes()) == (whole, turned), (position, bit)


def test_a_key_that_is_read_is_there_for_good_before_anything_is_sealed_with_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was killed between a rename and the folder's fsync leaves a key that power loss takes back to the one before."""
    place.keep_up(2)
    done: list[Path] = []
    sync_folder, append = files.sync_folder, files.append
    monkeypatch.setattr(files, "sync_folder", lambda path: (done.append(path), sync_folder(path)))
    monkeypatch.setattr(files, "append", lambda path, line: (done.append(path), append(path, line)))
    place.keep_up(3)
    assert place.key_file.parent in done[: done.index(place.folder / "seals")]


@pytest.mark.parametrize("order", [(0, 2), (0, 0, 1), (0, 1, 1), (1, 0, 2), (0, 2, 1), (1, 2), ()])
def test_seals_that_are_missing_moved_or_doubled_are_found_and_left_alone_when_sealing_goes_on(
    place: Place, order: tuple[int, ...]
) -> None:
    place.keep_up(3)
    path = place.folder / "seals"
    lines = path.read_bytes().splitlines(keepends=True)
    forged = b"".join(lines[at] for at in order)
    path.write_bytes(forged)
    assert place.flaws()
    place.keep_up(5)
    assert path.read_bytes().startswith(forged)
    assert place.flaws()


def test_a_full_disk_delays_a_seal_and_a_failed_fsync_is_not_tried_again_blindly(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    seals = place.keep_up(2)
    for code, error in ((errno.ENOSPC, DiskFull), (errno.EIO, StoreError)):
        with monkeypatch.context() as m:

            def fails(fd: int, code: int = code) -> None:
                raise OSError(code, "no")

            m.setattr(os, "fsync", fails)
            with pytest.raises(error):
                place.keep_up(3, seals)
        assert place.flaws() == []
    place.keep_up(3, seals)
    assert place.sealed == [1, 2, 3]
    assert place.flaws() == []


@pytest.mark.parametrize("text", ["", "x", "1 abc", "1 1 abc", "0 1 " + "00" * 32, "2 1 " + "00" * 32, "é"])
def test_a_key_that_is_none_is_said_and_nothing_is_sealed(place: Place, text: str) -> None:
    place.key_file.write_text(text)
    with pytest.raises(JournalBroken, match="is no key of seals"):
        place.keep_up(3)
    assert place.sealed == []


def test_seals_that_were_changed_are_left_alone_for_the_one_who_looks(place: Place) -> None:
    place.keep_up(3)
    path = place.folder / "seals"
    forged = path.read_bytes().replace(b"2 ", b"two ", 1)
    path.write_bytes(forged)
    place.keep_up(4)
    assert path.read_bytes().startswith(forged)
    assert place.flaws()
