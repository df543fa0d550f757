"""Checks a candidate before it may take a slot: flags against the installed program's own help, contradictions, place."""

from dataclasses import dataclass, field

from autotuner.core.candidate import Candidate, flag_name
from autotuner.core.source import nearest
from autotuner.edge.host import Host
from autotuner.engines import engine_for
from autotuner.engines.base import flags_in_help
from autotuner.errors import HostError

HELP_TIMEOUT_S = 180.0  # importing an engine takes half a minute on a cold disk


@dataclass
class Preflight:
    """Checks candidates against what is installed on a host; a program is asked for its flags once."""

    host: Host
    _flags: dict[tuple[str, ...], frozenset[str]] = field(default_factory=dict)

    async def problems(self, candidate: Candidate) -> tuple[str, ...]:
        """Given a candidate, return what would keep it from running; each names the nearest right flag."""
        engine = engine_for(candidate.engine)
        found = [*engine.check(candidate)]
        argv = engine.help_argv(candidate)
        if argv is None:
            return tuple(found)
        known = await self._known(argv)
        if isinstance(known, str):
            return (*found, known)
        for key in candidate.launch.args:
            flag = key if key.startswith("-") else f"--{key}"
            if flag not in known and f"--{flag_name(key)}" not in known:
                hint = nearest(flag, sorted(known))
                found.append(f"args.{key}: {argv[0]} has no flag {flag}" + (f"; {hint}" if hint else ""))
        return tuple(found)

    async def _known(self, argv: tuple[str, ...]) -> frozenset[str] | str:
        if argv not in self._flags:
            found = await self._ask(argv)
            if isinstance(found, str):
                return found  # it may have been the host's bad moment: the next candidate asks again
            self._flags[argv] = found
        return self._flags[argv]

    async def _ask(self, argv: tuple[str, ...]) -> frozenset[str] | str:
        try:
            ran = await self.host.run(argv, HELP_TIMEOUT_S)
        except HostError as error:
            return str(error)
        if ran.code != 0:
            last = ran.output.strip().splitlines()[-1:] or ["no output"]
            return f"{' '.join(argv)} failed with exit code {ran.code}: {last[0]}"
        return flags_in_help(ran.output)
