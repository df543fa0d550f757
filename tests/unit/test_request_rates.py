"""A campaign whose levels are request rates, from the store to the commands: what decides it, and how it is told."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from unit.core.building import figures, fired, level
from unit.told import ToldSlot

from autotuner import known, measure, outcome
from autotuner.bench.benchmark import Benchmark
from autotuner.bench.measurement import GoodputLimits, Progress
from autotuner.core.candidate import Candidate, Launch
from autotuner.core.decide import RunLevel
from autotuner.core.facts import level_facts, server_facts
from autotuner.core.gather import Gather, LevelPlan
from autotuner.core.policy import Facts
from autotuner.core.recorded import BenchmarkUsed
from autotuner.core.state import LaunchState, Purpose, Verdict
from autotuner.core.verdict import Judgement, LevelResult, next_level
from autotuner.core.watching import LevelRules
from autotuner.edge.rows import LaunchRow
from autotuner.engines.base import Window
from autotuner.errors import NotFound
from autotuner.settings import load_settings, policies_in
from autotuner.shipped import folder

AT = "2026-11-29 15:02:14Z"
SLOT = "kimi"
LIMITS = GoodputLimits(ttft_ms_max=500.0)
SETTINGS = """\
state_dir = "state"
[slots.kimi]
port = 8000
[benchmarks.live]
load = "request-rate"
levels = [0.5, 2.5]
[objective]
maximise = "goodput"
level = 2.5
ttft_ms_max = 500
"""


def at_rate(rate: float, good: float, tok_s: float = 300.0, **more: Any) -> LevelResult:
    """A level at a rate, with its goodput."""
    known = {"goodput_limits": LIMITS, "goodput_req_s": good, "goodput_req_s_low": good, "goodput_req_s_high": good}
    return level(rate, tok_s, 1.0, load="request-rate", running=6.0, **known, **more)


class House(ToldSlot):
    """A slot whose trials are measured by being told their figures."""

    def __init__(self, folder: Path, text: str = SETTINGS) -> None:
        file = folder / "autotuner.toml"
        file.write_text(text)
        super().__init__(SLOT, file, load_settings(file))

    def enqueue(self, name: str, benchmark: Benchmark | None = None) -> int:
        made = Candidate(name=name, engine="llamacpp", launch=Launch(model="m", args={"alias": name}))
        self.store.put_candidate(made, "", f"{name}.toml")
        return self.store.add_trial(SLOT, made, ("live", benchmark or self.settings.benchmarks["live"]), AT)

    def work(self, good: float, **more: Any) -> Judgement:
        """Work the next trial to its verdict, good at 2.5 req/s as told, and with every request at 0.5."""
        trial = self.begin()
        while (at := next_level(known.trial_so_far(self.ctx, self.store.trial(trial.id)))) is not None:
            self.store.put_result(trial.id, at_rate(at, good if at == 2.5 else at, **more), {})
        return outcome.conclude(self.ctx, trial.id)


@pytest.fixture
def house(tmp_path: Path) -> Any:
    made = House(tmp_path)
    yield made
    made.store.close()


def test_fractions_of_a_request_a_second_come_back_from_the_store_as_they_went(house: House) -> None:
    trial = house.enqueue("a")
    for rate in (2, 0.5):
        house.store.put_result(trial, at_rate(rate, rate), {"looks": [rate]})
    found = house.store.results(trial)
    assert [r.concurrency for r in found] == [0.5, 2]
    assert [type(r.concurrency) for r in found] == [float, int]
    assert house.store.evidence(trial, 0.5) == {"looks": [0.5]}
    with pytest.raises(NotFound, match=r"at 2\.5 req/s"):
        house.store.evidence(trial, 2.5)
    house.store.proposals.want(SLOT, trial, [fired("propose", move="graphs-on")], 0.5, None, AT)
    house.store.proposals.want(SLOT, trial, [fired("propose", rule="other", move="graphs-on")], 8, None, AT)
    assert [(row.level, type(row.level)) for row in house.store.proposals.of_trial(trial)] == [(0.5, float), (8, int)]


def test_goodput_at_a_rate_decides_although_every_server_gives_the_same_output(house: House) -> None:
    house.enqueue("a")
    assert house.work(1.5).promote
    house.enqueue("b")
    judgement = house.work(2.4)
    assert judgement.verdict is Verdict.PASS
    assert judgement.score is not None
    assert judgement.score.mean == pytest.approx(1.6)
    text = house.last_entry()
    assert "- Objective: goodput at 2.5 req/s (requests per second with TTFT up to 500 ms)" in text
    assert "| 2.5 req/s |" in text
    assert "concurrency" not in text
    assert "Front" not in text, "nobody is best at what was sent"


def test_what_a_verdict_is_made_from_is_read_back_with_its_rates(house: House) -> None:
    house.enqueue("a")
    house.work(1.5)
    house.enqueue("b")
    house.work(1.5)
    basis = house.store.basis(2)
    assert basis is not None
    assert basis.load == "request-rate"
    assert basis.levels == (0.5, 2.5)
    assert set(basis.baseline) == {0.5, 2.5}
    assert set(basis.baseline_runs[0]) == {0.5, 2.5}
    assert basis.results[0].figures.level_name == "0.5 req/s"


def test_output_at_a_rate_is_no_difference_to_act_on(tmp_path: Path) -> None:
    house = House(tmp_path, SETTINGS[: SETTINGS.index("[objective]")])
    house.enqueue("a")
    house.work(1.5)
    house.enqueue("b")
    judgement = house.work(2.4)
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert judgement.follows == ()
    house.store.close()


def test_a_best_known_that_does_not_keep_up_has_it_in_its_record(house: House) -> None:
    house.enqueue("a")
    trial = house.begin()
    behind = at_rate(2.5, 0.2).model_copy(update={"answered_ratio": 0.6})
    house.store.put_result(trial.id, behind, {})
    house.store.put_result(trial.id, at_rate(0.5, 0.5), {})
    assert outcome.conclude(house.ctx, trial.id).promote
    assert "- Overload: 2.5 req/s: 60 % of the requests sent" in house.last_entry()


def test_commands_name_rates_and_show_the_goodput_that_decides(house: House) -> None:
    house.enqueue("a")
    house.work(1.5)
    house.enqueue("b")
    house.work(2.4)
    status = house.cli("status")
    assert "objective:  goodput at 2.5 req/s" in status
    assert "goodput req/s at 0.5 req/s" in status
    assert "2.40" in status
    assert "C=" not in status
    row = json.loads(house.cli("status", "--json"))["slots"][SLOT]["trials"][0]
    assert (row["load"], row["goodput_req_s"]) == ("request-rate", {"0.5": 0.5, "2.5": 1.5})
    compared = house.cli("compare", "1", "2")
    assert "goodput req/s at 2.5 req/s" in compared
    assert "2.40 ± 0.00 (1.60)" in compared
    shown = house.cli("show", "2")
    assert "2.5 req/s" in shown


def test_a_table_of_rates_and_concurrencies_keeps_them_apart(house: House) -> None:
    house.enqueue("a")
    house.work(1.5)
    trial = house.enqueue("old", Benchmark(levels=(8,)))
    house.store.put_result(trial, level(8, 123.4), {})
    compared = house.cli("compare", "a", "old")
    assert "C=8 output tok/s" in compared
    (old,) = [line for line in compared.splitlines() if " old " in line]
    assert "123.4" in old
    assert old.count(" - ") + old.count(" -") >= 2


def in_progress(house: House, benchmark: Benchmark, at: Any, steady_s: float, answered: int) -> Any:
    """A level of the first trial with so much measured."""
    house.enqueue("a", benchmark)
    trial = house.begin()
    house.store.add_launch(
        LaunchRow(
            id="l1", slot=SLOT, candidate_id=trial.candidate_id, name=trial.name, purpose=Purpose.TRIAL,
            trial_id=trial.id, state=LaunchState.STARTING, intended_at=AT, boot_id="b", mono_s=1.0, ready_s=None,
            gpu_used_mib={}, ended_at=None, exit_code=None, end_asked=False, diagnosis=None,
        )
    )  # fmt: skip
    made = measure._Level(house.ctx, RunLevel(trial.id, "l1", at))
    for at_s, done in ((1.0, 0), (1.0 + steady_s, answered)):
        phase: Any = "warm-up" if at_s == 1.0 else "steady"
        made.gather.add_progress(Progress(at_s=at_s, phase=phase, events=1, in_flight=9, done=done, failed=0))
    return made


def test_a_level_at_a_rate_lasts_its_time_however_few_were_answered(house: House) -> None:
    """A longer one would send this server requests that the others were not sent; and an overloaded one never catches up."""
    rates = house.settings.benchmarks["live"]
    level_ = in_progress(house, rates, 2.5, 59.0, 1)
    assert not level_._over()
    level_.gather.add_progress(Progress(at_s=61.0, phase="steady", events=1, in_flight=150, done=1, failed=0))
    assert level_._over()


def test_a_level_that_keeps_requests_in_flight_waits_for_as_many_answers(house: House) -> None:
    assert not in_progress(house, Benchmark(levels=(8,)), 8, 60.0, 7)._over()


def test_the_plan_of_a_level_at_a_rate_knows_no_concurrency(house: House) -> None:
    plan = in_progress(house, house.settings.benchmarks["live"], 2.5, 1.0, 1).gather.plan
    assert (plan.level, plan.load, plan.concurrency) == (2.5, "request-rate", None)


def test_a_single_stream_is_no_constraint_under_a_benchmark_of_rates(tmp_path: Path) -> None:
    """A candidate may name such a benchmark although the slot's own has concurrencies."""
    text = "state_dir = 'state'\n[slots.kimi]\nport = 8000\n[objective.constraints]\nsingle_stream_ratio_min = 0.9\n"
    house = House(tmp_path, text + "[benchmarks.chat]\nlevels = [1, 8]\n")
    single = Benchmark(levels=(1, 8), load="request-rate")
    assert house.ctx.objective(single).constraints.single_stream_ratio_min is None
    assert house.ctx.objective(Benchmark(levels=(1, 8))).constraints.single_stream_ratio_min == 0.9
    house.store.close()


