"""Programs for another host: modules of this package with all that they import of it, as one file that Python runs.

The same modules give the same bytes, so a program's hash names it. What a module imports is read from its text; nothing
but the standard library, and what the caller knows the other host to have, may be imported beside our own modules.
"""

import ast
import hashlib
import io
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip file can say; a file's own time must not change the hash


@dataclass(frozen=True)
class Bundle:
    """A program: its bytes, and their SHA-256 in hex."""

    name: str
    data: bytes

    @property
    def sha256(self) -> str:
        """The hash that the other host compares before each start."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def file_name(self) -> str:
        """A name that no other version has."""
        return f"{self.name}-{self.sha256[:16]}.pyz"


@cache
def bundle(name: str, module: str) -> Bundle:
    """Given a name and a module with a `main()` that returns an exit code, return the program that runs it."""
    start = f"import sys\nfrom {module} import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    files = {"__main__.py": start.encode()}
    for part in sorted(closure(module)):
        files[part.relative_to(PACKAGE.parent).as_posix()] = part.read_bytes()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, _LONG_AGO)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return Bundle(name, packed.getvalue())


def closure(module: str) -> set[Path]:
    """Given a module of ours, return the files of it, of all that it imports of ours, and of the packages they are in."""
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        for path in _files(waiting.pop()):
            if path not in found:
                found.add(path)
                waiting += _imported(path)
    return found


def _files(dotted: str) -> list[Path]:
    """The file of a module and those of the packages above it; none for a name that is no module of ours."""
    parts = dotted.split(".")
    places = [PACKAGE.parent.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    candidates = [place / "__init__.py" for place in places] + [places[-1].with_suffix(".py")]
    return [path for path in candidates if path.is_file()]


def _imported(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.name:
            names += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if alias.name.partition(".")[0] == PACKAGE.name]
    return names
