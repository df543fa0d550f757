"""What tests of the load ask of a workload."""

from typing import Any

from autotuner.bench.benchmark import Benchmark, Level
from autotuner.bench.workload import Workload


def request_body(benchmark: Benchmark, level: Level, index: int, model: str | None) -> dict[str, Any]:
    """Given a benchmark, a level and the number of a request, return its body as it is where nothing is known of a server."""
    asked = Workload(benchmark, level, model).ask(index)
    return asked.body if asked else {}
