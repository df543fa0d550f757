"""Take secrets out of argv, environments and free text, and defuse untrusted text.

Owns two promises: no secret value reaches a log, the journal or the store, and no text that a server wrote can
look like a part of the journal or drive a terminal.
"""

import re

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"(^|[_-])(api[_-]?keys?|token|secrets?|passw(or)?d|passphrase|credentials?|private[_-]?key|access[_-]?key)($|[_-])",
    re.IGNORECASE,
)
_NOT_SECRET = re.compile(
    r"(max|num|min|chunk|new|draft|prefill|batched|swa|total|per|context|eos|pad|bos|stop|special|by|add|skip)"
    r"[_-]?([a-z0-9]+[_-])*token",
    re.IGNORECASE,
)
_SECRET_TEXT = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16})\b"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{8,}=*"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


def names_secret(name: str) -> bool:
    """Given a flag or variable name, tell whether its value is a secret (`HF_TOKEN` is, `max-total-tokens` is not)."""
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.search(name)


def redact_text(text: str, values: frozenset[str] = frozenset()) -> str:
    """Given free text and known secret values, return it with both those and well-known token shapes hidden."""
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= 4:
            text = text.replace(value, HIDDEN)
    return _SECRET_TEXT.sub(HIDDEN, text)


def redact_argv(argv: tuple[str, ...], values: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Given an argv, return it with the values of secret flags hidden (`--api-key X` and `--api-key=X`)."""
    shown: list[str] = []
    hide_next = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        if hide_next and not word.startswith("--"):
            shown.append(HIDDEN)
        elif flag.startswith("-") and equals and names_secret(flag.lstrip("-")):
            shown.append(f"{flag}={HIDDEN}")
        else:
            shown.append(redact_text(word, values))
        hide_next = flag.startswith("-") and not equals and names_secret(flag.lstrip("-"))
    return tuple(shown)


def redact_env(env: dict[str, str], values: frozenset[str] = frozenset()) -> dict[str, str]:
    """Given an environment, return it with the values of secret variables hidden."""
    return {n: HIDDEN if names_secret(n) else redact_text(v, values) for n, v in env.items()}


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
