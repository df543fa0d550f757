"""Turn an argv into a command line for a shell; nothing else in the project builds a shell string.

Owns the promise that no text an operator or a server wrote is ever interpreted by a shell.
"""

import re
import shlex

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Words that a shell carries out itself in the first place: `eval x` would interpret x. `env` knows programs only.
_SHELLS_OWN = frozenset(
    """
! { } [ [[ test printf . : alias bg break builtin case cd command continue coproc declare do done elif else enable esac eval
exec exit export fc fg fi for function getopts hash if in jobs let local mapfile read readarray readonly return select set
shift shopt source then time times trap type typeset ulimit umask unalias unset until wait while
""".split()  # noqa: SIM905 - a paragraph of words reads better than a list of them
)


def command_line(argv: tuple[str, ...], env: dict[str, str] | None = None) -> str:
    """Given an argv and extra environment, return one POSIX shell line that runs exactly that argv.

    Raise ValueError for a NUL byte, which no argv can carry, and for a name that is no environment variable.
    """
    if any("\0" in word for word in argv):
        raise ValueError("an argument contains a NUL byte")
    for name, value in (env or {}).items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise ValueError(f"{name!r} cannot be an environment variable")
    assignments = [f"{name}={shlex.quote(value)}" for name, value in (env or {}).items()]
    return " ".join(
        [*assignments, *(_program(word) for word in argv[:1]), *([shlex.join(argv[1:])] if argv[1:] else [])]
    )


def _program(word: str) -> str:
    if word in _SHELLS_OWN:
        return f"env {shlex.quote(word)}"
    quoted = shlex.quote(word)
    return f"'{word}'" if "=" in word and quoted == word else quoted  # unquoted it would be an assignment
