"""The daemon's own log: structlog to standard error, JSON where nobody watches, secrets hidden by the last processor."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from autotuner.core import redact
from autotuner.core.redact import HIDDEN, names_secret, plain

_secrets: set[str] = set()


def hide(values: frozenset[str]) -> None:
    """Register secret values that must not appear in the log, whatever they are part of."""
    _secrets.update(values)


def configure(*, as_json: bool, debug: bool = False) -> None:
    """Set structlog up, once a process."""
    renderer: Any = structlog.processors.JSONRenderer(ensure_ascii=False)
    if not as_json:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _redact,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if debug else logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def get() -> Any:
    """The daemon's logger."""
    return structlog.get_logger()


def _redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    secrets = frozenset(_secrets)
    for key, value in event.items():
        event[key] = HIDDEN if names_secret(key) else _shown(value, secrets)
    return event


def _shown(value: Any, secrets: frozenset[str]) -> Any:
    """A value of a log line, without secrets and terminal escapes; lists, paths and errors hold texts as well."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): HIDDEN if names_secret(str(key)) else _shown(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(item, secrets) for item in value]
    return plain(redact.hide(str(value), secrets), 8000)
