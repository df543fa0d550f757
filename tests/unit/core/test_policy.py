"""Stop rules are data: checked when they are read, never fired by what is not known, and looked at in a row."""

import dataclasses
import hashlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.core.policy import (
    FACT_BY_NAME,
    FACTS,
    MOMENTS,
    Facts,
    Fired,
    Policy,
    Rule,
    Watch,
    built_in,
    fill,
    holding,
    holds,
    load_policy,
    used_facts,
)
from autotuner.core.source import Source
from autotuner.core.state import Verdict
from autotuner.errors import InvalidInput, Problem

TEXT = """\
description = "House rules"

[[rule]]
name = "slow"
on = "window"
when = '''
level.running > 4 &&
  best.ratio < 0.5
'''
looks = 3
action = "skip-level"
sentence = "Slow: {best.ratio:.2f} at {level.concurrency:.0f}"
advice = "{candidate.engine}"
"""


def rule(when: str, **more: Any) -> Rule:
    return Rule(**{"name": "r", "on": "window", "when": when, "action": "abandon", "sentence": "s", **more})


def policy(*rules: Rule, file: str = "p.toml") -> Policy:
    return Policy(file, "0" * 64, "", rules)


def written(
    when: str = "level.running > 1", sentence: str = "s", action: str = "abandon", on: str = "window", more: str = ""
) -> str:
    return (
        f'description = "d"\n\n[[rule]]\nname = "r"\non = "{on}"\nwhen = \'{when}\'\naction = "{action}"\n'
        f"sentence = '{sentence}'\n{more}\n"
    )


def problems(text: str) -> list[Problem]:
    with pytest.raises(InvalidInput) as caught:
        load_policy(Source("p.toml", text))
    return caught.value.problems


def only(text: str) -> str:
    (problem,) = problems(text)
    return str(problem)


# --- reading


def test_a_good_file_is_read_with_its_hash_and_its_facts() -> None:
    found = load_policy(Source("p.toml", TEXT))
    assert (found.file, found.text) == ("p.toml", TEXT)
    assert found.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    assert used_facts(found.rules[0]) == ("best.ratio", "level.running")


@pytest.mark.parametrize(
    ("when", "says"),
    [
        ("level.running >", "p.toml:6: rule[0].when: not a CEL expression: cannot be read here: level.running > ^"),
        ("level.running > 1 )", "p.toml:6: rule[0].when: not a CEL expression"),
        ("", "p.toml:6: rule[0].when: not a CEL expression"),
        ("(" * 1500 + "true" + ")" * 1500, "p.toml:6: rule[0].when: not a CEL expression: nested too deeply"),
        ("level.runing > 1", "p.toml:6: rule[0].when: there is no fact called level.runing (did you mean level.running?)"),
        ("bogus > 1", "p.toml:6: rule[0].when: there is no fact called bogus (list them"),
        ("spec.on && spek.needed > 1", "p.toml:6: rule[0].when: there is no fact called spek.needed (did you mean spec.needed?)"),
        ('level.running > "a"', "p.toml:6: rule[0].when: types do not fit"),
        ("spec.on > 1", "p.toml:6: rule[0].when: types do not fit"),
        ("server.cause == 1", "p.toml:6: rule[0].when: types do not fit: a text and a number do not go together here"),
        ("server.cause == true", "p.toml:6: rule[0].when: types do not fit: a text and true or false"),
        ("1 < spec.on", "p.toml:6: rule[0].when: types do not fit: a number and true or false"),
        ("spec.on + 1 > 2", "p.toml:6: rule[0].when: types do not fit"),
        ("spec.on && level.running", "p.toml:6: rule[0].when: types do not fit: a number where true or false is needed"),
        ("true || level.running", "p.toml:6: rule[0].when: types do not fit: a number where true or false is needed"),
        ("level.running ? true : false", "p.toml:6: rule[0].when: types do not fit"),
        ('spec.on || level.running < "a"', "p.toml:6: rule[0].when: types do not fit"),
        ('spec.on && level.running < "a"', "p.toml:6: rule[0].when: types do not fit"),
        ("level.running", "p.toml:6: rule[0].when: must be true or false, not a number or a text"),
        ("server.cause", "p.toml:6: rule[0].when: must be true or false, not a number or a text"),
        ("start.elapsed_s > 1", 'p.toml:6: rule[0].when: start.elapsed_s is never known at the moment "window"'),
    ],
)  # fmt: skip
def test_a_condition_that_cannot_work_is_found_when_the_file_is_read_with_its_line(when: str, says: str) -> None:
    assert only(written(when)).startswith(says)


