"""The fixed greedy prompts that every server of a slot is asked, and how far two servers' answers agree. Pure.

A configuration can be fast because it computes something else: a broken kernel, a quantisation that lost its scales, a
drafter that is not verified. Its figures then look better than ever. Greedy decoding of one model is nearly deterministic,
so a handful of answers tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# A fact, arithmetic, code, a list, two other languages, a pattern and prose: what goes wrong need not go wrong everywhere.
PROMPTS = (
    "The capital of France is Paris. The capital of Japan is",
    "Question: What is 17 * 6 + 4? Let us compute step by step.\nAnswer: 17 * 6 =",
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "The planets of the solar system in order from the sun:\n1. Mercury\n2. Venus\n3.",
    "Die Hauptstadt von Deutschland ist Berlin. Die Stadt hat",
    "\u6c34\u7684\u5316\u5b66\u5f0f\u662f",
    '{"days": ["Monday", "Tuesday", "Wednesday",',
    "Water boils when it is heated because",
)
ANSWER_TOKENS = 48


@dataclass(frozen=True)
class Agreement:
    """How far answers agree, 0 to 1: on average over the prompts compared, and where they agree least."""

    mean: float
    prompts: int
    worst: str
    worst_mine: str
    worst_best: str


def agreement(mine: Sequence[str], best: Sequence[str]) -> Agreement | None:
    """Given a server's answers and the best-known's, in the order of the prompts, return how far they agree.

    For each prompt it is the share of their longest common beginning, in characters of the longer one: after the first
    token that differs greedy decoding goes its own way for good, so what follows says nothing. A prompt that the
    best-known answered with nothing is left out; one that this server answered with nothing counts 0. None if there is
    nothing to compare.
    """
    rows = [
        (_shared(_plain(a), _plain(b)), prompt, a, b)
        for prompt, a, b in zip(PROMPTS, mine, best, strict=False)
        if _plain(b)
    ]
    if not rows:
        return None
    _, prompt, a, b = min(rows, key=lambda row: row[0])
    return Agreement(sum(share for share, *_ in rows) / len(rows), len(rows), prompt, a, b)


def _shared(a: str, b: str) -> float:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / max(len(a), len(b))


def _plain(answer: str) -> str:
    """Engines differ in whether they give the first token's space, and half a character at the end."""
    return answer.strip().rstrip("\ufffd")
