"""The evidence of a level: one source of windows, never two, and nothing of the warm-up."""

from typing import Any

import pytest
from unit.core.building import figures, level

from autotuner.bench.measurement import Progress
from autotuner.core.facts import level_facts
from autotuner.core.gather import Gather, LevelPlan, baseline_steps, busy_steps, level_result, told_clean
from autotuner.core.objective import Objective, Standing
from autotuner.core.speculation import SpeculationAtLevel
from autotuner.core.verdict import LevelResult
from autotuner.engines import engine_for
from autotuner.engines.base import Counters, Note, Prefill, Speculation, Stage, Window


def plan(**more: Any) -> LevelPlan:
    table: dict[str, Any] = {
        "level": 8,
        "decides": True,
        "cap": None,
        "speculation": Speculation("EAGLE3", 3),
        "baseline_steps_s": {8.0: 0.02},
        "best": figures(8, 400.0),
    }
    return LevelPlan(**{**table, **more})


def progress(at_s: float, phase: Any = "steady", events: int = 10, per_event: float = 1.0) -> Progress:
    return Progress(at_s=at_s, phase=phase, events=events, in_flight=8, done=3, failed=0, tokens_per_event=per_event)


def line(**more: Any) -> Window:
    return Window(**{"source": "log", "running": 8.0, "queued": 0.0, "gen_tok_s": 100.0, "accept_len": 2.0, **more})


def steady(**more: Any) -> Gather:
    gather = Gather(plan(**more))
    gather.add_progress(progress(1.0, "warm-up"))
    gather.add_progress(progress(2.0))
    return gather


# --- a level in which nothing comes any more


def silent(events: int = 0, in_flight: int = 8, done: int = 3, at_s: float = 60.0) -> Progress:
    return Progress(at_s=at_s, phase="steady", events=events, in_flight=in_flight, done=done, failed=0)


def test_silence_counts_from_the_last_token_while_requests_wait() -> None:
    gather = steady(silence_limit_s=450.0)
    gather.add_progress(silent())
    assert gather.silent_s == 58.0
    facts = level_facts(gather.so_far())
    assert (facts["level.silent_s"], facts["level.silence_limit_s"]) == (58.0, 450.0)


@pytest.mark.parametrize("alive", [silent(events=1), silent(done=4), silent(in_flight=0)])
def test_a_token_an_answer_or_nothing_to_wait_for_ends_the_silence(alive: Progress) -> None:
    gather = steady()
    gather.add_progress(alive)
    assert not gather.silent_s


@pytest.mark.parametrize(
    ("word", "silent_s"),
    [
        (Prefill(tokens=8192), 0.0),
        (line(gen_tok_s=3.0), 0.0),
        (line(gen_tok_s=0.0), 58.0),
        (Note("warning", "x"), 58.0),
    ],
)
def test_a_long_prefill_is_no_hang_but_a_line_that_tells_of_no_work_is_no_sign_of_life(
    word: Any, silent_s: float
) -> None:
    gather = steady()
    gather.add_progress(silent())
    gather.add_log((word,))
    assert gather.silent_s == silent_s


@pytest.mark.parametrize("engine", ["sglang", "vllm", "llamacpp", "command"])
def test_a_serving_server_may_work_at_prompts_for_minutes_without_a_token(engine: str) -> None:
    assert engine_for(engine).silence_limit_s(Stage.GENERATING) >= 360


def test_a_level_that_is_over_is_not_silent() -> None:
    gather = steady(silence_limit_s=450.0)
    gather.add_progress(silent())
    assert "level.silent_s" not in level_facts(gather.so_far(figures(8, 100.0)))


def counters(drafts: float = 0, accepted: float = 0, drafted: float | None = None) -> Counters:
    return Counters(running=8.0, queued=0.0, drafts=drafts, accepted=accepted, drafted=drafted or 3 * drafts)


def scrape(gather: Gather, at_s: float, counted: Counters) -> None:
    """A scrape right after a line of the client."""
    gather.add_progress(progress(at_s))
    gather.add_scrape(at_s, counted)


def test_windows_of_the_warm_up_do_not_count() -> None:
    gather = Gather(plan())
    gather.add_progress(progress(1.0, "warm-up"))
    gather.add_log((line(),))
    gather.add_scrape(1.0, counters())
    gather.add_scrape(2.0, counters(10, 10))
    assert gather.windows == ()
    gather.add_progress(progress(2.0))
    gather.add_log((line(),))
    assert len(gather.windows) == 1


