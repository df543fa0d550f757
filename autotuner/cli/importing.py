"""`campaign`: make a recorded campaign out of a table of figures, or of servers' logs with a client's results."""

import fnmatch
from pathlib import Path

import click

from autotuner.errors import NotFound, Refused


@click.group()
def campaign() -> None:
    """Recorded campaigns: what was measured elsewhere or by hand, to try stop rules on."""


@campaign.command("import")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The new folder.")
@click.option(
    "--candidate",
    "candidates",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A candidate file that goes with a table's rows of the same name; may be given several times.",
)
@click.option("--engine", metavar="NAME", help="The engine whose logs these are; sglang if none is named.")
@click.option("--only", multiple=True, metavar="GLOB", help="Only logs of these names; may be given several times.")
@click.option("--first", metavar="NAME", help="The run or config to begin with: the others are compared with it.")
@click.option("--description", default="", help="One line on what this is.")
def import_(
    source: Path,
    out: Path,
    candidates: tuple[Path, ...],
    engine: str | None,
    only: tuple[str, ...],
    first: str | None,
    description: str,
) -> None:
    """Make a recorded campaign in DIR out of SOURCE, then try rules on it with `autotuner policies test --campaign DIR`.

    SOURCE is a CSV table with the columns config, level (concurrency) and output_tok_s, and optionally engine, accept_len,
    num_steps, running, queued, requests_failed, ttft_p50_ms, ttft_p99_ms, tpot_p50_ms, tpot_p99_ms, void and note; or a folder
    with NAME.log (a server's whole output) and NAME.json (its args, env, ready_s, exit, and points: concurrency, requests,
    wall_s, output_tokens) for each run. Candidates go in the order of the table, or of the names; the first one that works is
    what the others are compared with. Logs are kept as they are: look through them for secrets.

    \b
    Examples:
      autotuner campaign import figures.csv --candidate base.toml --candidate eagle3.toml --out my-campaign
      autotuner campaign import recordings/ --only 'big-*' --first big-base --out my-campaign
    """
    from autotuner.edge.campaigns import import_logs, import_table, recorded_names
    from autotuner.engines import ENGINES

    about = description or f"imported from {source.name}"
    if source.is_file():
        if engine or only:
            raise click.UsageError("--engine and --only are for logs; a table has a column engine, and the rows it has")
        made = import_table(source, candidates, first, out, about)
    else:
        if candidates:
            raise click.UsageError("--candidate is for tables; what a log is of stands in its NAME.json")
        engine = engine or "sglang"
        if engine not in ENGINES:
            raise NotFound(f"there is no engine called {engine}; known: {', '.join(ENGINES)}")
        found = recorded_names(source)
        names = [name for name in found if not only or any(fnmatch.fnmatch(name, glob) for glob in only)]
        if first is not None and first not in names:
            raise NotFound(f"there is no run called {first}; found: {', '.join(names) or 'none'}")
        if not names:
            raise Refused(f"{source} has no run with both NAME.log and NAME.json")
        names.sort(key=lambda name: name != first)
        made = import_logs(source, engine, names, out, about)
    count = f"{len(made.trials)} candidate{'s' if len(made.trials) > 1 else ''}"
    click.echo(
        f"{out}: {count} at concurrency {', '.join(map(str, made.levels))}; "
        f"try rules on it: autotuner policies test --campaign {out}"
    )
