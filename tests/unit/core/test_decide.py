"""The decision: never two servers, and in the end the best-known serves, whatever went wrong on the way."""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.core.decide import (
    INTERRUPTIONS_MAX,
    RESTORE_FAILURES_MAX,
    Action,
    AwaitServing,
    BeginTrial,
    Conclude,
    Decision,
    Degrade,
    Doing,
    GiveUp,
    GoOn,
    IncumbentRecord,
    Interrupt,
    Launch,
    LaunchRecord,
    Observed,
    QueueBaseline,
    Recorded,
    RecordEnd,
    Requeue,
    RestoreDone,
    RunLevel,
    Stop,
    TrialRecord,
    Verify,
    Wait,
    decide,
)
from autotuner.core.gpumemory import HELD
from autotuner.core.state import LAUNCH_TRANSITIONS, LaunchState, Purpose

STARTING, SERVING, INTENDED = LaunchState.STARTING, LaunchState.SERVING, LaunchState.INTENDED
BEST = IncumbentRecord("best", "best")
OLDER = IncumbentRecord("older", "older")
WORN = IncumbentRecord("best", "best", RESTORE_FAILURES_MAX)
TRIAL = TrialRecord(7, "new", "new", next_level=128)
QUEUED = TrialRecord(8, "next", "next")


def launch(id_: str, candidate: str, state: LaunchState = SERVING, trial_id: int | None = None) -> LaunchRecord:
    purpose = Purpose.TRIAL if trial_id is not None else Purpose.RESTORE
    return LaunchRecord(id_, candidate, candidate, purpose, state, trial_id)


def recorded(**more: Any) -> Recorded:
    return Recorded(**{"slot": "a", **more})


def said(living: str = "", verified: str = "", **more: Any) -> Observed:
    return Observed(frozenset(living.split()), frozenset(verified.split()), **more)


def action(rec: Recorded, obs: Observed) -> Any:
    return decide(rec, obs).action


# --- every combination


LAUNCHES: tuple[tuple[LaunchRecord, ...], ...] = (
    (),
    *((launch("B", "best", state),) for state in (INTENDED, STARTING, SERVING)),
    *((launch("T", "new", state, 7),) for state in (INTENDED, STARTING, SERVING)),
    (launch("L", "lost", SERVING, 6),),
    (launch("O", "older"),),
    (launch("B", "best"), launch("T", "new", STARTING, 7)),
    (launch("T", "new", SERVING, 7), launch("L", "lost", SERVING, 6)),
    (launch("L", "lost", SERVING, 6), launch("B", "best"), launch("O", "older")),
)
TRIALS = (None, TRIAL, dataclasses.replace(TRIAL, next_level=None), dataclasses.replace(TRIAL, concluded="too slow"))
LADDERS: tuple[tuple[IncumbentRecord, ...], ...] = ((), (BEST, OLDER), (WORN, OLDER), (WORN,))
HELD_WHY = f"{HELD} within 60 s after old had ended: GPU 0 has 60400 MiB in use, 400 were expected"
AROUND = (  # strangers, memory that did not come back, and why the slot is degraded, if it is
    ("", "", "all failed"),
    ("port 1 is held by pid 9", "", "all failed"),
    ("", HELD_WHY, "all failed"),
    ("", "", HELD_WHY),
    ("", HELD_WHY, HELD_WHY),
)
FLAGS = ("paused", "hands_off", "restore_wanted", "stopped", "degraded", "no_new_trials", "interrupt_trial")


def every_world() -> Iterator[tuple[Recorded, Observed]]:
    for launches, trial, queued, ladder, bits, (strangers, held, degraded) in itertools.product(
        LAUNCHES, TRIALS, (None, QUEUED), LADDERS, range(2 ** len(FLAGS)), AROUND
    ):
        flags = {name: name.replace("_", " ") for i, name in enumerate(FLAGS) if bits >> i & 1}
        if "degraded" in flags:
            flags["degraded"] = degraded
        rec = Recorded("a", launches, trial, queued, ladder, **flags)
        ids = [one.id for one in launches]
        for size in {0, len(ids), len(ids) - 1} - {-1}:
            for living in itertools.combinations(ids, size):
                yield rec, Observed(frozenset(living), frozenset(), strangers, held=held)
                if living:
                    yield rec, Observed(frozenset(living), frozenset(living), strangers, held=held)


