"""A verdict computed again from its record comes out as it did, and any change of the record shows."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from unit.core.building import level

from autotuner.bench.goodput import figures_under
from autotuner.bench.measurement import GoodputLimits, LevelSamples, RequestSample, figures
from autotuner.core.objective import Objective
from autotuner.core.policy import Watch, load_policy
from autotuner.core.replay import Replayed, replay
from autotuner.core.source import Source
from autotuner.core.verdict import Judgement, LevelResult, TrialSoFar, judge
from autotuner.edge.rows import basis_json, read_basis

FOLDER = Path(__file__).parents[3] / "policies"
POLICIES = tuple(load_policy(Source(p.name, p.read_text(encoding="utf-8"))) for p in sorted(FOLDER.glob("*.toml")))
BY_HASH = {policy.sha256: policy for policy in POLICIES}
DYING: dict[str, Any] = {"server.alive": False, "server.cause": "unknown", "server.sentence": "it died"}
SAMPLES = LevelSamples(concurrency=8, steady_from_s=1.0, steady_to_s=5.0, bins=(40,) * 16)


def looks(*facts: dict[str, Any]) -> list[dict[str, Any]]:
    watch = Watch(POLICIES)
    return [
        {"on": "window", "facts": f, "fired": [f"{r.file}/{r.rule}" for r in watch.look("window", f)]} for f in facts
    ]


def record() -> tuple[TrialSoFar, Judgement, dict[int, dict[str, Any]]]:
    """A trial of one level, as the store has it."""
    result = LevelResult(concurrency=8, figures=figures(SAMPLES))
    basis = TrialSoFar(Objective(), (8,), (result,), {8: level(8, 400.0)}, has_best=True, launch_noise=0.03)
    kept = {
        "samples": SAMPLES.model_dump(mode="json"),
        "looks": looks({"server.alive": True}, DYING, DYING),
        "policies": {policy.file: policy.sha256 for policy in POLICIES},
    }
    return basis, judge(basis), {8: kept}


def test_what_is_as_it_was_comes_out_as_it_did() -> None:
    basis, judgement, evidence = record()
    assert any(look["fired"] for look in evidence[8]["looks"]), "a replay in which nothing fires proves nothing"
    assert replay(basis, judgement, evidence, BY_HASH) == Replayed(1, 3, ())


def test_a_figure_that_was_not_recorded_yet_is_not_missed() -> None:
    """A database of before knows nothing of the drift within a level, whatever its samples say of it."""
    basis, _, evidence = record()
    falling = SAMPLES.model_copy(update={"steady_to_s": 13.0, "bins": (40,) * 60 + (30,) * 60})
    evidence[8]["samples"] = falling.model_dump(mode="json")
    now = figures(falling)
    assert now.drift_ratio is not None
    then = LevelResult.model_validate({"concurrency": 8, "figures": now.model_dump(exclude={"drift_ratio"})})
    basis = dataclasses.replace(basis, results=(then,))
    assert replay(basis, judge(basis), evidence, BY_HASH).differences == ()
    new = dataclasses.replace(basis, results=(LevelResult(concurrency=8, figures=now),))
    assert replay(new, judge(new), evidence, BY_HASH).differences == ()


def test_a_basis_of_before_is_judged_as_it_was_then() -> None:
    """What was stored before launches were pooled and wins confirmed has one baseline and promotes at once."""
    basis, _, _ = record()
    stored = json.loads(basis_json(dataclasses.replace(basis, results=(level(8, 800.0),))))
    for key in ("is_best", "measure", "baseline_runs", "earlier_runs", "win", "owed", "remarks"):
        del stored[key]
    found = judge(read_basis(json.dumps(stored)))
    assert found.promote
    assert found.reasons == (
        "the objective is 2.000 of the best-known's (95 % interval 1.834 to 2.166), above 1 with 3.0 % noise between launches",
    )


def change_fact(kept: dict[str, Any]) -> None:
    kept["looks"][1]["facts"] = {"server.alive": True}


def drop_rule(kept: dict[str, Any]) -> None:
    next(look for look in kept["looks"] if look["fired"])["fired"] = []


def change_samples(kept: dict[str, Any]) -> None:
    kept["samples"]["bins"] = [41] * 16


def other_policy(kept: dict[str, Any]) -> None:
    kept["policies"]["server.toml"] = "00" * 32


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_fact, "look 2"),
        (drop_rule, "nothing fired then"),
        (change_samples, "output_tok_s was"),
        (other_policy, "server.toml as it was then is not kept"),
    ],
)
def test_a_changed_record_shows(change: Any, said: str) -> None:
    basis, judgement, evidence = record()
    altered = copy.deepcopy(evidence)
    change(altered[8])
    found = replay(basis, judgement, altered, BY_HASH).differences
    assert any(said in difference for difference in found), found


def nudged(value: Any, by: float) -> Any:
    """Every float of a record off by this share."""
    if isinstance(value, dict):
        return {key: nudged(inner, by) for key, inner in value.items()}
    return value * (1 + by) if isinstance(value, float) else value


def test_another_python_sums_otherwise_in_the_last_digits_and_that_is_no_difference() -> None:
    """3.12 compensates the sum of floats; a journal is replayed by whatever Python its reader has."""
    basis, _, evidence = record()
    requests = [{"sent_s": at, "first_s": at + 0.1, "end_s": at + 0.3, "events": 2} for at in (1.0, 2.0, 3.3)]
    samples = SAMPLES.model_copy(update={"requests": tuple(RequestSample.model_validate(r) for r in requests)})
    evidence[8]["samples"] = samples.model_dump(mode="json")
    told = figures(samples).model_dump()
    assert told["ttft_ms"], "a table of means is what differs"
    for by, same in ((1e-14, True), (1e-5, False)):
        then = LevelResult.model_validate({"concurrency": 8, "figures": nudged(told, by)})
        off = dataclasses.replace(basis, results=(then,))
        judged = judge(off)
        assert judged.score is not None
        low = dataclasses.replace(judged.score, mean=judged.score.mean * (1 + by))
        found = replay(off, dataclasses.replace(judged, score=low), evidence, BY_HASH).differences
        assert (found == ()) is same, found
        assert same or any("score was" in said for said in found)


def test_another_verdict_than_the_record_yields_shows() -> None:
    basis, judgement, evidence = record()
    other = Judgement(judgement.verdict, not judgement.promote, judgement.reasons, judgement.score)
    assert replay(basis, other, evidence, BY_HASH).differences == (
        f"promoted was {other.promote}, now {judgement.promote}",
    )


def test_a_trial_of_before_says_that_its_basis_is_not_there() -> None:
    _, judgement, evidence = record()
    assert "was not recorded" in replay(None, judgement, evidence, BY_HASH).differences[0]


def test_goodput_comes_out_again_under_the_limits_it_was_measured_with_and_a_changed_one_shows() -> None:
    limits = GoodputLimits(ttft_ms_max=500.0)
    requests = tuple(
        RequestSample(sent_s=at, first_s=at + 0.4, end_s=at + 0.5, events=2, output_tokens=2) for at in (1.0, 2.0, 3.0)
    )
    samples = SAMPLES.model_copy(update={"requests": requests})
    result = LevelResult(concurrency=8, figures=figures_under(samples, limits))
    objective = Objective(maximise="goodput", ttft_ms_max=500.0)
    basis = TrialSoFar(objective, (8,), (result,), {8: result}, has_best=True, launch_noise=0.03)
    kept = {"samples": samples.model_dump(mode="json"), "looks": [], "policies": {}}
    judged = judge(basis)
    assert judged.score is not None
    assert replay(basis, judged, {8: kept}, {}).differences == ()
    kept["samples"]["requests"][0]["first_s"] = 1.6
    assert any("goodput_req_s was" in said for said in replay(basis, judged, {8: kept}, {}).differences)
