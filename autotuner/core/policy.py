"""policies/*.toml -> rules; and the evaluation of a rule over named facts, with the numbers it used.

A condition is a CEL expression over the facts of the table below. A missing fact never fires a rule. The shipped rules
have no privileges.
"""

import hashlib
import string
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from autotuner.core import condition
from autotuner.core.candidate import setting_problem
from autotuner.core.condition import ConditionError, compiled, evaluate, misfit
from autotuner.core.source import Key, Source, line_of, lines_of, nearest, problem_at, validate
from autotuner.core.state import Verdict
from autotuner.errors import InvalidInput, Problem

Facts = condition.Facts
When = Literal["start", "window", "level", "next", "trial"]
RuleAction = Literal["abandon", "skip-level", "void", "extend", "settle", "quarantine", "propose", "pause"]
# What a rule may propose by name; what each comes to is worked out in core/followups.py.
Move = Literal[
    "lift-running-cap",
    "raise-graph-batch",
    "graphs-on",
    "tune-draft-tokens",
    "no-speculation-above",
    "memory-down",
    "memory-up",
    "replace-flag",
]


@dataclass(frozen=True)
class FactDefinition:
    """A fact that conditions may use: its type, unit, meaning, and when it is absent."""

    name: str
    kind: type[float] | type[bool] | type[str]
    unit: str
    meaning: str
    absent: str = "never, where the rule is looked at"