def check_what_may_never_be(rec: Recorded, obs: Observed, decision: Decision) -> None:
    act, living, ours = decision.action, obs.living, {one.id: one for one in rec.launches}
    assert decision.reason
    assert "\n" not in decision.reason
    match act:
        case Launch():
            assert not living, "never a second server"
            assert not rec.stopped or rec.restore_wanted, "never where a person wants none"
            assert not obs.strangers, "never into a slot that somebody else holds"
            assert not obs.held, "never onto memory that did not come back"
            assert all(one.id in living for one in rec.launches), "never before the end of a launch is recorded"
            if act.purpose is Purpose.TRIAL:
                assert rec.trial is not None
                assert (act.trial_id, act.candidate_id) == (rec.trial.id, rec.trial.candidate_id)
            else:
                target = next(r for r in rec.ladder if r.failures < RESTORE_FAILURES_MAX)
                assert act.candidate_id == target.candidate_id, "the best-known that is not worn out"
                assert rec.trial is None
                assert not rec.degraded or rec.restore_wanted
        case Stop() | Verify() | AwaitServing():
            assert act.launch_id in ours, "only what we launched"
            assert act.launch_id in living
        case RunLevel():
            assert ours[act.launch_id].state is SERVING
            assert ours[act.launch_id].trial_id == act.trial_id
            assert act.launch_id in living
        case RecordEnd():
            assert act.launch_id in ours
            assert act.launch_id not in living
        case BeginTrial() | QueueBaseline():
            assert rec.trial is None
            held = rec.paused or rec.no_new_trials or rec.degraded or (rec.restore_wanted and rec.ladder)
            assert not held
        case Conclude() | Requeue() | GiveUp():
            assert rec.trial is not None
            assert act.trial_id == rec.trial.id
        case Degrade() if decision.reason != HELD_WHY:
            assert rec.ladder
            assert all(r.failures >= RESTORE_FAILURES_MAX for r in rec.ladder)
            assert not {r.candidate_id for r in rec.ladder} & {ours[i].candidate_id for i in living}, "while one serves"
    if rec.hands_off and not rec.restore_wanted:
        assert act in {Wait(), Interrupt()}, "hands off means hands off; the load of a trial may end"
    if len(living) > 1 and isinstance(act, Stop) and rec.trial is not None and not rec.hands_off:
        assert ours[act.launch_id].trial_id != rec.trial.id, "the one least wanted goes first"


def check_what_may_never_be_of_memory(rec: Recorded, obs: Observed, decision: Decision) -> None:
    if isinstance(decision.action, GoOn):
        assert rec.degraded == HELD_WHY
        assert not obs.held
        assert not obs.strangers
        assert not obs.living
    elif decision == Decision(Degrade(), HELD_WHY):
        assert obs.held
        assert rec.degraded != HELD_WHY or rec.restore_wanted, "it is said once"


def test_no_combination_of_record_and_observation_breaks_a_promise() -> None:
    seen = set()
    for rec, obs in every_world():
        decision = decide(rec, obs)
        check_what_may_never_be(rec, obs, decision)
        check_what_may_never_be_of_memory(rec, obs, decision)
        seen.add(type(decision.action))
    assert seen == set(get_args(Action)) - {Interrupt, GiveUp, QueueBaseline}, "the worlds reach what they are made of"


# --- one situation at a time


def test_while_a_long_action_runs_nothing_else_is_begun() -> None:
    for rec in (
        recorded(queued=QUEUED),
        recorded(ladder=(BEST,), restore_wanted="x"),
        recorded(launches=(launch("B", "best"),)),
    ):
        assert decide(rec, said(doing=Doing("stopping x"))) == Decision(Wait(), "stopping x")


@pytest.mark.parametrize("why", ["restore_wanted", "interrupt_trial"])
def test_a_trials_long_action_is_interrupted_when_the_trial_must_yield(why: str) -> None:
    rec = recorded(trial=TRIAL, **{why: "the operator asked"})
    assert decide(rec, said(doing=Doing("measuring", 7))) == Decision(
        Interrupt(), "measuring: interrupted, the operator asked"
    )
    assert action(rec, said(doing=Doing("stopping"))) == Wait(), "what is no part of a trial is never cut short"


def test_a_trial_is_launched_into_an_empty_slot_followed_measured_and_concluded() -> None:
    rec = recorded(trial=TRIAL, ladder=(BEST,))
    assert action(rec, said()) == Launch("new", "new", Purpose.TRIAL, 7)
    starting = dataclasses.replace(rec, launches=(launch("T", "new", STARTING, 7),))
    assert action(starting, said("T")) == AwaitServing("T", 7)
    serving = dataclasses.replace(rec, launches=(launch("T", "new", SERVING, 7),))
    assert action(serving, said("T")) == RunLevel(7, "T", 128)
    done = dataclasses.replace(serving, trial=dataclasses.replace(TRIAL, next_level=None))
    assert action(done, said("T")) == Conclude(7)
    early = dataclasses.replace(serving, trial=dataclasses.replace(TRIAL, concluded="below break-even"))
    assert decide(early, said("T")) == Decision(Conclude(7), "below break-even")


def test_what_serves_makes_room_before_a_trial_begins() -> None:
    assert action(recorded(trial=TRIAL, launches=(launch("B", "best"),)), said("B")) == Stop("B")


def test_a_server_that_ended_is_recorded_before_anything_else() -> None:
    rec = recorded(trial=TRIAL, ladder=(BEST,), launches=(launch("T", "new", SERVING, 7),), restore_wanted="x")
    assert action(rec, said()) == RecordEnd("T")


def test_strangers_are_waited_for_and_named() -> None:
    found = decide(recorded(trial=TRIAL), said(strangers="port 30000 is held by pid 9 (python)"))
    assert found == Decision(Wait(), "cannot launch new: port 30000 is held by pid 9 (python)")
    assert action(recorded(ladder=(BEST,)), said(strangers="GPU 0 is used by pid 9")) == Wait()


