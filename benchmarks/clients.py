"""Our load client against a server that only pretends, and beside its peers: speed, truth, and what it says of itself.

    python benchmarks/clients.py                  everything, three runs of each in turn (about 8 minutes)
    python benchmarks/clients.py --quick          one run of acc and paced20k
    python benchmarks/clients.py --only flood     one mode, or one check: stall, verdicts, stop
    python benchmarks/clients.py --only agree     its figures against those of vLLM's client (5 minutes; not in "everything")

The server (nullserver.c) has a core of its own and each client with all its processes another; nothing leaves this
machine. docs/benchmark-client.md explains the method. Peers that cannot be had are left out, with the reason.
"""

import argparse
import json
import os
import platform
import signal
import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from clientbench import checks
from clientbench.agreement import agree
from clientbench.contestants import Client, Ours, SglangRust, Unavailable, VllmBench, write_tokenizer
from clientbench.nullserver import NullServer, compiled
from clientbench.pairs import Agreement, agreement_table
from clientbench.processes import adopt_orphans
from clientbench.report import VLLM, Bar, Run, bar_table, bars, mode_table, verdict_table
from clientbench.running import Bench
from clientbench.schedule import MODES, WHAT, Mode

FOLDER = Path(__file__).resolve().parents[1] / ".venv" / "bench-clients"
BUSY = 1.0  # load average at the start
CHECKS = ("stall", "verdicts", "stop")
AGREE = "agree"  # made when it is asked for, since it needs vLLM
# vLLM's client takes ten to twenty seconds to start, and no bar is about it in the other modes.
VLLM_MODES = {"acc", "paced20k"}


