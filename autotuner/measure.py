"""Measure one level of a trial: drive the load, read log and metrics meanwhile, have the rules look at every window.

The level ends by its own time, by a rule, or because the server died; what was measured until then stays valid.
"""

import json
from typing import Any

from autotuner import known, log, outcome
from autotuner.bench.goodput import figures_under
from autotuner.bench.machine import MachineSample, machine_figures
from autotuner.bench.measurement import Figures, LevelSamples, Progress
from autotuner.bench.settling import settled
from autotuner.context import Live, SlotContext
from autotuner.core import decide
from autotuner.core.answers import ANSWER_TOKENS, PROMPTS
from autotuner.core.candidate import Candidate
from autotuner.core.facts import level_facts, server_facts
from autotuner.core.followups import speculation_by_level
from autotuner.core.gather import Gather, LevelPlan, baseline_steps, busy_steps, told_clean
from autotuner.core.objective import Constraints, Standing, weights_of
from autotuner.core.policy import Facts, Fired, built_in, holding
from autotuner.core.state import Verdict
from autotuner.core.verdict import LevelReading, LevelResult, disagreement, too_late_best
from autotuner.core.watching import LevelRules, server_ended
from autotuner.edge import clock
from autotuner.edge.foreign_load import ForeignLoad, load_for
from autotuner.edge.host import ServerSeen
from autotuner.edge.load import Load
from autotuner.edge.load_far import FarLoad
from autotuner.edge.machine import MachineWatch, Watch
from autotuner.edge.machine_far import FarWatch
from autotuner.edge.probes import GENERATE_TIMEOUT_S, Probe
from autotuner.edge.rows import Trial
from autotuner.engines import nccl, situation
from autotuner.engines.base import Diagnosis, Engine, Stage
from autotuner.engines.reading import read
from autotuner.errors import HostError

IDLE_WAIT_S = 15.0  # requests of an earlier level that the server has not given up yet
EXTEND_MAX = 3.0  # a level may last this many times its time where a rule asks for more evidence
ANSWERS_TIMEOUT_S = 60.0  # no fixed prompt is begun later than this
ON_HOST = "the load was driven on host {host} itself"
FORWARDED = "the load came through a port forwarded to host {host}: latencies hold the way there and back"
HANGS = f"the server is up, but did not answer a fixed prompt within {GENERATE_TIMEOUT_S:g} s and has not come to rest since"
FEW_ANSWERS_MAX = 2.0  # and this many times where fewer requests were answered than run at once


async def run_level(ctx: SlotContext, action: decide.RunLevel) -> None:
    """Measure one level and commit its result; or, if the server died, what its trial ends by.

    Before a trial's first level the server answers the fixed prompts; one whose answers are wrong is not measured.
    """
    level = _Level(ctx, action)
    cuts = ctx.host.cuts
    async with ctx.probe(level.candidate) as probe:
        given_up_s = 0.0
        compared = level.objective.constraints.answers_agree_min > 0
        if compared and not ctx.store.results(action.trial_id):
            answered = await _ask_answers(ctx, action.trial_id, probe, cuts)
            given_up_s = 0.0 if answered else GENERATE_TIMEOUT_S
            if disagreement(known.trial_so_far(ctx, ctx.store.trial(action.trial_id))):
                return
        busy = given_up_s and not await becomes_idle(probe, level.engine, IDLE_WAIT_S + given_up_s)
        if busy and await level.hangs_at_prompts(cuts):
            return
        idle = await becomes_idle(probe, level.engine, IDLE_WAIT_S)
        samples = await level.drive(probe) if idle else None
        if level.client_hung and await level.death() is None:
            log.get().warning("the level is begun once more", slot=ctx.name, level=action.level, why=level.client_void)
            level = _Level(ctx, action)
            idle = await becomes_idle(probe, level.engine, IDLE_WAIT_S)
            samples = await level.drive(probe) if idle else None
        died = await level.death()  # one that stands still without a rank of it is not idle either
    if not idle and died is None:
        raise HostError(
            f"{level.trial.name} has requests running that are not the benchmark's; the level cannot be measured"
        )
    ctx.uncut(cuts)  # requests may have failed by the connection alone
    if died is not None:
        diagnosis, fired = died
        with ctx.store.transaction():
            outcome.launch_ended(ctx, ctx.store.launch(action.launch_id), level.seen, diagnosis, asked=False)
            level.want()
            outcome.ended_by_its_server(ctx, action.trial_id, diagnosis, fired)
        return
    result = level.judge(samples)
    with ctx.store.transaction():
        ctx.store.keep_policies(ctx.policies)
        ctx.store.put_result(action.trial_id, result, level.evidence(samples))
        level.want()
    ctx.live = Live(stage="measured", level=action.level, output_tok_s=result.figures.output_tok_s)