def test_memory_of_a_server_that_has_ended_is_waited_for() -> None:
    left = "the GPU memory of old, which has ended, is not free yet"
    assert decide(recorded(trial=TRIAL), said(freeing=left)) == Decision(Wait(), f"new waits: {left}")
    assert action(recorded(ladder=(BEST,), restore_wanted="x"), said(freeing=left)) == Wait()


def test_memory_that_does_not_come_back_asks_for_a_person_once_and_goes_on_by_itself() -> None:
    for rec in (recorded(trial=TRIAL), recorded(ladder=(BEST,), restore_wanted="asked for")):
        assert decide(rec, said(held=HELD_WHY)) == Decision(Degrade(), HELD_WHY)
    degraded = recorded(trial=TRIAL, ladder=(BEST,), queued=QUEUED, degraded=HELD_WHY)
    assert action(degraded, said(held=HELD_WHY)) == Requeue(7), "no trial's time runs meanwhile"
    waits = dataclasses.replace(degraded, trial=None)
    assert decide(waits, said(held=HELD_WHY)) == Decision(Wait(), f"degraded: {HELD_WHY}")
    assert action(waits, said(strangers="GPU 0 is used by pid 9")) == Wait()
    assert action(waits, said()) == GoOn()
    assert action(dataclasses.replace(waits, stopped=BY_ME), said()) == GoOn(), "nobody needs to come any more"
    asked = dataclasses.replace(waits, degraded="", restore_wanted="asked for")
    assert action(asked, said(held=HELD_WHY)) == Degrade(), "a person who asks is told again"


def test_a_stop_that_was_cut_short_is_made_again_and_proven() -> None:
    stopping = dataclasses.replace(launch("B", "best"), end_asked=True)
    assert action(recorded(trial=TRIAL, launches=(stopping,)), said()) == Stop("B")
    assert action(recorded(launches=(dataclasses.replace(stopping, state=INTENDED),)), said()) == Stop("B")


def test_the_next_try_to_restore_waits_longer_each_time_and_says_why() -> None:
    def at(now_s: float, *failed_s: float, **more: Any) -> Decision:
        rec = recorded(ladder=(BEST,), failed_s=failed_s, failed_end_s=max(failed_s), **more)
        return decide(rec, said(now_s=now_s))

    launches = Launch("best", "best", Purpose.RESTORE)
    assert at(1000.0, 1000.0).action == launches, "a server that crashes is wanted back at once"
    waits = at(1001.0, 990.0, 1000.0, last_failure="the port is taken")
    assert waits == Decision(
        Wait(),
        "restoring the best-known, best: next try in 10 s, because 2 launches ended by themselves within 15 min, "
        "the last one: the port is taken",
    )
    assert at(1010.0, 990.0, 1000.0).action == launches
    assert at(1015.0, 980.0, 990.0, 1000.0).action == Wait()
    assert at(1030.0, 980.0, 990.0, 1000.0).action == launches
    assert at(1059.0, *range(991, 1001)).action == Wait()
    assert at(1060.0, *range(991, 1001)).action == launches, "the pause is bounded"
    assert at(2000.0, 10.0, 20.0, 1999.0).action == launches, "what failed long ago does not count"
    ended_late = recorded(ladder=(BEST,), failed_s=(900.0, 990.0), failed_end_s=1000.0)
    assert action(ended_late, said(now_s=1005.0)) == Wait(), "the pause begins where the last try ended"


def test_a_launch_that_lives_though_it_is_recorded_as_ended_bars_the_slot() -> None:
    assert action(recorded(trial=TRIAL), said("ghost")) == Wait()
    assert action(recorded(ladder=(BEST,), restore_wanted="x"), said("ghost")) == Wait()


def test_of_two_servers_the_one_that_is_wanted_stays() -> None:
    best, mine, lost = launch("B", "best"), launch("T", "new", SERVING, 7), launch("L", "lost", SERVING, 6)
    for pair in itertools.permutations((mine, best)):
        assert action(recorded(trial=TRIAL, ladder=(BEST,), launches=pair), said("B T")) == Stop("B")
    for pair in itertools.permutations((lost, best)):
        assert action(recorded(ladder=(BEST,), launches=pair), said("B L")) == Stop("L")


def test_when_nothing_is_to_run_the_best_known_is_put_back_verified_and_then_left_alone() -> None:
    rec = recorded(ladder=(BEST,))
    assert action(rec, said()) == Launch("best", "best", Purpose.RESTORE)
    up = dataclasses.replace(rec, launches=(launch("B", "best", STARTING),))
    assert action(up, said("B")) == AwaitServing("B")
    serves = dataclasses.replace(rec, launches=(launch("B", "best"),))
    assert action(serves, said("B")) == Verify("B")
    assert decide(serves, said("B", "B")) == Decision(Wait(), "serving the best-known, best; the queue is empty")


def test_a_promoted_trial_goes_on_serving_without_a_restart() -> None:
    assert action(recorded(ladder=(BEST,), launches=(launch("T", "best", SERVING, 3),)), said("T", "T")) == Wait()


def test_a_loser_makes_room_for_the_best_known() -> None:
    rec = recorded(ladder=(BEST,), launches=(launch("L", "lost", SERVING, 6),))
    assert action(rec, said("L", "L")) == Stop("L")


