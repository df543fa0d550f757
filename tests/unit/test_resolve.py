"""A server that comes to serve is asked once what it resolved; one that another trial has measured is not measured again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from unit.core.building import level

from autotuner import measure, outcome, resolve
from autotuner.act import _Following, _now_serving
from autotuner.bench.benchmark import Benchmark
from autotuner.cli.reading import _print_configuration
from autotuner.context import SlotContext
from autotuner.core.candidate import Candidate, Launch
from autotuner.core.decide import RunLevel
from autotuner.core.effective import Configuration, merge
from autotuner.core.state import LaunchState, Purpose, TrialState, Verdict
from autotuner.core.topology import QUERY, joined
from autotuner.core.verdict import Judgement
from autotuner.edge.host import Ran
from autotuner.edge.rows import LaunchRow, Trial, configuration_json, judgement_columns
from autotuner.edge.store import Store
from autotuner.engines.base import Effective
from autotuner.errors import HostError
from autotuner.serverlog import LogReader
from autotuner.settings import Settings

TOPOLOGY = (Path(__file__).parent / "core" / "data" / "topo-2-h200.txt").read_text()
RECORDINGS = Path(__file__).parent / "engines" / "recordings"
AT = "2026-11-29 15:02:14Z"
BENCHMARK = Benchmark(levels=(1, 8, 128))
SETTINGS = Settings.model_validate({"state_dir": "/nowhere", "slots": {"kimi": {"port": 8000}}})


class FakeHost:
    """Its servers' logs are the recorded one, whole; nothing of it was read before the server served."""

    cuts = 0

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    async def run(self, argv: tuple[str, ...], timeout_s: float) -> Ran:
        self.asked.append(argv)
        return Ran(0, TOPOLOGY)

    async def read_log(self, launch_id: str, offset: int) -> bytes:
        return (RECORDINGS / "sglang-0.5.12-eagle3-capped.log").read_bytes()[offset:]


class FakeProbe:
    """Answers at some paths, and remembers what it was asked."""

    def __init__(self, **answers: str) -> None:
        self.answers = {"/" + path: text for path, text in answers.items()}
        self.asked: list[str] = []

    async def info(self, paths: str) -> tuple[str, str] | None:
        self.asked.append(paths)
        return next(((path, self.answers[path]) for path in paths.split("|") if path in self.answers), None)


def candidate(name: str, engine: Any = "sglang", **args: Any) -> Candidate:
    flags = {key.replace("_", "-"): value for key, value in args.items()}
    return Candidate(name=name, engine=engine, launch=Launch(model="/models/big", args=flags))


@pytest.fixture
def ctx(tmp_path: Path) -> Any:
    store = Store(tmp_path / "state.db")
    yield SlotContext("kimi", SETTINGS, (), store, host=FakeHost())  # type: ignore[arg-type]
    store.close()


