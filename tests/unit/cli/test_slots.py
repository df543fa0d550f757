"""A candidate goes into the queue of each slot that it names; slots have queues, best-knowns and states of their own."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autotuner.cli import main
from autotuner.edge.store import Store

CANDIDATE = (
    'name = "{name}"\nengine = "llamacpp"\n{slots}[launch]\nmodel = "{name}.gguf"\nbinary = "/opt/llama-server"\n'
)
AT = "2026-11-29 15:02:14Z"


class House:
    """Settings of three slots, on two machines, and candidates for them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.settings = folder, folder / "autotuner.toml"
        slots = "".join(f"[slots.{name}]\nport = {8000 + n}\n" for n, name in enumerate(("a", "b", "c")))
        self.settings.write_text(f'state_dir = "state"\n{slots}')
        self.store = Store(folder / "state" / "state.db")

    def candidate(self, name: str, *slots: str) -> str:
        named = f"slots = {json.dumps(slots)}\n" if slots else ""
        path = self.folder / f"{name}.toml"
        path.write_text(CANDIDATE.format(name=name, slots=named))
        return str(path)

    def ran(self, *words: str) -> Result:
        return CliRunner().invoke(main, ["-s", str(self.settings), *words])

    def enqueue(self, *words: str) -> Result:
        return self.ran("enqueue", "--no-preflight", *words)

    def queues(self) -> dict[str, list[str]]:
        return {slot: [trial.name for trial in self.store.queue(slot)] for slot in ("a", "b", "c")}


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_a_candidate_goes_into_the_queue_of_each_slot_that_it_names(house: House) -> None:
    ran = house.enqueue(house.candidate("x", "a", "c", "a"), house.candidate("y", "c"))
    assert ran.exit_code == 0, ran.output
    assert house.queues() == {"a": ["x"], "b": [], "c": ["x", "y"]}
    for slot in ("a", "c"):
        assert f"x queued as trial {house.store.queue(slot)[0].id} on slot {slot}" in ran.output
    ran = house.enqueue(house.candidate("x", "a", "b"), "--json")
    assert [(item["slot"], item["status"]) for item in json.loads(ran.stdout)] == [
        ("a", "already queued"),
        ("b", "queued"),
    ]


def test_the_slot_of_the_command_line_is_a_persons_word_and_is_told_where_the_file_says_otherwise(house: House) -> None:
    path = house.candidate("x", "a", "c")
    assert house.enqueue(path, "--slot", "c").exit_code == 0
    assert house.queues() == {"a": [], "b": [], "c": ["x"]}
    ran = house.enqueue(path, "--slot", "b")
    assert ran.exit_code == 0
    assert "warning: its `slots` name a, c; it goes to b since --slot says so" in ran.output
    assert house.queues() == {"a": [], "b": ["x"], "c": ["x"]}


def test_a_name_that_no_slot_has_is_refused_and_nothing_is_queued_for_the_rest_of_the_list(house: House) -> None:
    ran = house.enqueue(house.candidate("x", "a", "d", "e"), house.candidate("y", "b"))
    assert ran.exit_code == 4
    assert "its `slots` name d, e, and there is no such slot; known: a, b, c" in ran.output
    assert house.queues() == {"a": [], "b": ["y"], "c": []}
    said = house.ran("validate", house.candidate("x", "a", "d"), "--no-preflight").output
    assert "enqueue will refuse it" not in said, "without a look at the settings"


def test_validate_says_that_enqueue_will_refuse_it(house: House) -> None:
    said = house.ran("validate", house.candidate("x", "a", "d")).output
    assert "its `slots` name d, which the settings do not have: enqueue will refuse it" in said


def test_where_no_slot_is_named_and_there_are_several_a_person_must_say(house: House) -> None:
    path = house.candidate("x")
    ran = house.enqueue(path)
    assert ran.exit_code == 4
    assert "name one with --slot, or those that it fits with `slots` in it (a, b, c)" in ran.output
    assert house.enqueue(path, "--slot", "b").exit_code == 0
    assert house.queues() == {"a": [], "b": ["x"], "c": []}


def test_the_only_slot_needs_no_name(house: House) -> None:
    house.settings.write_text('state_dir = "state"\n[slots.b]\nport = 8000\n')
    assert house.enqueue(house.candidate("x")).exit_code == 0
    assert house.queues() == {"a": [], "b": ["x"], "c": []}


def test_status_shows_each_slots_own_queue_and_best_known(house: House) -> None:
    house.enqueue(house.candidate("x", "a", "c"), house.candidate("y", "c"))
    first = house.store.queue("a")[0]
    house.store.promote("a", first.candidate_id, "x", first.id, AT)
    shown = json.loads(house.ran("status", "--json").stdout)["slots"]
    assert {name: (slot["best_known"] or {}).get("name") for name, slot in shown.items()} == {
        "a": "x",
        "b": None,
        "c": None,
    }
    assert {name: [trial["name"] for trial in slot["queue"]] for name, slot in shown.items()} == house.queues()
    text = house.ran("status").output
    assert text.index("slot a at") < text.index("best-known: x") < text.index("slot b at") < text.index("slot c at")