def test_a_loser_does_not_hold_the_gpus_for_nobody_where_there_is_no_best_known() -> None:
    rec = recorded(launches=(launch("L", "lost", SERVING, 6),))
    for change in (
        {},
        {"paused": "by me"},
        {"queued": QUEUED, "paused": "by me"},
        {"queued": QUEUED, "no_new_trials": "x"},
    ):
        assert action(dataclasses.replace(rec, **change), said("L", "L")) == Stop("L")
    assert action(dataclasses.replace(rec, queued=QUEUED), said("L", "L")) == BeginTrial(8)


def test_the_next_trial_begins_without_putting_back_the_best_known_in_between() -> None:
    rec = recorded(queued=QUEUED, ladder=(BEST,), launches=(launch("L", "lost", SERVING, 6),))
    assert action(rec, said("L")) == BeginTrial(8)


def test_the_best_known_is_put_back_after_each_trial_where_that_is_set() -> None:
    rec = recorded(queued=QUEUED, ladder=(BEST,), restore_always=True)
    assert action(rec, said()) == Launch("best", "best", Purpose.RESTORE)
    serves = dataclasses.replace(rec, launches=(launch("B", "best"),))
    assert action(serves, said("B", "B")) == BeginTrial(8)


def test_the_best_known_is_measured_before_anything_is_compared_with_it() -> None:
    rec = recorded(queued=QUEUED, ladder=(BEST,), baseline_missing=True)
    assert action(rec, said()) == QueueBaseline("best")
    itself = dataclasses.replace(rec, queued=TrialRecord(9, "best", "best"))
    assert action(itself, said()) == BeginTrial(9)
    assert action(recorded(queued=QUEUED, baseline_missing=True), said()) == BeginTrial(8)


@pytest.mark.parametrize("flag", ["paused", "no_new_trials"])
def test_a_pause_starts_nothing_new_but_lets_the_trial_in_hand_end(flag: str) -> None:
    held: dict[str, Any] = {flag: "the reason"}
    assert action(recorded(trial=TRIAL, queued=QUEUED, **held), said()) == Launch("new", "new", Purpose.TRIAL, 7)
    assert action(recorded(queued=QUEUED, ladder=(BEST,), **held), said()) == Launch("best", "best", Purpose.RESTORE)
    serves = recorded(queued=QUEUED, ladder=(BEST,), launches=(launch("B", "best"),), **held)
    found = decide(serves, said("B", "B"))
    assert found.action == Wait()
    assert "the reason" in found.reason
    assert decide(recorded(queued=QUEUED, **held), said()).reason.endswith("the reason")


def test_an_interrupted_trial_goes_back_to_the_queue_and_one_that_is_over_is_concluded() -> None:
    rec = recorded(
        trial=TRIAL, interrupt_trial="the maintenance window closed", launches=(launch("T", "new", SERVING, 7),)
    )
    assert decide(rec, said("T")) == Decision(Requeue(7), "new goes back to the queue: the maintenance window closed")
    over = dataclasses.replace(rec, trial=dataclasses.replace(TRIAL, concluded="too slow"))
    assert action(over, said("T")) == Conclude(7)


def test_a_trial_that_keeps_ending_the_daemon_is_given_up() -> None:
    for times in range(1, INTERRUPTIONS_MAX + 1):
        often = dataclasses.replace(TRIAL, interruptions=times)
        assert action(recorded(trial=often, interrupt_trial="the daemon ended during it"), said()) == Requeue(7)
    often = dataclasses.replace(TRIAL, interruptions=INTERRUPTIONS_MAX + 1)
    found = decide(recorded(trial=often, interrupt_trial="the daemon ended during it"), said())
    assert found.action == GiveUp(7)
    assert f"the daemon or the server ended {INTERRUPTIONS_MAX + 1} times" in found.reason


BY_ME = "by me, the host gets a new driver"


def test_a_slot_that_is_stopped_on_purpose_is_emptied_and_stays_empty_whatever_wants_a_server() -> None:
    wants = recorded(stopped=BY_ME, queued=QUEUED, ladder=(BEST,), restore_always=True, degraded="x", paused="y")
    assert action(dataclasses.replace(wants, launches=(launch("B", "best"),)), said("B", "B")) == Stop("B")
    found = decide(wants, said())
    assert found.action == Wait()
    assert BY_ME in found.reason
    assert "autotuner resume" in found.reason


def test_a_trial_yields_to_a_stop_and_one_that_is_over_is_concluded_first() -> None:
    rec = recorded(stopped=BY_ME, trial=TRIAL, launches=(launch("T", "new", SERVING, 7),))
    assert action(rec, said("T")) == Requeue(7)
    assert action(rec, said("T", doing=Doing("measuring", 7))) == Interrupt()
    over = dataclasses.replace(rec, trial=dataclasses.replace(TRIAL, concluded="too slow"))
    assert action(over, said("T")) == Conclude(7)


def test_a_stop_does_not_wait_until_a_best_known_has_loaded_but_until_a_stop_has_ended() -> None:
    rec = recorded(stopped=BY_ME, ladder=(BEST,), launches=(launch("B", "best", STARTING),))
    assert action(rec, said("B", doing=Doing("waiting until best serves", starts=True))) == Interrupt()
    assert action(rec, said("B", doing=Doing("stopping best"))) == Wait()


