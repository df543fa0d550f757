"""An entry once acknowledged is never lost, a torn one is cut and kept, and a changed one is found."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from autotuner.core.entry import GENESIS, Draft, Entry, file_header, render
from autotuner.edge.journal import Journal, compare_with_store, journal_files, read_entries
from autotuner.errors import DiskFull, JournalBroken, StoreError

AT = "2026-02-23 00:14:07Z"


def entries(count: int, at: str = AT, after: Entry | None = None) -> list[Entry]:
    made: list[Entry] = []
    for _ in range(count):
        last = made[-1] if made else after
        number, prev = (last.number + 1, last.sha256) if last else (1, GENESIS)
        draft = Draft(
            "kimi", f"tried number {number}", "It was tried.", (("Rule", "x"),), quote=("a line", "## no heading")
        )
        made.append(render(draft, number, at, prev))
    return made


def written(folder: Path, count: int = 3) -> list[Entry]:
    made = entries(count)
    journal = Journal(folder)
    journal.open("t")
    for entry in made:
        journal.append(entry)
    return made


def verifies(folder: Path, made: list[Entry]) -> None:
    found, flaws = read_entries(folder)
    assert flaws == []
    assert found == made


def the_file(folder: Path) -> Path:
    (path,) = journal_files(folder)
    return path


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    made = written(tmp_path / "new" / "journal")
    verifies(tmp_path / "new" / "journal", made)
    found = Journal(tmp_path / "new" / "journal").open("t")
    assert (found.number, found.sha256, found.torn) == (3, made[-1].sha256, None)


def test_an_entry_that_is_there_is_passed_over_and_one_that_does_not_follow_is_refused(tmp_path: Path) -> None:
    made = written(tmp_path)
    journal = Journal(tmp_path)
    journal.open("t")
    for entry in made:
        journal.append(entry)
    verifies(tmp_path, made)
    later = entries(3, after=made[-1])
    with pytest.raises(JournalBroken, match="entry 5 does not follow entry 3"):
        journal.append(later[1])
    with pytest.raises(JournalBroken, match="entry 4 does not follow"):
        journal.append(render(Draft("s", "t", "u"), 4, AT, "f" * 64))
    journal.append(later[0])
    verifies(tmp_path, [*made, later[0]])


def test_an_entry_torn_at_any_byte_is_cut_kept_and_written_again(tmp_path: Path) -> None:
    made = written(tmp_path / "good")
    whole = the_file(tmp_path / "good").read_bytes()
    good = len(whole) - len(made[-1].text.encode())
    for cut in range(good + 1, len(whole)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / "2026-02.md").write_bytes(whole[:cut])
        journal = Journal(folder)
        found = journal.open("label")
        assert (found.number, found.sha256) == (2, made[1].sha256), cut
        assert found.torn == folder / "2026-02.md.torn-label"
        assert found.torn.read_bytes() == whole[good:cut]
        assert (folder / "2026-02.md").read_bytes() == whole[:good]
        journal.append(made[2])
        verifies(folder, made)


def test_the_first_entry_of_a_file_torn_at_any_byte_is_cut_too(tmp_path: Path) -> None:
    made = written(tmp_path / "good", 1)
    whole = the_file(tmp_path / "good").read_bytes()
    for cut in range(len(whole)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / "2026-02.md").write_bytes(whole[:cut])
        journal = Journal(folder)
        assert journal.open("label").number == 0, cut
        journal.append(made[0])
        verifies(folder, made)


def test_pages_that_never_reached_the_disk_are_a_torn_tail(tmp_path: Path) -> None:
    """After a power loss the file may have its new length, and zeros where a page was not written."""
    made = entries(2)
    long = render(
        Draft("kimi", "t", "u", quote=tuple(f"line {i} " + "x" * 60 for i in range(60))), 3, AT, made[-1].sha256
    )
    made.append(long)
    journal = Journal(tmp_path / "good")
    journal.open("t")
    for entry in made:
        journal.append(entry)
    whole = the_file(tmp_path / "good").read_bytes()
    good = len(whole) - len(long.text.encode())
    for n, (start, end) in enumerate(
        [(good, len(whole)), (good, good + 512), (good + 512, good + 1024), (len(whole) - 512, len(whole))]
    ):
        folder = tmp_path / str(n)
        folder.mkdir()
        (folder / "2026-02.md").write_bytes(whole[:start] + bytes(end - start) + whole[end:])
        journal = Journal(folder)
        found = journal.open("label")
        assert found.number == 2
        assert found.torn is not None
        journal.append(long)
        verifies(folder, made)


@pytest.mark.parametrize("size", [0, 1, 20])
def test_a_file_without_a_whole_header_is_begun_anew(tmp_path: Path, size: int) -> None:
    (tmp_path / "2026-02.md").write_bytes(file_header("2026-02").encode()[:size])
    journal = Journal(tmp_path)
    assert journal.open("t").number == 0
    made = entries(1)
    journal.append(made[0])
    verifies(tmp_path, made)


def test_a_file_with_a_header_alone_goes_on(tmp_path: Path) -> None:
    (tmp_path / "2026-02.md").write_text(file_header("2026-02"))
    journal = Journal(tmp_path)
    assert journal.open("t").torn is None
    made = entries(1)
    journal.append(made[0])
    verifies(tmp_path, made)


def test_any_change_to_what_is_whole_is_broken_and_nothing_is_cut(tmp_path: Path) -> None:
    """Every byte of every entry but the last one's, and the header's; also with a tail that is torn besides."""
    made = written(tmp_path / "good", 3)
    whole = the_file(tmp_path / "good").read_bytes()
    last = len(whole) - len(made[-1].text.encode())
    path = tmp_path / "2026-02.md"
    for position in range(0, last, 3):
        changed = bytearray(whole)
        changed[position] ^= 0x01
        for data in (bytes(changed), bytes(changed)[:-1], bytes(changed)[: last + 40]):
            path.write_bytes(data)
            with pytest.raises(JournalBroken):
                Journal(tmp_path).open("t")
            assert path.read_bytes() == data
    assert list(tmp_path.glob("*.torn*")) == []


def test_a_changed_last_entry_is_broken_too(tmp_path: Path) -> None:
    made = written(tmp_path / "good", 3)
    whole = the_file(tmp_path / "good").read_bytes()
    start = len(whole) - len(made[-1].text.encode())
    for position in range(start, len(whole) - 6):
        changed = bytearray(whole)
        changed[position] ^= 0x01
        (tmp_path / "2026-02.md").write_bytes(changed)
        with pytest.raises(JournalBroken):
            Journal(tmp_path).open("t")


def test_entries_removed_moved_or_doubled_are_found(tmp_path: Path) -> None:
    made = entries(4)
    header, texts = file_header("2026-02"), [e.text for e in made]
    orders = [[0, 2, 3], [1, 2, 3], [0, 2, 1, 3], [0, 1, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3, 3], [0, 1, 2, 3, 0]]
    for order in orders:
        (tmp_path / "2026-02.md").write_text(header + "".join(texts[i] for i in order))
        with pytest.raises(JournalBroken):
            Journal(tmp_path).open("t")


def test_only_the_last_file_may_be_torn(tmp_path: Path) -> None:
    made = written(tmp_path, 2)
    journal = Journal(tmp_path)
    journal.open("t")
    (march,) = entries(1, "2026-03-01 00:00:00Z", made[-1])
    journal.append(march)
    first = tmp_path / "2026-02.md"
    first.write_bytes(first.read_bytes()[:-30])
    with pytest.raises(JournalBroken):
        Journal(tmp_path).open("t")


def test_a_month_change_keeps_the_chain_and_a_clock_that_goes_back_keeps_the_order(tmp_path: Path) -> None:
    made: list[Entry] = []
    for at in (
        "2026-02-28 23:59:59Z",
        "2026-03-01 00:00:00Z",
        "2026-01-01 00:00:00Z",
        "2025-12-31 00:00:00Z",
        "2026-04-01 00:00:00Z",
    ):
        made += entries(1, at, made[-1] if made else None)
    journal = Journal(tmp_path)
    journal.open("t")
    for entry in made:
        journal.append(entry)
    verifies(tmp_path, made)
    assert [p.name for p in journal_files(tmp_path)] == ["2026-02.md", "2026-03.md", "2026-04.md"]
    assert Journal(tmp_path).open("t").number == 5
    assert journal.last_number == 5


def test_an_altered_journal_is_set_aside_whole(tmp_path: Path) -> None:
    made = written(tmp_path)
    journal = Journal(tmp_path)
    (kept,) = journal.set_aside("label")
    assert kept.name == "2026-02.md.altered-label"
    assert journal.open("t").number == 0
    for entry in made:
        journal.append(entry)
    verifies(tmp_path, made)


def test_garbage_after_what_was_acknowledged_is_a_torn_tail_and_no_tampering(tmp_path: Path) -> None:
    """Power loss can leave anything where an entry was on its way: turned bits, another file's text, a whole last line."""
    made = written(tmp_path / "good")
    whole = the_file(tmp_path / "good").read_bytes()
    good = len(whole) - len(made[-1].text.encode())
    turned = bytearray(whole)
    turned[good + 40] ^= 4
    for number, data in enumerate(
        (bytes(turned), whole[:good] + b"\n\n## what\n -->\n\n## is this -->\n\n", whole + b"x\n -->\n\n")
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "2026-02.md").write_bytes(data)
        with pytest.raises(JournalBroken):
            Journal(folder).open("t")
        with pytest.raises(JournalBroken):
            Journal(folder).open("t", acknowledged=4 if number == 2 else 3)
        journal = Journal(folder)
        found = journal.open("t", acknowledged=2)
        assert found.torn is not None
        assert found.torn.read_bytes() == data[len((folder / "2026-02.md").read_bytes()) :]
        for entry in made:
            journal.append(entry)
        verifies(folder, made)


