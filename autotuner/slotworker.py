"""Works one slot: observes, decides, carries out. One cycle is short; long actions run as a task that it inspects."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Coroutine
from typing import Any

from autotuner import act, confirming, followup, freeing, known, log, measure, outcome
from autotuner.context import SlotContext
from autotuner.core import decide
from autotuner.core.decide import Decision, Doing, IncumbentRecord, LaunchRecord, Observed, Recorded, TrialRecord
from autotuner.core.gpumemory import is_held
from autotuner.core.policy import Facts, built_in, holding
from autotuner.core.state import Verdict
from autotuner.core.statistics import most_within
from autotuner.core.verdict import disagreement, judge, lost, next_level
from autotuner.edge import clock
from autotuner.edge.files import free_mib
from autotuner.edge.rows import SlotRow, Trial
from autotuner.errors import HostDiskFull, HostError, HostKeyRefused, HostUnreachable, StoreError
from autotuner.freeing import Around

HELD_LOOK_S = 10.0  # how often GPUs are looked at whose memory did not come back
YIELD_SHARE = 0.5  # a trial in hand goes back to the queue below this share of the free disk that a new one needs
RECORD_KEPT_S = 60.0  # the longest that what was read of an idle slot is believed without reading it again
RETRY_AFTER_S = 5.0  # a failed action is tried again, but not in a tight loop


class SlotWorker:
    """The reconciling loop of one slot, a cycle at a time. `last` is the decision of the last cycle."""

    def __init__(self, ctx: SlotContext) -> None:
        self.ctx = ctx
        self.last = Decision(decide.Wait(), "starting up")
        self._task: asyncio.Task[None] | None = None
        self._doing: Doing | None = None
        self._wait_until_s = 0.0
        self._cut_short: int | None = None  # the trial that was in hand when the daemon started
        self._probed_s = 0.0
        self._failed = ""
        self._cuts = 0
        self._free_mib, self._disk = float("inf"), ""
        self._stuck, self._frees = "", True  # why nothing could be launched; whether the action in progress can tell
        self._about = ""  # the launch that the action in progress is about
        self._amiss = ("", "")  # a launch about which the last action failed, and why
        self._held, self._held_s = Around(), float("-inf")
        self._kept: tuple[tuple[Any, ...], float, Recorded] | None = None
        self._log = log.get().bind(slot=ctx.name)

    @property
    def busy(self) -> bool:
        """Whether a long action is in progress."""
        return self._task is not None

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The long action in progress, for whoever waits for its end."""
        return self._task

    def start_up(self) -> None:
        """Nothing is known about the time without a daemon: the best-known comes first, and a trial begins anew."""
        store, name = self.ctx.store, self.ctx.name
        trial = store.trial_in_hand(name)
        with store.transaction():
            if trial is not None:
                store.update_trial(trial.id, interruptions=trial.interruptions + 1)
                self._cut_short = trial.id
            slot = store.slot(name)
            held = slot.degraded or slot.hands_off or slot.stopped
            if store.ladder(name) and not held and not slot.restore_wanted:
                store.update_slot(name, restore_wanted="the daemon was started")

    async def cycle(self) -> Decision:
        """Observe, decide and carry out or begin to. Raise StoreError where nothing can be recorded.

        A slot whose host cannot be looked at waits and says why: nothing is known of what runs there.
        """
        try:
            return await self._cycle()
        except HostError as error:
            if str(error) != self.last.reason:
                self._log.warning("cannot look", error=str(error))
            if isinstance(error, HostKeyRefused):
                self._give_up_trial(error)
            self.last = Decision(decide.Wait(), str(error))
            return self.last

    async def _cycle(self) -> Decision:
        await self._collect()
        await self.ctx.learn_secrets()
        await self._look_at_disks()
        recorded = self._recorded()
        observed = await self._observe(recorded)
        decision = decide.decide(recorded, observed)
        if isinstance(decision.action, decide.Launch):  # only now does it matter who else is there, and to look costs
            observed = dataclasses.replace(observed, **vars(await freeing.look(self.ctx)))
            decision = decide.decide(recorded, observed)
        elif isinstance(decision.action, decide.BeginTrial):
            observed = dataclasses.replace(observed, traffic=await act.traffic(self.ctx, decision.action.trial_id))
            decision = decide.decide(recorded, observed)
        waits = isinstance(decision.action, decide.Wait | decide.Interrupt)
        if not waits and clock.monotonic_s() < self._wait_until_s:
            decision = Decision(decide.Wait(), f"{self._failed}; next try in a moment")
        if decision.reason != self.last.reason:
            self._log.info("decided", action=type(decision.action).__name__, reason=decision.reason)
        self.last = decision
        await self._carry_out(decision, recorded, observed)
        return decision

    async def end(self) -> None:
        """Let go of a long action; the servers live on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=5.0)
            self._task = None

    async def _look_at_disks(self) -> None:
        """Take note of the least room: where the slot's launches live, and where what comes of them is recorded."""
        ctx, own_mib = self.ctx, float("inf")
        there_mib = await ctx.host.free_disk_mib()
        if not ctx.host.here:
            with contextlib.suppress(OSError):
                own_mib = free_mib(ctx.settings.state_dir)
        on_host = "" if ctx.host.here else f" on host {ctx.slot.host}"
        self._free_mib, self._disk = min((there_mib, on_host), (own_mib, " on the daemon's own machine"))

    async def _collect(self) -> None:
        """Take in the end of a long action. The trial boundary: what goes wrong inside a trial ends there."""
        if self._task is None or not self._task.done():
            return
        task, doing = self._task, self._doing
        self._task, self._doing = None, None
        error = None if task.cancelled() else task.exception()
        self._amiss = ("", "")
        if self._frees:
            self._stuck = ""
        if error is None:
            self._failed = ""
            return
        self._failed = str(error) or type(error).__name__
        self._wait_until_s = clock.monotonic_s() + RETRY_AFTER_S
        self._log.error("action failed", doing=doing.what if doing else "", error=self._failed, exc_info=error)
        if isinstance(error, StoreError):
            raise error
        if self._was_cut(error):
            return  # the server lives on, and so does the trial
        # A full disk is nobody's failure: what was to be launched is launched once there is room.
        full = isinstance(error, HostDiskFull)
        if not full and doing is not None and doing.trial_id is not None:
            self._end_trial(doing.trial_id, error)
        elif isinstance(error, HostError) and self._about:
            self._amiss = (self._about, self._failed)
        elif isinstance(error, HostError):
            self._stuck = self._failed

    def _was_cut(self, error: BaseException) -> bool:
        """Whether an action failed by its connection; that of a host which is no longer itself does not come back."""
        lost = isinstance(error, HostUnreachable) or self.ctx.host.cuts != self._cuts
        return lost and isinstance(error, HostError) and not isinstance(error, HostKeyRefused)

    def _give_up_trial(self, error: HostError) -> None:
        """Conclude the trial in hand by an error: nothing can be done on its host until a person has looked."""
        trial = self.ctx.store.trial_in_hand(self.ctx.name)
        if trial is not None and not self.busy:
            self._end_trial(trial.id, error)
            outcome.conclude(self.ctx, trial.id)

    def _end_trial(self, trial_id: int, error: BaseException) -> None:
        expected = isinstance(error, HostError)
        sentence = str(error) if expected else f"autotuner itself failed: {type(error).__name__}: {error}"
        advice = "" if expected else "this is a bug; the daemon's log has the traceback"
        fired = built_in("could-not-measure", sentence, Verdict.ERROR, advice)
        self.ctx.store.update_trial(trial_id, ended=fired.model_dump_json())

    def _recorded(self) -> Recorded:
        """The record; read again only if something was written since, or if time may have changed what it says.

        Of a slot with nothing to try, time changes nothing: a cycle then costs one question.
        """
        version = (*self.ctx.store.version(), self.ctx.settings, self._cut_short)
        if self._doing is not None:
            return self._record()
        if self._kept is not None and self._kept[0] == version and clock.monotonic_s() < self._kept[1]:
            return self._kept[2]
        recorded = self._record()
        idle = recorded.trial is None and recorded.queued is None
        self._kept = (version, clock.monotonic_s() + RECORD_KEPT_S, recorded) if idle else None
        return recorded

    def _record(self) -> Recorded:
        store, name = self.ctx.store, self.ctx.name
        slot = store.slot(name)
        launches = tuple(
            LaunchRecord(row.id, row.candidate_id, row.name, row.purpose, row.state, row.trial_id, row.end_asked)
            for row in store.open_launches(name)
        )
        if (
            self._doing is not None
        ):  # all that matters is whether it must yield: the rest is looked at once it has ended
            trial_id = self._doing.trial_id
            yields = self._interrupt(slot, store.trial(trial_id)) if trial_id is not None else ""
            return Recorded(name, launches, restore_wanted=slot.restore_wanted, interrupt_trial=yields)
        trial, queued = store.trial_in_hand(name), store.next_queued(name)
        # Starts that take long to fail must fit into the window three times, or the budget would never be spent.
        window_s = max(decide.RESTORE_WINDOW_S, 4 * self.ctx.slot.start_timeout_s)
        boot = clock.boot_id()
        failed = {candidate: store.restore_failures(name, candidate, boot) for candidate, _, _ in store.ladder(name)}
        ladder = tuple(
            IncumbentRecord(candidate, label, most_within(failed[candidate], window_s))
            for candidate, label, _ in store.ladder(name)
        )
        failed_s = tuple(began_s for times in failed.values() for began_s in times)
        return Recorded(
            slot=name,
            launches=launches,
            trial=self._trial_record(trial) if trial else None,
            queued=TrialRecord(queued.id, queued.candidate_id, queued.name) if queued else None,
            ladder=ladder,
            paused=slot.paused,
            hands_off=slot.hands_off,
            restore_wanted=slot.restore_wanted,
            stopped=slot.stopped,
            degraded=slot.degraded,
            no_new_trials=self._no_new_trials(slot, queued) if queued else "",
            interrupt_trial=self._interrupt(slot, trial) if trial else "",
            restore_always=self.ctx.settings.restore == "always",
            failed_s=failed_s,
            failed_end_s=self.ctx.failed_end_s,
            last_failure=self._last_failure() if failed_s else "",
            window_s=window_s,
            baseline_missing=trial is None
            and queued is not None
            and confirming.baseline_missing(self.ctx, queued, known.deciding_of(self.ctx, queued)),
        )

    def _last_failure(self) -> str:
        last = self.ctx.store.last_ended(self.ctx.name, clock.boot_id())
        return last.diagnosis.sentence if last is not None and last.diagnosis is not None and not last.end_asked else ""

    def _trial_record(self, trial: Trial) -> TrialRecord:
        so_far = known.trial_so_far(self.ctx, trial)
        concluded = ""
        if so_far.ended is not None or lost(so_far) is not None or disagreement(so_far):
            concluded = judge(so_far).reasons[0]
        coming = next_level(so_far)
        return TrialRecord(
            trial.id, trial.candidate_id, trial.name, trial.interruptions, coming, concluded, so_far.load
        )

    def _no_new_trials(self, slot: SlotRow, queued: Trial) -> str:
        closed = self.ctx.settings.window_closed(clock.local_now())
        if closed and not queued.force:
            return closed
        if low := self._disk_low("no trial is started", 1.0):
            return low
        fired = holding(self.ctx.policies, "next", self._budget_facts(slot))
        return next((f.sentence for f in fired if f.action == "pause" and not f.dry_run), "")

    def _interrupt(self, slot: SlotRow, trial: Trial) -> str:
        if trial.id == self._cut_short:
            return "the daemon ended during it"
        if slot.paused.startswith("now:"):
            return slot.paused
        closed = self.ctx.settings.window_closed(clock.local_now())
        if closed and not trial.force:
            return closed
        # What room is left belongs to the best-known: its restore must be recorded too.
        if low := self._disk_low("no trial goes on", YIELD_SHARE):
            return low
        fired = holding(self.ctx.policies, "trial", self._budget_facts(slot))
        return next((f.sentence for f in fired if f.action == "pause" and not f.dry_run), "")

    def _budget_facts(self, slot: SlotRow) -> Facts:
        budget = self.ctx.settings.budget
        facts: Facts = {}
        limited = budget.trials is not None or budget.gpu_hours is not None
        begun = self.ctx.store.begun_trials(self.ctx.name, slot.campaign_from) if limited else []
        if budget.trials is not None:
            facts["budget.trials_left"] = float(budget.trials - len(begun))
        if budget.gpu_hours is not None:
            busy_s = sum(known.took_s(t) if t.ended_at is None else t.busy_s for t in begun)
            facts["budget.gpu_hours_left"] = budget.gpu_hours - busy_s / 3600 * self.ctx.slot.gpu_count
        if budget.deadline is not None:
            facts["budget.deadline_s"] = (budget.deadline - clock.utc_now()).total_seconds()
        return facts

    async def _observe(self, recorded: Recorded) -> Observed:
        living = set()
        for launch in recorded.launches:
            if launch.id in self.ctx.starting or await self._lives(launch.id):
                living.add(launch.id)
        if not living:
            self.ctx.ranks = ()
        verified = self.ctx.verified & living
        every = self.ctx.settings.serving_probe_every_s
        if every and clock.monotonic_s() - self._probed_s > every:
            self._probed_s = clock.monotonic_s()
            verified = set()
        self.ctx.verified &= living
        self.ctx.living = frozenset(living)
        around = await self._around_held() if is_held(recorded.degraded) and not living else Around()
        now_s = clock.monotonic_s()
        return Observed(frozenset(living), frozenset(verified), doing=self._doing, now_s=now_s, **vars(around))

    async def _around_held(self) -> Around:
        """Whether GPU memory that did not come back has done so since, looked at now and then."""
        if clock.monotonic_s() - self._held_s > HELD_LOOK_S:
            self._held_s, self._held = clock.monotonic_s(), await freeing.look(self.ctx)
            if self.ctx.given.unread:  # nobody can tell
                self._held = Around(held=self.ctx.given.unread)
        return self._held

    async def _lives(self, launch_id: str) -> bool:
        seen = await self.ctx.host.inspect(launch_id)
        self.ctx.ranks = tuple({"host": rank.where, "alive": rank.seen.alive} for rank in seen.ranks)
        return seen.alive

    async def _carry_out(self, decision: Decision, recorded: Recorded, observed: Observed) -> None:
        action, ctx, why = decision.action, self.ctx, decision.reason
        if isinstance(action, decide.Wait):
            strangers = why if observed.strangers and why.startswith("cannot launch") else ""
            outcome.blocked(ctx, strangers or self._trouble(recorded), foreign=bool(strangers))
            return
        if not isinstance(action, decide.Interrupt):
            outcome.blocked(ctx, self._trouble(recorded), foreign=False)
        match action:
            case decide.Interrupt():
                if self._task is not None:
                    self._task.cancel()
            case decide.Launch():
                self._begin(act.launch(ctx, action), why, action.trial_id)
            case decide.AwaitServing():
                self._begin(act.await_serving(ctx, action), why, action.trial_id, starts=True, about=action.launch_id)
            case decide.RunLevel():
                self._begin(measure.run_level(ctx, action), why, action.trial_id)
            case decide.Verify():
                self._begin(act.verify(ctx, action), why, None, about=action.launch_id)
            case decide.Stop():
                self._begin(act.stop(ctx, action), why, None, about=action.launch_id)
                self._frees = False  # that something could be stopped says nothing of what keeps it from being launched
            case decide.RecordEnd():
                await act.record_end(ctx, action)
            case _:
                self._record_outcome(action, why)

    def _trouble(self, recorded: Recorded) -> str:
        """Why the slot cannot go on by its last actions. What went wrong about a launch is over once that has ended."""
        about, why = self._amiss
        return why if any(launch.id == about for launch in recorded.launches) else self._stuck

    def _record_outcome(self, action: Any, why: str) -> None:
        """Actions that only change the record; but what a trial proposes is worked out before it is concluded."""
        ctx = self.ctx
        match action:
            case decide.BeginTrial():
                self._cut_short = None
                outcome.begin_trial(ctx, action.trial_id)
            case decide.Conclude():
                if followup.unsettled(ctx, action.trial_id):
                    self._begin(followup.settle(ctx, action.trial_id), f"{why}; its follow-ups are worked out", None)
                else:
                    outcome.conclude(ctx, action.trial_id)
            case decide.Requeue():
                outcome.requeue(ctx, action.trial_id, why)
                self._cut_short = None
            case decide.GiveUp():
                outcome.give_up(ctx, action.trial_id, why)
            case decide.QueueBaseline():
                outcome.queue_baseline(ctx, action.candidate_id, why)
            case decide.RestoreDone():
                outcome.restore_done(ctx, action.candidate_id, why)
            case decide.Degrade():
                outcome.degrade(ctx, why)
            case decide.GoOn():
                outcome.go_on(ctx, why)

    def _disk_low(self, so: str, share: float) -> str:
        """Why the disk is too full for a trial, given which share of the room asked for must be free; '' if it is not."""
        least = self.ctx.settings.disk_free_min_mib
        if self._free_mib >= least * share:
            return ""
        return f"only {self._free_mib:.0f} MiB of disk are free{self._disk}, {least} are asked for: {so} (disk_free_min_mib)"

    def _begin(
        self, work: Coroutine[Any, Any, None], what: str, trial_id: int | None, *, starts: bool = False, about: str = ""
    ) -> None:
        self._doing, self._frees, self._about = Doing(what, trial_id, starts), True, about
        self._cuts = self.ctx.host.cuts
        self._task = asyncio.create_task(work)
