"""The words of a reading are those that the documentation lists, all of them and no others."""

import re
from pathlib import Path

import pytest

from autotuner.engines.context import Context
from autotuner.engines.vocabulary import CAUSES, Action, State

TEXT = (Path(__file__).parents[3] / "docs" / "diagnosis.md").read_text(encoding="utf-8")
SOURCES = Path(__file__).parents[3] / "autotuner" / "engines"


def listed(heading: str) -> list[str]:
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w-]+)`", section, re.MULTILINE)


@pytest.mark.parametrize(
    ("heading", "words"),
    [
        ("States", [state.value for state in State]),
        ("Causes", list(CAUSES)),
        ("Actions", [action.value for action in Action]),
        ("What else is known", list(Context.model_fields)),
    ],
)
def test_the_page_lists_every_word(heading: str, words: list[str]) -> None:
    assert listed(heading) == words


def test_no_signature_names_a_cause_that_is_not_listed() -> None:
    named = {
        word
        for path in SOURCES.glob("*.py")
        for word in re.findall(r'signature\(\s*"([\w-]+)"', path.read_text(encoding="utf-8"))
    }
    assert named
    assert named <= set(CAUSES)


def test_every_word_of_the_list_can_be_said() -> None:
    """A cause that no rule and no signature can name would be a promise that is not kept."""
    code = "\n".join(p.read_text(encoding="utf-8") for p in SOURCES.glob("*.py") if p.name != "vocabulary.py")
    assert [cause for cause in CAUSES if f'"{cause}"' not in code] == []
