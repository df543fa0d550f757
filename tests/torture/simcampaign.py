"""One simulated campaign: a host with a slot or two, a queue, an operator, faults for some minutes, and then peace.

While faults strike the checker watches every step. Once they have stopped, all must be well again within a bounded time: one server a
slot, the best-known that can serve, generating tokens; the queue worked off; every decision in the journal; nothing lost.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from autotuner.core.candidate import Candidate, Launch, to_toml
from autotuner.core.gpumemory import is_held
from autotuner.core.policy import Policy
from autotuner.core.replay import replay
from autotuner.core.state import LaunchState, TrialState, Verdict
from autotuner.core.verdict import Judgement
from autotuner.daemon import Daemon
from autotuner.edge.rows import SlotRow, Trial
from autotuner.edge.store import Store
from autotuner.engines import engine_for
from autotuner.errors import AutotunerError
from autotuner.publishing import checked
from autotuner.settings import Settings, load_settings, policies_in
from autotuner.shipped import folder as shipped
from torture import simedge
from torture.simcheck import Checker
from torture.simedge import Scene
from torture.simhost import Nature, Server, SimHost, Stranger
from torture.simloop import VirtualLoop, drop
from torture.simworld import DAY_S, HOUR_S, OF_JOURNAL_FILES, YEAR_S, Faults, Killed, World
from torture.tally import Tally

PEACE_S = (
    2 * HOUR_S
)  # after the last fault all must be well within this: three failed starts, a window of budget, the queue
LOOK_EVERY_S = 10.0
JUMPS_EVERY = 8  # of so many campaigns one is run once more without steps of the wall clock
RESTART_S = (0.1, 5.0, 30.0)
STEPS_S = (-10 * YEAR_S, -DAY_S, -HOUR_S, -60.0, 60.0, HOUR_S, DAY_S, 10 * YEAR_S)
RULES = ("server.toml", "budget.toml", "objective.toml")
MEMORY = Path("/dev/shm")


@lru_cache(maxsize=64)
def settings_of(
    slots: int, gpus: bool, confirm: int, baselines: int, restore: str, levels: str, agree: float
) -> Settings:
    """Given what varies between campaigns, return the settings as the product reads them from a file."""
    lines = [
        'state_dir = "state"',
        "cycle_s = 10.0",
        f'restore = "{restore}"',
        'propose = "off"',
        "serving_probe_every_s = 60",
        "disk_free_min_mib = 64",
    ]
    for number in range(slots):
        lines += [
            f"[slots.s{number}]",
            f"port = {8000 + number}",
            "start_timeout_s = 40",
            "stop_grace_s = 3",
            "drain_s = 4",
        ]
        lines += [f"gpus = [{number}]"] if gpus else []
    lines += ["[benchmarks.quick]", f"levels = {levels}", "seconds = 2.0", "window_s = 1.0", "output_tokens = 32"]
    lines += ["[benchmarks.other]", f"levels = {levels}", "seconds = 1.5", "window_s = 1.0", "output_tokens = 32"]
    lines += ["[noise]", f"confirm_launches = {confirm}", f"baseline_launches = {baselines}", "open_launches = 1"]
    lines += ["[objective.constraints]", f"answers_agree_min = {agree}"]
    with tempfile.TemporaryDirectory() as where:
        path = Path(where) / "autotuner.toml"
        path.write_text("\n".join(lines), encoding="utf-8")
        return load_settings(path)


@lru_cache(maxsize=1)
def rules() -> tuple[Policy, ...]:
    """The shipped rules that need no engine's own lines; the others are tried on levels, not on loops."""
    return tuple(policy for policy in policies_in(shipped("policies")) if policy.file in RULES)


@lru_cache(maxsize=4096)
def candidate_of(name: str, engine: str) -> Candidate:
    """A candidate by its name."""
    if engine == "vllm":
        return Candidate(name=name, engine="vllm", launch=Launch(model="org/model", args={"seed": int(name[1:])}))
    return Candidate(name=name, engine="command", launch=Launch(command=("server", "--port", "{port}", "--seed", name)))


@lru_cache(maxsize=1)
def empty_database() -> bytes:
    """A new state database, made once."""
    with tempfile.TemporaryDirectory() as where:
        path = Path(where) / "state.db"
        store = Store(path)
        store.db.run("PRAGMA wal_checkpoint(TRUNCATE)")
        store.close()
        return path.read_bytes()