FACTS: tuple[FactDefinition, ...] = (
    FactDefinition("server.alive", bool, "", "the server's process lives"),
    FactDefinition("server.exit_code", float, "", "its exit code, negative for a signal", "while it lives"),
    FactDefinition("server.cause", str, "", "why it ended, a word of the closed list", "while it lives"),
    FactDefinition("server.sentence", str, "", "the same in one sentence", "while it lives"),
    FactDefinition("start.stage", str, "", "the stage the start has reached", "once it serves"),
    FactDefinition("start.elapsed_s", float, "s", "time since the launch", "once it serves"),
    FactDefinition("start.limit_s", float, "s", "the longest this start may take", "once it serves"),
    FactDefinition("start.silent_s", float, "s", "time without any sign of progress", "once it serves"),
    FactDefinition("start.silence_limit_s", float, "s", "the longest silence allowed in this stage", "once it serves"),
    FactDefinition("trial.elapsed_s", float, "s", "time since the trial was taken in hand"),
    FactDefinition("trial.levels_done", float, "", "levels of the benchmark that are measured"),
    FactDefinition("trial.baseline", bool, "", "it measures the best-known itself"),
    FactDefinition(
        "level.name", str, "", "the level as sentences name it: concurrency 8, 2.5 req/s", "outside a level"
    ),
    FactDefinition("level.concurrency", float, "requests", "requests kept in flight", "the levels are rates"),
    FactDefinition("level.request_rate", float, "req/s", "requests sent a second", "the levels are no request rates"),
    FactDefinition("level.elapsed_s", float, "s", "steady time measured so far in this level", "outside a level"),
    FactDefinition("level.load_s", float, "s", "time since this level's load began", "outside a level"),
    FactDefinition(
        "level.decides",
        bool,
        "",
        "its output rate weighs in the objective, and the best-known keeps the limits",
        "outside a level",
    ),
    FactDefinition("level.in_flight", float, "requests", "requests sent and not answered yet", "before the load began"),
    FactDefinition(
        "level.answered_ratio", float, "", "answered / sent requests of late", "no request rate, or too early"
    ),
    FactDefinition("level.answered_ratio_high", float, "", "its upper bound", "no request rate, or too early"),
    FactDefinition("level.queued", float, "requests", "requests that wait in the server", "server does not tell"),
    FactDefinition("level.running", float, "requests", "requests that run, median", "server does not tell"),
    FactDefinition(
        "level.running_cap", float, "requests", "the most requests that the server runs at once", "server does not tell"
    ),
    FactDefinition(
        "level.graph_max_batch",
        float,
        "requests",
        "largest batch with a CUDA graph, over all ranks; 0 without graphs",
        "server does not tell",
    ),
    FactDefinition(
        "level.preempted", float, "requests", "requests put back for want of KV cache", "before a window is over"
    ),
    FactDefinition("level.silent_s", float, "s", "time without a token or a word of work", "nothing waits, or its end"),
    FactDefinition("level.silence_limit_s", float, "s", "the longest such silence", "as level.silent_s"),
    FactDefinition("level.requests_ok", float, "requests", "requests answered in this level", "outside a level"),
    FactDefinition("level.requests_failed", float, "requests", "requests that failed", "outside a level"),
    FactDefinition("level.failed_ratio", float, "", "failed / finished requests", "before the first one finished"),
    FactDefinition("level.output_tok_s", float, "tok/s", "output rate over the steady part", "before it began"),
    FactDefinition("level.output_tok_s_high", float, "tok/s", "its upper bound", "before enough was measured"),
    FactDefinition("level.rate_error", float, "", "half its 95 % bounds / the rate", "too early, or at a rate"),
    FactDefinition("level.launch_noise", float, "", "relative standard deviation between launches", "outside a level"),
    FactDefinition("level.prompts", float, "requests", "distinct prompts begun in the steady part", "outside a level"),
    FactDefinition(
        "level.client_limited",
        bool,
        "",
        "the benchmark client was the limit, known at the level's end",
        "outside a level",
    ),
    FactDefinition("level.ttft_p99_ms", float, "ms", "time to the first token, p99", "before the level's end, or void"),
    FactDefinition("level.tpot_p99_ms", float, "ms", "time per output token, p99", "before the level's end, or void"),
    FactDefinition("candidate.engine", str, "", "sglang, vllm, llamacpp or command", "outside a level"),
    FactDefinition(
        "candidate.effective_differences",
        float,
        "",
        "settings in force that differ from what was asked",
        "server does not tell",
    ),
    FactDefinition("best.measured", bool, "", "the best-known was measured at this level", "outside a level"),
    FactDefinition("best.output_tok_s", float, "tok/s", "the best-known's rate at this level", "not measured"),
    FactDefinition(
        "best.answered_ratio", float, "", "the best-known's, at its level's end", "no request rate, or unknown"
    ),
    FactDefinition(
        "best.ratio",
        float,
        "",
        "this candidate's rate / the best-known's",
        "either is not measured; the best-known itself is measured; before the end of a level that is a rate",
    ),
    FactDefinition("best.ratio_low", float, "", "its lower bound, launch noise included", "as its mean, or too early"),
    FactDefinition("best.ratio_high", float, "", "its upper bound, launch noise included", "as its mean, or too early"),
    FactDefinition(
        "objective.score_high",
        float,
        "",
        "upper bound of the whole score against the best-known's",
        "before every other level that weighs is measured, or not measured on both sides; as best.ratio",
    ),
    FactDefinition(
        "objective.latency_counts", bool, "", "goodput, or a limit on TTFT or TPOT, decides", "outside a level"
    ),
    FactDefinition("objective.failed_requests_max", float, "requests", "failed requests allowed", "outside a level"),
    FactDefinition("objective.ttft_p99_ms_max", float, "ms", "the limit on TTFT p99", "no such limit"),
    FactDefinition("objective.tpot_p99_ms_max", float, "ms", "the limit on TPOT p99", "no such limit"),
    FactDefinition("objective.single_stream_ratio_min", float, "", "the floor for level 1", "no such floor"),
    FactDefinition("spec.on", bool, "", "the candidate speculates", "outside a level"),
    FactDefinition("spec.accept_len", float, "tokens", "tokens a verify step, bonus included", "not reported yet"),
    FactDefinition("spec.accept_len_low", float, "tokens", "its lower bound", "before enough was measured"),
    FactDefinition("spec.accept_len_high", float, "tokens", "its upper bound", "before enough was measured"),
    FactDefinition("spec.needed", float, "tokens", "break-even accept length", "no baseline was measured"),
    FactDefinition(
        "spec.needed_low", float, "tokens", "its lower bound, all noise included", "as its mean, or too early"
    ),
    FactDefinition(
        "spec.needed_high", float, "tokens", "its upper bound, all noise included", "as its mean, or too early"
    ),
    FactDefinition(
        "spec.needed_prior",
        float,
        "tokens",
        "what published rows need at this depth and batch",
        "a baseline was measured",
    ),
    FactDefinition("spec.speedup", float, "", "accept length / the needed one", "no baseline was measured"),
    FactDefinition("spec.speedup_low", float, "", "its lower bound, all noise included", "as its mean, or too early"),
    FactDefinition("spec.speedup_high", float, "", "its upper bound, all noise included", "as its mean, or too early"),
    FactDefinition("spec.ceiling", float, "tokens", "longest accept length possible", "depth not fixed"),
    FactDefinition("spec.tree", bool, "", "drafts branch (top-k above 1) instead of a chain", "outside a level"),
    FactDefinition(
        "spec.best_depth",
        float,
        "tokens",
        "another number of draft tokens, the best by prediction",
        "no spec.needed, or a tree",
    ),
    FactDefinition(
        "spec.predicted_gain", float, "", "its predicted rate / the measured one, less 1", "as spec.best_depth"
    ),
    FactDefinition("spec.predicted_ratio", float, "", "its predicted rate / a plain server's", "as spec.best_depth"),
    FactDefinition(
        "spec.pays_up_to",
        float,
        "requests",
        "largest level of this trial at which speculation paid",
        "none paid so far",
    ),
    FactDefinition(
        "spec.loses_from", float, "requests", "least level of this trial at which speculation lost", "none lost so far"
    ),
    FactDefinition("spec.accept_ratio", float, "", "accepted / drafted tokens", "not reported"),
    FactDefinition("spec.verify_steps", float, "", "verify steps counted (one request, one step)", "outside a level"),
    FactDefinition("spec.windows", float, "", "steady windows counted", "outside a level"),
    FactDefinition("spec.capped", bool, "", "fewer run than the level offers, while some wait", "not known"),
    FactDefinition("budget.gpu_hours_left", float, "h", "left of the campaign's GPU hours", "no such budget"),
    FactDefinition("budget.trials_left", float, "", "left of the campaign's trials", "no such budget"),
    FactDefinition("budget.deadline_s", float, "s", "until the campaign's deadline", "no such budget"),
)
FACT_BY_NAME = {fact.name: fact for fact in FACTS}


