"""The break-even checks of benchmarks/break_even.py, as promises: a bad drafter tells of good ones, a group of its rows."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "break_even.py"


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("break_even", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["break_even"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_a_bad_drafters_break_even_is_a_good_ones_within_12_percent_by_the_clients_times(checks: ModuleType) -> None:
    found = [one for one in checks.carried() if one.by == "TPOT" and one.drafter.startswith("big")]
    assert [(one.level, "uncapped" in one.drafter) for one in found] == [
        (1, False),
        (32, False),
        (1, True),
        (32, True),
        (128, True),
    ]
    assert max(abs(one.error) for one in found) < 0.12


def test_a_bad_drafters_break_even_is_a_good_ones_within_15_percent_by_the_log(checks: ModuleType) -> None:
    """Lines without a prefill: less than the client's times, which hold those of others."""
    found = [one for one in checks.carried() if one.by == "log"]
    assert len(found) == 8
    assert max(abs(one.error) for one in found) < 0.15


def test_even_a_drafter_that_is_never_accepted_tells_of_one_that_is(checks: ModuleType) -> None:
    found = [one for one in checks.carried() if one.drafter == "smol-eagle3-random"]
    assert len(found) == 6
    assert max(abs(one.error) for one in found) < 0.13


def test_gain_or_loss_is_told_right_for_nine_published_rows_in_ten_from_the_others_of_their_group(
    checks: ModuleType,
) -> None:
    told = checks.left_out(checks.published())
    assert len(told) == 61
    assert sum(one.right for one in told) >= 0.9 * len(told)
    grouped = [one for one in told if one.others]
    assert sum(one.right for one in grouped) >= 0.94 * len(grouped)


def test_a_row_is_never_fitted_on_itself(checks: ModuleType) -> None:
    rows = checks.published()
    told = checks.left_out(rows)
    for index in (0, 30, len(rows) - 1):
        known = rows[index].known
        other = checks.Row(rows[index].group, type(known)(known.num_steps, known.running, 99.0, known.method), 1.0, 1.0)
        again = checks.left_out([*rows[:index], other, *rows[index + 1 :]])
        assert again[index].needed == told[index].needed
