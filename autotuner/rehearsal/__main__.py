"""`python -m autotuner.rehearsal …` is `autotuner …` with its engines in rehearsal."""

from autotuner.cli import main
from autotuner.rehearsal.engine import install

if __name__ == "__main__":
    install()
    main(prog_name="autotuner")
