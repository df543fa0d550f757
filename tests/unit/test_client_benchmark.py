"""The pure parts of benchmarks/clients.py: what a schedule allows, ratios, bars, tables, and who was the limit."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from clientbench.agreement import LAST_CHUNK, WHOLE, by_account, write_requests
from clientbench.pairs import Agreement, Pair, agreement_table, agreements
from clientbench.report import (
    OURS,
    RUST,
    Bar,
    Run,
    bars,
    mode_table,
    round_ratios,
    said,
    spread,
    verdict_table,
    was_the_limit,
)
from clientbench.schedule import MODES, WHAT, Mode

from autotuner.bench.records import parse_records

SECOND_NS = 1_000_000_000


def run_of(mode: Mode, client: str = OURS, *, share: float = 1.0, cpu_s: float = 1.0, late_ms: float = 0.01) -> Run:
    """A run that delivered this share of what was possible (of 100,000 tok/s where there is no schedule)."""
    took_s = mode.total_tokens / ((mode.possible_tok_s or 100_000) * share)
    truth = {
        "tokens": mode.total_tokens, "first_ns": SECOND_NS, "last_ns": SECOND_NS + took_s * SECOND_NS, "late_p50": late_ms,
        "ttft_p50": 50.0, "ttft_p99": 50.4, "itl_p50": 10.0, "itl_p99": 10.3,
    }  # fmt: skip
    latencies = {"ttft_ms": {"p50": 50.05, "p99": 51.4}, "itl_ms": {"p50": 10.0, "p99": 10.35}}
    return Run(client, mode, truth, cpu_s=cpu_s, start_s=0.3, pss_mb=40.0, limited=False, **latencies)


def mode(name: str) -> Mode:
    return next(one for one in MODES if one.name == name)


@pytest.mark.parametrize(("name", "seconds"), [
    ("acc", 3 * (0.05 + 127 * 0.010)),
    ("paced20k", 2 * (0.05 + 255 * 0.0064)),
    ("over128", 8 * (0.05 + 255 * 0.00128)),
    ("over512", 4 * (0.05 + 127 * 0.00512)),
])  # fmt: skip
def test_a_schedule_takes_as_many_answers_in_a_row_as_a_stream_gives(name: str, seconds: float) -> None:
    one = mode(name)
    assert one.seconds == pytest.approx(seconds)
    assert one.possible_tok_s == pytest.approx(one.requests * one.tokens / seconds)


def test_a_last_round_of_few_streams_takes_as_long_as_a_full_one() -> None:
    full, more = Mode("", 64, 192, 128), Mode("", 64, 193, 128)
    assert more.seconds == pytest.approx(full.seconds * 4 / 3)


def test_a_server_that_batches_writes_the_last_of_a_batch_no_later_than_its_first() -> None:
    assert Mode("", 1, 1, 128, ttft_ms=50, itl_ms=10, burst=4).seconds == pytest.approx(0.05 + 31 * 0.04)
    assert Mode("", 1, 1, 129, ttft_ms=50, itl_ms=10, burst=4).seconds == pytest.approx(0.05 + 32 * 0.04)


def test_without_a_schedule_nothing_is_too_slow() -> None:
    assert mode("flood").possible_tok_s is None
    assert run_of(mode("flood")).share is None


def test_every_mode_is_explained() -> None:
    assert [one.name for one in MODES] == list(WHAT)


def test_delivered_tokens_count_from_the_first_request_to_the_last_answer() -> None:
    run = run_of(mode("acc"), share=0.5)
    assert run.share == pytest.approx(0.5)
    assert run.delivered_tok_s == pytest.approx(run.mode.possible_tok_s / 2)
    assert run.off_ms("ttft", "p99") == pytest.approx(1.0)
    assert run.off_ms("itl", "p90") is None


def test_ratios_are_of_medians_and_bars_say_by_how_much_one_fell_short() -> None:
    paced = mode("paced20k")
    mine = [run_of(paced, cpu_s=cpu) for cpu in (1.0, 1.0, 4.0)]
    theirs = [run_of(paced, RUST, cpu_s=cpu) for cpu in (1.2, 1.2, 1.2)]
    found = {bar.what: bar for bar in bars(mine + theirs)}
    bar = found["paced20k: tok per CPU-s against SGLang Rust"]
    assert bar.figure == pytest.approx(1.2)
    assert bar.verdict == "fell short by 0.1x"
    assert round_ratios(mine, theirs) == pytest.approx([1.2, 1.2, 0.3])
    assert found["flood: tok per CPU-s against SGLang Rust"].verdict == "not measured"
    assert found["peak PSS"].verdict == "reached"


def test_what_a_latency_may_add_is_held_against_the_truth_of_the_same_run() -> None:
    found = {bar.what: bar for bar in bars([run_of(mode("acc"))])}
    assert found["acc: TTFT p50 above the truth"].reached is True
    assert found["acc: TTFT p99 above the truth"].verdict == "fell short by 0.5 ms"
    assert found["acc: ITL p99 above the truth"].reached is True


def test_a_bar_is_reached_by_its_own_value_from_the_right_side() -> None:
    assert Bar("", 1.0, 1.0, at_least=True).reached
    assert not Bar("", 0.9, 1.0, at_least=True).reached
    assert not Bar("", 1.1, 1.0, at_least=False).reached


@pytest.mark.parametrize(("share", "late_ms", "limit"), [
    (0.99, 5.0, False), (0.97, 0.0, False), (0.95, 0.0, None), (0.5, 0.0, True), (0.5, 5.0, None),
])  # fmt: skip
def test_who_was_the_limit_is_told_by_the_server_alone(share: float, late_ms: float, limit: bool | None) -> None:
    run = run_of(mode("over128"), share=share + 1e-9, late_ms=late_ms)
    assert was_the_limit(run) is limit
    assert was_the_limit(replace(run, limited=True)) is limit


def test_missed_and_wrong_verdicts_are_counted_apart() -> None:
    over = mode("over128")
    slow, fine = run_of(over, share=0.5), run_of(over)
    runs = [slow, replace(slow, limited=True), fine, replace(fine, limited=True), replace(fine, failure="exit code 1")]
    row = verdict_table({"a kind": runs}).splitlines()[-1]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "a kind", "4 (1 failed)", "0.750 (0.500-1.000)", "2 / 2 / 0", "2", "1", "1",
    ]  # fmt: skip


def test_a_table_shows_medians_ranges_and_what_a_client_withheld() -> None:
    runs = [run_of(mode("acc"), cpu_s=cpu) for cpu in (1.0, 2.0, 4.0)]
    for run in runs:
        run.itl_ms, run.said = {}, "ITL withheld"
    row = mode_table(runs).splitlines()[-1]
    assert "| 12,288 (6,144-24,576) |" in row
    assert "| 50.05 / 51.40 (50.00 / 50.40) | withheld (10.00 / 10.30) |" in row
    assert row.endswith("| ITL withheld (3 of 3) |")


def test_a_client_that_failed_is_shown_as_failed() -> None:
    assert "failed: exit code 1" in mode_table([Run(RUST, mode("acc"), failure="exit code 1")])
    assert said([Run(RUST, mode("acc"), failure="x"), Run(RUST, mode("acc"))]) == "failed: x (1 of 2)"
    assert spread([], ".1f") == "-"


# --- agreement with another client


def paired(*ratios: float) -> list[Pair]:
    """Pairs whose servers were of very different speed, and whose clients were apart by these ratios."""
    return [
        Pair({"tok/s": 100.0 * 1.5**i * r, "ours alone": 1.0}, {"tok/s": 100.0 * 1.5**i}) for i, r in enumerate(ratios)
    ]


def test_only_what_both_reported_is_compared_and_only_within_pairs() -> None:
    (found,) = agreements(paired(1.01, 1.01, 1.01, 1.01, 1.01, 1.01))
    assert (found.figure, found.pairs) == ("tok/s", 6)
    assert (found.low, found.ratio, found.high) == pytest.approx((1.01, 1.01, 1.01))
    assert found.verdict == "within 2 %"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((1.0, 1.01, 0.99, 1.0, 1.01), "too few pairs"),
        ((0.981, 1.0, 1.019, 1.0, 1.0, 1.0), "within 2 %"),
        ((0.97, 1.0, 1.0, 1.0, 1.0, 1.0), "median within 2 %, interval wider"),
        ((1.0, 1.03, 1.03, 1.03, 1.03, 1.04), "median beyond 2 %, interval wider"),
        ((1.03, 1.04, 1.03, 1.03, 1.05, 1.04), "more than 2 % apart"),
        ((0.97, 0.96, 0.97, 0.97, 0.9, 0.96), "more than 2 % apart"),
    ],
)
def test_a_verdict_is_of_the_whole_interval(ratios: tuple[float, ...], verdict: str) -> None:
    found = agreements(paired(*ratios))
    assert found[0].verdict == verdict
    assert verdict in agreement_table({"C 1": found})


def test_more_pairs_narrow_the_interval_and_a_wild_one_does_not_widen_it() -> None:
    (found,) = agreements(paired(*[0.99, 1.01] * 10, 3.0))
    assert (found.low, found.high) == pytest.approx((0.99, 1.01))


def test_what_the_server_itself_wandered_cancels() -> None:
    def round_of(slower: float) -> dict[str, float]:
        spent = {"prompt_s": 2.0 * slower, "generating_s": 6.0 * slower, "tokens": 256.0}
        reported = {
            WHOLE: 128 / slower,
            "TTFT mean ms": 260 * slower,
            "TPOT mean ms": 24 * slower,
            LAST_CHUNK: 24 * slower,
        }
        return by_account(reported, spent, 4, 8)

    assert round_of(1.0) == pytest.approx(round_of(1.7))
    assert len(round_of(1.0)) == 4


def test_our_client_reads_the_requests_that_the_other_reads_and_each_pair_has_its_own(tmp_path: Path) -> None:
    prompts = []
    for number in (1, 2):
        write_requests(tmp_path / "requests.json", 4, number)
        records = parse_records("requests.json", (tmp_path / "requests.json").read_bytes())
        assert [records.timed(i).texts for i in range(4)] == [records[i].texts for i in range(4)], "in the file's order"
        prompts += [records[i].texts[0] for i in range(len(records))]
    assert len(set(prompts)) == len(prompts) == 8


def test_an_agreement_without_bounds_is_written_without_them() -> None:
    one = Agreement("tok/s", 2, 100.0, 99.0, 1.01, None, None)
    assert "| 1.0100 | - | too few pairs |" in agreement_table({"C 1": [one]})
