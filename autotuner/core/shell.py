"""Turn an argv into a command line for a shell; nothing else in the project builds a shell string.

Owns the promise that no text an operator or a server wrote is ever interpreted by a shell.
"""

import shlex


def command_line(argv: tuple[str, ...], env: dict[str, str] | None = None) -> str:
    """Given an argv and extra environment, return one POSIX shell line that runs exactly that argv.

    Raise ValueError for a NUL byte, which no argv can carry, and for a name that is no environment variable.
    """
    if any("\0" in word for word in argv):
        raise ValueError("an argument contains a NUL byte")
    for name, value in (env or {}).items():
        if not name.isidentifier() or "\0" in value:
            raise ValueError(f"{name!r} cannot be an environment variable")
    assignments = [f"{name}={shlex.quote(value)}" for name, value in (env or {}).items()]
    return " ".join([*assignments, shlex.join(argv)])
