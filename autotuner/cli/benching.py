"""`bench`: measure any server at a URL, alone: no settings, no daemon, nothing recorded but what is asked for."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from autotuner.bench.benchmark import Benchmark, level_name
from autotuner.bench.export import FORMATS, Measured, exported
from autotuner.bench.measurement import GoodputLimits
from autotuner.bench.placement import checked
from autotuner.cli.benchtable import levels_table
from autotuner.cli.common import json_option, print_json, user_cache
from autotuner.cli.exporting import write
from autotuner.core.remarks import in_words, level_remarks, prompts_remark
from autotuner.errors import HostError

KEY_VARIABLE = "AUTOTUNER_API_KEY"
LEVELS = (1, 8, 32)
SECONDS = 30.0
# Options that are a field of Benchmark: given ones replace its own default.
_LEVELS_OF = {"concurrency": "concurrency", "request_rate": "request-rate", "trace_speed": "trace"}


def _numbers(_: click.Context, __: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    """`1,8,32`."""
    if value is None:
        return None
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of numbers like 1,8,32") from None


def _limits(_: click.Context, __: click.Parameter, value: str | None) -> GoodputLimits | None:
    """`ttft:500,tpot:50`, in milliseconds."""
    if value is None:
        return None
    try:
        limits = {f"{name}_ms_max": float(ms) for name, _, ms in (part.partition(":") for part in value.split(","))}
        return GoodputLimits.model_validate(limits)
    except ValueError:  # pydantic's is one
        raise click.BadParameter(
            f"{value!r} is no limit like ttft:500,tpot:50 (milliseconds; one of the two is enough)"
        ) from None


def _cores(_: click.Context, __: click.Parameter, value: str) -> str:
    try:
        return checked(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("url")
@click.option(
    "-c", "--concurrency", callback=_numbers, metavar="N,…", help="Requests kept in flight, a level each. [1,8,32]"
)
@click.option(
    "--request-rate", callback=_numbers, metavar="R,…", help="Instead: requests sent a second, answered or not."
)
@click.option("--trace-speed", callback=_numbers, metavar="X,…", help="Instead: how many times as fast as recorded.")
@click.option("--arrivals", type=click.Choice(["poisson", "constant"]), help="How a request rate is spread. [poisson]")
@click.option("--max-concurrency", type=int, metavar="N", help="At most so many in flight, with a request rate.")
@click.option("--seconds", type=float, help=f"Measured time of a level, after its warm-up. [{SECONDS:g}]")
@click.option(
    "--requests", type=int, metavar="N", help="A level ends when so many were answered; --seconds is the longest."
)
@click.option("--prompt-tokens", type=int, metavar="N", help="Length of a prompt. [256]")
@click.option("--output-tokens", type=int, metavar="N", help="Length of an answer. [128]")
@click.option("--ignore-eos/--no-ignore-eos", default=None, help="Answers have their full length. [yes]")
@click.option("--prefix-tokens", type=int, metavar="N", help="So many first tokens of a prompt are shared. [0]")
@click.option("--prefixes", type=int, metavar="N", help="How many different shared beginnings there are. [1]")
@click.option("--turns", type=int, metavar="N", help="Conversations of so many turns. [1]")
@click.option("--dataset", type=click.Path(exists=True, dir_okay=False), help="Prompts from a file instead.")
@click.option("--endpoint", type=click.Choice(["completions", "chat"]), help="Which interface is asked. [completions]")
@click.option("--warmup-requests", type=int, metavar="N", help="Sent first by each stream, not counted. [1]")
@click.option("--ramp-s", type=float, metavar="S", help="How long the load takes to grow to its level. [0]")
@click.option("--request-timeout-s", type=float, metavar="S", help="A request that takes longer has failed. [600]")
@click.option("--seed", type=int, help="Of the prompts: the same seed sends the same ones. [1]")
@click.option("--model", metavar="NAME", help="Which model is asked for; else the first that the server offers.")
@click.option("--api-key-file", type=click.Path(exists=True, dir_okay=False), help=f"Its key; else ${KEY_VARIABLE}.")
@click.option(
    "--goodput", "limits", callback=_limits, metavar="L", help="Limits of a good request: ttft:500,tpot:50 (ms)."
)
@click.option(
    "--gpus", callback=_numbers, metavar="I,…", help="GPUs to watch, where the server is on this machine. [all]"
)
@click.option(
    "--client-cores",
    callback=_cores,
    default="auto",
    metavar="C",
    help="Cores that the client is bound to: auto, off, or numbers like 4-7. [auto]",
)
@click.option(
    "--csv", "csv_file", type=click.Path(dir_okay=False), metavar="FILE", help="One line a request, to a file."
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), metavar="FILE", help="The results, to a file.")
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default="json", show_default=True, help="Format of that file."
)
@json_option
@click.pass_context
def bench(ctx: click.Context, /, **given: Any) -> None:
    """Measure the server at URL: its rates and latencies with 95 % intervals, level by level.

    Needs no settings and no daemon. Ctrl-c ends the load at once, and what was measured is still printed (exit code 130).

    \b
    Examples:
      autotuner bench http://127.0.0.1:8000
      autotuner bench http://127.0.0.1:8000 -c 1,32,128 --prompt-tokens 1024 --goodput ttft:500,tpot:50
      autotuner bench http://127.0.0.1:8000 --request-rate 0.5,2,8 --seconds 120 --csv requests.csv
      autotuner bench http://127.0.0.1:8000 -c 32 -o result.json --format vllm
    """
    from autotuner.cli.benchlive import LiveLevels
    from autotuner.edge.endpoint import base_url, model_at
    from autotuner.standalone import Standalone

    root, key = base_url(given["url"]), _api_key(given["api_key_file"])
    benchmark = _benchmark(given)
    model = asyncio.run(model_at(root, given["model"], key))
    gpus = None if given["gpus"] is None else tuple(int(index) for index in given["gpus"])
    click.echo(f"{model or 'the model'} at {root}: {in_words(benchmark)}", err=True)

    with LiveLevels(benchmark) as live:
        run = Standalone(
            root,
            benchmark,
            model,
            live.show,
            api_key=key,
            limits=given["limits"],
            gpus=gpus,
            cache=user_cache(),
            cores=given["client_cores"],
        )
        signal_number = asyncio.run(_until_done(run))
    _write_files(run.measured, given)
    if given["as_json"]:
        print_json(_data(run))
    else:
        _print(run)
    if signal_number:
        ctx.exit(128 + signal_number)
    if run.failure is not None:
        raise run.failure
    _refuse_nothing(run.measured)


async def _until_done(run: Any) -> int:
    """Run to the end, or until SIGINT or SIGTERM; return that signal's number, else 0. A second one ends the program."""
    loop, got = asyncio.get_running_loop(), []

    def stop(number: signal.Signals) -> None:
        got.append(number)
        loop.remove_signal_handler(number)
        run.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(
            RuntimeError, ValueError
        ):  # not the main thread: then nobody can interrupt it this way
            loop.add_signal_handler(number, stop, number)
    await run.run()
    return int(got[0]) if got else 0


