"""States only move forwards, and an end is an end."""

import pytest

from autotuner.core.state import LAUNCH_TRANSITIONS, TRIAL_TRANSITIONS, LaunchState, TrialState, launch_may, trial_may


def test_every_state_is_in_its_table() -> None:
    assert set(TRIAL_TRANSITIONS) == set(TrialState)
    assert set(LAUNCH_TRANSITIONS) == set(LaunchState)


@pytest.mark.parametrize("new", list(LaunchState))
def test_an_ended_launch_never_lives_again(new: LaunchState) -> None:
    assert not launch_may(LaunchState.ENDED, new)


def test_a_launch_may_end_at_any_time_but_serve_only_after_it_was_started() -> None:
    for old in set(LaunchState) - {LaunchState.ENDED}:
        assert launch_may(old, LaunchState.ENDED)
    assert not launch_may(LaunchState.INTENDED, LaunchState.SERVING)
    assert launch_may(LaunchState.STARTING, LaunchState.SERVING)
    assert not any(launch_may(old, LaunchState.INTENDED) for old in LaunchState)


@pytest.mark.parametrize("old", [TrialState.DONE, TrialState.CANCELLED])
@pytest.mark.parametrize("new", list(TrialState))
def test_a_trial_that_is_over_stays_over(old: TrialState, new: TrialState) -> None:
    assert not trial_may(old, new)


def test_a_trial_is_done_only_after_it_ran_and_may_go_back_to_the_queue() -> None:
    assert not trial_may(TrialState.QUEUED, TrialState.DONE)
    assert trial_may(TrialState.RUNNING, TrialState.QUEUED)
    assert trial_may(TrialState.QUEUED, TrialState.CANCELLED)