def test_who_asks_for_the_best_known_after_a_stop_gets_it() -> None:
    rec = recorded(stopped=BY_ME, ladder=(BEST,), restore_wanted="asked for")
    assert action(rec, said()) == Launch("best", "best", Purpose.RESTORE)
    up = dataclasses.replace(rec, launches=(launch("B", "best", STARTING),))
    assert action(up, said("B", doing=Doing("waiting", starts=True))) == Wait(), "what is asked for is not interrupted"


def test_a_trial_does_not_take_the_gpus_from_running_requests() -> None:
    rec = recorded(queued=QUEUED, ladder=(BEST,), launches=(launch("B", "best"),))
    busy = decide(rec, said("B", "B", traffic="3 requests run on best"))
    assert busy == Decision(Wait(), "next begins when nothing runs on the best-known: 3 requests run on best")
    assert action(rec, said("B", "B")) == BeginTrial(8)


# What an operator may find a slot in, by name; `restore-best` must do the same in each of them.
STATES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing runs": ({}, ""),
    "paused": ({"paused": "by me"}, ""),
    "hands off": ({"hands_off": "by me"}, ""),
    "stopped on purpose": ({"stopped": BY_ME}, ""),
    "degraded": ({"degraded": "all failed"}, ""),
    "the window is closed": ({"queued": QUEUED, "no_new_trials": "outside the maintenance windows"}, ""),
    "the queue is full": ({"queued": QUEUED}, ""),
    "the baseline is missing": ({"queued": QUEUED, "baseline_missing": True}, ""),
    "a trial was taken in hand": ({"trial": TRIAL}, ""),
    "a trial's server is to be started": ({"trial": TRIAL, "launches": (launch("T", "new", INTENDED, 7),)}, "T"),
    "a trial's server loads": ({"trial": TRIAL, "launches": (launch("T", "new", STARTING, 7),)}, "T"),
    "a trial is measured": ({"trial": TRIAL, "launches": (launch("T", "new", SERVING, 7),)}, "T"),
    "a trial's server has died": ({"trial": TRIAL, "launches": (launch("T", "new", SERVING, 7),)}, ""),
    "a trial is over": ({"trial": dataclasses.replace(TRIAL, concluded="too slow")}, ""),
    "a trial yields to a window": ({"trial": TRIAL, "interrupt_trial": "the window closed"}, ""),
    "a trial that ended the daemon": ({"trial": dataclasses.replace(TRIAL, interruptions=INTERRUPTIONS_MAX + 1)}, ""),
    "a loser serves": ({"launches": (launch("L", "lost", SERVING, 6),)}, "L"),
    "an older best-known serves": ({"launches": (launch("O", "older"),)}, "O"),
    "the best-known loads": ({"launches": (launch("B", "best", STARTING),)}, "B"),
    "the best-known serves": ({"launches": (launch("B", "best"),)}, "B"),
    "the best-known has died": ({"launches": (launch("B", "best"),)}, ""),
    "two servers live": ({"launches": (launch("B", "best"), launch("L", "lost", SERVING, 6))}, "B L"),
}


@pytest.mark.parametrize("name", STATES)
def test_restore_best_leads_to_the_best_known_from_every_state(name: str) -> None:
    columns, alive = STATES[name]
    columns = {"ladder": (BEST, OLDER), **columns, "restore_wanted": "restore-best by me", "degraded": ""}
    rec, living = recorded(**columns), set(alive.split())
    verified: set[str] = set()
    for _ in range(12):
        act = action(rec, Observed(frozenset(living), frozenset(verified)))
        match act:
            case Requeue() | Conclude() | GiveUp():
                rec = dataclasses.replace(rec, trial=None)
            case RecordEnd(gone) | Stop(gone):
                living.discard(gone)
                rec = dataclasses.replace(rec, launches=tuple(one for one in rec.launches if one.id != gone))
            case Launch():
                assert act.purpose is Purpose.RESTORE
                living.add("new B")
                rec = dataclasses.replace(rec, launches=(*rec.launches, launch("new B", act.candidate_id, STARTING)))
            case AwaitServing(which):
                up = tuple(dataclasses.replace(x, state=SERVING) if x.id == which else x for x in rec.launches)
                rec = dataclasses.replace(rec, launches=up)
            case Verify(which):
                verified.add(which)
            case _:
                break
    assert act == RestoreDone("best")
    assert [one.candidate_id for one in rec.launches if one.id in living] == ["best"]


def test_hands_off_lets_everything_be_until_a_restore_is_asked_for() -> None:
    rec = recorded(hands_off="by me", trial=TRIAL, launches=(launch("T", "new", SERVING, 7), launch("B", "best")))
    for obs in (said(), said("T"), said("T B")):
        assert decide(rec, obs) == Decision(Wait(), "hands off: by me")
    asked = recorded(hands_off="by me", ladder=(BEST,), restore_wanted="asked for")
    assert action(asked, said()) == Launch("best", "best", Purpose.RESTORE)


