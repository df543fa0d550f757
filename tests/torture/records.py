"""P11: generated trials are judged, kept in a real store, read back and judged again: the same verdict, score and reasons must come out.

Each trial has levels with samples of requests, looks of the shipped rules at generated facts, launches of a best-known to compare
with, an objective, and perhaps an end by a rule. Then one thing of its record is changed, and the replay must say so: a replay that
agrees with everything proves nothing.
"""

import copy
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.goodput import figures_under
from autotuner.bench.measurement import GoodputLimits, LevelSamples, RequestSample
from autotuner.core.candidate import Candidate, Launch
from autotuner.core.objective import Constraints, Objective
from autotuner.core.policy import Watch
from autotuner.core.replay import replay
from autotuner.core.verdict import Judgement, LevelResult, TrialSoFar, judge
from autotuner.edge.rows import basis_json, judgement_columns
from autotuner.edge.store import Store
from autotuner.settings import policies_in
from autotuner.shipped import folder
from torture.tally import Tally

AT = "2026-02-23 00:14:07Z"
POLICIES = policies_in(folder("policies"))


def objective(rng: random.Random) -> Objective:
    """What a best server is."""
    kind = rng.choice(("output_tok_s", "output_tok_s", "goodput", "geometric_mean"))
    gain = rng.choice((0.0, 0.0, 0.05))
    floor = Constraints(single_stream_ratio_min=rng.choice((None, 0.9))) if rng.random() < 0.3 else Constraints()
    if kind == "goodput":
        return Objective(
            maximise="goodput", ttft_ms_max=rng.choice((200.0, 500.0)), min_gain_ratio=gain, constraints=floor
        )
    if kind == "geometric_mean":
        return Objective(maximise="geometric_mean", weights={1: 1.0, 8: rng.choice((0.0, 1.0, 2.5))}, constraints=floor)
    return Objective(level=rng.choice((None, 1, 8)), min_gain_ratio=gain, constraints=floor)


def samples(rng: random.Random, level: int, pace: float) -> LevelSamples:
    """A level's samples at about `pace` events a bin."""
    seconds = rng.randrange(4, 20)
    bins = tuple(max(0, round(rng.gauss(pace, pace * 0.1))) for _ in range(seconds * 4))
    requests = []
    for number in range(rng.randrange(0, 40)):
        sent = 1.0 + number * seconds / 41
        first = sent + rng.random() * 0.6
        tokens = rng.randrange(1, 30)
        end = first + tokens * rng.random() * 0.05
        requests.append(RequestSample(sent_s=sent, first_s=first, end_s=end, events=tokens, output_tokens=tokens))
    return LevelSamples(
        concurrency=level, steady_from_s=1.0, steady_to_s=1.0 + seconds, bins=bins, requests=tuple(requests)
    )


def looks(rng: random.Random) -> list[dict[str, Any]]:
    """What the rules saw, window after window, and what fired."""
    watch, seen = Watch(POLICIES), []
    for _ in range(rng.randrange(4)):
        facts: dict[str, Any] = {
            "server.alive": rng.random() < 0.8,
            "server.cause": "unknown",
            "server.sentence": "it died",
        }
        facts |= {"spec.on": rng.random() < 0.5, "spec.accept_len": 1 + rng.random() * 3, "level.concurrency": 8}
        fired = watch.look("window", facts)
        seen.append(
            {
                "on": "window",
                "facts": facts,
                "fired": [f"{f.file}/{f.rule}" + (" (dry run)" if f.dry_run else "") for f in fired],
            }
        )
    return seen


