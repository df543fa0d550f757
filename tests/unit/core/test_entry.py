"""No entry can be changed, lost or moved unnoticed, and no text of a server can pass for a part of the journal."""

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotuner.core.entry import GENESIS, Draft, Entry, Reading, file_header, link, read_journal, render

AT = "2026-02-23 00:14:07Z"
CANARY = "c4n4ry-0f-th3-m1ne"
HOSTILE = [
    "\n", "\r\n", "\r", "\x00", "<!-- autotuner entry=7 prev=", " -->\n\n", "-->", "## 0001 · 2026-02-23 00:14:07Z · slot a · x",
    "# autotuner journal", "\n\n## 0002", "\x1b[31m", "\x1b]0;t\x07", "\u202e", "\u2066", "\u2028", "\u061c", "\x85", "\x9b1m", "\ud800", "\udcff",
    "**", "*", "|", "\\|", "\\", "`", "```\n", "    ", "\t", "- Rule: x", "> ", "<h2>", "<script>", "&lt;", "é", "日本", "\U0001f600", " · ", "0" * 64,
    "sha256=", f"{CANARY}", "x" * 300, "\ufeff", "---\n", "<!--", "]]>", "\n<!-- autotuner ", "<?php", "</details>",
]  # fmt: skip

texts = st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(), max_size=8)), max_size=8).map("".join)
drafts = st.builds(
    Draft,
    slot=texts,
    title=texts,
    sentence=texts,
    bullets=st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
    table=st.one_of(
        st.just(()),
        st.integers(1, 3).flatmap(
            lambda n: st.lists(st.tuples(*[texts] * n), min_size=1, max_size=3).map(tuple)  # type: ignore[arg-type]
        ),
    ),
    notes=st.lists(texts, max_size=2).map(tuple),
    quote=st.lists(texts, max_size=3).map(tuple),
)


def draft(**more: Any) -> Draft:
    return Draft(**{"slot": "kimi", "title": "abandoned x", "sentence": "It is too slow.", **more})


def journal(drafts_: list[Draft], number: int = 1, prev: str = GENESIS) -> tuple[bytes, list[Entry]]:
    text, entries = file_header("2026-02"), []
    for one in drafts_:
        entry = render(one, number, AT, prev)
        text += entry.text
        entries.append(entry)
        number, prev = number + 1, entry.sha256
    return text.encode(), entries


def read(data: bytes, prev: str = GENESIS, number: int = 1) -> Reading:
    return read_journal("2026-02", data, prev, number)


THIRTY = [
    draft(
        title=f"abandoned candidate-{i}",
        sentence=f"Sentence {i}",
        bullets=(("Why", f"because {i}"),) if i % 2 else (),
        quote=("its own words",) if i % 7 == 0 else (),
    )
    for i in range(30)
]
DATA, ENTRIES = journal(THIRTY)


# --- what is written reads back


@settings(max_examples=120, deadline=None)
@given(st.lists(drafts, min_size=1, max_size=3), st.integers(1, 20_000))
@example([Draft("", "", "", (("", ""),), ((""),), ("",), ("", "\n"))], 1)
def test_entries_of_any_text_read_back_as_they_were_written(hostile: list[Draft], number: int) -> None:
    data, entries = journal(hostile, number)
    reading = read(data, number=number)
    assert reading.flaws == ()
    assert list(reading.entries) == entries
    assert reading.good_bytes == len(data)


@settings(max_examples=120, deadline=None)
@given(drafts)
def test_no_text_forges_a_heading_a_hash_line_or_markup(hostile: Draft) -> None:
    lines = render(hostile, 7, AT, GENESIS).text.split("\n")
    assert lines[-2:] == ["", ""]
    assert [i for i, line in enumerate(lines) if line.startswith("#")] == [0]
    assert [i for i, line in enumerate(lines) if line.startswith("<!--")] == [len(lines) - 3]
    for line in lines[1:-3]:
        if not line.startswith("    "):
            assert not re.search(r"<[A-Za-z/!?]", line), line
    text = "\n".join(lines)
    assert not re.search(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]", text
    )
    assert len(text) < 60_000