def test_time_and_answers_count_from_the_end_of_the_warm_up() -> None:
    gather = Gather(plan())
    assert (gather.steady_s, gather.answered) == (0.0, 0)
    for at_s, phase, done in ((1.0, "warm-up", 2), (2.0, "warm-up", 8), (3.0, "steady", 9), (7.5, "steady", 20)):
        if phase == "steady" and at_s == 3.0:
            assert (gather.steady_s, gather.answered) == (0.0, 0)
        gather.add_progress(progress(at_s, phase).model_copy(update={"done": done}))
    assert (gather.steady_s, gather.answered) == (5.5, 12)


def test_without_a_warm_up_time_counts_from_the_first_line() -> None:
    gather = Gather(plan())
    gather.add_progress(progress(0.5))
    gather.add_progress(progress(4.5))
    assert gather.steady_s == 4.0


def test_a_prefill_taints_the_window_it_falls_into_and_only_that() -> None:
    gather = steady()
    gather.add_log((line(), Prefill(), line(), line()))
    assert [w.prefill for w in gather.windows] == [False, True, False]


def test_a_prefill_taints_the_next_window_even_if_it_comes_in_a_later_read() -> None:
    gather = steady()
    gather.add_log((Prefill(), Note("warning", "x")))
    gather.add_log((line(),))
    assert [w.prefill for w in gather.windows] == [True]


def test_a_prefill_of_one_rank_taints_the_servers_window_of_that_time_and_no_later_one() -> None:
    gather = steady()
    zero, one = line(rank="DP0"), line(rank="DP1")
    gather.add_log((Prefill(rank="DP0"), zero, one, zero, one))
    assert [w.prefill for w in gather.windows] == [True, False]
    assert [w.running for w in gather.windows] == [16, 16]


def test_the_first_window_of_a_rank_covers_the_time_before_the_load() -> None:
    gather = steady()
    gather.add_log((line(), line()))
    assert [w.after_idle for w in gather.windows] == [True, False]


def test_a_line_on_acceptance_alone_belongs_to_the_line_on_the_load_before_it() -> None:
    gather = steady()
    load = line(accept_len=None)
    gather.add_log((load, Window(source="log", accept_len=2.5, drafts=100, drafted=300, accepted=150), load))
    first, second = gather.windows
    assert (first.running, first.accept_len, first.accepted) == (8.0, 2.5, 150)
    assert second.accept_len is None


def test_two_scrapes_bound_a_window_with_the_rate_that_the_client_saw() -> None:
    gather = steady()
    gather.add_scrape(2.0, counters(100, 100))
    gather.add_progress(progress(3.0, events=30, per_event=2.0))
    gather.add_progress(progress(4.0, events=10, per_event=2.0))
    gather.add_scrape(4.0, counters(140, 160))
    (window,) = gather.windows
    assert (window.drafts, window.accepted, window.accept_len) == (40, 60, 2.5)
    assert window.gen_tok_s == pytest.approx((30 + 10) * 2.0 / 2.0)
    assert window.seconds == 2.0


def test_counted_steps_win_over_printed_ones_and_never_are_both_counted() -> None:
    gather = steady()
    gather.add_log((line(), line(), line()))
    assert len(gather.windows) == 3
    scrape(gather, 2.0, counters(0, 0))
    scrape(gather, 4.0, counters(40, 40))
    assert [w.source for w in gather.windows] == ["metrics"]


def test_a_window_whose_client_lines_are_late_has_no_wrong_rate() -> None:
    """Seen on a busy host: the client's lines of ten seconds came after the scrape, and then all at once."""
    gather = steady()
    gather.add_progress(progress(10.0))
    gather.add_scrape(10.0, counters(0, 0))
    gather.add_scrape(12.0, counters(100, 200))
    assert gather.metric_windows == [], "no line of the client, no rate"
    for at_s in (11.0, 12.0, 13.0, 14.0):
        gather.add_progress(progress(at_s, events=30))
    gather.add_scrape(14.0, counters(200, 400))
    (window,) = gather.metric_windows
    assert (window.gen_tok_s, window.drafts, window.accept_len) == (30.0, 200, 3.0)


def test_where_every_window_holds_a_prefill_they_count_all_the_same() -> None:
    gather = steady()
    for _ in range(4):
        gather.add_log((Prefill(), line()))
    assert all(w.prefill for w in gather.windows)
    spec = gather.so_far().speculation
    assert spec is not None
    assert (spec.windows, spec.accept_len is not None) == (3, True)


