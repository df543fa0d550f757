"""Recorded campaigns: what a table or a log becomes, and that nothing is said which was not recorded."""

import math

import pytest

from autotuner.core import recorded_log, recorded_table
from autotuner.core.candidate import Candidate, Launch
from autotuner.core.recorded import BenchmarkUsed, CampaignFile, RecordedLevel, RecordedTrial, assembled, progress_of
from autotuner.core.recorded_log import Point, Results, candidate_of
from autotuner.core.recorded_table import parse_table
from autotuner.core.source import Source, validate
from autotuner.engines import engine_for
from autotuner.engines.base import Speculation, Window
from autotuner.errors import InvalidInput

BENCHMARK = BenchmarkUsed(levels=(1, 128), seconds=60.0, window_s=4.0, output_tokens=100)
CANDIDATE = Candidate(name="a", engine="sglang", launch=Launch(model="/models/m"))
EAGLE3 = Speculation("EAGLE3", 3, 4)


def table(text: str) -> tuple[recorded_table.Row, ...]:
    return parse_table(Source("t.csv", text))


def of_table(text: str, asked: Speculation | None = None) -> RecordedTrial:
    return recorded_table.trial_of(table(text), CANDIDATE, asked, BENCHMARK)


# --- a table


def test_a_row_is_spread_over_equal_windows_whose_figures_are_the_rows() -> None:
    level = of_table('config,level,output_tok_s\na,128,"2,370"\n').levels[0]
    assert len(level.windows) == 15
    assert {(w.running, w.gen_tok_s, w.accept_len) for w in level.windows} == {(128.0, 2370.0, None)}
    figures = level.figures()
    assert (figures.seconds, figures.output_tok_s) == (60.0, pytest.approx(2370))
    assert figures.output_tok_s_high - figures.output_tok_s_low < 2  # rounded to whole tokens
    assert figures.requests_ok == int(2370 * 60 / 100)


def test_what_ran_and_waited_is_taken_from_the_row_and_else_from_the_level() -> None:
    text = "config,level,output_tok_s,accept_len,running,queued\na,1,62.9,1.65,,\na,128,849,1.65,48,16\n"
    single, many = of_table(text, EAGLE3).levels
    assert (single.windows[0].running, single.windows[0].queued) == (1, 0)
    assert (many.windows[0].running, many.windows[0].queued) == (48, 16)
    assert many.windows[0].drafts == round(849 * 4 / 1.65)


def test_a_row_with_an_accept_length_speculated_even_if_no_candidate_file_says_so() -> None:
    text = "config,level,output_tok_s,accept_len,num_steps\na,1,62.9,1.65,5\n"
    assert of_table(text).speculation == Speculation("unknown", 5)
    assert of_table(text, EAGLE3).speculation == EAGLE3
    assert of_table("config,level,output_tok_s\na,1,62.9\n").speculation is None


