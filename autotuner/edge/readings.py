"""What GPUs and host do at an instant, read with Python's standard library alone, for hosts where no more is sure.

GPUs are asked through the driver's own library, NVML (https://docs.nvidia.com/deploy/nvml-api/), the host through /proc. On the
daemon's own machine `edge/machine.py` reads the same figures.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotuner.edge.host import Readings

LIBRARY = "libnvidia-ml.so.1"
PROC = Path("/proc")
IDLE, IOWAIT = 3, 4  # fields of the first line of /proc/stat; the last two, of guests, are in the first two as well
OWN_FIELDS = 8
_CLOCK_SM, _CLOCK_MEMORY, _TEMPERATURE_GPU = 1, 2, 0


class NoNvmlError(Exception):
    """There is nothing that could be asked about GPUs, and why."""


class Utilization(ctypes.Structure):
    """`nvmlUtilization_t`, in per cent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Memory(ctypes.Structure):
    """`nvmlMemory_t`, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Nvml:
    """NVML, open. Each reading may be unsupported on its own (MIG, consumer GPUs)."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        """Raise NoNvmlError."""
        try:
            self._lib = load(LIBRARY)
        except OSError:
            raise NoNvmlError(f"there is no NVIDIA driver ({LIBRARY})") from None
        if code := self._lib.nvmlInit_v2():
            raise NoNvmlError(f"NVML cannot be used: error {code}, see nvidia-smi there")
        self._handles: dict[int, ctypes.c_void_p] = {}

    def read(self, index: int) -> dict[str, float | None] | None:
        """Ask one GPU, by its number as nvidia-smi shows it; None if there is none."""
        handle = self._handles.get(index)
        if handle is None:
            handle = ctypes.c_void_p()
            if self._lib.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
                return None
            self._handles[index] = handle
        busy: Utilization | None = self._ask("nvmlDeviceGetUtilizationRates", handle, into=Utilization())
        memory: Memory | None = self._ask("nvmlDeviceGetMemoryInfo", handle, into=Memory())
        milliwatts = self._number("nvmlDeviceGetPowerUsage", handle)
        return {
            "index": index,
            "power_w": None if milliwatts is None else milliwatts / 1000,
            "sm_mhz": self._number("nvmlDeviceGetClockInfo", handle, _CLOCK_SM),
            "memory_mhz": self._number("nvmlDeviceGetClockInfo", handle, _CLOCK_MEMORY),
            "temperature_c": self._number("nvmlDeviceGetTemperature", handle, _TEMPERATURE_GPU),
            "busy_ratio": None if busy is None else busy.gpu / 100,
            "memory_mib": None if memory is None else memory.used / (1 << 20),
        }

    def close(self) -> None:
        """Let go of the driver."""
        self._lib.nvmlShutdown()

    def _number(self, name: str, handle: ctypes.c_void_p, *which: int) -> float | None:
        found: ctypes.c_uint | None = self._ask(name, handle, *which, into=ctypes.c_uint())
        return None if found is None else float(found.value)

    def _ask(self, name: str, handle: ctypes.c_void_p, *which: int, into: Any) -> Any:
        """What NVML writes into `into`; None where this GPU, or this driver, does not tell."""
        asked = getattr(self._lib, name, None)
        if asked is None or asked(handle, *map(ctypes.c_uint, which), ctypes.byref(into)):
            return None
        return into


_open: list[Nvml] = []  # kept between readings: to open it takes longer than to read


def read(gpus: tuple[int, ...], load: Callable[[str], Any] = ctypes.CDLL) -> Readings:
    """Read these GPUs and the host; where no GPU is wanted, let go of the driver."""
    found, why = _gpus(gpus, load)
    busy, every = cpu_ticks()
    return Readings(found, busy, every, _memory_mib(), why)


def _gpus(wanted: tuple[int, ...], load: Callable[[str], Any]) -> tuple[tuple[dict[str, float | None], ...], str]:
    if not wanted:
        while _open:
            _open.pop().close()
        return (), ""
    try:
        if not _open:
            _open.append(Nvml(load))
    except NoNvmlError as error:
        return (), str(error)
    found = tuple(read for index in wanted if (read := _open[0].read(index)) is not None)
    return found, "" if found else "NVML knows none of the GPUs"


def cpu_ticks() -> tuple[int | None, int | None]:
    """Ticks of all cores since boot: those in which something ran, and all; None where the host hides them."""
    try:
        fields = (PROC / "stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1 : 1 + OWN_FIELDS]
        ticks = [int(field) for field in fields]
        return sum(ticks) - ticks[IDLE] - ticks[IOWAIT], sum(ticks)
    except (OSError, ValueError, IndexError):
        return None, None


def _memory_mib() -> float | None:
    """What is in use: all but what a program could still have (`MemAvailable`)."""
    try:
        lines = (PROC / "meminfo").read_text(encoding="ascii").splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
        return (kib["MemTotal"] - kib["MemAvailable"]) / 1024
    except (OSError, ValueError, KeyError):
        return None