def test_a_restore_that_was_asked_for_comes_before_trial_queue_and_pause() -> None:
    rec = recorded(trial=TRIAL, queued=QUEUED, paused="x", ladder=(BEST,), restore_wanted="asked for")
    assert action(rec, said()) == Requeue(7)
    free = dataclasses.replace(rec, trial=None)
    assert action(free, said()) == Launch("best", "best", Purpose.RESTORE)
    serves = dataclasses.replace(free, launches=(launch("B", "best"),))
    assert action(serves, said("B")) == Verify("B"), "not taken for granted"
    assert action(serves, said("B", "B")) == RestoreDone("best")
    assert action(recorded(restore_wanted="asked for"), said()) == RestoreDone(None)


def test_a_best_known_that_fails_too_often_gives_way_to_the_one_before_it() -> None:
    assert action(recorded(ladder=(WORN, OLDER)), said()) == Launch("older", "older", Purpose.RESTORE)
    last_try = IncumbentRecord("best", "best", RESTORE_FAILURES_MAX - 1)
    assert action(recorded(ladder=(last_try, OLDER)), said()) == Launch("best", "best", Purpose.RESTORE)


def test_when_every_best_known_failed_a_person_is_asked_for_once() -> None:
    worn = (WORN, dataclasses.replace(OLDER, failures=RESTORE_FAILURES_MAX))
    found = decide(recorded(ladder=worn), said())
    assert found.action == Degrade()
    assert "best, older" in found.reason
    degraded = recorded(ladder=worn, degraded="cannot restore", queued=QUEUED)
    assert decide(degraded, said()) == Decision(Wait(), "degraded: cannot restore")
    healed = recorded(ladder=(BEST,), degraded="cannot restore", restore_wanted="asked for")
    assert action(healed, said()) == Launch("best", "best", Purpose.RESTORE)


def test_a_best_known_that_serves_is_kept_however_often_it_failed_before() -> None:
    rec = recorded(ladder=(WORN, OLDER), launches=(launch("B", "best"),))
    assert action(rec, said("B", "B")) == Wait()
    assert action(dataclasses.replace(rec, ladder=(WORN,)), said("B")) == Verify("B")


def test_a_launch_is_followed_whatever_it_was_made_for() -> None:
    """A trial that was requeued while its server came up: the server is the best-known's, so it is not stopped."""
    rec = recorded(ladder=(BEST,), launches=(launch("T", "best", STARTING, 7),))
    assert action(rec, said("T")) == AwaitServing("T")


# --- a simulated world that carries the decisions out


@dataclass
class Server:
    id: str
    candidate: str
    purpose: Purpose
    trial_id: int | None
    state: LaunchState = INTENDED
    alive: bool = False


@dataclass
class SimTrial:
    id: int
    candidate: str
    is_baseline: bool = False
    levels: list[int] = field(default_factory=lambda: [128, 8, 1])
    interruptions: int = 0
    concluded: str = ""
    measured_on: str = ""


