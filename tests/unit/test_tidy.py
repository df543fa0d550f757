"""Rules about the source tree itself, so that it stays as it was meant to be."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from torture.sources import calls_that_trust_any_host

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "autotuner"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
CORE = [name for name in MODULES if name.startswith("core/")]

# What touches the world, measures time or rolls dice has no place in the core.
IMPURE = {
    "asyncio", "asyncssh", "httpx", "importlib", "io", "logging", "os", "pathlib", "psutil", "random", "select", "shutil", "signal",
    "socket", "sqlite3", "structlog", "subprocess", "sys", "tempfile", "threading", "time", "urllib",
}  # fmt: skip
BROAD = {"core/condition.py": 1, "daemon.py": 1, "edge/shim.py": 2}
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 460
SKIPPED = {"__pycache__", "node_modules", "build", "dist"}


@cache
def text_of(name: str) -> str:
    return (PACKAGE / name).read_text(encoding="utf-8")


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(text_of(name))


def imports(name: str) -> set[str]:
    """The dotted names of all modules that a module imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def top_level(name: str) -> set[str]:
    return {dotted.partition(".")[0] for dotted in imports(name)}


def own_imports(name: str) -> set[str]:
    """The files of this package that a module imports."""
    found = set()
    for dotted in imports(name):
        path = dotted.removeprefix("autotuner.").replace(".", "/")
        if dotted.startswith("autotuner."):
            found |= {file for file in (f"{path}.py", f"{path}/__init__.py") if file in MODULES}
    return found


def calls(name: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree_of(name)) if isinstance(node, ast.Call))


def repository_files() -> Iterator[Path]:
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part not in {".gitignore", ".github"} for part in parts)
        if (
            not hidden
            and not SKIPPED & set(parts)
            and not any(p.endswith(".egg-info") for p in parts)
            and path.is_file()
        ):
            yield path


def test_there_is_a_tree_to_look_at() -> None:
    assert len(CORE) > 12
    assert {"daemon.py", "edge/clock.py", "core/decide.py"} <= set(MODULES)


@pytest.mark.parametrize("name", CORE)
def test_the_core_touches_nothing_but_its_arguments(name: str) -> None:
    assert not top_level(name) & IMPURE
    assert not [
        c
        for c in calls(name)
        if isinstance(c.func, ast.Name) and c.func.id in {"open", "print", "input", "exec", "eval"}
    ]
    assert not [
        node for node in ast.walk(tree_of(name)) if isinstance(node, ast.Await | ast.AsyncFunctionDef | ast.Global)
    ]


def test_what_the_core_imports_is_as_pure_as_the_core() -> None:
    seen, waiting = set[str](), list(CORE)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += own_imports(name)
    assert not {name: found for name in seen if (found := top_level(name) & IMPURE)}
    assert not {name for name in seen if name.startswith(("edge/", "cli/"))}


@pytest.mark.parametrize(
    "name", [n for n in MODULES if n.startswith("engines/") and n not in {"engines/embedded.py", "engines/check.py"}]
)
def test_engines_are_pure_too(name: str) -> None:
    assert not top_level(name) & (IMPURE - {"sys"})


def test_time_is_told_by_one_clock() -> None:
    assert {name for name in MODULES if "time" in top_level(name)} == {"edge/clock.py", "edge/shim.py"}
    now = re.compile(r"\b(?:datetime|date)\.(?:now|today|utcnow)\(")
    assert {name for name in MODULES if now.search(text_of(name))} <= {"edge/clock.py"}
    asleep = [n for n in MODULES for c in calls(n) if ast.unparse(c.func) in {"asyncio.sleep", "time.sleep"}]
    assert set(asleep) <= {
        "edge/clock.py",
        "edge/shim.py",
        "bench/client.py",
        "bench/conductor.py",
        "bench/pool.py",
        "engines/embedded.py",
    }


def test_no_command_goes_through_a_shell() -> None:
    for name in MODULES:
        for call in calls(name):
            called = ast.unparse(call.func)
            assert called not in {"os.system", "os.popen", "asyncio.create_subprocess_shell", "subprocess.getoutput"}, (
                name
            )
            for keyword in call.keywords:
                assert keyword.arg != "shell" or ast.unparse(keyword.value) == "False", name


def test_nothing_is_awaited_inside_a_transaction() -> None:
    """Slots share one database and take turns at each await: a transaction held over one would take in another slot's rows."""
    found = [
        f"{name}:{inner.lineno}"
        for name in MODULES
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.With) and any("transaction(" in ast.unparse(item.context_expr) for item in node.items)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Await | ast.AsyncFor | ast.AsyncWith)
    ]
    assert not found


def test_one_module_opens_ssh_connections_and_says_all_that_asyncssh_would_look_up() -> None:
    openers = {
        "connect",
        "connect_reverse",
        "run_client",
        "listen",
        "listen_reverse",
        "create_connection",
        "create_server",
        "scp",
    }
    asking = {*openers, "get_server_host_key", "get_server_auth_methods"}
    found = [
        (name, call)
        for name in MODULES
        for call in calls(name)
        if isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "asyncssh"
        and call.func.attr in asking
    ]
    assert [(name, str(call.func.attr)) for name, call in found if isinstance(call.func, ast.Attribute)] == [
        ("edge/ssh.py", "connect"),
        ("edge/ssh.py", "get_server_host_key"),
    ]
    connect, fetch = ({k.arg: ast.unparse(k.value) for k in call.keywords} for _, call in found)
    assert connect["known_hosts"] == "(pinned, [], [])"
    assert {"client_keys", "agent_path", "username", "tunnel", "connect_timeout", "login_timeout"} <= set(connect)
    assert connect[None] == "_NOTHING_ELSE"  # type: ignore[index]
    assert fetch["config"] == "None"
    assert connect["config"] == "None"
    for name in MODULES:
        assert "asyncssh" not in top_level(name) or name in {"edge/ssh.py", "edge/host_ssh.py"}
        assert not re.search(r"known_hosts\s*=\s*None|SSH_AUTH_SOCK", text_of(name)), name