class Campaign:
    """A campaign of one seed. `jumps` lets the wall clock be set; nothing may depend on it."""

    part = "sim"

    def __init__(self, seed: int, found: Tally, *, jumps: bool = True, faults: Faults | None = None) -> None:
        self.seed = seed
        self.found = found
        self.world = World(str(seed), faults)
        self.jumps = jumps
        if (
            seed % JUMPS_EVERY == 0
        ):  # the journal has a file a month: with another month there are other writes that may fail
            for kind in OF_JOURNAL_FILES:
                self.world.faults.rates.pop(kind, None)
        rng = self.rng = self.world.rng("campaign")
        self.settings = settings_of(
            rng.choice((1, 1, 1, 2)), rng.random() < 0.7, rng.choice((0, 1)), rng.choice((1, 2)),
            rng.choice(("idle", "always")), rng.choice(("[4]", "[4]", "[1, 4]")), rng.choice((0, 0, 0.25)),
        )  # fmt: skip
        self.natures: dict[str, Nature] = {}  # by candidate id
        self.host = SimHost(self.world, {n: (s.port, s.gpus) for n, s in self.settings.slots.items()}, [])
        self.faults_end_s = rng.uniform(60, 300)
        self.acknowledged: dict[int, str] = {}
        self.cancelled: set[int] = set()
        self.lives = 0
        self.well = False
        self.daemon: Daemon | None = None

    # --- the course of it

    def run(self, *, replayed: bool = False) -> None:
        """Work the campaign to its end, check it, and leave nothing behind."""
        base = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None
        where = Path(tempfile.mkdtemp(prefix="autotuner-sim-", dir=base))
        try:
            self._set_up(where)
            self._schedule()
            while not self.world.stopped:
                self._live()
            self.scene.faulty = False
            self._account(replayed=replayed)
        finally:
            if hasattr(self, "store"):
                self.store.close()
            shutil.rmtree(where, ignore_errors=True)

    def _set_up(self, where: Path) -> None:
        self.settings = self.settings.model_copy(update={"state_dir": where})
        window_s = max(900.0, 4 * next(iter(self.settings.slots.values())).start_timeout_s)
        command = f"python -m torture --part {self.part} --seed {self.seed} --seconds 1"
        self.checker = Checker(self.host, self.found, f"seed {self.seed} ({command})", window_s, self._of_record)
        self.scene = Scene(self.world, self.host, self.checker, self.settings, rules())
        simedge.enter(self.scene)
        self.scene.faulty = False
        self.settings.database.write_bytes(empty_database())
        self.store = Store(self.settings.database)
        for slot in self.settings.slots:
            for _ in range(self.rng.randint(2, 4) if len(self.settings.slots) == 1 else self.rng.randint(1, 3)):
                self._enqueue(slot)

    def _live(self) -> None:
        """One life of the daemon, until it is killed, ends by an error, or the campaign is over."""
        self.lives += 1
        self.scene.faulty = True
        loop = VirtualLoop(self.world)
        try:
            loop.run_until_complete(self._process())
        except (Killed, AutotunerError):
            pass  # as the service manager does, it is started again
        finally:
            self.scene.faulty = False
            drop(loop)
            self.scene.forget()
            self.daemon = None
            self.world.dead = False
        if not self.world.stopped:
            self.world.sleep_dead(self.rng.choice(RESTART_S) if self.world.faults.on else RESTART_S[0])

    async def _process(self) -> None:
        """What the daemon's process does."""
        self.daemon = Daemon(self.settings.state_dir / "autotuner.toml", self.host)
        await self.daemon.run()

    def _schedule(self) -> None:
        """What comes by the clock: the operator, strangers, reboots, steps of the wall clock, and at last peace."""
        world, rng, end_s = self.world, self.world.rng("schedule"), self.faults_end_s
        for _ in range(rng.randint(0, 4)):
            world.at(rng.uniform(0, end_s), self._operate)
        for kind, most, happens in (
            ("stranger on the port", 4, self._stranger_on_port),
            ("stranger on the GPU", 4, self._stranger_on_gpu),
            ("host reboots", 2, self._reboot),
            ("everything of a launch is killed", 7, self._massacre),
        ):
            for _ in range(rng.randint(0, most) if kind in world.faults.rates and world.faults.on else 0):
                world.at(rng.uniform(0, end_s), lambda kind=kind, happens=happens: self._strike(kind, happens))
        clock = world.rng("clock")
        if self.jumps:
            self.host.on_death = self._step_at_death
            for _ in range(4):
                world.at(clock.uniform(0, 1.5 * end_s), lambda: self._strike("clock steps", self._step_clock))
        for nature in list(self.natures.values()):
            if nature.broken:
                world.at(rng.uniform(0, end_s), lambda nature=nature: self._break(nature))
        world.at(end_s, self._peace)

    # --- what comes from outside

    def _strike(self, kind: str, happens: object) -> None:
        self.world.faults.struck[kind] += 1
        happens()

    def _stranger_on_port(self) -> None:
        self._stranger(Stranger(port=True, gpu=False, since=self.world.now))

    def _stranger_on_gpu(self) -> None:
        self._stranger(Stranger(port=False, gpu=True, since=self.world.now))

    def _stranger(self, stranger: Stranger) -> None:
        slot = self.rng.choice(list(self.settings.slots))
        if stranger.port and self.host.on_port(self.settings.slots[slot].port) is not None:
            return  # the port is taken
        self.host.strangers[slot] = stranger
        self.world.after(self.rng.uniform(5, 90), lambda: self.host.strangers.pop(slot, None) and None)

    def _reboot(self) -> None:
        self.host.reboot()
        self.world.dead = True

    def _massacre(self) -> None:
        for server in self.host.servers.values():
            if server.main:
                self.host.die(server, -9)

    def _step_at_death(self) -> None:
        """Between a failed start and the next is where the wall clock would matter if it mattered anywhere."""
        if self.world.rng("clock").random() < 0.3:
            self._strike("clock steps", self._step_clock)

    def _step_clock(self) -> None:
        self.world.wall_ahead_s += self.world.rng("clock").choice(STEPS_S)
        self.world.wall_ahead_s = max(-20 * YEAR_S, min(20 * YEAR_S, self.world.wall_ahead_s))

    def _break(self, nature: Nature) -> None:
        nature.mended = False
        self.world.faults.struck["a candidate's servers break"] += 1

    def _peace(self) -> None:
        """No fault strikes any more; most of what is broken is mended, and the operator clears what he has said."""
        self.world.faults.on = False
        self.host.strangers.clear()
        self.host.disk_full = False
        self.host.unread_until_s = 0.0
        self._free_memory()
        for nature in self.natures.values():
            nature.mended = nature.mended or self.rng.random() < 0.7
        with self._as_operator():
            for slot in self.settings.slots:
                self.store.forgive_failures(slot)
                self.store.update_slot(slot, paused="", hands_off="", degraded="", restore_hold=0)
        self.world.after(LOOK_EVERY_S, self._look)

    def _free_memory(self) -> None:
        """Somebody resets the GPUs of most slots; the others go on waiting for a person."""
        for slot in self.settings.slots:
            if self.rng.random() < 0.7:
                for server in self.host.by_slot[slot]:
                    until = self.world.now + self.rng.uniform(0.0, 600.0)
                    server.gpu_until = min(server.gpu_until, until)
                    server.gpu_late_s = 0.0

    def _look(self) -> None:
        """Whether all is well; the campaign is over then, or once its time is."""
        with self._as_operator():
            self.well = self.daemon is not None and all(not self.wrong(slot) for slot in self.settings.slots)
        if self.well or self.world.now > self.faults_end_s + PEACE_S:
            self.world.stopped = True
        else:
            self.world.after(LOOK_EVERY_S, self._look)

    # --- the operator

    @contextlib.contextmanager
    def _as_operator(self) -> Iterator[None]:
        """Commands use the database as the daemon does, but no fault strikes them."""
        before, self.scene.faulty = self.scene.faulty, False
        try:
            yield
        finally:
            self.scene.faulty = before

    def _enqueue(self, slot: str) -> None:
        rng, number = self.rng, len(self.natures) + 1
        engine = "vllm" if rng.random() < 0.3 else "command"
        candidate = candidate_of(f"c{number}", engine)
        place = self.settings.slots[slot].place
        argv = engine_for(engine).argv(candidate, place)
        broken = rng.choice(("", "", "", "exits", "hangs", "crashes"))
        nature = Nature(candidate.name, argv, engine == "vllm", 100 * rng.uniform(0.7, 1.4), rng.uniform(2, 6), broken)
        self.natures[candidate.id] = self.host.natures[argv] = nature
        name = "quick" if rng.random() < 0.85 else "other"
        with self._as_operator(), self.store.transaction():
            self.store.put_candidate(candidate, to_toml(candidate), f"{candidate.name}.toml")
            benchmark = (name, self.settings.benchmarks[name])
            trial = self.store.add_trial(
                slot, candidate, benchmark, "2026-03-01 12:00:00Z", priority=rng.choice((0, 0, 1))
            )
        self.acknowledged[trial] = slot

    def _operate(self) -> None:
        """A command, as the command line writes it to the record."""
        rng, store = self.rng, self.store
        slot = rng.choice(list(self.settings.slots))
        said = rng.choice(("enqueue", "cancel", "pause", "pause now", "hands off", "restore best", "resume"))
        with self._as_operator():
            if said == "enqueue":
                self._enqueue(slot)
            elif said == "cancel":
                waiting = [t for t in store.queue(slot) if t.id in self.acknowledged]
                if waiting:
                    store.move_trial(waiting[-1].id, TrialState.CANCELLED)
                    self.cancelled.add(waiting[-1].id)
            elif said == "restore best":
                if store.ladder(slot):
                    with store.transaction():
                        store.forgive_failures(slot)
                        store.update_slot(
                            slot, restore_wanted="restore-best", restore_hold=1, degraded="", hands_off=""
                        )
            elif said == "resume":
                self._resume(slot)
            else:
                columns = (
                    {"hands_off": "by hand"} if said == "hands off" else {"paused": f"{said[6:]}: by hand".lstrip(": ")}
                )
                store.update_slot(slot, **columns)
                self.world.after(rng.uniform(5, 60), lambda: self._resume(slot))

    def _resume(self, slot: str) -> None:
        with self._as_operator(), self.store.transaction():
            self.store.forgive_failures(slot)
            self.store.update_slot(slot, paused="", hands_off="", degraded="")

    # --- what must be so in the end

    def wrong(self, slot: str) -> str:
        """What is not yet as it must be in a slot; empty if nothing."""
        store, row = self.store, self.store.slot(slot)
        if store.outbox(slot).last_published() == store.outbox(slot).last_entry() and self._waits_for_memory(slot, row):
            return ""
        ladder = [rung for rung, _, _ in store.ladder(slot)]
        if ladder and row.degraded and not any(self.natures[rung].mended for rung in ladder):
            return ""  # a person is needed, and was asked
        if store.queue(slot) or store.trial_in_hand(slot) is not None:
            return "the queue is not worked off"
        if store.outbox(slot).last_published() != store.outbox(slot).last_entry():
            return "the journal lacks entries"
        if row.paused:
            return f"it is paused: {row.paused}"
        alive = self.host.alive_in(slot)
        if not ladder:
            return f"{len(alive)} servers live although there is no best-known" if alive else ""
        return self._not_served(slot, alive[0], ladder) if len(alive) == 1 else f"{len(alive)} servers live"

    def _waits_for_memory(self, slot: str, row: SlotRow) -> bool:
        """Whether nothing runs in a slot for memory that is not free, and a person was told so.

        Memory that something was launched upon while nobody could read the GPUs is its next level for all that can be told:
        then the servers that find no room are what a person is told of.
        """
        held = [server for server in self.host.by_slot[slot] if self.host.gpu_held(server)]
        named = any(server.gpu_listed and str(server.pid) in row.blocked for server in held)
        unseen = bool(row.degraded) and any(server.given_up for server in held)
        return bool(held) and not self.host.alive_in(slot) and (is_held(row.degraded) or named or unseen)

    def _not_served(self, slot: str, server: Server, ladder: list[str]) -> str:
        """Whether the one server that lives is the best-known that can serve, does, and is known to."""
        launch = next((one for one in self.store.open_launches(slot) if one.id == server.spec.launch_id), None)
        if launch is None or launch.state is not LaunchState.SERVING:
            return "what lives is not recorded as serving"
        above = ladder[: ladder.index(launch.candidate_id)] if launch.candidate_id in ladder else ladder
        if launch.candidate_id not in ladder or any(self.natures[rung].mended for rung in above):
            return f"{launch.name} serves instead of the best-known"
        if not server.main or self.world.now >= server.hangs_at or server.mute:
            return "what is called serving does not serve"
        worker = next(w for w in self.daemon._workers if w.ctx.name == slot) if self.daemon else None
        verified = worker is not None and launch.id in worker.ctx.verified
        return "" if verified and not self.store.slot(slot).restore_wanted else "it is not verified"

    def _account(self, *, replayed: bool) -> None:
        """At the end: liveness, the journal, the queue, and, for some, every verdict computed again."""
        check, store = self.checker.check, self.store
        still = "; ".join(f"{slot}: {why}" for slot in self.settings.slots if (why := self._why(slot)))
        last = " | ".join(self.checker.last_lines[-3:])
        check("P4", f"not well {PEACE_S / 3600:g} h after the last fault: {still} [{last}]", kept=self.well)
        trials, entries = store.trials(), store.entries()
        for slot in self.settings.slots:
            numbers = [entry.number for entry in entries if entry.slot == slot]
            check("P10", f"entries {numbers} of {slot} have gaps", kept=numbers == list(range(1, len(numbers) + 1)))
        mine = [row["trial_id"] for row in store.db.all("SELECT trial_id FROM entries WHERE trial_id IS NOT NULL")]
        done = [trial.id for trial in trials if trial.state is TrialState.DONE]
        check("P10", f"trials {done} are done, entries are there for {mine}", kept=sorted(mine) == sorted(done))
        journals = checked(self.settings, store)
        read = [entry for journal in journals for entry in journal.entries]
        flaws = [flaw for journal in journals for flaw in journal.flaws]
        check(
            "P9",
            f"the journal does not verify: {flaws[:1]}",
            kept=not flaws and (len(read) == len(entries) or not self.well),
        )
        known = {trial.id: trial.state for trial in trials}
        lost = [trial for trial in self.acknowledged if trial not in known]
        check("P18", f"trials {lost} are lost", kept=not lost)
        if self.well:
            rows = {slot: store.slot(slot) for slot in self.settings.slots}
            waits = {slot for slot, row in rows.items() if row.degraded or row.blocked}  # for a person
            over = {TrialState.DONE, TrialState.CANCELLED}
            idle = [t for t, slot in self.acknowledged.items() if known.get(t) not in over and slot not in waits]
            gone = [t for t in self.acknowledged if known.get(t) is TrialState.CANCELLED and t not in self.cancelled]
            check("P18", f"trials {idle} were never worked, {gone} cancelled by nobody", kept=not idle and not gone)
        if replayed:
            self._replay(trials)
        counts = self.found.counts
        counts["campaigns"] += 1
        counts["faults"] += sum(self.world.faults.struck.values())
        counts["lives of the daemon"] += self.lives
        counts["launches"] += len(self.host.servers)
        counts["trials"] += len(done)
        counts["simulated minutes"] += int(self.world.now / 60)

    def _why(self, slot: str) -> str:
        return "" if self.well else self.wrong(slot)

    def _replay(self, trials: list[Trial]) -> None:
        """P11: every verdict, computed again from its record."""
        store, policies = self.store, self.store.kept_policies()
        for trial in trials:
            if trial.verdict is None:
                continue
            evidence = {r.concurrency: store.evidence(trial.id, r.concurrency) for r in store.results(trial.id)}
            recorded = Judgement(Verdict(trial.verdict), trial.promoted, trial.reasons, trial.score)
            again = replay(store.basis(trial.id), recorded, evidence, policies)
            self.checker.check("P11", f"trial {trial.id}: {again.differences[:2]}", kept=not again.differences)

    def _of_record(self, slot: str, trial_id: int | None) -> tuple[Trial | None, list[str], list[Trial]]:
        """What the checker asks the record: a trial, the ladder, and the measurements of the best-known before the newest."""
        with self._as_operator():
            trial = self.store.trial(trial_id) if trial_id is not None else None
            ladder = [rung for rung, _, _ in self.store.ladder(slot)]
            before = ladder[1] if len(ladder) > 1 else None
            baselines = self.store.measured(slot, before, trial.benchmark_hash) if before and trial else []
        return trial, ladder, baselines
