"""`validate`: check files without touching anything."""

from pathlib import Path

import click

from autotuner.cli.common import json_option, print_json
from autotuner.core.candidate import parse_candidates
from autotuner.core.policy import load_policy
from autotuner.core.source import Source, parse
from autotuner.engines import engine_for
from autotuner.errors import InvalidInput, Problem
from autotuner.settings import load_settings, read_source


@click.command()
@click.argument("files", nargs=-1, required=True)
@json_option
@click.pass_context
def validate(ctx: click.Context, files: tuple[str, ...], as_json: bool) -> None:
    """Check candidate, settings and policy FILES; exit code 3 if one is wrong.

    What a file is shows in its content: a settings file has [slots], a policy has [[rule]], all else is a candidate.

    \b
    Examples:
      autotuner validate config.toml
      autotuner validate examples/kimi-k2.5/*.toml policies/*.toml
    """
    problems: list[Problem] = []
    results = []
    for name in files:
        try:
            kind, said = _check(Path(name))
            results.append({"file": name, "kind": kind, "ok": True, "says": said})
        except InvalidInput as error:
            problems += error.problems
            results.append({"file": name, "ok": False, "problems": [str(p) for p in error.problems]})
    if as_json:
        print_json(results)
    else:
        for row in results:
            if row["ok"]:
                click.echo(f"{row['file']}: {row['kind']} ok: {row['says']}")
        for problem in problems:
            click.echo(str(problem), err=True)
    if problems:
        ctx.exit(InvalidInput.exit_code)


def _check(path: Path) -> tuple[str, str]:
    source = read_source(path)
    keys = parse(source)
    if "slots" in keys and "engine" not in keys:
        settings = load_settings(path)
        objectives = "; ".join(f"slot {name}: {settings.objective_of(name)}" for name in settings.slots)
        return "settings", objectives
    if "rule" in keys:
        policy = load_policy(source)
        return "policy", ", ".join(rule.name for rule in policy.rules)
    return "candidate", _check_candidates(source)


def _check_candidates(source: Source) -> str:
    candidates = parse_candidates(source)
    wrong = [
        Problem(source.name, f"{candidate.name}: {said}")
        for candidate in candidates
        for said in engine_for(candidate.engine).check(candidate)
    ]
    if wrong:
        raise InvalidInput(wrong)
    return ", ".join(f"{candidate.name} ({candidate.id})" for candidate in candidates)