def test_what_is_kept_aside_twice_within_a_second_is_kept_twice(tmp_path: Path) -> None:
    written(tmp_path)
    path = the_file(tmp_path)
    kept = []
    for cut in (30, 50):
        path.write_bytes(path.read_bytes()[:-cut])
        kept.append(Journal(tmp_path).open("label").torn)
    assert kept[0] != kept[1]
    assert [p.read_bytes() for p in kept if p is not None and p.exists()] != []
    assert len(list(tmp_path.glob("*.torn-label*"))) == 2
    written(tmp_path / "other")
    journal = Journal(tmp_path / "other")
    first = journal.set_aside("label")
    (tmp_path / "other" / "2026-02.md").write_bytes(b"again")
    assert journal.set_aside("label") != first
    assert len(list((tmp_path / "other").glob("*.altered-label*"))) == 2


# --- files of one month


def test_a_file_that_would_grow_too_long_is_followed_by_another_part(tmp_path: Path) -> None:
    """At the boundary of an entry; the parts sort as they follow, the chain goes through them, and they are opened again."""
    made = entries(30)
    size = len(made[0].text.encode())
    for entry in made:  # opened anew each time, as after a crash
        journal = Journal(tmp_path, file_bytes=3 * size)
        journal.open("t")
        journal.append(entry)
    paths = journal_files(tmp_path)
    assert [path.name for path in paths[:3]] == ["2026-02.md", "2026-02.part-002.md", "2026-02.part-003.md"]
    assert len(paths) > 9
    assert paths == sorted(paths)
    assert all(path.stat().st_size <= 3 * size for path in paths)
    assert all(path.read_bytes().startswith(file_header(path.stem).encode()) for path in paths)
    verifies(tmp_path, made)
    paths[4].unlink()
    assert "missing, moved or doubled" in str(read_entries(tmp_path)[1][0])


