"""From a win to its promotion in the store: what is queued and in which order, what counts, and what is cancelled."""

from pathlib import Path
from typing import Any

import pytest
from unit.core.building import figures, fired, level
from unit.told import ToldSlot

from autotuner import confirming, known, measure, outcome
from autotuner.bench.benchmark import Benchmark
from autotuner.core.candidate import Candidate, Launch
from autotuner.core.decide import RunLevel
from autotuner.core.policy import built_in
from autotuner.core.replay import replay
from autotuner.core.state import LaunchState, Purpose, TrialState, Verdict
from autotuner.core.verdict import Judgement, next_level
from autotuner.edge.rows import LaunchRow, Trial
from autotuner.settings import Settings

AT = "2026-11-29 15:02:14Z"
BENCHMARK = Benchmark(levels=(1, 8))
SLOT = "kimi"


class House(ToldSlot):
    """A slot whose trials are measured by being told their rates."""

    def __init__(self, folder: Path, **tables: Any) -> None:
        file = folder / "autotuner.toml"
        text = "state_dir = 'state'\n[slots.kimi]\nport = 8000\n"
        for name, table in tables.items():
            text += f"[{name}]\n" + "\n".join(f"{key} = {value}" for key, value in table.items()) + "\n"
        file.write_text(text)
        settings = Settings.model_validate({"state_dir": folder / "state", "slots": {SLOT: {"port": 8000}}, **tables})
        super().__init__(SLOT, file, settings)

    def enqueue(self, name: str, **more: Any) -> int:
        made = Candidate(name=name, engine="llamacpp", launch=Launch(model="m", args={"alias": name}))
        self.store.put_candidate(made, "", f"{name}.toml")
        return self.store.add_trial(SLOT, made, ("chat", BENCHMARK), AT, **more)

    def measure(self, trial: Trial, rate: float, **more: Any) -> list[int]:
        """Measure whatever levels the trial asks for; return them."""
        done = []
        while (at := next_level(known.trial_so_far(self.ctx, self.store.trial(trial.id)))) is not None:
            self.store.put_result(trial.id, level(at, rate, **more), {})
            done.append(at)
        return done

    def work(self, rate: float, **more: Any) -> tuple[str, Judgement]:
        """Work the next trial of the queue to its end."""
        trial = self.begin()
        self.measure(trial, rate, **more)
        return trial.name, outcome.conclude(self.ctx, trial.id)

    def lose(self) -> None:
        """The next trial's server does not come up."""
        trial = self.begin()
        self.store.update_trial(trial.id, ended=built_in("start", "it died", Verdict.FAIL).model_dump_json())
        outcome.conclude(self.ctx, trial.id)

    def queue(self) -> list[str]:
        return [f"{t.name}: {t.aim}" if t.aim else t.name for t in self.store.queue(SLOT)]

    def best(self) -> tuple[str, int]:
        _, name, trial = self.store.ladder(SLOT)[0]
        return name, trial


@pytest.fixture
def house(tmp_path: Path) -> Any:
    made = House(tmp_path)
    yield made
    made.store.close()


def launch_row(trial: Trial) -> LaunchRow:
    return LaunchRow(
        id=f"l{trial.id}", slot=SLOT, candidate_id=trial.candidate_id, name=trial.name, purpose=Purpose.TRIAL,
        trial_id=trial.id, state=LaunchState.STARTING, intended_at=AT, boot_id="b", mono_s=1.0, ready_s=None,
        gpu_used_mib={}, ended_at=None, exit_code=None, end_asked=False, diagnosis=None,
    )  # fmt: skip


def won(house: House) -> None:
    """`a` is the best-known, `b` has won against it, `c` waits."""
    for name in "abc":
        house.enqueue(name)
    house.work(100.0)
    assert house.best() == ("a", 1)
    _, judgement = house.work(150.0)
    assert (judgement.verdict, judgement.promote) == (Verdict.PASS, False)
    assert house.best() == ("a", 1)


AA, B2 = "a: best-known again (A/A), for trial 2", "b: confirms trial 2"