async def becomes_idle(probe: Probe, engine: Engine, wait_s: float) -> bool:
    """Wait until nothing runs on a server and have it forget its prefix cache; tell whether that came about in time.

    Nothing else may run when a load begins: a server that stays busy is not ours alone. The cache is forgotten at the end,
    since SGLang refuses that while requests run.
    """
    deadline = clock.monotonic_s() + wait_s
    while clock.monotonic_s() < deadline:
        if await probe.requests(engine.read_metrics) <= 0:
            await probe.flush_cache()
            return True
        await clock.sleep(0.25)
    return False


async def _ask_answers(ctx: SlotContext, trial_id: int, probe: Probe, cuts: int) -> bool:
    """Have the server answer the fixed prompts, one after another, and keep what it says; tell whether it answered all.

    No prompt is begun once their time is over, but the one in hand is waited for: a server may work on at a request that
    was given up, and would then not be idle when the level begins.
    """
    ctx.live = Live(stage="asking the fixed prompts", since_s=clock.monotonic_s())
    deadline = clock.monotonic_s() + ANSWERS_TIMEOUT_S
    texts: list[str] = []
    failed = ""
    model = await probe.model()
    for prompt in PROMPTS:
        if clock.monotonic_s() > deadline:
            failed = f"{ANSWERS_TIMEOUT_S:g} s were not enough for all"
            break
        said = await probe.complete(prompt, ANSWER_TOKENS, model)
        if not said.ok:
            failed = said.error
            break
        texts.append(said.text)
    if failed:
        await ctx.host.free_disk_mib()  # a connection that is lost and not known to be shows here
        ctx.uncut(cuts)
        kept = f"{len(texts)} of {len(PROMPTS)} fixed prompts were answered"
        log.get().warning(kept, slot=ctx.name, trial=trial_id, error=failed)
    ctx.store.update_trial(trial_id, answers=json.dumps(texts))
    return not failed