def trial(rng: random.Random) -> tuple[TrialSoFar, dict[int, dict[str, Any]]]:
    """What a verdict is made from, and what each level rests on."""
    aim, pace, best = objective(rng), rng.uniform(5, 80), rng.uniform(5, 80)
    limits = GoodputLimits(ttft_ms_max=aim.ttft_ms_max) if aim.ttft_ms_max else GoodputLimits()
    results, evidence = [], dict[int, dict[str, Any]]()
    levels = (1, 8)
    for level in levels[: rng.choice((1, 2, 2, 2))]:
        taken = samples(rng, level, pace * level)
        results.append(LevelResult(concurrency=level, figures=figures_under(taken, limits)))
        evidence[level] = {
            "samples": taken.model_dump(mode="json"),
            "looks": looks(rng),
            "policies": {policy.file: policy.sha256 for policy in POLICIES},
        }
    launches = range(rng.choice((0, 1, 2, 3)))
    runs = [{level: figures_under(samples(rng, level, best * level), limits) for level in levels} for _ in launches]
    baseline = {level: LevelResult(concurrency=level, figures=runs[-1][level]) for level in levels} if runs else {}
    so_far = TrialSoFar(
        aim, levels, tuple(results), baseline, is_baseline=rng.random() < 0.1, launch_noise=rng.choice((0.0, 0.03)),
        has_best=bool(runs) or rng.random() < 0.3, alpha=rng.choice((0.05, 0.01, 0.002)), baseline_runs=tuple(runs),
    )  # fmt: skip
    return so_far, evidence


def kept_and_read(
    store: Store, so_far: TrialSoFar, evidence: dict[int, dict[str, Any]]
) -> tuple[Any, Judgement, dict[Any, Any]]:
    """Put a trial with its verdict into the store and take it out again, as `journal replay` does."""
    candidate = Candidate(name="c", engine="sglang", launch=Launch(model="/m"))
    store.put_candidate(candidate, "", "c.toml")
    number = store.add_trial("s", candidate, ("default", Benchmark(levels=(1, 8))), AT)
    for result in so_far.results:
        store.put_result(number, result, evidence[int(result.concurrency)])
    store.update_trial(number, basis=basis_json(so_far), **judgement_columns(judge(so_far)))
    row = store.trial(number)
    assert row.verdict is not None
    recorded = Judgement(row.verdict, row.promoted, row.reasons, row.score)
    return (
        store.basis(number),
        recorded,
        {r.concurrency: store.evidence(number, r.concurrency) for r in store.results(number)},
    )


def changed(rng: random.Random, recorded: Judgement, evidence: dict[Any, Any]) -> tuple[Judgement, dict[Any, Any]]:
    """The record with one thing of it changed."""
    kept = copy.deepcopy(evidence)
    level = rng.choice(sorted(kept))
    kind = rng.choice(("promoted", "reasons", "bins", "looks"))
    if kind == "bins":
        kept[level]["samples"]["bins"] = [count + 1 + count // 2 for count in kept[level]["samples"]["bins"]]
    elif kind == "looks" and kept[level]["looks"]:
        rng.choice(kept[level]["looks"])["fired"].append("house.toml/made-up")
    elif kind == "reasons":
        return Judgement(recorded.verdict, recorded.promote, (*recorded.reasons, "and so"), recorded.score), kept
    else:
        return Judgement(recorded.verdict, not recorded.promote, recorded.reasons, recorded.score), kept
    return recorded, kept


def run(seed: int, seconds: float) -> Tally:
    """Trials until the time is over."""
    tally, until, number = Tally(), time.monotonic() + seconds, 0
    by_hash = {policy.sha256: policy for policy in POLICIES}
    place = Path(tempfile.mkdtemp(prefix="torture-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    store = Store(place / "state.db")
    try:
        while number == 0 or time.monotonic() < until:
            rng = random.Random(f"records {seed}/{number}")
            how = f"trial {number}: python -m torture --part records --seed {seed}"
            so_far, evidence = trial(rng)
            basis, recorded, kept = kept_and_read(store, so_far, evidence)
            tally.counts[f"verdicts {recorded.verdict}"] += 1
            found = replay(basis, recorded, kept, by_hash).differences
            tally.check("P11", kept=not found, how=f"{json.dumps(found[:2])} ({how})")
            other, altered = changed(rng, recorded, kept)
            noticed = replay(basis, other, altered, by_hash).differences
            tally.check("P11", kept=bool(noticed), how=f"a changed record replays as it was ({how})")
            number += 1
    finally:
        store.close()
        shutil.rmtree(place)
    tally.counts["trials replayed"] = number
    return tally
