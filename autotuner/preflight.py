"""Checks a candidate before it may take a slot: flags against the installed program's own help, contradictions, place."""

from dataclasses import dataclass, field

from autotuner.core.candidate import Candidate, flag_name
from autotuner.core.source import nearest
from autotuner.edge.host import Host
from autotuner.engines import engine_for
from autotuner.engines.base import flags_in_help
from autotuner.errors import HostError
from autotuner.settings import Slot

PARALLEL_FLAGS = (("tp-size", "tp", "tensor-parallel-size"), ("pp-size", "pp", "pipeline-parallel-size"))
HELP_TIMEOUT_S = 180.0  # importing an engine takes half a minute on a cold disk


def slot_problems(candidate: Candidate, slot: Slot) -> tuple[str, ...]:
    """Given a candidate and the slot it is for, return where it asks for GPUs that are not the slot's."""
    problems = []
    visible = candidate.launch.env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and slot.gpus:
        own = ",".join(map(str, slot.gpus))
        problems.append(
            f"env.CUDA_VISIBLE_DEVICES = {visible!r} is not the candidate's to choose: the slot's GPUs are {own}"
        )
    ranks = 1
    for names in PARALLEL_FLAGS:
        asked = candidate.arg(*names)
        ranks *= asked if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0 else 1
    if slot.gpus and ranks > len(slot.gpus):
        problems.append(f"it asks for {ranks} GPUs (tensor times pipeline parallel), the slot has {len(slot.gpus)}")
    return tuple(problems)


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
