"""What a machine does is read in the right units, what it does not tell is absent, and nothing of it can stop a level."""

import asyncio
import sys
from typing import Any

import pytest
from fakes.fake_nvml import FakeNvml, NVMLError
from patience import FOR_EVER_S, PATIENCE_S

from autotuner.bench.machine import MachineSample
from autotuner.edge import machine
from autotuner.edge.machine import MachineWatch, is_this_machine

WHOLE = {
    "power": 412_500, "sm_clock": 1755, "memory_clock": 2619, "temperature": 61, "busy": 97, "memory": 96 << 30,
}  # fmt: skip
ALL = 0.01


def watched(
    monkeypatch: pytest.MonkeyPatch, library: Any, gpus: tuple[int, ...] | None = None
) -> tuple[tuple[MachineSample, ...], str]:
    monkeypatch.setitem(sys.modules, "pynvml", library)

    async def work() -> tuple[tuple[MachineSample, ...], str]:
        async with MachineWatch(gpus, every_s=ALL) as watch:
            while len(watch.samples) < 3:
                await asyncio.sleep(0.01)
        return watch.samples, watch.why_no_gpus

    return asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


def test_readings_come_in_watts_mhz_degrees_shares_and_mebibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml([WHOLE, WHOLE])
    samples, why = watched(monkeypatch, library)
    assert why == ""
    gpu = samples[-1].gpus[1]
    assert (gpu.index, gpu.power_w, gpu.sm_mhz, gpu.memory_mhz) == (1, 412.5, 1755, 2619)
    assert (gpu.temperature_c, gpu.busy_ratio, gpu.memory_mib) == (61, 0.97, 96 * 1024)
    assert library.open == 0, "NVML is let go of"


def test_the_host_is_read_without_any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, why = watched(monkeypatch, FakeNvml([WHOLE]), gpus=())
    assert (samples[-1].gpus, why) == ((), "")
    assert samples[-1].memory_mib is not None
    assert samples[-1].memory_mib > 1
    assert samples[-1].cpu_ratio is not None
    assert 0 <= samples[-1].cpu_ratio <= 1


def test_only_the_wanted_gpus_are_read_and_one_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, _ = watched(monkeypatch, FakeNvml([WHOLE, WHOLE, WHOLE]), gpus=(2, 7))
    assert [gpu.index for gpu in samples[-1].gpus] == [2]


def test_what_a_gpu_does_not_support_is_absent_and_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, _ = watched(monkeypatch, FakeNvml([{"memory": 1 << 30}]))
    (gpu,) = samples[-1].gpus
    assert (gpu.power_w, gpu.sm_mhz, gpu.temperature_c, gpu.busy_ratio, gpu.memory_mib) == (None,) * 4 + (1024,)


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (None, "nvidia-ml-py is not installed (pip install 'autotunerd[gpu]')"),
        (FakeNvml(None), "NVML cannot be used: Driver Not Loaded"),
        (FakeNvml([]), "NVML knows none of the GPUs"),
    ],
)
def test_without_nvml_the_reason_is_said_and_the_host_is_read(
    monkeypatch: pytest.MonkeyPatch, library: Any, said: str
) -> None:
    samples, why = watched(monkeypatch, library)
    assert why == said
    assert samples[-1].gpus == ()
    assert samples[-1].cpu_ratio is not None


def test_a_gpu_that_is_lost_meanwhile_leaves_gaps_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml([WHOLE])

    def lost(handle: Any) -> int:
        raise NVMLError

    monkeypatch.setattr(library, "nvmlDeviceGetPowerUsage", lost)
    samples, _ = watched(monkeypatch, library)
    assert {gpu.power_w for sample in samples for gpu in sample.gpus} == {None}
    assert samples[-1].gpus[0].sm_mhz == 1755


def test_what_was_sampled_before_the_steady_part_is_dropped_and_that_begins_with_a_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However short the part is; but the share of CPU time until then is that of what was before."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([WHOLE]))

    async def work() -> None:
        async with MachineWatch(None, every_s=60.0) as watch:
            while not watch.samples:
                await asyncio.sleep(0.01)
            first = watch.samples[0]
            watch.begin()
            assert watch.samples == ()
            while not watch.samples:
                await asyncio.sleep(0.01)
            (found,) = watch.samples
            assert found.at_s > first.at_s
            assert (found.cpu_ratio, found.gpus[0].power_w) == (None, 412.5)

    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


def test_a_driver_that_hangs_does_not_keep_a_level_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml([WHOLE])
    released = __import__("threading").Event()
    monkeypatch.setattr(library, "nvmlDeviceGetPowerUsage", lambda _: released.wait(FOR_EVER_S) and 1)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(machine, "END_WAIT_S", 0.1)

    async def work() -> tuple[MachineSample, ...]:
        async with MachineWatch(None) as watch:
            await asyncio.sleep(0.2)
        released.set()
        return watch.samples

    assert asyncio.run(asyncio.wait_for(work(), PATIENCE_S)) == ()


def test_this_machine_is_told_from_others() -> None:
    assert is_this_machine("127.0.0.1")
    assert is_this_machine("localhost")
    assert not is_this_machine("192.0.2.1")
    assert not is_this_machine("no-such-host.invalid")
