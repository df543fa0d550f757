"""Flags of a candidate against a program's own `--help`: abbreviations, spellings, renamed and removed ones. Pure."""

import re
from dataclasses import dataclass, field

from autotuner.core.candidate import Candidate, flag_name
from autotuner.core.source import nearest
from autotuner.engines.base import flags_in_help
from autotuner.engines.renamed import Renamed, older_name, renamed
from autotuner.engines.version import within

_ARGPARSE = ("sglang", "vllm")
_ARGPARSE_SAYS = "show this help message and exit"
# Only where a description begins so: further in, it may be about a value or about another flag.
_REMOVED = re.compile(
    r"^\W*(?:NOTE:\s*)?(?:\[?removed\b|(?:the argument|this (?:argument|flag|option)|--\S+) (?:has been|was|is) removed)",
    re.IGNORECASE,
)
_DEPRECATED = re.compile(r"^\W*(?:NOTE:\s*)?(?:\[?deprecated\b|\S+ is deprecated)", re.IGNORECASE)
_DEFINITION_INDENT_MAX = 4  # descriptions stand far to the right of it
_NOTE_MAX = 200


@dataclass(frozen=True)
class Help:
    """The flags a program has. `removed` and `deprecated` map a flag to the program's own words about it.

    `abbreviates` tells whether a unique beginning stands for the whole flag, `underscores` whether `_` stands for `-`.
    """

    flags: frozenset[str]
    removed: dict[str, str] = field(default_factory=dict)
    deprecated: dict[str, str] = field(default_factory=dict)
    abbreviates: bool = False
    underscores: bool = False


@dataclass(frozen=True)
class Findings:
    """What was found: `problems` keep a candidate from running, `warnings` are said and let through."""

    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __add__(self, other: "Findings") -> "Findings":
        """Both together, each sentence once."""
        problems = dict.fromkeys((*self.problems, *other.problems))
        return Findings(tuple(problems), tuple(dict.fromkeys((*self.warnings, *other.warnings))))


def read_help(engine: str, text: str) -> Help:
    """Given the text of a program's `--help`, return its flags and what it says of the old ones."""
    flags: set[str] = set()
    removed: dict[str, str] = {}
    deprecated: dict[str, str] = {}
    for names, said in _definitions(text):
        flags |= names
        if _REMOVED.search(said):
            removed |= dict.fromkeys(names, said[:_NOTE_MAX])
        elif _DEPRECATED.search(said):
            deprecated |= dict.fromkeys(names, said[:_NOTE_MAX])
    argparse = engine in _ARGPARSE or _ARGPARSE_SAYS in text
    underscores = engine == "vllm" or not argparse  # vLLM's parser turns them into dashes, llama-server's too
    found = flags if len(flags) > 1 else flags_in_help(text)  # a help without lines of definitions
    return Help(frozenset(found), removed, deprecated, argparse, underscores)


def against_help(candidate: Candidate, known: Help, version: str | None, program: str) -> Findings:
    """Given a candidate and its program's help, return what the program would refuse or reads otherwise."""
    findings = Findings()
    for key in candidate.launch.args:
        findings += _check(candidate.engine, key, known, version, program)
    return findings


def without_help(candidate: Candidate, version: str | None) -> Findings:
    """Given a candidate whose program cannot be asked, return what the table of renamed flags has to say."""
    warnings = []
    for key in candidate.launch.args:
        row = renamed(candidate.engine, flag_name(key))
        if row is None or (version is not None and not within(version, row.since or row.gone, "")):
            continue
        warnings.append(f"args.{key} {_became(row, flag_name(key))}")
    return Findings(warnings=tuple(warnings))


