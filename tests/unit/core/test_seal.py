"""Seals find what a chain and a database cannot: a journal rewritten by whoever holds the whole host."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.core.seal import (
    KeyState,
    Seal,
    SealsRead,
    check_seals,
    checkpoint,
    journal_key,
    journal_keys,
    journal_line,
    key_after,
    read_checkpoint,
    read_seals,
    seal_line,
    since_checkpoint,
)

KEY = bytes(range(32))
FIRST, LAST = 3, 12
HEADS = {number: f"{number:064x}" for number in range(1, LAST + 1)}
OTHER = {number: f"{number + 1000:064x}" for number in HEADS}


def lines(key: bytes = KEY, first: int = FIRST, heads: dict[int, str] = HEADS) -> list[bytes]:
    return [seal_line(key_after(key, n - first), n, heads[n]) for n in range(first, LAST + 1)]


def host(number: int = LAST + 1, key: bytes = KEY) -> KeyState:
    return KeyState(FIRST, number, key_after(key, number - FIRST))


def said(made: list[bytes], heads: dict[int, str] = HEADS, state: KeyState | None = None) -> list[str]:
    return [str(flaw) for flaw in check_seals(KEY, read_seals(b"".join(made)), heads, state or host())[0]]


def test_a_journal_that_nobody_touched_has_no_flaw() -> None:
    assert check_seals(KEY, read_seals(b"".join(lines())), HEADS, host()) == ([], LAST)
    assert said([], state=KeyState(1, 1, KEY)) == []


def test_a_daemon_at_work_or_killed_between_any_two_steps_is_no_forgery() -> None:
    """The entry is in the journal and not sealed; it is sealed and the key not turned; the next seal is half written."""
    assert said(lines()[:-1], state=host(LAST)) == []
    assert said(lines(), state=host(LAST)) == []
    whole = lines()
    for cut in range(len(whole[-1])):
        assert said([*whole[:-1], whole[-1][:cut]], state=host(LAST)) == [], cut
        assert said([*whole[:-1], whole[-1][:cut] + bytes(len(whole[-1]) - cut)], state=host(LAST)) == [], cut


def test_an_old_entry_sealed_again_with_a_newer_key_is_found() -> None:
    """What a verifier of another log let pass once: whoever holds the host has the newest key, and no older one."""
    newest = host().key
    made = lines()
    for number in range(FIRST, LAST + 1):
        forged = [*made]
        forged[number - FIRST] = seal_line(newest, number, OTHER[number])
        assert "not the one that was sealed" in said(forged, {**HEADS, number: OTHER[number]})[0]


def test_a_journal_written_anew_with_the_key_of_the_host_is_found() -> None:
    newest = host().key
    anew = [seal_line(key_after(newest, n - FIRST), n, OTHER[n]) for n in range(FIRST, LAST + 1)]
    state = KeyState(FIRST, LAST + 1, key_after(newest, LAST + 1 - FIRST))
    assert "not the one that was sealed" in said(anew, OTHER, state)[0]
    assert "not the one that was sealed" in said([seal_line(newest, LAST, OTHER[LAST])], OTHER)[0]


@pytest.mark.parametrize("kept", range(LAST + 1 - FIRST))
def test_a_tail_cut_off_journal_and_seals_alike_is_found(kept: int) -> None:
    heads = {n: h for n, h in HEADS.items() if n < FIRST + kept}
    found = said(lines()[:kept], heads)
    assert "cut off" in found[0] or "missing" in found[0]
    back = KeyState(FIRST, FIRST + kept, host().key)  # the key cannot be wound back with the number
    assert said(lines()[:kept], heads, back)


def test_a_tail_cut_off_the_journal_alone_is_found() -> None:
    assert said(lines(), {n: h for n, h in HEADS.items() if n < LAST}) == [
        "entry 0012: was sealed and is missing from the files"
    ]


def test_seals_removed_moved_or_doubled_are_found() -> None:
    made = lines()
    for order in ([1, 2, 3], [0, 2, 1], [0, 0, 1], [0, 1, 3]):
        assert said([made[i] for i in order] + made[4:])
    assert "missing" in said([])[0]
    assert "is no seal" in said([*made[:2], b"nonsense\n", *made[2:]])[0]
    assert "is missing" in str(check_seals(KEY, read_seals(b"".join(made)), HEADS, None)[0][0])


@pytest.mark.parametrize("name", ["a", "c", "b"])
def test_a_journal_that_a_damaged_last_line_names_is_none(name: str) -> None:
    """Power loss turns a bit over in a line that was never there for good, and c, in its name, is a, or one that never was."""
    made = [journal_line(KEY, 1, "a")]
    damaged = journal_line(key_after(KEY), 2, "c").replace(b" c\n", f" {name}\n".encode())
    read = read_seals(made[0] + damaged)
    flaws, last = check_seals(KEY, read, {}, KeyState(1, 2, key_after(KEY)))
    whole = name == "c"
    assert (flaws, last) == ([], 1 + whole)
    expected = {"a": journal_key(KEY, "a")} | ({"c": journal_key(key_after(KEY), "c")} if whole else {})
    assert journal_keys(KEY, read, last) == expected


def test_a_journal_begun_again_with_the_key_that_is_there_is_found_before_and_after_the_key_is_turned() -> None:
    made = b"".join(journal_line(key_after(KEY, at), at + 1, name) for at, name in enumerate("aba"))
    for number in (3, 4):
        state = KeyState(1, number, key_after(KEY, number - 1))
        flaws, _ = check_seals(KEY, read_seals(made), {}, state)
        assert [str(flaw) for flaw in flaws] == ["seals: begin the journal of slot a more than once"]


def test_the_wrong_key_proves_nothing() -> None:
    assert check_seals(bytes(32), read_seals(b"".join(lines())), HEADS, host())[0]


def test_every_byte_of_the_seals_counts() -> None:
    whole = b"".join(lines())
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1
        assert check_seals(KEY, read_seals(bytes(changed)), HEADS, host())[0], position


@given(st.binary(max_size=300))
def test_any_bytes_can_be_read(data: bytes) -> None:
    read = read_seals(data)
    assert isinstance(read, SealsRead)
    assert read.good_bytes <= len(data)


def test_a_seal_reads_back() -> None:
    read = read_seals(seal_line(KEY, 7, "ab" * 32))
    assert read.seals == (Seal(7, read.seals[0].code),)
    assert read.flaw == ""


def test_a_checkpoint_is_short_and_is_extended_by_what_was_added_alone() -> None:
    heads = list(HEADS.items())
    point = checkpoint(5, f"{5:064x}"[::-1])
    assert len(point) < 40
    assert read_checkpoint(f" {point}\n") == (5, f"{5:064x}"[::-1][:32])
    real = {n: f"{n:064x}"[::-1] for n in HEADS}
    assert since_checkpoint((5, real[5][:32]), list(real.items())) == []
    assert "written anew" in str(since_checkpoint((5, real[6][:32]), list(real.items()))[0])
    assert "is missing" in str(since_checkpoint((13, real[5][:32]), heads)[0])
    assert since_checkpoint((0, "0" * 32), []) == []


@pytest.mark.parametrize(
    "text", ["", "5", "5:abc", "x:" + "a" * 32, "5:" + "g" * 32, "5:" + "a" * 65, "-1:" + "a" * 32]
)
def test_what_is_no_checkpoint_is_not_taken_for_one(text: str) -> None:
    assert read_checkpoint(text) is None