def test_a_syntax_error_inside_a_long_condition_has_its_own_line() -> None:
    bad = TEXT.replace("best.ratio < 0.5", "best.ratio <")
    (problem,) = problems(bad)
    assert problem.line == 8
    assert problems(bad.replace("level.running > 4 &&", "level.running > 4 )"))[0].line == 7


@pytest.mark.parametrize(
    ("when", "line"),
    [
        ("'''\nlevel.running >'''", 7),
        ('"""\nlevel.running >"""', 7),
        ("'''\r\nlevel.running >'''", 7),
        ("'''  \nlevel.running > 4 )'''", 7),
        ("'''level.running >'''", 6),
        ('"""level.running >"""', 6),
        ("'''level.running > 4\n)'''", 7),
    ],
    ids=["single", "double", "crlf", "blanks", "one-line-single", "one-line-double", "second-line"],
)
def test_the_line_of_a_syntax_error_is_right_however_the_condition_is_quoted(when: str, line: int) -> None:
    (problem,) = problems(written("WHEN").replace("'WHEN'", when))
    assert (problem.line, problem.key) == (line, "rule[0].when")


def test_a_condition_whose_place_in_the_file_cannot_be_told_is_still_refused() -> None:
    (problem,) = problems(
        'description = "d"\n"r\\u0075le" = [{name = "r", on = "window", when = "level.running >", '
        'action = "abandon", sentence = "s"}]\n'
    )
    assert (problem.line, problem.key) == (None, "rule[0].when")


def test_a_fact_of_another_moment_is_refused_with_those_that_are_known_then() -> None:
    (problem,) = problems(written("level.running > 1", on="start"))
    assert problem.hint == "known then: server.*, start.*"
    assert problem.line == 6


@pytest.mark.parametrize(
    ("sentence", "says"),
    [
        ("{level.runing}", "there is no fact called level.runing (did you mean level.running?)"),
        ("{level.running", "a brace is out of place"),
        ("level.running}", "a brace is out of place"),
        ("{}", "there is no fact called "),
        ("{level.running:.2q}", "'.2q' formats no number"),
        ("{level.running:{x}}", "'{x}' formats no number"),
    ],
)
def test_a_sentence_that_could_not_be_filled_in_is_found_when_the_file_is_read(sentence: str, says: str) -> None:
    assert only(written(sentence=sentence)).startswith(f"p.toml:8: rule[0].sentence: {says}")
    (problem,) = problems(written(more=f"advice = '{sentence}'"))
    assert (problem.line, problem.key) == (9, "rule[0].advice")
    assert says in str(problem)


def test_a_format_that_fits_no_number_is_answered_with_one_that_does() -> None:
    assert problems(written(sentence="{level.running:.2q}"))[0].hint == "as in :.2f"


def test_the_advice_is_checked_even_where_the_sentence_is_broken() -> None:
    text = written(sentence="{level.running", more="advice = '{level.runing} {bogus:.2q} {level.running:.2q}'")
    assert [p.key for p in problems(text)] == ["rule[0].sentence", *["rule[0].advice"] * 3]


@pytest.mark.parametrize(
    ("on", "action"),
    [("start", "skip-level"), ("window", "pause"), ("level", "extend"), ("next", "abandon"), ("trial", "propose")],
)
def test_an_action_that_would_silently_do_nothing_is_refused(on: str, action: str) -> None:
    message = only(written("true", on=on, action=action))
    assert message.startswith(
        f'p.toml:7: rule[0].action: "{action}" does nothing at the moment "{on}" (possible then: '
    )