def main() -> int:
    """Measure what the arguments ask for; return 0, or 1 if a run of our own client failed."""
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("the client benchmark needs two cores: one for the server, one for the clients")
    os.sched_setaffinity(0, {cores[0]})
    adopt_orphans()
    options.folder.mkdir(parents=True, exist_ok=True)
    wanted = set(options.only or (("acc", "paced20k") if options.quick else (*WHAT, *CHECKS)))
    modes = [mode for mode in MODES if mode.name in wanted]
    with NullServer(compiled(options.folder), cores[0]) as server:
        bench = Bench(server, cores[0], cores[1], options.folder)
        machine = heading(cores)
        print(machine, flush=True)
        if os.getloadavg()[0] > BUSY:
            print("\nThis machine is busy with something else: these figures tell little.", flush=True)
        clients = contestants(options.folder) if modes else []
        rounds = 1 if options.quick else options.runs
        runs = compare(bench, clients, modes, rounds, everywhere=options.vllm_everywhere)
        if runs:
            print(f"\n{bar_table(bars(runs))}", flush=True)
        checked = check(bench, wanted, runs, options)
        agreed = agreement(server, cores, options) if AGREE in wanted else {}
    if options.json:
        document = {"machine": machine, "runs": runs, "bars": bars(runs), "checks": checked, AGREE: agreed}
        options.json.write_text(json.dumps(document, default=as_json, indent=1) + "\n")
    return int(any(run.failure for run in chain(runs, *checked.values()) if run.client == Ours.name))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of acc and paced20k, no checks")
    parser.add_argument(
        "--only", action="append", choices=(*WHAT, *CHECKS, AGREE), help="this alone; may be given again"
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each mode and client (default %(default)s)")
    parser.add_argument(
        "--verdict-runs", type=int, default=10, help="runs of each kind of verdict (default %(default)s)"
    )
    parser.add_argument("--pairs", type=int, default=14, help="pairs of rounds in agree (default %(default)s)")
    parser.add_argument(
        "--vllm-everywhere", action="store_true", help="vLLM's client in all modes, not in two (minutes more)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run to this file too")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where what is built and downloaded is kept")
    return parser.parse_args()


def heading(cores: list[int]) -> str:
    """Name the machine."""
    model = next(
        (x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?"
    )
    load = os.getloadavg()[0]
    return (
        f"{model}, {len(cores)} cores, Linux {platform.release()}, Python {platform.python_version()}; "
        f"load average at the start {load:.1f}"
    )


def contestants(folder: Path) -> list[Client]:
    """Our client and the peers that can be had; say why where one cannot."""
    tokenizer = write_tokenizer(folder / "tokenizer")
    found: list[Client] = [Ours()]
    for make in (lambda: SglangRust(folder, tokenizer), lambda: VllmBench(tokenizer)):
        try:
            found.append(make())
        except Unavailable as error:
            print(f"left out: {error}")
    return found


def compare(bench: Bench, clients: list[Client], modes: list[Mode], rounds: int, *, everywhere: bool) -> list[Run]:
    """Run all clients through all modes, in turn; print a table a mode."""
    runs: list[Run] = []
    for mode in modes:
        found = []
        for _ in range(rounds):
            for client in clients:
                if client.name == VLLM and not (everywhere or mode.name in VLLM_MODES):
                    continue
                progress(f"{mode.name}: {client.name}")
                found.append(bench.run(client, mode))
        possible = f", {mode.possible_tok_s:,.0f} tok/s possible" if mode.possible_tok_s else ""
        print(
            f"\n**{mode.name}**: {WHAT[mode.name]} (C {mode.concurrency}, {mode.requests} x {mode.tokens} tokens{possible})\n"
        )
        print(mode_table(found), flush=True)
        runs += found
    return runs


def check(bench: Bench, wanted: set[str], runs: list[Run], options: argparse.Namespace) -> dict[str, list[Run]]:
    """Make the checks that are wanted; print a table each."""
    found: dict[str, list[Run]] = {}
    if "stall" in wanted:
        progress("stall")
        found["stall"] = checks.stall(bench, options.runs)
        print(
            f"\n**stall**: stopped for 5 ms every 100 ms, in the mode acc\n\n{checks.stall_table(found['stall'])}",
            flush=True,
        )
    if "verdicts" in wanted:
        progress("verdicts")
        made = checks.verdicts(bench, options.verdict_runs)
        found |= made
        named = [run for run in runs if run.client == Ours.name and run.mode.itl_ms]
        kinds = made | {f"the mode {run.mode.name}": [r for r in named if r.mode == run.mode] for run in named}
        print(f"\n**verdicts**: does it say that it was the limit when it was?\n\n{verdict_table(kinds)}", flush=True)
    if "stop" in wanted:
        progress("stop")
        found["stop"] = checks.stop(bench, options.runs)
        print(f"\n**stop**: SIGTERM with C 128 under way\n\n{checks.stop_table(found['stop'])}", flush=True)
    return found


def agreement(
    server: NullServer, cores: list[int], options: argparse.Namespace
) -> dict[str, dict[str, list[Agreement]]]:
    """Compare our client's figures with those of vLLM's client; print a table a server."""
    progress(AGREE)
    try:
        return agree(server, cores, options.folder, options.pairs, show_agreement)
    except Unavailable as error:
        sys.exit(f"agree cannot be made: {error}")


def show_agreement(name: str, found: dict[str, list[Agreement]]) -> None:
    """Print what was compared on a server."""
    print(f"\n**agree, {name}**: the same requests, round by round\n\n{agreement_table(found)}", flush=True)


def progress(text: str) -> None:
    """Tell a person at a terminal what takes so long."""
    if sys.stderr.isatty():
        print(f"... {text}", file=sys.stderr, flush=True)


def as_json(value: object) -> object:
    """Write what json does not know."""
    if isinstance(value, Run | Bar):
        return value.as_json()
    if isinstance(value, Agreement):
        return {**asdict(value), "verdict": value.verdict}
    raise TypeError(f"no JSON for {value!r}")


if __name__ == "__main__":
    sys.exit(main())
