"""`daemon`: work the queue until told to end."""

import asyncio
import sys

import click

from autotuner.settings import find_settings


@click.command()
@click.option("--log-format", type=click.Choice(["auto", "json", "console"]), default="auto", show_default=True)
@click.option("--debug", is_flag=True, help="Log more.")
@click.pass_context
def daemon(ctx: click.Context, log_format: str, debug: bool) -> None:
    """Work the queue until told to end.

    SIGTERM ends the daemon in seconds and leaves the serving server alone. SIGHUP reads settings and policies again.

    \b
    Examples:
      autotuner --settings /etc/autotuner/autotuner.toml daemon
      systemctl start autotuner
    """
    from autotuner import log
    from autotuner.daemon import Daemon

    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    log.configure(as_json=as_json, debug=debug)
    path = find_settings(ctx.obj)

    async def work() -> None:
        service = Daemon(path)
        try:
            await service.run()
        finally:
            service.close()

    asyncio.run(work())