@pytest.mark.parametrize(("on", "action"), [(on, a) for on, (obeyed, _) in MOMENTS.items() for a in sorted(obeyed)])
def test_every_action_that_a_moment_obeys_can_be_written_for_it(on: str, action: str) -> None:
    more = 'set = { "args.x" = 1 }' if action == "propose" else ""
    (found,) = load_policy(Source("p.toml", written("true", on=on, action=action, more=more))).rules
    assert (found.on, found.action) == (on, action)


def test_an_action_of_another_moment_is_answered_with_those_that_work() -> None:
    assert (
        problems(written("true", on="start", action="extend"))[0].hint == "possible then: abandon, propose, quarantine"
    )


@pytest.mark.parametrize(
    ("action", "more", "at", "says"),
    [
        ("propose", "", "p.toml:7: rule[0].action: ", "go together"),
        ("abandon", 'set = { "args.x" = 1 }', "p.toml:7: rule[0].action: ", "go together"),
        ("propose", 'set = { "foo.x" = 1 }', "p.toml:9: rule[0].set.foo.x: ", "is none of"),
        ("abandon", 'move = "graphs-on"', "p.toml:7: rule[0].action: ", "go together"),
        ("propose", 'move = "graphs-off"', "p.toml:9: rule[0].move: ", "is not one of them (did you mean graphs-on?)"),
        ("propose", 'move = "graphs-on"\nset = { "args.x" = 1 }', "p.toml:", "both say what to change"),
        ("propose", 'set = { "env.A-B" = 1 }', "p.toml:9: rule[0].set.env.A-B: ", "cannot be 1"),
        ("propose", 'set = { "env.HF_TOKEN" = "x" }', "p.toml:9: rule[0].set.env.HF_TOKEN: ", "looks like a secret"),
        ("propose", 'set = { "model" = 1 }', "p.toml:9: rule[0].set.model: ", "cannot be 1"),
    ],
)
def test_a_proposal_that_could_not_be_queued_is_refused_with_its_place(
    action: str, more: str, at: str, says: str
) -> None:
    told = only(written(action=action, more=more))
    assert told.startswith(at)
    assert says in told


def test_a_second_rule_of_one_name_is_refused() -> None:
    assert only(TEXT + TEXT.partition("\n\n")[2]).startswith("p.toml:15: rule[1].name: a second rule is called slow")


def test_an_unknown_key_or_word_names_the_nearest_right_one() -> None:
    assert only(written(more="lookz = 3")) == "p.toml:9: rule[0].lookz: unknown key (did you mean looks?)"
    assert only(written(action="abandom")).endswith("'abandom' is not one of them (did you mean abandon?)")
    assert only('colour = "red"\n' + written()).startswith("p.toml:1: colour: unknown key")


@pytest.mark.parametrize(("looks", "fits"), [(0, False), (1, True), (1000, True), (1001, False)])
def test_a_rule_is_looked_at_once_to_a_thousand_times(looks: int, fits: bool) -> None:
    text = written(more=f"looks = {looks}")
    if fits:
        assert load_policy(Source("p.toml", text)).rules[0].looks == looks
    else:
        assert only(text).startswith("p.toml:9: rule[0].looks: ")


@pytest.mark.parametrize(
    ("name", "fits"),
    [("a", True), ("4-gpus", True), ("x" * 64, True), ("x" * 65, False), ("", False), ("-a", False), ("A", False), ("a b", False)],
    ids=["short", "digit", "longest", "too-long", "empty", "dash", "capital", "blank"],
)  # fmt: skip
def test_a_rules_name_is_a_word_that_fits_a_command_line(name: str, fits: bool) -> None:
    text = written().replace('name = "r"', f'name = "{name}"')
    if fits:
        assert load_policy(Source("p.toml", text)).rules[0].name == name
    else:
        assert only(text).startswith("p.toml:4: rule[0].name: ")


def test_all_mistakes_of_a_file_are_told_at_once() -> None:
    text = (
        written("level.runing > 1", sentence="{nope}")
        + '\n[[rule]]\nname = "r2"\non = "window"\n'
        + ("when = 'level.running'\naction = \"pause\"\nsentence = 's'\n")
    )
    assert [p.key for p in problems(text)] == [
        "rule[0].when", "rule[0].sentence", "rule[1].when", "rule[1].action",
    ]  # fmt: skip


