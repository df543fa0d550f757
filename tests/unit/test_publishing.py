"""Each slot has a journal of its own, nothing of which holds up another's; what all slots had in common before goes on in each."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autotuner.cli import main
from autotuner.core.entry import Draft
from autotuner.edge.journal import Journal, journal_files, read_journals
from autotuner.edge.outbox import COMMON
from autotuner.edge.store import Store
from autotuner.errors import StoreError
from autotuner.publishing import Publishing, checked
from autotuner.settings import Settings, load_settings

AT = "2026-11-29 15:02:14Z"
KEPT = Path(__file__).resolve().parents[2] / "examples" / "campaigns" / "h200-first" / "rules"


class House:
    """Settings of some slots, their state, and what publishes their journals."""

    def __init__(self, folder: Path, *slots: str) -> None:
        self.path, self.state, self.journal = folder / "autotuner.toml", folder / "state", folder / "state" / "journal"
        self.has(*slots)
        self.store = Store(self.state / "state.db")

    def has(self, *slots: str) -> None:
        """Write the settings, with these slots."""
        tables = [f"[slots.{slot}]\nport = {8000 + number}\n" for number, slot in enumerate(slots)]
        self.path.write_text('state_dir = "state"\n' + "".join(tables))

    @property
    def settings(self) -> Settings:
        return load_settings(self.path)

    def decide(self, *slots: str) -> None:
        for slot in slots:
            self.store.add_entry(Draft(slot, f"tried {slot}", "It was tried."), AT)

    def daemon(self) -> Publishing:
        """What a daemon does that is started now."""
        publishing = Publishing(self.settings, self.store)
        publishing.publish()
        return publishing

    def titles(self, slot: str) -> list[str]:
        return [entry.title for entry in self.store.outbox(slot).entries_after(0)]

    def flaws(self) -> list[str]:
        return [str(flaw) for read in checked(self.settings, self.store) for flaw in read.flaws]

    def written(self) -> dict[str, list[str]]:
        """The titles in the files, by journal."""
        return {read.slot: [entry.title for entry in read.entries] for read in read_journals(self.journal)}

    def ran(self, *words: str, stdin: str = "") -> Result:
        return CliRunner().invoke(main, ["-s", str(self.path), *words], input=stdin)

    def says(self, *words: str, stdin: str = "") -> str:
        ran = self.ran(*words, stdin=stdin)
        assert ran.exit_code == 0, ran.output
        return ran.stdout


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = House(tmp_path, "a", "b")
    house.decide("a", "b", "a")
    house.daemon()
    return house


def the_file(house: House, slot: str) -> Path:
    (path,) = journal_files(house.journal / slot)
    return path


def test_each_slot_has_its_own_files_numbers_and_chain(house: House) -> None:
    assert house.written() == {"a": ["tried a", "tried a"], "b": ["tried b"]}
    assert the_file(house, "a").read_text().startswith("# autotuner journal 2026-11 · slot a\n")
    assert house.flaws() == []
    assert sorted(path.name for path in house.journal.iterdir()) == ["a", "b"]


def test_a_torn_tail_of_one_journal_holds_up_no_other_and_is_told_in_its_own(house: House) -> None:
    house.decide("a", "b")
    house.daemon()
    the_file(house, "a").write_bytes(the_file(house, "a").read_bytes()[:-40])
    house.decide("b")
    house.daemon()
    assert house.titles("a")[3:] == ["journal mended", "journal mended"]
    assert house.written()["b"] == ["tried b"] * 3
    assert len(list(house.journal.glob("a/*.torn-*"))) == 1
    assert house.flaws() == []


def test_a_journal_that_cannot_be_written_holds_up_no_other_and_is_made_up_for(house: House) -> None:
    (house.journal / "a").rename(house.journal / "elsewhere.aside")
    (house.journal / "a").write_text("a file where a folder is to be")
    house.decide("a", "b", "a", "b")
    with pytest.raises(StoreError, match=r"the journal in .*journal/a cannot be opened"):
        house.daemon()
    assert house.written()["b"] == ["tried b"] * 3
    assert house.store.outbox("b").last_published() == 3
    (house.journal / "a").unlink()
    (house.journal / "elsewhere.aside").rename(house.journal / "a")
    house.daemon()
    assert house.written()["a"] == ["tried a"] * 4
    assert house.flaws() == []


def test_while_the_daemon_works_one_journal_that_fails_holds_up_no_other(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishing = house.daemon()
    append = Journal.append

    def fails_for_a(self: Journal, entry: object) -> None:
        if self._slot == "a":
            raise StoreError("no room for a")
        append(self, entry)  # type: ignore[arg-type]

    monkeypatch.setattr(Journal, "append", fails_for_a)
    house.decide("a", "b")
    for _ in range(2):
        with pytest.raises(StoreError, match="no room for a"):
            publishing.publish()
    assert (house.store.outbox("a").last_published(), house.store.outbox("b").last_published()) == (2, 2)
    monkeypatch.undo()
    publishing.publish()
    assert house.written() == {"a": ["tried a"] * 3, "b": ["tried b"] * 2}


def test_one_altered_journal_is_written_anew_and_the_others_are_left_alone(house: House) -> None:
    untouched = the_file(house, "b").read_bytes()
    the_file(house, "a").write_text(the_file(house, "a").read_text().replace("It was tried", "It was tired"))
    assert house.ran("journal", "verify").exit_code == 8
    assert house.ran("journal", "verify", "--slot", "b").exit_code == 0
    house.daemon()
    assert house.titles("a")[-1] == "journal altered"
    assert the_file(house, "b").read_bytes() == untouched
    assert house.flaws() == []


def test_files_of_two_slots_that_were_swapped_are_found(house: House) -> None:
    a, b = the_file(house, "a"), the_file(house, "b")
    mine, other = a.read_bytes(), b.read_bytes()
    a.write_bytes(other)
    b.write_bytes(mine)
    assert len([flaw for flaw in house.flaws() if "the header was changed" in flaw]) == 2


def test_a_slot_that_was_removed_keeps_its_journal_which_still_verifies_and_goes_on(house: House) -> None:
    house.decide("b")  # committed, and the daemon ended before it was published
    house.has("a", "renamed")
    house.decide("renamed")
    house.daemon()
    assert house.written() == {"a": ["tried a"] * 2, "b": ["tried b"] * 2, "renamed": ["tried renamed"]}
    said = house.says("journal", "verify").splitlines()
    assert [line.split(":")[0] for line in said] == ["slot a", "slot b", "slot renamed"]
    assert "2 entries intact" in house.says("journal", "verify", "--slot", "b")
    assert house.says("journal", "show", "--slot", "b").count("tried b") == 2
    the_file(house, "b").unlink()
    assert house.ran("journal", "verify").exit_code == 8
    house.has("a", "b")
    house.decide("b")
    house.daemon()
    assert house.written()["b"] == ["tried b"] * 2 + ["tried b", "journal mended"]


def test_slots_whose_names_differ_in_case_alone_or_are_those_of_other_files_have_journals_of_their_own(
    tmp_path: Path,
) -> None:
    names = ("kimi", "Kimi", "KIMI", "seals", "-".join("abcdefghijklmnop"))
    house = House(tmp_path, *names)
    house.decide(*names)
    key = house.says("journal", "seal").strip()
    house.daemon()
    assert house.written() == {name: [f"tried {name}"] for name in names}
    assert house.flaws() == []
    house.says("journal", "verify", "--key", "-", stdin=key)


def test_a_file_system_that_does_not_tell_two_names_apart_is_said_and_mixes_no_journals(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.has("a", "A")
    house.decide("A")
    real = Path.mkdir

    def folded(self: Path, **keys: object) -> None:
        real(self.with_name(self.name.casefold()), **keys)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", folded)
    monkeypatch.setattr(Path, "is_dir", lambda path: path.with_name(path.name.casefold()).exists())
    with pytest.raises(StoreError, match="the journal of slot A would come to lie in a, since this file system"):
        house.daemon()
    assert house.written()["a"] == ["tried a"] * 2


def earlier(folder: Path) -> House:
    """An installation of an earlier version, with a journal of all slots: a campaign that was kept as it was."""
    shutil.copytree(KEPT / "journal", folder / "state" / "journal")
    (folder / "state" / "state.db").write_bytes(gzip.decompress((KEPT / "state.db.gz").read_bytes()))
    return House(folder, "big", "smol")


def test_the_journal_of_an_earlier_version_still_verifies_as_it_is(tmp_path: Path) -> None:
    house = earlier(tmp_path)
    before = {path.name: path.read_bytes() for path in journal_files(house.journal)}
    point = house.says("journal", "head").strip()
    assert ": " not in house.says("journal", "verify", "--since", point).split(";")[0], "one journal needs no name"
    assert {path.name: path.read_bytes() for path in journal_files(house.journal)} == before
    assert house.store.journals() == [COMMON]


def test_the_journal_of_an_earlier_version_is_closed_and_each_slot_goes_on_from_it(tmp_path: Path) -> None:
    house = earlier(tmp_path)
    point, last = house.says("journal", "head").strip(), len(house.store.entries())
    before = b"".join(path.read_bytes() for path in journal_files(house.journal))
    for _ in range(3):  # a daemon that is started again closes nothing again
        house.daemon()
    (closed,) = house.store.entries()[last:]
    assert (closed.number, closed.slot, closed.title) == (last + 1, "-", "journal closed")
    house.decide("big", "smol", "big")
    house.daemon()
    assert b"".join(path.read_bytes() for path in journal_files(house.journal)).startswith(before)
    numbers = {read.slot: [entry.number for entry in read.entries] for read in read_journals(house.journal)}
    assert numbers == {"": [*range(1, last + 2)], "big": [last + 2, last + 3], "smol": [last + 2]}
    assert house.flaws() == []
    for slot in ("big", "smol"):
        first = house.store.outbox(slot).entries_after(0)[0]
        assert first.prev == closed.sha256
        assert f"the journal of all slots, which ended with entry {closed.number:04d}" in first.text
    said = house.says("journal", "verify", "--since", point)
    assert f"of all slots, closed: {last + 1} entries intact" in said
    assert f"together they extend {point}" in said
    replayed = json.loads(house.says("journal", "replay", "--json"))
    assert replayed
    assert all(not trial["differences"] for trial in replayed)
    assert house.says("journal", "show", "--slot", "big").count("\n## ") + 1 >= last, "what was told before, too"


def test_a_slot_that_comes_later_goes_on_from_the_closed_journal_too(tmp_path: Path) -> None:
    house = earlier(tmp_path)
    house.decide("big")
    house.daemon()
    house.has("big", "smol", "new")
    house.decide("new")
    house.daemon()
    assert house.store.outbox("new").origin == house.store.outbox("big").origin
    assert house.flaws() == []


def test_a_closed_journal_that_was_cut_is_found_also_where_the_record_was_cut_alike(tmp_path: Path) -> None:
    house = earlier(tmp_path)
    house.decide("big")
    house.daemon()
    last = house.store.outbox(COMMON).entries_after(0)[-1]
    (path,) = journal_files(house.journal)
    path.write_text(path.read_text().replace(last.text, ""))
    assert [flaw for flaw in house.flaws() if "was published and is missing" in flaw]
    house.store.db.run("DELETE FROM entries WHERE journal = '' AND number = ?", last.number)
    assert house.flaws() == ["slot big: its journal does not go on from the end of the one of all slots"]


def test_a_torn_tail_of_the_earlier_journal_is_told_in_the_journal_of_every_slot(tmp_path: Path) -> None:
    house = earlier(tmp_path)
    (path,) = journal_files(house.journal)
    path.write_bytes(path.read_bytes()[:-40])
    house.daemon()
    assert house.titles("big") == house.titles("smol") == ["journal mended", "journal mended"]
    house.daemon()
    assert house.flaws() == []


# --- one first key for all of them


def test_one_key_seals_the_journals_of_all_slots_also_of_those_that_come_later(house: House) -> None:
    key = house.says("journal", "seal").strip()
    house.has("a", "b", "c")
    house.decide("a", "c", "c")
    house.daemon()
    said = house.says("journal", "verify", "--key", "-", stdin=key).splitlines()
    assert [line.partition(", sealed to ")[2] for line in said] == ["0003", "0001", "0002"]
    for slot in ("a", "b", "c"):
        file = house.journal / slot / "seals"
        kept = file.read_bytes()
        file.write_bytes(b"".join(kept.splitlines(keepends=True)[:-1]))
        ran = house.ran("journal", "verify", "--key", "-", stdin=key)
        assert ran.exit_code == 8
        assert f"slot {slot}, seals: " in ran.output
        file.write_bytes(kept)
    house.says("journal", "verify", "--key", "-", stdin=key)


def test_a_sealed_journal_that_is_gone_with_all_that_belongs_to_it_is_missed(house: House) -> None:
    key = house.says("journal", "seal").strip()
    house.decide("b")
    house.daemon()
    shutil.rmtree(house.journal / "b")
    (house.state / "seal.keys" / "b").unlink()
    house.store.db.run("DELETE FROM entries WHERE journal = 'b'")
    house.says("journal", "verify")
    ran = house.ran("journal", "verify", "--key", "-", stdin=key)
    assert ran.exit_code == 8
    assert "slot b, seal key: is missing" in ran.output


def test_a_sealed_journal_of_an_earlier_version_stays_sealed_when_it_is_closed(tmp_path: Path) -> None:
    house = earlier(tmp_path)
    key = house.says("journal", "seal").strip()
    house.decide("big", "smol", "big")
    house.daemon()
    said = house.says("journal", "verify", "--key", "-", stdin=key).splitlines()
    assert len(said) == 3
    assert not [line for line in said if "not sealed yet" in line]
    line = (house.journal / "seals").read_text().splitlines()[-1]
    assert line.endswith(" smol")


# --- what is said where there are several


def test_a_checkpoint_of_several_journals_names_each(house: House) -> None:
    point = house.says("journal", "head").strip()
    assert [part.split(":")[0] for part in point.split(",")] == ["a=2", "b=1"]
    house.decide("b", "a")
    house.daemon()
    assert f"together they extend {point}" in house.says("journal", "verify", "--since", point)
    for slot in ("a", "b"):
        alone = house.says("journal", "head", "--slot", slot).strip()
        assert "=" not in alone
        house.says("journal", "verify", "--since", alone)
    swapped = point.replace("a=", "x=").replace("b=", "a=").replace("x=", "b=")
    assert house.ran("journal", "verify", "--since", swapped).exit_code == 8
    assert house.ran("journal", "verify", "--since", point.replace("b=", "gone=")).exit_code == 8
    assert house.ran("journal", "verify", "--since", "a=b").exit_code == 2


def test_show_and_tail_tell_of_all_slots_by_time_and_of_one_on_request(house: House) -> None:
    house.store.add_entry(Draft("b", "last of b", "x"), "2026-11-30 00:00:00Z")
    house.daemon()
    headings = [line for line in house.says("journal", "show").splitlines() if line.startswith("## ")]
    assert [line.rpartition(" · ")[2] for line in headings] == ["tried a", "tried a", "tried b", "last of b"]
    assert "last of b" in house.says("journal", "tail", "-n", "1")
    assert "tried a" in house.says("journal", "tail", "-n", "1", "--slot", "a")
    assert house.says("journal", "show", "1").count("## ") == 2, "both have an entry 1"
    assert house.says("journal", "show", "1", "--slot", "b").count("## ") == 1
    ran = house.ran("journal", "show", "--slot", "nobody")
    assert ran.exit_code == 5
    assert "there is neither a slot nor a journal called nobody; known: a, b" in ran.output
    assert "tried a" in house.says("why", "--slot", "a")
