"""Bugs to plant in the simulated daemon, each a patch of the running code."""

import datetime as dt
from dataclasses import replace
from typing import Any

from autotuner import freeing, outcome, slotworker
from autotuner.core import decide, statistics
from autotuner.core.state import Verdict
from autotuner.core.verdict import Judgement, TrialSoFar
from autotuner.edge.host import ServerSeen
from autotuner.edge.store import Store
from torture.simhost import SimHost


def port_only_stop_check() -> None:
    """A launch counts as ended as soon as nobody listens on its port: workers that hold the GPUs are not looked for."""
    real = SimHost.inspect

    async def inspect(self: SimHost, launch_id: str) -> ServerSeen:
        seen = await real(self, launch_id)
        server = self.servers.get(launch_id)
        listens = server is not None and self.on_port(server.port) is server
        return replace(seen, alive=seen.alive and (listens or (server is not None and server.main)))

    async def strangers(ctx: Any) -> freeing.Around:
        holder = await ctx.host.port_holder(ctx.slot.port)
        return freeing.Around(strangers="the port is held" if holder is not None else "")

    async def levels(_ctx: Any) -> dict[int, float]:
        return {}

    SimHost.inspect = inspect
    freeing.look, freeing.levels = strangers, levels


def stop_without_memory() -> None:
    """A stop is over as soon as no process lives and the port is closed; what the driver still holds is not waited for."""

    async def wait(_ctx: Any, _row: Any) -> str:
        return ""

    freeing.wait = wait


def launch_onto_memory() -> None:
    """Memory that is not back after a minute is taken for somebody else's, and launched upon."""
    real = freeing.look

    async def look(ctx: Any) -> freeing.Around:
        return replace(await real(ctx), held="")

    freeing.look = look


def restore_without_pause() -> None:
    """A best-known that failed is tried again at once, however often."""
    decide.pause_left_s = lambda *_times: 0.0


def wall_clock_budget() -> None:
    """The restart budget is measured with the wall clock."""
    real, wall_s = Store.restore_failures, dict[float, float]()

    def failures(self: Store, slot: str, candidate_id: str, boot_id: str) -> list[float]:
        monotonic = real(self, slot, candidate_id, boot_id)
        rows = self.db.all(
            "SELECT mono_s, intended_at FROM launches WHERE slot = ? AND candidate_id = ? AND boot_id = ?",
            *(slot, candidate_id, boot_id),
        )
        wall_s.update({row["mono_s"]: dt.datetime.fromisoformat(row["intended_at"]).timestamp() for row in rows})
        return monotonic

    def most_within(times: list[float], window_s: float) -> int:
        return statistics.most_within(sorted(wall_s[at_s] for at_s in times), window_s)

    Store.restore_failures, slotworker.most_within = failures, most_within


def promote_on_inconclusive() -> None:
    """What could not be told from the best-known is promoted all the same."""
    real = outcome.judge

    def judge(trial: TrialSoFar) -> Judgement:
        found = real(trial)
        unsure = found.verdict is Verdict.INCONCLUSIVE and not trial.is_baseline
        return replace(found, promote=True) if unsure else found

    outcome.judge = judge
