"""The engine protocol and the types of the facts that engines read out of logs and metrics.

An engine is pure: it turns a candidate into argv, environment and endpoints, and turns text into facts. One figure has
one name and one unit here, whatever the engine calls it; accept length always includes the bonus token.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from autotuner.core.candidate import Candidate
from autotuner.engines.vocabulary import Action
from autotuner.engines.wishes import Answer, Wish


class Stage(StrEnum):
    """The stages of a start, in their usual order."""

    PROCESS = "process up"
    WEIGHTS = "weights loading"
    DRAFT_WEIGHTS = "draft weights loading"
    KV_POOL = "KV pool"
    JIT = "JIT compilation"
    GRAPH_CAPTURE = "graph capture"
    WARM_UP = "warm-up"
    HTTP_UP = "HTTP up"
    GENERATING = "generating"


STAGE_ORDER = tuple(Stage)


@dataclass(frozen=True)
class Place:
    """Where a server listens; `host` is a loopback address unless the settings say otherwise."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The base address without a trailing slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True)
class Rank:
    """One of the `count` processes, each on a node of its own, that are one server; rank 0 answers, all meet at `meet`."""

    number: int
    count: int
    meet: Place


@dataclass(frozen=True)
class Endpoints:
    """The paths of a server's HTTP interface; None where the engine has none."""

    health: str | None
    models: str = "/v1/models"
    completions: str = "/v1/completions"
    metrics: str | None = "/metrics"
    flush_cache: str | None = None


@dataclass(frozen=True)
class Speculation:
    """What a candidate asks of speculative decoding; None where the engine chooses by itself."""

    method: str
    num_steps: int | None
    draft_tokens: int | None = None

    @property
    def ceiling(self) -> float | None:
        """The longest accept length possible: every drafted step accepted, and the bonus token."""
        return self.num_steps + 1.0 if self.num_steps is not None else None

    @property
    def is_tree(self) -> bool:
        """Whether more tokens are verified a step than a chain of its depth has: drafts branch."""
        return self.num_steps is not None and (self.draft_tokens or 0) > self.num_steps + 1


@dataclass(frozen=True)
class StageSeen:
    """A log line that proves a stage of the start was reached, with its progress where the line gives one."""

    stage: Stage
    done: int | None = None
    total: int | None = None
    ended: bool = False


class Window(NamedTuple):
    """One stretch of telemetry, normalised: requests in numbers, rates in tokens per second, None where unknown.

    `accept_len` is tokens per verify step with the bonus token; `drafts` is the number of verify steps (one request,
    one step); `accept_rate` is accepted/drafted and None where the engine's own definition is not known;
    `printed_rate` is what the engine calls its accept rate, whatever it means there (engines/accept_rate.py).
    `prompt_tok_s` is the rate at which prompts were worked: above 0, the window is no pure decoding. `cache_hit` is
    the share of prompt tokens found in the prefix cache, 0 to 1. `seconds` is the length of the stretch, None where a
    log line does not say it; `counted` is the tokens by which the server's own counter rose in it, whatever rate the
    client saw. `certainty` says what the figures are worth: counted between two scrapes, printed (rounded, at the
    engine's own interval), or derived from printed ones.
    """

    source: Literal["log", "metrics"]
    running: float | None = None
    queued: float | None = None
    gen_tok_s: float | None = None
    prompt_tok_s: float | None = None
    accept_len: float | None = None
    accept_rate: float | None = None
    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    counted: int | None = None
    graph: bool | None = None
    printed_rate: float | None = None
    cache_hit: float | None = None
    certainty: Literal["counted", "printed", "derived"] = "printed"
    prefill: bool = False
    after_idle: bool = False
    preemptions: int = 0
    seconds: float | None = None
    rank: str = ""


class Prefill(NamedTuple):
    """A log line that says a prefill batch ran; the decode window it falls into is not in steady state."""

    tokens: int | None = None
    cached: int | None = None
    running: float | None = None
    queued: float | None = None
    rank: str = ""


