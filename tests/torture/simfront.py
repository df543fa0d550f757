"""What the daemon meets over the network in the simulation: a server's HTTP interface, and the load of a level."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

from autotuner.bench.deadline import SILENT_S
from autotuner.bench.samples import BIN_S, LevelSamples, Progress, RequestSample
from autotuner.edge.probes import GENERATE_TIMEOUT_S, LOOK_TIMEOUT_S, Generated
from autotuner.engines.base import Counters
from autotuner.errors import HostError
from torture.simhost import Server, SimHost

PROGRESS_S = 1.0
OUTPUT_TOKENS = 32
CLIENT_DELAY_S = 0.01


class SimProbe:
    """The Probe of the simulation: whoever holds the port answers, as that one is now."""

    def __init__(self, host: SimHost, port: int, *, metrics: bool) -> None:
        self._host, self._world, self._port, self._metrics = host, host.world, port, metrics
        self._rng = host.world.rng("probe")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""

    async def _who(self) -> Any:
        world = self._world
        world.kill_here()
        await asyncio.sleep(self._rng.choice((0.0, 0.002)))
        if world.faults.strike("probe finds nobody"):
            return None
        if world.faults.strike("probe hangs"):
            await asyncio.sleep(LOOK_TIMEOUT_S)
            return None
        return self._host.on_port(self._port)

    def _hangs(self, server: Server) -> bool:
        return self._world.now >= server.hangs_at or not server.main

    async def healthy(self) -> bool:
        who = await self._who()
        if isinstance(who, Server):
            return not self._hangs(who) or who.lies or who.workers
        return who is not None

    async def model(self) -> str | None:
        who = await self._who()
        return "org/model" if isinstance(who, Server) else "somebody-elses" if who is not None else None

    async def generate(self, model: str | None) -> Generated:
        return await self.complete("", 8, model)

    async def complete(self, prompt: str, tokens: int, model: str | None) -> Generated:
        who = await self._who()
        if who is None:
            return Generated(ok=False, error="ConnectError: nobody listens")
        if not isinstance(who, Server):
            return Generated(ok=True, tokens=tokens, text=" Paris")
        if self._hangs(who):
            await asyncio.sleep(GENERATE_TIMEOUT_S)
            return Generated(ok=False, error=f"no whole answer within {GENERATE_TIMEOUT_S:g} s")
        if who.mute:
            return Generated(ok=False, error="an answer without a single token")
        await asyncio.sleep(0.05)
        if not who.main:
            return Generated(ok=False, error="ReadError")
        who.generated_at = self._world.awake_s
        return Generated(ok=True, tokens=tokens, text=f" the answer to {len(prompt)} letters is always the same text")

    async def scrape(self) -> str | None:
        who = await self._who()
        if not isinstance(who, Server) or not self._metrics or self._hangs(who):
            return None
        others = 2 if self._world.faults.strike("others use the server") else 0
        return f'vllm:num_requests_running{{engine="0"}} {others}.0\nvllm:num_requests_waiting{{engine="0"}} 0.0\n'

    async def requests(self, read_metrics: Callable[[str], Counters]) -> float:
        text = await self.scrape()
        counters = read_metrics(text) if text else Counters()
        return (counters.running or 0.0) + (counters.queued or 0.0)

    async def info(self, paths: str) -> tuple[str, str] | None:
        await self._who()
        return None

    async def flush_cache(self) -> None:
        await self._who()


class SimLoad:
    """The Load of the simulation: speaks once a second, and has samples whose rate is the server's."""

    def __init__(self, host: SimHost, port: int, level: int, seconds: float) -> None:
        self.void, self.hung = "", False
        self._host, self._world, self._port = host, host.world, port
        self._level, self._longest_s = level, 4 * seconds
        self._rng = host.world.rng("load")
        self._finish = self._stop = False

    async def __aenter__(self) -> Self:
        self._world.kill_here()
        if self._world.faults.strike("client is missing"):
            raise HostError("the benchmark worker cannot be run: No such file or directory")
        await asyncio.sleep(CLIENT_DELAY_S)
        who = self._host.on_port(self._port)
        nature = who.nature if isinstance(who, Server) else None
        self._tok_s = nature.tok_s * self._rng.gauss(1.0, 0.01) if nature else 0.0
        self._fails = self._world.faults.strike("requests fail")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It has no process."""

    def finish(self) -> None:
        self._finish = True

    def stop(self) -> None:
        self._stop = True

    async def messages(self) -> AsyncIterator[Progress | LevelSamples]:
        """One line of warm-up, then a line a second until told to end or the longest time is over."""
        began_s = self._world.now
        done, rates = 0, list[float]()
        dies = self._rng.randrange(5) if self._world.faults.strike("client dies") else -1
        for turn in itertools.count():
            await asyncio.sleep(PROGRESS_S)
            if turn == dies and self._world.faults.strike("client hangs"):
                await asyncio.sleep(SILENT_S)
                self.hung, self.void = True, f"the benchmark's client hung: it said nothing for {SILENT_S:.0f} s"
                yield LevelSamples(concurrency=self._level, stopped_early=True)
                return
            if turn == dies:
                raise HostError("the benchmark worker ended without a result: Killed")
            now_s = self._world.now - began_s
            rate = self._rate() if turn else 0.0
            if turn:
                rates.append(rate)
            events = int(rate * PROGRESS_S)
            done += events // OUTPUT_TOKENS + (self._level if turn == 1 and rate else 0)
            failed = self._level if self._fails and turn else 0
            yield Progress.model_construct(
                kind="progress", at_s=now_s, phase="steady" if turn else "warm-up", events=events, in_flight=self._level,
                done=done, failed=failed, tokens_per_event=1.0, busy_ratio=0.1, waits=False,
            )  # fmt: skip
            if self._finish or self._stop or now_s > self._longest_s:
                break
        if self._world.faults.strike("client ends without samples"):
            return
        yield self._samples(rates)

    def _rate(self) -> float:
        who = self._host.on_port(self._port)
        if not isinstance(who, Server) or not who.main or self._world.now >= who.hangs_at or who.mute:
            return 0.0
        return self._tok_s * self._level * self._rng.gauss(1.0, 0.01)

    def _samples(self, rates: list[float]) -> LevelSamples:
        rng, bins_s = self._rng, int(PROGRESS_S / BIN_S)
        bins = tuple(max(0, round(rate * BIN_S * rng.gauss(1.0, 0.02))) for rate in rates for _ in range(bins_s))
        to_s = PROGRESS_S * (1 + len(rates))
        slow = self._world.faults.strike("client is too slow")
        return LevelSamples(
            concurrency=self._level,
            steady_from_s=PROGRESS_S,
            steady_to_s=to_s,
            stopped_early=self._stop,
            requests=tuple(self._request(i, to_s) for i in range(self._level + 2)) if sum(bins) else (),
            bins=bins,
            cpu_ratio=0.99 if slow else 0.1,
            waited_ratio=0.9 if slow else 0.0,
            lag_p99_ms=400.0 if slow else 0.1,
            merged_ratio=0.9 if slow else 0.0,
        )

    def _request(self, number: int, to_s: float) -> RequestSample:
        began = PROGRESS_S + 0.1 * (number % 5)
        if self._fails and number % 2:
            return RequestSample(sent_s=began, end_s=began + 0.01, error="HTTP 500")
        end = min(to_s, began + OUTPUT_TOKENS / max(1.0, self._tok_s))
        return RequestSample(
            sent_s=began, first_s=began + 0.02, end_s=end, events=OUTPUT_TOKENS, prompt_tokens=16, output_tokens=OUTPUT_TOKENS,
        )  # fmt: skip


class NoMachine:
    """Stands in for the watch over GPUs and CPU, which the simulated host does not have."""

    why_no_gpus = ""
    samples: tuple[Any, ...] = ()

    def __init__(self, _gpus: object) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Nothing runs."""

    def begin(self) -> None:
        """Nothing is sampled."""
