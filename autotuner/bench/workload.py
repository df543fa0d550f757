"""What a benchmark is, and the requests it sends: pure, seeded, the same for both sides of a comparison."""

import hashlib
import json
import random
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

# Common English words that the usual tokenizers encode as one or two tokens each with their leading space.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea kid body
information back parent face others level office door health person art war history party result change morning
reason research girl guy moment air teacher force education river mountain garden winter summer letter window
""".split()  # noqa: SIM905 - a paragraph of words reads better than a list of them

TOKENS_PER_WORD = (
    1.05  # measured on SmolLM2's and Llama-3's tokenizers with these words; prompts are counted by `usage`
)


class Benchmark(BaseModel):
    """One benchmark: its levels (requests kept in flight) and the shape of its requests.

    `seconds` is the measured time of a level, after a warm-up of `warmup_requests` requests a stream at the level's own
    concurrency. Every level sends fresh prompts. `window_s` is how often the rules look at the figures.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    levels: tuple[int, ...] = (1, 8, 32, 128)
    prompt_tokens: int = Field(default=256, ge=1, le=1_000_000)
    output_tokens: int = Field(default=128, ge=2, le=1_000_000)
    seconds: float = Field(default=60.0, ge=1.0, le=86_400.0)
    warmup_requests: int = Field(default=1, ge=0, le=100)
    window_s: float = Field(default=2.0, ge=0.2, le=60.0)
    request_timeout_s: float = Field(default=600.0, gt=0)
    ignore_eos: bool = True
    seed: int = 1

    @field_validator("levels")
    @classmethod
    def _levels_make_sense(cls, levels: tuple[int, ...]) -> tuple[int, ...]:
        if not levels or any(not 1 <= level <= 65_536 for level in levels):
            raise ValueError("levels must be concurrencies of at least 1")
        if len(set(levels)) != len(levels):
            raise ValueError("levels must all differ")
        return tuple(sorted(levels))

    @property
    def hash(self) -> str:
        """16 hex digits that change with anything that would make two measurements incomparable."""
        text = json.dumps(self.model_dump(mode="json", exclude={"window_s"}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def prompt(benchmark: Benchmark, level: int, index: int) -> str:
    """Given a benchmark, a level and the number of a request, return its prompt: about `prompt_tokens` tokens.

    The first words differ between any two prompts of a benchmark, so that no prefix cache can answer one from another.
    """
    # random.Random on a string is stable over Python versions, so both sides of a comparison send the same text.
    source = random.Random(f"{benchmark.seed}/{level}/{index}")  # noqa: S311 - reproducible, not secret
    words = max(1, round((benchmark.prompt_tokens - 8) / TOKENS_PER_WORD))
    opening = f"{benchmark.seed}-{level}-{index}"
    return " ".join([opening, *source.choices(_WORDS, k=words)])


def request_body(benchmark: Benchmark, level: int, index: int, model: str | None) -> dict[str, Any]:
    """Given a benchmark, a level and the number of a request, return the JSON body for /v1/completions.

    The first request of each stream, which belongs to the warm-up, asks for a share of the output tokens that differs from
    stream to stream: requests of one length that begin together would end together for ever, and a server's rate would
    come in waves of prompts and answers instead of the mix that users make.
    """
    share = (index + 1) / level if benchmark.warmup_requests and index < level else 1.0
    body: dict[str, Any] = {
        "prompt": prompt(benchmark, level, index),
        "max_tokens": max(2, round(benchmark.output_tokens * share)),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if benchmark.ignore_eos:
        body["ignore_eos"] = True
    if model:
        body["model"] = model
    return body
