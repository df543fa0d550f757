"""What is launched where: argv and environment of a candidate's server in a slot, rank by rank where it has several nodes."""

from autotuner.context import SlotContext
from autotuner.core.candidate import Candidate
from autotuner.edge.host import LaunchSpec, rank_id
from autotuner.engines import nccl
from autotuner.errors import HostError


def spec_of(ctx: SlotContext, candidate: Candidate, launch_id: str) -> LaunchSpec:
    """Given a candidate and the id of its launch, return what its host is told to start.

    Raise HostError for one that cannot be one server over the slot's nodes, though nobody checked it before it was queued.
    """
    count = len(ctx.slot.members)
    if count > 1 and (problems := ctx.engine(candidate).check_nodes(candidate, count)):
        raise HostError(f"{candidate.name} cannot be launched over {count} nodes: {'; '.join(problems)}")
    first, *others = [_rank_spec(ctx, candidate, launch_id, rank) for rank in range(count)]
    return LaunchSpec(**{**vars(first), "others": tuple(others)})


def _rank_spec(ctx: SlotContext, candidate: Candidate, launch_id: str, rank: int) -> LaunchSpec:
    return LaunchSpec(
        launch_id=rank_id(launch_id, rank),
        slot=rank_id(ctx.name, rank),  # whose lock the rank holds: ranks may share a host
        argv=ctx.argv(candidate, rank),
        env=_environment(ctx, candidate, rank),
        secret_files=ctx.slot.secret_files,
        stop_grace_s=ctx.slot.stop_grace_s,
    )


def _environment(ctx: SlotContext, candidate: Candidate, rank: int) -> dict[str, str]:
    """The engine's own variables, the node's, its GPUs, what keeps the launch id readable in /proc and makes NCCL talk."""
    node = ctx.slot.members[rank]
    env = {"SPT_NOENV": "1", **nccl.watching(candidate), **ctx.engine(candidate).environment(candidate), **node.env}
    if node.gpus:
        env.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, node.gpus)))
    return env