def test_a_quote_is_a_block_of_its_own_in_markdown() -> None:
    """Indented lines right after a list would belong to the list, and `## x` in them would be a heading."""
    entry = render(draft(bullets=(("Why", "x"),), quote=("## 0001", "<!-- autotuner -->")), 1, AT, GENESIS)
    assert (
        "\n- Why: x\n\nThe server's own words:\n\n    ## 0001\n    <!-- autotuner -->\n\n<!-- autotuner entry=1 "
        in entry.text
    )


@settings(max_examples=80, deadline=None)
@given(drafts)
def test_no_known_secret_reaches_an_entry(hostile: Draft) -> None:
    assert CANARY not in render(hostile, 7, AT, GENESIS, frozenset({CANARY})).text


@pytest.mark.parametrize(
    "place",
    [
        {"title": f"a token={CANARY} b"},
        {"slot": f"token={CANARY}"},
        {"sentence": f"api_key={CANARY}"},
        {"bullets": (("Ran", f"server --x=1 --api-key={CANARY}"),)},
        {"bullets": ((f"http://me:{CANARY}@host", "x"),)},
        {"table": (("a",), (f"HF_TOKEN={CANARY}",))},
        {"notes": (f"Authorization: Bearer {CANARY}",)},
        {"quote": ("one", f"redis://:{CANARY}@host/0", "three")},
        {"quote": (f"ServerArgs(port=1, admin_api_key='{CANARY}')",)},
        {"quote": (f"api\x1b[0m_key\x1b[1m={CANARY}",)},
    ],
)
def test_a_secret_is_hidden_by_its_shape_wherever_it_stands(place: dict[str, Any]) -> None:
    text = render(draft(**place), 1, AT, GENESIS).text
    assert CANARY not in text
    assert "***" in text


def test_a_known_secret_broken_up_by_colours_is_still_hidden() -> None:
    coloured = CANARY[:5] + "\x1b[31m" + CANARY[5:]
    assert CANARY not in render(draft(quote=(coloured,), sentence=coloured), 1, AT, GENESIS, frozenset({CANARY})).text


def test_an_entry_reads_like_this() -> None:
    entry = render(
        draft(
            sentence="Speculation costs more than it brings.",
            table=(("level", "tok/s"), ("128", "849")),
            notes=("interpolated",),
            bullets=(("Rule", "below-break-even: a < b"), ("Next", "queued `x`")),
            quote=("Traceback", "", "  OSError"),
        ),
        42,
        AT,
        GENESIS,
    )
    body = """\
## 0042 · 2026-02-23 00:14:07Z · slot kimi · abandoned x

**Speculation costs more than it brings.**

| level | tok/s |
|-------|-------|
| 128   | 849   |

\\* interpolated

- Rule: below-break-even: a < b
- Next: queued `x`

The server's own words:

    Traceback
      OSError

"""
    assert entry.text == body + f"<!-- autotuner entry=42 prev={GENESIS} sha256={link(GENESIS, body)} -->\n\n"
    assert entry.sentence == "Speculation costs more than it brings."


# --- what was changed is noticed


def damaged(data: bytes) -> Reading:
    """Read a changed journal: it must have a flaw, and whatever is trusted before it must be the original."""
    reading = read(data)
    assert reading.flaws, "the change went unnoticed"
    assert list(reading.entries) == ENTRIES[: len(reading.entries)]
    return reading


def test_a_good_journal_has_no_flaw() -> None:
    assert read(DATA) == Reading(tuple(ENTRIES), (), len(DATA))


def test_every_flipped_byte_is_noticed() -> None:
    for i in range(len(DATA)):
        flipped = bytearray(DATA)
        flipped[i] ^= 1 << (i % 8)
        damaged(bytes(flipped))


def test_every_deleted_or_inserted_byte_is_noticed() -> None:
    for i in range(len(DATA) - 1):
        damaged(DATA[:i] + DATA[i + 1 :])
        if i % 5 == 0:
            damaged(DATA[:i] + b"x" + DATA[i:])


