"""What GPUs and host do is read by the standard library as NVML's own module reads it, and what is not told is absent."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotuner.edge import readings

WHOLE = {
    "nvmlDeviceGetPowerUsage": 412_500,
    "nvmlDeviceGetTemperature": 61,
    ("nvmlDeviceGetClockInfo", 1): 1755,
    ("nvmlDeviceGetClockInfo", 2): 2619,
    "nvmlDeviceGetUtilizationRates": 97,
    "nvmlDeviceGetMemoryInfo": 96 << 30,
}  # fmt: skip


class Library:
    """NVML's C interface: handles and results are written through pointers, and each call returns an error code."""

    def __init__(self, gpus: dict[int, dict[Any, int]], code: int = 0) -> None:
        self.gpus = gpus
        self.code = code
        self.open = 0

    def nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's names
        self.open += not self.code
        return self.code

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802
        handle._obj.value = 0x1000 + index.value
        return 0 if index.value in self.gpus else 2

    def nvmlDeviceGetPowerUsage(self, handle: Any, into: Any) -> int:  # noqa: N802
        return self._write("nvmlDeviceGetPowerUsage", handle, into)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, into: Any) -> int:  # noqa: N802
        assert sensor.value == 0
        return self._write("nvmlDeviceGetTemperature", handle, into)

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, into: Any) -> int:  # noqa: N802
        return self._write(("nvmlDeviceGetClockInfo", kind.value), handle, into)

    def nvmlDeviceGetUtilizationRates(self, handle: Any, into: Any) -> int:  # noqa: N802
        return self._write("nvmlDeviceGetUtilizationRates", handle, into, "gpu")

    def nvmlDeviceGetMemoryInfo(self, handle: Any, into: Any) -> int:  # noqa: N802
        return self._write("nvmlDeviceGetMemoryInfo", handle, into, "used")

    def _write(self, what: Any, handle: Any, into: Any, field: str = "value") -> int:
        known = self.gpus[handle.value - 0x1000]
        if what not in known:
            return 3  # not supported
        setattr(into._obj, field, known[what])
        return 0


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    readings._open.clear()
    yield
    readings._open.clear()


def test_readings_come_in_watts_mhz_degrees_shares_and_mebibytes() -> None:
    library = Library({0: WHOLE, 1: WHOLE})
    seen = readings.read((1,), lambda _: library)
    assert seen.why_no_gpus == ""
    assert seen.gpus == (
        {
            "index": 1, "power_w": 412.5, "sm_mhz": 1755.0, "memory_mhz": 2619.0, "temperature_c": 61.0, "busy_ratio": 0.97,
            "memory_mib": 96 * 1024,
        },
    )  # fmt: skip
    readings.read((0, 1), lambda _: library)
    assert library.open == 1, "it is opened once"
    readings.read((), lambda _: library)
    assert library.open == 0, "and let go of where no GPU is wanted"


def test_what_a_gpu_does_not_tell_is_absent_and_one_that_is_not_there_is_left_out() -> None:
    seen = readings.read((0, 7), lambda _: Library({0: {"nvmlDeviceGetMemoryInfo": 1 << 30}}))
    (gpu,) = seen.gpus
    assert gpu == {
        "index": 0, "power_w": None, "sm_mhz": None, "memory_mhz": None, "temperature_c": None, "busy_ratio": None,
        "memory_mib": 1024,
    }  # fmt: skip
    readings._open.clear()
    assert readings.read((7,), lambda _: Library({})).why_no_gpus == "NVML knows none of the GPUs"


def test_a_host_without_a_driver_or_with_one_that_fails_says_so() -> None:
    def none(_: str) -> ctypes.CDLL:
        raise OSError("cannot open shared object file")

    assert readings.read((0,), none).why_no_gpus == "there is no NVIDIA driver (libnvidia-ml.so.1)"
    assert "error 9" in readings.read((0,), lambda _: Library({}, code=9)).why_no_gpus
    assert readings.read((), none).why_no_gpus == ""


def test_cpu_and_memory_are_the_kernels_own_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "PROC", tmp_path)
    assert readings.read(()) == readings.Readings()
    (tmp_path / "stat").write_text("cpu  100 20 30 1000 50 6 7 8 90 10\ncpu0 1 2 3 4\n")
    (tmp_path / "meminfo").write_text(
        "MemTotal:  4096 kB\nMemFree:  10 kB\nMemAvailable:  1024 kB\nHugePages_Total: 0\n"
    )
    seen = readings.read(())
    assert (seen.cpu_busy, seen.cpu_all, seen.memory_mib) == (171, 1221, 3.0)


IN_C = r"""
#include <stdint.h>
static char gpu; /* at an address that needs all 64 bits */
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = &gpu; return index == 3 ? 0 : 2; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *mw) { *mw = 701500; return handle == &gpu ? 0 : 2; }
int nvmlDeviceGetClockInfo(void *handle, unsigned kind, unsigned *mhz) { *mhz = 1000 + kind; return handle == &gpu ? 0 : 2; }
int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *c) { *c = 40 + sensor; return handle == &gpu ? 0 : 2; }
int nvmlDeviceGetUtilizationRates(void *handle, unsigned rates[2]) { rates[0] = 12; rates[1] = 99; return handle == &gpu ? 0 : 2; }
int nvmlDeviceGetMemoryInfo(void *handle, uint64_t memory[3]) { memory[0] = 9; memory[1] = 8; memory[2] = 5ull << 33;
  return handle == &gpu ? 0 : 2; }
"""


def test_a_library_in_c_is_called_as_its_header_says(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    (tmp_path / "nvml.c").write_text(IN_C)
    library = tmp_path / "nvml.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "nvml.c")], check=True)
    seen = readings.read((0, 3), lambda _: ctypes.CDLL(str(library)))
    assert seen.gpus == (
        {
            "index": 3, "power_w": 701.5, "sm_mhz": 1001.0, "memory_mhz": 1002.0, "temperature_c": 40.0, "busy_ratio": 0.12,
            "memory_mib": 40960.0,
        },
    )  # fmt: skip
