"""What rules proposed on a trial is worked out, checked, bounded, and queued or suggested together with its verdict."""

import asyncio
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from unit.core.building import fired, level

from autotuner import followup, outcome
from autotuner.act import _did_not_start, _Following
from autotuner.bench.benchmark import Benchmark
from autotuner.context import SlotContext
from autotuner.core.candidate import Candidate, Launch, parse_candidates
from autotuner.core.policy import Fired, Policy, load_policy
from autotuner.core.source import Source
from autotuner.core.state import LaunchState, ProposalState, Purpose, TrialState
from autotuner.edge.host import Ran, ServerSeen
from autotuner.edge.rows import LaunchRow, Trial
from autotuner.edge.store import Store
from autotuner.engines.base import Diagnosis, Effective
from autotuner.settings import Settings
from autotuner.shipped import folder

AT = "2026-11-29 15:02:14Z"
BENCHMARK = Benchmark(levels=(1, 64))
HELP = "options:\n  --mem-fraction-static X\n  --tp-size N\n  --max-running-requests N\n  --page-size N"
SHIPPED = tuple(load_policy(Source(p.name, p.read_text())) for p in sorted(folder("policies").glob("*.toml")))


class Host:
    """Has SGLang 0.5.12; its servers' logs are empty."""

    help_text = HELP
    here = True
    asked = 0

    async def run(self, argv: tuple[str, ...], timeout_s: float) -> Ran:
        self.asked += argv[-1] == "--help"
        return Ran(0, self.help_text if argv[-1] == "--help" else "0.5.12\n")

    async def read_log(self, launch_id: str, offset: int, limit: int = 1 << 20) -> bytes:
        return b""


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[SlotContext]:
    yield from made(tmp_path)


def made(tmp_path: Path, policies: tuple[Policy, ...] = SHIPPED, **settings: Any) -> Iterator[SlotContext]:
    table = {"state_dir": tmp_path, "slots": {"kimi": {"port": 8000}}, **settings}
    store = Store(tmp_path / "state.db")
    yield SlotContext("kimi", Settings.model_validate(table), policies, store, host=Host())  # type: ignore[arg-type]
    store.close()


def begin(ctx: SlotContext, name: str = "base", parent: int | None = None, **args: Any) -> Trial:
    """A trial in hand, its server launched."""
    flags = {key.replace("_", "-"): value for key, value in args.items()}
    candidate = Candidate(name=name, engine="sglang", launch=Launch(model="/m", python=sys.executable, args=flags))
    ctx.store.put_candidate(candidate, "", "x.toml")
    trial_id = ctx.store.add_trial("kimi", candidate, ("chat", BENCHMARK), AT, parent=parent)
    outcome.begin_trial(ctx, trial_id)
    ctx.store.add_launch(
        LaunchRow(
            id=f"launch{trial_id}", slot="kimi", candidate_id=candidate.id, name=name, purpose=Purpose.TRIAL,
            trial_id=trial_id, state=LaunchState.STARTING, intended_at=AT, boot_id="b", mono_s=1.0, ready_s=None,
            gpu_used_mib={}, ended_at=None, exit_code=None, end_asked=False, diagnosis=None,
        )
    )  # fmt: skip
    return ctx.store.trial(trial_id)


def proposes(rule: str = "a-rule", **settings: Any) -> Fired:
    return fired("propose", rule=rule, set={f"args.{key.replace('_', '-')}": value for key, value in settings.items()})


def conclude(ctx: SlotContext, trial: Trial, *proposed: Fired) -> str:
    """What the slot's worker does once a trial is over; return its entry."""
    outcome.want(ctx, trial.id, proposed, 64, Effective(version="0.5.12"))
    ctx.store.put_result(trial.id, level(64, 100.0), {})
    if followup.unsettled(ctx, trial.id):
        asyncio.run(followup.settle(ctx, trial.id))
    outcome.conclude(ctx, trial.id)
    return ctx.store.entries()[-1].text


def states(ctx: SlotContext) -> list[tuple[str, str]]:
    return [(row.name, row.state.value) for row in ctx.store.proposals.of_slot("kimi")]


def test_a_proposal_is_queued_with_its_parent_its_reason_and_its_file(ctx: SlotContext) -> None:
    trial = begin(ctx)
    text = conclude(ctx, trial, proposes(tp_size=2))
    (queued,) = ctx.store.queue("kimi")
    assert (queued.name, queued.parent) == ("base+tp-size-2", trial.id)
    assert "proposed by house.toml / a-rule: It is too slow" in queued.hypothesis
    assert "- Next: queued base+tp-size-2 to isolate the cause (expected +10 %); base+tp-size-2 is next of 1" in text
    (row,) = ctx.store.proposals.of_slot("kimi")
    assert (row.state, row.queued_as) == (ProposalState.QUEUED, queued.id)
    (from_file,) = parse_candidates(Source(row.file, Path(row.file).read_text()))
    assert from_file.id == queued.candidate_id
    assert Path(row.file) == ctx.settings.state_dir / "proposals" / "base+tp-size-2.toml"