def test_latencies_failures_and_void_levels_of_a_table_reach_the_figures() -> None:
    columns = "config,level,output_tok_s,ttft_p99_ms,tpot_p50_ms,requests_failed,void\n"
    figures = of_table(columns + "a,8,100,350,12,2,the client was the limit\n").levels[0].figures()
    assert (figures.ttft_ms, figures.tpot_ms) == ({"p99": 350.0}, {"p50": 12.0})
    assert (figures.requests_failed, figures.void) == (2, "the client was the limit")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("config,level\na,1\n", "the column output_tok_s is missing"),
        ("config,level,output_tok_s,tok\na,1,2,3\n", "no column called tok"),
        ("config,level,output_tok_s\na,one,2\n", "t.csv:2: level: 'one' is no number"),
        ("config,level,output_tok_s\na,0,2\n", "whole number of at least 1"),
        ("config,level,output_tok_s\na,1.5,2\n", "whole number of at least 1"),
        ("config,level,output_tok_s\na,1,0\n", "must be above 0"),
        ("config,level,output_tok_s,accept_len\na,1,5,0.65\n", "counts the bonus token"),
        ("config,level,output_tok_s\na,1,5\na,1,6\n", "a second row for a at level 1"),
        ("config,level,output_tok_s\na,,5\n", "level: is missing"),
        ("config,level,output_tok_s\n\na,1,2\n\n,,\nb,x,2\n", "t.csv:6: level: 'x' is no number"),
        ("config,level,output_tok_s\na,1,1,100\n", "t.csv:2: has more cells than the header's 3"),
        ("config,level,output_tok_s\na,inf,2\n", "level: 'inf' is no number"),
        ("config,level,output_tok_s\na,1,inf\n", "output_tok_s: 'inf' is no number"),
        ("config,level,output_tok_s,num_steps\na,1,2,nan\n", "num_steps: 'nan' is no number"),
        ("config,level,output_tok_s,requests_failed\na,1,2,-1\n", "requests_failed: must not be negative"),
        ("config,level,output_tok_s,accept_len,num_steps\na,1,2,4.5,3\n", "accept_len: is at most num_steps . 1 = 4"),
        ("config,level,output_tok_s\n../a,1,2\n", "t.csv:2: config: '../a' is no name"),
        (
            "config,engine,level,output_tok_s\na,sglang,1,2\na,vllm,8,2\n",
            "t.csv:3: engine: a is of engine sglang above",
        ),
        ("config,level,output_tok_s\n", "has no rows"),
        ("", "is missing"),
    ],
)
def test_what_is_wrong_in_a_table_is_named_with_its_line(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        table(text)


# --- a log


def decode(running: int, rate: float, queued: int = 0, accept: float | None = None) -> str:
    spec = f"accept len: {accept:.2f}, accept rate: 0.20, " if accept else ""
    return (
        f"[2026-01-01 00:00:00] Decode batch, #running-req: {running}, #token: 9, token usage: 0.00, {spec}"
        f"cuda graph: True, gen throughput (token/s): {rate:.2f}, #queue-req: {queued}"
    )


REQUEST = '[2026-01-01 00:00:00] INFO:     127.0.0.1:5 - "POST /generate HTTP/1.1" 200 OK'
PREFILL = (
    "[2026-01-01 00:00:00] Prefill batch, #new-seq: 1, #new-token: 25, #cached-token: 0, #running-req: 0, #queue-req: 0"
)


def of_log(lines: list[str], points: tuple[Point, ...], **more: object) -> RecordedTrial:
    results = Results(ready_s=60.0, points=points)
    return recorded_log.trial_of(
        "a.log", CANDIDATE, engine_for("sglang"), "\n".join(lines).encode(), results, more.get("void", {})
    )


def point(concurrency: int, requests: int, tokens: int = 800, wall_s: float = 2.0) -> Point:
    return Point(concurrency=concurrency, requests=requests, wall_s=wall_s, output_tokens=tokens)


def test_levels_are_told_apart_by_the_last_requests_of_the_log() -> None:
    warm_up = [REQUEST, PREFILL, decode(1, 1.0)]
    one = [REQUEST, PREFILL, decode(1, 100.0), decode(1, 200.0)]
    two = [REQUEST, REQUEST, PREFILL, decode(2, 300.0), decode(2, 400.0), decode(2, 400.0)]
    trial = of_log([*warm_up, *one, *two], (point(1, 1), point(2, 2)))
    assert [[w.gen_tok_s for w in level.windows] for level in trial.levels] == [[100, 200], [300, 400, 400]]
    assert [level.windows[0].after_idle for level in trial.levels] == [True, True]


def test_without_an_access_log_a_level_begins_when_more_runs_and_waits() -> None:
    lines = [
        decode(1, 100.0),
        decode(1, 110.0),
        decode(4, 300.0, queued=4),
        decode(4, 310.0, queued=4),
        decode(1, 90.0),
    ]
    trial = of_log(lines, (point(1, 1), point(8, 8)))
    assert [len(level.windows) for level in trial.levels] == [2, 3]
    with pytest.raises(InvalidInput, match="cannot be told apart"):
        of_log(lines, (point(8, 8), point(1, 1)))


def test_results_of_another_run_are_refused() -> None:
    with pytest.raises(InvalidInput, match="name 3 requests, the log has 1"):
        of_log([REQUEST, decode(1, 100.0)], (point(1, 3),))


def test_a_recorded_level_has_the_clients_tokens_in_the_clients_time() -> None:
    lines = [REQUEST, REQUEST, decode(2, 50.0), decode(2, 400.0), decode(2, 380.0), decode(2, 410.0)]
    level = of_log(lines, (point(2, 2, tokens=780, wall_s=2.5),)).levels[0]
    assert sum(line.events for line in level.progress) == 780
    assert level.seconds == pytest.approx(2.5)
    assert level.figures().output_tok_s == pytest.approx(780 / 2.5)
    # 80 tokens a window: the first has what the others leave of the 2.5 s.
    assert level.progress[1].at_s == pytest.approx(2.5 - 80 / 400 - 80 / 380 - 80 / 410)


def test_answers_are_the_requests_begun_less_those_still_open() -> None:
    lines = [REQUEST] * 2 + [decode(2, 100.0)] * 2 + [REQUEST] * 2 + [decode(2, 100.0)] * 2
    level = of_log(lines, (point(2, 4),)).levels[0]
    assert [line.done for line in level.progress] == [0, 0, 0, 2, 4]


def test_of_two_levels_of_one_concurrency_the_first_counts_and_void_ones_say_so() -> None:
    lines = [REQUEST, decode(1, 100.0), decode(1, 100.0), REQUEST, decode(1, 500.0), decode(1, 500.0)]
    trial = of_log(lines, (point(1, 1), point(1, 1)), void={1: "somebody else was there"})
    assert [[w.gen_tok_s for w in level.windows] for level in trial.levels] == [[100, 100]]
    assert trial.levels[0].figures().void == "somebody else was there"


def test_a_level_without_a_line_is_void_and_no_zero() -> None:
    level = of_log([REQUEST], (point(1, 1),)).levels[0]
    assert level.windows == ()
    assert "no line on its load" in level.figures().void


def test_a_run_that_never_came_up_has_its_cause() -> None:
    log = b"launch_server.py: error: unrecognized arguments: --nonsense 5\n"
    trial = recorded_log.trial_of("a.log", CANDIDATE, engine_for("sglang"), log, Results(exit=2), {})
    assert trial.levels == ()
    assert trial.diagnosis is not None
    assert (trial.diagnosis.cause, trial.exit_code) == ("bad-flag-combination", 2)


def test_vllms_lines_make_windows_of_equal_length() -> None:
    line = (
        "(APIServer pid=1) INFO 01-01 00:00:00 [loggers.py:335] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation "
        "throughput: {} tokens/s, Running: 2 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.1%, Prefix cache hit rate: 0.0%"
    )
    lines = [REQUEST.replace("generate", "v1/completions")] * 2 + [
        line.format(rate) for rate in (10.0, 20.0, 30.0, 20.0)
    ]
    points = (point(2, 2, tokens=800, wall_s=40.0),)
    candidate = CANDIDATE.model_copy(update={"engine": "vllm"})
    results = Results(ready_s=60.0, points=points)
    trial = recorded_log.trial_of("a.log", candidate, engine_for("vllm"), "\n".join(lines).encode(), results, {})
    level = trial.levels[0]
    assert [round(line.at_s) for line in level.progress] == [0, 10, 20, 30, 40]
    assert [line.events for line in level.progress] == [0, 100, 200, 300, 200]


def test_a_candidate_made_of_arguments_launches_the_same_words() -> None:
    args = ("--model-path", "/models/m", "--tp-size", "8", "--mem-fraction-static", "0.70", "--trust-remote-code")
    made = candidate_of("x", "sglang", Results(args=(*args, "--cuda-graph-bs", "1", "2"), env={"A": "b"}))
    assert made.launch.model == "/models/m"
    expected = {"tp-size": 8, "mem-fraction-static": "0.70", "trust-remote-code": True, "cuda-graph-bs": (1, 2)}
    assert made.launch.args == expected
    assert made.launch.env == {"A": "b"}


# --- the level and the campaign file


def test_a_level_of_one_window_has_no_bounds() -> None:
    progress = progress_of(1, [2.0, 4.0], [200, 210], [0, 1], [1, 1])
    level = RecordedLevel(1, (Window("log"),) * 2, progress)
    assert math.isinf(level.figures().output_tok_s_high)
    assert level.figures(1).output_tok_s == pytest.approx(100)
    assert level.figures().output_tok_s == pytest.approx(102.5)


def test_a_campaign_file_says_where_its_figures_are() -> None:
    def read(text: str) -> CampaignFile:
        return validate(CampaignFile, Source("campaign.toml", f'description = "d"\n{text}'))

    with pytest.raises(InvalidInput, match=r"campaign.toml:2: candidate\[0\]: needs log and results"):
        read('[[candidate]]\nfile = "a.toml"\n')
    with pytest.raises(InvalidInput, match="leave log and results out"):
        read('table = "t.csv"\n[[candidate]]\nfile = "a.toml"\nlog = "a.log"\n')
    with pytest.raises(InvalidInput, match="did you mean gpus"):
        read('gpu = 8\n[[candidate]]\nfile = "a.toml"\nlog = "a.log"\nresults = "a.json"\n')
    with pytest.raises(InvalidInput, match="candidate"):
        read("")


def test_a_campaigns_levels_are_those_on_record_unless_its_file_names_them() -> None:
    trial = of_table("config,level,output_tok_s\na,1,5\na,64,50\n")
    entry = {"file": "a.toml", "log": "a.log", "results": "a.json"}
    file = CampaignFile.model_validate({"description": "d", "candidate": [entry]})
    assert assembled("c", file, [trial]).levels == (1, 64)
    named = file.model_copy(update={"benchmark": BenchmarkUsed(levels=(1, 8, 64))})
    assert assembled("c", named, [trial]).levels == (1, 8, 64)
