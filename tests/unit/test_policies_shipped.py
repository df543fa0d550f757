"""The shipped rules fire where they should, and one step before that they do not."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from autotuner.core.policy import Facts, Policy, Rule, Watch, load_policy, used_facts
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
    "spec.ceiling": 4.0,
    "spec.verify_steps": 240.0,
    "spec.windows": 6.0,
    "spec.capped": True,
    "level.concurrency": 128.0,
    "level.running": 48.0,
    "candidate.engine": "sglang",
    "best.measured": True,
    "best.output_tok_s": 2370.0,
    "best.ratio": 0.36,
    "best.ratio_high": 0.40,
    "level.decides": True,
    "level.elapsed_s": 20.0,
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
            {"spec.accept_len_high": 2.92},  # within the 3 % left for noise
            {"spec.verify_steps": 199.0, "spec.accept_len_high": 2.5},  # 200 where less than a fifth is missing
            {"spec.verify_steps": 99.0},  # and 100 where more is
            {"spec.windows": 2.0},
            BROKEN,  # has its own rule and advice
            {"spec.on": False},
        ],
    ),
    "hopeless-at-this-level": (
        {**SPEC, "spec.needed": 4.5, "spec.accept_len_high": 4.6},
        [{"spec.needed": 4.4}, {"spec.verify_steps": 99.0}, {"spec.windows": 2.0}, BROKEN],
    ),
    "too-few-verify-steps": (
        {**SPEC, "spec.verify_steps": 199.0},
        [{"spec.verify_steps": 200.0}, {"spec.accept_len_high": 2.92}, {"spec.on": False}],
    ),
    "acceptance-below-prior": (
        {**SPEC, "best.measured": False},
        [{"best.measured": True}, {"spec.accept_ratio": 0.70}, {"spec.verify_steps": 199.0}],
    ),
    "running-requests-capped": (
        SPEC,
        [{"spec.capped": False}, {"candidate.engine": "vllm"}, {"level.concurrency": 48.0}, {"spec.on": False}],
    ),
    "hopelessly-slower": (
        {**SPEC, "spec.on": False, "level.requests_ok": 128.0},
        [
            {"level.decides": False},
            {"best.ratio_high": 0.75},
            {"level.elapsed_s": 4.9},
            {"level.requests_ok": 127.0},
            {"spec.on": True},  # has rules that say why it is slow
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
    facts: Facts = {**SPEC, "spec.needed": 3.12, "best.ratio_high": 1.0}
    fired = [f for _ in range(3) for f in watch.look("window", facts)]
    assert [(f.rule, f.action) for f in fired] == [
        ("below-break-even", "skip-level"),
        ("running-requests-capped", "propose"),
    ]
    assert fired[1].set == {"args.max-running-requests": 256}


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
