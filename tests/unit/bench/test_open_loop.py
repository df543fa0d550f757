"""An open loop sends each request when it is due, whatever the server does, and says so where it could not."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fakes.fake_openai import Behaviour, FakeOpenAI, Seen
from patience import FOR_EVER_S, PATIENCE_S

from autotuner.bench.arrivals import arrivals
from autotuner.bench.benchmark import Benchmark
from autotuner.bench.client import LevelRun
from autotuner.bench.hotloop import HotLoop
from autotuner.bench.measurement import LevelSamples, Progress, figures
from autotuner.bench.target import Target
from autotuner.bench.workload import Ask, Workload

OPEN = Benchmark(
    levels=(40,),
    load="request-rate",
    prompt_tokens=16,
    output_tokens=4,
    seconds=1.0,
    warmup_requests=0,
    request_timeout_s=60.0,
)
FAST = Behaviour(tok_s=1000.0, ttft_ms=2.0)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=HotLoop) as runner:
        return runner.run(asyncio.wait_for(work, PATIENCE_S))


class Scripted(Workload):
    """Requests that are given, and turns that follow."""

    def __init__(self, benchmark: Benchmark, asks: list[Ask] | None = None, turns: int = 1) -> None:
        super().__init__(benchmark, 1, "m")
        self._asks = asks
        self._turns = turns
        self.heard: list[tuple[str, ...]] = []

    def _body(self, index: int, turn: int = 0) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"hello {index} {turn}"}]
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"messages": messages, "max_tokens": self.benchmark.output_tokens, **stream}

    def ask(self, index: int) -> Ask | None:
        if self._asks is not None:
            return self._asks[index] if index < len(self._asks) else None
        return Ask(self._body(index), more=self._turns > 1)

    def follow(self, index: int, said: tuple[str, ...]) -> Ask:
        self.heard.append(said)
        return Ask(self._body(index, len(said)), more=len(said) + 1 < self._turns)


async def stop_when(load: LevelRun, seen: Seen, true: Callable[[LevelRun, Seen], bool]) -> None:
    """Stop a load as soon as something is true of it, and a moment later, however long that takes on this machine."""
    while not true(load, seen):
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    load.stop()


def sent(count: int) -> Callable[[LevelRun, Seen], bool]:
    return lambda _, seen: seen.requests >= count


def level(
    benchmark: Benchmark,
    rate: float,
    behaviour: Behaviour = FAST,
    workload: Workload | None = None,
    until: Callable[[LevelRun, Seen], bool] | None = None,
    shard: tuple[int, int] = (0, 1),
) -> tuple[LevelSamples, Seen]:
    async def go() -> tuple[LevelSamples, Seen]:
        async with FakeOpenAI(behaviour) as server:
            target = Target(server.url, None, benchmark.endpoint)
            asked = benchmark.model_copy(update={"seconds": FOR_EVER_S}) if until else benchmark
            load = LevelRun(target, workload or Workload(asked, rate, "m"), rate, lambda _: None, shard=shard)
            watching = asyncio.create_task(stop_when(load, server.seen, until)) if until else None
            try:
                return await load.run(), server.seen
            finally:
                if watching is not None:
                    watching.cancel()

    return run(go())


def planned(benchmark: Benchmark, rate: float, count: int) -> list[float]:
    return [round(at, 6) for at in itertools.islice(arrivals(benchmark, rate), count)]


def test_every_request_is_due_when_the_plan_says_and_none_goes_out_before() -> None:
    samples, _ = level(OPEN, 40)
    due = sorted(r.due_s for r in samples.requests if r.due_s is not None)
    assert len(due) == len(samples.requests) > 15
    assert due == pytest.approx(planned(OPEN, 40, len(due)), abs=2e-6)
    assert all(r.sent_s >= (r.due_s or 0.0) for r in samples.requests)
    assert samples.open_loop
    assert not samples.held_back


def test_intended_times_are_kept_when_the_server_stalls() -> None:
    samples, _ = level(OPEN, 40, Behaviour(mode="health-ok-generate-hangs"), until=sent(20))
    due = sorted(r.due_s for r in samples.requests if r.due_s is not None)
    assert len(due) > 15, "they go out although none is answered"
    assert due == pytest.approx(planned(OPEN, 40, len(due)), abs=2e-6)
    assert all(r.cut for r in samples.requests)


def test_what_a_cap_holds_back_keeps_its_due_time_and_the_level_says_so() -> None:
    capped = OPEN.model_copy(update={"max_concurrency": 1})
    samples, seen = level(capped, 100, Behaviour(tok_s=100.0, ttft_ms=20.0), until=sent(15))
    assert samples.held_back
    due = sorted(r.due_s for r in samples.requests if r.due_s is not None)
    assert due == pytest.approx(planned(capped, 100, len(due)), abs=2e-6)
    ended = sorted((r.sent_s, r.end_s) for r in samples.requests if r.end_s is not None)
    assert all(end <= sent for (_, end), (sent, _) in itertools.pairwise(ended)), "never two at once"
    late = [r.sent_s - (r.due_s or 0.0) for r in samples.requests]
    assert max(late) > 0.1
    assert seen.requests == len(samples.requests)


def test_requests_held_back_from_the_steady_part_are_waited_for_after_it() -> None:
    capped = OPEN.model_copy(update={"max_concurrency": 2, "arrivals": "constant"})
    samples, _ = level(capped, 30, Behaviour(tok_s=1000.0, ttft_ms=80.0))  # 24 a second at most
    assert samples.steady_from_s is not None
    assert samples.steady_to_s is not None
    steady = [r for r in samples.requests if samples.steady_from_s <= r.began_s < samples.steady_to_s]
    assert len(steady) == pytest.approx(30 * (samples.steady_to_s - samples.steady_from_s), abs=1)
    assert not any(r.cut or r.error for r in steady)
    assert max(r.sent_s for r in steady) > samples.steady_to_s


def test_the_shards_of_a_level_send_its_arrivals_between_them_each_once() -> None:
    parts = [level(OPEN, 40, shard=(number, 3), until=sent(8))[0] for number in range(3)]
    due = sorted(r.due_s for part in parts for r in part.requests if r.due_s is not None)
    plan = planned(OPEN, 40, len(due))
    assert due[:15] == pytest.approx(plan[:15], abs=2e-6)


def test_the_shards_of_a_level_share_its_cap_and_its_number_of_requests() -> None:
    capped = OPEN.model_copy(update={"max_concurrency": 3})
    stuck = Behaviour(mode="health-ok-generate-hangs")
    parts = [level(capped, 100, stuck, shard=(number, 2), until=sent(2 - number))[0] for number in range(2)]
    assert [len(part.requests) for part in parts] == [2, 1]
    counted = OPEN.model_copy(update={"requests": 10, "seconds": 60.0})
    ended = [level(counted, 60, shard=(number, 2))[0] for number in range(2)]
    for part in ended:
        assert part.steady_from_s is not None
        assert sum(r.end_s is not None for r in part.requests) in range(5, 12)
        assert not part.stopped_early


def test_a_level_of_so_many_requests_ends_with_them() -> None:
    closed = OPEN.model_copy(update={"load": "concurrency", "requests": 9, "seconds": 60.0, "levels": (2,)})
    samples, _ = level(closed, 2)
    assert samples.steady_to_s is not None
    assert sum(r.end_s is not None for r in samples.requests) in {9, 10}
    assert samples.steady_to_s < 30
    assert not samples.stopped_early


def trace(*at_s: float) -> Scripted:
    benchmark = OPEN.model_copy(update={"load": "trace", "dataset": "x", "seconds": 30.0})
    asks = [Ask(Scripted(benchmark)._body(i), at_s=at) for i, at in enumerate(at_s)]
    return Scripted(benchmark, asks)


def test_a_trace_is_played_as_recorded_and_its_end_is_the_levels() -> None:
    made = trace(0.05, 0.1, 0.1, 0.4)
    samples, seen = level(made.benchmark, 1, workload=made)
    assert [r.due_s for r in samples.requests] == pytest.approx([0.05, 0.1, 0.1, 0.4], abs=1e-5)
    assert seen.answered == 4
    assert not any(r.cut or r.error for r in samples.requests)
    assert figures(samples).requests_ok == 4


def test_a_trace_without_requests_ends_at_once() -> None:
    made = trace()
    samples, seen = level(made.benchmark, 1, workload=made)
    assert (samples.requests, seen.requests) == ((), 0)


def test_each_turn_of_a_conversation_follows_the_answer_before_it_and_is_due_then() -> None:
    benchmark = OPEN.model_copy(update={"turns": 3, "endpoint": "chat", "seconds": FOR_EVER_S})
    made = Scripted(benchmark, turns=3)
    samples, _ = level(benchmark, 10, workload=made, until=lambda _, seen: seen.answered >= 12)
    assert {r.turn for r in samples.requests} == {0, 1, 2}
    assert (" the lighthouse keeper",) in made.heard
    ends = {r.end_s for r in samples.requests}
    assert all(r.due_s in ends for r in samples.requests if r.turn), "what the client was late counts"


def test_nobody_waits_for_a_server_that_answers_nothing() -> None:
    warm = OPEN.model_copy(update={"warmup_requests": 1, "seconds": 30.0})
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("autotuner.bench.client.HOPELESS_S", 0.5)
        samples, _ = level(warm, 40, Behaviour(mode="http-500"))
    assert samples.steady_from_s is None
    assert set(figures(samples).errors) == {"HTTP 500"}


@pytest.mark.parametrize("load", ["concurrency", "request-rate"])
def test_the_steady_part_begins_after_the_ramp(load: str) -> None:
    ramp = OPEN.model_copy(update={"ramp_s": 0.7, "load": load})
    samples, _ = level(ramp, 8, until=lambda load, _: load._phase == "steady")
    assert samples.steady_from_s is not None
    assert samples.steady_from_s >= 0.7


def test_hundreds_in_flight_are_held_at_once_and_dropped_at_once() -> None:
    flood = OPEN.model_copy(update={"arrivals": "constant"})
    samples, seen = level(flood, 1500, Behaviour(mode="health-ok-generate-hangs"), until=sent(500))
    assert len(samples.requests) >= 500
    assert seen.requests <= len(samples.requests)
    assert not any(r.error for r in samples.requests)


def test_a_stop_does_not_wait_for_prompts_names_or_connections() -> None:
    class Slow(Target):
        async def addresses(self) -> Any:
            await asyncio.sleep(FOR_EVER_S)

    async def go() -> LevelSamples:
        load = LevelRun(Slow("http://127.0.0.1:1"), Workload(OPEN, 40, "m"), 40, lambda _: None)
        asyncio.get_running_loop().call_later(0.1, load.stop)
        return await asyncio.wait_for(load.run(), PATIENCE_S)

    assert run(go()).stopped_early


def test_a_warm_shard_says_so_in_every_line_until_it_is_told_to_begin() -> None:
    heard: list[Progress] = []

    async def go() -> LevelSamples:
        async with FakeOpenAI(FAST) as server:
            told: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()

            async def begin(busy: float) -> float | None:
                load.wait(busy)
                return await told

            def hear(progress: Progress) -> None:
                heard.append(progress)
                if [p.waits for p in heard].count(True) >= 2 and not told.done():
                    told.set_result(None)

            load = LevelRun(Target(server.url), Workload(OPEN, 40, "m"), 40, hear, shard=(0, 2), begin=begin)
            return await load.run()

    run(go())
    waiting = [p.waits for p in heard]
    assert waiting.count(True) >= 2
    assert waiting == sorted(waiting)
