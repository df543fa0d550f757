"""The checker: hears of every decision, commit and launch of a simulated campaign, and holds them against the truth of the host.

It keeps books of its own. Nothing that it concludes rests on what the daemon reads back from its record, but for the verdicts.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from autotuner.core import decide
from autotuner.core.gpumemory import is_held
from autotuner.core.state import LaunchState, Purpose, Verdict
from autotuner.edge.rows import LaunchRow
from torture.simhost import Server, SimHost, Stranger
from torture.tally import Tally

CLOSE_ENOUGH_S = 1e-6
FRESH_S = 90.0  # a server that is called serving has generated within this time: a probe, and what follows it
GPU_PATIENCE_S = 60.0  # a stop waits so long for its memory, and a launch so long for GPUs that cannot be read
PAUSES_S = (0.0, 0.0, 10.0, 30.0, 60.0)  # before a best-known is tried again, by how many launches have failed lately


@dataclass
class Launched:
    """A launch in the checker's own books. `failed` once it ended without having been asked to."""

    slot: str
    candidate: str
    purpose: Purpose
    boot: str
    at: float
    trial: int | None
    failed: bool = False
    over: bool = False
    forgiven: bool = False


class Checker:
    """Safety at every step. `say` names the seed; `found` counts what was tried and what was broken."""

    def __init__(self, host: SimHost, found: Tally, say: str, window_s: float, queue_of: Any) -> None:
        self.host, self.world, self.found, self.say = host, host.world, found, say
        self.window_s = window_s
        self.trace = hashlib.sha256()
        self.actions: Counter[str] = Counter()
        self.launched: dict[str, Launched] = {}
        self.best_from: dict[tuple[str, str], int] = {}  # from which launch on, by number, a best-known's ends count
        self.last_lines: list[str] = []
        self.own_pids: dict[str, set[int]] = {}  # by launch: those that a daemon put on record as its own
        self._trial_of = queue_of
        self._pending: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._port_seen_in: dict[str, int] = {}
        host.truth = self

    # --- what is heard

    def decided(self, slot: str, decision: decide.Decision) -> None:
        """Every decision goes into the trace, in its order and without its time."""
        line = f"{slot} {type(decision.action).__name__} {decision.reason}"
        self.trace.update(line.encode())
        self.actions[type(decision.action).__name__] += 1
        if not self.last_lines or self.last_lines[-1] != line:
            self.last_lines.append(line)

    def heard(self, name: str, args: tuple[Any, ...], keys: dict[str, Any], *, at_once: bool) -> None:
        """A change of the record; one inside a transaction counts once that is committed."""
        if at_once:
            self._take(name, args, keys)
        else:
            self._pending.append((name, args, keys))

    def committed(self) -> None:
        """The transaction is on record."""
        pending, self._pending = self._pending, []
        for change in pending:
            self._take(*change)

    def rolled_back(self) -> None:
        """What was not committed has not happened."""
        self._pending.clear()

    def _take(self, name: str, args: tuple[Any, ...], keys: dict[str, Any]) -> None:
        if name == "add_launch":
            self._intended(args[0])
        elif name == "move_launch" and args[1] is LaunchState.ENDED:
            self._ended(args[0], asked=keys["end_asked"])
        elif name == "move_launch" and args[1] is LaunchState.SERVING:
            self.serving(args[0])
        elif name == "note_gpu_pids":
            self.own_pids.setdefault(args[0], set()).update(args[1])
        elif name == "promote":
            self._promoted(*args)
        elif name == "forgive_failures":
            for launched in self.launched.values():
                launched.forgiven = launched.forgiven or launched.slot == args[0]
        elif name == "degraded":
            self._degraded(*args)

    def broken(self, promise: str, what: str) -> None:
        """Report a violation with what shows it again."""
        self.found.broken(promise, f"{self.say}: {what} (at {self.world.now:.2f} s)")

    def check(self, promise: str, what: str, *, kept: bool) -> None:
        """Count a promise as tried, and as broken where it was."""
        if kept:
            self.found.held(promise)
        else:
            self.broken(promise, what)

    # --- what is checked

    def starting(self, server: Server) -> None:
        """P1: as a server starts, nothing else of its slot may live, and nobody may be known to hold its port or its GPUs."""
        host, slot = self.host, server.spec.slot
        others = [other.spec.launch_id for other in host.alive_in(slot) if other is not server]
        self.check("P1", f"launch {server.spec.launch_id} starts beside {others} in slot {slot}", kept=not others)
        holding = [other for other in host.by_slot[slot] if other is not server and host.gpu_held(other)]
        held = [other.spec.launch_id for other in holding if not other.given_up and not other.blind]
        unread = server.blind = self._unread_long(server)
        self.check("P1", f"launch {server.spec.launch_id} starts while {held} hold GPU memory", kept=not held or unread)
        for other in holding:  # from now on nobody can tell it from the memory of this one
            other.given_up = True
        seen = host.port_seen.get(server.port)
        stranger = host.strangers.get(slot)
        known = isinstance(host.on_port(server.port), Stranger) and seen is not None and seen.launch_id is None
        self.check("P1", f"launch {server.spec.launch_id} starts onto a stranger's port", kept=not known)
        on_gpu = (
            stranger is not None
            and stranger.gpu
            and any(
                process[0] == 4712
                for gpu in server.gpus
                if gpu in host.gpu_seen
                for process in host.gpu_seen[gpu].processes
            )
        )
        self.check("P1", f"launch {server.spec.launch_id} starts onto a stranger's GPU", kept=not on_gpu or unread)

    def _listed(self, server: Server) -> bool:
        """Whether the driver still lists a process of it that no daemon saw alive: that is named like a stranger."""
        if server.pid in self.own_pids.get(server.spec.launch_id, ()):
            return False
        seen = [self.host.gpu_seen[gpu] for gpu in server.gpus if gpu in self.host.gpu_seen]
        return any(process[0] == server.pid for use in seen for process in use.processes)

    def _unread_long(self, server: Server) -> bool:
        """Whether nobody could read the GPUs for as long as that is waited for."""
        since = [at for index, at in self.host.unread_since.items() if index in server.gpus]
        return bool(since) and self.world.now - min(since) >= GPU_PATIENCE_S

    def _intended(self, row: LaunchRow) -> None:
        """P14: another launch of a best-known is within its budget, whatever window of time is looked at."""
        self.launched[row.id] = Launched(
            row.slot, row.candidate_id, row.purpose, self.world.boot_id, self.world.now, row.trial_id
        )
        if row.purpose is Purpose.RESTORE:
            failed = self._failed(row.slot, row.candidate_id)
            self.check(
                "P14",
                f"{row.name} is launched again after {failed} failures within {self.window_s:g} s",
                kept=failed < decide.RESTORE_FAILURES_MAX,
            )
            self._paused(row)

    def _paused(self, row: LaunchRow) -> None:
        """P14: between tries that fail in short succession there is time for what is wrong to pass."""
        _, ladder, _ = self._trial_of(row.slot, None)
        now = self.world.now
        lately = [at for rung in ladder for at in self._failures(row.slot, rung) if at > now - self.window_s]
        pause_s = PAUSES_S[min(len(lately), len(PAUSES_S) - 1)]
        since_s = now - max(lately, default=now)
        self.check(
            "P14",
            f"{row.name} is launched again {since_s:g} s after the last of {len(lately)} failed launches",
            kept=since_s >= pause_s - CLOSE_ENOUGH_S,
        )

    def _failed(self, slot: str, candidate: str) -> int:
        """The most launches within one window that ended by themselves since, and with, the one that made it the best-known."""
        times = self._failures(slot, candidate)
        return max((sum(at <= other < at + self.window_s for other in times) for at in times), default=0)

    def _failures(self, slot: str, candidate: str) -> list[float]:
        since = self.best_from.get((slot, candidate), 0)
        return [
            one.at
            for one in list(self.launched.values())[since:]
            if (one.slot, one.candidate) == (slot, candidate)
            and one.failed
            and not one.forgiven
            and one.boot == self.world.boot_id
        ]

    def _ended(self, launch_id: str, *, asked: bool) -> None:
        """P5: of what is recorded as ended nothing lives."""
        launched = self.launched[launch_id]
        launched.over, launched.failed = True, not asked
        server = self.host.servers.get(launch_id)
        if server is None or server.boot != self.world.boots:
            return
        alive = server.state == "written" or server.alive
        self.check("P5", f"launch {launch_id} is recorded as ended and lives", kept=not alive)
        if asked and not server.given_up and server.gone:
            given_s = self.world.now - server.gone_at
            proven = not self.host.gpu_held(server) or given_s >= GPU_PATIENCE_S or self._unread_long(server)
            proven = proven or server.blind or self._listed(server)
            self.check(
                "P5",
                f"launch {launch_id} is recorded as stopped {given_s:g} s after its end, and its GPU memory is taken",
                kept=proven,
            )

    def serving(self, launch_id: str) -> None:
        """P24: what is called serving has generated tokens just now, itself."""
        server = self.host.servers.get(launch_id)
        ago = self.world.awake_s - server.generated_at if server is not None else None
        self.check(
            "P24", f"launch {launch_id} is called serving, but generated nothing for {ago} s",
            kept=ago is not None and ago <= FRESH_S,
        )  # fmt: skip

    def _promoted(self, slot: str, candidate: str, name: str, trial_id: int, _at: str) -> None:
        """P13: the trial passed, and the best-known before it was measured under the same benchmark."""
        own = [number for number, one in enumerate(self.launched.values()) if one.trial == trial_id]
        self.best_from[slot, candidate] = max(own, default=0)
        trial, ladder, baselines = self._trial_of(slot, trial_id)
        self.check(
            "P13", f"trial {trial_id} ({name}) is promoted with {trial.verdict}", kept=trial.verdict is Verdict.PASS
        )
        before = [rung for rung in ladder if rung != candidate]
        if before and ladder[0] == candidate and len(ladder) > 1:
            self.check(
                "P13", f"trial {trial_id} ({name}) is promoted without a baseline under {trial.benchmark_hash}",
                kept=bool(baselines),
            )  # fmt: skip

    def _degraded(self, slot: str, why: str) -> None:
        """P14, P5: a person is asked only once every rung's budget is spent, or for memory that is long overdue."""
        if is_held(why):
            gone = [one.gone_at for one in self.host.by_slot[slot] if one.gone and self.host.gpu_held(one)]
            due_s = self.world.now - min(gone, default=self.world.now)
            self.check(
                "P5", f"a person is asked for memory that is due since {due_s:g} s", kept=due_s >= GPU_PATIENCE_S
            )
            return
        _, ladder, _ = self._trial_of(slot, None)
        spent = [self._failed(slot, rung) >= decide.RESTORE_FAILURES_MAX for rung in ladder]
        self.check("P14", f"slot {slot} is degraded with {spent} of its rungs spent", kept=all(spent))
