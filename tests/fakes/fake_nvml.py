"""NVML's Python module without a driver: the names, units and errors of nvidia-ml-py, for the calls that are made.

`FakeNvml(gpus=[{...}])` has one table a GPU: its readings by the name of the call; one that is missing is not supported.
"""

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As in pynvml: the root of all its errors, whose text names the cause."""

    said = "Unknown Error"

    def __str__(self) -> str:
        return self.said


class NVMLError_NotSupported(NVMLError):  # noqa: N801 - as in pynvml
    said = "Not Supported"


class NVMLError_InvalidArgument(NVMLError):  # noqa: N801
    said = "Invalid Argument"


class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801
    said = "Driver Not Loaded"


class NVMLError_Uninitialized(NVMLError):  # noqa: N801
    said = "Uninitialized"


class FakeNvml:
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0
    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported

    def __init__(self, gpus: list[dict[str, Any]] | None = None) -> None:
        """None: no driver is loaded."""
        self.gpus = gpus
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802 - all of these as in pynvml
        if self.gpus is None:
            raise NVMLError_DriverNotLoaded
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        if not self.open:
            raise NVMLError_Uninitialized
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus or [])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        if not 0 <= index < len(self.gpus or []):
            raise NVMLError_InvalidArgument
        return (self.gpus or [])[index]

    def nvmlDeviceGetPowerUsage(self, handle: dict[str, Any]) -> int:  # noqa: N802 - milliwatts
        return int(self._read(handle, "power"))

    def nvmlDeviceGetClockInfo(self, handle: dict[str, Any], kind: int) -> int:  # noqa: N802 - MHz
        return int(self._read(handle, {1: "sm_clock", 2: "memory_clock"}[kind]))

    def nvmlDeviceGetTemperature(self, handle: dict[str, Any], sensor: int) -> int:  # noqa: N802 - degrees Celsius
        assert sensor == self.NVML_TEMPERATURE_GPU
        return int(self._read(handle, "temperature"))

    def nvmlDeviceGetUtilizationRates(self, handle: dict[str, Any]) -> SimpleNamespace:  # noqa: N802 - per cent
        return SimpleNamespace(gpu=self._read(handle, "busy"), memory=0)

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any]) -> SimpleNamespace:  # noqa: N802 - bytes
        used = self._read(handle, "memory")
        return SimpleNamespace(total=2 * used, free=used, used=used)

    def _read(self, handle: dict[str, Any], what: str) -> Any:
        if not self.open:
            raise NVMLError_Uninitialized
        if what not in handle:
            raise NVMLError_NotSupported
        return handle[what]
