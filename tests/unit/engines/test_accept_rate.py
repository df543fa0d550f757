"""SGLang's accept rate is turned into accepted / drafted by its own release's definition, or into nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.engines.accept_rate import Definition, accepted_share, definition_by_fit, definition_of, printed


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.5.2", None),
        ("0.5.3.post3", Definition.OVER_STEPS),
        ("0.5.4", Definition.OVER_STEPS),
        ("0.5.5", Definition.OVER_DRAFT_TOKENS),
        ("v0.5.10", Definition.OVER_DRAFT_TOKENS),
        ("0.5.11", Definition.WITHOUT_BONUS),
        ("0.5.23.dev3+g1234", Definition.WITHOUT_BONUS),
        ("main", None),
    ],
)
def test_each_release_has_its_definition(version: str, expected: Definition | None) -> None:
    assert definition_of(version) is expected


def test_a_quarter_may_be_nothing_accepted() -> None:
    assert accepted_share(0.25, Definition.OVER_DRAFT_TOKENS, 3, 4) == 0.0
    assert accepted_share(0.25, Definition.WITHOUT_BONUS, 3, 4) == 0.25
    assert accepted_share(0.25, None, 3, 4) is None


def test_the_lines_of_a_launch_tell_the_definition_when_the_version_is_not_known() -> None:
    assert definition_by_fit([(2.17, 0.54), (1.95, 0.49), (1.80, 0.45)], 3, 4) is None  # steps + 1 == draft tokens
    assert definition_by_fit([(2.17, 0.27), (1.95, 0.24), (1.80, 0.23)], 3, 8) is Definition.OVER_DRAFT_TOKENS
    assert definition_by_fit([(2.62, 0.54), (2.60, 0.53), (2.62, 0.54)], 3, 4) is Definition.WITHOUT_BONUS
    assert definition_by_fit([(2.62, 0.54), (2.60, 0.53)], 3, 4) is None, "two lines are too few"


@given(st.sampled_from(list(Definition)), st.floats(1, 4), st.just(3), st.integers(2, 16))
def test_converting_what_a_release_prints_gives_the_share_of_the_drafts(
    definition: Definition, length: float, steps: int, draft_tokens: int
) -> None:
    rate = printed(definition, length, steps, draft_tokens)
    share = accepted_share(rate, definition, steps, draft_tokens)
    assert share == pytest.approx((length - 1) / (draft_tokens - 1), abs=1e-9)