# --- the shipped rules over a level at a rate


def looked_at(
    lines: list[Progress], windows: tuple[Window, ...] = (), load: Any = "request-rate", **more: Any
) -> LevelRules:
    """The shipped rules over a level of a plain server at 20 req/s, two seconds between looks."""
    known: dict[str, Any] = {"best": figures(20, 900.0, 9.0, load=load), "best_answered_ratio": 0.99, **more}
    plan = LevelPlan(20, decides=True, cap=None, speculation=None, baseline_steps_s={}, load=load, **known)
    gather, rules = Gather(plan), LevelRules(policies_in(folder("policies")))
    trial: Facts = {"trial.baseline": False, "candidate.engine": "sglang"}
    for number, line in enumerate(lines):
        gather.add_progress(line)
        gather.log_windows = [w for w in windows if gather.steady]
        if number % 4 == 3 and not rules.over:
            alive = server_facts(alive=True, exit_code=None, diagnosis=None)
            rules.look("window", {**alive, **trial, **level_facts(gather.so_far())})
    return rules


def arriving(answered_per_s: float, tokens: float = 45.0) -> list[Progress]:
    """Twenty requests a second for a minute after a warm-up of five seconds, of which so many are answered."""
    lines = []
    for step in range(1, 131):
        t = step / 2
        done = int(answered_per_s * max(0.0, t - 1.0))
        phase: Any = "steady" if t > 5 else "warm-up"
        sent = int(20 * t)
        events = int(answered_per_s * tokens / 2)
        lines.append(Progress(at_s=t, phase=phase, events=events, in_flight=sent - done, done=done, failed=0))
    return lines


