"""What a benchmark is: the load of its levels, the shape of its requests, and a hash that tells benchmarks apart. Pure."""

import hashlib
import json
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Level = int | float  # a concurrency, or a request rate per second, or how many times as fast a trace is played
LEVEL_MAX = 65_536


class Benchmark(BaseModel):
    """One benchmark: its levels and the shape of its requests.

    With `load = "concurrency"` a level is the number of requests kept in flight; with "request-rate" requests a second,
    sent whether or not earlier ones were answered and at most `max_concurrency` at once; with "trace" it is how many times as
    fast as recorded the requests of `dataset` are sent. `seconds` is the measured time of a level, after a warm-up of
    `warmup_requests` requests a stream; with `requests` set a level ends when so many were answered, and `seconds` is the
    longest it may take. `ramp_s` is how long the load takes to grow from nothing to the level. Every level sends fresh prompts.
    `window_s` is how often the rules look at the figures.

    Prompts are made of `prompt_tokens` tokens, of which the first `prefix_tokens` are one of `prefixes` shared ones; `turns`
    above 1 makes each a conversation. A `dataset` is a file of the operator's own: JSON lines, ShareGPT or a trace; what tells
    it from others is `dataset_sha256`, which reading the settings fills in, and not its place.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    levels: tuple[Level, ...] = (1, 8, 32, 128)
    load: Literal["concurrency", "request-rate", "trace"] = "concurrency"
    arrivals: Literal["poisson", "constant"] = "poisson"
    max_concurrency: int | None = Field(default=None, ge=1, le=LEVEL_MAX)
    prompt_tokens: int = Field(default=256, ge=1, le=1_000_000)
    output_tokens: int = Field(default=128, ge=2, le=1_000_000)
    prefix_tokens: int = Field(default=0, ge=0, le=1_000_000)
    prefixes: int = Field(default=1, ge=1, le=1_000_000)
    turns: int = Field(default=1, ge=1, le=1000)
    dataset: str = ""
    dataset_sha256: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    endpoint: Literal["completions", "chat"] = "completions"
    seconds: float = Field(default=60.0, ge=1.0, le=86_400.0)
    requests: int | None = Field(default=None, ge=1)
    warmup_requests: int = Field(default=1, ge=0, le=100)
    ramp_s: float = Field(default=0.0, ge=0.0, le=3600.0)
    window_s: float = Field(default=2.0, ge=0.2, le=60.0)
    request_timeout_s: float = Field(default=600.0, gt=0)
    ignore_eos: bool = True
    seed: int = 1
    client: Literal["autotuner", "sglang", "vllm", "guidellm"] = "autotuner"

    @field_validator("levels")
    @classmethod
    def _levels_make_sense(cls, levels: tuple[Level, ...]) -> tuple[Level, ...]:
        if not levels or any(not 0 < level <= LEVEL_MAX for level in levels):
            raise ValueError(f"levels must be above 0 and at most {LEVEL_MAX}")
        if len(set(levels)) != len(levels):
            raise ValueError("levels must all differ")
        return tuple(sorted(int(level) if level == int(level) else level for level in levels))

    @model_validator(mode="after")
    def _load_makes_sense(self) -> Self:
        if self.load == "concurrency" and not all(isinstance(level, int) for level in self.levels):
            raise ValueError(
                'levels must be whole numbers, since they are concurrencies; for rates set load = "request-rate"'
            )
        if self.load == "trace" and not self.dataset:
            raise ValueError('load = "trace" needs a dataset whose requests have timestamps')
        if self.load == "concurrency" and self.max_concurrency is not None:
            raise ValueError("max_concurrency belongs to a request rate; here the levels are the concurrency")
        if self.prefix_tokens >= self.prompt_tokens:
            raise ValueError("prefix_tokens must be less than prompt_tokens, which counts it too")
        if self.prefix_tokens and self.dataset:
            raise ValueError("prefix_tokens is for synthetic prompts; the requests of a dataset share what they share")
        if self.prefixes > 1 and not self.prefix_tokens:
            raise ValueError("prefixes says how many shared texts of prefix_tokens there are; set prefix_tokens too")
        if self.dataset_sha256 and not self.dataset:
            raise ValueError("dataset_sha256 is the hash of a dataset; set dataset too")
        return self

    @property
    def hash(self) -> str:
        """16 hex digits that change with anything that would make two measurements incomparable."""
        said = self.model_dump(mode="json", exclude={"window_s"})
        # What came later is left out where it says nothing, so that measurements from before it stay comparable.
        later = {name for name, value in said.items() if name in _SINCE_2 and value == _default(name)}
        if self.dataset_sha256:
            later.add("dataset")
        text = json.dumps({name: value for name, value in said.items() if name not in later}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_SINCE_2 = frozenset(
    [
        "load",
        "arrivals",
        "max_concurrency",
        "prefix_tokens",
        "prefixes",
        "turns",
        "dataset",
        "dataset_sha256",
        "endpoint",
        "requests",
        "ramp_s",
        "client",
    ]
)


def _default(name: str) -> Any:
    return Benchmark.model_fields[name].default


def level_name(load: str, level: Level) -> str:
    """Given a benchmark's load and one of its levels, return how a sentence names it: `concurrency 8`, `2.5 req/s`."""
    match load:
        case "request-rate":
            return f"{level:g} req/s"
        case "trace":
            return f"{level:g} times the trace's speed"
        case _:
            return f"concurrency {level:g}"
