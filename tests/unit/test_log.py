"""The daemon's log hides secrets and escapes in whatever a line is made of: texts, lists, data, errors with their stories."""

import io
import json
from collections.abc import Iterator

import pytest
import structlog

from autotuner import log

SECRET = 'c4n4ry/0f the="m1ne"'


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    out = io.StringIO()
    monkeypatch.setattr(log, "_secrets", {SECRET})
    log.configure(as_json=True)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(out), cache_logger_on_first_use=False)
    yield out
    structlog.reset_defaults()


def test_a_secret_is_hidden_in_every_kind_of_value(lines: io.StringIO) -> None:
    log.get().info(f"a {SECRET}", text=SECRET, list=[SECRET], map={"x": {"y": (SECRET, 1)}}, error=ValueError(SECRET))
    log.get().error("failed", exc_info=ValueError(f"it was {SECRET}"))
    said = lines.getvalue()
    assert "m1ne" not in said
    assert said.count("***") >= 6


def test_a_secret_that_escapes_kept_apart_is_hidden(lines: io.StringIO) -> None:
    log.get().info("said", text=SECRET[:4] + "\x1b[1m" + SECRET[4:])
    assert "m1ne" not in lines.getvalue()
    assert "\\u001b" not in lines.getvalue()


def test_what_is_no_text_stays_what_it_is(lines: io.StringIO) -> None:
    log.get().info(
        "said", count=3, rate=1.5, sure=True, nothing=None, list=[1, "two"], api_key="x", map={"api_key": "x"}
    )
    said = json.loads(lines.getvalue())
    assert {key: said[key] for key in ("count", "rate", "sure", "nothing", "list")} == {
        "count": 3,
        "rate": 1.5,
        "sure": True,
        "nothing": None,
        "list": [1, "two"],
    }
    assert said["api_key"] == said["map"]["api_key"] == "***"
