"""The journal that is shipped as an example: made by the program, so it must verify like any other."""

from pathlib import Path

from autotuner.edge.journal import read_entries

EXAMPLE = Path(__file__).parents[2] / "journal" / "example"


def test_the_shipped_example_verifies_and_tells_of_every_kind_of_end() -> None:
    entries, flaws = read_entries(EXAMPLE)
    assert not flaws
    words = {entry.title.split()[0] for entry in entries}
    assert {"promoted", "abandoned", "failed", "restored"} <= words
    text = "\n".join(entry.text for entry in entries)
    assert "/drafter-broken" in text.replace(" ", "")
    assert "- Speculation: concurrency 8: accept length" in text
    assert "error: invalid argument: --ubatch-sise" in text
