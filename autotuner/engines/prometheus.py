"""Prometheus' text format -> samples, and sums over them."""

import re
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    """One line of a scrape."""

    name: str
    labels: dict[str, str]
    value: float


def samples(text: str) -> list[Sample]:
    """Given a scrape, return its samples; comments and lines that are no sample are passed over."""
    found = []
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match.group(3))
        except ValueError:
            continue
        found.append(Sample(match.group(1), dict(_LABEL.findall(match.group(2) or "")), value))
    return found


def total(scrape: list[Sample], name: str) -> float | None:
    """Given a scrape and a series' exact name, return the sum over its labels, or None where there is no such series."""
    values = [sample.value for sample in scrape if sample.name == name and sample.value == sample.value]
    return sum(values) if values else None


def largest(scrape: list[Sample], name: str) -> float | None:
    """Given a scrape and a series' exact name, return its largest value, or None where there is no such series."""
    return max((sample.value for sample in scrape if sample.name == name), default=None)
