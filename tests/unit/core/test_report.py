"""A person can act on an entry without opening anything else."""

from typing import Any

import pytest
from unit.core.building import figures, fired, level, windows

from autotuner.bench.measurement import GoodputLimits
from autotuner.core.answers import Agreement
from autotuner.core.effective import Difference
from autotuner.core.entry import GENESIS, Draft, render
from autotuner.core.report import (
    TrialReport,
    degraded_entry,
    duration,
    ended_entry,
    plus_minus,
    rate,
    restored_entry,
    trial_entry,
)
from autotuner.core.speculation import SpeculationAtLevel, assess
from autotuner.core.state import Verdict
from autotuner.core.statistics import Interval
from autotuner.core.verdict import Judgement, LevelResult
from autotuner.engines.base import Diagnosis, Speculation

AT = "2026-02-23 00:14:07Z"
EAGLE3 = Speculation("EAGLE3", 3, 4)
STEPS = {1.0: 1 / 63.6, 128.0: 128 / 2370}
BASELINE = {1: level(1, 63.6, running=1.0), 128: level(128, 2370.0, running=128.0)}
LATENCIES: dict[str, Any] = {"ttft_ms": {"p50": 120.4, "p99": 410.0}, "tpot_ms": {"p50": 15.72}}


def spec_at(
    concurrency: int, running: float, rate_: float, accept_lens: tuple[float, ...], queued: float
) -> LevelResult:
    seen = tuple(w for al in accept_lens for w in windows(running, rate_, al, 1, queued=queued))
    found = assess(seen, concurrency, 48, EAGLE3, STEPS)
    return level(concurrency, rate_, 4.0, speculation=found, running=running)


RULE = fired(
    rule="below-break-even",
    file="speculation.toml",
    sha256="3f2a" * 16,
    condition="spec.accept_len_high < spec.needed * 0.97 && spec.verify_steps >= 200",
    looks=3,
    sentence="Speculation is below break-even at concurrency 128: accept length 1.65, 3.12 needed",
    advice="fewer draft steps make a step cheaper",
    facts={"spec.accept_len_high": 1.69, "spec.needed": 3.1186, "spec.verify_steps": 9600.0},
)


def report(**more: Any) -> TrialReport:
    table: dict[str, Any] = {
        "trial_id": 42,
        "slot": "kimi",
        "name": "eagle3-aq-medai",
        "hypothesis": "A ready-made drafter raises single-stream speed",
        "objective": "output tok/s at the busiest level",
        "judgement": Judgement(Verdict.FAIL, promote=False, reasons=(RULE.sentence,), rule=RULE),
        "results": (),
        "levels": (1, 128),
        "best_name": "sglang-base",
        "baseline": BASELINE,
        "command": "python3 -m sglang.launch_server --model /m",
        "benchmark": "chat-128 (9d0c21aa)",
        "took_s": 94.0,
        "planned_s": 660.0,
        "ready_s": 372.0,
        "diagnosis": None,
        "next_step": "queued eagle3-aq-medai+max-running-requests-256 to isolate the cause",
    }
    return TrialReport(**{**table, **more})


def text(draft: Draft) -> str:
    return render(draft, 42, AT, GENESIS).text.partition("\n<!--")[0]


def bullet(draft: Draft, label: str) -> str:
    return next(said for name, said in draft.bullets if name == label)


def test_an_abandoned_speculative_trial_reads_like_this() -> None:
    results = (
        spec_at(1, 1.0, 62.9, (1.61, 1.65, 1.69, 1.65, 1.61, 1.69), 0.0).model_copy(update={"fired": None}),
        spec_at(128, 48.0, 849.0, (1.61, 1.65, 1.69, 1.65, 1.61, 1.69), 80.0).model_copy(update={"fired": RULE}),
    )
    assert text(trial_entry(report(results=results))) == SPEC_ENTRY


