"""Break-evens from other points: nothing known is the prior, what is known wins, and the best depth follows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.core.speculation import prior_needed
from autotuner.core.stepfit import KnownRatio, predicted_needed


def test_with_nothing_known_it_is_the_prior() -> None:
    assert predicted_needed((), 3, 32) == pytest.approx(prior_needed(3, 32))


def test_one_point_pulls_the_prior_most_of_the_way_at_its_own_place() -> None:
    known = (KnownRatio(3, 8, 2 * prior_needed(3, 8), "EAGLE"),)
    assert 1.8 < predicted_needed(known, 3, 8, "EAGLE") / prior_needed(3, 8) < 2


def test_many_points_replace_the_prior() -> None:
    known = tuple(KnownRatio(k, b, 1.7 * prior_needed(k, b), "EAGLE") for k in (2, 3, 5) for b in (1, 8, 32, 64))
    for k, b in ((3, 8), (4, 16)):
        assert predicted_needed(known, k, b, "EAGLE") == pytest.approx(1.7 * prior_needed(k, b), rel=0.02)


def test_a_point_of_another_method_or_a_far_batch_says_less() -> None:
    def pulled(known: KnownRatio) -> float:
        return predicted_needed((known,), 3, 8, "EAGLE") / prior_needed(3, 8)

    near = pulled(KnownRatio(3, 8, 2 * prior_needed(3, 8), "EAGLE"))
    assert 1 < pulled(KnownRatio(3, 8, 2 * prior_needed(3, 8), "n-gram")) < near
    assert 1 < pulled(KnownRatio(3, 128, 2 * prior_needed(3, 128), "EAGLE")) < near


@given(
    st.lists(st.tuples(st.integers(1, 32), st.integers(1, 1024), st.floats(0.5, 20)), max_size=20),
    st.integers(1, 32),
    st.integers(1, 1024),
)
def test_it_is_always_a_positive_number(points: list[tuple[int, int, float]], num_steps: int, running: int) -> None:
    assert predicted_needed([KnownRatio(*point) for point in points], num_steps, running) > 0


def test_the_published_ratio_at_a_depth_is_met_from_two_other_depths() -> None:
    """vLLM, Llama-3.1-8B, EAGLE-3 (issue 20780): AL 2.36, 2.79, 3.32, 3.54 and 1.64, 1.73, 1.71, 1.65 times as fast at 2, 3, 5, 7."""
    known = (KnownRatio(2, 1, 2.36 / 1.64, "EAGLE-3"), KnownRatio(7, 1, 3.54 / 1.65, "EAGLE-3"))
    assert predicted_needed(known, 3, 1, "EAGLE-3") == pytest.approx(2.79 / 1.73, rel=0.05)
    assert predicted_needed(known, 5, 1, "EAGLE-3") == pytest.approx(3.32 / 1.71, rel=0.05)
