"""`doctor`: look at this host, and say what to do."""

import asyncio
import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from autotuner.cli.common import json_option, print_json
from autotuner.core.doctor import Level, Seen, examine, worst
from autotuner.edge.host_local import LocalHost
from autotuner.edge.store import Store
from autotuner.errors import InvalidInput, NotFound, StoreError
from autotuner.settings import find_settings, load_settings


@click.command()
@click.option("--all", "show_all", is_flag=True, help="Show also what is as it should be.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, show_all: bool, as_json: bool) -> None:
    """Look at this host and say what is wrong and what to do; exit code 1 if there is a problem.

    Units, GPUs, who else holds ports and GPUs, forgotten processes, disk, clock, engines, secret files, the state
    database and the journal. It changes nothing. Run it as the daemon's user.

    \b
    Examples:
      autotuner doctor
      autotuner doctor --all
      autotuner doctor --json | jq '.[] | select(.level != "ok")'
    """
    findings = examine(_seen(ctx))
    level = worst(findings)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            if show_all or finding.level is not Level.OK:
                click.echo(f"{finding.level:8} {finding.about}: {finding.sentence}")
                if finding.do:
                    click.echo(f"         do: {finding.do}")
        fine = sum(finding.level is Level.OK for finding in findings)
        click.echo(f"{len(findings)} findings, {fine} of them ok")
    ctx.exit(1 if level is Level.PROBLEM else 0)


def _seen(ctx: click.Context) -> Seen:
    """Where settings, policies or the database cannot be used, that is the finding: the rest hangs on them."""
    from autotuner.doctor import look

    try:
        settings = load_settings(find_settings(ctx.obj))
    except (InvalidInput, NotFound) as error:
        return Seen(settings_error=str(error))
    with tempfile.TemporaryDirectory() as scratch:
        # Nothing is made on a host that is only looked at: before the daemon's first start the record is an empty one.
        database = settings.database if settings.database.exists() else Path(scratch) / "state.db"
        try:
            store = Store(database)
        except StoreError as error:
            return Seen(record_error=str(error))
        try:
            return asyncio.run(look(settings, store, LocalHost(settings.launches)))
        except (InvalidInput, NotFound) as error:
            return Seen(settings_error=str(error))
        finally:
            store.close()
