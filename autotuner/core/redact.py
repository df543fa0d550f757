"""Take secrets out of argv, environments and free text, and defuse untrusted text.

Owns two promises: no secret value reaches a log, the journal or the store, and no text that a server wrote can
look like a part of the journal or drive a terminal.
"""

import base64
import json
import re
from functools import lru_cache
from typing import Any

HIDDEN = "***"
SECRET_CHARACTERS_MIN = 4
BASE64_CHARACTERS_MIN = 8
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")

_SECRET_NAME = re.compile(
    r"(^|[_-])(api[_-]?keys?|secrets?|credentials?|private[_-]?key|access[_-]?key)($|[_-])|passw(or)?d|passphrase",
    re.IGNORECASE,
)
# A name that ends in "token" is a credential unless the word before says that it counts or marks a model's tokens.
_TOKEN_OF_A_MODEL = frozenset(
    """
max num min total new draft prefill decode batched swa per by eos bos pad unk sep cls mask stop special first next last
inter think image audio video chunk context
""".split()  # noqa: SIM905 - a paragraph of words reads better than a list of them
)
_SECRET_TEXT = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16})\b"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{8,}=*"
    r"|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
)
_ASSIGNED = re.compile(r"""(?<![\w-])(-{0,2}[A-Za-z_][\w-]*)=("[^"]*"|'[^']*'|[^\s"',;&)}\]]+)""")
# `"api_key": "..."` as JSON and Python write it, also inside of a string, where the quotes have a backslash each.
_KEYED = re.compile(r"""(\\?["'])([A-Za-z_][\w-]*)\1(\s*:\s*)(\\?["'])((?:(?!\4).)+)\4""")
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)


def names_secret(name: str) -> bool:
    """Given a flag or variable name, tell whether its value is a secret (`HF_TOKEN` is, `max-total-tokens` is not)."""
    if _SECRET_NAME.search(name):
        return True
    words = re.split(r"[_-]+", name.lower())
    counts = words[0] in {"max", "num", "min", "total"}
    return words[-1] == "token" and not counts and not _TOKEN_OF_A_MODEL.intersection(words[-2:-1])


def redact_text(text: str, values: frozenset[str] = frozenset()) -> str:
    """Given free text and known secret values, return it with those, well-known token shapes and `secret=...` hidden."""
    for form in _forms(values):
        text = text.replace(form, HIDDEN)
    return _KEYED.sub(_hide_if_keyed, _ASSIGNED.sub(_hide_if_secret, _SECRET_TEXT.sub(HIDDEN, text)))


def shows_secret(text: str) -> bool:
    """Given text of any kind, tell whether something in it has the shape of a well-known kind of secret."""
    return _SECRET_TEXT.search(text) is not None


def hide(text: str, values: frozenset[str]) -> str:
    """Given untrusted text, return it plain and with secrets hidden, also one that terminal escapes kept apart."""
    return redact_text(plain(redact_text(text, values), len(text) + 4096), values)


def hide_values(value: Any, values: frozenset[str]) -> Any:
    """Given JSON-like data or a text that may be JSON, return it with known secret values hidden in all its texts."""
    if not values:
        return value
    if isinstance(value, str):
        return _hide_in_text(value, values)
    if isinstance(value, dict):
        return {hide_values(key, values): hide_values(item, values) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(hide_values(item, values) for item in value) if type(value) in {list, tuple} else value
    return value


def _hide_in_text(text: str, values: frozenset[str]) -> str:
    """JSON stays JSON: only its texts are changed, never a number that happens to look like a secret."""
    if text[:1] in {"{", "["}:
        try:
            data = json.loads(text)
        except ValueError:
            pass
        else:
            hidden = hide_values(data, values)
            return text if hidden == data else json.dumps(hidden)
    for form in _forms(values):
        text = text.replace(form, HIDDEN)
    return text


@lru_cache(maxsize=64)
def _forms(values: frozenset[str]) -> tuple[str, ...]:
    """The texts that give a secret away: itself, a line of it, and as programs print it in URLs, JSON and headers."""
    forms: set[str] = set()
    for value in values:
        lines = [line.strip() for line in value.splitlines()]
        for text in {value, *(line for line in lines if len(line) >= 8 and not line.startswith("-----"))}:
            if len(text) >= 4:
                raw = text.encode("utf-8", "surrogatepass")
                forms |= {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]}
                forms |= {*_in_urls(raw), *_in_base64(raw)}
    return tuple(sorted((form for form in forms if len(form) >= 4), key=lambda form: (-len(form), form)))


def _in_urls(raw: bytes) -> set[str]:
    """Percent-encoded, with or without what is legal in a path, in either case, and with blanks as +."""
    found = set()
    for kept in (b"", b"/", b"/:@!$&'()*+,;=?"):
        for digits in ("%{:02X}", "%{:02x}"):
            plain_bytes = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~" + kept
            text = "".join(chr(byte) if byte in plain_bytes else digits.format(byte) for byte in raw)
            found |= {text, text.replace("%20", "+")}
    return found


def _in_base64(raw: bytes) -> set[str]:
    """What is the same of its base64 whatever stands before and after it (as a name does in basic authentication)."""
    found = set()
    if len(raw) >= 6:  # less of it would be found by chance
        for before in range(3):
            coded = base64.b64encode(bytes(before) + raw).decode().rstrip("=")
            sure = coded[(before * 8 + 5) // 6 : (before + len(raw)) * 8 // 6]
            found |= {sure, sure.replace("+", "-").replace("/", "_")}
    return found


def _hide_if_secret(match: re.Match[str]) -> str:
    name = match.group(1)
    return f"{name}={HIDDEN}" if names_secret(name.lstrip("-")) else match.group(0)


def _hide_if_keyed(match: re.Match[str]) -> str:
    quote, name, colon, other, _ = match.groups()
    return f"{quote}{name}{quote}{colon}{other}{HIDDEN}{other}" if names_secret(name) else match.group(0)


def redact_argv(argv: tuple[str, ...], values: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Given an argv, return it with the values of secret flags hidden (`--api-key X Y` and `--api-key=X`)."""
    shown: list[str] = []
    hides = ""  # the dashes with which a word must begin not to be a value of the secret flag before it
    for word in argv:
        flag, equals, _ = word.partition("=")
        if hides and not word.startswith(hides):
            shown.append(HIDDEN)
            hides = "-"  # a flag may take several values; the first may begin with a dash
            continue
        secret = names_secret(flag.lstrip("-"))
        shown.append(f"{flag}={HIDDEN}" if equals and secret else redact_text(word, values))
        hides = "--" if flag.startswith("-") and secret and not equals else ""
    return tuple(shown)


def plain(text: str, limit: int = 4096) -> str:
    """Given untrusted text, return it without terminal escapes, control or direction marks, cut to `limit` characters.

    Line breaks stay; a carriage return becomes one, so that a redrawn progress bar reads as lines.
    """
    text = _ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROL.sub("", text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def one_line(text: str, limit: int = 300) -> str:
    """Given untrusted text, return it as one plain line of at most `limit` characters."""
    return plain(" ".join(plain(text, limit * 4).split()), limit)
