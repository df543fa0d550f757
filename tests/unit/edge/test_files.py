"""Whole files or none, and one owner of a state folder."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S

from autotuner.edge import files
from autotuner.edge.files import FolderLock, lock_holder
from autotuner.errors import Locked, StoreError

HOLDER = (
    "import sys, time; from pathlib import Path; from autotuner.edge.files import FolderLock\n"
    "lock = FolderLock(Path(sys.argv[1])); lock.acquire(); print('held', flush=True); time.sleep(600)"
)


def holder(path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_second_daemon_is_refused_by_name_until_the_first_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "state" / "lock"
    assert lock_holder(path) is None
    with holder(path) as process:
        assert lock_holder(path) == process.pid
        with pytest.raises(Locked, match=rf"pid {process.pid}\b.*{tmp_path}"):
            FolderLock(path).acquire()
        process.kill()
        process.wait()
    assert lock_holder(path) is None
    lock = FolderLock(path)
    lock.acquire()
    assert lock_holder(path) == os.getpid()
    lock.release()
    lock.release()
    assert lock_holder(path) is None


def test_no_child_inherits_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = FolderLock(path)
    lock.acquire()
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"x")
        child.stdin.flush()
        child.stdout.read(1)  # it is past its exec
        assert str(path) not in {str(p.readlink()) for p in Path(f"/proc/{child.pid}/fd").iterdir()}
        lock.release()
        assert lock_holder(path) is None
        child.stdin.close()


def test_who_only_looks_neither_keeps_a_daemon_out_nor_passes_for_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as process:  # leaves its label behind
        process.kill()
        process.wait()
    ended = threading.Event()
    wrong: list[object] = []

    def look() -> None:
        while not ended.is_set():
            found = lock_holder(path)
            if found not in {None, 0, os.getpid()}:
                wrong.append(found)
            time.sleep(0.002)

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(30):
            lock = FolderLock(path)
            lock.acquire()
            lock.release()
            time.sleep(0.001)
    finally:
        ended.set()
        for looker in lookers:
            looker.join()
    assert wrong == []


def test_lookers_do_not_take_each_other_for_a_daemon(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("4242\n")
    found: list[int | None] = []
    threads = [threading.Thread(target=lambda: found.extend(lock_holder(path) for _ in range(2000))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {None}


def test_of_eight_daemons_that_start_at_once_one_works(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    program = (
        "import sys, time; from pathlib import Path; from autotuner.edge.files import FolderLock\n"
        "from autotuner.errors import Locked\n"
        "lock = FolderLock(Path(sys.argv[1])); sys.stdin.readline()\n"
        "try: lock.acquire(); print('mine', flush=True); sys.stdin.readline()\n"
        "except Locked: print('locked', flush=True)"
    )
    starts = [
        subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(8)
    ]
    for process in starts:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    said = []
    for process in starts:
        assert process.stdout is not None
        said.append(process.stdout.readline())
    for process in starts:
        process.communicate(b"\n", timeout=PATIENCE_S)
    assert sorted(said) == [b"locked\n"] * 7 + [b"mine\n"]


def test_a_folder_that_cannot_be_used_is_said_clearly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"the state folder cannot be used: .*file/lock"):
        FolderLock(tmp_path / "file" / "lock").acquire()


def test_a_full_disk_does_not_keep_a_daemon_from_its_lock(small_disk: Any, fill: Any) -> None:
    place = small_disk(64)
    (place / "lock").write_text("")
    fill(place)
    lock = FolderLock(place / "lock")
    lock.acquire()
    assert lock_holder(place / "lock") in {0, os.getpid()}
    lock.release()


def test_a_file_is_replaced_as_a_whole_or_not_at_all(small_disk: Any, fill: Any) -> None:
    place = small_disk(64)
    path = place / "f"
    files.write_atomically(path, b"old" * 1000, 0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    fill(place, leave=4096)  # a short write is possible, the whole is not
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically(path, b"new" * 10_000)
    assert path.read_bytes() == b"old" * 1000
    assert sorted(p.name for p in place.iterdir()) == ["f", "filler"]


def test_a_reader_sees_the_old_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "f"
    files.write_atomically(path, b"0" * 50_000)
    seen: set[bytes] = set()
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            seen.add(bytes(set(path.read_bytes())))

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(100):
        files.write_atomically(path, str(i % 10).encode() * 50_000)
    ended.set()
    reader.join()
    assert all(len(found) == 1 for found in seen)


def test_a_new_folder_is_durable_with_those_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder's own name is synced before anything is made below it; also one that somebody made and did not sync."""
    synced: list[str] = []
    real = files.sync_folder
    monkeypatch.setattr(files, "sync_folder", lambda path: (synced.append(path.name), real(path))[1])
    files.make_folder(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path.parent.name, tmp_path.name, "a", "b"]
    synced.clear()
    files.make_folder(tmp_path / "a" / "b")
    assert synced == ["a"]


def test_what_is_appended_is_whole_or_not_there(small_disk: Any, fill: Any) -> None:
    place = small_disk(32)
    files.append(place / "log", b"one\n", header=b"# head\n")
    files.append(place / "log", b"two\n", header=b"# head\n")
    fill(place, 0)
    with pytest.raises(OSError, match="No space left"):
        files.append(place / "log", b"x" * 9000)
    assert (place / "log").read_bytes() == b"# head\none\ntwo\n"


def test_an_append_that_may_be_there_or_not_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.append(tmp_path / "log", b"one\n")

    def fails(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(files.Unsure, match="fsync failed"):
        files.append(tmp_path / "log", b"two\n")
    assert (tmp_path / "log").read_bytes() == b"one\n"
