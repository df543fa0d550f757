"""The shipped rules fire where they should, and one step before that they do not."""

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from autotuner.core.policy import Facts, Move, Policy, Rule, Watch, load_policy, used_facts
from autotuner.core.source import Source
from autotuner.settings import Settings, load_policies
from autotuner.shipped import folder

FILES = sorted(folder("policies").glob("*.toml"))
POLICIES = tuple(load_policy(Source(path.name, path.read_text())) for path in FILES)
RULES = {rule.name: rule for policy in POLICIES for rule in policy.rules}

SPEC: Facts = {
    "spec.on": True,
    "spec.accept_len": 1.65,
    "spec.accept_len_low": 1.60,
    "spec.accept_len_high": 1.70,
    "spec.accept_ratio": 0.22,
    "spec.needed": 3.0,
    "spec.needed_low": 2.8,
    "spec.needed_high": 3.2,
    "spec.speedup": 0.9,
    "spec.speedup_low": 0.82,
    "spec.speedup_high": 0.98,
    "spec.ceiling": 4.0,
    "spec.verify_steps": 240.0,
    "spec.windows": 6.0,
    "spec.capped": True,
    "level.name": "concurrency 128",
    "level.concurrency": 128.0,
    "level.running": 48.0,
    "level.running_cap": 48.0,
    "candidate.engine": "sglang",
    "best.measured": True,
    "best.output_tok_s": 2370.0,
    "best.ratio": 0.36,
    "best.ratio_high": 0.40,
    "level.decides": True,
    "level.elapsed_s": 20.0,
    "level.prompts": 40.0,
    "level.rate_error": 0.041,
    "level.launch_noise": 0.03,
    "trial.baseline": False,
    "objective.latency_counts": False,
    "level.output_tok_s": 849.0,
    "level.requests_ok": 50.0,
    "level.requests_failed": 0.0,
    "level.failed_ratio": 0.0,
    "server.alive": True,
    "level.client_limited": False,
    "objective.failed_requests_max": 0.0,
}
START: Facts = {
    "server.alive": True,
    "start.stage": "weights loading",
    "start.elapsed_s": 300.0,
    "start.limit_s": 1800.0,
    "start.silent_s": 10.0,
    "start.silence_limit_s": 600.0,
}
OUT_OF_MEMORY: Facts = {
    "server.alive": False,
    "server.cause": "oom-in-capture",
    "server.sentence": "out of memory",
    "start.stage": "graph capture",
}
AT_A_RATE: Facts = {
    "trial.baseline": False,
    "level.name": "20 req/s",
    "level.request_rate": 20.0,
    "level.elapsed_s": 20.0,
    "level.in_flight": 160.0,
    "level.answered_ratio": 0.7,
    "level.answered_ratio_high": 0.85,
    "level.running": 40.0,
    "level.queued": 81.0,
    "best.answered_ratio": 0.98,
}
GOODPUT: Facts = {"level.decides": False, "objective.latency_counts": True}
BROKEN: dict[str, Any] = {"spec.accept_len": 1.0, "spec.accept_len_low": 1.0, "spec.accept_len_high": 1.005}

