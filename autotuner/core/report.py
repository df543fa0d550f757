"""What happened -> the draft of a journal entry: the sentence, the table, the bullets. Pure.

A person must be able to act on an entry without opening anything else, so each says what was seen, which rule decided,
what was done, and what comes next.
"""

import math
from dataclasses import dataclass

from autotuner.bench.benchmark import Level, level_cell, level_name
from autotuner.bench.measurement import Figures
from autotuner.core.answers import Agreement
from autotuner.core.causes import Share, level_of, split_loss
from autotuner.core.effective import Difference
from autotuner.core.entry import Draft
from autotuner.core.keeping_up import KEEPS_UP_MIN
from autotuner.core.policy import Fired
from autotuner.core.remarks import requests_remarks, unsettled
from autotuner.core.speculation import SpeculationAtLevel
from autotuner.core.state import Verdict
from autotuner.core.statistics import Interval
from autotuner.core.verdict import Judgement, LevelResult
from autotuner.engines.base import Diagnosis

DRAFTER_BROKEN = "drafter-broken"  # the shipped rule that ends a trial for it
BROKEN_ADVICE = (
    "check that the drafter was trained for this model, that the algorithm's name fits, and that its weights loaded"
)


@dataclass(frozen=True)
class TrialReport:
    """Everything the entry of a concluded trial tells."""

    trial_id: int
    slot: str
    name: str
    hypothesis: str
    objective: str
    judgement: Judgement
    results: tuple[LevelResult, ...]
    levels: tuple[Level, ...]
    best_name: str | None
    baseline: dict[Level, LevelResult]
    command: str
    benchmark: str
    took_s: float
    planned_s: float
    ready_s: float | None
    diagnosis: Diagnosis | None
    next_step: str
    differences: tuple[Difference, ...] = ()
    aim: str = ""
    remarks: tuple[str, ...] = ()
    not_proposed: tuple[str, ...] = ()
    answers: Agreement | None = None
    front: tuple[str, ...] = ()
    nccl: str = ""
    topology: str = ""
    family: str = ""


def trial_entry(report: TrialReport) -> Draft:
    """Given a concluded trial, return its entry."""
    speculates = any(r.speculation is not None for r in report.results)
    table, notes = _spec_table(report) if speculates else (_plain_table(report), ())
    table = tuple((*row, *more) for row, more in zip(table, _goodput_cells(report), strict=True))
    return Draft(
        slot=report.slot,
        title=f"{_word(report)} {report.name}",
        sentence=_sentence(report),
        table=table if report.results else (),
        notes=notes,
        bullets=tuple(_bullets(report)),
        quote=report.diagnosis.evidence if report.diagnosis and not report.judgement.promote else (),
    )


def restored_entry(
    slot: str, name: str, why: str, ready_s: float | None, tokens: int, url: str, instead_of: str = ""
) -> Draft:
    """Given a best-known that serves again, return its entry; `instead_of` names the newest one where this is an older."""
    how = f"serving {duration(ready_s)} after its launch" if ready_s is not None else "it was still serving"
    next_step = "nothing to do; the daemon goes on with the queue, if there is one"
    older: tuple[tuple[str, str], ...] = ()
    if instead_of:
        older = (("Instead of", f"{instead_of}, which ended by itself too often; it is not tried again by itself"),)
        next_step = (
            f"mend what ended {instead_of} (its log and cause are in the entries before), then `autotuner restore-best`"
        )
    return Draft(
        slot=slot,
        title=f"restored {name}",
        sentence=f"The {'older ' if instead_of else ''}best-known server {name} serves: {how}.",
        bullets=(("Why", why), *older, ("Verified", f"generated {tokens} tokens at {url}"), ("Next", next_step)),
    )


def ended_entry(slot: str, name: str, diagnosis: Diagnosis, exit_code: int | None, next_step: str) -> Draft:
    """Given a server that ended without being asked to, return its entry."""
    bullets = [("Cause", f"{diagnosis.cause} (exit code {exit_code if exit_code is not None else 'not recorded'})")]
    if diagnosis.advice:
        bullets.append(("Advice", diagnosis.advice))
    return Draft(
        slot=slot,
        title=f"server ended {name}",
        sentence=f"The server of {name} ended without being asked to: {diagnosis.sentence}.",
        bullets=(*bullets, ("Next", next_step)),
        quote=diagnosis.evidence,
    )


