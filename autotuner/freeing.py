"""Whether a slot's port and GPUs are free: who else holds them, and what a server that has ended has not given back yet.

A stop waits here for its GPU memory; before each launch the same is looked at once more, since servers also end by
themselves, and daemons in the middle of a stop.
"""

import dataclasses
from dataclasses import dataclass

from autotuner import log, outcome
from autotuner.context import Given, SlotContext
from autotuner.core import gpumemory
from autotuner.core.gpumemory import GPU_WAIT_S
from autotuner.edge import clock
from autotuner.edge.host import GpuUse, PortHolder
from autotuner.edge.rows import LaunchRow
from autotuner.errors import HostError, HostUnreachable

POLL_S = 0.5


@dataclass(frozen=True)
class Around:
    """What keeps a slot from a launch, each empty if nothing does: a stranger; memory that comes back; memory that does not."""

    strangers: str = ""
    freeing: str = ""
    held: str = ""


async def look(ctx: SlotContext) -> Around:
    """Look at port and GPUs of a slot in which nothing of ours lives. Raise HostUnreachable if the host does not answer."""
    holder = await ctx.host.port_holder(ctx.slot.port)
    if holder is not None:
        return Around(strangers=f"port {ctx.slot.port} is held by {_describe(holder)}")
    last = _last(ctx)
    gpus = await read(ctx)
    given = _given(ctx, last) if last is not None else ctx.given
    for gpu in gpus or ():
        for pid, name, mib in gpu.processes:
            if pid not in given.own:
                return Around(strangers=f"GPU {gpu.name} is used by pid {pid} ({name}, {mib:.0f} MiB)")
    if given.back and gpus is not None:
        return Around()
    around = _owed(ctx, last, gpus)
    taken = around.held and ctx.store.slot(ctx.name).force  # a person has said that it is somebody else's
    return Around() if taken else around


async def wait(ctx: SlotContext, row: LaunchRow) -> str:
    """Wait until a stopped launch's GPU memory is back, for at most GPU_WAIT_S; return why it is not, empty if it is."""
    if row.boot_id != clock.boot_id():
        return ""
    _given(ctx, row).owed_s = clock.monotonic_s()
    while True:
        around = _owed(ctx, row, await read(ctx))
        if not around.freeing:
            return around.held
        ctx.live = dataclasses.replace(ctx.live, progress=around.freeing)
        await clock.sleep(POLL_S)


async def note_own(ctx: SlotContext, row: LaunchRow) -> None:
    """While a launch lives: learn which processes on the GPUs are its; a driver may list them after their end.

    They are on record, since the daemon may end before that memory is back: the next one would take them for a stranger's.
    """
    gpus = await read(ctx) or ()
    pids = {pid for gpu in gpus for pid, _, _ in gpu.processes}
    seen = {pid for pid in pids if await ctx.host.launch_of(pid) == row.id}
    given = _given(ctx, row)
    if not seen <= given.own:
        given.own |= seen
        ctx.store.note_gpu_pids(row.id, given.own)


async def levels(ctx: SlotContext) -> dict[int, float] | None:
    """Before a launch: return the memory in use on each GPU of the slot, in MiB; None if the launch must not be made now.

    Where the GPUs cannot be read, and were not for GPU_WAIT_S, the last levels that are known stand in, and that is told.
    """
    gpus = await read(ctx)
    last = _last(ctx)
    if gpus is not None:
        given_up = _given(ctx, last).own if last is not None and ctx.store.slot(ctx.name).force else frozenset()
        # Somebody came since the slot was found free; the next cycle names him.
        taken = any(pid not in given_up for gpu in gpus for pid, _, _ in gpu.processes)
        return None if taken else {gpu.index: gpu.used_mib for gpu in gpus}
    if _may_be_read_yet(ctx, last):
        return None
    _tell_unread(ctx)
    return ctx.store.last_levels(ctx.name)


async def read(ctx: SlotContext) -> tuple[GpuUse, ...] | None:
    """The slot's GPUs; None where they cannot be read, which is logged once and kept in `ctx.given.unread`."""
    wanted, given = ctx.slot.gpu_indices, ctx.given
    if not wanted:
        return ()
    why, failed = "", False
    try:
        gpus = await ctx.host.gpus(wanted)
    except HostUnreachable:
        raise
    except HostError as error:
        gpus, why, failed = (), str(error), True
    if missing := sorted(set(wanted) - {gpu.index for gpu in gpus}):
        why = why or f"nvidia-smi is not there, or does not tell of GPU {', '.join(map(str, missing))}"
    if why and not given.unread:
        given.unread_s = clock.monotonic_s()
        log.get().warning("GPUs cannot be read", slot=ctx.name, why=why)
    given.unread, given.failed, given.told = why, failed, given.told and bool(why)
    return None if why else gpus


def _tell_unread(ctx: SlotContext) -> None:
    """Write once that a launch is made although nobody can tell whether its GPUs are free."""
    if not ctx.given.told:
        sentence = (
            f"The GPUs of the slot cannot be read: {ctx.given.unread}. Whether their memory is free is not known."
        )
        outcome.note(ctx, "GPUs not looked at", sentence, (("Do", "`autotuner doctor` looks for the reason"),))
    ctx.given.told = True


def _may_be_read_yet(ctx: SlotContext, last: LaunchRow | None) -> bool:
    """Whether GPUs that cannot be read are waited for: not where nobody ever could, nor after GPU_WAIT_S."""
    could = ctx.given.failed or (last is not None and bool(last.gpu_used_mib))
    return could and clock.monotonic_s() - ctx.given.unread_s <= GPU_WAIT_S


def _owed(ctx: SlotContext, row: LaunchRow | None, gpus: tuple[GpuUse, ...] | None) -> Around:
    """What a launch that has ended still owes, by what was read just now."""
    if gpus is None:
        said = f"whether the slot's GPUs are free cannot be told: {ctx.given.unread}"
        return Around(freeing=said) if _may_be_read_yet(ctx, row) else Around()
    if row is None:
        return Around()
    given = _given(ctx, row)
    given.owed_s = min(given.owed_s, clock.monotonic_s())
    left = gpumemory.not_back(row.gpu_used_mib, gpus, given.own)
    if not left:
        if given.own:  # such a pid may be anybody's from now on
            ctx.store.note_gpu_pids(row.id, ())
        given.back, given.own = True, frozenset()
        return Around()
    if clock.monotonic_s() - given.owed_s > GPU_WAIT_S:
        return Around(held=gpumemory.held(row.name, left))
    return Around(freeing=gpumemory.waiting(row.name, left))


def _last(ctx: SlotContext) -> LaunchRow | None:
    return ctx.store.last_ended(ctx.name, clock.boot_id()) if ctx.slot.gpu_indices else None


def _given(ctx: SlotContext, row: LaunchRow) -> Given:
    """What is known of this launch's memory; its time begins when it is first asked for after the launch's end."""
    if ctx.given.launch != row.id:
        own = frozenset(row.gpu_pids)
        ctx.given = dataclasses.replace(ctx.given, launch=row.id, owed_s=float("inf"), back=False, own=own)
    return ctx.given


def _describe(holder: PortHolder) -> str:
    if holder.pid is None:
        return holder.name
    ours = f", launch {holder.launch_id} of another state folder" if holder.launch_id else ""
    return f"pid {holder.pid} ({holder.name}{ours})"
