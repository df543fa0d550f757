"""The servers of a simulated campaign: how fast each one truly is, and how noisily that is seen. Seeded, no clock.

Plain step times come from recordings and published tables: a dense 8B and a 135M model on an H200, Kimi-K2.5 on eight
PCIe GPUs, a small mixture of experts on four H100, a 27B on two RTX 3090. A speculative step costs R plain ones, R being
a fixed part, a part a draft token and growth with the batch, drawn around the fits to published rows. Noise is what
decode lines of the recordings show: 0.2 to 12 % between windows, correlated up to 0.6 with the one before, 0.3 to 5 %
between launches; acceptance differs by 15 % between prompts.
"""

import math
import random
from dataclasses import dataclass

LEVELS = (1, 8, 32, 128)
OUTPUT_TOKENS = 128
SGLANG_CAP = 48  # running requests under speculation, unless it is lifted


@dataclass(frozen=True)
class Plain:
    """A server without speculation: a step takes `fixed_s` and `per_request_s` for each running request."""

    name: str
    fixed_s: float
    per_request_s: float

    def step_s(self, running: float) -> float:
        """The true step time at a number of running requests."""
        return self.fixed_s + self.per_request_s * running


# Step times at concurrency 1 and at the busiest level that was published or recorded for each.
FAMILIES = (
    Plain("dense-8b-h200", 4.56e-3, 0.0185e-3),
    Plain("small-h200", 1.20e-3, 0.010e-3),
    Plain("kimi-k2.5-pcie", 15.4e-3, 0.302e-3),
    Plain("moe-30b-h100", 4.0e-3, 0.745e-3),
    Plain("27b-2x3090", 14.2e-3, 0.25e-3),
)


@dataclass(frozen=True)
class Draft:
    """Speculation: depth, accept length, and the cost of its step in plain steps at batch 1, with its growth."""

    depth: int
    accept_len: float
    cost: float
    per_doubling: float
    per_request: float

    def needed(self, running: float) -> float:
        """The true break-even accept length R at a number of running requests."""
        return self.cost * (1 + self.per_doubling * math.log2(running)) + self.per_request * running


@dataclass(frozen=True)
class Server:
    """One candidate: its plain part, its draft if it speculates, and a cap on its running requests."""

    name: str
    plain: Plain
    draft: Draft | None = None
    cap: int | None = None

    def running(self, level: int) -> int:
        """How many of a level's requests run at once."""
        return min(level, self.cap) if self.cap else level

    def step_s(self, level: int) -> float:
        """The true time of a step at a level, a verify step where it speculates."""
        running = self.running(level)
        return self.plain.step_s(running) * (self.draft.needed(running) if self.draft else 1.0)

    def tok_s(self, level: int) -> float:
        """The true output tok/s at a level, over all launches."""
        return self.running(level) * (self.draft.accept_len if self.draft else 1.0) / self.step_s(level)

    def hopeless(self, level: int) -> bool:
        """Whether even a perfect drafter of this depth would lose at a level."""
        return self.draft is not None and self.draft.needed(self.running(level)) > self.draft.depth + 1


@dataclass(frozen=True)
class Host:
    """How noisily servers are seen here; relative standard deviations. `correlation` is that of neighbouring windows."""

    launch_noise: float
    window_noise: float
    correlation: float
    prompt_noise: float = 0.15


@dataclass(frozen=True)
class World:
    """One campaign's host, the server that serves at its beginning, and the candidates in the order of the queue."""

    host: Host
    base: Server
    candidates: tuple[Server, ...]
    load_s: float


def make_world(seed: int) -> World:
    """Given a seed, return a campaign: a model on a host, and 6 to 12 candidates as people write them."""
    rng = random.Random(f"world/{seed}")  # noqa: S311 - reproducible, not secret
    family = rng.choice(FAMILIES)
    host = Host(
        launch_noise=_log_uniform(rng, 0.003, 0.05),
        window_noise=_log_uniform(rng, 0.005, 0.10),
        correlation=rng.uniform(0.0, 0.6),
    )
    base = Server("base", family)
    count = rng.randint(6, 12)
    candidates = tuple(_candidate(rng, family, number) for number in range(count))
    return World(host, base, candidates, load_s=_log_uniform(rng, 60, 600))


def _candidate(rng: random.Random, family: Plain, number: int) -> Server:
    kind = rng.choices(("variant", "no-graphs", "drafter", "n-gram"), (0.45, 0.05, 0.40, 0.10))[0]
    if kind == "variant":  # a backend, a scheduler setting, NCCL variables: mostly a little better or worse
        fixed, slope = rng.lognormvariate(0, 0.08), rng.lognormvariate(0, 0.08)
        return Server(f"variant-{number}", Plain(family.name, family.fixed_s * fixed, family.per_request_s * slope))
    if kind == "no-graphs":  # each step waits for the host: 12 to 17 ms more on the recordings
        fixed_s = family.fixed_s + rng.uniform(0.012, 0.017)
        return Server(f"no-graphs-{number}", Plain(family.name, fixed_s, family.per_request_s))
    cap = SGLANG_CAP if rng.random() < 0.4 else None
    return Server(f"{kind}-{number}", family, _draft(rng, family, kind), cap)


def _draft(rng: random.Random, family: Plain, kind: str) -> Draft:
    depth = rng.choice((1, 2, 3, 3, 3, 5, 7))
    acceptance = 0.0 if rng.random() < 0.12 else rng.uniform(0.3, 0.9)  # an eighth of the heads are broken
    accept_len = (1 - acceptance ** (depth + 1)) / (1 - acceptance)
    if kind == "n-gram":
        cost = rng.gauss(1.08, 0.03) + rng.gauss(0.04, 0.01) * depth
    elif family.name.startswith("moe"):  # 2.1 to 2.6 at depth 3, falling with the batch
        cost = rng.gauss(1.7, 0.1) + rng.gauss(0.2, 0.03) * depth
    else:
        cost = rng.gauss(1.13, 0.05) + rng.gauss(0.125, 0.02) * depth
    growth = rng.uniform(-0.04, 0.02) if family.name.startswith("moe") else rng.uniform(0.04, 0.15)
    return Draft(depth, accept_len, max(1.02, cost), growth, per_request=rng.uniform(0, 0.012))


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))