def degraded_entry(slot: str, names: tuple[str, ...], diagnosis: Diagnosis | None, why: str) -> Draft:
    """Given a slot whose best-known ones all failed to come back, return the entry that asks for a person."""
    bullets = [
        ("Tried", ", ".join(names)),
        ("Do", "read the last log below `launches` in the state folder, mend the cause, then `autotuner restore-best`"),
        (
            "Or",
            "`autotuner resume` goes on with the queue without the best-known, `autotuner doctor` looks at the host",
        ),
        ("Until then", "nothing is launched on this slot"),
    ]
    if diagnosis:
        bullets.insert(1, ("Last cause", f"{diagnosis.cause}: {diagnosis.sentence}. {diagnosis.advice}".strip()))
    return Draft(
        slot=slot,
        title="degraded",
        sentence=f"No best-known server could be restored, and a person is needed: {why}.",
        bullets=tuple(bullets),
        quote=diagnosis.evidence if diagnosis else (),
    )


def duration(seconds: float | None) -> str:
    """Given seconds, return them as people say them: `0.8 s`, `94 s`, `6 min 12 s`, `2 h 5 min`."""
    if seconds is None:
        return "unknown"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def rate(tok_s: float | None) -> str:
    """Given output tok/s, return it readable: one decimal below 1,000, none above."""
    if tok_s is None:
        return "-"
    return f"{tok_s:,.1f}" if tok_s < 1000 else f"{tok_s:,.0f}"


def plus_minus(interval: Interval | None, digits: int = 2) -> str:
    """Given an interval, return `mean ± half width`."""
    if interval is None:
        return "-"
    if not math.isfinite(interval.high):
        return f"{interval.mean:.{digits}f}"
    return f"{interval.mean:.{digits}f} ± {(interval.high - interval.low) / 2:.{digits}f}"


def loss_in_words(level: str, shares: tuple[Share, ...]) -> str:
    """Given the name of a level that lost and the shares of its loss, return who lost how much of it."""
    lost = sum(share.tok_s for share in shares)
    costs = [share for share in shares if share.tok_s > 0]
    whole = sum(share.tok_s for share in costs)
    parts = [f"{'all' if len(costs) == 1 else f'{100 * c.tok_s / whole:.0f} %'} is {c.words}" for c in costs]
    gained = "".join(f"; {share.words} {rate(-share.tok_s)} there" for share in shares if share.tok_s < 0)
    return f"of the {rate(lost)} tok/s lost at {level}, {', '.join(parts)}{gained}"


def _word(report: TrialReport) -> str:
    judgement = report.judgement
    if judgement.promote:
        return "promoted"
    if judgement.verdict is Verdict.PASS:
        return "measured"
    if judgement.verdict is Verdict.INCONCLUSIVE:
        return "inconclusive"
    if judgement.verdict is Verdict.ERROR:
        return "error"
    if judgement.rule is None:
        return "discarded"
    return "abandoned" if report.ready_s is not None else "failed"


def _sentence(report: TrialReport) -> str:
    judgement = report.judgement
    lead = judgement.reasons[0] if judgement.reasons else "no reason was recorded"
    lead = lead[0].upper() + lead[1:]
    if (broken := _unnamed_drafter(report)) and broken.speculation is not None:
        lead = f"{lead.rstrip('.')}, and its drafter is broken: {_accepted_nothing(broken.speculation)}"
    if judgement.rule is not None:
        done = f"stopped after {duration(report.took_s)}"
        if report.planned_s > report.took_s and report.ready_s is not None:
            done += f" of about {duration(report.planned_s)}"
        return f"{lead.rstrip('.')}; the trial was {done}."
    if judgement.promote:
        return f"{report.name} is the best-known server now: {lead[0].lower()}{lead[1:].rstrip('.')}."
    return f"{lead.rstrip('.')}."


def _unnamed_drafter(report: TrialReport) -> LevelResult | None:
    """The level whose evidence says that the drafter is broken, where another rule ended the trial before that one could.

    A rule on rates may need less evidence than it takes to stop a drafter; the entry must name the cause all the same.
    """
    judgement = report.judgement
    if judgement.promote or (judgement.rule is not None and judgement.rule.rule == DRAFTER_BROKEN):
        return None
    found = [r for r in report.results if r.speculation is not None and r.speculation.nothing_accepted]
    return max(found, key=lambda r: r.speculation.drafts if r.speculation else 0, default=None)


def _accepted_nothing(spec: SpeculationAtLevel) -> str:
    length = spec.accept_len.mean if spec.accept_len is not None else 1.0
    return f"accept length {length:.2f} over {spec.drafts} verify steps, so nothing it drafts is accepted"


