"""`export`: a trial's measurements as a file for other programs."""

from pathlib import Path

import click

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.export import FORMATS, Measured, exported
from autotuner.bench.machine import MachineSample
from autotuner.bench.measurement import LevelSamples
from autotuner.cli.common import State, open_state
from autotuner.edge.rows import Trial
from autotuner.errors import HostError, NotFound


@click.command()
@click.argument("trial")
@click.option("--format", "form", type=click.Choice(FORMATS), default="json", show_default=True, help="Whose format.")
@click.option("--level", type=float, metavar="N", help="One level alone; all of them unless given.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), metavar="FILE", help="Where to; else standard output.")
@click.pass_context
def export(ctx: click.Context, trial: str, form: str, level: float | None, output: str | None) -> None:
    """Write what TRIAL (its number, or a candidate's name or id) measured as a file for other programs.

    json has everything, each gap between tokens included; csv one line a request; vllm and sglang are the result files of
    `vllm bench serve --save-result --save-detailed` and of `sglang.bench_serving --output-file --output-details`, a line for
    each level. What is not known is empty or null.

    \b
    Examples:
      autotuner export 12 --format csv -o requests.csv
      autotuner export sglang-base --format vllm --level 32 -o result.json
      autotuner export 12 | jq '.[0].figures.itl_ms'
    """
    state = open_state(ctx)
    write(exported(_levels(state, state.find_trial(trial), level), form), output)


def write(text: str, output: str | None) -> None:
    """Write text to a file, or to standard output. Raise HostError where the file cannot be written."""
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise HostError(f"{output} cannot be written: {error.strerror}") from None


def _levels(state: State, trial: Trial, wanted: float | None) -> list[Measured]:
    results = state.store.results(trial.id)
    chosen = [r for r in results if wanted is None or r.concurrency == wanted]
    if not chosen:
        measured = ", ".join(f"{r.concurrency:g}" for r in results) or "none"
        raise NotFound(f"trial {trial.id} has no such level; measured: {measured}")
    benchmark = Benchmark.model_validate_json(trial.benchmark_body)
    model = state.store.candidate(trial.candidate_id).launch.model
    found = []
    for result in chosen:
        kept = state.store.evidence(trial.id, result.concurrency)
        if not kept.get("samples"):
            raise NotFound(f"the requests of trial {trial.id} at level {result.concurrency:g} were not kept")
        accept = result.speculation.accept_len if result.speculation else None
        found.append(
            Measured(
                benchmark=benchmark,
                figures=result.figures,
                samples=LevelSamples.model_validate(kept["samples"]),
                model=model,
                at=trial.begun_at or trial.enqueued_at,
                machine=result.machine,
                machine_samples=tuple(MachineSample.model_validate(s) for s in kept.get("machine", ())),
                accept_len=accept.mean if accept else None,
            )
        )
    return found