ENDS_LEVEL = frozenset({"abandon", "quarantine", "skip-level", "void"})
_OF_LEVEL = ENDS_LEVEL | {"propose"}
_LEVEL_FACTS = frozenset({"trial", "candidate", "level", "best", "objective", "spec"})
# What a rule can do at each moment, and the groups of facts that are known then: anything else would silently never
# happen, so it is refused when the file is read.
MOMENTS: dict[When, tuple[frozenset[str], frozenset[str]]] = {
    "start": (frozenset({"abandon", "quarantine", "propose"}), frozenset({"server", "start"})),
    "window": (_OF_LEVEL | {"extend", "settle"}, _LEVEL_FACTS | {"server"}),
    "level": (_OF_LEVEL, _LEVEL_FACTS),
    "next": (frozenset({"pause"}), frozenset({"budget"})),
    "trial": (frozenset({"pause"}), frozenset({"budget"})),
}


class Rule(BaseModel):
    """One stop rule: when it is looked at, its condition, for how many looks in a row, what it does, what it says.

    `on` is the moment: `start` while a server comes up, `window` while a level runs, `level` at a level's end, `next`
    before a trial is begun, `trial` while one is in hand.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")
    on: When
    when: str
    looks: int = Field(default=1, ge=1, le=1000)
    action: RuleAction
    verdict: Verdict = Verdict.FAIL
    sentence: str
    advice: str = ""
    set: dict[str, bool | int | float | str] = Field(default_factory=dict)
    move: Move | None = None
    dry_run: bool = False


class PolicyFile(BaseModel):
    """A file of rules."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str
    rule: tuple[Rule, ...]


@dataclass(frozen=True)
class Policy:
    """A policy file that was read and checked; `sha256` is of its text and goes into each entry that names a rule."""

    file: str
    sha256: str
    text: str
    rules: tuple[Rule, ...]