def _bullets(report: TrialReport) -> list[tuple[str, str]]:
    judgement = report.judgement
    bullets = []
    if report.aim:
        bullets.append(("Trial", f"{report.trial_id}, {report.aim}"))
    if report.hypothesis:
        bullets.append(("Hypothesis", report.hypothesis))
    if judgement.rule is not None:
        bullets.append(("Rule", _rule(judgement.rule)))
    bullets += [("Also", reason) for reason in judgement.reasons[1:]]
    other = [r.fired for r in report.results if r.fired is not None and r.fired != judgement.rule]
    bullets += [("Rule", _rule(fired)) for fired in other]
    settled = [r for r in report.results if r.settled is not None and r.fired is None]
    if settled:
        bullets.append(("Settled", f"early at {_levels(settled)}, being known well enough"))
    bullets += [
        ("Speculation", f"{r.figures.level_name}: {r.speculation}")
        for r in report.results
        if r.speculation is not None and r.speculation.speedup is not None
    ]
    silent = [r for r in report.results if r.speculation is not None and not r.speculation.drafts]
    for seen, why in ((True, "nothing was drafted"), (False, "no window was in steady state")):
        such = [r for r in silent if bool(r.speculation and r.speculation.windows) is seen]
        if such:
            bullets.append(("Speculation", f"{why} at {_levels(such)}, so there is nothing to judge"))
    bullets += _of_levels(report)
    bullets += [("Family", report.family)] * bool(report.family)
    bullets += [("NCCL", report.nccl)] * bool(report.nccl) + [("Topology", report.topology)] * bool(report.topology)
    if report.answers is not None:
        over = f"{report.answers.mean:.2f} over {report.answers.prompts} prompts"
        bullets.append(("Answers", f"agree with the best-known's to {over}"))
    if report.front:
        bullets.append(("Front", f"no single winner over all levels; {'; '.join(report.front)}"))
    if shares := _shares(report):
        bullets.append(("Causes", shares))
    if report.diagnosis is not None and not judgement.promote:
        bullets.append(("Cause", f"{report.diagnosis.cause}: {report.diagnosis.sentence}"))
    if (advice := _advice(report)) and not judgement.promote:
        bullets.append(("Advice", advice))
    ready = f"ready after {duration(report.ready_s)}, " if report.ready_s is not None else ""
    bullets += [("Not queued", why) for why in report.not_proposed]
    bullets += [
        ("Objective", report.objective),
        ("Ran", f"{ready}benchmark {report.benchmark}, {duration(report.took_s)} in all: {report.command}"),
        ("Next", report.next_step),
        ("Evidence", f"`autotuner show {report.trial_id}`"),
    ]
    return bullets


def _advice(report: TrialReport) -> str:
    """What to do about it: the rule's own, else that on what ended the server, else that on a broken drafter."""
    of_rule = report.judgement.rule.advice if report.judgement.rule else ""
    of_end = report.diagnosis.advice if report.diagnosis else ""
    return of_rule or of_end or (BROKEN_ADVICE if _unnamed_drafter(report) is not None else "")


def _of_levels(report: TrialReport) -> list[tuple[str, str]]:
    """What is to be said of single levels beside the table."""
    behind = [r for r in report.results if r.answered_ratio is not None and r.answered_ratio < KEEPS_UP_MIN]
    bullets = [("Overload", f"{r.figures.level_name}: {_behind(r.answered_ratio or 0.0)}") for r in behind]
    bullets += [("Drift", remark) for remark in report.remarks]
    bullets += [
        (
            "Drift",
            f"{100 * r.figures.drift_ratio:+.0f} % from the first third of {r.figures.level_name} to its last",
        )
        for r in report.results
        if r.figures.drift_ratio is not None
    ]
    bullets += [
        ("Warm-up", f"{r.figures.level_name}: {unsettled(r.figures)}") for r in report.results if r.figures.unsettled_s
    ]
    bullets += [("Requested against effective", str(difference)) for difference in report.differences]
    bullets += [
        ("Reading", f"{result.figures.level_name}: {result.reading}")
        for result in report.results
        if result.reading is not None
    ]
    bullets += [
        ("Log against metrics", f"{result.figures.level_name}: {sentence}")
        for result in report.results
        for sentence in result.contradictions
    ]
    bullets += [
        ("Requests", f"{result.figures.level_name}: {sentence}")
        for result in report.results
        for sentence in requests_remarks(result.figures)
    ]
    bullets += [
        ("Machine", f"{result.figures.level_name}: {result.machine}")
        for result in report.results
        if result.machine is not None and result.machine.gpus
    ]
    return bullets


def _behind(answered_ratio: float) -> str:
    share = f"{100 * answered_ratio:.0f} % of the requests sent in the level's later half were answered"
    return f"{share}, so the server does not keep up, and latencies grow for as long as the level lasts"


