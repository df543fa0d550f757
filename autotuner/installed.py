"""Asks a host which version of a candidate's engine is installed; cheap, and an answer may be missing."""

from autotuner.core.candidate import Candidate
from autotuner.edge.helpcache import interpreter_in, interpreter_of
from autotuner.edge.host import Host
from autotuner.engines import engine_for
from autotuner.engines.version import release, version_argv
from autotuner.errors import HostError, HostUnreachable

VERSION_TIMEOUT_S = 10.0  # an interpreter on a cold network disk


async def engine_version(host: Host, candidate: Candidate) -> str | None:
    """Given a host and a candidate, return the version of the engine it would start; None if that cannot be told.

    Raise HostUnreachable where nothing can be asked at all.
    """
    help_argv = engine_for(candidate.engine).help_argv(candidate)
    if help_argv is None:
        return None
    if help_argv[1:2] == ("-m",):
        argv = version_argv(help_argv[0], help_argv[2])
    else:
        python = await _interpreter(host, help_argv[0])
        argv = version_argv(python, candidate.engine) if python else None
    if argv is None:
        return None
    try:
        ran = await host.run(argv, VERSION_TIMEOUT_S)
    except HostUnreachable:
        raise
    except HostError:
        return None
    said = ran.output.strip().splitlines()[-1:]
    return said[0] if ran.code == 0 and said and release(said[0]) else None


async def _interpreter(host: Host, program: str) -> str | None:
    """The Python that a program is a script of; on another host its first line is asked for."""
    if host.here:
        return interpreter_of(program)
    try:
        ran = await host.run(("head", "-n", "1", program), VERSION_TIMEOUT_S)
    except HostUnreachable:
        raise
    except HostError:
        return None
    return interpreter_in(ran.output) if ran.code == 0 else None
