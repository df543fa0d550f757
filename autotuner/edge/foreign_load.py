"""Another benchmark client as the load of a level: run on a leash, heard as far as it speaks, its result read at its end."""

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from autotuner.bench import foreign
from autotuner.bench.benchmark import Benchmark, Level
from autotuner.bench.imported import imported
from autotuner.bench.measurement import LevelSamples, Progress
from autotuner.bench.placement import AUTO
from autotuner.edge import clock, leash, reaping
from autotuner.edge.load import Load
from autotuner.errors import HostError

PROGRESS_S = 0.5
GRACE_S = 2.0  # what a client had is lost anyway when it is stopped
AFTER_GRACE_S = leash.GIVE_UP_S + 5.0
LISTEN_S = 5.0  # for what an ended client has printed; whoever else holds its output may live on
TAIL_BYTES = 16_384  # of what it printed, for an error's sentence


class ForeignLoad:
    """One level driven by `vllm bench serve`, `sglang.bench_serving` or `guidellm`, with the interface of `Load`.

    Such a client tells little before its end, so its Progress lines stay in the warm-up; one that is stopped early leaves
    samples without requests. After the samples, `void` says why they must not be used; it is empty if they may.
    """

    def __init__(
        self,
        url: str,
        benchmark: Benchmark,
        level: Level,
        model: str | None,
        *,
        launch: int = 0,
        api_key: str | None = None,
    ) -> None:
        self.void = ""
        self.hung = False  # it has one deadline for all of a level, and no second try
        self._benchmark = benchmark
        self._level = level
        self._folder = Path(tempfile.gettempdir())  # until there is one of its own
        self._make = partial(foreign.order, benchmark, level, url, model, launch=launch, api_key=api_key)
        self._order = self._make(str(self._folder))
        self._process: asyncio.subprocess.Process | None = None
        self._tail = b""
        self._done = (0, 0)
        self._stopped, self._stopped_s = "", 0.0

    async def __aenter__(self) -> Self:
        program = self._order.argv[0]
        if shutil.which(program) is None:
            raise HostError(foreign.not_found(self._order.client, program))
        self._folder = Path(tempfile.mkdtemp(prefix="autotuner-client-"))
        try:
            self._order = self._make(str(self._folder))
            for name, text in self._order.files.items():
                (self._folder / name).write_text(text, encoding="utf-8")
            self._process = await asyncio.create_subprocess_exec(
                *leash.command(GRACE_S, self._order.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **self._order.env},
            )
        except OSError as error:
            self._clear()
            raise HostError(f"{foreign.TITLES[self._order.client]} cannot be run: {error.strerror}") from None
        except BaseException:
            await self._end()  # nobody will leave a block that was never entered
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The client and all that it started are gone when this returns."""
        await self._end()

    async def messages(self) -> AsyncIterator[Progress | LevelSamples]:
        """Yield what is known twice a second, the samples last. Raise HostError if the client ends without a result."""
        if self._process is None:
            raise HostError("the benchmark client was not started")
        began = clock.monotonic_s()
        listening = asyncio.create_task(self._listen())
        ending = asyncio.create_task(self._process.wait())
        try:
            while True:
                await asyncio.wait([ending], timeout=PROGRESS_S)
                if ending.done():
                    break
                at_s = clock.monotonic_s() - began
                if at_s > self._order.limit_s:
                    self._stop(f"did not end within {self._order.limit_s:.0f} s")
                if self._stopped and clock.monotonic_s() - self._stopped_s > GRACE_S + AFTER_GRACE_S:
                    break  # it hangs in the kernel
                done, failed = self._done
                yield Progress(at_s=round(at_s, 3), phase="warm-up", events=0, in_flight=0, done=done, failed=failed)
            await asyncio.wait([listening], timeout=LISTEN_S)
        finally:
            listening.cancel()
            ending.cancel()
        yield self._samples(self._process.returncode)

    def stop(self) -> None:
        """End the level now; the client keeps nothing of it."""
        self._stop("was stopped early")

    def finish(self) -> None:
        """End the level now: such a client has no steady part that could end before its requests do."""
        self.stop()

    def _stop(self, why: str) -> None:
        if not self._stopped:
            self._stopped, self._stopped_s = why, clock.monotonic_s()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def _samples(self, code: int | None) -> LevelSamples:
        client = self._order.client
        try:
            text = (self._folder / self._order.result).read_text(encoding="utf-8")
            found = imported(self._benchmark, self._level, self._order, text)
        except (OSError, ValueError) as error:
            if self._stopped:
                self.void = foreign.stopped(client, self._stopped)
                return LevelSamples(concurrency=self._level, stopped_early=True)
            if code == 0 and isinstance(error, ValueError):
                raise HostError(str(error)) from None
            signalled = code is not None and code > 128
            said = self._tail.decode("utf-8", "replace")
            raise HostError(foreign.ended_badly(client, 128 - code if signalled and code else code, said)) from None
        self.void = found.void
        return found.samples

    async def _listen(self) -> None:
        """Keep the end of what the client prints, and what it tells of its requests."""
        stream = self._process.stdout if self._process is not None else None
        rest = b""
        while stream is not None and (piece := await stream.read(65_536)):
            self._tail = (self._tail + piece)[-TAIL_BYTES:]
            *lines, rest = (rest + piece).replace(b"\r", b"\n").split(b"\n")
            rest = rest[-TAIL_BYTES:]
            for line in lines:
                self._done = foreign.done_of(self._order.client, line.decode("utf-8", "replace")) or self._done

    async def _end(self) -> None:
        try:
            if self._process is not None and self._process.returncode is None:
                self._stop("was stopped early")
                try:
                    async with asyncio.timeout(GRACE_S + AFTER_GRACE_S):
                        await self._process.wait()
                except TimeoutError:
                    await reaping.killed(self._process)
        finally:
            self._clear()

    def _clear(self) -> None:
        if self._folder.name.startswith("autotuner-client-"):
            shutil.rmtree(self._folder, ignore_errors=True)


def load_for(
    url: str,
    benchmark: Benchmark,
    level: Level,
    model: str | None,
    *,
    longest_s: float,
    launch: int,
    cache: Path | None,
    cores: str | None = AUTO,
) -> Load | ForeignLoad:
    """Return the load of a level by the benchmark's client; our own may run up to `longest_s` until it is stopped.

    `cache` is the folder where it keeps what this host can take, `cores` are those it is bound to, as of `Load`;
    others are bound to none. `launch` is how many launches of the candidate were
    measured before: see `foreign.seed_of`.
    """
    if benchmark.client == "autotuner":
        longest = benchmark.model_copy(update={"seconds": longest_s})
        return Load(url, longest, level, model, cache=cache, cores=cores)
    return ForeignLoad(url, benchmark, level, model, launch=launch)
