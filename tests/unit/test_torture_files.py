"""A slice of the harness for files, text and commands: each part keeps its promises for a moment, and can see them broken."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torture import crashrecord, crashstates, databases, forgeries, records, shells, texts
from torture.disk import Disk, DiskPath, Loss, System
from torture.tally import Tally

from autotuner.core.entry import GENESIS, Draft, render
from autotuner.edge import files

anything = st.text(st.one_of(st.characters(), st.sampled_from("<!->*#\n\r\x1b[m|`\u2028\x00 ")), max_size=60)


@pytest.mark.parametrize("part", [databases, forgeries, records, shells, texts])
def test_a_part_of_the_harness_finds_nothing_broken(part: object) -> None:
    """One round each; `make torture` does thousands."""
    found = part.run(20260223, 0.0)  # type: ignore[attr-defined]
    assert found.tried
    assert not found.violated, found.examples


def test_crash_states_of_a_few_reference_runs_lose_nothing() -> None:
    tally = Tally()
    with crashstates.on_memory():
        for number in range(3):
            run = crashstates.reference(20260223, number)
            del run.snapshots[:-9]
            crashstates.explore_run(tally, run, "a slice")
    assert tally.tried["P7"] > 100
    assert not tally.violated, tally.examples


def test_a_key_that_cannot_be_used_is_told_once_and_keeps_nothing_from_the_journal() -> None:
    """The daemon's own code: entries go on without seals, and an entry says so."""
    with crashstates.on_memory():
        run = crashstates.Run(random.Random(1))
        files.make_folder(path(run.disk, "/state"))
        path(run.disk, "/state/seal.key").write_bytes(b"no key")
        for _ in range(6):
            run.decide()
            run.publish()
        run.daemon.publish()
    for slot in crashrecord.SLOTS:
        mine = run.record.outbox(slot).mine
        (told,) = [entry for entry in mine if entry.title == "not sealed"]
        assert "is no key of seals" in told.text
        assert len(mine) > 1
        assert run.record.published_to[slot] == run.daemon.acknowledged[slot] == mine[-1].number


def test_a_name_that_was_not_made_durable_is_seen_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The explorer itself: without the folder's fsync, an acknowledged entry is gone in some state."""
    monkeypatch.setattr(files, "sync_folder", lambda path: None)
    tally = Tally()
    with crashstates.on_memory():
        run = crashstates.reference(20260223, 0)
        crashstates.explore_run(tally, run, "a slice")
    assert tally.violated["P7"] > 0


@settings(max_examples=150, deadline=None)
@given(anything, anything, anything, st.lists(anything, max_size=4))
def test_no_text_forges_a_part_of_the_journal(title: str, sentence: str, bullet: str, quote: list[str]) -> None:
    draft = Draft(title, title, sentence, ((bullet, sentence),), ((bullet, title),), (sentence,), tuple(quote))
    first = render(draft, 1, texts.AT, GENESIS)
    assert texts.forged([first, render(draft, 2, texts.AT, first.sha256)]) == ""


# --- the disk that forgets


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(files, "os", System(made))
    return made


def path(disk: Disk, name: str) -> Path:
    return DiskPath(name).on(disk)  # type: ignore[return-value]


def lost(disk: Disk, loss: Loss) -> dict[str, bytes]:
    return disk.after_power_loss(random.Random(1), loss).contents()


def test_the_disk_forgets_what_was_not_synced_and_nothing_else(disk: Disk) -> None:
    none = Loss("none", "none")
    files.append(path(disk, "/a"), b"one")
    assert lost(disk, none) == {"/a": b"one"}
    fd = files.os.open(path(disk, "/a"), files.os.O_WRONLY | files.os.O_APPEND)
    files.os.write(fd, b" two")
    assert disk.contents() == {"/a": b"one two"}
    assert lost(disk, none) == {"/a": b"one"}
    assert lost(disk, Loss("all", "all", torn=2)) == {"/a": b"one t"}
    assert lost(disk, Loss("all", "all", zeros=1)) == {"/a": b"one" + bytes(4)}
    assert lost(disk, Loss("all", "all", flips=1)) != {"/a": b"one two"}
    files.os.fsync(fd)
    assert lost(disk, none) == {"/a": b"one two"}
    fd = files.os.open(path(disk, "/b"), files.os.O_WRONLY | files.os.O_CREAT)
    files.os.write(fd, b"x")
    files.os.fsync(fd)
    assert lost(disk, none) == {"/a": b"one two"}, "a file whose folder was not synced has no name"
    path(disk, "/a").rename(path(disk, "/c"))
    assert lost(disk, none) == {"/a": b"one two"}
    files.sync_folder(path(disk, "/"))
    assert lost(disk, none) == {"/b": b"x", "/c": b"one two"}


def test_what_a_failed_fsync_lost_stays_lost_on_the_disk(disk: Disk) -> None:
    files.append(path(disk, "/a"), b"one")
    fd = files.os.open(path(disk, "/a"), files.os.O_WRONLY | files.os.O_APPEND)
    files.os.write(fd, b" two")

    def fails(what: str) -> None:
        raise OSError(5, "Input/output error")

    disk.fault = fails
    with pytest.raises(OSError, match="Input/output"):
        files.os.fsync(fd)
    disk.fault = None
    files.os.fsync(fd)  # claims that all is well
    assert disk.contents() == {"/a": b"one two"}
    assert lost(disk, Loss("all", "all")) == {"/a": b"one"}