# rule -> the situation in which it fires, and near misses: what may differ so that it does not
CASES: dict[str, tuple[Facts, list[dict[str, Any]]]] = {
    "trials-spent": ({"budget.trials_left": 0.0}, [{"budget.trials_left": 1.0}]),
    "gpu-hours-spent": ({"budget.gpu_hours_left": -0.1}, [{"budget.gpu_hours_left": 0.01}]),
    "deadline-passed": ({"budget.deadline_s": 0.0}, [{"budget.deadline_s": 0.5}]),
    "gpu-hours-spent-in-trial": ({"budget.gpu_hours_left": 0.0}, [{"budget.gpu_hours_left": 0.01}]),
    "deadline-passed-in-trial": ({"budget.deadline_s": -1.0}, [{"budget.deadline_s": 0.5}]),
    "server-died": (
        {"server.alive": False, "server.sentence": "killed", "server.cause": "killed"},
        [{"server.alive": True}],
    ),
    "server-died-under-load": ({**SPEC, "server.alive": False, "server.sentence": "killed"}, [{"server.alive": True}]),
    "start-stage-silent": (
        {**START, "start.silent_s": 600.5},
        [{"start.silent_s": 600.0}, {"server.alive": False}],
    ),
    "start-deadline": ({**START, "start.elapsed_s": 1800.5}, [{"start.elapsed_s": 1800.0}, {"server.alive": False}]),
    "level-stage-silent": (
        {**SPEC, "level.silent_s": 450.5, "level.silence_limit_s": 450.0, "level.in_flight": 8.0},
        [{"level.silent_s": 450.0}, {"server.alive": False}],
    ),
    "requests-failing": (
        {**SPEC, "level.requests_ok": 18.0, "level.requests_failed": 2.0, "level.failed_ratio": 0.1},
        [
            {"level.failed_ratio": 0.05},
            {"level.requests_ok": 7.0, "level.requests_failed": 2.0},
        ],
    ),
    "too-many-requests-failed": (
        {**SPEC, "level.requests_failed": 3.0, "objective.failed_requests_max": 2.0},
        [{"level.requests_failed": 2.0}],
    ),
    "ttft-above-limit": (
        {**SPEC, "level.ttft_p99_ms": 500.5, "objective.ttft_p99_ms_max": 500.0},
        [{"level.ttft_p99_ms": 500.0}, {"level.client_limited": True}],
    ),
    "tpot-above-limit": (
        {**SPEC, "level.tpot_p99_ms": 50.5, "objective.tpot_p99_ms_max": 50.0},
        [{"level.tpot_p99_ms": 50.0}, {"level.client_limited": True}],
    ),
    "single-stream-too-slow": (
        {**SPEC, "level.concurrency": 1.0, "best.ratio": 0.89, "objective.single_stream_ratio_min": 0.9},
        [{"best.ratio": 0.9}, {"level.concurrency": 8.0}, {"level.client_limited": True}],
    ),
    "drafter-broken": (
        {**SPEC, **BROKEN},
        [{"spec.accept_len_high": 1.02}, {"spec.verify_steps": 149.0}, {"spec.on": False}],
    ),
    "below-break-even": (
        SPEC,
        [
            {"spec.speedup_high": 1.0},
            {"spec.verify_steps": 199.0},
            {"level.prompts": 19.0},
            BROKEN,  # has its own rule and advice
            {"spec.on": False},
            {"best.ratio_high": 1.0},  # a best-known that is capped is beaten by a drafter that does not pay
            GOODPUT,  # which a slower server may have more of
        ],
    ),
    "hopeless-at-this-level": (
        {**SPEC, "spec.needed_low": 4.1, "level.prompts": 1.0},
        [
            {"spec.needed_low": 4.0},
            {"spec.verify_steps": 49.0},
            BROKEN,
            {"spec.on": False},
            {"best.ratio_high": 1.0},
            GOODPUT,
        ],
    ),
    "too-few-verify-steps": (
        {**SPEC, "spec.verify_steps": 199.0},
        [{"spec.verify_steps": 200.0}, {"spec.speedup": 0.97}, {"spec.on": False}],
    ),
    "acceptance-below-prior": (
        {**SPEC, "best.measured": False},
        [{"best.measured": True}, {"spec.accept_ratio": 0.70}, {"spec.verify_steps": 199.0}],
    ),
    "running-requests-capped": (
        SPEC,
        # What keeps fewer running than the cap allows is something else.
        [{"level.running_cap": 128.0}, {"level.concurrency": 48.0}, {"level.running": 43.0}, BROKEN],
    ),
    "plain-server-capped": (
        {**SPEC, "spec.on": False},
        [{"level.running_cap": 128.0}, {"level.concurrency": 48.0}, {"level.running": 43.0}, {"spec.on": True}],
    ),
    "graph-batch-too-small": (
        {**SPEC, "level.graph_max_batch": 32.0},
        [{"level.graph_max_batch": 48.0}, {"level.graph_max_batch": 0.0}],
    ),
    "cuda-graphs-off": ({**SPEC, "level.graph_max_batch": 0.0}, [{"level.graph_max_batch": 1.0}]),
    "draft-depth-off-the-optimum": (
        {**SPEC, "spec.best_depth": 1.0, "spec.predicted_gain": 0.04, "spec.predicted_ratio": 1.02},
        [
            {"spec.predicted_gain": 0.03},
            {"spec.predicted_ratio": 1.0},  # another depth that loses too
            {"level.decides": False},
            {"spec.verify_steps": 99.0},
            {"spec.windows": 2.0},
            BROKEN,
        ],
    ),
    "draft-tree-at-a-busy-level": (
        {**SPEC, "spec.tree": True},
        [
            {"spec.tree": False},
            {"level.concurrency": 7.0},
            {"spec.needed": 1.7},
            {"level.decides": False},
            {"spec.verify_steps": 99.0},
            {"spec.windows": 2.0},
            BROKEN,
        ],
    ),
    "speculation-pays-only-below": (
        {**SPEC, "level.concurrency": 8.0, "spec.needed": 1.4, "spec.loses_from": 32.0},
        [
            {"spec.needed": 1.6},
            {"spec.loses_from": 8.0},
            {"spec.verify_steps": 99.0},
            {"spec.windows": 2.0},
        ],
    ),
    "speculation-loses-only-above": (
        {**SPEC, "spec.pays_up_to": 8.0},
        [{"spec.needed": 1.7}, {"spec.pays_up_to": 128.0}, {"spec.verify_steps": 99.0}, {"spec.windows": 2.0}],
    ),
    "out-of-memory-in-capture": (
        {**START, **OUT_OF_MEMORY},
        [{"server.alive": True}, {"server.cause": "oom-in-load", "start.stage": "weights loading"}],
    ),
    "out-of-memory-under-load": (
        {**SPEC, **OUT_OF_MEMORY, "server.cause": "oom-in-load"},
        [{"server.alive": True}, {"server.cause": "kv-pressure"}],
    ),
    "kv-cache-does-not-fit": (
        {**START, **OUT_OF_MEMORY, "server.cause": "kv-too-small"},
        [{"server.alive": True}, {"server.cause": "oom-in-capture"}],
    ),
    "requests-preempted": (
        {**SPEC, "level.preempted": 13.0},
        [{"level.preempted": 12.0}, {"level.decides": False}, {"level.concurrency": 8.0, "level.preempted": 1.0}],
    ),
    "flag-refused": (
        {**START, **OUT_OF_MEMORY, "server.cause": "bad-flag-combination"},
        [{"server.alive": True}, {"server.cause": "unsupported"}],
    ),
    "cannot-win": (
        {**SPEC, "spec.on": False, "level.requests_ok": 128.0, "best.ratio_high": 0.99},
        [
            {"spec.on": True},
            {"level.decides": False},
            {"best.ratio_high": 1.0},
            {"level.elapsed_s": 1.9},
            {"level.requests_ok": 127.0},
        ],
    ),
    "cannot-win-speculating": (
        {**SPEC, "best.ratio_high": 0.99, "spec.verify_steps": 400.0},
        [
            {"spec.on": False},
            {"level.decides": False},
            {"best.ratio_high": 1.0},
            {"level.elapsed_s": 1.9},
            {"spec.verify_steps": 399.0},
            {"level.prompts": 19.0},
        ],
    ),
    "objective-lost": (
        {**SPEC, "level.requests_ok": 128.0, "objective.score_high": 0.99},
        [
            {"objective.score_high": 1.0},
            {"level.elapsed_s": 1.9},
            {"level.requests_ok": 127.0},
            {"level.decides": False},
            {"level.prompts": 19.0},  # acceptance differs between prompts, which a few windows do not show
        ],
    ),
    "does-not-keep-up": (
        AT_A_RATE,
        [
            {"level.answered_ratio_high": 0.9},
            {"best.answered_ratio": 0.94},  # then answering more than the best-known may be the gain
            {"trial.baseline": True},
        ],
    ),
    "queue-too-long": (
        AT_A_RATE,
        [
            {"level.queued": 80.0},
            {"level.queued": 19.0, "level.running": 2.0},
            {"level.elapsed_s": 4.9},
            {"best.answered_ratio": 0.94},
            {"trial.baseline": True},
        ],
    ),
    "known-well-enough": (
        {**SPEC, "level.requests_ok": 256.0},
        [
            {"level.rate_error": 0.042},
            {"objective.latency_counts": True},
            {"level.elapsed_s": 4.9},
            {"level.requests_ok": 255.0},
            {"level.prompts": 19.0},
            {"trial.baseline": True},  # which goes on until 0.021
            {"level.decides": False, "level.rate_error": 0.05},
        ],
    ),
}


