"""The program on a machine that others share: `python -m e2e.undisturbed …` is `autotuner …`.

Its client never says that it was itself the limit of a level. With other programs on its core it would say so, rightly, and the
daemon would decide nothing; what a client says of itself is tested in unit/bench.
"""

from autotuner.bench import measurement
from autotuner.cli import main, rehearsing


def undisturbed() -> None:
    """Let nothing that runs beside a test void its levels."""
    measurement.client_limit = measurement.blurred = lambda _: ""


if __name__ == "__main__":
    undisturbed()
    rehearsing.PROGRAM = "e2e.undisturbed_rehearsal"
    main(prog_name="autotuner")