def test_a_win_is_followed_by_a_launch_of_the_best_known_and_then_one_of_the_winner(house: House) -> None:
    won(house)
    assert house.queue() == [AA, B2, "c"], "A1 B1, then A2 B2, and the others afterwards"
    text = house.last_entry()
    assert "· measured b" in text
    assert (
        "- Next: the best-known, a, is launched again as trial 4: it has 1 launch on record, 2 are asked; b is launched again"
        in text
    )
    house.work(101.0)
    assert "- Trial: 4, best-known again (A/A), for trial 2" in house.last_entry()
    assert house.work(149.0)[1].promote
    assert house.best() == ("b", 5)
    assert "1 against 2 launches" in house.last_entry()
    assert house.queue() == ["c"]


def test_only_the_levels_that_decide_are_measured_to_confirm_a_win(house: House) -> None:
    won(house)
    for rate in (100.0, 150.0):
        trial = house.begin()
        assert house.measure(trial, rate) == [8]
        outcome.conclude(house.ctx, trial.id)
    assert house.measure(house.begin(), 120.0) == [8, 1], "a candidate's own trial measures them all"


def test_a_winner_that_does_not_hold_stays_a_candidate_and_both_figures_are_told(house: House) -> None:
    won(house)
    house.work(100.0)
    _, judgement = house.work(102.0)
    assert (judgement.verdict, judgement.promote) == (Verdict.INCONCLUSIVE, False)
    assert house.best() == ("a", 1)
    assert (
        "The win of trial 2, 1.500 then, is not confirmed on a fresh launch: the objective is 1.020"
        in house.last_entry()
    )
    assert house.queue() == ["c"]


def test_the_figure_on_record_is_that_of_the_launches_that_did_not_select_the_winner(house: House) -> None:
    won(house)
    house.work(100.0)
    house.work(130.0)
    trial = house.begin()
    so_far = known.trial_so_far(house.ctx, trial)
    assert [run[8].output_tok_s for run in so_far.baseline_runs] == [130.0]
    assert so_far.baseline[8].figures.output_tok_s == 130.0
    assert so_far.baseline[1].figures.output_tok_s == 150.0, (
        "a level that was not confirmed is known from the first trial"
    )


def test_all_launches_of_the_best_known_are_compared_with_and_give_the_noise(house: House) -> None:
    won(house)
    house.work(104.0)
    so_far = known.trial_so_far(house.ctx, house.begin())
    assert [run[8].output_tok_s for run in so_far.baseline_runs] == [100.0, 104.0]
    assert so_far.baseline[8].figures.output_tok_s == 102.0
    assert so_far.launch_noise == pytest.approx(0.0289, abs=1e-3)


def test_a_lead_that_one_launch_cannot_prove_is_launched_again_beside_the_best_known_until_it_is(house: House) -> None:
    for name in "abc":
        house.enqueue(name)
    house.work(100.0)
    _, judgement = house.work(106.0)
    assert (judgement.verdict, judgement.promote) == (Verdict.INCONCLUSIVE, False)
    assert "but a lead worth another launch of each side" in house.last_entry()
    pair = [AA, "b: confirms trial 2"]
    orders = []
    while house.queue() != ["c"]:
        orders.append(house.queue()[:-1])
        house.work(100.0)
        _, judgement = house.work(106.0)
        if judgement.promote:
            break
    assert orders[0] == pair
    assert len(orders) <= 3
    assert judgement.promote
    assert "the lead of trial 2, 1.060 then, is confirmed" in house.last_entry().lower()


def test_a_lead_that_turns_out_to_be_luck_ends_without_further_launches(house: House) -> None:
    for name in "abc":
        house.enqueue(name)
    house.work(100.0)
    house.work(106.0)
    house.work(100.0)
    _, judgement = house.work(100.5)
    assert (judgement.verdict, judgement.promote) == (Verdict.INCONCLUSIVE, False)
    assert house.queue() == ["c"]


def test_without_open_launches_a_lead_is_left_at_that(tmp_path: Path) -> None:
    house = House(tmp_path, noise={"open_launches": 0})
    house.enqueue("a")
    house.enqueue("b")
    house.work(100.0)
    house.work(106.0)
    assert house.queue() == []
    house.store.close()


def test_the_very_first_candidate_and_a_loser_cost_no_further_launch(house: House) -> None:
    house.enqueue("a")
    house.enqueue("b")
    house.work(100.0)
    assert house.queue() == ["b"]
    house.work(60.0)
    assert house.queue() == []


def test_without_confirmation_a_win_promotes_at_once(tmp_path: Path) -> None:
    house = House(tmp_path, noise={"confirm_launches": 0})
    house.enqueue("a")
    house.enqueue("b")
    house.work(100.0)
    assert house.work(150.0)[1].promote
    assert (house.best(), house.queue()) == (("b", 2), [])
    house.store.close()