def test_an_entry_longer_than_a_file_may_be_gets_a_file_of_its_own(tmp_path: Path) -> None:
    made = entries(3)
    journal = Journal(tmp_path, file_bytes=1)
    journal.open("t")
    for entry in made:
        journal.append(entry)
    assert len(journal_files(tmp_path)) == 3
    verifies(tmp_path, made)


def test_a_month_that_begins_after_several_parts_and_a_clock_that_goes_back_keep_the_order(tmp_path: Path) -> None:
    made: list[Entry] = []
    for at in ("2026-02-27", "2026-02-28", "2026-03-01", "2026-02-01", "2026-03-02"):
        made += entries(1, f"{at} 00:00:00Z", made[-1] if made else None)
    journal = Journal(tmp_path, file_bytes=1)
    journal.open("t")
    for entry in made:
        journal.append(entry)
    verifies(tmp_path, made)
    names = [path.name for path in journal_files(tmp_path)]
    assert names == ["2026-02.md", "2026-02.part-002.md", "2026-03.md", "2026-03.part-002.md", "2026-03.part-003.md"]


def test_only_the_last_part_may_be_torn(tmp_path: Path) -> None:
    made = entries(4)
    journal = Journal(tmp_path, file_bytes=1)
    journal.open("t")
    for entry in made:
        journal.append(entry)
    whole = {path: path.read_bytes() for path in journal_files(tmp_path)}
    for path, data in whole.items():
        path.write_bytes(data[:-30])
        if path == list(whole)[-1]:
            assert Journal(tmp_path).open("t").torn is not None
        else:
            with pytest.raises(JournalBroken):
                Journal(tmp_path).open("t")
        path.write_bytes(data)