class Fired(BaseModel):
    """A rule that fired: which, what it does, its words with the numbers filled in, and every fact it used."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    rule: str
    file: str
    sha256: str
    condition: str
    action: RuleAction
    verdict: Verdict
    sentence: str
    advice: str = ""
    looks: int = 1
    facts: dict[str, bool | float | str] = Field(default_factory=dict)
    set: dict[str, bool | int | float | str] = Field(default_factory=dict)
    move: Move | None = None
    dry_run: bool = False


def load_policy(source: Source) -> Policy:
    """Given a policy file, return it checked: syntax, facts and types. Raise InvalidInput naming every problem."""
    file = validate(PolicyFile, source)
    problems: list[Problem] = []
    names = [rule.name for rule in file.rule]
    for index, rule in enumerate(file.rule):
        if names.index(rule.name) != index:
            problems.append(problem_at(source, ("rule", index, "name"), f"a second rule is called {rule.name}"))
        problems += _condition_problems(source, index, rule)
        problems += _sentence_problems(source, index, rule)
        problems += _action_problems(source, index, rule)
    if problems:
        raise InvalidInput(problems)
    return Policy(source.name, hashlib.sha256(source.text.encode()).hexdigest(), source.text, file.rule)


def holds(rule: Rule, facts: Facts) -> bool:
    """Given a rule and the facts known, tell whether its condition holds; false if it uses a fact that is missing."""
    return all(name in facts for name in used_facts(rule)) and evaluate(rule.when, facts)


def used_facts(rule: Rule) -> tuple[str, ...]:
    """Given a rule, return the names of the facts in its condition, sorted."""
    return compiled(rule.when).facts


class Watch:
    """Looks at facts again and again, and counts for how many looks in a row each rule's condition has held.

    The only state is those counts, so a replay over the same facts fires the same rules at the same look.
    """

    def __init__(self, policies: tuple[Policy, ...]) -> None:
        self._rules = [(policy, rule) for policy in policies for rule in policy.rules]
        self._held: dict[tuple[str, str], int] = {}

    def look(self, on: When, facts: Facts) -> tuple[Fired, ...]:
        """Given a moment and its facts, return the rules that fire now, in the order of the files and rules."""
        fired = []
        for policy, rule in self._rules:
            if rule.on != on:
                continue
            key = (policy.file, rule.name)
            self._held[key] = self._held.get(key, 0) + 1 if holds(rule, facts) else 0
            if self._held[key] == rule.looks:
                fired.append(_fired(policy, rule, facts))
        return tuple(fired)


def fill(sentence: str, facts: Facts) -> str:
    """Given a sentence with `{fact}` or `{fact:.2f}` fields, return it filled in; an absent fact reads `unknown`."""
    parts = []
    for literal, name, form, _ in string.Formatter().parse(sentence):
        parts.append(literal)
        if name is not None:
            value = facts.get(name)
            parts.append(
                "unknown" if value is None else format(value, (form or "") if isinstance(value, float) else "")
            )
    return "".join(parts)


def holding(policies: tuple[Policy, ...], on: When, facts: Facts) -> tuple[Fired, ...]:
    """Given a moment and its facts, return the rules whose condition holds now, however long it has held."""
    return tuple(
        _fired(policy, rule, facts)
        for policy in policies
        for rule in policy.rules
        if rule.on == on and holds(rule, facts)
    )


def built_in(name: str, sentence: str, verdict: Verdict, advice: str = "") -> Fired:
    """Given what happened where no rule named it, return it as if a rule had: a trial cannot go on either way."""
    return Fired(
        rule=name,
        file="(built in)",
        sha256="",
        condition="",
        action="abandon",
        verdict=verdict,
        sentence=sentence,
        advice=advice,
    )


def _fired(policy: Policy, rule: Rule, facts: Facts) -> Fired:
    fields = [name for _, name, _, _ in string.Formatter().parse(rule.sentence + rule.advice) if name]
    if "level.name" in fields:  # words for one of two numbers
        fields = [name for name in fields if name != "level.name"] + ["level.concurrency", "level.request_rate"]
    shown = {name: facts[name] for name in (*used_facts(rule), *fields) if name in facts}
    return Fired(
        rule=rule.name,
        file=policy.file,
        sha256=policy.sha256,
        condition=" ".join(rule.when.split()),
        action=rule.action,
        verdict=rule.verdict,
        sentence=fill(rule.sentence, facts),
        advice=fill(rule.advice, facts),
        looks=rule.looks,
        facts=shown,
        set=dict(rule.set),
        move=rule.move,
        dry_run=rule.dry_run,
    )


def _condition_problems(source: Source, index: int, rule: Rule) -> list[Problem]:
    """Syntax first, then the names of facts, then types."""
    where = ("rule", index, "when")
    try:
        used = compiled(rule.when).facts
    except ConditionError as error:
        at = _first_line(source, where)
        line = at + error.line - 1 if at is not None else None
        return [Problem(source.name, f"not a CEL expression: {error}", line, f"rule[{index}].when")]
    unknown = [name for name in used if name not in FACT_BY_NAME]
    if unknown:
        hint = nearest(unknown[0], list(FACT_BY_NAME)) or "list them: autotuner policies facts"
        return [problem_at(source, where, f"there is no fact called {unknown[0]}", hint)]
    groups = MOMENTS[rule.on][1]
    absent = [name for name in used if name.partition(".")[0] not in groups]
    if absent:
        message = f'{absent[0]} is never known at the moment "{rule.on}", so the rule could not fire'
        return [problem_at(source, where, message, f"known then: {', '.join(f'{g}.*' for g in sorted(groups))}")]
    said = misfit(rule.when, {name: FACT_BY_NAME[name].kind for name in used})
    return [problem_at(source, where, said)] if said else []


def _first_line(source: Source, path: Key) -> int | None:
    """The line on which a key's text begins: TOML drops a line break right after the quotes that open it."""
    line = line_of(lines_of(source.text), path)
    if line is None:
        return None
    written = source.text.split("\n")[line - 1].rstrip("\r")
    return line + 1 if written.endswith(('"""', "'''")) and written.count(written[-3:]) == 1 else line


