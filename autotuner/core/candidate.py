"""The candidate file: parse, validate, expand sweeps, canonical form, id.

A candidate is one server configuration. Its id is a hash of what would be launched, so its name, its hypothesis and
the benchmark do not count: two files that launch the same thing are the same candidate.
"""

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from autotuner.core.redact import names_secret, redact_argv, redact_text, shows_secret
from autotuner.core.source import Key, Source, problem_at, validate, wrong_at
from autotuner.errors import InvalidInput, Problem

EngineName = Literal["sglang", "vllm", "llamacpp", "command"]


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL character, which no command line can carry")
    return text


Text = Annotated[str, AfterValidator(_no_nul)]
Scalar = bool | int | float | Text
Flag = Annotated[str, StringConstraints(pattern=r"^-{0,2}[A-Za-z0-9][^\s=\x00]*$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._+=-]{0,119}$"
Name = Annotated[str, StringConstraints(pattern=NAME)]

NAME_MAX = 120
SWEEP_MAX = 256  # candidates from one file; a larger grid is a mistake more often than a wish


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Launch(_Strict):
    """How the server is started: model, program, flags, environment, and how long it may take to come up."""

    model: Text | None = None
    python: Text | None = None
    binary: Text | None = None
    command: tuple[Text, ...] | None = None
    args: dict[Flag, Scalar | tuple[Scalar, ...]] = Field(default_factory=dict)
    env: dict[Variable, Text] = Field(default_factory=dict)
    start_timeout_s: float | None = Field(default=None, gt=0)


class BenchmarkUse(_Strict):
    """Which of the slot's benchmarks this candidate is measured with."""

    use: str


class CandidateFile(_Strict):
    """One candidate file as it is written, before its sweep is expanded."""

    name: Name
    engine: EngineName
    hypothesis: str = ""
    slots: tuple[str, ...] | None = None
    launch: Launch
    sweep: dict[str, tuple[Scalar, ...]] = Field(default_factory=dict)
    benchmark: BenchmarkUse | None = None

    @field_validator("sweep", mode="before")
    @classmethod
    def _dotted_keys_too(cls, value: Any) -> Any:
        """TOML makes a table of the unquoted key `args.tp-size`; it means the same as the quoted one."""
        if not isinstance(value, dict):
            return value
        flat: dict[str, Any] = {}
        for key, inner in value.items():
            flat |= {f"{key}.{name}": v for name, v in inner.items()} if isinstance(inner, dict) else {key: inner}
        return flat

    @model_validator(mode="after")
    def _engine_has_what_it_needs(self) -> Self:
        if self.engine == "command" and not self.launch.command:
            raise wrong_at(("launch",), 'engine "command" needs launch.command, the argv of a server')
        if self.engine != "command" and self.launch.command:
            raise wrong_at(("launch", "command"), f'is for engine "command", not "{self.engine}"')
        if self.launch.binary and self.engine not in {"llamacpp", "vllm"}:
            raise ValueError(f'launch.binary is for engines "llamacpp" and "vllm"; "{self.engine}" has no use for it')
        if self.engine != "command" and not self.launch.model:
            raise wrong_at(("launch",), f'engine "{self.engine}" needs launch.model')
        return self


class Candidate(_Strict):
    """One server configuration to try; everything but the sweep, which is already expanded."""

    name: str
    engine: EngineName
    hypothesis: str = ""
    slots: tuple[str, ...] | None = None
    launch: Launch
    benchmark: str | None = None

    @property
    def canonical(self) -> str:
        """The JSON text whose hash is the id: engine and launch, flags in one spelling, values as argv has them."""
        launch = self.launch.model_dump(mode="json", exclude={"start_timeout_s", "args"}, exclude_none=True)
        launch["args"] = {
            flag_name(key): value is not False and _words(value) for key, value in self.launch.args.items()
        }
        return json.dumps({"engine": self.engine, "launch": launch}, sort_keys=True, separators=(",", ":"))

    @property
    def id(self) -> str:
        """The candidate's identity: 16 hex digits of the SHA-256 of its canonical form."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:16]

    def unknown_slots(self, known: Collection[str]) -> tuple[str, ...]:
        """Given the slots that there are, return those that the candidate names besides."""
        return tuple(name for name in self.slots or () if name not in known)

    def arg(self, *names: str) -> Scalar | tuple[Scalar, ...] | None:
        """Given the spellings of one flag, return its value, or None where it is not set."""
        wanted = {flag_name(name) for name in names}
        return next((value for key, value in self.launch.args.items() if flag_name(key) in wanted), None)


def flag_name(key: str) -> str:
    """Given a flag in any spelling (`--tp_size`, `tp-size`), return the one used in canonical forms: `tp-size`."""
    return key.lstrip("-").replace("_", "-")


def flag_argv(args: dict[str, Scalar | tuple[Scalar, ...]]) -> tuple[str, ...]:
    """Given the args table, return argv words: true is a bare flag, false leaves it out, a list repeats the values."""
    words: list[str] = []
    for key, value in args.items():
        flag = key if key.startswith("-") else f"--{key}"
        if value is not False:
            words += [flag, *_words(value)]
    return tuple(words)


def parse_candidates(source: Source) -> tuple[Candidate, ...]:
    """Given a candidate file, return its candidates, one unless it sweeps. Raise InvalidInput naming every problem."""
    file = validate(CandidateFile, source)
    problems = [*_secret_problems(source, file), *_doubled_problems(source, file), *_sweep_problems(source, file)]
    if problems:
        raise InvalidInput(problems)
    if not file.sweep:
        return (_candidate(file, file.name, file.launch),)
    keys = list(file.sweep)
    expanded = []
    for values in itertools.product(*file.sweep.values()):
        settings = dict(zip(keys, values, strict=True))
        expanded.append(_candidate(file, _sweep_name(file.name, settings), with_settings(file.launch, settings)))
    return _told_apart({candidate.id: candidate for candidate in expanded}.values())


def with_settings(launch: Launch, settings: dict[str, Scalar]) -> Launch:
    """Given a launch and dotted settings (`args.tp-size`, `env.NCCL_ALGO`, `model`), return the launch with them."""
    table: dict[str, Any] = launch.model_dump()
    for key, value in settings.items():
        group, _, name = key.partition(".")
        if not name:
            table[group] = value
            continue
        stale = [old for old in table[group] if group == "args" and flag_name(old) == flag_name(name)]
        for old in stale:
            del table[group][old]
        table[group][name] = _word(value) if group == "env" else value
    return Launch.model_validate(table)


def setting_problem(key: str, values: tuple[Scalar, ...]) -> str:
    """Given a dotted setting and values for it, return why a candidate cannot be changed by it; empty if it can."""
    group, _, name = key.partition(".")
    if not ((group in {"args", "env"} and name) or key in {"model", "python", "binary"}):
        return 'is none of "args.<flag>", "env.<NAME>", "model", "python" and "binary"'
    if names_secret(name) or any(redact_text(_word(value)) != _word(value) for value in values):
        return "looks like a secret, which candidate files must not hold"
    for value in values:
        try:
            with_settings(Launch(), {key: value})
        except ValidationError as error:
            return f"cannot be {value!r}: {error.errors()[0]['msg']}"
    return ""


def merged_json(text: str, changes: dict[str, Any]) -> str | None:
    """Given a JSON object in a string and keys to set, None to take one out, return the string with them.

    None where the text is no JSON object. The other keys stay as they are.
    """
    try:
        table = json.loads(text)
    except ValueError:
        return None
    if not isinstance(table, dict):
        return None
    return json.dumps({key: value for key, value in {**table, **changes}.items() if value is not None})


def derive(
    candidate: Candidate, settings: dict[str, Scalar], hypothesis: str, label: dict[str, Scalar] | None = None
) -> Candidate:
    """Given a candidate and dotted settings to change, return the changed candidate under a name that says so.

    A flag that is set to false is taken out, so that the result is the candidate that never had it. `label` is what the
    name says instead of the settings, where those would not read well.
    """
    launch = with_settings(candidate.launch, settings)
    out = {flag_name(key.removeprefix("args.")) for key, value in settings.items() if value is False}
    args = {key: value for key, value in launch.args.items() if value is not False or flag_name(key) not in out}
    launch = launch.model_copy(update={"args": args})
    name = _sweep_name(candidate.name, label or settings)
    return candidate.model_copy(update={"name": name, "launch": launch, "hypothesis": hypothesis})


def to_toml(candidate: Candidate) -> str:
    """Given a candidate, return it as a candidate file that launches the same thing; sweeps are already expanded."""
    launch = candidate.launch.model_dump(mode="json", exclude_none=True)
    table: dict[str, Any] = {"name": candidate.name, "engine": candidate.engine}
    if candidate.hypothesis:
        table["hypothesis"] = candidate.hypothesis
    if candidate.slots:
        table["slots"] = list(candidate.slots)
    table["launch"] = {key: value for key, value in launch.items() if value != {}}
    if candidate.benchmark:
        table["benchmark"] = {"use": candidate.benchmark}
    return tomli_w.dumps(table)


def _candidate(file: CandidateFile, name: str, launch: Launch) -> Candidate:
    use = file.benchmark.use if file.benchmark else None
    return Candidate(
        name=name, engine=file.engine, hypothesis=file.hypothesis, slots=file.slots, launch=launch, benchmark=use
    )


def _told_apart(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Give names that several share, being cut or alike but for their signs, a piece of their identity."""
    found = tuple(candidates)
    count = Counter(candidate.name for candidate in found)
    return tuple(
        candidate.model_copy(update={"name": f"{candidate.name[: NAME_MAX - 5]}-{candidate.id[:4]}"})
        if count[candidate.name] > 1
        else candidate
        for candidate in found
    )


def _sweep_name(name: str, settings: dict[str, Scalar]) -> str:
    parts = [name]
    for key, value in settings.items():
        short = flag_name(key.partition(".")[2] or key)
        said = _word(value).replace("^", "not-")  # how NCCL's lists exclude
        parts.append("-".join(re.sub(r"[^A-Za-z0-9._=-]+", "-", text).strip("-") for text in (short, said)))
    return "+".join(parts)[:NAME_MAX]


def _words(value: Scalar | tuple[Scalar, ...]) -> list[str]:
    """The words that follow a flag: none after a bare one."""
    if value is True:
        return []
    return [_word(v) for v in (value if isinstance(value, tuple) else (value,))]


def _word(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _secret_problems(source: Source, file: CandidateFile) -> list[Problem]:
    """A candidate file is kept in the store and shown in the journal, so a secret has no place in it."""
    hint = "put the path of a file that holds it under [slots.<name>.secret_files] in the settings"
    launch = file.launch
    found: list[Key] = [
        ("launch", key) for key in ("model", "python", "binary") if _is_secret(key, getattr(launch, key) or "")
    ]
    if launch.command and redact_argv(launch.command) != launch.command:
        found.append(("launch", "command"))
    found += [("launch", "args", key) for key, value in launch.args.items() if _is_secret(key, *_words(value))]
    found += [("launch", "env", key) for key, value in launch.env.items() if _is_secret(key, value)]
    message = "looks like a secret, which candidate files must not hold"
    problems = [problem_at(source, path, message, hint) for path in found]
    # The file is kept as a whole: what stands in a comment or a hypothesis would be, too.
    lines = [n for n, line in enumerate(source.text.splitlines(), 1) if shows_secret(line)]
    said = {problem.line for problem in problems}
    return problems + [Problem(source.name, message, line, hint=hint) for line in lines if line not in said]


def _is_secret(name: str, *values: str) -> bool:
    return names_secret(name) or any(redact_text(value) != value for value in values)


def _doubled_problems(source: Source, file: CandidateFile) -> list[Problem]:
    """`tp-size` and `tp_size` are one flag: with both, what is launched and what is compared could differ."""
    problems = []
    tables: list[tuple[Key, list[str]]] = [
        (("launch", "args"), list(file.launch.args)),
        (("sweep",), [key for key in file.sweep if key.startswith("args.")]),
    ]
    for path, keys in tables:
        first: dict[str, str] = {}
        for key in keys:
            other = first.setdefault(flag_name(key.removeprefix("args.")), key)
            if other != key:
                problems.append(problem_at(source, (*path, key), f"is the same flag as {other}"))
    return problems


def _sweep_problems(source: Source, file: CandidateFile) -> list[Problem]:
    problems = []
    count = 1
    for key, values in file.sweep.items():
        count *= max(len(values), 1)
        path: Key = ("sweep", key)
        why = setting_problem(key, values)
        if why:
            problems.append(problem_at(source, path, f"cannot be swept: {why}"))
        if not values:
            problems.append(problem_at(source, path, "has no values to sweep over"))
    if count > SWEEP_MAX:
        problems.append(
            problem_at(source, ("sweep",), f"makes {count} candidates; {SWEEP_MAX} is the most one file may")
        )
    return problems
