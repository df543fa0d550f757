"""Why a server ended: signatures common to every engine, and the rule for choosing among several that match.

The first cause in time is the cause; what follows is usually its echo. A traceback alone decides nothing, and neither
does an exit code: engines kill themselves with SIGKILL, and exit 0 after their workers died. What was said before the
server came up did not end it later.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotuner.engines.base import Diagnosis, ServerExit
from autotuner.engines.fields import bar, is_raised, raised
from autotuner.engines.vocabulary import Action

EVIDENCE_LINES = 6
TRACEBACK_LINES = 120
WORDS_MAX = 160

TOLD_TO_STOP = "told-to-stop"  # its server's end tells nothing of a candidate
LOOK = "look for an operator, a scheduler or a service manager that ended it"
# By what they end with, and by what a shell says of it.
_TOLD = {-15: "SIGTERM", -2: "SIGINT", -1: "SIGHUP", 143: "SIGTERM", 130: "SIGINT", 129: "SIGHUP"}
_UNNAMED = frozenset({"unknown", TOLD_TO_STOP})  # they only say that it ended: a cause beside them counts more
# What a rank says when another has gone: true of it, and not the cause.
ECHOES = frozenset({*_UNNAMED, "own-stop", "rendezvous-timeout", "collective-timeout", "rank-skew", "upstream-starved"})

_READY = re.compile(r"fired up and ready to roll|Application startup complete|listening on http")
# Between these two the memory that is asked for is the graphs'. vLLM says no word when it begins, but the size of its
# KV pool is the last line before.
_CAPTURE_BEGINS = re.compile(
    r"Captur(?:e|ing) [\w ()-]{0,60}(?:graph|batches|shape)|graph failed:|Profiling CUDA graph|\bKV cache size: "
)
_CAPTURE_ENDS = re.compile(r"Graph capturing finished|Memory pool end|Load weight begin|Starting to load model")


@dataclass(frozen=True)
class Signature:
    """A pattern that names a cause. `weak` ones count only if no other matches anywhere in the log."""

    cause: str
    pattern: re.Pattern[str]
    sentence: str
    advice: str = ""
    weak: bool = False
    action: Action | None = None


def signature(
    cause: str, pattern: str, sentence: str, advice: str = "", *, weak: bool = False, action: Action | None = None
) -> Signature:
    """Given a cause, a regular expression (case counts for nothing) and the words for it, return the Signature."""
    return Signature(cause, re.compile(pattern, re.IGNORECASE), sentence, advice, weak, action)


COMMON = (
    signature(
        "host-oom",
        r"std::bad_alloc|Not enough host memory|Cannot allocate memory|DefaultCPUAllocator|oom-kill"
        r"|exceeds memory available in /dev/shm"
        r"|Out of memory: Killed process|killed by the OOM|\bMemoryError\b",
        "the host ran out of memory",
        "load with fewer workers at once, keep less in host memory (offload, prompt cache), or use a smaller model",
    ),
    signature(
        "oom-in-load",
        r"CUDA out of memory|OutOfMemoryError|cudaMalloc failed: out of memory|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEM",
        "the GPU ran out of memory",
        "lower the memory fraction or the context length, or spread the model over more GPUs; nvidia-smi shows whether"
        " another process holds memory",
    ),
    signature(
        "device-busy",
        r"address already in use|errno 98|couldn't bind HTTP server socket",
        "the server's port was already taken",
        "find the process that holds the port; autotuner does not touch what it did not launch",
    ),
    signature(
        "rendezvous-timeout",
        r"waiting for clients|clients joined|DistStoreError|connect\(\) timed out.{0,80}store|Broken pipe.{0,40}TCPStore"
        r"|The client socket has timed out",
        "the ranks did not find each other in time",
        "check that every rank was started, and the network interface they use (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)",
    ),
    signature(
        "gpu-fault",
        r"\bXid\b.{0,40}\d|fallen off the bus|uncorrectable ECC|GPU is lost|GPU is probably locked|ECC error",
        "the GPU or its driver has failed",
        "stop using this GPU: look at the kernel log, and reset or reboot the host",
    ),
    signature(
        "unsupported",
        r"ModuleNotFoundError|ImportError: (?!cannot import name 'Literal')|No module named|"
        r"error while loading shared libraries|command not found",
        "a library that the engine needs is missing from its environment",
        "install it into the interpreter that launch.python names",
        action=Action.FIX_FLAGS,
    ),
    signature(
        "bad-flag-combination",
        r"Repository Not Found|is not a local folder and is not a valid model identifier|Can't load the configuration of|"
        r"does not appear to have a file named|HFValidationError|no such model|Incorrect path_or_model_id",
        "the model was not found where launch.model points",
        "check the path; a host without network needs a local folder",
    ),
)
_IN_CAPTURE = (
    "the GPU ran out of memory while capturing graphs",
    "LOWER the memory fraction, or the largest graph batch size; the KV pool had already taken its share",
)
_CAPTURE_FAILED = (
    "the capture of graphs failed, and not for lack of memory",
    "the first rank's traceback names the kernel: another backend, custom all-reduce off, or another build",
)


def own_stop() -> Diagnosis:
    """What is said of a server that was stopped by autotuner."""
    return Diagnosis("own-stop", "the server was stopped by autotuner")


def never_started() -> Diagnosis:
    """What is said of a launch of which nothing ever ran, because autotuner itself did not get so far."""
    return Diagnosis("own-stop", "autotuner ended, or had no room to write, before the server was started")


def choose(signatures: tuple[Signature, ...], exit_: ServerExit, lines: tuple[str, ...]) -> Diagnosis:
    """Given an engine's signatures, how the server ended and its last lines, return the best diagnosis."""
    if exit_.asked:
        return own_stop()
    found = find(signatures, since_ready(lines))
    return found if found is not None else _by_exit_code(exit_, lines)