# --- a disk that is full, or fails


def append_all(journal: Journal, made: list[Entry]) -> None:
    for entry in made:
        journal.append(entry)


def test_a_full_disk_leaves_no_half_entry_and_room_heals_it(small_disk: Any, fill: Any) -> None:
    made = entries(40)
    for leave in (0, 4096):
        place = small_disk(32)
        journal = Journal(place / "journal")
        journal.open("t")
        journal.append(made[0])
        fill(place, leave)
        with pytest.raises(DiskFull, match=r"2026-02\.md cannot be written: the disk is full"):
            append_all(journal, made)
        number = journal.last_number
        verifies(place / "journal", made[:number])
        assert Journal(place / "journal").open("t").torn is None
        with pytest.raises(DiskFull):
            journal.append(made[number])
        (place / "filler").unlink()
        for entry in made:
            journal.append(entry)
        verifies(place / "journal", made)


def test_a_torn_tail_on_a_full_disk_waits_for_room_to_keep_it(small_disk: Any, fill: Any) -> None:
    place = small_disk(32)
    made = written(place / "journal", 2)
    path = the_file(place / "journal")
    torn = path.read_bytes()[:-20]
    path.write_bytes(torn)
    fill(place)
    journal = Journal(place / "journal")
    with pytest.raises(DiskFull):
        journal.open("t")
    assert path.read_bytes() == torn
    with pytest.raises(StoreError):  # it must not be glued to the torn one
        journal.append(made[1])
    (place / "filler").unlink()
    assert journal.open("t").number == 1
    journal.append(made[1])
    verifies(place / "journal", made)


