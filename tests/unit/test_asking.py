"""The fixed prompts are asked in order and within their time; what was answered is kept, and nothing fails for the rest."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from autotuner import measure
from autotuner.core.answers import PROMPTS
from autotuner.core.candidate import Candidate, Launch
from autotuner.edge import clock
from autotuner.edge.probes import Generated


class Slow:
    """A server whose every answer takes so many seconds, by a clock that tests turn; the fifth prompt may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, *, fails: bool = False) -> None:
        self.now, self.seconds, self.fails = 0.0, seconds, fails
        self.asked: list[str] = []
        monkeypatch.setattr(clock, "monotonic_s", lambda: self.now)

    async def model(self) -> str:
        return "m"

    async def complete(self, prompt: str, tokens: int, model: str | None) -> Generated:
        self.now += self.seconds
        self.asked.append(prompt)
        if self.fails and len(self.asked) == 5:
            return Generated(ok=False, error="HTTP 500: no")
        return Generated(ok=True, tokens=tokens, text=f"answer {len(self.asked)}")


class Here:
    """A host whose connection is never lost."""

    async def free_disk_mib(self) -> float:
        return 1000.0


def kept(server: Slow) -> tuple[bool, list[str]]:
    columns: dict[str, Any] = {}
    store = SimpleNamespace(update_trial=lambda _, **more: columns.update(more))
    ctx: Any = SimpleNamespace(store=store, name="t", host=Here(), uncut=lambda _: None)
    whole = asyncio.run(measure._ask_answers(ctx, 1, server, 0))  # type: ignore[arg-type]
    return whole, json.loads(columns["answers"])


def test_every_prompt_is_asked_in_order_and_every_answer_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Slow(monkeypatch, 1.0)
    assert kept(server) == (True, [f"answer {n}" for n in range(1, 9)])
    assert tuple(server.asked) == PROMPTS


def test_a_slow_server_is_asked_no_more_once_the_time_is_over_and_keeps_what_it_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kept(Slow(monkeypatch, 25.0)) == (False, ["answer 1", "answer 2", "answer 3"])


def test_a_server_that_cannot_be_asked_has_the_answers_it_gave_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(Slow(monkeypatch, 1.0, fails=True)) == (False, [f"answer {n}" for n in range(1, 5)])


@pytest.mark.parametrize("lives", [True, False])
def test_a_server_that_hangs_at_a_prompt_fails_by_that_and_its_variables_are_named(lives: bool) -> None:
    """It is no error of the measurement, and nobody else's requests are to blame."""
    columns: dict[str, Any] = {}
    level: Any = measure._Level.__new__(measure._Level)

    async def alive() -> bool:
        return lives

    async def facts() -> tuple[()]:
        return ()

    store = SimpleNamespace(update_trial=lambda _, **more: columns.update(more))
    level.ctx = SimpleNamespace(store=store, uncut=lambda _: None)
    level.trial = SimpleNamespace(id=1)
    launch = Launch(model="/m", args={"tp-size": 2}, env={"NCCL_PROTO": "LL"})
    level.candidate = Candidate(name="x", engine="sglang", launch=launch)
    level.log = SimpleNamespace(facts=facts, since=lambda _: ())
    level._alive = alive
    assert asyncio.run(level.hangs_at_prompts(0)) is lives
    if not lives:
        assert not columns  # its death tells more
        return
    ended = json.loads(columns["ended"])
    assert (ended["rule"], ended["verdict"]) == ("does-not-answer", "fail")
    assert "did not answer a fixed prompt within 60 s" in ended["sentence"]
    assert "this candidate sets NCCL_PROTO = LL" in ended["sentence"]
