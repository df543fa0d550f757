"""`python -m autotuner`."""

from autotuner.cli import main

if __name__ == "__main__":
    main()