@pytest.mark.parametrize("when", ["true", "!spec.on", 'server.cause.startsWith("o")', 'server.cause in ["crash", "hang"]',
                                  "level.requests_failed / level.requests_ok > 0.1", "spec.on ? best.ratio > 1 : false"])  # fmt: skip
def test_what_cel_offers_may_be_used(when: str) -> None:
    assert load_policy(Source("p.toml", f'description="d"\n[[rule]]\nname="r"\non="window"\nwhen=\'\'\'{when}\'\'\'\n'
                                        "action='abandon'\nsentence='s'\n")).rules  # fmt: skip


# --- facts


def test_every_fact_has_a_kind_a_meaning_and_a_moment_at_which_it_is_known() -> None:
    known = set().union(*(groups for _, groups in MOMENTS.values()))
    assert len(FACT_BY_NAME) == len(FACTS)
    for fact in FACTS:
        assert fact.kind in {float, bool, str}
        assert fact.meaning
        assert fact.absent
        assert fact.name.partition(".")[0] in known


def test_a_missing_fact_never_fires_a_rule() -> None:
    assert holds(rule("level.running > 1"), {"level.running": 2.0})
    for when in (
        "level.running > 1",
        "level.running <= 1",
        "!(level.running > 1)",
        "spec.on || level.running > 1",
        "true || spec.on",
    ):
        assert not holds(rule(when), {}), when
    assert not holds(rule("spec.on || level.running > 1"), {"spec.on": True})


@given(st.dictionaries(st.sampled_from(["level.running", "best.ratio", "spec.on"]), st.just(1.0)))
def test_a_rule_is_looked_at_only_when_all_it_names_is_known(facts: Facts) -> None:
    known = {**facts, "spec.on": True} if "spec.on" in facts else facts
    fires = holds(rule("spec.on && level.running >= 1 && best.ratio >= 1"), known)
    assert fires is (len(facts) == 3)


@given(st.floats(-1e6, 1e6), st.integers(-1000, 1000))
def test_numbers_compare_as_decimals_whether_written_with_a_point_or_not(value: float, limit: int) -> None:
    for text in (str(limit), f"{limit}.0"):
        assert holds(rule(f"level.running > {text}"), {"level.running": value}) is (value > limit)


def test_texts_and_truths_compare_as_such() -> None:
    assert holds(rule("server.cause == 'crash' && !server.alive"), {"server.cause": "crash", "server.alive": False})
    assert not holds(rule("server.cause == 'crash' && !server.alive"), {"server.cause": "hang", "server.alive": False})


# --- looks


def looks_that_fire(held: list[bool], looks: int) -> list[int]:
    watch = Watch((policy(rule("level.running > 1", looks=looks)),))
    return [i for i, up in enumerate(held) if watch.look("window", {"level.running": 2.0 if up else 0.0})]


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_a_rule_fires_once_at_the_last_of_its_looks_in_a_row(held: list[bool], looks: int) -> None:
    expected, run = [], 0
    for i, up in enumerate(held):
        run = run + 1 if up else 0
        if run == looks:
            expected.append(i)
    assert looks_that_fire(held, looks) == expected


def test_a_look_at_which_a_fact_is_missing_breaks_the_row() -> None:
    watch = Watch((policy(rule("level.running > 1", looks=2)),))
    facts: list[Facts] = [{"level.running": 2.0}, {}, {"level.running": 2.0}, {"level.running": 2.0}]
    assert [len(watch.look("window", f)) for f in facts] == [0, 0, 0, 1]


def test_looks_of_another_moment_neither_count_nor_break_the_row() -> None:
    watch = Watch((policy(rule("level.running > 1", looks=2)),))
    up: Facts = {"level.running": 2.0}
    assert watch.look("window", up) == ()
    assert watch.look("level", {}) == ()
    assert len(watch.look("window", up)) == 1


