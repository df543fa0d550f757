"""The machine beside a level where that is another host: its agent reads GPUs and host there, once a second."""

from autotuner.bench.machine import GpuSample, MachineSample
from autotuner.edge import clock
from autotuner.edge.host import Host
from autotuner.edge.machine import Watch
from autotuner.errors import HostError


class FarWatch(Watch):
    """Samples the host that a slot is on. What cannot be read ends the sampling, never the level."""

    def __init__(self, host: Host, gpus: tuple[int, ...]) -> None:
        super().__init__(gpus)
        self._host = host
        self._gpus = gpus
        self._ticks: tuple[int, int] | None = None

    async def _read(self) -> MachineSample | None:
        try:
            seen = await self._host.readings(self._gpus)
            gpus = tuple(GpuSample.model_validate(gpu) for gpu in seen.gpus)
        except (HostError, ValueError) as error:
            self.why_no_gpus = str(error) if self._gpus else ""
            return None
        self.why_no_gpus = seen.why_no_gpus
        at_s = round(clock.monotonic_s() - self._since_s, 3)
        cpu_ratio = self._cpu_ratio(seen.cpu_busy, seen.cpu_all)
        return MachineSample(at_s=at_s, gpus=gpus, cpu_ratio=cpu_ratio, memory_mib=seen.memory_mib)

    async def _close(self) -> None:
        try:
            await self._host.readings(())  # the agent lets go of the driver
        except HostError:
            return  # and so it does when it ends

    def _cpu_ratio(self, busy: int | None, every: int | None) -> float | None:
        """The share of CPU time since the reading before; None for the first, and where the host was booted between them."""
        if busy is None or every is None:
            return None
        before, self._ticks = self._ticks, (busy, every)
        if before is None or every <= before[1]:
            return None
        return min(1.0, max(0.0, (busy - before[0]) / (every - before[1])))
