"""`python -m autotuner.engines.check DIR`: hold the readers against a folder of cases, for people who add some.

A case is a TOML file: `engine`, `version`, `log` and `[context]` are given to the reader, nothing else; `checkable`
names which of state, cause, action and figures of `[expect]` are compared. Figures pass within 1 %, every one listed.
"""

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from autotuner.engines.context import Context
from autotuner.engines.evidence import gather
from autotuner.engines.figures import Figures
from autotuner.engines.reading import judge

WITHIN = 0.01
KINDS = ("state", "cause", "action", "figures")


@dataclass(frozen=True)
class Answer:
    """What the reader makes of a case: the three words, and all figures as `lineN_name` and `total_name`."""

    state: str
    cause: str
    action: str
    figures: Figures


def answer(case: dict[str, Any]) -> Answer:
    """Given a case, return what the reader says of it; raise ValidationError for a context it does not know."""
    log = str(case["log"])
    if case.get("log_escaped"):
        log = log.replace("\\x1b", "\x1b").replace("\\r", "\r")
    context = Context.model_validate(case.get("context", {}))
    evidence = gather(str(case["engine"]), str(case["version"]), log, context)
    found: Figures = {f"total_{name}": value for name, value in evidence.totals().items()}
    for line in evidence.lines:
        found |= {f"line{line.number}_{name}": value for name, value in line.figures.items()}
    verdict = judge(evidence)
    return Answer(verdict.state.value, verdict.cause, verdict.action.value, found)


def misses(case: dict[str, Any]) -> dict[str, str]:
    """Given a case, return what it expects and the reader does not say, by kind; empty if all is as expected."""
    try:
        said = answer(case)
    except ValidationError as error:
        return dict.fromkeys(case["checkable"], f"its context is not understood: {error.errors()[0]['loc']}")
    expected = case["expect"]
    found = {}
    for kind in case["checkable"]:
        if kind == "figures":
            wrong = [
                f"{name} is {value}, read {said.figures.get(name)}"
                for name, value in expected.get("figures", {}).items()
                if not _equal(value, said.figures.get(name))
            ]
            if wrong:
                found[kind] = "; ".join(wrong)
        elif getattr(said, kind) != expected[kind]:
            found[kind] = f"expected {expected[kind]}, read {getattr(said, kind)}"
    return found


def check(folder: Path) -> int:
    """Given a folder of cases, print the misses and the score; return how many were missed."""
    right = dict.fromkeys(KINDS, 0)
    asked = dict.fromkeys(KINDS, 0)
    for path in sorted(folder.glob("*.toml")):
        case = tomllib.loads(path.read_text(encoding="utf-8"))
        wrong = misses(case)
        for kind in case["checkable"]:
            asked[kind] += 1
            right[kind] += kind not in wrong
        for kind, why in wrong.items():
            click.echo(f"{path.stem}: {kind}: {why}")
    for kind in KINDS:
        click.echo(f"{kind} {right[kind]}/{asked[kind]}")
    return sum(asked.values()) - sum(right.values())


def _equal(expected: Any, found: Any) -> bool:
    if isinstance(expected, str) or found is None or isinstance(found, str):
        return bool(expected == found)
    return bool(abs(found - expected) <= WITHIN * abs(expected) + 1e-12)


def main() -> None:
    """Check the folder named on the command line."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        click.echo("usage: python -m autotuner.engines.check FOLDER-OF-CASES", err=True)
        sys.exit(2)
    sys.exit(1 if check(Path(sys.argv[1])) else 0)


if __name__ == "__main__":
    main()
