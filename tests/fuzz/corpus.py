"""Writes what the fuzzer begins with: the recordings and the logs of the field cases, a file each."""

import sys
import tomllib
from pathlib import Path

ENGINES = Path(__file__).parents[1] / "unit" / "engines"


def main() -> None:
    """Write the corpus into the folder named on the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for recording in (ENGINES / "recordings").iterdir():
        (folder / recording.name).write_bytes(recording.read_bytes()[: 1 << 14])
    for path in (ENGINES / "cases").glob("*.toml"):
        log = tomllib.loads(path.read_text(encoding="utf-8"))["log"]
        (folder / f"{path.stem}.log").write_text(log, encoding="utf-8")


if __name__ == "__main__":
    main()
