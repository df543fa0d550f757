"""Benchmark a server at a URL, level by level, without a daemon: load, machine and figures as the daemon has them."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from autotuner.bench.benchmark import Benchmark, Level
from autotuner.bench.export import Measured
from autotuner.bench.goodput import figures_under
from autotuner.bench.machine import machine_figures
from autotuner.bench.measurement import GoodputLimits, LevelSamples, Progress
from autotuner.bench.placement import AUTO
from autotuner.bench.settling import settled
from autotuner.edge import clock
from autotuner.edge.load import Load
from autotuner.edge.machine import MachineWatch, is_this_machine
from autotuner.errors import HostError


@dataclass
class Standalone:
    """One run over all levels; `measured` grows while it runs, and `failure` is what ended it early.

    `gpus` are those to watch beside the load where the server is on this machine, None for all of them.
    """

    url: str
    benchmark: Benchmark
    model: str | None
    on_progress: Callable[[Level, Progress], None]
    api_key: str | None = field(default=None, repr=False)
    limits: GoodputLimits | None = None
    gpus: tuple[int, ...] | None = None
    cache: Path | None = None  # where the client keeps what it can take on this host
    cores: str = AUTO  # those that the client is bound to
    measured: list[Measured] = field(default_factory=list)
    interrupted: bool = False
    failure: HostError | None = None
    why_no_gpus: str = ""
    _load: Load | None = field(default=None, repr=False)

    @property
    def here(self) -> bool:
        """Whether the server is on this machine, so that what the machine does has to do with it."""
        return is_this_machine(urlsplit(self.url).hostname or "")

    async def run(self) -> None:
        """Measure every level, or those before `stop`."""
        here = self.here
        for level in self.benchmark.levels:
            if self.interrupted:
                return
            try:
                if not await self._level(level, here=here):  # the client hung, which may not happen again
                    await self._level(level, here=here, last=True)
            except HostError as error:
                if not self.interrupted:  # a worker that is stopped as it starts has nothing to say
                    self.failure = error
                return

    def stop(self) -> None:
        """End the load now and begin no other level; what this one measured is kept. To be called in the loop's thread."""
        self.interrupted = True
        if self._load is not None:
            self._load.stop()

    async def _level(self, level: Level, *, here: bool, last: bool = False) -> bool:
        """Measure one level; tell whether that came about. Raise HostError if it did not and was the last try."""
        at = clock.utc_label()
        async with AsyncExitStack() as stack:
            machine = await stack.enter_async_context(MachineWatch(self.gpus)) if here else None
            load = await stack.enter_async_context(self._loaded(level, here=here))
            self._load = load
            if self.interrupted:
                load.stop()
            steady = False
            async for message in load.messages():
                if isinstance(message, LevelSamples) and load.hung and not self.interrupted:
                    if last:
                        raise HostError(load.void)
                    return False
                if isinstance(message, LevelSamples):
                    self._keep(message, at, machine)
                    continue
                if message.phase == "steady" and not steady and machine is not None:
                    machine.begin()
                steady = message.phase == "steady"
                self.on_progress(level, message)
        return True

    def _loaded(self, level: Level, *, here: bool) -> Load:
        return Load(
            self.url,
            self.benchmark,
            level,
            self.model,
            api_key=self.api_key,
            cache=self.cache,
            cores=self.cores if here else None,
        )

    def _keep(self, samples: LevelSamples, at: str, machine: MachineWatch | None) -> None:
        if self.benchmark.requests is None:
            samples = settled(samples)
        figures = figures_under(samples, self.limits, ignore_eos=self.benchmark.ignore_eos)
        taken = machine.samples if machine is not None else ()
        self.why_no_gpus = machine.why_no_gpus if machine is not None else ""
        self.measured.append(
            Measured(
                benchmark=self.benchmark,
                figures=figures,
                samples=samples,
                model=self.model,
                at=at,
                machine=machine_figures(taken, figures.output_tok_s),
                machine_samples=taken,
            )
        )
