"""The requests that a benchmark sends: pure, seeded, the same for both sides of a comparison."""

import random
from dataclasses import dataclass
from typing import Any

from autotuner.bench.benchmark import Benchmark, Level

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


@dataclass(frozen=True, slots=True)
class Ask:
    """One request's JSON body; `at_s` is when a trace has it due, `more` that the conversation goes on after its answer."""

    body: dict[str, Any]
    at_s: float | None = None
    more: bool = False


class Workload:
    """The requests of one level of a benchmark."""

    def __init__(self, benchmark: Benchmark, level: Level, model: str | None) -> None:
        self.benchmark = benchmark
        self._level = int(level)
        self._model = model

    def ask(self, index: int) -> Ask | None:
        """Given its number, return a request."""
        return Ask(request_body(self.benchmark, self._level, index, self._model))

    def follow(self, index: int, said: tuple[str, ...]) -> Ask:
        """Given a conversation's number and the answers so far, return its next turn."""
        raise NotImplementedError