def test_a_printed_rate_is_turned_into_accepted_per_drafted_by_its_release() -> None:
    for version, expected in (("0.5.10", 0.0), ("0.5.12", 0.25)):
        gather = steady(engine_version=version, speculation=Speculation("EAGLE3", 3, 4))
        gather.add_log(tuple(line(printed_rate=0.25) for _ in range(3)))
        assert gather.so_far().accept_ratio == pytest.approx(expected)


def test_metrics_without_counted_steps_do_not_hide_the_log() -> None:
    gather = steady()
    gather.add_log((line(),))
    scrape(gather, 2.0, Counters(running=8.0))
    scrape(gather, 4.0, Counters(running=8.0))
    assert [w.source for w in gather.windows] == ["log"]


def test_counters_that_went_backwards_say_nothing() -> None:
    gather = steady()
    scrape(gather, 2.0, counters(100, 100))
    scrape(gather, 4.0, counters(5, 5))
    (window,) = gather.windows
    assert (window.drafts, window.accept_len) == (None, None)


def test_what_the_rules_see_is_the_interim_until_the_level_is_over() -> None:
    gather = steady()
    gather.add_log((line(),) * 4)
    so_far = gather.so_far()
    assert so_far.figures.output_tok_s == pytest.approx(10.0)
    assert not so_far.over
    assert so_far.speculation is not None
    assert so_far.speculation.needed == pytest.approx(8 * 2.0 / 100.0 / 0.02)
    final = gather.so_far(figures(8, 123.0))
    assert (final.figures.output_tok_s, final.over) == (123.0, True)


def test_the_acceptance_rate_is_that_of_all_drafted_tokens() -> None:
    gather = steady()
    scrape(gather, 2.0, counters(0, 0, 0))
    scrape(gather, 4.0, counters(10, 10, 30))
    scrape(gather, 6.0, counters(20, 40, 60))
    assert gather.so_far().accept_ratio == pytest.approx(40 / 60)
    assert steady().so_far().accept_ratio is None


def test_a_plain_candidate_has_no_speculation_but_its_running_requests() -> None:
    gather = steady(speculation=None)
    gather.add_log((line(accept_len=None),) * 3)
    assert gather.so_far().speculation is None
    result = gather.result(figures(8, 100.0))
    assert (result.running, result.decode_tok_s, result.speculation) == (8.0, 100.0, None)
    assert result.step_s == pytest.approx(0.08)


def test_a_level_without_any_telemetry_is_still_a_result() -> None:
    result = Gather(plan()).result(figures(8, 100.0))
    assert (result.running, result.decode_tok_s) == (None, None)
    assert result.speculation is not None
    assert result.speculation.windows == 0


def test_plain_steps_come_from_what_really_ran() -> None:
    measured = {1: level(1, 50.0, running=1.0), 128: level(128, 2000.0, running=100.0)}
    assert baseline_steps(measured) == {1.0: pytest.approx(0.02), 100.0: pytest.approx(0.05)}


def test_without_telemetry_of_the_best_known_its_levels_are_taken_at_their_word() -> None:
    assert baseline_steps({128: level(128, 2370.0)}) == {128.0: pytest.approx(0.054, abs=1e-4)}


def test_a_best_known_that_speculates_or_was_void_gives_no_plain_steps() -> None:
    spec = level(8, 100.0, running=8.0, speculation=SpeculationAtLevel(running=8.0))
    assert baseline_steps({8: spec, 1: level(1, 50.0, void="the client was the limit"), 2: level(2, 0.0)}) == {}


def test_what_log_and_counters_disagree_on_is_a_part_of_the_result() -> None:
    gather = steady(graph_max_batch=48)
    gather.add_log(tuple(line(accept_len=3.0, graph=False) for _ in range(5)))
    for at in range(2, 9):
        scrape(gather, float(at), counters(at * 100, at * 100))
    found = gather.result(figures(8, 400.0)).contradictions
    assert found == (
        "the log says an accept length of 3.00 over 1600 verify steps, the counters 2.00 over 600",
        "5 of 5 decode lines say that no CUDA graph was used, although graphs for up to 48 requests were captured",
    )
    assert steady().result(figures(8, 400.0)).contradictions == ()


# --- levels that are request rates


def at_a_rate(**more: Any) -> Gather:
    gather = Gather(plan(level=2.5, load="request-rate", **more))
    gather.add_progress(progress(1.0, "warm-up"))
    gather.add_progress(progress(2.0))
    return gather