def test_a_promoted_plain_trial_reads_like_this() -> None:
    results = (level(1, 82.5, 0.5, running=1.0, **LATENCIES), level(128, 2612.0, 20.0, running=128.0, **LATENCIES))
    judgement = Judgement(
        Verdict.PASS,
        promote=True,
        reasons=(
            "the objective is 1.102 of the best-known's (95 % interval 1.018 to 1.186), above 1 with 3.0 % noise",
        ),
    )
    draft = trial_entry(
        report(name="sglang-nccl-ll", results=results, judgement=judgement, took_s=655.0, next_step="it stays serving")
    )
    assert text(draft) == PLAIN_ENTRY


def test_the_entry_of_a_trial_names_rule_cause_and_next_step() -> None:
    died = Diagnosis("out-of-memory", "the GPU ran out of memory", "lower mem-fraction-static", ("CUDA out of memory",))
    rule = fired("abandon", sentence="The server ended while it started: the GPU ran out of memory", rule="server-died")
    draft = trial_entry(
        report(
            judgement=Judgement(Verdict.FAIL, promote=False, reasons=(rule.sentence,), rule=rule),
            diagnosis=died,
            ready_s=None,
        )
    )
    assert draft.title == "failed eagle3-aq-medai"
    assert draft.sentence == (
        "The server ended while it started: the GPU ran out of memory; the trial was stopped after 94 s."
    )
    assert bullet(draft, "Rule").startswith(
        "house.toml / server-died (sha256 abababab…): level.running > 1; level.running = 2"
    )
    assert bullet(draft, "Cause") == "out-of-memory: the GPU ran out of memory"
    assert bullet(draft, "Advice") == "lower mem-fraction-static"
    assert "isolate the cause" in bullet(draft, "Next")
    assert draft.quote == ("CUDA out of memory",)
    assert draft.table == (), "nothing was measured"


@pytest.mark.parametrize(
    ("judgement", "title"),
    [
        (Judgement(Verdict.PASS, promote=True, reasons=("faster",)), "promoted"),
        (Judgement(Verdict.PASS, promote=False, reasons=("the best-known itself",)), "measured"),
        (Judgement(Verdict.INCONCLUSIVE, promote=False, reasons=("void",)), "inconclusive"),
        (Judgement(Verdict.ERROR, promote=False, reasons=("disk full",)), "error"),
        (Judgement(Verdict.FAIL, promote=False, reasons=("slower",)), "discarded"),
        (Judgement(Verdict.FAIL, promote=False, reasons=("stopped",), rule=RULE), "abandoned"),
    ],
)
def test_the_title_says_what_became_of_the_candidate(judgement: Judgement, title: str) -> None:
    draft = trial_entry(report(judgement=judgement))
    assert draft.title == f"{title} eagle3-aq-medai"
    assert draft.sentence.endswith(".")
    assert bullet(draft, "Next")
    assert bullet(draft, "Evidence") == "`autotuner show 42`"


def test_every_reason_and_every_rule_that_fired_is_told() -> None:
    other = fired(rule="slower-at-8", facts={})
    judgement = Judgement(Verdict.FAIL, promote=False, reasons=("3 requests failed", "TTFT is too long"))
    draft = trial_entry(report(judgement=judgement, results=(level(8, 5.0, fired=other), level(128, 5.0))))
    assert draft.sentence == "3 requests failed."
    assert bullet(draft, "Also") == "TTFT is too long"
    assert "slower-at-8" in bullet(draft, "Rule")


# --- whose loss it was


def causes(measured: float, running: float = 48.0, base: float = 2370.0, **more: Any) -> str:
    found = assess(windows(running, measured, 1.65, queued=80.0), 128, 48, EAGLE3, STEPS)
    result = level(128, measured, speculation=found, running=running, **more)
    baseline = {1: BASELINE[1], 128: level(128, base, running=128.0)}
    draft = trial_entry(report(results=(result,), baseline=baseline))
    return next((said for name, said in draft.bullets if name == "Causes"), "")


def test_the_loss_is_split_between_the_cap_and_speculation() -> None:
    assert causes(849.0) == (
        "of the 1,521 tok/s lost at concurrency 128, 50 % is the server's cap of 48 running requests "
        "(a plain server held there would give about 1,606 tok/s), 50 % is speculation at an accept length of 1.65"
    )