def _sentence_problems(source: Source, index: int, rule: Rule) -> list[Problem]:
    problems = []
    for key, text in (("sentence", rule.sentence), ("advice", rule.advice)):
        try:
            fields = [(name, form or "") for _, name, form, _ in string.Formatter().parse(text) if name is not None]
        except ValueError as error:
            problems.append(problem_at(source, ("rule", index, key), f"a brace is out of place: {error}"))
            continue
        for name, form in fields:
            if name not in FACT_BY_NAME:
                hint = nearest(name, list(FACT_BY_NAME))
                problems.append(problem_at(source, ("rule", index, key), f"there is no fact called {name}", hint))
            elif not _is_number_format(form):
                problems.append(problem_at(source, ("rule", index, key), f"{form!r} formats no number", "as in :.2f"))
    return problems


def _is_number_format(form: str) -> bool:
    try:
        format(1.0, form)
    except ValueError:
        return False
    return True


def _action_problems(source: Source, index: int, rule: Rule) -> list[Problem]:
    actions = MOMENTS[rule.on][0]
    if rule.action not in actions:
        message = f'"{rule.action}" does nothing at the moment "{rule.on}"'
        hint = f"possible then: {', '.join(sorted(actions))}"
        return [problem_at(source, ("rule", index, "action"), message, hint)]
    if (rule.action == "propose") != (bool(rule.set) or rule.move is not None):
        message = 'action "propose" and what to change, the table "set" or a "move", go together'
        return [problem_at(source, ("rule", index, "action"), message, f"moves: {', '.join(get_args(Move))}")]
    if rule.set and rule.move is not None:
        message = '"set" and "move" both say what to change; keep one'
        return [problem_at(source, ("rule", index, "action"), message)]
    return [
        problem_at(source, ("rule", index, "set", key), why)
        for key, value in rule.set.items()
        if (why := setting_problem(key, (value,)))
    ]
