"""The command line: one file a group of commands, imported only when a command of it is used."""

import importlib
import sys
from typing import Any

import click

from autotuner.errors import AutotunerError

# command -> module of autotuner.cli that defines it
COMMANDS = {
    "bench": "benching",
    "campaign": "importing",
    "compare": "reading",
    "daemon": "daemon",
    "demo": "demo",
    "diagnose": "diagnosing",
    "doctor": "doctoring",
    "enqueue": "queueing",
    "export": "exporting",
    "hosts": "hosts",
    "journal": "journal",
    "pause": "control",
    "policies": "policies",
    "proposals": "proposals",
    "queue": "queueing",
    "rehearse": "rehearsing",
    "restore-best": "control",
    "resume": "control",
    "show": "reading",
    "simulate": "simulating",
    "status": "status",
    "stop": "control",
    "validate": "validating",
    "why": "reading",
}
SUMMARIES = {
    "bench": "Measure any server at a URL, alone.",
    "campaign": "Import figures or logs from elsewhere as a recorded campaign.",
    "compare": "Set the measurements of candidates side by side.",
    "daemon": "Work the queue until told to end.",
    "demo": "Run a whole campaign on a real small server, here and now.",
    "diagnose": "Say what a server's log amounts to: state, cause, what to do.",
    "doctor": "Look at this host, and say what is wrong and what to do.",
    "enqueue": "Put candidate files into the queue.",
    "export": "Write a trial's measurements as JSON, CSV, or vLLM's or SGLang's result file.",
    "hosts": "Set up, list and try other machines over SSH, their keys pinned.",
    "journal": "Show, follow, seal or verify the journal, or compute its verdicts again.",
    "pause": "Begin nothing new, or keep the daemon's hands off a slot.",
    "policies": "List, explain and try the stop rules.",
    "proposals": "List what rules proposed, and what became of it.",
    "queue": "List, move or cancel what waits.",
    "rehearse": "Run candidates and policies through the daemon against a server that only pretends.",
    "restore-best": "Put the best-known server back, now.",
    "resume": "Go on after a pause or a stop.",
    "show": "Show everything about one trial.",
    "simulate": "Try the stop rules on campaigns of simulated servers, in virtual time.",
    "status": "Say what is serving, what is being tried, and what waits.",
    "stop": "Stop the server of a slot on purpose, and keep it stopped.",
    "validate": "Check candidate, settings and policy files without touching anything.",
    "why": "Explain the last decision, or the one about a candidate.",
}


class LazyGroup(click.Group):
    """Loads a command's module only when the command is called, so that `--help` is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUMMARIES:
            return None
        module = importlib.import_module(f"autotuner.cli.{COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUMMARIES[name]) for name in self.list_commands(ctx)])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        name = args[0] if args else ""
        if name and name not in SUMMARIES and not name.startswith("-"):
            near = difflib.get_close_matches(name, list(SUMMARIES), n=1)
            ctx.fail(f"There is no command {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Turn our own errors into one clear message and their exit code."""
        try:
            return super().main(*args, **kwargs)
        except AutotunerError as error:
            click.echo(f"autotuner: {error}", err=True)
            sys.exit(error.exit_code)
        except BrokenPipeError:
            sys.exit(0)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--settings", "-s", metavar="FILE", help="Settings file; else $AUTOTUNER_SETTINGS, then the usual places."
)
@click.version_option(package_name="autotunerd", prog_name="autotuner")
@click.pass_context
def main(ctx: click.Context, settings: str | None) -> None:
    """Tune LLM servers unattended, keep the best-known one serving, write down why.

    \b
    Start here:
      autotuner demo                      a whole campaign on this machine, no GPU needed
      autotuner validate examples/*.toml  check files without touching anything
      autotuner rehearse examples/*.toml  run them against a server that only pretends, no GPU needed
      autotuner enqueue config.toml       queue a candidate; the daemon works it
      autotuner bench http://host:8000    measure any server, alone
      autotuner status                    what serves, what is tried, what waits
      autotuner journal tail              the last decisions, explained

    Exit codes: 0 done, 2 wrong command line, 3 a file is wrong, 4 refused, 5 not found, 6 another daemon owns the
    state, 7 the host failed, 8 the journal does not verify, 9 degraded, 10 waited in vain, 1 anything else.

    Shell completion: eval "$(_AUTOTUNER_COMPLETE=bash_source autotuner)" (or zsh_source, fish_source).
    """
    ctx.obj = settings
