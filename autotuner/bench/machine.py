"""What the machine did beside a level: samples of GPUs and host -> mean, least and most, and energy an output token. Pure.

What could not be read is None, never zero.
"""

from collections.abc import Callable, Sequence
from typing import Self

from autotuner.bench.samples import Values


class GpuSample(Values):
    """One GPU at an instant; `busy_ratio` is the share of time in which any kernel ran, as NVML counts it."""

    index: int
    power_w: float | None = None
    sm_mhz: float | None = None
    memory_mhz: float | None = None
    temperature_c: float | None = None
    busy_ratio: float | None = None
    memory_mib: float | None = None


class MachineSample(Values):
    """GPUs and host at an instant, in seconds since sampling began; `cpu_ratio` is of all cores, `memory_mib` is in use."""

    at_s: float
    gpus: tuple[GpuSample, ...] = ()
    cpu_ratio: float | None = None
    memory_mib: float | None = None


class Spread(Values):
    """A figure over the samples of a level."""

    mean: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Self | None:
        """Given readings, return their spread; None where nothing was read."""
        known = [value for value in values if value is not None]
        return cls(mean=sum(known) / len(known), min=min(known), max=max(known)) if known else None


class GpuFigures(Values):
    """One GPU over a level."""

    index: int
    power_w: Spread | None = None
    sm_mhz: Spread | None = None
    memory_mhz: Spread | None = None
    temperature_c: Spread | None = None
    busy_ratio: Spread | None = None
    memory_mib: Spread | None = None


class MachineFigures(Values):
    """GPUs and host over a level's steady part. `gpu_power_w` is of all its GPUs together, None where one does not tell.

    `joules_per_output_token` is the mean of that over the output rate: what the GPUs took, not the whole host. `why_no_gpus`
    says why there are no figures of GPUs, where they were wanted.
    """

    samples: int
    gpus: tuple[GpuFigures, ...] = ()
    gpu_power_w: Spread | None = None
    joules_per_output_token: float | None = None
    cpu_ratio: Spread | None = None
    memory_mib: Spread | None = None
    why_no_gpus: str = ""

    def __str__(self) -> str:
        parts = [f"no figures of GPUs ({self.why_no_gpus})"] if self.why_no_gpus and not self.gpus else []
        if self.gpus:
            parts.append(f"{len(self.gpus)} GPU{'s' * (len(self.gpus) != 1)}")
        if self.gpu_power_w is not None:
            parts.append(f"{self.gpu_power_w.mean:,.0f} W (at most {self.gpu_power_w.max:,.0f})")
        if self.joules_per_output_token is not None:
            parts.append(f"{self.joules_per_output_token:.3g} J an output token")
        parts += _over_gpus("SM clock {:,.0f} MHz", [gpu.sm_mhz for gpu in self.gpus], least=True)
        parts += _over_gpus("{:.0f} °C", [gpu.temperature_c for gpu in self.gpus])
        busy = Spread.of([gpu.busy_ratio.mean for gpu in self.gpus if gpu.busy_ratio is not None])
        parts += [f"busy {100 * busy.mean:.0f} %"] if busy is not None else []
        used = [gpu.memory_mib.max for gpu in self.gpus if gpu.memory_mib is not None]
        parts += [f"{sum(used) / 1024:,.1f} GiB used"] * bool(used)
        if self.cpu_ratio is not None:
            parts.append(f"host CPU {100 * self.cpu_ratio.mean:.0f} %")
        if self.memory_mib is not None:
            parts.append(f"host memory {self.memory_mib.max / 1024:,.1f} GiB")
        return ", ".join(parts)


def machine_figures(
    samples: Sequence[MachineSample], output_tok_s: float, why_no_gpus: str = ""
) -> MachineFigures | None:
    """Given the samples of a level's steady part and its output rate, return its machine's figures.

    None without samples, unless it is known why there are none of GPUs.
    """
    if not samples and not why_no_gpus:
        return None
    by_gpu: dict[int, list[GpuSample]] = {}
    for sample in samples:
        for gpu in sample.gpus:
            by_gpu.setdefault(gpu.index, []).append(gpu)
    power = Spread.of([_power_w(sample) for sample in samples])
    return MachineFigures(
        samples=len(samples),
        gpus=tuple(_gpu_figures(index, seen) for index, seen in sorted(by_gpu.items())),
        gpu_power_w=power,
        joules_per_output_token=power.mean / output_tok_s if power is not None and output_tok_s > 0 else None,
        cpu_ratio=Spread.of([sample.cpu_ratio for sample in samples]),
        memory_mib=Spread.of([sample.memory_mib for sample in samples]),
        why_no_gpus=why_no_gpus,
    )


def _gpu_figures(index: int, seen: list[GpuSample]) -> GpuFigures:
    def spread(read: Callable[[GpuSample], float | None]) -> Spread | None:
        return Spread.of([read(gpu) for gpu in seen])

    return GpuFigures(
        index=index,
        power_w=spread(lambda gpu: gpu.power_w),
        sm_mhz=spread(lambda gpu: gpu.sm_mhz),
        memory_mhz=spread(lambda gpu: gpu.memory_mhz),
        temperature_c=spread(lambda gpu: gpu.temperature_c),
        busy_ratio=spread(lambda gpu: gpu.busy_ratio),
        memory_mib=spread(lambda gpu: gpu.memory_mib),
    )


def _power_w(sample: MachineSample) -> float | None:
    """What all GPUs take together: without one of them it would be a figure of something else."""
    known = [gpu.power_w for gpu in sample.gpus if gpu.power_w is not None]
    return sum(known) if known and len(known) == len(sample.gpus) else None


def _over_gpus(words: str, spreads: list[Spread | None], *, least: bool = False) -> list[str]:
    """A figure over all GPUs: its mean, and the least or the most of any."""
    known = [spread for spread in spreads if spread is not None]
    if not known:
        return []
    mean = words.format(sum(spread.mean for spread in known) / len(known))
    if least:
        return [f"{mean} (at least {min(spread.min for spread in known):,.0f})"]
    return [mean]
