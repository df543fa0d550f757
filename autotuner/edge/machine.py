"""The machine beside a level: GPUs through NVML and the host through psutil, sampled once a second in a thread.

NVML's Python module is an optional extra (`gpu`) and a driver need not be there; then GPU figures are absent. On another host
its agent reads the same: `edge/machine_far.py`.
"""

import asyncio
import contextlib
import ipaddress
import socket
from types import TracebackType
from typing import Any, Self

from autotuner.bench.machine import GpuSample, MachineSample
from autotuner.core.redact import one_line
from autotuner.edge import clock

EVERY_S = 1.0
END_WAIT_S = 2.0  # a driver that hangs must not keep a level from its end


class Watch:
    """Samples a machine while its block runs. `gpus` are indices as nvidia-smi shows them, None means all.

    `why_no_gpus` says why there are no figures of GPUs, where they were wanted and there are none.
    """

    def __init__(self, gpus: tuple[int, ...] | None, every_s: float = EVERY_S) -> None:
        self.why_no_gpus = ""
        self._wanted = gpus
        self._every_s = every_s
        self._taken: list[MachineSample] = []
        self._since_s = 0.0
        self._over = asyncio.Event()
        self._wake = asyncio.Event()
        self._part = 0

    async def __aenter__(self) -> Self:
        self._since_s = clock.monotonic_s()
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._wake.set()
        done, _ = await asyncio.wait({self._task}, timeout=END_WAIT_S)
        if not done:
            self._task.cancel()

    def begin(self) -> None:
        """The steady part begins: what was sampled before is not of it, and the next sample is taken now."""
        self._taken.clear()
        self._part += 1
        self._wake.set()

    @property
    def samples(self) -> tuple[MachineSample, ...]:
        """What was sampled since the steady part began."""
        return tuple(self._taken)

    async def _sample(self) -> None:
        await self._open()
        read_in = None
        while not self._over.is_set():
            self._wake.clear()
            part = self._part
            taken = await self._read()
            if taken is None:
                return
            if self._part == part and not self._over.is_set():
                # CPU time is a share of that since the reading before, which must have been of this part too.
                self._taken.append(taken if part == read_in else taken.model_copy(update={"cpu_ratio": None}))
                read_in = part
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._every_s)
        await self._close()

    async def _open(self) -> None:
        """Make ready to read."""

    async def _read(self) -> MachineSample | None:
        """Take a sample; None if none can be taken any more."""
        raise NotImplementedError

    async def _close(self) -> None:
        """Let go of what was opened."""


class MachineWatch(Watch):
    """Samples this machine, in a thread."""

    _nvml: "_Nvml | None" = None

    async def _open(self) -> None:
        await asyncio.to_thread(self._open_here)

    async def _read(self) -> MachineSample | None:
        return await asyncio.to_thread(self._read_here)

    async def _close(self) -> None:
        if self._nvml is not None:
            await asyncio.to_thread(self._nvml.close)

    def _open_here(self) -> None:
        import psutil  # noqa: PLC0415 - slow to import, and wanted only where something is measured

        self._psutil: Any = psutil
        if self._wanted != ():
            try:
                self._nvml = _Nvml(self._wanted)
            except _NoNvmlError as error:
                self.why_no_gpus = str(error)

    def _read_here(self) -> MachineSample:
        gpus = self._nvml.read() if self._nvml is not None else ()
        cpu_ratio = memory_mib = None
        try:
            cpu_ratio = self._psutil.cpu_percent(None) / 100
            memory = self._psutil.virtual_memory()
            memory_mib = (memory.total - memory.available) / (1 << 20)
        except (OSError, self._psutil.Error, ValueError):
            pass  # a container that hides /proc
        at_s = round(clock.monotonic_s() - self._since_s, 3)
        return MachineSample(at_s=at_s, gpus=gpus, cpu_ratio=cpu_ratio, memory_mib=memory_mib)


class _NoNvmlError(Exception):
    """There is nothing that could be asked about GPUs, and why."""


class _Nvml:
    """NVML, open, with the handles of the wanted GPUs. Each reading may be unsupported on its own (MIG, consumer GPUs)."""

    def __init__(self, wanted: tuple[int, ...] | None) -> None:
        try:
            import pynvml  # noqa: PLC0415 - an optional extra
        except ImportError:
            raise _NoNvmlError("nvidia-ml-py is not installed (pip install 'autotunerd[gpu]')") from None
        self._lib: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _NoNvmlError(f"NVML cannot be used: {one_line(str(error), 100)}") from None
        try:
            indices = range(pynvml.nvmlDeviceGetCount()) if wanted is None else wanted
            handles = {index: self._ask("nvmlDeviceGetHandleByIndex", index) for index in indices}
        except pynvml.NVMLError as error:
            self.close()
            raise _NoNvmlError(f"NVML does not list its GPUs: {one_line(str(error), 100)}") from None
        self._handles = {index: handle for index, handle in handles.items() if handle is not None}
        if not self._handles:
            self.close()
            raise _NoNvmlError("NVML knows none of the GPUs")

    def read(self) -> tuple[GpuSample, ...]:
        """Ask every GPU; NVML tells milliwatts, MHz, degrees Celsius, per cent and bytes."""
        return tuple(self._gpu(index, handle) for index, handle in self._handles.items())

    def _gpu(self, index: int, handle: Any) -> GpuSample:
        lib = self._lib
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        busy = self._ask("nvmlDeviceGetUtilizationRates", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return GpuSample(
            index=index,
            power_w=None if milliwatts is None else milliwatts / 1000,
            sm_mhz=self._ask("nvmlDeviceGetClockInfo", handle, lib.NVML_CLOCK_SM),
            memory_mhz=self._ask("nvmlDeviceGetClockInfo", handle, lib.NVML_CLOCK_MEM),
            temperature_c=self._ask("nvmlDeviceGetTemperature", handle, lib.NVML_TEMPERATURE_GPU),
            busy_ratio=None if busy is None else busy.gpu / 100,
            memory_mib=None if memory is None else memory.used / (1 << 20),
        )

    def _ask(self, name: str, *arguments: Any) -> Any:
        """What NVML answers; None where this GPU, or this driver, does not tell."""
        try:
            return getattr(self._lib, name)(*arguments)
        except self._lib.NVMLError:
            return None

    def close(self) -> None:
        """Let go of NVML."""
        self._ask("nvmlShutdown")


def is_this_machine(host: str) -> bool:
    """Given a host's name or address, tell whether it is this very machine; a name that means nothing is not."""
    import psutil  # noqa: PLC0415 - as above

    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    own = {a.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for a in addresses}
    return any(ipaddress.ip_address(str(a).partition("%")[0]).is_loopback or a in own for a in found)
