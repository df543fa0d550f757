"""Synthetic texts: always the same, as long as asked for, and never beginning like one another."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.bench.words import WORDS, Texts, Words

numbers = st.integers(0, 10_000)
EXACT = Words(how="exact", words=WORDS[:64], openers=WORDS[:5], tokens_per_word=1.0)
few = st.integers(1, 30)


def test_every_word_of_the_pool_is_another_one_and_plain() -> None:
    assert len(set(WORDS)) == len(WORDS) > 200
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


@given(numbers, numbers, st.integers(1, 400), st.booleans())
def test_a_text_has_the_words_that_were_asked_for_and_is_the_same_every_time(
    level: int, number: int, length: int, opens: bool
) -> None:
    text, again = (Texts(EXACT, f"1/{level}").text("prompt", number, length, opens=opens) for _ in range(2))
    assert text == again
    assert len(text.split(" ")) == length
    assert set(text.split(" ")) <= set(EXACT.words)
    assert not opens or text.split(" ")[0] in EXACT.openers


@given(st.sets(st.tuples(few, few, numbers), min_size=2, max_size=20), st.booleans(), st.sampled_from([EXACT, Words()]))
def test_no_two_texts_begin_with_the_same_words_so_no_prefix_cache_answers_one_from_another(
    keys: set[tuple[int, int, int]], opens: bool, words: Words
) -> None:
    """For seeds, levels and numbers: within the words that write them, eight of the whole pool."""
    written = 11 if words is EXACT else 8
    openings = {Texts(words, f"{s}/{lv}").text("prompt", i, written, opens=opens) for s, lv, i in keys}
    assert len(openings) == len(keys)


def test_neighbours_differ_in_their_first_word() -> None:
    texts = Texts(Words(), "1/32")
    assert len({texts.text("prompt", i, 20, opens=True).split()[0] for i in range(len(WORDS))}) == len(WORDS)


@given(st.integers(1, 400), st.integers(1, 400), numbers)
def test_a_shorter_text_is_the_beginning_of_the_longer_one_so_a_block_cut_short_is_shared_too(
    one: int, other: int, number: int
) -> None:
    texts = Texts(EXACT, "1/8")
    short, long = sorted((one, other))
    whole = texts.text("block", number, long, opens=False)
    assert whole.split()[:short] == texts.text("block", number, short, opens=False).split()


def test_words_go_through_json_and_back_since_a_worker_gets_them_so() -> None:
    assert Words.model_validate(json.loads(json.dumps(EXACT.model_dump(mode="json")))) == EXACT


@pytest.mark.parametrize(("per_word", "tokens", "words"), [(1.0, 100, 100), (1.25, 100, 80), (2.0, 1, 1), (1.0, -5, 1)])
def test_a_number_of_tokens_takes_so_many_words_and_one_at_least(per_word: float, tokens: int, words: int) -> None:
    assert Words(tokens_per_word=per_word).count(tokens) == words