def test_at_a_rate_every_number_of_running_requests_is_the_levels_own() -> None:
    """Nothing is kept in flight, so that a window with few is as steady as one with many, and none is called capped."""
    gather = at_a_rate(cap=4)
    gather.add_log((line(running=1.0), *(line(running=n, queued=1.0, gen_tok_s=40.0 * n) for n in (1.0, 3.0, 4.0))))
    spec = gather.so_far().speculation
    assert spec is not None
    assert spec.windows == 3
    assert spec.running == 3.0
    assert not spec.capped
    closed = Gather(plan(level=8))
    closed.progress = list(gather.progress)
    closed.log_windows = list(gather.log_windows)
    told = closed.so_far().speculation
    assert told is not None
    assert told.windows < 3, "with eight kept in flight, one that runs alone is no steady state"


def test_break_even_at_a_rate_is_at_the_requests_that_really_ran() -> None:
    gather = at_a_rate(baseline_steps_s={3.0: 0.02})
    gather.add_log((line(), *(line(running=3.0, gen_tok_s=150.0, accept_len=2.0) for _ in range(6))))
    spec = gather.so_far().speculation
    assert spec is not None
    assert spec.needed == pytest.approx(3 * 2.0 / 150 / 0.02)


def test_a_plain_step_is_not_guessed_from_a_rate() -> None:
    """Output tok/s over a concurrency is a step time; over a number of requests a second it is nothing."""
    assert baseline_steps({8: level(8, 400.0)}) == {8.0: 8 / 400}
    assert baseline_steps({2.5: level(2.5, 400.0, load="request-rate")}) == {}
    assert baseline_steps({2.5: level(2.5, 400.0, running=6.0, load="request-rate")}) == {6.0: 6 / 400}


def test_levels_at_which_speculation_pays_are_told_of_concurrencies_alone() -> None:
    assert steady(pays_up_to=8, loses_from=32).so_far().loses_from == 32
    told = at_a_rate(pays_up_to=1, loses_from=5).so_far()
    assert (told.pays_up_to, told.loses_from) == (None, None)


def test_the_score_of_a_rate_is_bounded_at_its_end_alone() -> None:
    best = figures(2.5, 400.0, 4.0, load="request-rate")
    standing = Standing(Objective(), (2.5,), {}, {2.5: best}, 0.01)
    gather = at_a_rate(standing=standing)
    for at_s in range(3, 12):
        gather.add_progress(progress(float(at_s)))
    assert gather.so_far().score_high is None
    assert gather.so_far(best).score_high is not None
    now = figures(8, 400.0, 4.0)
    closed = steady(standing=Standing(Objective(), (8,), {}, {8: now}, 0.01))
    for at_s in range(3, 12):
        closed.add_progress(progress(float(at_s)))
    assert closed.so_far().score_high is not None


def test_a_result_keeps_how_much_of_what_was_sent_was_answered() -> None:
    gather = Gather(plan(level=10, load="request-rate"))
    for at_s, done, flying in ((2, 10, 10), (10, 60, 20), (20, 110, 70)):
        gather.add_progress(Progress(at_s=at_s, phase="steady", events=1, in_flight=flying, done=done, failed=0))
    seen = gather.so_far()
    assert seen.in_flight == 70
    assert seen.answered_ratio is not None
    assert gather.result(figures(10, 90.0, load="request-rate")).answered_ratio == pytest.approx(0.5)
    closed = Gather(plan(level=10))
    closed.progress = list(gather.progress)
    assert closed.so_far().answered_ratio is None, "where requests are kept in flight nothing piles up"


# --- steps with prefills between them, and without


# A plain server at 128 on an H200: four lines of 21 had no prefill, and the client got 10,455 tok/s.
WITH_PREFILLS = (
    6915,
    9539,
    8529,
    9074,
    11311,
    6181,
    8883,
    9638,
    13135,
    9034,
    8981,
    9230,
    16732,
    8629,
    8605,
    8231,
    8430,
)
WITHOUT = (18889, 18816, 19403, 18743)
DRAFTED = (8065, 9033, 8793, 9292, 9043, 8964)  # accept length 3, a prefill in each line; the client got 8,865 tok/s


def lines(rates: tuple[int, ...], **more: Any) -> tuple[Window, ...]:
    return tuple(line(running=128.0, gen_tok_s=float(rate), **more) for rate in rates)


def at_128(windows: tuple[Window, ...], client_tok_s: float, **more: Any) -> LevelResult:
    return level_result(plan(level=128, **more), windows, figures(128, client_tok_s))


def plain(windows: tuple[Window, ...], client_tok_s: float) -> dict[str, Any]:
    """What is known of a best-known without speculation."""
    table = {128: at_128(windows, client_tok_s, speculation=None)}
    known = {"busy_steps_s": busy_steps(table), "baseline_clean": told_clean(table, 128)}
    return {"baseline_steps_s": baseline_steps(table), **known}