@dataclass(frozen=True)
class Effective:
    """What the server says it resolved; only the fields that a line or an answer states are set.

    The same words say what a candidate asks for. `rank` is the data-parallel rank (`DP1`) whose own figures
    `running_cap` and `kv_tokens` are, empty where they are the whole server's; `dp` is the number of such ranks, and
    `graph_max_batch` is a rank's (0: no graphs). `all_reduce` names who may carry an all-reduce, first one first.
    `memory_share` is the share of a GPU's memory that the server takes for weights and KV cache, 0 to 1.
    `arguments` is a digest of every other argument that the server resolved, where it tells them all. `source` is who
    says so: the dump of the arguments, a line of the log, or an answer of the serving server.
    """

    running_cap: int | None = None
    kv_tokens: int | None = None
    context_len: int | None = None
    attention_backend: str | None = None
    graph_max_batch: int | None = None
    speculating: bool | None = None
    spec_method: str | None = None
    spec_steps: int | None = None
    draft_tokens: int | None = None
    draft_quantization: str | None = None
    all_reduce: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    dp: int | None = None
    version: str | None = None
    arguments: str | None = None
    memory_share: float | None = None
    rank: str = ""
    source: Literal["arguments", "log", "server"] = "log"


@dataclass(frozen=True)
class Note:
    """A line worth keeping as evidence: the server's own warning or error."""

    severity: Literal["warning", "error"]
    text: str


@dataclass(frozen=True)
class NcclSaid:
    """What NCCL says on one line, as words.

    `what` is version, set (name, value), link (rank, rank, transport), channels (all, NVLS), connected, chose (function,
    algorithm, protocol) or warned.
    """

    what: str
    values: tuple[str, ...]


LogFact = StageSeen | Window | Prefill | Effective | Note | NcclSaid


@dataclass(frozen=True)
class Counters:
    """One scrape of a server's metrics: gauges and counters since its start, None where it has no such series."""

    running: float | None = None
    queued: float | None = None
    generated_tokens: float | None = None
    prompt_tokens: float | None = None
    cached_prompt_tokens: float | None = None
    drafts: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    preemptions: float | None = None
    accept_len: float | None = None


@dataclass(frozen=True)
class ServerExit:
    """How a server process ended, as far as it is known."""

    code: int | None
    asked: bool
    became_ready: bool


@dataclass(frozen=True)
class Diagnosis:
    """Why a server died or did not come up: a word of the closed list, one plain sentence, advice, and the lines.

    `action` is set only where it is not the cause's usual one (vocabulary.CAUSES).
    """

    cause: str
    sentence: str
    advice: str = ""
    evidence: tuple[str, ...] = field(default=())
    action: Action | None = None


