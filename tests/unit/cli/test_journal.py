"""`autotuner journal` proves what it can: by the chain, the database, a checkpoint kept elsewhere, and a key kept elsewhere."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autotuner.cli import main
from autotuner.core.entry import GENESIS, Draft, render
from autotuner.core.seal import journal_key, key_after
from autotuner.edge.files import FolderLock
from autotuner.edge.journal import Journal, journal_files
from autotuner.edge.seals import read_key
from autotuner.edge.store import Store
from autotuner.publishing import Publishing
from autotuner.settings import load_settings

AT = "2026-11-29 15:02:14Z"


class House:
    """A state folder whose daemon can be made to decide something."""

    def __init__(self, folder: Path) -> None:
        self.state, self.journal = folder / "state", folder / "state" / "journal"
        self.settings = folder / "autotuner.toml"
        self.settings.write_text('state_dir = "state"\n[slots.kimi]\nport = 8000\n')
        self.store = Store(self.state / "state.db")

    def decide(self, times: int = 1, slot: str = "kimi") -> None:
        for _ in range(times):
            self.store.add_entry(Draft(slot, "tried", "It was tried."), AT)
        self.publish()

    def publish(self) -> None:
        """What a daemon does that is started now."""
        Publishing(load_settings(self.settings), self.store).publish()

    def run(self, *words: str, stdin: str = "") -> Result:
        return CliRunner().invoke(main, ["-s", str(self.settings), "journal", *words], input=stdin)

    def says(self, *words: str, stdin: str = "") -> str:
        ran = self.run(*words, stdin=stdin)
        assert ran.exit_code == 0, ran.output
        return ran.stdout

    def forge(self) -> None:
        """Write everything anew, files and database alike, as whoever holds the host could."""
        self.store.db.run("DELETE FROM entries")
        for path in journal_files(self.journal / "kimi"):
            path.unlink()
        journal, prev = Journal(self.journal / "kimi", slot="kimi"), GENESIS
        journal.open("t")
        for number in range(1, 5):
            entry = render(Draft("kimi", "forged", "It never was."), number, AT, prev)
            self.store.db.run(
                "INSERT INTO entries (journal, number, slot, title, at, prev, sha256, text, published)"
                " VALUES ('kimi', ?, ?, ?, ?, ?, ?, ?, 1)",
                *(entry.number, entry.slot, entry.title, entry.at, entry.prev, entry.sha256, entry.text),
            )
            journal.append(entry)
            prev = entry.sha256


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = House(tmp_path)
    house.decide(4)
    return house


def test_a_checkpoint_proves_that_the_journal_was_only_added_to(house: House) -> None:
    point = house.says("head").strip()
    assert re.fullmatch(r"4:[0-9a-f]{32}", point)
    assert json.loads(house.says("head", "--json"))["checkpoint"] == point
    house.decide(2)
    assert (
        f"6 entries intact in 1 files; head {house.says('head').split(':')[1][:16]}, extending {point}"
        in house.says("verify", "--since", point)
    )
    house.forge()
    assert house.run("verify").exit_code == 0, "files and database agree, so that only what was kept elsewhere can tell"
    ran = house.run("verify", "--since", point)
    assert ran.exit_code == 8
    assert "entry 0004: is another than when the checkpoint was made" in ran.output


def test_the_checkpoint_of_an_empty_journal_is_extended_by_any(tmp_path: Path) -> None:
    house = House(tmp_path)
    point = house.says("head").strip()
    assert point == "0:" + "0" * 32
    house.decide()
    house.says("verify", "--since", point)


def test_what_is_no_checkpoint_is_refused_with_what_would_be(house: House) -> None:
    ran = house.run("verify", "--since", "yesterday")
    assert ran.exit_code == 2
    assert "journal head" in ran.output


def test_a_sealed_journal_written_anew_is_found_by_the_first_key_alone(house: House, tmp_path: Path) -> None:
    ran = house.run("seal")
    key = ran.stdout.strip()
    assert re.fullmatch(r"[0-9a-f]{64}", key)
    assert "shown once" in ran.stderr
    state = read_key(house.state / "seal.keys" / "kimi")
    assert state is not None
    assert state.number == 5, "the last entry is sealed at once, so that the first key is not on the host any more"
    root = read_key(house.state / "seal.key")
    assert root is not None
    assert (root.number, root.key) == (2, key_after(bytes.fromhex(key)))
    assert state.key == key_after(journal_key(bytes.fromhex(key), "kimi"))
    house.decide(2)
    (tmp_path / "key").write_text(key + "\n")
    assert ", sealed to 0006" in house.says("verify", "--key", str(tmp_path / "key"))
    assert json.loads(house.says("verify", "--key", "-", "--json", stdin=key))["sealed"] == 6
    house.forge()
    house.says("verify")
    ran = house.run("verify", "--key", "-", stdin=key)
    assert ran.exit_code == 8
    assert "entry 0004: is not the one that was sealed" in ran.output
    assert "sealed" not in json.loads(house.says("verify", "--json"))


def test_entries_that_wait_for_the_daemon_to_seal_them_are_counted_and_no_flaw(house: House) -> None:
    key = house.says("seal").strip()
    journal = Journal(house.journal / "kimi", slot="kimi")
    journal.open("t")
    journal.append(house.store.add_entry(Draft("kimi", "tried", "It was tried."), AT))
    assert ", sealed to 0004; 1 not sealed yet" in house.says("verify", "--key", "-", stdin=key)


def test_under_a_running_daemon_the_daemon_seals(house: House) -> None:
    lock = FolderLock(house.state / "daemon.lock")
    lock.acquire()
    key = house.says("seal").strip()
    assert not (house.journal / "seals").exists()
    assert "4 not sealed yet" in house.says("verify", "--key", "-", stdin=key)
    house.decide()
    assert ", sealed to 0005" in house.says("verify", "--key", "-", stdin=key)
    lock.release()


def test_an_empty_journal_can_be_sealed_from_its_first_entry(tmp_path: Path) -> None:
    house = House(tmp_path)
    key = house.says("seal").strip()
    house.says("verify", "--key", "-", stdin=key)
    house.decide(2)
    assert ", sealed to 0002" in house.says("verify", "--key", "-", stdin=key)


def test_a_sealed_journal_is_not_sealed_again_by_mistake(house: House) -> None:
    house.says("seal")
    before = (house.state / "seal.key").read_bytes()
    ran = house.run("seal")
    assert ran.exit_code == 4
    assert "sealed already" in ran.output
    (house.state / "seal.key").unlink()
    assert house.run("seal").exit_code == 4
    for path in (house.journal / "seals", house.journal / "kimi" / "seals", house.state / "seal.keys"):
        ran = house.run("seal")
        assert ran.exit_code == 4
        assert str(path) in ran.output, "what is to be moved aside is named"
        path.rename(path.with_name(f"old-{path.name}"))
    house.says("seal")
    assert (house.state / "seal.key").read_bytes() != before


@pytest.mark.parametrize("key", ["", "abc", "00" * 31, "zz" * 32])
def test_what_is_no_key_is_said(house: House, key: str) -> None:
    house.says("seal")
    ran = house.run("verify", "--key", "-", stdin=key)
    assert ran.exit_code == 2
    assert "holds no key" in ran.output
    assert house.run("verify", "--key", "/nowhere/key").exit_code == 5


def test_a_broken_journal_gets_neither_a_checkpoint_nor_seals(house: House) -> None:
    (path,) = journal_files(house.journal / "kimi")
    path.write_bytes(path.read_bytes().replace(b"It was tried", b"It was tired", 1))
    for command in ("head", "seal"):
        ran = house.run(command)
        assert ran.exit_code == 8
        assert "does not verify" in ran.output
    assert not (house.state / "seal.key").exists()