def test_a_suggestion_is_a_file_and_the_command_that_queues_it(tmp_path: Path) -> None:
    for ctx in made(tmp_path, propose="suggest"):
        text = conclude(ctx, begin(ctx), proposes(tp_size=2))
        assert ctx.store.queue("kimi") == []
        (row,) = ctx.store.proposals.of_slot("kimi")
        assert f"`autotuner enqueue {row.file}` tries base+tp-size-2" in text
        assert Path(row.file).is_file()


def test_nothing_is_proposed_where_that_is_switched_off(tmp_path: Path) -> None:
    for ctx in made(tmp_path, propose="off"):
        conclude(ctx, begin(ctx), proposes(tp_size=2))
        assert (ctx.store.queue("kimi"), states(ctx)) == ([], [])


def test_what_does_not_pass_preflight_is_not_queued_and_the_entry_says_why(ctx: SlotContext) -> None:
    text = conclude(ctx, begin(ctx), proposes(no_such_flag=1))
    assert ctx.store.queue("kimi") == []
    assert "- Not queued: base+no-such-flag-1: it does not pass preflight: args.no-such-flag: " in text
    assert states(ctx) == [("base+no-such-flag-1", "refused")]
    assert not (ctx.settings.state_dir / "proposals").exists()


def test_the_campaign_has_so_many_follow_ups_and_the_best_of_them_come_first(tmp_path: Path) -> None:
    for ctx in made(tmp_path, budget={"proposals": 1}):
        out = Effective(version="0.5.12", memory_share=0.9)
        trial = begin(ctx)
        outcome.want(ctx, trial.id, [fired("propose", rule="mend", move="memory-down")], None, out)  # half a usual gain
        text = conclude(ctx, trial, proposes(tp_size=2))
        assert [t.name for t in ctx.store.queue("kimi")] == ["base+tp-size-2"]
        assert "Not queued: base+mem-fraction-static-0.85: the campaign's follow-ups are used up" in text


def test_what_a_campaign_queued_before_counts(tmp_path: Path) -> None:
    for ctx in made(tmp_path, budget={"proposals": 1}):
        first = begin(ctx)
        conclude(ctx, first, proposes(tp_size=2))
        ctx.store.move_trial(ctx.store.queue("kimi")[0].id, TrialState.CANCELLED)
        assert "used up" in conclude(ctx, begin(ctx, "other", page_size=1), proposes(tp_size=4))
        ctx.store.update_slot("kimi", campaign_from=ctx.store.trials("kimi")[-1].id)
        conclude(ctx, begin(ctx, "third", page_size=2), proposes(tp_size=4))
        assert [t.name for t in ctx.store.queue("kimi")] == ["third+tp-size-4"]


def test_a_chain_ends_at_its_depth(ctx: SlotContext) -> None:
    first = begin(ctx)
    conclude(ctx, first)
    second = begin(ctx, "b", parent=first.id, page_size=1)
    conclude(ctx, second)
    third = begin(ctx, "c", parent=second.id, page_size=2)
    assert "follow-up 3 in a chain, 2 is the most" in conclude(ctx, third, proposes(tp_size=2))


def test_two_rules_that_come_to_one_candidate_queue_it_once(ctx: SlotContext) -> None:
    conclude(ctx, begin(ctx), proposes("one", tp_size=2), proposes("two", tp_size=2), proposes("one", tp_size=4))
    assert [t.name for t in ctx.store.queue("kimi")] == ["base+tp-size-2"]
    assert states(ctx) == [("base+tp-size-2", "queued")]


def test_what_somebody_queued_meanwhile_is_not_queued_twice(ctx: SlotContext) -> None:
    trial = begin(ctx)
    outcome.want(ctx, trial.id, [proposes(tp_size=2)], 64, None)
    asyncio.run(followup.settle(ctx, trial.id))
    (row,) = ctx.store.proposals.of_slot("kimi")
    assert row.candidate is not None
    ctx.store.put_candidate(row.candidate, "", "theirs.toml")
    theirs = ctx.store.add_trial("kimi", row.candidate, ("chat", BENCHMARK), AT)
    outcome.conclude(ctx, trial.id)
    assert [t.id for t in ctx.store.queue("kimi")] == [theirs]
    assert f"Not queued: base+tp-size-2: it waits already: trial {theirs}" in ctx.store.entries()[-1].text


def test_a_trial_that_begins_anew_proposes_anew(ctx: SlotContext) -> None:
    trial = begin(ctx)
    outcome.want(ctx, trial.id, [proposes(tp_size=2)], 64, None)
    outcome.requeue(ctx, trial.id, "the daemon ended")
    assert states(ctx) == []