def _benchmark(given: dict[str, Any]) -> Benchmark:
    """The benchmark that the options describe. Raise UsageError, with the option's name, where they make no sense."""
    loads = [option for option in _LEVELS_OF if given[option] is not None]
    if len(loads) > 1:
        raise click.UsageError("a level is a concurrency, a request rate or a trace's speed: give one of them")
    if any(level != int(level) for level in given["concurrency"] or ()):
        raise click.UsageError("--concurrency: whole numbers; a rate is --request-rate")
    if given["trace_speed"] and not given["dataset"]:
        raise click.UsageError("--trace-speed: needs --dataset, a file whose requests have timestamps")
    fields = {name: given[name] for name in Benchmark.model_fields if given.get(name) is not None}
    fields = {"levels": LEVELS, "seconds": SECONDS, **fields}
    if loads:
        fields |= {"levels": given[loads[0]], "load": _LEVELS_OF[loads[0]]}
    if fields.get("dataset"):
        fields["dataset"] = str(Path(fields["dataset"]).resolve())
    from autotuner.edge.datasets import with_dataset

    try:
        made = Benchmark.model_validate(fields)
        return with_dataset(made, Path()) if made.dataset else made
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0]) if problem["loc"] else ""
        option = {"levels": loads[0] if loads else "concurrency"}.get(name, name)
        where = f"--{option.replace('_', '-')}: " if option else ""
        raise click.UsageError(where + problem["msg"].removeprefix("Value error, ")) from None


def _api_key(file: str | None) -> str | None:
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        return Path(file).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise HostError(f"{file} cannot be read: {error}") from None


def _write_files(measured: list[Measured], given: dict[str, Any]) -> None:
    for file, form in ((given["csv_file"], "csv"), (given["output"], given["form"])):
        if file is not None and measured:
            write(exported(measured, form), file)


def _data(run: Any) -> dict[str, Any]:
    return {
        "url": run.url,
        "model": run.model,
        "benchmark": run.benchmark.model_dump(mode="json"),
        "interrupted": run.interrupted,
        "failure": str(run.failure) if run.failure else None,
        "levels": [
            {
                "level": level.figures.concurrency,
                "at": level.at,
                "figures": level.figures.model_dump(mode="json"),
                "machine": level.machine.model_dump(mode="json") if level.machine else None,
                "client": level.samples.placed.model_dump(mode="json") if level.samples.placed else None,
                "remarks": level_remarks(level.figures, run.benchmark),
            }
            for level in run.measured
        ],
    }


def _print(run: Any) -> None:
    if not run.measured:
        click.echo("nothing was measured")
        return
    benchmark: Benchmark = run.benchmark
    click.echo(levels_table([(level.figures, level.machine) for level in run.measured]))
    click.echo("± is half the 95 % interval; --json has those of the latencies")
    for level in run.measured:
        name = level_name(benchmark.load, level.figures.concurrency)
        for remark in level_remarks(level.figures, benchmark):
            click.echo(f"{name}: {remark}")
        if level.machine is not None:
            click.echo(f"{name}: {level.machine}")
    if prompts := prompts_remark([level.figures for level in run.measured], benchmark):
        click.echo(prompts)
    if run.why_no_gpus:
        click.echo(f"no figures of GPUs: {run.why_no_gpus}")
    if run.interrupted:
        click.echo("interrupted: the last level shows what it measured until then, and later ones are missing")


def _refuse_nothing(measured: list[Measured]) -> None:
    """A run in which nothing was answered is no result."""
    if any(level.figures.requests_ok for level in measured):
        return
    errors = sorted({name for level in measured for name in level.figures.errors})
    sys.stdout.flush()
    raise HostError(f"no request was answered: {', '.join(errors) or 'none ended in time'}")