def find(signatures: tuple[Signature, ...], lines: tuple[str, ...]) -> Diagnosis | None:
    """Given an engine's signatures and lines of a log, return the first cause in time that they name, or None."""
    strong = (*(s for s in signatures if not s.weak), *COMMON)
    weak = tuple(s for s in signatures if s.weak)
    # Within each group those that only say that something died come last: what they echo may stand after them.
    for group in (_named(strong), _unnamed(strong), _named(weak), _unnamed(weak)):
        for number, line in enumerate(lines):
            match = next((s for s in group if s.pattern.search(line)), None)
            if match:
                return _diagnosis(match, lines, number)
    return None


def _named(signatures: tuple[Signature, ...]) -> tuple[Signature, ...]:
    return tuple(s for s in signatures if s.cause not in _UNNAMED)


def _unnamed(signatures: tuple[Signature, ...]) -> tuple[Signature, ...]:
    return tuple(s for s in signatures if s.cause in _UNNAMED)


def of_ranks(found: Sequence[tuple[str, Diagnosis]], first: int | None) -> Diagnosis:
    """Given the host and the diagnosis of each rank of a server, and which ended first, return the server's.

    It is that of the first to end; unless that one names nothing but another's absence, and another names a cause.
    """
    order = sorted(range(len(found)), key=lambda rank: rank != first)
    causes = [rank for rank in order if found[rank][1].cause not in ECHOES]
    named = [rank for rank in order if found[rank][1].cause not in _UNNAMED]
    by_itself = [
        rank for rank in order if found[rank][1].cause != TOLD_TO_STOP
    ]  # one that was told to stop only followed
    rank = causes[0] if causes else first if first is not None else (named or by_itself or order)[0]
    where, diagnosis = found[rank]
    return replace(diagnosis, sentence=f"rank {rank} on {where}: {diagnosis.sentence}")


def since_ready(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Given lines of a log, return those after the server came up: an error that it survived did not end it."""
    up = next((number for number in range(len(lines) - 1, -1, -1) if _READY.search(lines[number])), None)
    return lines if up is None else lines[up + 1 :]


def capturing(lines: tuple[str, ...]) -> bool:
    """Given lines of a log, tell whether the last of them falls into graph capture."""
    for line in reversed(lines):
        progress = bar(line)
        if progress is not None and progress.done == progress.total:
            return False
        if _CAPTURE_BEGINS.search(line):
            return True
        if _CAPTURE_ENDS.search(line):
            return False
    return False


def _diagnosis(match: Signature, lines: tuple[str, ...], number: int) -> Diagnosis:
    evidence = _evidence(lines, number)
    sentence = match.sentence
    if match.cause == "unknown" and (words := next((said for line in evidence[:2] if (said := raised(line))), "")):
        sentence = f"{sentence}: {words[:WORDS_MAX]}"  # what nothing here knows is said in the server's words
    found = Diagnosis(match.cause, sentence, match.advice, evidence, match.action)
    if match.cause == "oom-in-load" and capturing(lines[: number + 1]):
        found = replace(found, cause="oom-in-capture", sentence=_IN_CAPTURE[0], advice=_IN_CAPTURE[1])
    if match.cause == "unknown" and not match.weak and capturing(lines[: number + 1]):
        found = replace(found, cause="capture-failed-other", sentence=_CAPTURE_FAILED[0], advice=_CAPTURE_FAILED[1])
    return found


def _evidence(lines: tuple[str, ...], number: int) -> tuple[str, ...]:
    """The line itself, the exception that its traceback ends with, then what followed it."""
    raised = next((line for line in lines[number + 1 : number + TRACEBACK_LINES] if is_raised(line)), None)
    first = (lines[number],) if raised is None or raised == lines[number] else (lines[number], raised)
    rest = [line for line in lines[number + 1 :] if line != raised]
    return (*first, *rest[: EVIDENCE_LINES - len(first)])


def _by_exit_code(exit_: ServerExit, lines: tuple[str, ...]) -> Diagnosis:
    tail = lines[-EVIDENCE_LINES:]
    when = "while it served" if exit_.became_ready else "before it was ready"
    if exit_.code in {-9, 137}:
        advice = "look for the OOM killer in the kernel log (dmesg); engines also end themselves this way"
        sentence = f"the server was killed (SIGKILL) {when}, and its log does not say why"
        return Diagnosis("unknown", sentence, advice, tail)
    if exit_.code in _TOLD:
        return Diagnosis(
            TOLD_TO_STOP, f"somebody other than autotuner ended the server {when} ({_TOLD[exit_.code]})", LOOK, tail
        )
    if exit_.code is not None and exit_.code < 0:
        return Diagnosis("unknown", f"the server ended by signal {-exit_.code} {when}", "", tail)
    said = f"exit code {exit_.code}" if exit_.code is not None else "no exit code was recorded"
    advice = "read the log: autotuner show --log"
    return Diagnosis("unknown", f"the server ended {when} ({said}) and its log names no known cause", advice, tail)