def fires(rule: Rule, facts: Facts, looks: int | None = None) -> bool:
    """Whether the rule fires within its own number of looks in a row at the same facts."""
    policy = next(p for p in POLICIES if rule in p.rules)
    watch = Watch((policy,))
    found = [f.rule for _ in range(looks or rule.looks) for f in watch.look(rule.on, facts)]
    return rule.name in found


def test_every_shipped_rule_has_a_case_here() -> None:
    assert set(CASES) == set(RULES)
    assert len(RULES) == sum(len(p.rules) for p in POLICIES), "a name is used once over all files"


def test_the_settings_find_the_shipped_files(tmp_path: Path) -> None:
    settings = Settings.model_validate({"state_dir": tmp_path, "slots": {"a": {"port": 1}}})
    assert load_policies(settings) == POLICIES


@pytest.mark.parametrize("name", CASES)
def test_a_rule_fires_in_its_situation_at_its_last_look(name: str) -> None:
    facts, _ = CASES[name]
    rule = RULES[name]
    assert fires(rule, facts)
    if rule.looks > 1:
        assert not fires(rule, facts, rule.looks - 1)


@pytest.mark.parametrize(("name", "miss"), [(name, miss) for name, (_, misses) in CASES.items() for miss in misses])
def test_a_rule_does_not_fire_on_a_near_miss(name: str, miss: dict[str, Any]) -> None:
    facts, _ = CASES[name]
    assert not fires(RULES[name], {**facts, **miss})


