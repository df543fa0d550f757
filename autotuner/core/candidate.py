"""The candidate file: parse, validate, expand sweeps, canonical form, id.

A candidate is one server configuration. Its id is a hash of what would be launched, so its name, its hypothesis and
the benchmark do not count: two files that launch the same thing are the same candidate.
"""

import hashlib
import itertools
import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from autotuner.core.redact import names_secret
from autotuner.core.source import Key, Source, problem_at, validate
from autotuner.errors import InvalidInput, Problem

EngineName = Literal["sglang", "vllm", "llamacpp", "command"]
Scalar = bool | int | float | str
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+=-]{0,119}$")]

SWEEP_MAX = 256  # candidates from one file; a larger grid is a mistake more often than a wish


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Launch(_Strict):
    """How the server is started: model, program, flags, environment, and how long it may take to come up."""

    model: str | None = None
    python: str | None = None
    binary: str | None = None
    command: tuple[str, ...] | None = None
    args: dict[str, Scalar | tuple[Scalar, ...]] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
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

    @model_validator(mode="after")
    def _engine_has_what_it_needs(self) -> Self:
        if self.engine == "command" and not self.launch.command:
            raise ValueError('engine "command" needs launch.command, the argv of a server')
        if self.engine != "command" and self.launch.command:
            raise ValueError(f'launch.command is for engine "command", not "{self.engine}"')
        if self.engine != "command" and not self.launch.model:
            raise ValueError(f'engine "{self.engine}" needs launch.model')
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
        """The JSON text whose hash is the id: engine and launch, flags in one spelling, keys sorted."""
        launch = self.launch.model_dump(mode="json", exclude={"start_timeout_s"}, exclude_none=True)
        launch["args"] = {flag_name(key): value for key, value in launch["args"].items()}
        return json.dumps({"engine": self.engine, "launch": launch}, sort_keys=True, separators=(",", ":"))

    @property
    def id(self) -> str:
        """The candidate's identity: 16 hex digits of the SHA-256 of its canonical form."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:16]

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
        if value is True:
            words.append(flag)
        elif value is not False:
            values = value if isinstance(value, tuple) else (value,)
            words += [flag, *(_word(v) for v in values)]
    return tuple(words)


def parse_candidates(source: Source) -> tuple[Candidate, ...]:
    """Given a candidate file, return its candidates, one unless it sweeps. Raise InvalidInput naming every problem."""
    file = validate(CandidateFile, source)
    problems = [*_secret_problems(source, file), *_sweep_problems(source, file)]
    if problems:
        raise InvalidInput(problems)
    if not file.sweep:
        return (_candidate(file, file.name, file.launch),)
    keys = list(file.sweep)
    expanded = []
    for values in itertools.product(*file.sweep.values()):
        settings = dict(zip(keys, values, strict=True))
        expanded.append(_candidate(file, _sweep_name(file.name, settings), with_settings(file.launch, settings)))
    return tuple({candidate.id: candidate for candidate in expanded}.values())


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


def derive(candidate: Candidate, settings: dict[str, Scalar], hypothesis: str) -> Candidate:
    """Given a candidate and dotted settings to change, return the changed candidate under a name that says so."""
    launch = with_settings(candidate.launch, settings)
    name = _sweep_name(candidate.name, settings)
    return candidate.model_copy(update={"name": name, "launch": launch, "hypothesis": hypothesis})


def _candidate(file: CandidateFile, name: str, launch: Launch) -> Candidate:
    use = file.benchmark.use if file.benchmark else None
    return Candidate(
        name=name, engine=file.engine, hypothesis=file.hypothesis, slots=file.slots, launch=launch, benchmark=use
    )


def _sweep_name(name: str, settings: dict[str, Scalar]) -> str:
    parts = [name]
    for key, value in settings.items():
        short = flag_name(key.partition(".")[2] or key)
        parts.append(f"{short}-{re.sub(r'[^A-Za-z0-9._=-]+', '-', _word(value)).strip('-')}")
    return "+".join(parts)[:120]


def _word(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _secret_problems(source: Source, file: CandidateFile) -> list[Problem]:
    """A candidate file is kept in the store and shown in the journal, so a secret has no place in it."""
    hint = "put the path of a file that holds it under [slots.<name>.secret_files] in the settings"
    tables: list[tuple[str, dict[str, Any]]] = [("args", file.launch.args), ("env", dict(file.launch.env))]
    return [
        problem_at(source, ("launch", table, key), "looks like a secret, which candidate files must not hold", hint)
        for table, values in tables
        for key in values
        if names_secret(key)
    ]


def _sweep_problems(source: Source, file: CandidateFile) -> list[Problem]:
    problems = []
    count = 1
    for key, values in file.sweep.items():
        count *= max(len(values), 1)
        path: Key = ("sweep", key)
        group, _, name = key.partition(".")
        if not ((group in {"args", "env"} and name) or key in {"model", "python", "binary"}):
            hint = 'write "args.<flag>", "env.<NAME>", "model", "python" or "binary"'
            problems.append(problem_at(source, path, "cannot be swept", hint))
        elif names_secret(name):
            problems.append(problem_at(source, path, "looks like a secret, which candidate files must not hold"))
        if not values:
            problems.append(problem_at(source, path, "has no values to sweep over"))
    if count > SWEEP_MAX:
        problems.append(
            problem_at(source, ("sweep",), f"makes {count} candidates; {SWEEP_MAX} is the most one file may")
        )
    return problems
