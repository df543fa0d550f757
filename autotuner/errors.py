"""The exception tree, and the exit code each branch has on the command line.

AutotunerError                       1  anything else that went wrong, said in one sentence
├── InvalidInput                     3  a candidate, settings or policy file is wrong: file, line, key, nearest name
├── Refused                          4  understood, but must not run: duplicate, unknown flag, foreign port
├── NotFound                         5  no such candidate, trial, entry or file
├── Locked                           6  another daemon owns the state folder
├── HostError                        7  the host did not do what it was asked (process, port, GPU, SSH)
│   ├── HostUnreachable              7  there is no connection to the host: nothing is known of what lives there
│   ├── HostKeyRefused               7  the host showed another key than the pinned ones, or is worked by another daemon
│   └── HostDiskFull                 7  there is no room left on another host's disk: nothing can be launched there
├── JournalBroken                    8  the journal does not verify
├── StoreError                       1  the state database cannot be read or written
│   └── DiskFull                     1  there is no room left to record anything
├── Degraded                         9  the best-known server cannot be restored: a person is needed
└── TimedOut                        10  `--wait` ended before what was waited for

Exit code 2 is click's own: the command line itself was wrong.
"""

from dataclasses import dataclass


class AutotunerError(Exception):
    """Root of everything autotuner raises on purpose; the message is for the operator."""

    exit_code = 1


@dataclass(frozen=True)
class Problem:
    """One thing wrong with an input file: where it is, what is wrong, and what would be right."""

    file: str
    message: str
    line: int | None = None
    key: str = ""
    hint: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line is not None else self.file
        key = f" {self.key}:" if self.key else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}:{key} {self.message}{hint}"


class InvalidInput(AutotunerError):
    """A file the operator wrote cannot be used; carries every problem found, not the first alone."""

    exit_code = 3

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class Refused(AutotunerError):
    """The request is well-formed but must not be carried out."""

    exit_code = 4


class NotFound(AutotunerError):
    """What was asked for does not exist."""

    exit_code = 5


class Locked(AutotunerError):
    """Another process owns the state folder."""

    exit_code = 6


class HostError(AutotunerError):
    """The host did not do what it was asked to do."""

    exit_code = 7


class HostUnreachable(HostError):
    """There is no connection to the host. What runs there runs on, so this says nothing of a server or a trial."""


class HostKeyRefused(HostError):
    """Who answers is not known to be the host: it showed none of its pinned keys. Trying again would not help."""


class HostDiskFull(HostError):
    """There is no room left on the disk of another host. The record here is not touched by it, and what runs there runs on."""


class JournalBroken(AutotunerError):
    """The journal was changed, cut or reordered."""

    exit_code = 8


class StoreError(AutotunerError):
    """The state database could not be read or written."""


class DiskFull(StoreError):
    """There is no room left to record anything."""


class Degraded(AutotunerError):
    """The best-known server cannot be restored within its restart budget."""

    exit_code = 9


class TimedOut(AutotunerError):
    """What was waited for did not happen in time."""

    exit_code = 10
