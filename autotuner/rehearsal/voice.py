"""What the engines' voices share: lines of a start with their stages, counters fed by the batch, a stamp of the time. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from autotuner.rehearsal import nccl_voice
from autotuner.rehearsal.asked import Asked
from autotuner.rehearsal.batch import Batch, Step, Work
from autotuner.rehearsal.personalities import LoadStage

OUT_OF_MEMORY = (
    "Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.02 GiB is free. "
    "Including non-PyTorch memory, this process has 138.77 GiB memory in use."
)


@dataclass(frozen=True)
class Said:
    """A piece of the log while a server starts: raw text, so that a bar can be drawn without an end of line.

    `after_s` is how long the recorded engine took before it; `stage` is where a personality may stop it.
    """

    text: str
    after_s: float = 0.0
    stage: LoadStage | None = None
    listens: bool = False  # from here on its port is open
    ends: bool = False  # it was the last one: the server fails
    meets: bool = False  # here ranks on other nodes are waited for


@dataclass
class Ledger:
    """What a server has done since its start, counted once for log, metrics and usage alike."""

    prompt_tokens: int = 0
    generated: int = 0
    prompt_tokens_ended: int = 0
    generated_ended: int = 0
    received: int = 0
    ended: int = 0
    steps: int = 0
    verified: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)
    verified_ended: int = 0
    drafted_ended: int = 0
    accepted_ended: int = 0

    def add(self, step: Step, draft_tokens: int) -> None:
        """Count one step."""
        if step.kind == "prefill":
            self.prompt_tokens += step.tokens
            self.generated += step.requests
        else:
            self.steps += 1
            self.generated += step.tokens
            self.verified += len(step.accepted)
            self.drafted += len(step.accepted) * draft_tokens
            self.accepted += sum(step.accepted)
            for right in step.accepted:
                for position in range(right):
                    self.by_position[position] += 1
        for work in step.ended:
            self._end(work)

    def _end(self, work: Work) -> None:
        self.ended += 1
        self.prompt_tokens_ended += work.prompt_tokens
        self.generated_ended += work.made
        self.verified_ended += work.verified
        self.drafted_ended += work.drafted
        self.accepted_ended += work.accepted


@dataclass(frozen=True)
class Stamps:
    """The two ways in which engines write the time, and the seconds since the start."""

    wall: Callable[[str], str]  # by a strftime format
    since_start_s: Callable[[], float]


class Voice(Protocol):
    """What one engine prints and counts; `ledger` and `batch` are the server's own."""

    exit_code_stopped: int  # negative: it ends itself with that signal
    exit_code_failed: int

    def starting(self) -> Iterator[Said]:
        """The lines of a start, in order."""
        ...

    def step(self, step: Step) -> list[str]:
        """The lines that a step brings."""
        ...

    def tick(self, now_s: float) -> list[str]:
        """The lines that are due by the clock."""
        ...

    def access(self, peer: str, method: str, path: str, status: int) -> str:
        """The line about a request that was answered; empty for an engine that writes none."""
        ...

    def stopping(self, *, noisy: bool) -> list[str]:
        """The lines of a stop that was asked for."""
        ...

    def out_of_memory(self, stage: LoadStage) -> list[str]:
        """The lines of a start that runs out of memory."""
        ...

    def failed(self, error: str) -> list[str]:
        """The lines of a start that ends by an exception."""
        ...

    def engine_died(self) -> list[str]:
        """The lines of a front end whose engine died."""
        ...

    def metrics(self) -> str:
        """The metrics page."""
        ...


@dataclass
class Mouth:
    """What every voice is made of."""

    asked: Asked
    batch: Batch
    ledger: Ledger
    stamps: Stamps
    pid: int

    def __post_init__(self) -> None:
        depth = self.asked.acceptance.drafted if self.asked.acceptance else 0
        self.ledger.by_position = [0] * depth

    @property
    def tokens_held(self) -> int:
        """Tokens in the key-value pool."""
        return sum(work.prompt_tokens + work.made for work in self.batch.running)


def nccl_meets(asked: Asked) -> Iterator[Said]:
    """NCCL's part of a start: its ranks meet, or do not, and it says what it chose where it is to talk."""
    yield Said(nccl_voice.begins(asked.gpus, asked.nccl), 0.5, "nccl")
    fails = nccl_voice.fails(asked.gpus, asked.nccl)
    yield Said(nccl_voice.formed(asked.gpus, asked.nccl), 0.5, ends=fails)


def shards(label: str, count: int, seconds: float) -> Iterator[Said]:
    """A bar over shards as the loaders draw it: a carriage return in front of each state, a newline after the last."""
    for done in range(count + 1):
        each_s = seconds / count
        state = f"{label}: {100 * done // count:3d}% Completed | {done}/{count} "
        yield Said(f"\r{state}[00:{done * each_s:02.0f}<00:00, {each_s:.2f}s/it]\n", each_s if done else 0.0, "weights")


def tqdm(label: str, done: int, total: int, elapsed_s: float) -> str:
    """One state of a tqdm bar, with the carriage return in front and no end of line."""
    full = "█" * (10 * done // total)
    bar = f"{100 * done // total:3d}%|{full:<10}| {done}/{total}"
    return f"\r{label}{bar} [{elapsed_s // 60:02.0f}:{elapsed_s % 60:02.0f}<00:00, 1.29s/it]"
