"""A machine's figures: power of all GPUs together, energy an output token, and absent where a part is not known."""

import pytest

from autotuner.bench.machine import GpuSample, MachineFigures, MachineSample, Spread, machine_figures
from autotuner.core.verdict import LevelResult


def sample(*power_w: float | None, **host: float) -> MachineSample:
    gpus = tuple(GpuSample(index=i, power_w=w, sm_mhz=1900 - 100 * i) for i, w in enumerate(power_w))
    return MachineSample(at_s=1.0, gpus=gpus, **host)


def test_energy_is_the_power_of_all_gpus_over_the_output_rate() -> None:
    found = machine_figures([sample(300, 500), sample(400, 600)], 3000.0)
    assert found is not None
    assert found.gpu_power_w == Spread(mean=900.0, min=800.0, max=1000.0)
    assert found.joules_per_output_token == pytest.approx(0.3)
    assert [gpu.power_w and gpu.power_w.mean for gpu in found.gpus] == [350, 550]


def test_without_one_gpus_power_there_is_no_power_of_all_and_no_energy() -> None:
    found = machine_figures([sample(300, None)], 3000.0)
    assert found is not None
    assert (found.gpu_power_w, found.joules_per_output_token) == (None, None)
    assert found.gpus[0].power_w == Spread(mean=300, min=300, max=300)
    assert found.gpus[1].power_w is None


def test_nothing_sampled_or_nothing_generated_gives_no_false_figure() -> None:
    assert machine_figures([], 3000.0) is None
    idle = machine_figures([sample(300.0)], 0.0)
    assert idle is not None
    assert idle.joules_per_output_token is None
    bare = machine_figures([MachineSample(at_s=0.0)], 10.0)
    assert bare == MachineFigures(samples=1)
    assert str(bare) == ""


def test_it_reads_as_a_sentence() -> None:
    found = machine_figures(
        [sample(300, 500, cpu_ratio=0.25, memory_mib=2048), sample(400, 600, cpu_ratio=0.35)], 3000.0
    )
    assert str(found) == (
        "2 GPUs, 900 W (at most 1,000), 0.3 J an output token, SM clock 1,850 MHz (at least 1,800), host CPU 30 %, host memory 2.0 GiB"
    )


def test_a_result_of_before_has_no_machine(level_of_before: dict[str, object]) -> None:
    assert LevelResult.model_validate(level_of_before).machine is None


@pytest.fixture
def level_of_before() -> dict[str, object]:
    figures = {
        "concurrency": 1, "seconds": 5, "requests_ok": 1, "requests_failed": 0, "output_tok_s": 1, "output_tok_s_low": 1,
        "output_tok_s_high": 1, "tokens_per_event": 1, "tokens_counted": True,
    }  # fmt: skip
    return {"concurrency": 1, "figures": figures}
