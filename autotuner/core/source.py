"""TOML text with its positions: parse, validate against a model, and say file, line, key and nearest name.

Owns the promise that every error in a file the operator wrote names the place and what would be right there.
"""

import difflib
import re
import tomllib
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from autotuner.core.redact import HIDDEN, names_secret, one_line
from autotuner.errors import InvalidInput, Problem

Key = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)

_HEADER = re.compile(r"^\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(#.*)?$")
_ASSIGNMENT = re.compile(
    r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_KEY_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")
_UNION_TAG = re.compile(r"int|float|bool|str|none|\[key\]|constrained-(?:str|int|float)|[a-z-]+[\[(].*[\])]")
_TYPES = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "tuple_type": "a list",
}
_TOML_PLACE = re.compile(r"\(at line (\d+), column \d+\)|\(at end of document\)")


@dataclass(frozen=True)
class Source:
    """The text of one file and the name to call it by in messages."""

    name: str
    text: str


def parse(source: Source) -> dict[str, Any]:
    """Given a TOML source, return its table. Raise InvalidInput with the line if it is not TOML."""
    try:
        return tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        place = _TOML_PLACE.search(str(error))
        at_end = source.text.rstrip("\n").count("\n") + 1
        line = int(place.group(1)) if place and place.group(1) else at_end
        message = "not valid TOML: " + _TOML_PLACE.sub("", str(error)).strip()
        raise InvalidInput([Problem(source.name, message, line)]) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
        raise InvalidInput([Problem(source.name, f"cannot be read as TOML: {why}")]) from None


def lines_of(text: str) -> dict[Key, int]:
    """Given TOML text, return the 1-based line on which each key path starts.

    Values inside inline tables and arrays are not listed; `line_of` falls back to the nearest listed parent.
    """
    found: dict[Key, int] = {}
    counts: dict[Key, int] = {}
    prefix: Key = ()
    quote = ""
    for number, line in enumerate(text.split("\n"), 1):
        if quote:
            quote = "" if line.count(quote) % 2 else quote
            continue
        header = _HEADER.match(line)
        assignment = None if header else _ASSIGNMENT.match(line)
        if header:
            prefix = _key(header.group(2))
            if header.group(1) == "[[":
                index = counts.get(prefix, 0)
                counts[prefix] = index + 1
                prefix = (*prefix, index)
            found.setdefault(prefix, number)
        elif assignment:
            found.setdefault(prefix + _key(assignment.group(1)), number)
        quote = _opened_quote(line)
    return found


def line_of(lines: dict[Key, int], path: Key) -> int | None:
    """Given the result of `lines_of` and a key path, return its line or that of its nearest listed parent."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def nearest(word: str, known: list[str]) -> str:
    """Given a wrong word and the right ones, return a hint naming the nearest, or all when they are few."""
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if match:
        return f"did you mean {match[0]}?"
    return f"known: {', '.join(sorted(known))}" if 0 < len(known) <= 16 else ""


def validate(model: type[Model], source: Source) -> Model:
    """Given a pydantic model and a TOML source, return the model filled in. Raise InvalidInput naming every problem."""
    table = parse(source)
    try:
        return model.model_validate(table)
    except ValidationError as error:
        lines = lines_of(source.text)
        by_path: dict[Key, list[Any]] = {}
        for item in error.errors():
            by_path.setdefault(_path(item), []).append(item)
        raise InvalidInput([_problem(model, source, lines, path, items) for path, items in by_path.items()]) from None


def wrong_at(path: Key, message: str) -> PydanticCustomError:
    """Given a key path and what is wrong there, return the error that a model's validator may raise to say so."""
    return PydanticCustomError("wrong_at", "{message}", {"message": message, "path": path})


def problem_at(source: Source, path: Key, message: str, hint: str = "") -> Problem:
    """Given a source, a key path in it and what is wrong there, return the Problem with its line."""
    return Problem(source.name, message, line_of(lines_of(source.text), path), dotted(path), hint)


def dotted(path: Key) -> str:
    """Given a key path, return it as an operator would write it: `launch.args.tp-size`, `window[0].from`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text


def _path(item: Any) -> Key:
    """The key path of one of pydantic's errors, without what is no key of the file."""
    inner: Key = item.get("ctx", {}).get("path", ()) if item["type"] == "wrong_at" else ()
    return (*(part for part in item["loc"] if not _is_union_tag(part)), *inner)


def _problem(
    model: type[BaseModel], source: Source, lines: dict[Key, int], path: Key, items: list[dict[str, Any]]
) -> Problem:
    """All errors at one path as one problem: a union gives an error for each of its types."""
    item = items[0]
    kind, message, hint = item["type"], str(item["msg"]), ""
    if len(items) > 1:
        types = [_TYPES.get(other["type"], str(other["msg"])) for other in items]
        message = f"should be {', '.join(types[:-1])} or {types[-1]}, found {_shown(path, item['input'])}"
    elif kind == "extra_forbidden":
        message, hint = "unknown key", nearest(str(path[-1]), _field_names(model, path[:-1]))
    elif kind == "missing":
        message = "is missing"
    elif kind in {"literal_error", "enum"}:
        expected = re.findall(r"'([^']+)'", str(item.get("ctx", {}).get("expected", "")))
        message, hint = f"{_shown(path, item['input'])} is not one of them", nearest(str(item["input"]), expected)
    elif kind == "value_error":
        message = message.removeprefix("Value error, ")
    elif kind != "wrong_at":
        message = message[0].lower() + message[1:] + f", found {_shown(path, item['input'])}"
    return Problem(source.name, message, line_of(lines, path), dotted(path), hint)


def _is_union_tag(part: str | int) -> bool:
    """Pydantic puts the tried branch of a union (`int`, `list[...]`) into the path; it is no key of the file."""
    return isinstance(part, str) and bool(_UNION_TAG.fullmatch(part))


def _shown(path: Key, value: Any) -> str:
    """A value of the file as a message may show it."""
    return HIDDEN if any(names_secret(str(part)) for part in path) else one_line(repr(value), 160)


def _field_names(model: type[BaseModel], path: Key) -> list[str]:
    """Given a model and the path of a table in its file, return the key names that table may have."""
    current: Any = model
    for part in path:
        current = _inside(current, part)
    return [field.alias or name for name, field in getattr(current, "model_fields", {}).items()]


def _inside(annotation: Any, part: str | int) -> Any:
    """Given an annotation and one key below it, return the annotation of what that key holds, or None."""
    fields = getattr(annotation, "model_fields", None)
    if fields is not None:
        found = next((f for name, f in fields.items() if part in {name, f.alias}), None)
        return _without_none(found.annotation) if found is not None else None
    arguments = get_args(annotation)
    return _without_none(arguments[-1] if get_origin(annotation) is dict else arguments[0]) if arguments else None


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in {Union, UnionType}:
        return next(a for a in get_args(annotation) if a is not type(None))
    return annotation


def _key(text: str) -> Key:
    return tuple(part.strip("\"'") for part in _KEY_PART.findall(text))


def _opened_quote(line: str) -> str:
    """Given a line outside any string, return the multi-line quote that it leaves open, or ''."""
    for quote in ('"""', "'''"):
        if line.count(quote) % 2:
            return quote
    return ""