def test_rules_of_one_name_in_two_files_count_for_themselves() -> None:
    one, two = rule("level.running > 1", looks=2), rule("level.running > 5", looks=2)
    watch = Watch((policy(one, file="a.toml"), policy(two, file="b.toml")))
    watch.look("window", {"level.running": 2.0})
    assert [f.file for f in watch.look("window", {"level.running": 9.0})] == ["a.toml"]
    assert [f.file for f in watch.look("window", {"level.running": 9.0})] == ["b.toml"]


def test_the_same_looks_fire_the_same_rules_again() -> None:
    facts: list[Facts] = [{"level.running": float(i % 4), "best.ratio": 0.1} for i in range(30)]
    policies = (load_policy(Source("p.toml", TEXT)), policy(rule("level.running >= 2", looks=2)))

    def replay() -> list[tuple[Fired, ...]]:
        watch = Watch(policies)
        return [watch.look("window", f) for f in facts]

    first = replay()
    assert first == replay()
    assert any(first)


# --- what a fired rule carries


def test_a_fired_rule_carries_its_words_its_numbers_and_its_hash() -> None:
    loaded = load_policy(Source("p.toml", TEXT))
    facts: Facts = {
        "level.running": 8.0,
        "best.ratio": 0.256,
        "level.concurrency": 8.0,
        "candidate.engine": "vllm",
        "spec.on": True,
    }
    watch = Watch((loaded,))
    (fired,) = [f for _ in range(3) for f in watch.look("window", facts)]
    assert fired.sentence == "Slow: 0.26 at 8"
    assert fired.advice == "vllm"
    assert fired.condition == "level.running > 4 && best.ratio < 0.5"
    assert (fired.rule, fired.file, fired.sha256, fired.looks) == ("slow", "p.toml", loaded.sha256, 3)
    assert (fired.action, fired.verdict, fired.dry_run) == ("skip-level", Verdict.FAIL, False)
    assert fired.facts == {k: v for k, v in facts.items() if k != "spec.on"}, "what it used and what it says, no more"
    assert Fired.model_validate_json(fired.model_dump_json()) == fired


def test_a_fact_without_bound_is_still_there_when_a_fired_rule_is_read_again() -> None:
    (found,) = holding((policy(rule("best.ratio > 1")),), "window", {"best.ratio": math.inf})
    assert Fired.model_validate_json(found.model_dump_json()).facts == {"best.ratio": math.inf}
    assert found.advice == "", "a rule without advice gives none"


def test_a_dry_run_says_that_it_is_one() -> None:
    watch = Watch((policy(rule("true", dry_run=True)), policy(rule("true"), file="q.toml")))
    assert [f.dry_run for f in watch.look("window", {})] == [True, False]


def test_a_sentence_says_unknown_for_what_is_not_known() -> None:
    assert fill(
        "{level.running:.1f} of {level.concurrency:.0f}, {server.cause:.1f}",
        {"level.running": 2.0, "server.cause": "x"},
    ) == ("2.0 of unknown, x")
    assert fill("{{no field}} {spec.on}", {"spec.on": True}) == "{no field} True"


def test_a_number_without_a_format_is_written_in_full() -> None:
    assert fill("{level.running} run", {"level.running": 2.25}) == "2.25 run"


def test_what_holds_now_is_told_however_long_it_has_held() -> None:
    rules = policy(
        rule("budget.trials_left <= 0", on="next", looks=9, name="n"), rule("budget.trials_left <= 0", on="trial")
    )
    assert [f.rule for f in holding((rules,), "next", {"budget.trials_left": 0.0})] == ["n"]
    assert holding((rules,), "next", {"budget.trials_left": 1.0}) == ()
    assert holding((rules,), "next", {}) == ()


def test_an_end_that_no_rule_named_still_reads_like_a_rule() -> None:
    found = built_in("could-not-measure", "The disk is full", Verdict.ERROR, "free some")
    assert (found.action, found.verdict, found.condition, found.advice) == ("abandon", Verdict.ERROR, "", "free some")
    assert (found.rule, found.file, found.sha256) == ("could-not-measure", "(built in)", ""), "of no file"
    assert built_in("x", "s", Verdict.ERROR).advice == "", "nothing is advised that nobody thought of"


def test_facts_are_frozen_definitions() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FACTS[0].name = "x"  # type: ignore[misc]
