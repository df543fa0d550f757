"""The table of a benchmark's levels, one line each, as `bench` and `show` print it."""

from collections.abc import Mapping, Sequence

from autotuner.bench.benchmark import level_cell
from autotuner.bench.machine import MachineFigures
from autotuner.bench.measurement import Figures
from autotuner.cli.common import table
from autotuner.core.report import rate


def levels_table(levels: Sequence[tuple[Figures, MachineFigures | None]]) -> str:
    """Given levels with their machines, return them as a table; columns that none of them has anything for are left out."""
    header = (
        "level", "output tok/s", "total tok/s", "req/s", "TTFT p50/p99 ms", "ITL p50/p99 ms", "TPOT p50/p99 ms",
        "E2E p50/p99 ms", "ok/failed", "goodput req/s", "GPU W", "J/token",
    )  # fmt: skip
    rows = [_row(f, machine) for f, machine in levels]
    kept = [i for i in range(len(header)) if any(row[i] != "-" for row in rows)]
    return table([tuple(row[i] for i in kept) for row in rows], tuple(header[i] for i in kept))


def _row(f: Figures, machine: MachineFigures | None) -> tuple[str, ...]:
    half = (f.output_tok_s_high - f.output_tok_s_low) / 2
    power = machine.gpu_power_w if machine else None
    energy = machine.joules_per_output_token if machine else None
    return (
        level_cell(f.load, f.concurrency),
        "void" if f.void else f"{rate(f.output_tok_s)} ± {rate(half)}",
        rate(f.total_tok_s),
        _with_half(f.answered_req_s, f.answered_req_s_low, f.answered_req_s_high),
        latency(f.ttft_ms),
        latency(f.itl_ms),
        latency(f.tpot_ms),
        latency(f.e2e_ms),
        f"{f.requests_ok}/{f.requests_failed}",
        _with_half(f.goodput_req_s, f.goodput_req_s_low, f.goodput_req_s_high),
        f"{power.mean:,.0f}" if power else "-",
        f"{energy:.3g}" if energy is not None else "-",
    )


def latency(figures: Mapping[str, float]) -> str:
    """Given a table of a latency in milliseconds, return `p50/p99`; `-` where there is none."""
    if "p50" not in figures or "p99" not in figures:
        return "-"
    digits = 1 if figures["p99"] < 100 else 0
    return f"{figures['p50']:,.{digits}f}/{figures['p99']:,.{digits}f}"


def _with_half(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if low is None or high is None else f"{value:.2f} ± {(high - low) / 2:.2f}"
