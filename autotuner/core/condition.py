"""Conditions in CEL over named facts: compile, evaluate, and find what cannot work before it is ever looked at. Pure.

Numbers in conditions are read as decimals, so that `level.elapsed_s > 3` needs no `3.0`. The library is imported inside
the functions: it takes 0.15 s, which commands without a condition need not pay.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Value = float | bool | str
Facts = dict[str, Value]

_LITERALS = {"INT_LIT": float, "FLOAT_LIT": float, "STRING_LIT": str, "MLSTRING_LIT": str, "BOOL_LIT": bool}
_NAMES = {float: "a number", bool: "true or false", str: "a text"}
_EQUAL = {"relation_eq", "relation_ne"}


class ConditionError(ValueError):
    """A text is no condition; `line` is the line in it, from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Condition:
    """A compiled condition and the names of the facts in it, sorted."""

    facts: tuple[str, ...]
    program: Any
    tree: Any


def evaluate(expression: str, facts: Facts) -> bool:
    """Given a condition and at least the facts it names, return whether it holds."""
    condition = compiled(expression)
    return _evaluated(expression, tuple((name, facts[name]) for name in condition.facts))


@lru_cache(maxsize=512, typed=True)
def _evaluated(expression: str, facts: tuple[tuple[str, Value], ...]) -> bool:
    """Most rules look at what has not changed since they looked last, and the library takes its time."""
    return bool(compiled(expression).program.evaluate(_activation(dict(facts))))


@lru_cache(maxsize=512)
def compiled(expression: str) -> Condition:
    """Given a condition, return it compiled. Raise ConditionError if it is not CEL."""
    from celpy.celparser import CELParseError  # noqa: PLC0415

    try:
        return _compile(expression)
    except RecursionError:
        raise ConditionError("nested too deeply", 1) from None
    except CELParseError as error:
        raise ConditionError("cannot be read here: " + _short(error), max(1, error.line or 1)) from None


def misfit(expression: str, kinds: dict[str, type[Value]]) -> str:
    """Given a condition and the kind of each fact it names, return what keeps it from being true or false; else empty."""
    condition = compiled(expression)
    said = _misfit_in(condition.tree, kinds)
    if said:
        return said
    # Both truth values, so that neither side of a short-circuited || or && escapes the check.
    for truth in (True, False):
        try:
            result = condition.program.evaluate(_activation({n: _example(kinds[n], truth) for n in condition.facts}))
        except Exception as error:  # noqa: BLE001 - the library raises several unrelated types for a type error
            return f"types do not fit: {_short(error)}"
        if not _is_bool(result):
            return "must be true or false, not a number or a text"
    return ""


def _compile(expression: str) -> Condition:
    import celpy  # noqa: PLC0415

    environment = celpy.Environment(runner_class=celpy.CompiledRunner)
    tree: Any = environment.compile(expression)
    for token in tree.scan_values(lambda token: token.type == "INT_LIT"):
        token.type = "FLOAT_LIT"
    names = {name for node in tree.find_data("member_dot") if (name := _fact(node))}
    dotted_roots = {name.partition(".")[0] for name in names}
    bare = {str(t) for node in tree.find_data("ident") for t in node.children if str(t) not in dotted_roots}
    return Condition(tuple(sorted(names | bare)), environment.program(tree), tree)


def _fact(member_dot: Any) -> str:
    root = next(iter(member_dot.children[0].scan_values(lambda token: token.type == "IDENT")), None)
    return f"{root}.{member_dot.children[1]}"


def _misfit_in(tree: Any, kinds: dict[str, type[Value]]) -> str:
    """The library compares true with numbers and texts with truths; an operator who writes that meant something else."""
    for node in tree.iter_subtrees():
        if node.data in {"conditionalor", "conditionaland"} and len(node.children) > 1:
            wrong = [kind for kind in (_kind(child, kinds) for child in node.children) if kind not in {bool, None}]
            if wrong:
                return f"types do not fit: {_NAMES[wrong[0]]} where true or false is needed"
        if node.data in {"relation", "addition", "multiplication"} and len(node.children) > 1:
            operator, right = node.children
            a, b = _kind(operator.children[0], kinds), _kind(right, kinds)
            if a is None or b is None or operator.data == "relation_in":
                continue
            if a is not b or (a is bool and operator.data not in _EQUAL):
                return f"types do not fit: {_NAMES[a]} and {_NAMES[b]} do not go together here"
    return ""


def _kind(node: Any, kinds: dict[str, type[Value]]) -> Any:
    """The kind of a part of a condition: of a fact, a literal or a comparison; None where it is not plain."""
    while True:
        if not hasattr(node, "data"):
            return _LITERALS.get(node.type)
        if node.data == "member_dot":
            return kinds.get(_fact(node))
        if node.data in {"relation", "conditionalor", "conditionaland"} and len(node.children) > 1:
            return bool
        if len(node.children) != 1 or node.data.endswith("_arg"):
            return None
        node = node.children[0]


def _activation(facts: Facts) -> Any:
    from celpy.celtypes import BoolType, DoubleType, MapType, StringType  # noqa: PLC0415

    tables: dict[str, Any] = {}
    for name, value in facts.items():
        group, _, key = name.partition(".")
        if isinstance(value, bool):
            typed: Any = BoolType(value)
        else:
            typed = DoubleType(value) if isinstance(value, int | float) else StringType(value)
        tables.setdefault(group, MapType())[StringType(key)] = typed
    return tables


def _example(kind: type[Value], truth: bool) -> Value:
    if kind is bool:
        return truth
    return "x" if kind is str else (1.0 if truth else 0.0)


def _is_bool(result: Any) -> bool:
    from celpy.celtypes import BoolType  # noqa: PLC0415

    return isinstance(result, bool | BoolType)


def _short(error: Exception) -> str:
    text = str(error.args[0] if error.args else error)
    text = re.sub(r"Token\('RULE', '(\w+)'\)", r"\1", text)
    text = re.sub(r"<class 'celpy\.celtypes\.(\w+)Type'>", r"\1", text)
    return " ".join(text.split())[:200]