def test_a_drafter_that_pays_under_a_cap_is_not_blamed_for_the_loss() -> None:
    assert causes(1800.0) == (
        "of the 570.0 tok/s lost at concurrency 128, all is the server's cap of 48 running requests "
        "(a plain server held there would give about 1,606 tok/s); speculation itself gained 194.2 there"
    )


def test_no_loss_is_split_that_was_not_measured() -> None:
    assert causes(2400.0) == ""
    assert causes(849.0, void="the client was the limit") == ""


def test_a_level_at_which_nothing_was_drafted_says_so() -> None:
    result = level(1, 62.0, speculation=SpeculationAtLevel(windows=4))
    draft = trial_entry(report(results=(result,), judgement=Judgement(Verdict.PASS, promote=False, reasons=("x",))))
    assert bullet(draft, "Speculation") == "nothing was drafted at concurrency 1, so there is nothing to judge"
    unsteady = level(8, 62.0, speculation=SpeculationAtLevel())
    draft = trial_entry(report(results=(unsteady,), judgement=Judgement(Verdict.PASS, promote=False, reasons=("x",))))
    assert bullet(draft, "Speculation").startswith("no window was in steady state at concurrency 8")


def test_a_void_level_shows_no_figure() -> None:
    draft = trial_entry(report(results=(level(8, 123.0, void="client"),), baseline={8: level(8, 456.0, void="client")}))
    assert draft.table[1] == ("8", "-", "-", "-", "void", "-")


# --- the other entries


def test_a_restored_server_is_said_to_be_verified() -> None:
    draft = restored_entry("kimi", "sglang-base", "nothing else is to run", 372.0, 8, "http://127.0.0.1:30000")
    assert draft.sentence == "The best-known server sglang-base serves: serving 6 min 12 s after its launch."
    assert bullet(draft, "Verified") == "generated 8 tokens at http://127.0.0.1:30000"
    assert bullet(draft, "Why") == "nothing else is to run"
    assert "still serving" in restored_entry("kimi", "x", "y", None, 8, "z").sentence


def test_a_server_that_ended_by_itself_has_its_cause_advice_and_words_in_its_entry() -> None:
    died = Diagnosis("killed", "the kernel killed it", "add memory", ("Killed",))
    draft = ended_entry("kimi", "sglang-base", died, -9, "the best-known server is restored")
    assert (bullet(draft, "Cause"), bullet(draft, "Advice")) == ("killed (exit code -9)", "add memory")
    assert draft.quote == ("Killed",)
    assert "not recorded" in bullet(ended_entry("kimi", "x", died, None, "y"), "Cause")


def test_a_degraded_slot_says_what_a_person_has_to_do() -> None:
    died = Diagnosis("out-of-memory", "the GPU ran out of memory", "free it")
    draft = degraded_entry("kimi", ("best", "older"), died, "every best-known failed 3 times")
    assert "a person is needed" in draft.sentence
    assert bullet(draft, "Tried") == "best, older"
    assert bullet(draft, "Last cause") == "out-of-memory: the GPU ran out of memory. free it"
    assert "autotuner restore-best" in bullet(draft, "Do")
    assert degraded_entry("kimi", ("best",), None, "x").quote == ()