def test_a_part_that_cannot_be_taken_back_stops_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = written(tmp_path, 1)
    more = entries(1, after=made[0])[0]
    journal = Journal(tmp_path)
    journal.open("t")
    real, calls = os.write, []

    def short(fd: int, data: Any) -> int:
        calls.append(fd)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, bytes(data)[:50])

    def fails(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as m:
        m.setattr(os, "write", short)
        m.setattr(os, "ftruncate", fails)
        with pytest.raises(DiskFull):
            journal.append(more)
    with pytest.raises(StoreError, match=r"until it is opened again: .*could not be taken back"):
        journal.append(more)
    assert journal.open("t").torn is not None
    journal.append(more)
    verifies(tmp_path, [*made, more])


@pytest.mark.parametrize("which", [1, 2])
def test_a_failed_fsync_is_no_acknowledgement_then_or_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """The file's own fsync, or its folder's."""
    made = entries(2)
    journal = Journal(tmp_path)
    journal.open("t")
    real, calls, good = os.fsync, [], 0

    def fsync(fd: int) -> None:
        calls.append(fd)
        if len(calls) > good:
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    good = which - 1
    with monkeypatch.context() as m:
        m.setattr(os, "fsync", fsync)
        with pytest.raises(StoreError, match="fsync failed"):
            journal.append(made[0])
        assert journal.last_number == 0
        with pytest.raises(StoreError, match="not written until it is opened again"):
            journal.append(made[0])
        good = 0
        (tmp_path / "2026-02.md").write_text(file_header("2026-02") + made[0].text)  # read well, but not durable
        with pytest.raises(StoreError):
            journal.open("t")
        with pytest.raises(StoreError):
            journal.append(made[1])
    assert journal.open("t").number == 1
    journal.append(made[1])
    verifies(tmp_path, made)


def test_what_is_read_at_the_opening_is_made_durable_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon killed between its write and its fsync leaves an entry that is in memory alone."""
    made = written(tmp_path, 2)
    done: list[tuple[str, str]] = []
    real_fsync, real_write = os.fsync, os.write
    monkeypatch.setattr(
        os, "fsync", lambda fd: (done.append(("fsync", os.readlink(f"/proc/self/fd/{fd}"))), real_fsync(fd))[1]
    )
    monkeypatch.setattr(
        os,
        "write",
        lambda fd, data: (done.append(("write", os.readlink(f"/proc/self/fd/{fd}"))), real_write(fd, data))[1],
    )
    Journal(tmp_path).open("t")
    path = str(tmp_path / "2026-02.md")
    above = str(tmp_path.parent)  # the journal's folder itself may be as new
    assert done == [("fsync", above), ("write", path), ("fsync", path), ("fsync", str(tmp_path))]
    monkeypatch.undo()
    verifies(tmp_path, made)


def test_a_journal_that_cannot_be_read_is_said_clearly(tmp_path: Path) -> None:
    (tmp_path / "2026-02.md").mkdir()
    with pytest.raises(StoreError, match="cannot be opened: Is a directory"):
        Journal(tmp_path).open("t")


# --- against the store


def hashes(made: list[Entry]) -> list[tuple[int, str]]:
    return [(e.number, e.sha256) for e in made]


def test_the_store_knows_of_a_cut_tail_and_of_a_journal_written_anew() -> None:
    made = entries(5)
    assert compare_with_store(made, hashes(made)) == []
    (flaw,) = compare_with_store(made[:4], hashes(made))
    assert str(flaw) == "entry 0005: was published and is missing from the files"
    anew: list[Entry] = []
    for i in range(5):
        number, prev = (anew[-1].number + 1, anew[-1].sha256) if anew else (1, GENESIS)
        anew.append(render(Draft("kimi", "another", f"story {i}"), number, AT, prev))
    flaws = compare_with_store(anew, hashes(made))
    assert len(flaws) == 5
    assert "is not the one that was published" in str(flaws[0])
    (flaw,) = compare_with_store(made, hashes(made[:4]))
    assert "unknown to the state database" in str(flaw)


def test_entries_on_their_way_into_the_journal_are_no_flaw() -> None:
    made = entries(5)
    assert compare_with_store(made[:4], hashes(made[:3]), hashes(made)) == []  # appended, not marked yet
    assert compare_with_store(made[:3], hashes(made[:3]), hashes(made)) == []  # committed, not appended yet
    forged = render(Draft("kimi", "x", "y"), 4, AT, made[2].sha256)
    (flaw,) = compare_with_store([*made[:3], forged], hashes(made[:3]), hashes(made))
    assert "is not the one" in str(flaw)
    (flaw,) = compare_with_store(made, hashes(made[:3]), hashes(made[:4]))
    assert "unknown" in str(flaw)
