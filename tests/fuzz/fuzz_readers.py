"""Every reader of a server's output under random and mutated bytes, guided by coverage (atheris).

    make fuzz                ten minutes, from the recordings and the field cases
    make fuzz FUZZ_S=60

Beside "no crash" it holds one property: the fast way through a log says what the engine's own reader says.
"""

import sys

import atheris

with atheris.instrument_imports(include=["autotuner.engines", "autotuner.core.ranks", "autotuner.core.starting"]):
    from autotuner.core.ranks import RankJoiner
    from autotuner.core.starting import Pulse, Start, follow
    from autotuner.engines import ENGINES
    from autotuner.engines.base import ServerExit, Window
    from autotuner.engines.context import Context
    from autotuner.engines.evidence import gather
    from autotuner.engines.factreader import FactReader
    from autotuner.engines.logtext import split_lines
    from autotuner.engines.reading import judge

NAMES = sorted(ENGINES)
CONTEXTS = (
    Context(),
    Context(phase="starting", seconds_since_output=900, speculation="on"),
    Context(phase="level", concurrency=8, speculation="eagle3", num_steps=3, draft_tokens=4, baseline={}),
    Context(log_source=("benchmark",), speculation="on"),
    Context(log_source=("metrics", "server-info"), phase="level", concurrency=64, dp_size=2),
    Context(log_source=("kernel-log", "gpu-query"), asked_to_stop=False, exit_code=-9),
)


def one(data: bytes) -> None:
    """Read one input in every way; raise if one of them fails or two disagree."""
    provider = atheris.FuzzedDataProvider(data)
    engine = ENGINES[NAMES[provider.ConsumeIntInRange(0, len(NAMES) - 1)]]
    context = CONTEXTS[provider.ConsumeIntInRange(0, len(CONTEXTS) - 1)]
    piece = provider.ConsumeIntInRange(1, 4096)
    log = provider.ConsumeBytes(provider.remaining_bytes())
    text = log.decode("utf-8", "replace")

    lines = split_lines(log)
    slowly = [fact for line in lines for fact in engine.read_line(line)]
    reader = FactReader(engine, tail=50)
    quickly = [fact for at in range(0, len(log), piece) for fact in reader.feed(log[at : at + piece])]
    quickly += reader.flush()
    assert quickly == slowly, "the fast way says something else"

    joiner, start = RankJoiner(), Start()
    for fact in slowly:
        if isinstance(fact, Window):
            joiner.add(fact)
    follow(start, tuple(slowly), Pulse(), 1.0)
    judge(gather(engine.name, "", text, context))
    engine.read_metrics(text)
    engine.read_info("/server_info", text)
    engine.read_info("/metrics", text)
    engine.diagnose(ServerExit(1, asked=False, became_ready=False), tuple(lines))


def main() -> None:
    """Fuzz until told to stop."""
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