@pytest.mark.parametrize("name", CASES)
def test_a_rule_does_not_fire_without_any_one_of_its_facts(name: str) -> None:
    facts, _ = CASES[name]
    for used in used_facts(RULES[name]):
        assert not fires(RULES[name], {k: v for k, v in facts.items() if k != used}), used


@pytest.mark.parametrize("name", CASES)
def test_a_fired_rule_says_every_number_it_names(name: str) -> None:
    facts, _ = CASES[name]
    rule = RULES[name]
    watch = Watch(POLICIES)
    (fired,) = [f for _ in range(rule.looks) for f in watch.look(rule.on, facts) if f.rule == name]
    assert "unknown" not in fired.sentence + fired.advice
    assert "{" not in fired.sentence + fired.advice


def test_the_ready_made_drafter_of_the_campaign_loses_its_level_and_not_its_trial() -> None:
    """Accept length 1.65, 3.12 needed at 48 running: the level is skipped, and the cap gets a candidate of its own."""
    watch = Watch(POLICIES)
    early: Facts = {**SPEC, "spec.speedup_high": 1.1, "best.ratio_high": 1.0}
    fired = [f for facts in (early, early, {**SPEC, "spec.speedup_high": 0.9}) for f in watch.look("window", facts)]
    assert [(f.rule, f.action) for f in fired] == [
        ("running-requests-capped", "propose"),
        ("below-break-even", "skip-level"),
    ]
    assert fired[0].move == "lift-running-cap"


def test_what_only_proposes_ends_nothing() -> None:
    ends = {rule.name for policy in POLICIES for rule in policy.rules if rule.action != "propose"}
    assert not ends & {rule.name for policy in POLICIES if policy.file == "followups.toml" for rule in policy.rules}


def test_every_move_has_a_shipped_rule() -> None:
    assert {rule.move for rule in RULES.values() if rule.move} == set(get_args(Move))


def test_the_own_drafter_of_the_campaign_is_called_broken_and_nothing_else() -> None:
    """Accept length 1.00 and an "accept rate" of 0.25, which in that version means that nothing was accepted."""
    watch = Watch(POLICIES)
    facts: Facts = {**SPEC, **BROKEN, "spec.capped": False, "best.ratio_high": 1.0}
    fired = [f for _ in range(5) for f in watch.look("window", facts)]
    assert [(f.rule, f.action) for f in fired] == [("drafter-broken", "abandon")]


def test_no_shipped_rule_decides_on_the_prior_alone() -> None:
    assert RULES["acceptance-below-prior"].dry_run
    assert not any("accept_ratio" in r.when for r in RULES.values() if not r.dry_run)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.file)
def test_every_number_in_a_shipped_file_is_explained_by_a_comment_above_it(policy: Policy) -> None:
    assert tomllib.loads(policy.text)["description"]
    comment = ""
    for line in policy.text.splitlines():
        comment = comment + line if line.startswith("#") else ("" if not line else comment)
        if line.startswith("when = "):
            numbers = [n for n in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", line) if float(n) > 0]
            assert not numbers or comment, f"{policy.file}: {line}"
