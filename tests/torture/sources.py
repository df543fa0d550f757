"""The program's source as text, and a rule about it that the tests of the source hold and the harness tries."""

import ast
from collections.abc import Iterator
from pathlib import Path

import autotuner

PACKAGE = Path(autotuner.__file__).parent


def sources() -> Iterator[tuple[str, str]]:
    """(name, text) of every module of the program."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")


def calls_that_trust_any_host(text: str) -> list[str]:
    """Given a module's text, return what in it lets a connection be made to a host whose key is not pinned.

    asyncssh connects to anybody with `known_hosts=None`, and also where the operator's ssh configuration says so, unless
    `config=None` keeps it from being read. So every connection names its known_hosts, and no configuration.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        where = f"line {node.lineno}: {ast.unparse(node.func)}"
        if given.get("known_hosts") == "None":
            found.append(f"{where} takes any host for the right one (known_hosts=None)")
        if ast.unparse(node.func).startswith("asyncssh.") and _connects(node):
            found += [f"{where} does not say known_hosts"] if "known_hosts" not in given else []
            found += (
                [f"{where} reads the operator's ssh configuration (say config=None)"]
                if given.get("config") != "None"
                else []
            )
    return found


def _connects(node: ast.Call) -> bool:
    name = ast.unparse(node.func).removeprefix("asyncssh.")
    if name == "connect_agent":  # a socket of this machine, with no host behind it
        return False
    return name.startswith(("connect", "create_connection")) or name == "SSHClientConnectionOptions"
