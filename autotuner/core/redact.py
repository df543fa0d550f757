"""Take secrets out of argv, environments and free text, and defuse untrusted text.

Owns two promises: no secret value reaches a log, the journal or the store, and no text that a server wrote can
look like a part of the journal or drive a terminal.
"""

import re
from base64 import b64encode
from functools import cache

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
    for value in _forms(values):
        text = text.replace(value, HIDDEN)
    return _KEYED.sub(_hide_if_keyed, _ASSIGNED.sub(_hide_if_secret, _SECRET_TEXT.sub(HIDDEN, text)))


def shows_secret(text: str) -> bool:
    """Given text of any kind, tell whether something in it has the shape of a well-known kind of secret."""
    return _SECRET_TEXT.search(text) is not None


@cache
def _forms(values: frozenset[str]) -> tuple[str, ...]:
    """Given secret values, return what they look like in text, longest first: as they are, in a URL, and in base64.

    Base64 puts three bytes into four characters, so a value inside of something longer has three looks, of which the
    characters at both ends hold a part of what is beside it; those are left out.
    """
    found = set()
    for value in values:
        data = value.encode("utf-8", "surrogatepass")
        if len(value) < SECRET_CHARACTERS_MIN:
            continue  # to hide each `1` would make every text unreadable, and hide nothing
        found |= {value, "".join(map(_in_url, data)), "".join(map(_in_url, data)).replace("%2F", "/")}
        for before in range(3):
            coded = b64encode(bytes(before) + data).decode("ascii").rstrip("=")
            whole = coded[(0, 2, 3)[before] : len(coded) - (1 if (before + len(data)) % 3 else 0)]
            if len(whole) >= BASE64_CHARACTERS_MIN:
                found |= {whole, whole.replace("+", "-").replace("/", "_")}
    return tuple(sorted(found, key=len, reverse=True))


def _in_url(byte: int) -> str:
    character = chr(byte)
    return character if character in _UNRESERVED else f"%{byte:02X}"


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