class Logged:
    """A host of which only a log is asked."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def read_log(self, launch_id: str, offset: int, limit: int = 1 << 20) -> bytes:
        return self.data[offset : offset + limit]


def begin(ctx: SlotContext, made: Candidate, **trial: Any) -> LaunchRow:
    """A trial of a candidate whose server is about to serve."""
    ctx.store.put_candidate(made, "", "x.toml")
    trial_id = ctx.store.add_trial("kimi", made, ("chat", BENCHMARK), AT, **trial)
    outcome.begin_trial(ctx, trial_id)
    row = LaunchRow(
        id=f"launch{trial_id}", slot="kimi", candidate_id=made.id, name=made.name, purpose=Purpose.TRIAL,
        trial_id=trial_id, state=LaunchState.STARTING, intended_at=AT, boot_id="b", mono_s=1.0, ready_s=None,
        gpu_used_mib={}, ended_at=None, exit_code=None, end_asked=False, diagnosis=None,
    )  # fmt: skip
    ctx.store.add_launch(row)
    return row


def resolved(ctx: SlotContext, row: LaunchRow, probe: FakeProbe | None = None) -> Configuration:
    asked = probe or FakeProbe(server_info=(RECORDINGS / "sglang-0.5.12-eagle3-capped.server_info.json").read_text())
    made = ctx.store.candidate(row.candidate_id)
    return asyncio.run(resolve.configuration(ctx, row, made, asked))  # type: ignore[arg-type]


def serve(ctx: SlotContext, row: LaunchRow, kept: Configuration) -> Trial:
    """What happens when it serves; return the trial afterwards."""
    _now_serving(_Following(ctx, row, ctx.store.candidate(row.candidate_id), None), 12.0, kept)
    assert row.trial_id is not None
    return ctx.store.trial(row.trial_id)


def measured(ctx: SlotContext, row: LaunchRow, **figures: Any) -> None:
    assert row.trial_id is not None
    ctx.store.put_result(row.trial_id, level(128, 4361.0, **figures), {})
    verdict = judgement_columns(Judgement(Verdict.FAIL, promote=False, reasons=("slow",)))
    ctx.store.move_trial(row.trial_id, TrialState.DONE, **verdict)


USELESS: dict[str, dict[str, Any]] = {
    "void": {"void": "the client was the limit"},
    "no-token": {"output_tok_s": 0.0},
}
EAGLE = {
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": "/models/bigeagle3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


def test_log_and_answer_make_one_configuration_with_its_differences(ctx: SlotContext) -> None:
    found = resolved(ctx, begin(ctx, candidate("eagle", **EAGLE)))
    assert (found.effective.running_cap, found.effective.graph_max_batch, found.effective.version) == (48, 48, "0.5.12")
    assert [d.what for d in found.differences] == ["running requests"]
    assert found.identity


def test_a_server_that_answers_nothing_leaves_what_its_log_said(ctx: SlotContext) -> None:
    probe = FakeProbe()
    found = resolved(ctx, begin(ctx, candidate("eagle", **EAGLE)), probe)
    assert probe.asked == ["/server_info|/get_server_info"]
    assert found.effective.running_cap == 48
    for junk in ("<html>", "", "[[[["):
        again = resolved(ctx, begin(ctx, candidate("other", tp=len(junk))), FakeProbe(server_info=junk))
        assert again.effective == found.effective


def test_how_the_gpus_are_joined_is_asked_once_a_host_and_boot_and_kept_with_each_launch(ctx: SlotContext) -> None:
    host: Any = ctx.host
    two = candidate("two", tp_size=2)
    for _ in range(2):
        kept = resolved(ctx, begin(ctx, two))
        assert joined(kept.topology) == "GPUs 0, 1 joined by NVLink (NV18)"
    assert host.asked == [QUERY]
    host.cuts = 1  # it may have been booted anew meanwhile
    resolved(ctx, begin(ctx, two))
    assert host.asked == [QUERY, QUERY]
    assert resolved(ctx, begin(ctx, candidate("one"))).topology is None


def test_a_host_without_gpus_has_no_topology_and_nothing_is_made_of_it(ctx: SlotContext) -> None:
    async def none(argv: tuple[str, ...], timeout_s: float) -> Ran:
        raise HostError("there is no nvidia-smi")

    ctx.host.run = none  # type: ignore[method-assign]
    assert resolved(ctx, begin(ctx, candidate("two", tp_size=2))).topology is None


def test_what_was_resolved_is_recorded_with_the_launch_and_sets_the_cap_of_the_level(ctx: SlotContext) -> None:
    row = begin(ctx, candidate("eagle", **EAGLE))
    assert serve(ctx, row, resolved(ctx, row)).ended is None
    kept = ctx.store.launch(row.id)
    assert kept.state is LaunchState.SERVING
    assert kept.configuration is not None
    ctx.logs.clear()  # as after a restart of the daemon, before the log is read again
    assert row.trial_id is not None
    plan = measure._Level(ctx, RunLevel(row.trial_id, row.id, 128)).gather.plan
    assert (plan.cap, plan.graph_max_batch) == (48, 48)


def test_a_difference_is_a_fact_for_rules(ctx: SlotContext) -> None:
    row = begin(ctx, candidate("eagle", **EAGLE))
    serve(ctx, row, resolved(ctx, row))
    assert row.trial_id is not None
    assert measure._Level(ctx, RunLevel(row.trial_id, row.id, 128))._facts()["candidate.effective_differences"] == 1.0


def test_a_trial_on_a_server_that_was_measured_already_ends_at_once_and_points_there(ctx: SlotContext) -> None:
    first = begin(ctx, candidate("eagle", **EAGLE))
    assert serve(ctx, first, resolved(ctx, first)).ended is None
    measured(ctx, first)
    row = begin(ctx, candidate("eagle-48", max_running_requests=48, **EAGLE))
    trial = serve(ctx, row, resolved(ctx, row))
    assert trial.ended is not None
    assert trial.ended.sentence.startswith("the same effective configuration as eagle (trial 1)")
    judgement = outcome.conclude(ctx, trial.id)
    assert (judgement.verdict, judgement.promote) == (Verdict.INCONCLUSIVE, False)
    entry = ctx.store.entries()[-1]
    assert "inconclusive eagle-48" in entry.title
    assert "autotuner show 1" in entry.text
    assert "Requested against effective" in entry.text
    assert ctx.store.ladder("kimi") == []


@pytest.mark.parametrize("why", ["baseline", "void", "no-token", "unmeasured", "other-arguments"])
def test_a_trial_is_measured_where_its_twin_says_nothing_about_it(ctx: SlotContext, why: str) -> None:
    first = begin(ctx, candidate("eagle", **EAGLE))
    kept = resolved(ctx, first)
    serve(ctx, first, kept)
    if why == "unmeasured":
        assert first.trial_id is not None
        ctx.store.move_trial(first.trial_id, TrialState.CANCELLED)
    else:
        measured(ctx, first, **USELESS.get(why, {}))
    row = begin(ctx, candidate("twin", max_running_requests=48, **EAGLE), is_baseline=why == "baseline")
    mine = resolved(ctx, row)
    if why == "other-arguments":
        text = (RECORDINGS / "sglang-0.5.12-eagle3-capped.server_info.json").read_text()
        other = text.replace('"chunked_prefill_size":8192', '"chunked_prefill_size":4096')
        mine = resolved(ctx, row, FakeProbe(server_info=other))
    assert serve(ctx, row, mine).ended is None


def test_the_log_reader_counts_ranks_together_and_forgets_nothing(ctx: SlotContext) -> None:
    lines = [
        f"[2026-11-29 15:02:14 DP{rank} TP{tensor}] max_total_num_tokens=1000, chunked_prefill_size=8192, "
        "max_prefill_tokens=16384, max_running_requests=12, context_len=8192\n"
        for rank in range(4)
        for tensor in range(2)
    ]
    reader = LogReader(Logged("".join(lines).encode()), "x", ctx.engine(candidate("a")))  # type: ignore[arg-type]
    asyncio.run(reader.facts())
    assert reader.running_cap == 48
    assert merge(reader.said.values()).kv_tokens == 4000


def test_a_configuration_survives_its_column() -> None:
    assert '"identity":"x"' in configuration_json(Configuration(Effective(), (), "x"))


def test_show_tells_what_is_in_force_and_where_it_differs(ctx: SlotContext, capsys: pytest.CaptureFixture[str]) -> None:
    _print_configuration(resolved(ctx, begin(ctx, candidate("eagle", **EAGLE))))
    effective, differs, identity = capsys.readouterr().out.splitlines()
    assert effective.startswith(
        "  effective:  running cap 48, kv tokens 684832, context len 8192, attention backend triton"
    )
    assert "speculating yes" in effective
    assert "arguments" not in effective
    assert differs.startswith("  differs:    running requests: 48 in force, nothing asked; 80 of 128 requests wait")
    assert identity.startswith("  identity:   ")