def test_what_is_copied_to_another_host_needs_nothing_but_python() -> None:
    from autotuner.edge.bundle import PACKAGE as ROOT_OF_BUNDLES
    from autotuner.edge.bundle import closure

    for path in closure("autotuner.edge.agent"):
        name = path.relative_to(ROOT_OF_BUNDLES).as_posix()
        assert top_level(name) <= {*sys.stdlib_module_names, "autotuner"}, name


def test_one_module_builds_shell_lines() -> None:
    assert {name for name in MODULES if re.search(r"\bshlex\b", text_of(name))} <= {"core/shell.py", "edge/shim.py"}


@pytest.mark.parametrize("name", MODULES)
def test_every_ssh_connection_pins_the_host_key_and_reads_no_configuration(name: str) -> None:
    assert calls_that_trust_any_host(text_of(name)) == []


@pytest.mark.parametrize(
    "call",
    [
        "asyncssh.connect(h, known_hosts=None, config=None)",
        "asyncssh.connect(h, config=None)",
        "asyncssh.connect(h, known_hosts=pinned)",
        "asyncssh.connect(h, known_hosts=pinned, config=[])",
        "asyncssh.create_connection(Client, h, config=None)",
        "asyncssh.SSHClientConnectionOptions(known_hosts=None, config=None)",
        "options(known_hosts=None)",
    ],
)
def test_that_rule_sees_a_connection_to_anybody(call: str) -> None:
    assert calls_that_trust_any_host(f"x = {call}")
    assert not calls_that_trust_any_host("asyncssh.connect(h, known_hosts=pinned, config=None)")


def test_errors_are_caught_broadly_only_at_the_outer_boundaries_and_with_a_reason() -> None:
    found = []
    for name in MODULES:
        lines = text_of(name).splitlines()
        for node in ast.walk(tree_of(name)):
            if not isinstance(node, ast.ExceptHandler) or ast.unparse(node.body[-1]) == "raise":
                continue  # one that ends in `raise` tidies up and hides nothing
            caught = (
                {ast.unparse(part) for part in (node.type.elts if isinstance(node.type, ast.Tuple) else [node.type])}
                if node.type
                else {""}
            )
            if caught & {"", "Exception", "BaseException"}:
                assert re.search(r"# noqa: BLE001 - \w+", lines[node.lineno - 1]), (
                    f"{name}:{node.lineno} needs a reason"
                )
                found.append(name)
    assert all(found.count(name) <= BROAD.get(name, 0) for name in found), found


@pytest.mark.parametrize("name", [name for name in MODULES if text_of(name).strip()])
def test_every_module_says_in_its_first_line_what_it_owns(name: str) -> None:
    said = ast.get_docstring(tree_of(name))
    assert said, f"{name} has no docstring"
    assert said.splitlines()[0].rstrip().endswith((".", ":", ";", ",")) or "\n" in said


def test_every_function_fits_on_a_page() -> None:
    long = [
        f"{name}:{node.lineno} {node.name} has {lines} lines"
        for name in MODULES
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not long


def test_every_module_can_be_read_in_one_sitting() -> None:
    assert not {name: n for name in MODULES if (n := len(text_of(name).splitlines())) > MODULE_LINES_MAX}


def test_every_noqa_has_its_reason_unless_its_rule_says_it() -> None:
    bare = [
        f"{name}:{number}"
        for name in MODULES
        for number, line in enumerate(text_of(name).splitlines(), 1)
        if (match := re.search(r"# noqa(?::\s*([A-Z0-9, ]+))?(.*)$", line))
        and not match.group(2).strip(" -")
        and (match.group(1) or "").strip() not in {"PLC0415", "S104", "S608"}
    ]
    assert not bare


def test_command_line_help_stays_instant() -> None:
    """Whatever is slow to import (CEL, SSH, HTTP, the store's models) is imported inside the command that needs it."""
    slow = {"celpy", "asyncssh", "httpx", "psutil"}
    for name in MODULES:
        if name.startswith("core/"):
            outer = [node for node in tree_of(name).body if isinstance(node, ast.Import | ast.ImportFrom)]
            named = {(n.module or "") if isinstance(n, ast.ImportFrom) else n.names[0].name for n in outer}
            assert not {dotted.partition(".")[0] for dotted in named} & slow, name


# The words are put together here so that this file does not hold them.
FORBIDDEN = [
    re.compile(r"(?<![\w.\-/])/" + r"work(?![\w-])"),
    re.compile(r"(?<![\w.\-/}])/" + r"root(?![\w-])"),
    re.compile(re.escape("../" + "shared")),
    re.compile("|".join(re.escape(a + b) for a, b in (
        ("pypi", ".org"), ("pythonhosted", ".org"), ("registry.npmjs", ".org"), ("proxy.golang", ".org"), ("static.crates", ".io"),
        ("index-", "url"), ("conda.anaconda", ".org"),
    ))),
]  # fmt: skip


def test_nothing_in_the_repository_names_the_place_where_it_was_made() -> None:
    found = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            found += [
                f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}" for word in FORBIDDEN if word.search(line)
            ]
    assert not found


@pytest.mark.parametrize("name", sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("test_*.py")))
def test_every_test_file_says_what_it_keeps(name: str) -> None:
    assert ast.get_docstring(ast.parse((ROOT / name).read_text(encoding="utf-8")))