# --- how figures are written


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "unknown"), (0.81, "0.8 s"), (9.94, "9.9 s"), (9.96, "10 s"), (94.4, "94 s"), (99.4, "99 s"), (372.0, "6 min 12 s"),
     (119.6, "2 min 0 s"), (5999.0, "99 min 59 s"), (7500.0, "2 h 5 min")],
)  # fmt: skip
def test_a_duration_is_written_as_people_say_it(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said


def test_rates_and_intervals_are_readable() -> None:
    assert [rate(x) for x in (None, 62.94, 999.9, 2370.4, 16228.0)] == ["-", "62.9", "999.9", "2,370", "16,228"]
    assert plus_minus(Interval(1.65, 1.61, 1.69)) == "1.65 ± 0.04"
    assert plus_minus(None) == "-"


def test_figures_of_every_kind_fit_the_plain_table() -> None:
    bare = LevelResult(concurrency=8, figures=figures(8, 0.0))
    assert trial_entry(report(results=(bare,), baseline={})).table[1] == ("8", "-", "-", "-", "0.0 ± 0.0", "-")


SPEC_ENTRY = """\
## 0042 · 2026-02-23 00:14:07Z · slot kimi · abandoned eagle3-aq-medai

**Speculation is below break-even at concurrency 128: accept length 1.65, 3.12 needed; the trial was stopped after 94 s of about 11 min 0 s.**

| level | running     | accept length | needed        | best possible | output tok/s | sglang-base |
|-------|-------------|---------------|---------------|---------------|--------------|-------------|
| 1     | 1           | 1.65 ± 0.08   | 1.67 ± 0.16   | 4.00          | 62.9 ± 4.0   | 63.6        |
| 128   | 48 (capped) | 1.65 ± 0.08   | 3.12 ± 0.42 * | 4.00          | 849.0 ± 4.0  | 2,370       |

\\* against a plain step of 29.9 ms at 48 running, interpolated from the best-known's at 1 and 128

- Hypothesis: A ready-made drafter raises single-stream speed
- Rule: speculation.toml / below-break-even (sha256 3f2a3f2a…): spec.accept_len_high < spec.needed * 0.97 && spec.verify_steps >= 200 in 3 looks in a row; spec.accept_len_high = 1.69, spec.needed = 3.119, spec.verify_steps = 9600
- Speculation: concurrency 1: accept length 1.65 (1.57 to 1.73) measured, 1.67 (1.51 to 1.83) needed, 4.00 the best possible: undecided, 0.99 (0.91 to 1.07) of the rate of a plain server that runs as many requests
- Speculation: concurrency 128: accept length 1.65 (1.57 to 1.73) measured, 3.12 (2.70 to 3.54) needed, 4.00 the best possible: below break-even, 0.53 (0.46 to 0.59) of the rate of a plain server that runs as many requests
- Causes: of the 1,521 tok/s lost at concurrency 128, 50 % is the server's cap of 48 running requests (a plain server held there would give about 1,606 tok/s), 50 % is speculation at an accept length of 1.65
- Advice: fewer draft steps make a step cheaper
- Objective: output tok/s at the busiest level
- Ran: ready after 6 min 12 s, benchmark chat-128 (9d0c21aa), 94 s in all: python3 -m sglang.launch_server --model /m
- Next: queued eagle3-aq-medai+max-running-requests-256 to isolate the cause
- Evidence: `autotuner show 42`
"""

PLAIN_ENTRY = """\
## 0042 · 2026-02-23 00:14:07Z · slot kimi · promoted sglang-nccl-ll

**sglang-nccl-ll is the best-known server now: the objective is 1.102 of the best-known's (95 % interval 1.018 to 1.186), above 1 with 3.0 % noise.**

| level | running | TTFT p50 / p99 ms | TPOT p50 ms | output tok/s | sglang-base |
|-------|---------|-------------------|-------------|--------------|-------------|
| 1     | 1       | 120 / 410         | 15.7        | 82.5 ± 0.5   | 63.6        |
| 128   | 128     | 120 / 410         | 15.7        | 2,612 ± 20.0 | 2,370       |

- Hypothesis: A ready-made drafter raises single-stream speed
- Objective: output tok/s at the busiest level
- Ran: ready after 6 min 12 s, benchmark chat-128 (9d0c21aa), 10 min 55 s in all: python3 -m sglang.launch_server --model /m
- Next: it stays serving
- Evidence: `autotuner show 42`
"""


def test_differences_and_contradictions_stand_in_the_entry() -> None:
    difference = Difference("running requests", "nothing", "48", "80 of 128 requests wait", "set the cap")
    result = level(128, 849.0).model_copy(update={"contradictions": ("the log says 48, the metrics 128",)})
    draft = trial_entry(report(results=(result,), differences=(difference,)))
    assert bullet(draft, "Requested against effective") == (
        "running requests: 48 in force, nothing asked; 80 of 128 requests wait (set the cap)"
    )
    assert bullet(draft, "Log against metrics") == "concurrency 128: the log says 48, the metrics 128"
    labels = [label for label, _ in trial_entry(report()).bullets]
    assert "Requested against effective" not in labels
    assert "Log against metrics" not in labels


# --- the objective


def test_an_entry_says_how_far_answers_agree_and_who_is_on_the_front() -> None:
    front = ("best at 1: vllm-baseline 82.5 tok/s", "best at 128: sglang-base 2,370 tok/s")
    draft = trial_entry(report(answers=Agreement(0.93, 8, "p", "a", "b"), front=front))
    assert bullet(draft, "Answers") == "agree with the best-known's to 0.93 over 8 prompts"
    assert bullet(draft, "Front") == f"no single winner over all levels; {front[0]}; {front[1]}"
    plain = trial_entry(report())
    assert not {"Answers", "Front"} & {label for label, _ in plain.bullets}


def test_goodput_is_in_the_table_where_it_was_asked_for() -> None:
    limits = GoodputLimits(ttft_ms_max=500.0)
    bounds = {"goodput_req_s_low": 3.5, "goodput_req_s_high": 4.5}
    mine = level(128, 849.0, goodput_limits=limits, goodput_req_s=4.0, **bounds)
    results = (level(1, 60.0, goodput_limits=limits), mine)
    table = trial_entry(report(results=results)).table
    assert [row[-2:] for row in table] == [("goodput req/s", "goodput sglang-base"), ("-", "-"), ("4.00 ± 0.50", "-")]
    assert "goodput" not in str(trial_entry(report(results=(level(1, 60.0),))).table)


def test_an_entry_names_rates_as_rates_and_says_where_a_server_did_not_keep_up() -> None:
    sent: dict[str, Any] = {"load": "request-rate", **LATENCIES}
    results = (
        level(0.5, 63.6, running=1.0, **sent),
        level(20, 849.0, running=48.0, **sent).model_copy(update={"answered_ratio": 0.613, "settled": fired("settle")}),
    )
    judgement = Judgement(Verdict.INCONCLUSIVE, promote=False, reasons=("no difference",))
    draft = trial_entry(report(results=results, baseline={}, levels=(0.5, 20), judgement=judgement))
    assert [row[0] for row in draft.table] == ["level", "0.5 req/s", "20 req/s"]
    assert bullet(draft, "Overload").startswith("20 req/s: 61 % of the requests sent")
    assert bullet(draft, "Settled") == "early at 20 req/s, being known well enough"
    assert "concurrency" not in text(draft)


def test_a_server_that_keeps_up_is_not_called_overloaded() -> None:
    kept = level(20, 849.0, load="request-rate", **LATENCIES).model_copy(update={"answered_ratio": 0.9})
    assert "Overload" not in text(trial_entry(report(results=(kept,), baseline={}, levels=(20,))))


LOST = fired(
    rule="objective-lost",
    file="throughput.toml",
    sha256="3f2a" * 16,
    condition="objective.score_high < 1",
    sentence="It cannot win any more: with concurrency 128 its score is at most 0.42 of the best-known's",
)


def lost_with(accept_len: float, rule: Any = LOST) -> str:
    result = spec_at(128, 48.0, 597.0, (accept_len,) * 5, queued=80.0)
    judgement = Judgement(Verdict.FAIL, promote=False, reasons=(rule.sentence,) if rule else ("too slow",), rule=rule)
    return text(trial_entry(report(judgement=judgement, results=(result,))))


def test_a_broken_drafter_is_named_though_another_rule_ended_the_trial_first() -> None:
    """A rule on rates may fire before there are the steps that it takes to stop a drafter: the entry names it all the same."""
    said = lost_with(1.0)
    assert "and its drafter is broken: accept length 1.00 over 9600 verify steps" in said
    assert "% is a broken drafter, of which nothing is accepted" in said
    assert "check that the drafter was trained for this model" in said
    assert "drafter is broken" in lost_with(1.0, rule=None), "also where a trial that ran to its end lost"


def test_a_drafter_that_something_is_accepted_of_is_not_called_broken() -> None:
    assert "broken" not in lost_with(1.3)


def test_the_rule_on_broken_drafters_says_it_once() -> None:
    rule = fired(rule="drafter-broken", file="speculation.toml", sentence="The drafter is broken: accept length 1.00")
    sentence = lost_with(1.0, rule).split("**")[1]
    assert sentence.count("broken") == 1