def _check(engine: str, key: str, known: Help, version: str | None, program: str) -> Findings:
    flag = _word(engine, key, known)
    name = flag_name(flag)
    if flag in known.removed:
        row = renamed(engine, name)
        hint = f"; {_became(row, name)}" if row else ""
        return Findings((f"args.{key}: {program} does not take {flag} any more: {known.removed[flag]}{hint}",))
    if flag in known.flags:
        return Findings(warnings=_old_name(engine, key, flag, known, version))
    row = renamed(engine, name)
    if row is not None and (not row.new or f"--{row.successor(name)}" in known.flags):
        return Findings((f"args.{key}: {program} has no flag {flag}; it {_became(row, name)}",))
    for old in older_name(engine, name):
        if f"--{old.predecessor(name)}" in known.flags:
            came = f" came with {old.since}" if old.since else " is newer"
            return Findings(
                (f"args.{key}: {program} calls it --{old.predecessor(name)} in this version; {flag}{came}",)
            )
    return _abbreviated(key, flag, known, program)


def _abbreviated(key: str, flag: str, known: Help, program: str) -> Findings:
    dashes = f"--{flag_name(flag)}"
    if flag.startswith("--") and flag != dashes and dashes in known.flags:
        return Findings((f"args.{key}: {program} has no flag {flag}; it is spelt {dashes} there",))
    meant = sorted(f for f in known.flags if f.startswith(flag)) if known.abbreviates and flag.startswith("--") else []
    if len(meant) == 1:
        said = (
            f"args.{key}: {flag} is taken as an abbreviation of {meant[0]}; write that, another version may refuse it"
        )
        return Findings(warnings=(said,))
    if meant:
        shown = ", ".join(meant[:6]) + (", …" if len(meant) > 6 else "")
        return Findings((f"args.{key}: {flag} is ambiguous, {program} would refuse it: it could mean {shown}",))
    hint = nearest(flag, sorted(known.flags))
    return Findings((f"args.{key}: {program} has no flag {flag}" + (f"; {hint}" if hint else ""),))


def _word(engine: str, key: str, known: Help) -> str:
    """The flag as the program looks it up."""
    flag = key if key.startswith("-") else f"--{key}"
    if engine == "vllm":
        flag = flag.partition(".")[0]  # --speculative-config.num_speculative_tokens sets a key of a flag's JSON
        if re.fullmatch(r"-O\d", flag):
            return "-O" if "-O" in known.flags else "--optimization-level"
    if known.underscores and flag not in known.flags and flag.startswith("--"):
        return f"--{flag_name(flag)}"
    return flag


def _old_name(engine: str, key: str, flag: str, known: Help, version: str | None) -> tuple[str, ...]:
    row = renamed(engine, flag_name(flag))
    if row is not None and row.new:
        new = f"--{row.successor(flag_name(flag))}"
        if new in known.flags and (flag in known.deprecated or (row.since and within(version, row.since, ""))):
            gone = f", which is gone in {row.gone}" if row.gone else ""
            return (f"args.{key} is an old name{gone}; write {new}" + (f": {row.advice}" if row.advice else ""),)
    if flag in known.deprecated:
        return (f"args.{key} is deprecated, says the program: {known.deprecated[flag]}",)
    return ()


def _became(row: Renamed, name: str) -> str:
    new = row.successor(name)
    when = f" ({row.when})" if row.when else ""
    what = f"is called --{new} now{when}" if new else f"was removed{when}"
    return what + (f"; {row.advice}" if row.advice else "")


def _definitions(text: str) -> list[tuple[frozenset[str], str]]:
    """Each definition of a help text: the flags in front, and the description beside and below them."""
    found: list[tuple[frozenset[str], str]] = []
    for line in text.expandtabs().splitlines():
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if stripped.startswith("-") and indent <= _DEFINITION_INDENT_MAX:
            head, _, said = re.sub(r"(?<![,\s])\s{2,}", "\n", stripped, count=1).partition("\n")
            if names := flags_in_help(head):
                found.append((names, said))
        elif found and stripped and indent > _DEFINITION_INDENT_MAX:
            names, said = found[-1]
            found[-1] = (names, f"{said} {stripped}".strip())
    return found
