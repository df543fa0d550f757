"""Runs mutmut on a copy of the tree, says for each module how many of its mutants the tests noticed, and fails below LEAST.

What is changed and which tests must notice it stands in pyproject.toml, [tool.mutmut]. A mutant that hangs counts as noticed,
one that no test runs does not.
"""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = ("autotuner", "policies", "tests", "pyproject.toml")
LEAST = 90.0
MUTMUT = str(Path(sys.executable).with_name("mutmut"))


def main() -> None:
    """Work in the folder named on the command line, which is emptied first and stays for `mutmut show`."""
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, folder / name)
    can_be_called_by_name(folder)
    # Tests run in the order of a set of their names, and the first that fails ends a mutant's run.
    fixed = {**os.environ, "PYTHONHASHSEED": "0"}
    subprocess.run([MUTMUT, "run", "--max-children", "2"], cwd=folder, env=fixed, check=True)
    told = subprocess.run([MUTMUT, "results", "--all", "true"], cwd=folder, check=True, capture_output=True, text=True)
    sys.exit(report(told.stdout, folder))


class Names:
    """Notes the names of the tests that pytest collects."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.found = [item.nodeid for item in items]


def can_be_called_by_name(folder: Path) -> None:
    """Leave if pytest does not find one of the tests by its name: mutmut would take that for a mutant that was noticed.

    Mutmut collects twice in one process, and where a test's ids are given, pytest escapes them once more the second time.
    """
    chosen = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"]
    names, said = Names(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(said):
        pytest.main(["--collect-only", *chosen["pytest_add_cli_args_test_selection"]], plugins=[names])
        if pytest.main(["--collect-only", *names.found]):
            sys.exit(f"Give the parameters of these tests plain ids:\n{said.getvalue()[-2000:]}")


def report(results: str, folder: Path) -> str | None:
    """Given `mutmut results`, print the table and the survivors; return what is wrong, or None."""
    statuses: defaultdict[str, Counter[str]] = defaultdict(Counter)
    survivors = []
    for line in results.splitlines():
        name, found, status = line.strip().partition(": ")
        if found:
            statuses[name.rpartition(".")[0]][status] += 1
            if status not in {"killed", "timeout"}:
                survivors.append(f"  {name}: {status}")
    if not statuses:
        return "mutmut made no mutants"
    if survivors:
        print("\nNot noticed:", *survivors, sep="\n")
        print(f"What one of them changes: cd {folder} && {MUTMUT} show NAME")
    print(f"\n{'module':<30} {'mutants':>8} {'killed':>8} {'timeout':>8} {'survived':>9} {'noticed':>8}")
    rows = sorted(statuses.items())
    low = []
    for module, by_status in [*rows, ("all", sum((found for _, found in rows), Counter[str]()))]:
        mutants, killed, timeout = by_status.total(), by_status["killed"], by_status["timeout"]
        noticed = 100 * (killed + timeout) / mutants
        print(f"{module:<30} {mutants:>8} {killed:>8} {timeout:>8} {mutants - killed - timeout:>9} {noticed:>6.1f} %")
        low += [module] if noticed < LEAST else []
    return f"less than {LEAST:.0f} % noticed: {', '.join(low)}" if low else None


if __name__ == "__main__":
    main()
