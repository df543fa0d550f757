"""How fast and in how much memory the readers go through a server's log.

    python benchmarks/readers.py            lines a second through the whole reader, on one core
    python benchmarks/readers.py --gib 1    memory while a log of this size goes through

A log here is a recorded one: its start once, then what it printed under load, over and over, as a long-lived server
does. "decode lines alone" is the worst case: every line carries figures.
"""

import argparse
import resource
import statistics
import sys
import time
from pathlib import Path

from autotuner.engines import engine_for
from autotuner.engines.factreader import FactReader

RECORDINGS = Path(__file__).parent.parent / "tests" / "unit" / "engines" / "recordings"
LOGS = {"sglang-0.5.12-load.log": b"fired up", "vllm-0.32-ngram.log": b"startup complete"}
PIECE = 1 << 20
RUNS = 5


def halves(name: str) -> tuple[bytes, bytes]:
    """Given a recording, return its start and what came after it; our own stop at the end is left out."""
    data = (RECORDINGS / name).read_bytes()
    at = data.index(b"\n", data.index(LOGS[name])) + 1
    load = b"\n".join(line for line in data[at:].split(b"\n") if b"SIG" not in line and b"[shutdown]" not in line)
    return data[:at], load.rstrip(b"\n") + b"\n"


def rate(engine: str, head: bytes, load: bytes, lines: int) -> list[float]:
    """Given a start and a load, return lines a second of each run over about this many lines of load."""
    whole = load * (lines // load.count(b"\n") + 1)
    found = []
    for _ in range(RUNS):
        reader = FactReader(engine_for(engine), 400)
        reader.feed(head)
        began = time.process_time()
        for at in range(0, len(whole), PIECE):
            reader.feed(whole[at : at + PIECE])
        found.append(whole.count(b"\n") / (time.process_time() - began))
    return found


def show(label: str, rates: list[float]) -> None:
    """Print the median and the range."""
    print(f"{label:45} {statistics.median(rates):>12,.0f} lines/s   ({min(rates):,.0f} to {max(rates):,.0f})")


def memory(gib: float) -> None:
    """Let a log of this size through, and print the peak memory as it grows."""
    head, load = halves("sglang-0.5.12-load.log")
    reader = FactReader(engine_for("sglang"), 400)
    reader.feed(head)
    piece = load * (PIECE * 8 // len(load))
    read, facts, report = 0, 0, 0.1
    while read < gib * (1 << 30):
        facts += len(reader.feed(piece))
        read += len(piece)
        if read >= report * gib * (1 << 30):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{read / (1 << 30):5.2f} GiB read, {facts:,} facts, peak memory {peak:.0f} MiB")
            report += 0.3


def main() -> None:
    """Measure what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=300_000, help="lines of load in each run (default %(default)s)")
    parser.add_argument("--gib", type=float, help="show memory over a log of this size instead")
    options = parser.parse_args()
    if options.gib:
        memory(options.gib)
        return
    for name in LOGS:
        engine = name.partition("-")[0]
        head, load = halves(name)
        show(f"{engine}: a start, then its load", rate(engine, head, load, options.lines))
    head, load = halves("sglang-0.5.12-load.log")
    decode = b"".join(line + b"\n" for line in load.split(b"\n") if b"Decode batch" in line)
    show("sglang: decode lines alone", rate("sglang", head, decode, options.lines))


if __name__ == "__main__":
    sys.exit(main())
