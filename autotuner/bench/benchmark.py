"""What a benchmark is: the load of its levels, the shape of its requests, and a hash that tells benchmarks apart. Pure."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

LoadKind = Literal["concurrency", "request-rate", "trace"]
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

    Another `client` than our own is started as `client_command`, the first words of its command line, and may need a
    `tokenizer`: a folder, or a name that the Hugging Face hub knows.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    levels: tuple[Level, ...] = (1, 8, 32, 128)
    load: LoadKind = "concurrency"
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
    client_command: tuple[str, ...] = ()
    tokenizer: str = ""

    @field_validator("levels")
    @classmethod
    def _levels_make_sense(cls, levels: tuple[Level, ...]) -> tuple[Level, ...]:
        if not levels or any(not 0 < level <= LEVEL_MAX for level in levels):
            raise ValueError(f"levels must be above 0 and at most {LEVEL_MAX}")
        if len(set(levels)) != len(levels):
            raise ValueError("levels must all differ")
        return tuple(sorted(whole(level) for level in levels))

    @model_validator(mode="after")
    def _load_makes_sense(self) -> Self:
        if self.load == "concurrency" and not all(isinstance(level, int) for level in self.levels):
            raise ValueError(
                'levels must be whole numbers, since they are concurrencies; for rates set load = "request-rate"'
            )
        if self.load != "request-rate" and self.arrivals == "constant":
            raise ValueError('arrivals are for load = "request-rate", which sends requests by the clock')
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

    @model_validator(mode="after")
    def _client_can_do_it(self) -> Self:
        """A foreign client that would leave out a part of the benchmark without a word is refused it here."""
        if self.client == "autotuner":
            if self.client_command or self.tokenizer:
                raise ValueError(
                    "client_command and tokenizer belong to another client than autotuner's own; set client"
                )
            return self
        for wanted, why in _cannot(self):
            if wanted:
                raise ValueError(f'client = "{self.client}" {why}; leave it to client = "autotuner"')
        return self

    @property
    def fixed_length(self) -> bool:
        """Whether all answers are as long as asked for, so that cutting some off at a level's end leaves no bias."""
        return self.ignore_eos and not self.dataset and self.turns == 1

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """The levels as requests in flight; none where the load is sent whether or not earlier requests were answered."""
        return tuple(int(level) for level in self.levels) if self.load == "concurrency" else ()

    @property
    def request_tokens(self) -> int:
        """The tokens of the longest request with its answer: a conversation's last turn has all before it."""
        new = self.prompt_tokens - self.prefix_tokens + self.output_tokens
        return self.prompt_tokens + self.output_tokens + (self.turns - 1) * new

    @property
    def hash(self) -> str:
        """16 hex digits that change with anything that would make two measurements incomparable."""
        said = self.model_dump(mode="json", exclude={"window_s"})
        # What came later is left out where it says nothing, so that measurements from before it stay comparable.
        later = {name for name in _SINCE_2 if getattr(self, name) == _default(name)}
        if self.dataset_sha256:
            later.add("dataset")
        text = json.dumps({name: value for name, value in said.items() if name not in later}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cannot(b: Benchmark) -> list[tuple[bool, str]]:
    """What the benchmark asks for that its client cannot do, or would do otherwise than it says."""
    random = not b.dataset
    common = [
        (b.load == "trace", "cannot play a trace at another speed"),
        (b.turns > 1, "has no conversations that could be compared"),
        (bool(b.dataset) and not b.dataset.endswith(".json"), "reads ShareGPT files alone, and those end in .json"),
    ]
    own = {
        "vllm": [
            (b.prefixes > 1, "shares one prefix among all prompts, so prefixes must be 1"),
            (b.prefix_tokens > 0 and not random, "has no prefixes with a dataset"),
            (b.ramp_s > 0, "ramps up in whole requests a second over the whole level, so ramp_s must be 0"),
            (random and not b.ignore_eos, "always sets ignore_eos for random prompts"),
        ],
        "sglang": [
            (b.prefix_tokens > 0, "shares prefixes in a workload of another kind, so prefix_tokens must be 0"),
            (b.ramp_s > 0, "cannot ramp up, so ramp_s must be 0"),
            (b.load == "request-rate" and b.arrivals == "constant", 'sends requests as "poisson" arrivals alone'),
            (
                not b.ignore_eos and b.endpoint == "completions",
                'counts the tokens asked for and not those that came, unless endpoint = "chat" or ignore_eos = true',
            ),
        ],
        "guidellm": [
            (bool(b.dataset), "has a dataset format of its own"),
            (not b.ignore_eos, "always sets ignore_eos for prompts that it makes"),
        ],
    }
    return common + own[b.client]


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
        "client_command",
        "tokenizer",
    ]
)


def _default(name: str) -> Any:
    return Benchmark.model_fields[name].default


def whole(level: Level) -> Level:
    """Given a level, return it as the whole number that it is, if it is one: 2.0 and 2 are the same level."""
    return int(level) if level == int(level) else level


@dataclass(frozen=True)
class _Words:
    """How a level of one kind of load is named: in a sentence, at the head of one, in a column of levels, over a column."""

    sentence: str
    short: str
    cell: str
    column: str


_WORDS: dict[LoadKind, _Words] = {
    "concurrency": _Words("concurrency {}", "C={}", "{}", "C={0} {1}"),
    "request-rate": _Words("{} req/s", "{} req/s", "{} req/s", "{1} at {0} req/s"),
    "trace": _Words("{} times the trace's speed", "{}x", "{}x", "{1} at {0}x"),
}


def level_name(load: LoadKind, *levels: Level) -> str:
    """Given a benchmark's load and levels of it, return how a sentence names them: `concurrency 1 and 8`, `2.5 req/s`."""
    return _WORDS[load].sentence.format(" and ".join(f"{level:g}" for level in levels))


def level_short(load: LoadKind, level: Level) -> str:
    """Given a load and a level, return its name where there is little room: `C=8`, `2.5 req/s`."""
    return _WORDS[load].short.format(f"{level:g}")


def level_cell(load: LoadKind, level: Level) -> str:
    """Given a load and a level, return its name in a table's column of levels: `8`, `2.5 req/s`."""
    return _WORDS[load].cell.format(f"{level:g}")


def level_column(load: LoadKind, level: Level, figure: str) -> str:
    """Given a load, a level and the name of a figure, return the head of its column: `C=8 tok/s`, `tok/s at 2.5 req/s`."""
    return _WORDS[load].column.format(f"{level:g}", figure)
