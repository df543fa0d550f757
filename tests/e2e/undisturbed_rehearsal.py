"""`python -m e2e.undisturbed_rehearsal …` is `python -m e2e.undisturbed …` with its engines in rehearsal."""

from e2e.undisturbed import undisturbed

from autotuner.cli import main
from autotuner.rehearsal.engine import install

if __name__ == "__main__":
    undisturbed()
    install()
    main(prog_name="autotuner")