class Engine(Protocol):
    """What the daemon needs to know about an engine. Every method is pure."""

    @property
    def name(self) -> str:
        """The engine's name in candidate files."""
        ...

    def argv(self, candidate: Candidate, place: Place, rank: Rank | None = None) -> tuple[str, ...]:
        """The command that starts the server, or one rank of it; rank 0 listens at `place`."""
        ...

    def check_nodes(self, candidate: Candidate, count: int) -> tuple[str, ...]:
        """What keeps the candidate from being one server over so many nodes. Empty if nothing."""
        ...

    def environment(self, candidate: Candidate) -> dict[str, str]:
        """The variables to add to the environment; the candidate's own win over the engine's."""
        ...

    def endpoints(self, candidate: Candidate) -> Endpoints:
        """The paths of the HTTP interface."""
        ...

    def info_paths(self, candidate: Candidate) -> tuple[str, ...]:
        """The paths at which a serving server tells what it resolved; `new|old` names two of one answer, newest first."""
        ...

    def read_info(self, path: str, text: str) -> Effective:
        """What the answer at one of those paths says; empty where it is no such answer."""
        ...

    def asked(self, candidate: Candidate) -> Effective:
        """What the candidate's own flags ask for, in the words of what the server resolves; None where it leaves it open."""
        ...

    def help_argv(self, candidate: Candidate) -> tuple[str, ...] | None:
        """The command that prints the flags this very program has; None where there is no such thing."""
        ...

    def check(self, candidate: Candidate) -> tuple[str, ...]:
        """What is wrong with the candidate by itself: flags that contradict each other or the slot. Empty if nothing."""
        ...

    def speculation(self, candidate: Candidate) -> Speculation | None:
        """The speculative decoding that the candidate asks for, or None."""
        ...

    def change(self, candidate: Candidate, wish: Wish, version: str | None) -> Answer:
        """The settings that a follow-up's wish comes to in this release (None: not known), or why it cannot be met."""
        ...

    def silence_limit_s(self, stage: Stage) -> float:
        """How long a start may show no sign of progress in this stage before it counts as hung, in seconds."""
        ...

    def read_line(self, line: str) -> tuple[LogFact, ...]:
        """The facts on one log line, already free of escapes; empty for a line that says nothing of use."""
        ...

    def read_metrics(self, text: str) -> Counters:
        """The counters in one scrape of the metrics endpoint, in Prometheus' text format."""
        ...

    def diagnose(self, exit_: ServerExit, lines: tuple[str, ...]) -> Diagnosis:
        """Why the server ended, from how it ended and the last lines of its log."""
        ...


def window_between(before: Counters, after: Counters, seconds: float, gen_tok_s: float | None) -> Window:
    """Given two scrapes, the time between them and the rate the client saw, return the window they bound.

    Deltas of counters are exact. The client's own token rate is preferred to the server's token counter, because
    llama.cpp and SGLang raise theirs when a request ends, in lumps.
    """
    drafts, drafted = _delta(before.drafts, after.drafts), _delta(before.drafted, after.drafted)
    accepted = _delta(before.accepted, after.accepted)
    generated = _delta(before.generated_tokens, after.generated_tokens)
    rate = gen_tok_s if gen_tok_s is not None else (generated / seconds if generated is not None else None)
    return Window(
        source="metrics",
        certainty="counted",
        running=_mean(before.running, after.running),
        queued=_mean(before.queued, after.queued),
        gen_tok_s=rate,
        accept_len=1 + accepted / drafts if drafts and accepted is not None else None,
        accept_rate=accepted / drafted if drafted and accepted is not None else None,
        drafts=int(drafts) if drafts is not None else None,
        drafted=int(drafted) if drafted is not None else None,
        accepted=int(accepted) if accepted is not None else None,
        cache_hit=_share(before, after),
        counted=int(generated) if generated is not None else None,
        preemptions=int(_delta(before.preemptions, after.preemptions) or 0),
        seconds=seconds,
    )


def flags_in_help(text: str) -> frozenset[str]:
    """Given the text of a program's `--help`, return the long and short flags it names, with their dashes."""
    flags: set[str] = set()
    for word in text.replace(",", " ").replace("|", " ").replace("[", " ").replace("]", " ").replace("=", " ").split():
        if word.startswith("-") and len(word) > 1 and word.lstrip("-")[:1].isalpha():
            flags.add(word.rstrip(".:;)'\"`"))
    return frozenset(flags)


def _delta(before: float | None, after: float | None) -> float | None:
    """A counter that went backwards belongs to another server process: then nothing is known."""
    if before is None or after is None or after < before:
        return None
    return after - before


def _share(before: Counters, after: Counters) -> float | None:
    """The share of the prompt tokens between two scrapes that came from the prefix cache."""
    prompt = _delta(before.prompt_tokens, after.prompt_tokens)
    cached = _delta(before.cached_prompt_tokens, after.cached_prompt_tokens)
    return min(1.0, cached / prompt) if prompt and cached is not None else None


def _mean(a: float | None, b: float | None) -> float | None:
    known = [x for x in (a, b) if x is not None]
    return sum(known) / len(known) if known else None