def test_a_candidate_that_does_not_keep_up_is_ended_early_and_told_why() -> None:
    ended = looked_at(arriving(13.0)).ended
    assert ended is not None
    assert (ended.rule, ended.action) == ("does-not-keep-up", "skip-level")
    assert ended.sentence.startswith("It does not keep up with 20 req/s: it answered 0.65 of the requests sent lately")
    assert "level.request_rate" in ended.facts


def test_a_queue_that_grows_without_end_is_told_though_hardly_anything_is_answered() -> None:
    waiting = (Window("log", running=40.0, queued=90.0, gen_tok_s=400.0),) * 3
    assert looked_at(arriving(5.0)).ended is None, "by counts its requests may still be on their way"
    ended = looked_at(arriving(5.0), waiting).ended
    assert ended is not None
    assert ended.rule == "queue-too-long"
    assert "90 requests wait and 40 run" in ended.sentence


@pytest.mark.parametrize("best", [None, 0.7])
def test_where_the_best_known_does_not_keep_up_either_the_level_goes_on(best: float | None) -> None:
    """Answering more of what is sent than the best-known is then a gain, and the first server has nobody to lose against."""
    waiting = (Window("log", running=40.0, queued=90.0, gen_tok_s=400.0),) * 3
    assert looked_at(arriving(13.0), waiting, best_answered_ratio=best).ended is None


def test_a_server_that_keeps_up_is_neither_ended_nor_settled_for_what_it_was_sent() -> None:
    """A third less output so far than the best-known's whole level, and known to a hair: at a concurrency that ends it."""
    rules = looked_at(arriving(20.0, tokens=30.0))
    assert not rules.over
    assert rules.proposed == []
    ended = looked_at(arriving(20.0, tokens=30.0), load="concurrency").ended
    assert ended is not None
    assert ended.rule == "cannot-win"


def test_a_recorded_campaign_of_rates_is_refused() -> None:
    assert BenchmarkUsed(levels=(8,)).load == "concurrency"
    with pytest.raises(ValidationError, match="concurrency"):
        BenchmarkUsed.model_validate({"levels": [8], "load": "request-rate"})
