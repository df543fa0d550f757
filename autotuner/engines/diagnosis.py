"""Why a server ended: signatures common to every engine, and the rule for choosing among several that match.

The first cause in time is the cause; what follows is usually its echo. A traceback alone decides nothing, and neither
does an exit code: engines kill themselves with SIGKILL, and exit 0 after their workers died.
"""

import re
from dataclasses import dataclass

from autotuner.engines.base import Diagnosis, ServerExit

EVIDENCE_LINES = 6


@dataclass(frozen=True)
class Signature:
    """A pattern that names a cause. `weak` ones count only if no other matches anywhere in the log."""

    cause: str
    pattern: re.Pattern[str]
    sentence: str
    advice: str = ""
    weak: bool = False


def signature(cause: str, pattern: str, sentence: str, advice: str = "", *, weak: bool = False) -> Signature:
    """Given a cause, a regular expression (case counts for nothing) and the words for it, return the Signature."""
    return Signature(cause, re.compile(pattern, re.IGNORECASE), sentence, advice, weak)


COMMON = (
    signature(
        "out-of-memory",
        r"CUDA out of memory|OutOfMemoryError|cudaMalloc failed: out of memory|Not enough memory|"
        r"No available memory for the cache blocks|std::bad_alloc|Cannot allocate memory|DefaultCPUAllocator",
        "the server ran out of memory",
        "lower the memory fraction, the context length or the largest graph batch size",
    ),
    signature(
        "port-taken",
        r"address already in use|errno 98|couldn't bind HTTP server socket",
        "the server's port was already taken",
        "find the process that holds the port; autotuner does not touch what it did not launch",
    ),
    signature(
        "missing-dependency",
        r"ModuleNotFoundError|ImportError: (?!cannot import name 'Literal')|No module named|"
        r"error while loading shared libraries|command not found",
        "a library that the engine needs is missing from its environment",
        "install it into the interpreter that launch.python names",
    ),
    signature(
        "model-not-found",
        r"Repository Not Found|is not a local folder and is not a valid model identifier|Can't load the configuration of|"
        r"does not appear to have a file named|HFValidationError|no such model|Incorrect path_or_model_id",
        "the model was not found where launch.model points",
        "check the path; a host without network needs a local folder",
    ),
)


def choose(signatures: tuple[Signature, ...], exit_: ServerExit, lines: tuple[str, ...]) -> Diagnosis:
    """Given an engine's signatures, how the server ended and its last lines, return the best diagnosis."""
    if exit_.asked:
        return Diagnosis("asked-to-stop", "the server was stopped by autotuner")
    ordered = [s for s in (*signatures, *COMMON) if not s.weak], [s for s in signatures if s.weak]
    for group in ordered:
        for number, line in enumerate(lines):
            match = next((s for s in group if s.pattern.search(line)), None)
            if match:
                return Diagnosis(match.cause, match.sentence, match.advice, _around(lines, number))
    return _by_exit_code(exit_, lines)


def _around(lines: tuple[str, ...], number: int) -> tuple[str, ...]:
    """The line itself first, then what followed it."""
    return lines[number : number + EVIDENCE_LINES]


def _by_exit_code(exit_: ServerExit, lines: tuple[str, ...]) -> Diagnosis:
    tail = lines[-EVIDENCE_LINES:]
    when = "while it served" if exit_.became_ready else "before it was ready"
    if exit_.code in {-9, 137}:
        advice = "look for the OOM killer in the kernel log (dmesg); engines also end themselves this way"
        return Diagnosis(
            "killed", f"the server was killed (SIGKILL) {when}, and its log does not say why", advice, tail
        )
    if exit_.code is not None and exit_.code < 0:
        return Diagnosis("crash", f"the server ended by signal {-exit_.code} {when}", "", tail)
    said = f"exit code {exit_.code}" if exit_.code is not None else "no exit code was recorded"
    advice = "read the log: autotuner show --log"
    return Diagnosis("unknown", f"the server ended {when} ({said}) and its log names no known cause", advice, tail)