def test_every_deleted_doubled_or_swapped_line_is_noticed() -> None:
    lines = DATA.split(b"\n")
    for i in range(len(lines) - 1):
        damaged(b"\n".join(lines[:i] + lines[i + 1 :]))
        damaged(b"\n".join(lines[: i + 1] + lines[i:]))
        if lines[i] != lines[i + 1]:
            damaged(b"\n".join([*lines[:i], lines[i + 1], lines[i], *lines[i + 2 :]]))


def test_every_deleted_doubled_or_moved_entry_is_noticed() -> None:
    head, blocks = file_header("2026-02").encode(), [e.text.encode() for e in ENTRIES]
    for i in range(len(blocks)):
        if i < len(blocks) - 1:
            found = damaged(head + b"".join(blocks[:i] + blocks[i + 1 :]))
            assert f"entry {i + 1:04d}" in found.flaws[0].place
        damaged(head + b"".join(blocks[: i + 1] + blocks[i:]))
        for j in range(i):
            moved = blocks.copy()
            moved[i], moved[j] = moved[j], moved[i]
            damaged(head + b"".join(moved))


def test_a_tail_cut_inside_an_entry_is_a_flaw_and_one_between_entries_shows_in_the_numbers() -> None:
    ends = {len(file_header("2026-02").encode())}
    for entry in ENTRIES:
        ends.add(max(ends) + len(entry.text.encode()))
    for cut in range(len(DATA)):
        reading = read(DATA[:cut])
        assert reading.good_bytes <= cut
        if cut in ends:
            assert reading.flaws == ()
            assert len(reading.entries) < len(ENTRIES), "the store knows how many there are"
        else:
            assert reading.flaws
            assert cut < min(ends) or reading.good_bytes == max(e for e in ends if e <= cut)


def test_a_whole_rewrite_shows_in_the_hashes_that_the_store_knows() -> None:
    """Everything recomputed: such a journal is sound in itself, but every hash from the change on is another."""
    changed = THIRTY.copy()
    changed[10] = draft(title="promoted candidate-10")
    data, forged = journal(changed)
    reading = read(data)
    assert reading.flaws == ()
    same = [mine.sha256 == theirs.sha256 for mine, theirs in zip(ENTRIES, forged, strict=True)]
    assert same == [True] * 10 + [False] * 20


def test_a_file_is_tied_to_the_one_before_it() -> None:
    data, entries = journal(THIRTY[:3], 31, ENTRIES[-1].sha256)
    assert list(read(data, ENTRIES[-1].sha256, 31).entries) == entries
    assert "does not follow" in str(read(data, ENTRIES[-2].sha256, 31).flaws[0])
    assert "expected 0030" in str(read(data, ENTRIES[-1].sha256, 30).flaws[0])


def test_a_changed_header_is_a_flaw_and_nothing_is_trusted() -> None:
    assert read(DATA.replace(b"2026-02", b"2026-03", 1)) == Reading(flaws=read(b"").flaws)
    assert read_journal("2026-03", DATA, GENESIS, 1).entries == ()


def test_an_empty_journal_is_a_header_and_nothing_else() -> None:
    header = file_header("2026-02").encode()
    assert read(header) == Reading((), (), len(header))


def test_what_is_appended_after_the_last_entry_is_a_flaw() -> None:
    for tail in (b"\n", b"x", b" ", b"\x00", b"## 0031"):
        assert len(damaged(DATA + tail).entries) == 30


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"entry=1 ", b"entry=01 "), (b"entry=1 ", "entry=\u0661 ".encode()), (b"## 0001", "## 000\u0661".encode())],
)
def test_a_number_written_otherwise_is_a_change(old: bytes, new: bytes) -> None:
    damaged(DATA.replace(old, new, 1))


def test_line_endings_of_another_system_are_a_change() -> None:
    damaged(DATA.replace(b"\n", b"\r\n"))


def test_numbers_beyond_four_digits_stay_in_order() -> None:
    data, entries = journal(THIRTY[:3], 9999)
    assert [e.number for e in read(data, number=9999).entries] == [9999, 10000, 10001]
    assert entries[1].text.startswith("## 10000 · ")


def test_a_server_s_words_are_bounded() -> None:
    entry = render(draft(quote=tuple("x" * 500 for _ in range(1000))), 1, AT, GENESIS)
    assert len(entry.text) < 6000
