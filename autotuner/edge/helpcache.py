"""What a program's own help said, kept on disk: asking an engine takes half a minute, reading the answer a moment.

An answer holds for one program file (path, size, time of change, and the libraries beside it) and one version of the
engine; anything else is asked anew. What cannot be read or written is as if it were not there.
"""

import contextlib
import hashlib
import json
import shutil
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from autotuner.edge.files import write_atomically
from autotuner.engines.flags import Help

FORMAT = 1  # raised when help texts are read in another way
EMBEDDED = Path(__file__).parents[1] / "engines" / "embedded.py"  # whose flags are our own, of no version
_HELP = TypeAdapter(Help)


class HelpCache:
    """Answers in a folder, one file a command."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, argv: tuple[str, ...], identity: str) -> Help | None:
        """Given a command and who would answer it, return the answer kept; None if there is none that still holds."""
        if self._folder is None or not identity:
            return None
        try:
            kept = json.loads(self._path(self._folder, argv).read_bytes())
            if kept["identity"] == identity and kept["argv"] == list(argv):
                return _HELP.validate_python(kept["help"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ValidationError):
            return None
        return None

    def write(self, argv: tuple[str, ...], identity: str, answer: Help) -> None:
        """Keep an answer; a folder that cannot be written to only means that the program is asked again."""
        if self._folder is None or not identity:
            return
        body = {"argv": argv, "identity": identity, "help": _HELP.dump_python(answer, mode="json")}
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(self._folder, argv), json.dumps(body).encode())

    def _path(self, folder: Path, argv: tuple[str, ...]) -> Path:
        return folder / f"help-{hashlib.sha256(json.dumps(argv).encode()).hexdigest()[:16]}.json"


def identity_of(program: str, version: str | None) -> str:
    """Given a program and the version found of its engine, return what its help depends on; empty if it is not there."""
    found = shutil.which(program)
    if found is None:
        return ""
    path = Path(found)
    try:
        seen = path.stat()
        own = EMBEDDED.stat().st_mtime_ns
        beside = [lib.stat() for lib in path.resolve().parent.glob("lib*.so*")]
    except OSError:
        return ""
    libraries = [max((s.st_mtime_ns for s in beside), default=0), sum(s.st_size for s in beside)]
    return json.dumps([FORMAT, own, str(path), seen.st_size, seen.st_mtime_ns, *libraries, version])


def interpreter_of(script: str) -> str | None:
    """Given a program, return the Python that its first line names; None if it is no Python script."""
    found = shutil.which(script)
    if found is None:
        return None
    try:
        with Path(found).open("rb") as f:
            return interpreter_in(f.readline(512).decode("utf-8", "replace"))
    except OSError:
        return None


def interpreter_in(first: str) -> str | None:
    """Given a program's first line, return the Python that it names; None if it names none."""
    words = first[2:].split() if first.startswith("#!") else []
    named = words[-1] if words else ""
    return named if "python" in named.rpartition("/")[2] else None