def test_a_proposal_that_breaks_its_making_costs_the_trial_nothing(
    ctx: SlotContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = begin(ctx)
    outcome.want(ctx, trial.id, [proposes(tp_size=2)], 64, None)
    monkeypatch.setattr(followup, "work_out", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(followup.settle(ctx, trial.id))
    assert not followup.unsettled(ctx, trial.id), "it is tried once; the verdict does not wait for it"
    text = conclude(ctx, trial)
    assert "- Not queued: what house.toml / a-rule proposes: it could not be worked out" in text
    assert ctx.store.trial(trial.id).state is TrialState.DONE
    assert states(ctx) == [("", "refused")]


def start_fails(ctx: SlotContext, trial: Trial, diagnosis: Diagnosis, **said: Any) -> None:
    """A start that ended by itself, as the daemon records it."""
    row = ctx.store.launches("kimi", trial.id)[-1]
    following = _Following(ctx, row, ctx.store.candidate(row.candidate_id), "0.5.12")
    following.log.said[("arguments", "")] = Effective(source="arguments", **said)
    facts: Any = {"server.alive": False, "server.cause": diagnosis.cause, "server.sentence": diagnosis.sentence}
    ended = following.fired(facts)
    assert ended is not None
    _did_not_start(following, ServerSeen(row.id, alive=False, exit_code=1), diagnosis, ended)


def test_a_start_that_ran_out_of_memory_is_tried_with_less_of_what_was_in_force(ctx: SlotContext) -> None:
    trial = begin(ctx)
    diagnosis = Diagnosis("oom-in-capture", "the GPU ran out of memory while capturing CUDA graphs")
    start_fails(ctx, trial, diagnosis, memory_share=0.873)
    asyncio.run(followup.settle(ctx, trial.id))
    outcome.conclude(ctx, trial.id)
    assert [t.name for t in ctx.store.queue("kimi")] == ["base+mem-fraction-static-0.82"]
    assert "to leave more memory beside weights and KV cache (expected +5 %)" in ctx.store.entries()[-1].text


def test_memory_that_is_too_much_at_one_share_and_too_little_at_the_next_is_given_up(ctx: SlotContext) -> None:
    trial = begin(ctx, mem_fraction_static=0.9)
    start_fails(ctx, trial, Diagnosis("oom-in-capture", "out of memory"))
    asyncio.run(followup.settle(ctx, trial.id))
    outcome.conclude(ctx, trial.id)
    (lower,) = ctx.store.queue("kimi")
    assert lower.name == "base+mem-fraction-static-0.85"
    outcome.begin_trial(ctx, lower.id)
    launched = ctx.store.launches("kimi", trial.id)[-1]
    again = {"id": "second", "trial_id": lower.id, "candidate_id": lower.candidate_id, "state": LaunchState.STARTING}
    ctx.store.add_launch(dataclasses.replace(launched, **again))
    start_fails(ctx, lower, Diagnosis("kv-too-small", "nothing is left for the key-value cache"))
    asyncio.run(followup.settle(ctx, lower.id))
    outcome.conclude(ctx, lower.id)
    assert ctx.store.queue("kimi") == []
    assert "no share of the memory fits" in ctx.store.entries()[-1].text


def test_a_flag_that_the_release_refused_is_written_as_it_calls_it(ctx: SlotContext) -> None:
    ctx.host.help_text = HELP + "\n  --cuda-graph-max-bs-decode N"  # type: ignore[attr-defined]
    trial = begin(ctx, cuda_graph_max_bs=64)
    evidence = (
        "launch_server.py: error: ambiguous option: --cuda-graph-max-bs could match --cuda-graph-max-bs-decode",
    )
    start_fails(ctx, trial, Diagnosis("bad-flag-combination", "SGLang refused a flag", "", evidence))
    asyncio.run(followup.settle(ctx, trial.id))
    outcome.conclude(ctx, trial.id)
    (queued,) = ctx.store.queue("kimi")
    assert ctx.store.candidate(queued.candidate_id).launch.args == {"cuda-graph-max-bs-decode": 64}


def test_a_file_of_that_name_with_another_content_is_left_alone(ctx: SlotContext) -> None:
    there = ctx.settings.state_dir / "proposals" / "base+tp-size-2.toml"
    there.parent.mkdir()
    there.write_text("mine\n")
    conclude(ctx, begin(ctx), proposes(tp_size=2))
    (row,) = ctx.store.proposals.of_slot("kimi")
    assert there.read_text() == "mine\n"
    assert row.candidate is not None
    assert Path(row.file).name == f"base+tp-size-2-{row.candidate.id[:8]}.toml"


def test_the_program_is_asked_for_its_flags_once_for_all_proposals_of_a_trial(ctx: SlotContext) -> None:
    conclude(ctx, begin(ctx), proposes("one", tp_size=2), proposes("two", page_size=2))
    assert ctx.host.asked == 1  # type: ignore[attr-defined]