def test_two_confirming_launches_are_queued_one_after_the_other_and_judged_together(tmp_path: Path) -> None:
    house = House(tmp_path, noise={"confirm_launches": 2})
    won(house)
    house.work(100.0)
    assert house.queue() == [B2, "c"]
    assert house.work(108.0)[1].follows
    assert house.queue() == [B2, "c"]
    assert house.work(114.0)[1].promote
    assert "2 against 2 launches" in house.last_entry()
    assert house.best() == ("b", 6)
    runs = known.trial_so_far(house.ctx, house.begin()).baseline_runs
    assert [run[8].output_tok_s for run in runs] == [108.0, 114.0]
    house.store.close()


def test_a_best_known_that_does_not_come_up_again_costs_two_launches_and_keeps_no_winner_waiting(house: House) -> None:
    won(house)
    house.lose()
    assert not house.work(150.0)[1].promote
    assert house.queue() == [AA, B2, "c"]
    house.lose()
    assert house.work(150.0)[1].promote
    assert house.queue() == ["c"]


def test_a_host_that_changed_between_two_launches_is_told_and_the_winner_measured_beside_it(house: House) -> None:
    won(house)
    house.work(70.0)
    assert (
        "- Drift: the best-known's launch of trial 4 gave 70.0 tok/s at concurrency 8, 100.0 before (-30 %)"
        in house.last_entry()
    )
    assert not house.work(150.0)[1].promote
    assert house.queue() == [AA, B2, "c"]
    house.work(71.0)
    assert house.work(110.0)[1].promote
    assert "2 against 2 launches" in house.last_entry()
    assert "launch of trial 4 gave 70.0" in house.last_entry()


def test_a_baseline_whose_level_drifted_is_measured_again_once(house: House) -> None:
    won(house)
    house.work(100.0, drift_ratio=-0.2)
    assert "- Drift: -20 % from the first third of concurrency 8 to its last" in house.last_entry()
    assert house.queue() == [AA, B2, "c"]
    house.work(100.0, drift_ratio=-0.2)
    assert house.queue() == [B2, "c"]


def test_a_candidate_that_drifted_costs_no_launch(house: House) -> None:
    house.enqueue("a")
    house.work(100.0, drift_ratio=-0.2)
    assert house.queue() == []


def test_an_interrupted_confirming_trial_begins_anew_before_everything_else(house: House) -> None:
    won(house)
    house.work(100.0)
    trial = house.begin()
    house.measure(trial, 999.0)
    outcome.requeue(house.ctx, trial.id, "the daemon ended during it")
    assert house.queue() == [B2, "c"]
    house.work(102.0)
    assert house.best() == ("a", 1), "what was measured before the interruption is forgotten"


def test_a_confirming_trial_is_held_against_the_best_known_of_its_own_time(house: House) -> None:
    """An operator moves `c` first, and it is confirmed and promoted before `b` is."""
    won(house)
    house.store.put_first(3)
    house.work(200.0)
    assert house.queue()[:2] == [AA.replace("trial 2", "trial 3"), "c: confirms trial 3"]
    house.work(100.0)
    house.work(200.0)
    assert house.best() == ("c", 7)
    assert house.queue() == [B2], "what the former best-known was to be launched for is over"
    assert house.store.trial(4).state is TrialState.CANCELLED
    assert f"trial 4 (a, {AA[3:]}) is not needed any more and was cancelled" in house.last_entry()
    assert house.work(150.0)[1].verdict is Verdict.FAIL
    assert house.best() == ("c", 7)
    text = house.last_entry()
    assert "The win of trial 2, 1.500 then, is not confirmed on a fresh launch: the objective is 0.750" in text


def test_who_cancels_a_confirming_trial_cancels_the_launch_that_waits_for_it_alone(house: House) -> None:
    won(house)
    said = house.cli("queue", "cancel", "5")
    assert said.splitlines() == [f"cancelled trial 5 (b, {B2[3:]})", f"cancelled trial 4 (a, {AA[3:]})"]
    assert house.queue() == ["c"]


def test_a_confirming_trial_that_a_rule_ends_is_not_promoted_and_says_so(house: House) -> None:
    won(house)
    house.work(100.0)
    house.work(150.0, fired=fired("abandon", sentence="It fails requests"))
    assert house.best() == ("a", 1)
    assert "the win of trial 2 is not confirmed" in house.last_entry()


