"""`diagnose`: read a server's log, metrics or a load generator's output, and say what it amounts to."""

import re
import tomllib
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from autotuner.cli.common import json_option, print_json
from autotuner.engines.context import Context
from autotuner.engines.evidence import gather
from autotuner.engines.reading import judge
from autotuner.engines.vocabulary import CAUSES
from autotuner.errors import InvalidInput, Problem

HEAD_BYTES = 1 << 17  # of a long log: how it started ...
TAIL_BYTES = 1 << 18  # ... and how it is now
EVIDENCE_SHOWN = 6
_ENGINES = (
    ("sglang", re.compile(r"sglang|(?:Decode|Prefill) batch|fired up and ready to roll|server_args=")),
    ("vllm", re.compile(r"vllm|\bEngine \d+: |SpecDecoding metrics|EngineCore|APIServer", re.IGNORECASE)),
    ("llamacpp", re.compile(r"llama|\bslot +\w+|srv +\w+:|draft acceptance")),
)


@click.command()
@click.argument("log", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--engine", metavar="NAME", help="sglang, vllm, llamacpp or other; told from the log unless given.")
@click.option("--know", type=click.Path(exists=True, dir_okay=False), help="A TOML file of what else is known.")
@json_option
def diagnose(log: str, engine: str | None, know: str | None, as_json: bool) -> None:
    """Say what a server's LOG amounts to: its state, the cause, and what to do about it. `-` reads standard input.

    What is known beside the log decides much: whether it is still starting, what load was on it, what was asked for,
    what a plain server does. Write it into a TOML file; docs/diagnosis.md lists the keys.

    \b
    Examples:
      autotuner diagnose server.log
      journalctl -u vllm | autotuner diagnose -
      autotuner diagnose server.log --know facts.toml --json
      printf 'phase = "level"\\nconcurrency = 128\\n' > facts.toml
    """
    text = _text(log)
    name = engine or next((name for name, pattern in _ENGINES if pattern.search(text)), "other")
    evidence = gather(name, "", text, _context(know))
    said = judge(evidence)
    if as_json:
        print_json(
            {
                "engine": name,
                "state": said.state,
                "cause": said.cause,
                "action": said.action,
                "sentence": said.sentence,
                "advice": said.advice,
                "evidence": said.evidence,
                "totals": evidence.totals(),
            }
        )
        return
    click.echo(f"{said.state}: {said.sentence}.")
    click.echo(f"Cause: {said.cause} ({CAUSES[said.cause].meaning})")
    click.echo(f"Do: {said.action}" + (f"; {said.advice}" if said.advice else ""))
    for line in said.evidence[:EVIDENCE_SHOWN]:
        click.echo(f"  | {line[:200]}")


def _text(log: str) -> str:
    with click.open_file(log, "rb") as file:
        data = file.read()
    if len(data) > HEAD_BYTES + TAIL_BYTES:
        head, tail = data[:HEAD_BYTES], data[-TAIL_BYTES:]
        data = head.rpartition(b"\n")[0] + b"\n" + tail.partition(b"\n")[2]
    return bytes(data).decode("utf-8", "replace")


def _context(know: str | None) -> Context:
    if know is None:
        return Context()
    try:
        table: dict[str, Any] = tomllib.loads(Path(know).read_text(encoding="utf-8"))
        return Context.model_validate(table)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput([Problem(know, str(error))]) from error
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise InvalidInput([Problem(know, problem) for problem in problems]) from error