def _levels(results: list[LevelResult]) -> str:
    return level_name(results[0].figures.load, *(r.concurrency for r in results))


def _level(result: LevelResult) -> str:
    return level_cell(result.figures.load, result.concurrency)


def _rule(fired: Fired) -> str:
    used = ", ".join(f"{name} = {_value(value)}" for name, value in sorted(fired.facts.items()))
    looks = f" in {fired.looks} looks in a row" if fired.looks > 1 else ""
    if not fired.condition:
        return f"{fired.rule} ({fired.file.strip('()')})"
    return f"{fired.file} / {fired.rule} (sha256 {fired.sha256[:8]}…): {fired.condition}{looks}; {used}"


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _spec_table(report: TrialReport) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            "level",
            "running",
            "accept length",
            "needed",
            "best possible",
            "output tok/s",
            report.best_name or "best-known",
        )
    ]
    notes = []
    for result in report.results:
        spec = result.speculation
        mark = ""
        if spec and spec.baseline_step and spec.baseline_step.known != "measured":
            mark = " *"
            notes.append(_interpolation_note(spec))
        rows.append(
            (
                _level(result),
                _running(result),
                plus_minus(spec.accept_len) if spec else "-",
                plus_minus(spec.needed_bounds) + mark if spec and spec.needed else "-",
                f"{spec.ceiling:.2f}" if spec and spec.ceiling else "-",
                _rate_cell(result.figures),
                _best_cell(report, result.concurrency),
            )
        )
    return tuple(rows), tuple(notes)


def _plain_table(report: TrialReport) -> tuple[tuple[str, ...], ...]:
    rows: list[tuple[str, ...]] = [
        ("level", "running", "TTFT p50 / p99 ms", "TPOT p50 ms", "output tok/s", report.best_name or "best-known")
    ]
    for result in report.results:
        f = result.figures
        ttft = f"{f.ttft_ms['p50']:.0f} / {f.ttft_ms['p99']:.0f}" if f.ttft_ms else "-"
        tpot = f"{f.tpot_ms['p50']:.1f}" if f.tpot_ms else "-"
        best = _best_cell(report, result.concurrency)
        rows.append((_level(result), _running(result), ttft, tpot, _rate_cell(f), best))
    return tuple(rows)


def _goodput_cells(report: TrialReport) -> list[tuple[str, ...]]:
    """For each row of the table what it says of goodput; nothing where no goodput was asked for."""
    if not any(r.figures.goodput_limits for r in (*report.results, *report.baseline.values())):
        return [()] * (len(report.results) + 1)
    head = ("goodput req/s", f"goodput {report.best_name or 'best-known'}")
    sides = [(r, report.baseline.get(r.concurrency)) for r in report.results]
    return [head, *(tuple(_goodput_cell(r.figures if r else None) for r in pair) for pair in sides)]


def _goodput_cell(f: Figures | None) -> str:
    if f is None or f.void or f.goodput_req_s is None:
        return "-"
    half = ((f.goodput_req_s_high or 0.0) - (f.goodput_req_s_low or 0.0)) / 2
    return f"{f.goodput_req_s:.2f} ± {half:.2f}"


def _interpolation_note(spec: SpeculationAtLevel) -> str:
    step = spec.baseline_step
    if step is not None and step.known == "prior":
        return "what published figures of dense models need at this depth and batch, since no baseline was measured"
    if step is None or step.between is None:
        return ""
    return (
        f"against a plain step of {1000 * step.seconds:.1f} ms at {spec.running:.0f} running, {step.known} from the "
        f"best-known's at {step.between[0]:.0f} and {step.between[1]:.0f}"
    )


def _running(result: LevelResult) -> str:
    if result.running is None:
        return "-"
    capped = result.speculation is not None and result.speculation.capped
    return f"{result.running:.0f} (capped)" if capped else f"{result.running:.0f}"


def _rate_cell(f: Figures) -> str:
    if f.void:
        return "void"
    half = (f.output_tok_s_high - f.output_tok_s_low) / 2
    return f"{rate(f.output_tok_s)} ± {rate(half)}"


def _best_cell(report: TrialReport, level: Level) -> str:
    base = report.baseline.get(level)
    return rate(base.figures.output_tok_s) if base and not base.figures.void else "-"


def _shares(report: TrialReport) -> str:
    """The loss at the busiest level that lost, split between its causes."""
    for result in sorted(report.results, key=lambda r: -r.concurrency):
        level = level_of(result, report.baseline)
        shares = split_loss(level) if level is not None else ()
        if level is None or not shares or (result.speculation is None and shares[0].cause == "slower-step"):
            continue
        return loss_in_words(result.figures.level_name, shares)
    return ""
