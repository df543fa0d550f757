"""Any argv that serves an OpenAI-compatible API: no log format is assumed, only HTTP and the process."""

from autotuner.core.candidate import Candidate
from autotuner.engines import nccl_log
from autotuner.engines.base import (
    Counters,
    Diagnosis,
    Effective,
    Endpoints,
    LogFact,
    Place,
    Rank,
    ServerExit,
    Speculation,
    Stage,
)
from autotuner.engines.diagnosis import choose, signature
from autotuner.engines.wishes import Answer, CannotChange, Wish

SIGNATURES = (
    signature(
        "bad-flag-combination",
        r"unrecognized arguments|unknown (option|flag|argument)|no such option|invalid argument:",
        "the server refused a flag",
        "compare with the program's --help",
    ),
)


class Command:
    """Reader of a server about which nothing is known beyond its API."""

    name = "command"

    def argv(self, candidate: Candidate, place: Place, rank: Rank | None = None) -> tuple[str, ...]:
        """launch.command with {host}, {port} and {model} filled in, and over several nodes what tells its rank."""
        filled = {"{host}": place.host, "{port}": str(place.port), "{model}": candidate.launch.model or ""}
        if rank is not None:
            filled |= {"{rank}": str(rank.number), "{nodes}": str(rank.count)}
            filled |= {"{dist_host}": rank.meet.host, "{dist_port}": str(rank.meet.port)}
        return tuple(_filled(word, filled) for word in candidate.launch.command or ())

    def environment(self, candidate: Candidate) -> dict[str, str]:
        """The candidate's own variables, and the place for programs that read it from there."""
        return dict(candidate.launch.env)

    def endpoints(self, candidate: Candidate) -> Endpoints:
        """Only the completions endpoint is certain; its models list stands in for a health check."""
        return Endpoints(health=None)

    def info_paths(self, candidate: Candidate) -> tuple[str, ...]:
        """Nothing is known about what such a server tells."""
        return ()

    def read_info(self, path: str, text: str) -> Effective:
        """Nothing: see read_line."""
        return Effective()

    def asked(self, candidate: Candidate) -> Effective:
        """Nothing: the command's words are not interpreted."""
        return Effective(source="arguments")

    def help_argv(self, candidate: Candidate) -> tuple[str, ...] | None:
        """Nothing is known about the program's flags."""
        return None

    def check(self, candidate: Candidate) -> tuple[str, ...]:
        """The command must listen where the slot says, so it must take the port from us."""
        command = candidate.launch.command or ()
        problems = []
        if not any("{port}" in word for word in command):
            problems.append("launch.command must contain {port}, so that the server listens on the slot's port")
        if candidate.launch.args:
            problems.append('launch.args is not used by engine "command"; put the flags into launch.command')
        return tuple(problems)

    def check_nodes(self, candidate: Candidate, count: int) -> tuple[str, ...]:
        """A command that does not ask which rank it is would be as many servers as there are nodes."""
        if any("{rank}" in word for word in candidate.launch.command or ()):
            return ()
        return ("launch.command must contain {rank}, so that it is one server over the slot's nodes",)

    def speculation(self, candidate: Candidate) -> Speculation | None:
        """Unknown, so never assumed."""
        return None

    def change(self, candidate: Candidate, wish: Wish, version: str | None) -> Answer:
        """Nothing: the command's words are not interpreted."""
        return CannotChange('nothing is known of the flags of engine "command"')

    def silence_limit_s(self, stage: Stage) -> float:
        """An unknown program may be silent for long; the start's own deadline still holds."""
        return 600.0

    def read_line(self, line: str) -> tuple[LogFact, ...]:
        """What NCCL says of itself; an unknown format is not guessed at."""
        return nccl_log.read_line(line)

    def read_metrics(self, text: str) -> Counters:
        """Nothing: see read_line."""
        return Counters()

    def diagnose(self, exit_: ServerExit, lines: tuple[str, ...]) -> Diagnosis:
        """The signatures that every engine shares."""
        return choose(SIGNATURES, exit_, lines)


def _filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word
