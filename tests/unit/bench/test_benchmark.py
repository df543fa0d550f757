"""A benchmark's levels are named as what they are, and one whose settings make no sense together is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from autotuner.bench.benchmark import Benchmark, level_cell, level_column, level_name, level_short


def test_a_level_is_named_by_its_load() -> None:
    assert level_name("concurrency", 8) == "concurrency 8"
    assert level_name("concurrency", 1, 8) == "concurrency 1 and 8"
    assert level_name("request-rate", 0.5, 2.5) == "0.5 and 2.5 req/s"
    assert level_name("trace", 2) == "2 times the trace's speed"
    assert [level_short("concurrency", 8), level_cell("concurrency", 8)] == ["C=8", "8"]
    assert [level_short("request-rate", 2.5), level_cell("request-rate", 2.5)] == ["2.5 req/s", "2.5 req/s"]
    assert [level_short("trace", 2), level_cell("trace", 0.5)] == ["2x", "0.5x"]
    assert level_column("concurrency", 8, "tok/s") == "C=8 tok/s"
    assert level_column("request-rate", 2.5, "tok/s") == "tok/s at 2.5 req/s"
    assert level_column("trace", 2, "tok/s") == "tok/s at 2x"


def test_rates_are_no_concurrencies() -> None:
    assert Benchmark(levels=(8, 1)).concurrencies == (1, 8)
    rates = Benchmark(levels=(2, 0.5), load="request-rate")
    assert rates.levels == (0.5, 2)
    assert rates.concurrencies == ()


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"levels": (0.5,)}, 'set load = "request-rate"'),
        ({"arrivals": "constant"}, 'arrivals are for load = "request-rate"'),
        ({"max_concurrency": 8}, "max_concurrency belongs to a request rate"),
        ({"load": "trace"}, "needs a dataset"),
        ({"load": "trace", "dataset": "t.jsonl", "arrivals": "constant"}, "arrivals are for"),
    ],
)
def test_settings_that_make_no_sense_together_are_refused(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Benchmark(**table)


def test_constant_arrivals_are_fine_at_a_rate() -> None:
    assert Benchmark(levels=(0.5,), load="request-rate", arrivals="constant", max_concurrency=64).levels == (0.5,)


def test_a_conversation_is_as_long_as_its_last_turn_with_all_before_it() -> None:
    assert Benchmark(prompt_tokens=100, output_tokens=20).request_tokens == 120
    assert Benchmark(prompt_tokens=100, prefix_tokens=40, output_tokens=20, turns=3).request_tokens == 120 + 2 * 80