def test_a_best_known_measured_only_in_part_is_measured_before_an_objective_that_needs_more(house: House) -> None:
    won(house)
    house.work(100.0)
    house.work(150.0)
    queued = house.store.queue(SLOT)[0]
    assert not confirming.baseline_missing(house.ctx, queued, (8,))
    assert confirming.baseline_missing(house.ctx, queued, (1, 8))


def test_every_verdict_of_the_way_to_a_promotion_replays(house: House) -> None:
    won(house)
    for rate in (70.0, 150.0, 71.0, 110.0, 60.0):
        house.work(rate)
    for trial in house.store.trials():
        recorded = Judgement(trial.verdict or Verdict.ERROR, trial.promoted, trial.reasons, trial.score)
        assert replay(house.store.basis(trial.id), recorded, {}, {}).differences == ()


def test_status_and_show_say_what_a_trial_is_for(house: House) -> None:
    won(house)
    assert f"queue:      3 waiting ({AA}, {B2}, c)" in house.cli("status")
    assert f"followed by: trial 5, {B2}, queued" in house.cli("show", "2")
    house.work(100.0)
    house.begin()
    assert f"trial:      5, {B2}" in house.cli("status")
    assert "measured to the end; best-known again (A/A), for trial 2" in house.cli("status")
    assert "aim:        confirms trial 2" in house.cli("show", "5")


def test_a_best_known_that_became_slower_is_measured_to_the_end_and_its_own_rates_are_no_reason_to_stop(
    house: House,
) -> None:
    """A rule that ends what is slower than the best-known would otherwise keep a drift out of its record."""
    won(house)
    for expected in (False, True):  # the best-known itself, then the winner
        trial = house.begin()
        house.store.add_launch(launch_row(trial))
        facts = measure._Level(house.ctx, RunLevel(trial.id, f"l{trial.id}", 8))._facts(figures(8, 50.0))
        assert facts["best.measured"] is True
        assert ("best.ratio_high" in facts) is expected
        house.measure(trial, 100.0)
        outcome.conclude(house.ctx, trial.id)


def test_the_part_of_the_error_budget_is_settled_when_a_trial_begins(house: House) -> None:
    house.enqueue("a")
    house.work(100.0)
    house.enqueue("b")
    trial = house.begin()
    before = known.alpha_of(house.ctx, trial)
    house.enqueue("c")
    house.enqueue("d")
    assert known.alpha_of(house.ctx, house.store.trial(trial.id)) == before
    house.measure(trial, 50.0)
    outcome.conclude(house.ctx, trial.id)
    basis = house.store.basis(trial.id)
    assert basis is not None
    assert basis.alpha == before


def test_a_server_that_does_not_come_up_spends_nothing_of_the_error_budget(house: House) -> None:
    house.enqueue("a")
    house.work(100.0)
    spent = house.store.error_spent(SLOT, 0)
    house.enqueue("b")
    house.lose()
    assert house.store.error_spent(SLOT, 0) == spent


def test_a_campaign_of_many_trials_enqueued_one_by_one_goes_on(house: House) -> None:
    for number in range(60):
        house.enqueue(f"c{number}")
        house.work(100.0 if number == 0 else 50.0)
    house.enqueue("winner")
    house.work(200.0)
    assert house.queue(), "a server twice as fast still owes its confirming launches, and nothing else"


@pytest.mark.parametrize("p99", [900.0, 400.0])
def test_no_rule_holds_the_rate_of_a_best_known_against_others_that_violates_the_limits_itself(
    tmp_path: Path, p99: float
) -> None:
    """A slower one that keeps them is to replace it, and must be measured to the end for that."""
    house = House(tmp_path, objective={"constraints": {"ttft_p99_ms_max": 500.0}})
    house.enqueue("a", is_baseline=True)
    best = house.store.trial(1)
    house.store.promote(SLOT, best.candidate_id, "a", 1, AT)
    house.work(100.0, ttft_ms={"p50": p99 / 2, "p99": p99})
    house.enqueue("b")
    trial = house.begin()
    house.store.add_launch(launch_row(trial))
    plan = measure._Level(house.ctx, RunLevel(trial.id, f"l{trial.id}", 8)).gather.plan
    assert plan.decides is (p99 <= 500)
    assert (plan.standing is not None) is (p99 <= 500)
    house.store.close()