class World:
    """A host, a store and a daemon in one, with faults drawn from a seed. Carries out one decision a step."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.servers: list[Server] = []
        self.queue = [SimTrial(i, f"c{i}") for i in range(1, self.random.randrange(1, 6))]
        self.trial: SimTrial | None = None
        self.ladder: list[str] = self.random.choice([[], ["base"], ["base", "older"]])
        self.failures: dict[str, int] = {}
        self.measured: set[str] = set()
        self.flags: dict[str, str] = dict.fromkeys(FLAGS, "")
        self.strangers = ""
        self.verified: set[str] = set()
        self.doing: tuple[Doing, Any] | None = None
        self.broken: set[str] = set()
        self.cannot_die: set[str] = set()
        self.restore_always = self.random.random() < 0.3
        self.faulty = True
        self.count = itertools.count(100)
        self.most_alive = 0
        self.begun: list[int] = []

    # what the daemon sees

    def recorded(self) -> Recorded:
        first = self.queue[0] if self.queue else None
        return Recorded(
            "a",
            tuple(
                LaunchRecord(s.id, s.candidate, s.candidate, s.purpose, s.state, s.trial_id)
                for s in self.servers
                if s.state is not LaunchState.ENDED
            ),
            self._record(self.trial) if self.trial else None,
            self._record(first) if first else None,
            tuple(IncumbentRecord(c, c, self.failures.get(c, 0)) for c in self.ladder),
            restore_always=self.restore_always,
            baseline_missing=bool(first and self.ladder and self.ladder[0] not in self.measured),
            **self.flags,
        )

    def observed(self) -> Observed:
        living = frozenset(s.id for s in self.servers if s.alive and s.state is not LaunchState.ENDED)
        return Observed(
            living, frozenset(self.verified) & living, self.strangers, self.doing[0] if self.doing else None
        )

    def _record(self, trial: SimTrial) -> TrialRecord:
        level = trial.levels[0] if trial.levels and not trial.concluded else None
        return TrialRecord(trial.id, trial.candidate, trial.candidate, trial.interruptions, level, trial.concluded)

    # one step

    def step(self) -> Decision:
        if self.faulty:
            self.fault()
        if self.doing and self.random.random() < 0.6:
            finish = self.doing[1]
            self.doing = None
            finish()
            self.check()
        rec, obs = self.recorded(), self.observed()
        decision = decide(rec, obs)
        check_what_may_never_be(rec, obs, decision)
        self.carry_out(decision.action)
        self.check()
        return decision

    def check(self) -> None:
        alive = [s for s in self.servers if s.alive]
        assert len(alive) <= 1, f"two servers at once: {alive}"
        assert not (self.strangers and any(s.state is INTENDED for s in alive)), "launched beside a stranger"

    def carry_out(self, act: Any) -> None:
        match act:
            case Launch():
                server = Server(f"L{next(self.count)}", act.candidate_id, act.purpose, act.trial_id)
                self.servers.append(server)  # the intent is durable before anything runs
                server.alive = self.random.random() < 0.97 if self.faulty else True
                self.begin("launching", act.trial_id, lambda: self.move(server, STARTING))
            case AwaitServing():
                self.begin("starting", act.trial_id, lambda: self.came_up(self.server(act.launch_id)))
            case RunLevel():
                self.begin("measuring", act.trial_id, lambda: self.measured_level(act))
            case Verify():
                self.begin("verifying", None, lambda: self.verify(self.server(act.launch_id)))
            case Stop():
                self.begin("stopping", None, lambda: self.stop(self.server(act.launch_id)))
            case RecordEnd():
                self.ended(self.server(act.launch_id), asked=False)
            case Interrupt():
                self.doing = None
            case _:
                self.change_record(act)

    def change_record(self, act: Any) -> None:
        match act:
            case BeginTrial():
                self.trial = self.queue.pop(0)
                assert self.trial.id == act.trial_id
                self.begun.append(act.trial_id)
            case Conclude() | GiveUp():
                self.conclude(gave_up=isinstance(act, GiveUp))
            case Requeue():
                assert self.trial is not None
                self.queue.insert(0, dataclasses.replace(self.trial, levels=[128, 8, 1], measured_on=""))
                self.trial, self.flags["interrupt_trial"] = None, ""
            case QueueBaseline():
                self.queue.insert(0, SimTrial(next(self.count), act.candidate_id, is_baseline=True))
                self.measured.add(act.candidate_id)  # tried once, whatever comes of it
            case RestoreDone():
                self.flags["restore_wanted"] = ""
            case Degrade():
                self.flags |= {"degraded": "all failed", "restore_wanted": ""}

    def begin(self, what: str, trial_id: int | None, finish: Any) -> None:
        self.doing = (Doing(what, trial_id), finish)

    # the ends of long actions

    def server(self, id_: str) -> Server:
        return next(s for s in self.servers if s.id == id_)

    def move(self, server: Server, state: LaunchState) -> None:
        if server.state is not state:
            assert state in LAUNCH_TRANSITIONS[server.state]
            server.state = state

    def came_up(self, server: Server) -> None:
        if server.state is INTENDED:
            self.move(server, STARTING)
        fails = server.candidate in self.broken or (self.faulty and self.random.random() < 0.3)
        if fails or not server.alive:
            server.alive = False
            self.ended(server, asked=False)
            return
        self.move(server, SERVING)
        self.verified.add(server.id)
        if server.purpose is Purpose.RESTORE:
            self.flags["degraded"] = ""

    def measured_level(self, act: RunLevel) -> None:
        server, trial = self.server(act.launch_id), self.trial
        assert trial is not None
        if not server.alive:
            self.ended(server, asked=False)
            return
        assert server.candidate == trial.candidate, "the right server is measured"
        assert trial.levels[0] == act.level, "each level once"
        assert trial.measured_on in {"", server.id}, "all levels on one launch"
        trial.measured_on = server.id
        trial.levels.pop(0)
        if self.random.random() < 0.15:
            trial.concluded = "a rule fired"

    def verify(self, server: Server) -> None:
        if not server.alive:
            return
        if server.candidate in self.broken or (self.faulty and self.random.random() < 0.2):
            server.alive = False
            self.ended(server, asked=False)
        else:
            self.verified.add(server.id)

    def stop(self, server: Server) -> None:
        if self.faulty and self.random.random() < 0.1:
            return  # could not be stopped this time
        server.alive = False
        self.ended(server, asked=True)

    def ended(self, server: Server, *, asked: bool) -> None:
        self.move(server, LaunchState.ENDED)
        self.verified.discard(server.id)
        if asked:
            return
        if server.purpose is Purpose.RESTORE:
            self.failures[server.candidate] = self.failures.get(server.candidate, 0) + 1
        elif self.trial is not None and self.trial.id == server.trial_id:
            self.trial.concluded = "the server ended"

    def conclude(self, *, gave_up: bool) -> None:
        trial = self.trial
        assert trial is not None
        wins = not (gave_up or trial.concluded or trial.levels or trial.is_baseline)
        if wins and (not self.ladder or self.random.random() < 0.5) and trial.candidate not in self.ladder:
            self.ladder.insert(0, trial.candidate)
            self.measured.add(trial.candidate)
            self.flags["degraded"] = ""
        self.trial = None
        if gave_up:
            self.flags["interrupt_trial"] = ""

    # what goes wrong, and what the operator does

    def fault(self) -> None:
        roll = self.random.random()
        if roll < 0.04 and (alive := [s for s in self.servers if s.alive]):
            self.random.choice(alive).alive = False
        elif roll < 0.07:
            self.restart_daemon()
        elif roll < 0.09 and not any(s.alive for s in self.servers) and not self.doing:
            self.strangers = self.random.choice(["", "port 1 is held by pid 9"])
        elif roll < 0.13:
            flag = self.random.choice(["paused", "hands_off", "no_new_trials", "restore_wanted", "interrupt_trial"])
            self.flags[flag] = "" if self.flags[flag] and flag != "restore_wanted" else flag.replace("_", " ")
            if flag == "interrupt_trial" and self.trial is None:
                self.flags[flag] = ""
        elif roll < 0.14:
            self.verified.clear()  # the regular probe is due
        elif roll < 0.15:
            self.failures.clear()  # the window of the restart budget has passed
        elif roll < 0.16:
            self.queue.append(SimTrial(next(self.count), f"c{next(self.count)}"))

    def restart_daemon(self) -> None:
        self.doing = None
        self.verified.clear()
        if self.trial is not None:
            self.trial.interruptions += 1
            self.flags["interrupt_trial"] = "the daemon ended during it"
        if self.ladder and not self.flags["degraded"]:
            self.flags["restore_wanted"] = self.flags["restore_wanted"] or "the daemon was started"

    def heal(self, broken: set[str]) -> None:
        """Faults stop; the operator takes the wheel off; `broken` candidates never come up again."""
        self.faulty, self.broken, self.strangers = False, broken, ""
        self.flags |= {"paused": "", "hands_off": "", "no_new_trials": "", "interrupt_trial": ""}

    @property
    def alive(self) -> list[Server]:
        return [s for s in self.servers if s.alive]


def settle(world: World) -> Decision:
    """Run until the daemon waits with nothing in progress, for three steps in a row."""
    calm, decision = 0, Decision(Wait(), "")
    for _ in range(2000):
        decision = world.step()
        calm = calm + 1 if isinstance(decision.action, Wait) and world.doing is None else 0
        if calm == 3:
            return decision
    raise AssertionError(f"still busy after 2,000 steps: {decision}")


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 2**40))
def test_whatever_goes_wrong_there_is_one_server_at_most_and_in_the_end_the_best_known_serves(seed: int) -> None:
    world = World(seed)
    for _ in range(world.random.randrange(10, 150)):
        world.step()
    world.heal(broken=set())
    decision = settle(world)
    assert world.trial is None
    if world.flags["degraded"]:
        assert decision.reason.startswith("degraded")
        return
    assert world.queue == []
    if not world.ladder:
        assert world.alive == []
        return
    (server,) = world.alive
    fit = [c for c in world.ladder if world.failures.get(c, 0) < RESTORE_FAILURES_MAX or c == server.candidate]
    assert server.candidate == fit[0], "the best-known that is not worn out"
    assert server.state is SERVING
    assert server.id in world.verified


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**40))
def test_a_best_known_that_never_comes_up_gives_way_and_in_the_end_a_person_is_asked_for(seed: int) -> None:
    world = World(seed)
    for _ in range(world.random.randrange(10, 100)):
        world.step()
    world.queue.clear()
    world.failures.clear()
    everything = (
        {s.candidate for s in world.servers} | set(world.ladder) | ({world.trial.candidate} if world.trial else set())
    )
    keep = world.random.choice([None, *world.ladder])
    world.heal(broken=everything - {keep})
    for server in world.alive:
        server.alive = server.candidate == keep
    launches_before = len(world.servers)
    settle(world)
    if not world.ladder:
        assert world.alive == []
    elif keep is None:
        assert world.flags["degraded"]
        assert world.alive == []
    elif not world.flags["degraded"]:
        (server,) = world.alive
        assert (server.candidate, server.id in world.verified) == (keep, True)
    tries = [s for s in world.servers[launches_before:] if s.purpose is Purpose.RESTORE]
    for candidate in world.ladder:
        assert sum(s.candidate == candidate for s in tries) <= RESTORE_FAILURES_MAX, "within the restart budget"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40))
def test_without_faults_every_trial_runs_once_in_the_order_of_the_queue(seed: int) -> None:
    world = World(seed)
    wanted = [t.id for t in world.queue]
    world.heal(broken=set())
    settle(world)
    assert [i for i in world.begun if i in wanted] == wanted
    assert len(world.begun) == len(set(world.begun))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40), st.sampled_from(["paused", "no_new_trials"]))
def test_while_nothing_new_may_start_the_best_known_serves_and_the_queue_keeps(seed: int, flag: str) -> None:
    world = World(seed)
    world.heal(broken=set())
    world.flags[flag] = "the reason"
    queue = [t.id for t in world.queue]
    decision = settle(world)
    assert [t.id for t in world.queue] == queue
    assert world.begun == []
    assert [s.candidate for s in world.alive] == world.ladder[:1]
    assert "the reason" in decision.reason or not queue


def test_the_level_in_hand_is_named_as_what_it_is() -> None:
    trial = TrialRecord(7, "c", "eagle3", next_level=8)
    rec = recorded(trial=trial, launches=(launch("l", "c", trial_id=7),))
    assert decide(rec, said("l", "l")).reason == "measuring eagle3 at concurrency 8"
    at_a_rate = dataclasses.replace(trial, next_level=2.5, load="request-rate")
    decision = decide(dataclasses.replace(rec, trial=at_a_rate), said("l", "l"))
    assert decision == Decision(RunLevel(7, "l", 2.5), "measuring eagle3 at 2.5 req/s")
