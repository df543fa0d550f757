"""Ask a server that has just come to serve what it resolved, and look whether another trial measured that very server.

Decides nothing: it returns what is to be recorded with the launch, and what a trial would end by.
"""

from dataclasses import replace

from autotuner import known
from autotuner.context import SlotContext
from autotuner.core import topology as joining
from autotuner.core.candidate import Candidate
from autotuner.core.effective import Configuration, Demand, differences, identity, merge
from autotuner.core.nccl import Nccl
from autotuner.core.nccl_effect import differences as unheeded
from autotuner.core.objective import unusable
from autotuner.core.policy import Fired, built_in
from autotuner.core.state import Verdict
from autotuner.core.topology import Topology
from autotuner.edge.probes import Probe
from autotuner.edge.rows import LaunchRow, Trial
from autotuner.engines import nccl
from autotuner.errors import HostError, HostUnreachable

TOPOLOGY_TIMEOUT_S = 20.0


async def configuration(ctx: SlotContext, row: LaunchRow, candidate: Candidate, probe: Probe) -> Configuration:
    """Ask the server's info endpoints once and merge their answers with what its log said; one that is silent says nothing."""
    engine = ctx.engine(candidate)
    answers = [answer for paths in engine.info_paths(candidate) if (answer := await probe.info(paths)) is not None]
    log = ctx.log(row.id, engine)
    await log.facts()  # the lines between the last look at the start and the first token
    effective = merge([*log.said.values(), *(engine.read_info(path, text) for path, text in answers)])
    demand = _demand(ctx.store.trial(row.trial_id)) if row.trial_id is not None else Demand()
    env = candidate.launch.env
    told = replace(log.nccl, added=bool(nccl.watching(candidate))) if log.nccl != Nccl() else None
    found = differences(engine.asked(candidate), effective, demand, candidate.engine, env)
    found += unheeded(env, told) if told is not None else ()
    return Configuration(effective, found, identity(candidate, effective, told), told, await topology(ctx, candidate))


async def topology(ctx: SlotContext, candidate: Candidate) -> Topology | None:
    """Ask how the host's GPUs are joined, once a host and boot; None where one is used at most, or no driver answers."""
    if (len(ctx.slot.gpus) or nccl.ranks(candidate) or 1) == 1:
        return None
    if ctx.topology is None or ctx.topology[0] != ctx.host.cuts:
        try:
            ran = await ctx.host.run(joining.QUERY, TOPOLOGY_TIMEOUT_S)
        except HostUnreachable:
            raise
        except HostError:
            ctx.topology = (ctx.host.cuts, None)
        else:
            ctx.topology = (ctx.host.cuts, joining.parse(ran.output) if ran.code == 0 else None)
    return ctx.topology[1]


def twin(ctx: SlotContext, row: LaunchRow, resolved: Configuration) -> Fired | None:
    """If an earlier trial measured the very same server under another candidate, return what this one ends by.

    The best-known's own trial is measured whatever it equals, and so is a candidate that is tried again or confirmed.
    """
    if row.trial_id is None or not resolved.identity:
        return None
    trial = ctx.store.trial(row.trial_id)
    if trial.is_baseline or trial.confirms is not None:
        return None
    twins = ctx.store.twin_trials(trial, resolved.identity)
    earlier = next((t for t in twins if any(not unusable(r.figures) for r in ctx.store.results(t.id))), None)
    if earlier is None:
        return None
    sentence = (
        f"the same effective configuration as {earlier.name} (trial {earlier.id}), whose result stands for this one too"
    )
    advice = (
        f"its figures: autotuner show {earlier.id}; the flags that differ between the two change nothing on this server"
    )
    return built_in("same-configuration", sentence, Verdict.INCONCLUSIVE, advice)


def _demand(trial: Trial) -> Demand:
    benchmark = known.benchmark_of(trial)
    return Demand(benchmark.concurrencies, benchmark.request_tokens)
