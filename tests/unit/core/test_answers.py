"""Answers of honest servers agree, those of one that computes something else do not, and nothing is compared with nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.core.answers import PROMPTS, agreement

WHOLE = tuple(f" answer {n}: the light house keeper watched" for n in range(len(PROMPTS)))


def test_the_prompts_are_eight_and_differ() -> None:
    assert len(set(PROMPTS)) == 8


def test_the_same_answers_agree_wholly_and_other_ones_hardly() -> None:
    same = agreement(WHOLE, WHOLE)
    assert same is not None
    assert (same.mean, same.prompts) == (1.0, 8)
    none = agreement(("!!!!!!!!!!!!!!!!",) * 8, WHOLE)
    assert none is not None
    assert none.mean == 0.0


def test_what_follows_the_first_difference_does_not_count() -> None:
    found = agreement(("abcdXfghij",) * 8, ("abcdefghij",) * 8)
    assert found is not None
    assert found.mean == pytest.approx(0.4)


def test_an_answer_that_stops_early_counts_for_the_part_that_it_gave() -> None:
    for pair in (("abc", "abcdef"), ("abcdef", "abc")):
        found = agreement(*((text,) * 8 for text in pair))
        assert found is not None
        assert found.mean == pytest.approx(0.5)


def test_the_space_of_a_first_token_and_half_a_character_at_the_end_are_no_difference() -> None:
    found = agreement((" \u4e0d\u662f\ufffd",) * 8, ("\u4e0d\u662f",) * 8)
    assert found is not None
    assert found.mean == 1.0


def test_silence_counts_nothing_where_the_best_known_answered_and_is_left_out_where_it_did_not() -> None:
    mine = ("", *WHOLE[1:])
    found = agreement(mine, WHOLE)
    assert found is not None
    assert (found.mean, found.prompts, found.worst) == (7 / 8, 8, PROMPTS[0])
    other = agreement(WHOLE, mine)
    assert other is not None
    assert (other.mean, other.prompts) == (1.0, 7)


def test_the_prompt_of_the_least_agreement_is_named_with_both_answers() -> None:
    mine = (*WHOLE[:4], " quite another thing", *WHOLE[5:])
    found = agreement(mine, WHOLE)
    assert found is not None
    assert (found.worst, found.worst_mine, found.worst_best) == (PROMPTS[4], mine[4], WHOLE[4])


@pytest.mark.parametrize(("mine", "best"), [((), WHOLE), (WHOLE, ()), ((), ()), (WHOLE, ("",) * 8)])
def test_without_answers_on_both_sides_nothing_is_compared(mine: tuple[str, ...], best: tuple[str, ...]) -> None:
    assert agreement(mine, best) is None


@given(st.lists(st.text(), min_size=8, max_size=8), st.lists(st.text(), min_size=8, max_size=8))
def test_agreement_is_a_share_and_has_no_side(mine: list[str], best: list[str]) -> None:
    found, back = agreement(mine, best), agreement(best, mine)
    if found is not None:
        assert 0.0 <= found.mean <= 1.0
    if found is not None and back is not None and found.prompts == back.prompts == 8:
        assert found.mean == pytest.approx(back.mean)