def test_a_step_with_prefills_is_held_against_one_with_prefills() -> None:
    known = plain(
        (*lines(WITH_PREFILLS, accept_len=None, prefill=True), *lines(WITHOUT, accept_len=None)),
        10_455.0,
    )
    assert known["baseline_clean"]
    assert known["baseline_steps_s"][128.0] == pytest.approx(128 / 18_852, rel=0.01)
    assert known["busy_steps_s"][128.0] == pytest.approx(128 / 10_455, rel=0.06)
    found = at_128(lines(DRAFTED, accept_len=3.0, prefill=True), 8_865.0, **known).speculation
    assert found is not None
    assert found.speedup is not None
    assert found.speedup.mean == pytest.approx(8_865 / 10_455, rel=0.06), "as the client saw it"
    assert found.needed == pytest.approx(3 / found.speedup.mean)


def test_a_best_known_told_with_prefills_alone_makes_the_candidates_count_as_well() -> None:
    known = plain(lines(WITH_PREFILLS, accept_len=None, prefill=True), 9_200.0)
    assert not known["baseline_clean"]
    windows = (*lines(DRAFTED, accept_len=3.0, prefill=True), *lines((15_000,) * 3, accept_len=3.0))
    found = at_128(windows, 10_200.0, **known).speculation
    assert found is not None
    assert found.windows == len(windows)
    assert found.speedup is not None
    assert found.speedup.mean == pytest.approx(10_200 / 9_200, rel=0.06)


def test_without_prefills_on_either_side_the_clean_steps_are_compared() -> None:
    known = plain((*lines((12_800,) * 5, accept_len=None), *lines((6_400,), accept_len=None, prefill=True)), 12_000.0)
    windows = (*lines((10_000,) * 4, accept_len=2.0), *lines((5_000,), accept_len=2.0, prefill=True))
    found = at_128(windows, 9_000.0, **known).speculation
    assert found is not None
    assert found.speedup is not None
    assert found.speedup.mean == pytest.approx(10_000 / 12_800)


def test_a_best_known_of_a_record_of_before_has_one_kind_of_steps() -> None:
    old = {8: level(8, 400.0, running=8.0), 1: level(1, 50.0)}
    assert busy_steps(old) == baseline_steps(old)
    assert told_clean(old, 8)
    assert told_clean(old, 32), "where it was not measured"


def rising(gather: Gather, rates: tuple[int, ...]) -> list[bool]:
    """Lines twice a second of eight streams whose requests take a second, with so many events in each second in turn."""
    gather.add_progress(progress(1.0, "warm-up"))
    moved, done = [], 3
    for half in range(2 * len(rates)):
        done += 4
        said = progress(1.5 + half / 2, events=rates[half // 2] // 2).model_copy(update={"done": done})
        moved.append(gather.add_progress(said))
    return moved


def test_a_level_whose_rate_rises_begins_where_it_stands_still() -> None:
    gather = Gather(plan(), settles=True)
    moved = rising(gather, (100, 104, 98, 300, 310, 305, 296))
    assert moved.count(True) == 1
    assert gather.steady_s == pytest.approx(4.0), (
        "its time counts from there, so that the level lasts as long as it should"
    )
    assert gather.so_far().figures.output_tok_s == pytest.approx(302.75, rel=0.01)


def test_what_the_server_said_before_the_rate_rose_is_forgotten() -> None:
    gather = Gather(plan(), settles=True)
    gather.add_progress(progress(1.0, "warm-up"))
    for half, events in enumerate((50, 50, 50, 50, 150, 150, 150, 150, 150, 150)):
        at_s = 1.5 + half / 2
        gather.add_progress(progress(at_s, events=events).model_copy(update={"done": 3 + 4 * half}))
        gather.add_log((line(gen_tok_s=float(2 * events)),))
        gather.add_scrape(at_s, counters(10 * half, 10 * half))
    assert gather.steady_s == pytest.approx(3.0)
    assert {w.gen_tok_s for w in gather.log_windows} == {300.0}
    assert {w.gen_tok_s for w in gather.metric_windows} == {300.0}


@pytest.mark.parametrize(("settles", "level"), [(False, 8), (True, 2.5)])
def test_a_level_that_ends_by_count_or_is_sent_at_a_rate_is_taken_as_it_is(settles: bool, level: float) -> None:
    gather = Gather(plan(level=level, load="concurrency" if level == 8 else "request-rate"), settles=settles)
    assert not any(rising(gather, (100, 104, 98, 300, 310, 305, 296)))