class _Level:
    """One level being measured."""

    def __init__(self, ctx: SlotContext, action: decide.RunLevel) -> None:
        self.ctx = ctx
        self.action = action
        self.trial: Trial = ctx.store.trial(action.trial_id)
        self.candidate: Candidate = ctx.store.candidate(self.trial.candidate_id)
        self.engine = ctx.engine(self.candidate)
        self.benchmark = known.benchmark_of(self.trial)
        self.log = ctx.log(action.launch_id, self.engine)
        self.rules = LevelRules(ctx.policies)
        self.resolved = ctx.store.launch(action.launch_id).configuration
        self.objective = ctx.objective(self.benchmark)
        self.gather = Gather(self._plan(), settles=self.benchmark.requests is None)
        self.seen = ServerSeen(action.launch_id, alive=True)
        self._began_s = clock.monotonic_s()
        self._looked_s = 0.0
        self._steady_from: int | None = None
        self._machine: tuple[MachineSample, ...] = ()
        self._why_no_gpus = ""
        self.load_from = ""
        self.client_void = ""  # why what a client measured must not be used
        self.client_hung = False  # it was killed, and a second try may do

    def _plan(self) -> LevelPlan:
        objective = self.objective
        baseline = known.baseline_of(self.ctx, self.trial)
        best = baseline.get(self.action.level)
        effective = self.resolved.effective if self.resolved else None
        paid, lost = speculation_by_level(self.ctx.store.results(self.trial.id))
        doubt = known.doubt_of(self.ctx, self.trial, best.figures if best else None)
        done = {r.concurrency: r.figures for r in self.ctx.store.results(self.trial.id)}
        best_figures = {level: r.figures for level, r in baseline.items()}
        # The best-known itself is what others are held against: slow answers do not end its measurement.
        binding = Constraints(failed_requests_max=objective.constraints.failed_requests_max)
        bar = not too_late_best(known.trial_so_far(self.ctx, self.trial))
        standing = Standing(
            objective, self.benchmark.levels, done, best_figures, doubt.launch_noise, doubt.launches, doubt.alpha
        )
        return LevelPlan(
            level=self.action.level,
            load=self.benchmark.load,
            decides=bar
            and objective.limits is None
            and weights_of(objective, self.benchmark.levels).get(self.action.level, 0.0) > 0,
            cap=(effective.running_cap if effective else None) or self.log.running_cap,
            speculation=self.engine.speculation(self.candidate),
            baseline_steps_s=baseline_steps(baseline),
            busy_steps_s=busy_steps(baseline),
            baseline_clean=told_clean(baseline, self.action.level),
            best=best.figures if best else None,
            doubt=doubt,
            graph_max_batch=effective.graph_max_batch if effective else None,
            pays_up_to=max(paid, default=None),
            loses_from=min(lost, default=None),
            ranks=(effective.dp if effective else None) or 1,
            engine_version=effective.version if effective else None,
            standing=standing if bar and baseline and not self.trial.is_baseline else None,
            constraints=binding if self.trial.is_baseline else objective.constraints,
            latency_counts=objective.counts_latency,
            best_answered_ratio=best.answered_ratio if best else None,
            silence_limit_s=self.engine.silence_limit_s(Stage.GENERATING),
        )

    async def drive(self, probe: Probe) -> LevelSamples | None:
        """Run the load to its end or until a rule ends it; return its samples, None if the server died first."""
        await self.log.facts()
        model = await probe.model()
        load_of_level = await self._load(model)
        gpus, host = self.ctx.slot.gpus, self.ctx.host
        watch: Watch = MachineWatch(gpus) if host.here else FarWatch(host, gpus)
        async with watch as machine, load_of_level as load:
            async for message in load.messages():
                if isinstance(message, LevelSamples):
                    self._machine, self._why_no_gpus = machine.samples, machine.why_no_gpus
                    self.client_void, self.client_hung = load.void, load.hung
                    return settled(message) if self.gather.settles else message
                begins = message.phase == "steady" and not self.gather.steady
                if self.gather.add_progress(message):
                    begins, self._steady_from = True, None
                if begins:
                    machine.begin()
                if not await self._alive():
                    return None
                await self._window(probe, message)
                if self.rules.over:
                    load.stop()
                elif self._over():
                    load.finish()
        return None

    async def _load(self, model: str | None) -> Load | ForeignLoad:
        """The load of the level: from the server's own host where that can be, else through a port forwarded to it."""
        host, benchmark, reached = self.ctx.host, self.benchmark, (await self.ctx.reach()).url
        cores = self.ctx.slot.client_cores
        if host.can_bench and benchmark.client == "autotuner" and not benchmark.dataset:
            self.load_from = ON_HOST.format(host=self.ctx.slot.host)
            longest = benchmark.model_copy(update={"seconds": EXTEND_MAX * benchmark.seconds})
            return FarLoad(host, self.ctx.slot.place.url, reached, longest, self.action.level, model, cores=cores)
        self.load_from = "" if host.here else FORWARDED.format(host=self.ctx.slot.host)
        return load_for(
            reached,
            benchmark,
            self.action.level,
            model,
            longest_s=EXTEND_MAX * benchmark.seconds,
            launch=self._launches_before(),
            cache=self.ctx.settings.cache,
            cores=cores if host.here else None,
        )

    def _launches_before(self) -> int:
        """How many launches of the candidate were for trials before this one: the n-th of each is sent the same prompts."""
        return self.ctx.store.launches_before(self.ctx.store.launch(self.action.launch_id))

    async def hangs_at_prompts(self, cuts: int) -> bool:
        """Whether a server that did not answer the fixed prompts lives all the same; its trial then ends by that."""
        if not await self._alive():
            return False
        self.ctx.uncut(cuts)
        found = Diagnosis("no-output", HANGS, "read its log (autotuner show --log)")
        await self.log.facts()
        found = nccl.blame(found, self.candidate, self.log.since(0), hangs=True)
        ended = built_in("does-not-answer", found.sentence, Verdict.FAIL, found.advice)
        self.ctx.store.update_trial(self.trial.id, ended=ended.model_dump_json())
        return True

    async def death(self) -> tuple[Diagnosis, Fired] | None:
        """If the server has died, return why and the rule that names it."""
        if await self._alive():
            return None
        self.seen = await self.ctx.seen(self.action.launch_id)
        diagnosis = await self.log.why_ended(self.seen, asked=False, became_ready=True)
        diagnosis = nccl.blame(diagnosis, self.candidate, self.log.since(0))
        facts = {**server_facts(alive=False, exit_code=self.seen.exit_code, diagnosis=diagnosis), **self._facts()}
        return diagnosis, self.rules.look("window", facts) or server_ended(diagnosis)

    def judge(self, samples: LevelSamples | None) -> LevelResult:
        """Given the level's samples, return its result with the rule that ended it, if any."""
        if samples is None:
            raise HostError("the load ended without samples")
        measured = figures_under(samples, self.objective.limits, ignore_eos=self.benchmark.ignore_eos).model_copy(
            update={"stopped_early": self.rules.ended is not None}
        )
        if self.load_from:
            measured = measured.model_copy(update={"load_from": self.load_from})
        if self.client_void:
            measured = measured.model_copy(update={"void": self.client_void})
        # What another client measured wrongly must not be judged; that requests failed is no matter of its clock.
        if self.rules.ended is None and (measured.requests_failed or not self.client_void):
            self.rules.look("level", self._facts(measured))
        ended = self._named(self.rules.ended)
        if ended is not None and ended.action == "void":
            measured = measured.model_copy(update={"void": ended.sentence})
        result = self.gather.result(measured)
        ended_by = ended if ended is None or ended.action != "void" else None
        machine = machine_figures(self._machine, measured.output_tok_s, self._why_no_gpus)
        found = {"fired": ended_by, "settled": self.rules.settled, "reading": self._reading(), "machine": machine}
        return result.model_copy(update=found)

    def _named(self, fired: Fired | None) -> Fired | None:
        """What a level that hangs waits for, as far as its candidate and its lines tell."""
        if fired is None or "level.silent_s" not in fired.facts:
            return fired
        found = Diagnosis("silent-stage", fired.sentence, fired.advice)
        found = nccl.blame(found, self.candidate, self.log.since(0), hangs=True)
        return fired.model_copy(update={"sentence": found.sentence, "advice": found.advice})

    def _reading(self) -> LevelReading | None:
        """What the server's lines of the steady part amount to, where that is more than the figures say."""
        lines = self.log.since(self._steady_from) if self._steady_from is not None else ()
        if not lines:
            return None
        plan = self.gather.plan
        plain = {int(running): running / step for running, step in plan.baseline_steps_s.items() if step > 0}
        effective = self.resolved.effective if self.resolved else None
        known = situation.level(self.candidate, plan.concurrency, plan.speculation, plain, effective)
        said = read(self.candidate.engine, plan.engine_version or "", "\n".join(lines), known)
        asked = said.cause == "graphs-off" and self.engine.asked(self.candidate).graph_max_batch == 0
        if asked or not situation.adds_something(said.cause):
            return None
        return LevelReading(cause=said.cause, action=said.action, sentence=said.sentence, advice=said.advice)

    def want(self) -> None:
        """Note what rules proposed at this level; it is worked out when the trial is over."""
        known = self.resolved.effective if self.resolved else None
        outcome.want(self.ctx, self.trial.id, self.rules.proposed, self.action.level, known)

    def evidence(self, samples: LevelSamples | None) -> dict[str, Any]:
        """What the result rests on: enough to recompute every figure and every look of the rules."""
        return {
            "samples": samples.model_dump(mode="json") if samples else None,
            "machine": [sample.model_dump(mode="json") for sample in self._machine],
            "windows": [w._asdict() for w in self.gather.windows],
            "looks": [vars(look) for look in self.rules.looks],
            "policies": {policy.file: policy.sha256 for policy in self.ctx.policies},
        }

    async def _alive(self) -> bool:
        self.seen = await self.ctx.host.inspect(self.action.launch_id)
        return self.seen.alive and not self.seen.failing

    def _over(self) -> bool:
        """The level's time is over, unless too few requests were answered or a rule wants more evidence."""
        steady_s, answered, concurrency = self.gather.steady_s, self.gather.answered, self.gather.plan.concurrency
        if steady_s < self.benchmark.seconds:
            return False
        if concurrency is None:  # the same requests are sent to every server, for the same time
            return True
        if answered < concurrency and steady_s < FEW_ANSWERS_MAX * self.benchmark.seconds:
            return False
        wanted = holding(self.ctx.policies, "window", self.rules.looks[-1].facts) if self.rules.looks else ()
        extends = any(fired.action == "extend" and not fired.dry_run for fired in wanted)
        return not extends or steady_s >= EXTEND_MAX * self.benchmark.seconds

    async def _window(self, probe: Probe, progress: Progress) -> None:
        """At the end of each window: read what is new, and have the rules look."""
        now = clock.monotonic_s() - self._began_s
        if now - self._looked_s < self.benchmark.window_s and self._looked_s:
            return
        self._looked_s = now
        self.gather.add_log(await self.log.facts())
        if self._steady_from is None and self.gather.steady:
            self._steady_from = self.log.lines
        text = await probe.scrape()
        if text is not None:
            self.gather.add_scrape(now, self.engine.read_metrics(text))
        self._show(progress)
        if not self.rules.over:
            alive = server_facts(alive=True, exit_code=None, diagnosis=None)
            self.rules.look("window", {**alive, **self._facts()})

    def _facts(self, final: Figures | None = None) -> Facts:
        done = len(self.ctx.store.results(self.trial.id))
        trial: Facts = {
            "trial.elapsed_s": known.took_s(self.trial),
            "trial.levels_done": float(done),
            "trial.baseline": self.trial.is_baseline,
            "candidate.engine": self.candidate.engine,
        }
        if self.resolved is not None and self.resolved.effective.version is not None:
            trial["candidate.effective_differences"] = float(len(self.resolved.differences))
        facts = {**trial, **level_facts(self.gather.so_far(final))}
        if self.trial.is_baseline:
            # It is held against nothing: a host that became slower must show in its record, not end its measurement.
            facts = {name: value for name, value in facts.items() if not name.startswith("best.ratio")}
            facts["best.measured"] = True
        return facts

    def _show(self, progress: Progress) -> None:
        so_far = self.gather.so_far()
        spec = so_far.speculation
        self.ctx.live = Live(
            stage=f"measuring ({progress.phase})",
            progress=f"{progress.done} requests done, {progress.in_flight} in flight",
            level=self.action.level,
            running=so_far.running,
            output_tok_s=so_far.figures.output_tok_s or None,
            accept_len=spec.accept_len.mean if spec and spec.accept_len else None,
            needed=spec.needed if spec else None,
            since_s=self._began_s,
            usual_s=self.benchmark.seconds * (1 + known.WARMUP_SHARE),
        )
