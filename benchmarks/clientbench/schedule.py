"""The loads of the client benchmark, and how fast each of them lets tokens come. Pure."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """A closed loop of `concurrency` streams, all begun at once, that ask for `requests` answers of `tokens` tokens.

    The server writes a request's first token `ttft_ms` after it came and the others `itl_ms` apart, `burst` at a time; with
    both 0 it writes as fast as the client takes them.
    """

    name: str
    concurrency: int
    requests: int
    tokens: int
    ttft_ms: float = 50.0
    itl_ms: float = 10.0
    burst: int = 1

    @property
    def total_tokens(self) -> int:
        """All tokens asked for."""
        return self.requests * self.tokens

    @property
    def seconds(self) -> float:
        """How long the schedule takes: rounds of answers, each as long as an answer; 0 where there is no schedule.

        All answers are equally long and a stream asks anew as soon as its answer ends, so the streams go in rounds, and a
        last round that only some of them take part in is as long as any.
        """
        if not self.itl_ms:
            return 0.0
        # The first burst is due at the TTFT, so all of its tokens come early, and of the last burst's too.
        pauses = (math.ceil(self.tokens / self.burst) - 1) * self.burst
        answer_ms = self.ttft_ms + pauses * self.itl_ms
        return math.ceil(self.requests / self.concurrency) * answer_ms / 1000

    @property
    def possible_tok_s(self) -> float | None:
        """The most tokens a second that the schedule allows; None where there is no schedule."""
        return self.total_tokens / self.seconds if self.itl_ms else None


MODES = (
    Mode("acc", 64, 192, 128),
    Mode("paced20k", 128, 256, 256, itl_ms=6.4),
    Mode("over128", 128, 1024, 256, itl_ms=1.28),
    Mode("over512", 512, 2048, 128, itl_ms=5.12),
    Mode("flood", 128, 2048, 256, ttft_ms=0.0, itl_ms=0.0, burst=4),
)
WHAT = {
    "acc": "6,400 tok/s: how true the latencies are",
    "paced20k": "20,000 tok/s: what a token costs at a usual load",
    "over128": "a schedule of 100,000 tok/s over 128 streams",
    "over512": "the same over 512 streams",
    "flood": "no schedule, 4 events a send: what the parser takes",
}
