"""The depth that acceptance and step times speak for: the formulas give back what they were made from."""

import pytest

from autotuner.core.depth import FIXED_PART, acceptance, best_depth, chain_accept_len, step_line


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("chance", [0.0, 0.25, 0.6, 0.95])
def test_the_chance_of_a_token_is_got_back_from_the_accept_length_it_gives(chance: float, steps: int) -> None:
    assert acceptance(chain_accept_len(chance, steps), steps) == pytest.approx(chance, abs=1e-9)


def test_accept_lengths_that_cannot_be_are_taken_for_the_nearest_that_can() -> None:
    assert acceptance(0.99, 3) == 0.0
    assert acceptance(4.2, 3) == 1.0
    assert chain_accept_len(1.0, 3) == 4.0


def test_one_measured_depth_gives_the_slope_above_the_published_fixed_part() -> None:
    line = step_line({3: 1.85})
    assert line is not None
    assert line.at(3) == pytest.approx(1.85)
    assert line.at(0) == FIXED_PART


def test_a_step_cheaper_than_the_published_fixed_part_takes_the_line_in_proportion() -> None:
    line = step_line({3: 1.05})
    assert line is not None
    assert line.at(3) == pytest.approx(1.05)
    assert 0 < line.at(1) < line.at(3)


def test_two_measured_depths_give_the_line_by_themselves() -> None:
    line = step_line({2: 1.4, 4: 1.6})
    assert line is not None
    assert (line.fixed, line.slope) == (pytest.approx(1.2), pytest.approx(0.1))
    assert step_line({2: 1.6, 4: 1.4}) is not None, (
        "noise that would make drafts free falls back to the published shape"
    )
    assert step_line({2: 1.6, 4: 1.4}).slope > 0  # type: ignore[union-attr]


def test_nothing_is_predicted_from_nothing() -> None:
    assert step_line({}) is None
    assert best_depth(2.0, 3, {}) is None
    assert best_depth(2.0, 3, {5: 1.5}) is None


def test_a_poor_drafter_is_to_draft_less_and_a_good_one_more() -> None:
    """EAGLE's published R at k = 5 and 2; acceptance 0.3 and 0.9."""
    poor = best_depth(chain_accept_len(0.3, 5), 5, {5: 1.09 + 0.105 * 5})
    good = best_depth(chain_accept_len(0.9, 2), 2, {2: 1.09 + 0.105 * 2})
    assert poor is not None
    assert good is not None
    assert poor.steps < 5
    assert poor.gain > 0.1
    assert good.steps > 2
    assert good.ratio == pytest.approx(good.accept_len / (FIXED_PART + 0.08 * good.steps))


def test_the_depth_of_now_is_never_proposed_and_its_gain_is_negative_where_it_is_the_best() -> None:
    """Acceptance 0.6, R = 1.14 + 0.124 k: the best depth is 3, so any other one loses."""
    ratios = {k: chain_accept_len(0.6, k) / (1.14 + 0.124 * k) for k in range(1, 9)}
    now = max(ratios, key=lambda k: ratios[k])
    best = best_depth(chain_accept_len(0.6, now), now, {now: 1.14 + 0.124 * now})
    assert best is not None
    assert best.steps != now
    assert best.gain <= 0
