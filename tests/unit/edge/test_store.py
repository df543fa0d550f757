"""Every change is one transaction, whoever else writes; what is illegal is refused; what is damaged is said."""

import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.measurement import Figures, LevelSamples, RequestSample
from autotuner.bench.samples import pack_gaps
from autotuner.core.candidate import Candidate, Launch
from autotuner.core.effective import Configuration, Difference
from autotuner.core.entry import GENESIS, Draft, link
from autotuner.core.objective import Objective
from autotuner.core.policy import built_in
from autotuner.core.speculation import SpeculationAtLevel
from autotuner.core.state import LaunchState, Purpose, TrialState, Verdict, launch_may, trial_may
from autotuner.core.statistics import Interval
from autotuner.core.verdict import Judgement, LevelResult, TrialSoFar
from autotuner.edge.database import MIGRATIONS, SCHEMA_VERSION, Database
from autotuner.edge.outbox import COMMON, NO_SLOT
from autotuner.edge.rows import LaunchRow, SlotRow, basis_json, configuration_json, judgement_columns, read_basis
from autotuner.edge.starts import earlier_starts
from autotuner.edge.store import Store
from autotuner.engines.base import Diagnosis, Effective
from autotuner.errors import DiskFull, NotFound, StoreError

AT = "2026-02-23 00:14:07Z"
BENCHMARK = ("quick", Benchmark(levels=(1, 4), seconds=5))
SPAWN = multiprocessing.get_context("spawn")


def candidate(name: str = "a", **args: Any) -> Candidate:
    return Candidate(name=name, engine="llamacpp", launch=Launch(model="m", args=args))


def launch_row(launch_id: str = "l1", **columns: Any) -> LaunchRow:
    row: dict[str, Any] = {
        "id": launch_id, "slot": "kimi", "candidate_id": candidate().id, "name": "a", "purpose": Purpose.RESTORE,
        "trial_id": None, "state": LaunchState.INTENDED, "intended_at": AT, "boot_id": "b", "mono_s": 10.0, "ready_s": None,
        "gpu_used_mib": {0: 1.5, 3: 0.0}, "ended_at": None, "exit_code": None, "end_asked": False, "diagnosis": None,
    }  # fmt: skip
    return LaunchRow(**{**row, **columns})


@pytest.fixture
def store(tmp_path: Path) -> Any:
    store = Store(tmp_path / "state" / "state.db")
    store.put_candidate(candidate(), "name = 'a'", "a.toml")
    yield store
    store.close()


def add(store: Store, name: str = "a", **more: Any) -> int:
    made = candidate(name, flag=name)
    store.put_candidate(made, "text", f"{name}.toml")
    return store.add_trial("kimi", made, BENCHMARK, AT, **more)


# --- states


@pytest.mark.parametrize(("old", "new"), list(itertools.product(TrialState, TrialState)))
def test_a_trial_takes_legal_steps_only(store: Store, old: TrialState, new: TrialState) -> None:
    trial = add(store)
    store.update_trial(trial, state=old)
    if trial_may(old, new):
        store.move_trial(trial, new, ended_at=AT)
        assert (store.trial(trial).state, store.trial(trial).ended_at) == (new, AT)
    else:
        with pytest.raises(StoreError, match=f"trial {trial} cannot go from {old} to {new}"):
            store.move_trial(trial, new, ended_at=AT)
        assert (store.trial(trial).state, store.trial(trial).ended_at) == (old, None)
    assert not store.db._connection.in_transaction


@pytest.mark.parametrize(("old", "new"), list(itertools.product(LaunchState, LaunchState)))
def test_a_launch_takes_legal_steps_only(store: Store, old: LaunchState, new: LaunchState) -> None:
    store.add_launch(launch_row(state=old))
    if launch_may(old, new):
        store.move_launch("l1", new, exit_code=3)
        assert (store.launch("l1").state, store.launch("l1").exit_code) == (new, 3)
    else:
        with pytest.raises(StoreError, match=f"launch l1 cannot go from {old} to {new}"):
            store.move_launch("l1", new, exit_code=3)
        assert (store.launch("l1").state, store.launch("l1").exit_code) == (old, None)


def test_of_two_that_move_a_trial_at_once_one_is_refused(store: Store, tmp_path: Path) -> None:
    """The daemon begins it while a command cancels it: both saw it queued, only one step may happen."""
    other = Store(tmp_path / "state" / "state.db")
    other.db.run("PRAGMA busy_timeout = 0")
    trial = add(store)
    original, refused = store.trial, []

    def between(trial_id: int) -> Any:
        seen = original(trial_id)
        try:
            other.move_trial(trial_id, TrialState.CANCELLED)
        except StoreError as error:
            refused.append(str(error))
        return seen

    store.trial = between  # type: ignore[method-assign]
    store.move_trial(trial, TrialState.RUNNING)
    store.trial = original  # type: ignore[method-assign]
    assert store.trial(trial).state is TrialState.RUNNING
    assert len(refused) == 1
    assert "locked" in refused[0]
    other.close()


# --- rows come back as they went in


def test_a_launch_comes_back_as_it_was(store: Store) -> None:
    store.add_launch(launch_row())
    assert store.launch("l1") == launch_row()
    diagnosis = Diagnosis("oom", "out of memory", "use less", ("line 1", "line \u2028 2"))
    store.update_launch("l1", diagnosis=TypeAdapter(Diagnosis).dump_json(diagnosis).decode(), end_asked=True)
    assert store.launch("l1").diagnosis == diagnosis
    assert store.launch("l1").end_asked is True
    assert [row.id for row in store.open_launches("kimi")] == ["l1"]
    store.move_launch("l1", LaunchState.ENDED)
    assert store.open_launches("kimi") == []
    assert [row.id for row in store.launches(slot="kimi")] == ["l1"]
    with pytest.raises(NotFound):
        store.launch("l2")


def test_a_trial_comes_back_as_it_was(store: Store) -> None:
    trial = add(store, priority=2, is_baseline=True)
    fired = built_in("r", "it lost", Verdict.FAIL)
    judgement = Judgement(
        Verdict.INCONCLUSIVE, promote=True, reasons=("one", "two"), score=Interval(1.0, 0.9, float("inf"))
    )
    store.move_trial(trial, TrialState.RUNNING, ended=fired.model_dump_json(), **judgement_columns(judgement))
    row = store.trial(trial)
    assert (row.ended, row.verdict, row.promoted, row.reasons) == (fired, Verdict.INCONCLUSIVE, True, ("one", "two"))
    assert (row.score, row.is_baseline, row.priority) == (judgement.score, True, 2)
    assert Benchmark.model_validate_json(row.benchmark_body).hash == BENCHMARK[1].hash
    assert store.trial_in_hand("kimi") == row
    assert store.trials("kimi") == [row]
    with pytest.raises(NotFound):
        store.trial(99)


@pytest.mark.parametrize("odd", [1.5, float("inf"), 1e308])
def test_results_and_their_evidence_come_back_as_they_were(store: Store, odd: float) -> None:
    trial = add(store)
    figures = Figures(
        concurrency=4, seconds=5.0, requests_ok=3, requests_failed=0, output_tok_s=10.0, output_tok_s_low=9.0,
        output_tok_s_high=odd, tokens_per_event=1.0, tokens_counted=True, ttft_ms={"p50": odd},
    )  # fmt: skip
    result = LevelResult(concurrency=4, figures=figures, running=4.0, decode_tok_s=40.0)
    evidence = {"windows": [{"gen_tok_s": odd, "text": "é\u2028"}] * 50, "nothing": None}
    store.put_result(trial, result, evidence)
    store.put_result(trial, LevelResult(concurrency=1, figures=figures), {})
    store.put_result(trial, result, evidence)  # measured again: the last one counts
    assert store.results(trial) == (LevelResult(concurrency=1, figures=figures), result)
    assert store.evidence(trial, 4) == evidence
    with pytest.raises(NotFound, match=f"nothing is kept of trial {trial} at concurrency 8"):
        store.evidence(trial, 8)
    store.drop_results(trial)
    assert store.results(trial) == ()


def test_gaps_are_kept_once_outside_the_json_and_come_back_with_it(store: Store) -> None:
    trial = add(store)
    figures = Figures(
        concurrency=4, seconds=5.0, requests_ok=3, requests_failed=0, output_tok_s=10.0, output_tok_s_low=9.0,
        output_tok_s_high=11.0, tokens_per_event=1.0, tokens_counted=True,
    )  # fmt: skip
    requests = tuple(RequestSample(sent_s=i / 10, first_s=i / 10 + 0.01, events=101) for i in range(40))
    source = random.Random(1)
    gaps = [[source.randrange(10_000, 60_000) for _ in range(100)] for _ in requests]
    samples = LevelSamples(concurrency=4, requests=requests, gaps=pack_gaps(gaps)).model_dump(mode="json")
    evidence = {"samples": samples, "windows": []}
    store.put_result(trial, LevelResult(concurrency=4, figures=figures), evidence)
    assert samples["gaps"], "what was handed over is left as it was"
    assert store.evidence(trial, 4) == evidence
    row = store.db.one("SELECT evidence, gaps FROM results")
    assert row is not None
    assert b"gaps" not in zlib.decompress(row["evidence"])
    assert len(zlib.decompress(row["gaps"])) == 4 * 4000
    store.put_result(trial, LevelResult(concurrency=4, figures=figures), {"samples": None})
    assert store.evidence(trial, 4) == {"samples": None}


def unbounded() -> TrialSoFar:
    """What a verdict is made from where an early look knew no bounds yet."""
    nothing_known = Interval(0.57, -math.inf, math.inf)
    speculation = SpeculationAtLevel(
        accept_len=Interval(2.18, 1.0, 4.0), needed=3.83, needed_bounds=nothing_known, speedup=nothing_known
    )
    figures = Figures(
        concurrency=128, seconds=5.0, requests_ok=3, requests_failed=0, output_tok_s=10.0, output_tok_s_low=0.0,
        output_tok_s_high=math.inf, tokens_per_event=1.0, tokens_counted=True,
    )  # fmt: skip
    result = LevelResult(concurrency=128, figures=figures, speculation=speculation)
    return TrialSoFar(objective=Objective(), levels=(128,), results=(result,))


def test_what_a_verdict_was_made_from_comes_back_where_a_bound_is_infinite(store: Store) -> None:
    trial = add(store)
    store.move_trial(trial, TrialState.RUNNING)
    store.move_trial(trial, TrialState.DONE, basis=basis_json(unbounded()))
    assert store.basis(trial) == unbounded()
    assert [basis for _, _, basis in store.bases("kimi", store.trial(trial).benchmark_hash)] == [unbounded()]
    row = store.db.one("SELECT json_extract(basis, '$.alpha') FROM trials WHERE id = ?", trial)
    assert row is not None
    assert row[0] == unbounded().alpha, "SQLite reads the column, too"


def test_a_basis_that_was_stored_with_null_for_an_infinite_bound_is_still_read() -> None:
    old = basis_json(unbounded()).replace('"-inf"', "null").replace('"inf"', "null")
    assert old.count('"low":null,"high":null') == 2
    assert read_basis(old) == unbounded()


def test_a_candidate_keeps_the_file_that_described_it_first(store: Store) -> None:
    store.put_candidate(candidate("b"), "name = 'b'", "b.toml")  # the same launch under another name
    assert store.candidate(candidate().id) == candidate()
    assert store.candidate_source(candidate().id) == ("a.toml", "name = 'a'")
    for ask in (store.candidate, store.candidate_source):
        with pytest.raises(NotFound):
            ask("none")


def test_slots_nobody_has_spoken_of_are_plain(store: Store) -> None:
    assert store.slot("kimi") == SlotRow("kimi")
    store.update_slot("kimi", paused="why", restore_hold=True)
    store.update_slot("kimi", degraded="so")
    assert store.slot("kimi") == SlotRow("kimi", paused="why", restore_hold=True, degraded="so")


def test_the_ladder_has_each_best_known_once_newest_first(store: Store) -> None:
    for i, name in enumerate(["a", "b", "a", "c", "d"]):
        store.put_candidate(made := candidate(name, flag=name), "", "")
        store.promote("kimi", made.id, name, i, AT)
    assert [name for _, name, _ in store.ladder("kimi")] == ["d", "c", "a"]
    assert store.ladder("other") == []


def test_restore_failures_are_those_of_this_boot_not_asked_for(store: Store) -> None:
    best = candidate().id
    for i, columns in enumerate(
        [
            {},
            {"mono_s": 5.0},
            {"boot_id": "older"},
            {"end_asked": 1},
            {"purpose": Purpose.TRIAL, "mono_s": 7.0},
            {"state": LaunchState.SERVING},
        ]
    ):
        store.add_launch(launch_row(f"l{i}"))
        store.update_launch(f"l{i}", **{"state": LaunchState.ENDED, **columns})
    assert store.restore_failures("kimi", best, "b") == [5.0, 7.0, 10.0]
    store.forgive_failures("kimi")
    assert store.restore_failures("kimi", best, "b") == []


def test_what_a_best_known_did_before_it_won_does_not_count_against_it_but_the_server_that_won_does(
    store: Store,
) -> None:
    best = candidate().id
    for number, columns in enumerate(({"trial_id": 1}, {"trial_id": 2}, {})):
        store.add_launch(launch_row(f"l{number}", mono_s=float(number)))
        store.update_launch(f"l{number}", state=LaunchState.ENDED, **columns)
    store.promote("kimi", best, "a", 2, AT)
    assert store.restore_failures("kimi", best, "b") == [1.0, 2.0]


# --- the queue's order


def names(store: Store) -> str:
    return "".join(t.name for t in store.queue("kimi"))


def test_the_queue_is_by_priority_then_by_arrival(store: Store) -> None:
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 1), ("e", -1)):
        add(store, name, priority=priority)
    assert names(store) == "bdace"


def test_what_is_put_first_is_first_of_all(store: Store) -> None:
    ids = {name: add(store, name, priority=priority) for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -3))}
    store.put_first(ids["d"])
    assert names(store)[0] == "d"
    store.put_first(ids["c"])
    store.put_first(ids["c"])
    assert names(store)[:2] == "cd"
    store.put_first(ids["b"])
    assert names(store) == "bcda"
    add(store, "e", priority=5)
    assert names(store) == "bcdea"
    for name in "acde":
        store.move_trial(store.queue("kimi")[names(store).index(name)].id, TrialState.CANCELLED)
    store.put_first(ids["b"])
    assert names(store) == "b"


# --- many writers


def _write(path: str, start: Any, who: int, count: int) -> None:
    start.wait()
    store = Store(Path(path))
    for i in range(count):
        with store.transaction():
            add(store, f"{who}-{i}")
        store.add_entry(Draft("kimi", f"{who}-{i}", "x"), AT)  # on its own, as part of no transaction
    store.close()


def test_eight_processes_that_write_at_once_lose_nothing_and_number_entries_without_a_gap(tmp_path: Path) -> None:
    """They also all create the database at once."""
    path, start = tmp_path / "state.db", SPAWN.Event()
    writers = [SPAWN.Process(target=_write, args=(str(path), start, who, 15)) for who in range(8)]
    for writer in writers:
        writer.start()
    start.set()
    for writer in writers:
        writer.join(60)
    assert [w.exitcode for w in writers] == [0] * 8
    store = Store(path)
    trials, found = store.trials(), store.entries()
    assert {t.name for t in trials} == {e.title for e in found} == {f"{who}-{i}" for who in range(8) for i in range(15)}
    assert [t.id for t in trials] == list(range(1, 121))
    assert [t.id for t in store.queue("kimi")] == [t.id for t in trials]
    prev = GENESIS
    for number, entry in enumerate(found, 1):
        assert (entry.number, entry.prev) == (number, prev)
        prev = entry.sha256
        assert link(entry.prev, entry.text.rsplit("<!--", 1)[0]) == entry.sha256
    assert store.outbox("kimi").committed() == [(e.number, e.sha256) for e in found]
    assert store.db.check() == "ok"
    store.close()


def test_a_writer_killed_at_any_time_leaves_whole_transactions(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    program = (
        "import sys; sys.path[:0] = sys.argv[2:]; from pathlib import Path; import importlib.util\n"
        "spec = importlib.util.spec_from_file_location('t', sys.argv[3]); t = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(t); store = t.Store(Path(sys.argv[1])); print('go', flush=True); i = 0\n"
        "while True:\n"
        "    i += 1\n"
        "    with store.transaction():\n"
        "        trial = t.add(store, f'n{i}'); store.add_entry(t.Draft('kimi', f'n{i}', 'x'), t.AT, trial)\n"
        "    print(i, flush=True)"
    )
    for round_ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(path), str(Path(__file__).parents[3]), __file__], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"go\n"
            time.sleep(0.05 + 0.03 * round_)
            os.kill(writer.pid, signal.SIGKILL)
            said = writer.stdout.read().split()
        store = Store(path)
        trials, found = store.trials(), store.entries()
        assert [t.name for t in trials] == [e.title for e in found]
        assert [e.number for e in found] == list(range(1, len(found) + 1))
        assert not said or f"n{int(said[-1])}" in {t.name for t in trials}  # what was acknowledged is there
        assert store.db.check() == "ok"
        store.close()


def test_publishing_marks_all_up_to_a_number(store: Store) -> None:
    for i in range(4):
        store.add_entry(Draft("kimi", str(i), "x"), AT)
    assert (store.outbox("kimi").last_published(), store.outbox("kimi").published()) == (0, [])
    store.outbox("kimi").mark_published(2)
    store.outbox("kimi").mark_published(2)
    assert store.outbox("kimi").last_published() == 2
    assert store.outbox("kimi").published() == store.outbox("kimi").committed()[:2]
    assert [e.number for e in store.outbox("kimi").entries_after(2)] == [3, 4]


def test_no_secret_gets_into_an_entry(store: Store) -> None:
    store.secrets = frozenset({"hunter2-canary"})
    entry = store.add_entry(
        Draft("kimi", "hunter2-canary", "it said hunter2-canary", quote=("key=hunter2-canary",)), AT
    )
    assert "hunter2" not in entry.text
    assert all("hunter2" not in str(tuple(row)) for row in store.db.all("SELECT * FROM entries"))


def test_a_secret_gets_into_no_column_and_no_evidence(tmp_path: Path) -> None:
    """Whatever a server said is kept in texts and JSON; a number that looks like a secret stays a number."""
    store = Store(tmp_path / "state.db")
    store.secrets = frozenset({"hunter2/canary", "12345678"})
    candidate = Candidate(name="c", engine="sglang", launch=Launch(model="/m"))
    store.put_candidate(candidate, "", "c.toml")
    number = store.add_trial("kimi", candidate, ("default", Benchmark()), "2026-02-23 00:14:07Z")
    said = "it said hunter2/canary, hunter2%2Fcanary and aHVudGVyMi9jYW5hcnk="
    store.update_trial(number, reasons=json.dumps([said]))
    store.update_slot("kimi", paused=said)
    figures = Figures(
        concurrency=8,
        seconds=12345678.0,
        requests_ok=1,
        requests_failed=0,
        output_tok_s=1.0,
        output_tok_s_low=1.0,
        output_tok_s_high=1.0,
        tokens_per_event=1.0,
        tokens_counted=True,
    )
    result = LevelResult(concurrency=8, figures=figures)
    store.put_result(number, result, {"looks": [{"facts": {"server.sentence": said}}]})
    assert store.results(number) == (result,)
    kept = json.dumps([store.evidence(number, 8), store.slot("kimi").paused, store.trial(number).reasons])
    assert "canary" not in kept
    assert "aHVudGVy" not in kept
    store.close()
    everything = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"canary" not in everything


# --- transactions


def test_a_transaction_is_all_or_nothing_also_where_one_holds_another(store: Store) -> None:
    with pytest.raises(RuntimeError), store.transaction():  # noqa: PT012
        add(store, "x")
        with store.transaction():
            add(store, "y")
        store.add_entry(Draft("kimi", "t", "s"), AT)
        raise RuntimeError
    assert store.trials() == []
    assert store.entries() == []
    with store.transaction(), store.transaction():
        add(store, "z")
    assert [t.name for t in store.trials()] == ["z"]


def test_another_process_sees_a_commit_and_only_then(store: Store, tmp_path: Path) -> None:
    other = Store(tmp_path / "state" / "state.db")
    before = store.db.data_version()
    with other.transaction():
        add(other, "x")
        assert store.trials() == []
    assert [t.name for t in store.trials()] == ["x"]
    assert store.db.data_version() != before
    other.close()


def test_a_broken_reference_is_refused_and_not_called_damage(store: Store) -> None:
    with pytest.raises(StoreError, match="FOREIGN KEY") as caught:
        store.add_launch(launch_row(candidate_id="none"))
    assert "damaged" not in str(caught.value)


# --- a disk that is full, a file that is not right


def test_a_full_disk_is_recognised_and_leaves_nothing_half_applied(small_disk: Any, fill: Any) -> None:
    place = small_disk(256)
    store = Store(place / "state.db")
    store.put_candidate(candidate(), "", "")
    fill(place)
    added = 0
    with pytest.raises(DiskFull, match=r"state\.db"):  # noqa: PT012
        while True:
            with store.transaction():
                trial = store.add_trial("kimi", candidate(), BENCHMARK, AT)
                store.add_entry(Draft("kimi", str(trial), "x" * 1500), AT, trial)
            added += 1
    assert len(store.trials()) == len(store.entries()) == added
    assert store.db.check() == "ok"
    (place / "filler").unlink()
    with store.transaction():
        store.add_entry(Draft("kimi", str(store.add_trial("kimi", candidate(), BENCHMARK, AT)), "x"), AT)
    assert len(store.trials()) == len(store.entries()) == added + 1
    store.close()


def test_a_transaction_too_big_for_the_disk_is_a_full_disk(small_disk: Any) -> None:
    """SQLite rolls some of these back by itself, in the middle of them."""
    place = small_disk(512)
    store = Store(place / "state.db")
    store.put_candidate(candidate(), "", "")
    store.db.run("PRAGMA cache_size = 10")  # so that it spills to the disk before the commit
    with pytest.raises(DiskFull), store.transaction():  # noqa: PT012
        for i in range(2000):
            store.add_entry(Draft("kimi", str(i), "x" * 1500), AT)
    assert store.entries() == []
    assert not store.db._connection.in_transaction
    store.add_entry(Draft("kimi", "goes on", "x"), AT)
    store.close()


def test_what_sqlite_rolled_back_by_itself_is_still_the_error_that_it_was(store: Store) -> None:
    with pytest.raises(DiskFull), store.transaction():  # noqa: PT012
        add(store, "x")
        store.db._connection.execute("ROLLBACK")  # as SQLite does
        raise DiskFull("database or disk is full")
    assert store.trials() == []


def test_no_room_for_a_database_is_a_full_disk(small_disk: Any, fill: Any) -> None:
    place = small_disk(64)
    fill(place)
    with pytest.raises(DiskFull):
        Store(place / "state.db")


def test_a_schema_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = Store(path)
    store.db.run("UPDATE meta SET value = '99' WHERE key = 'schema'")
    store.close()
    with pytest.raises(StoreError, match=r"state\.db has schema 99; this autotuner knows 9"):
        Store(path)


def old_database(path: Path) -> None:
    """A database as schema 1 had it, with a launch and two entries in it."""
    store = Store(path)
    for number in (1, 2):
        store.add_entry(Draft("kimi", f"tried {number}", "It was tried."), AT, number)
    with_one_journal(store)
    store.put_candidate(candidate(), "name = 'a'", "a.toml")
    store.add_launch(launch_row("old", state=LaunchState.SERVING))
    for column in ("engine_version", "configuration", "gpu_pids"):
        store.db.run(f"ALTER TABLE launches DROP COLUMN {column}")
    for column in ("basis", "confirms", "parent", "answers", "alpha", "force"):
        store.db.run(f"ALTER TABLE trials DROP COLUMN {column}")
    for column in ("stopped", "force"):
        store.db.run(f"ALTER TABLE slots DROP COLUMN {column}")
    store.db.run("DROP TABLE policies")
    store.db.run("DROP TABLE proposals")
    store.db.run("ALTER TABLE results DROP COLUMN gaps")
    store.db.run("UPDATE meta SET value = '1' WHERE key = 'schema'")
    store.close()


def with_one_journal(store: Store) -> None:
    """Make the entries as they were when all slots had one journal."""
    columns = "number, slot, title, at, prev, sha256, text, trial_id, published"
    store.db.run(
        "CREATE TABLE old (number INTEGER PRIMARY KEY, slot TEXT NOT NULL, title TEXT NOT NULL, at TEXT NOT NULL,"
        " prev TEXT NOT NULL, sha256 TEXT NOT NULL, text TEXT NOT NULL, trial_id INTEGER,"
        " published INTEGER NOT NULL DEFAULT 0)"
    )
    store.db.run(f"INSERT INTO old SELECT {columns} FROM entries")
    store.db.run("DROP TABLE entries")
    store.db.run("ALTER TABLE old RENAME TO entries")


def test_a_database_of_the_first_schema_is_brought_up_to_date_with_all_that_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    old_database(path)
    for _ in range(2):  # once migrated, it just opens
        store = Store(path)
        (old,) = store.launches("kimi")
        assert (old.id, old.state, old.stages, old.engine_version) == ("old", LaunchState.SERVING, (), None)
        assert [(e.number, e.title) for e in store.entries()] == [(1, "tried 1"), (2, "tried 2")]
        assert store.journals() == [COMMON]
        assert store.db.one("SELECT value FROM meta WHERE key = 'schema'")[0] == SCHEMA_VERSION  # type: ignore[index]
        store.close()


def test_a_migrated_database_has_the_columns_of_a_new_one(tmp_path: Path) -> None:
    old_database(tmp_path / "old.db")
    columns = []
    for name in ("old.db", "new.db"):
        store = Store(tmp_path / name)
        tables = ("launches", "trials", "policies", "proposals", "results", "slots", "entries")
        columns.append([tuple(row)[1:] for table in tables for row in store.db.all(f"PRAGMA table_info({table})")])
        store.close()
    assert columns[0] == columns[1]


def test_a_migration_that_fails_leaves_the_database_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.db"
    old_database(path)
    steps = ("ALTER TABLE launches ADD COLUMN engine_version TEXT", "this is no SQL")
    monkeypatch.setitem(MIGRATIONS, "1", ("2", steps))
    with pytest.raises(StoreError, match="syntax error"):
        Store(path)
    monkeypatch.undo()
    store = Store(path)
    assert [row.id for row in store.launches("kimi")] == ["old"]
    store.close()


def test_programs_that_open_an_old_database_at_once_migrate_it_once(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    old_database(path)
    script = f"from pathlib import Path; from autotuner.edge.store import Store; Store(Path({str(path)!r})).launches()"
    running = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]


def served(store: Store, launch_id: str, version: str | None, ready_s: float, **columns: Any) -> None:
    store.add_launch(launch_row(launch_id, state=LaunchState.STARTING, **columns))
    store.launch_served(launch_id, ready_s, (("process up", 0.0), ("weights loading", 1.0)), version)


def test_the_stages_of_a_start_are_kept_with_the_version_that_it_started(store: Store) -> None:
    served(store, "l1", "0.5.12", 9.5)
    row = store.launch("l1")
    assert (row.state, row.ready_s, row.engine_version) == (LaunchState.SERVING, 9.5, "0.5.12")
    assert row.stages == (("process up", 0.0), ("weights loading", 1.0))


def test_earlier_starts_are_the_newest_of_the_same_version_else_of_any(store: Store) -> None:
    for number in range(7):
        served(store, f"l{number}", "0.5.12" if number < 6 else "0.5.15", float(number))
    store.add_launch(launch_row("failed", state=LaunchState.STARTING))
    store.add_launch(launch_row("late", state=LaunchState.STARTING))
    store.launch_served("late", 3.0, (), "0.5.15")  # its stages were not followed

    def found(version: str | None, of: Candidate | None = None) -> list[str]:
        return [row.id for row in earlier_starts(store, of or candidate(), version)]

    assert found("0.5.12") == ["l5", "l4", "l3", "l2", "l1"]
    assert found("0.5.15") == ["l6"]
    assert found("0.6") == found(None) == ["l6", "l5", "l4", "l3", "l2"]
    assert found("0.5.12", candidate("b", parallel=4)) == found("0.5.12"), "another candidate of the same model"
    assert found("0.5.12", Candidate(name="x", engine="llamacpp", launch=Launch(model="other"))) == []
    assert found("0.5.12", Candidate(name="x", engine="sglang", launch=Launch(model="m"))) == []
    nameless = Candidate(name="x", engine="command", launch=Launch(command=("serve", "{port}")))
    store.put_candidate(nameless, "text", "x.toml")
    served(store, "nameless", None, 1.0, candidate_id=nameless.id)
    assert found(None, nameless) == ["nameless"]
    assert found(None, Candidate(name="y", engine="command", launch=Launch(command=("other", "{port}")))) == []


def test_what_a_launch_resolved_is_kept_with_it(store: Store) -> None:
    resolved = Configuration(
        Effective(running_cap=48, speculating=True, version="0.5.12", source="server"),
        (Difference("running requests", "nothing", "48", "80 of 128 wait", "set it"),),
        "0123456789abcdef",
    )
    store.add_launch(launch_row())
    assert store.launch("l1").configuration is None
    store.update_launch("l1", configuration=configuration_json(resolved))
    assert store.launch("l1").configuration == resolved


def test_twins_are_other_candidates_of_one_identity_under_one_benchmark_that_came_to_an_end(store: Store) -> None:
    def tried(name: str, identity: str, *, end: bool = True, verdict: Verdict = Verdict.PASS) -> int:
        trial = add(store, name)
        store.move_trial(trial, TrialState.RUNNING)
        store.add_launch(launch_row(f"l{trial}", candidate_id=store.trial(trial).candidate_id, trial_id=trial))
        kept = configuration_json(Configuration(Effective(), (), identity))
        store.update_launch(f"l{trial}", configuration=kept)
        if end:
            store.move_trial(trial, TrialState.DONE, verdict=verdict)
        return trial

    first, second = tried("one", "x"), tried("two", "x", verdict=Verdict.FAIL)
    tried("other", "y")
    tried("broken", "x", verdict=Verdict.ERROR)
    again = tried("one", "x")
    mine = tried("three", "x", end=False)
    assert [t.id for t in store.twin_trials(store.trial(mine), "x")] == [again, second, first]
    assert [t.id for t in store.twin_trials(store.trial(again), "x")] == [second], "the same candidate is tried again"
    assert store.twin_trials(store.trial(mine), "z") == []


def test_a_damaged_file_is_said_to_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(b"this is no database at all" * 100)
    with pytest.raises(StoreError, match=rf"the state database {path} is damaged: file is not a database"):
        Store(path)
    path.unlink()
    store = Store(path)
    store.put_candidate(candidate(), "x" * 100_000, "")
    for i in range(200):
        store.add_entry(Draft("kimi", str(i), "x" * 500), AT)
    store.close()
    data = bytearray(path.read_bytes())
    data[4096 * 30 : -4096] = os.urandom(len(data) - 4096 * 31)  # beyond the schema, so that it opens
    path.write_bytes(data)
    store = Store(path)
    with pytest.raises(StoreError, match="is damaged"):
        store.entries()
    try:
        assert store.db.check() != "ok"
    except StoreError as error:
        assert "damaged" in str(error)  # noqa: PT017
    store.close()


def test_a_path_that_can_hold_no_database_is_said_clearly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/state\.db"):
        Store(tmp_path / "file" / "state.db")
    (tmp_path / "dir" / "state.db").mkdir(parents=True)
    with pytest.raises(StoreError, match="unable to open"):
        Store(tmp_path / "dir" / "state.db")


def test_a_database_that_stays_locked_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotuner.edge.database.BUSY_TIMEOUT_S", 0.1)
    store = Store(tmp_path / "state.db")
    holder = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"), store.transaction():
        raise AssertionError("must not get here")
    holder.execute("ROLLBACK")
    holder.close()
    with store.transaction():
        add(store, "x")
    store.close()


def test_every_commit_is_synced(tmp_path: Path) -> None:
    database = Database(tmp_path / "state.db")
    assert database.one("PRAGMA journal_mode")[0] == "wal"  # type: ignore[index]
    assert database.one("PRAGMA synchronous")[0] == 2  # type: ignore[index]
    database.close()


def test_what_an_earlier_process_left_in_the_log_is_durable_before_anything_is_built_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed sync the frames are read back and are not on the disk: they must be written again, then synced."""
    path = tmp_path / "state.db"
    earlier = Store(path)
    earlier.put_candidate(candidate(), "", "a.toml")
    log = Path(f"{path}-wal")
    frames = log.read_bytes()
    done: list[str] = []
    write, sync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda fd, data: done.append(f"wrote {len(data)}") or write(fd, data))
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(f"synced {os.readlink(f'/proc/self/fd/{fd}')}") or sync(fd))
    later = Store(path)
    assert not [what for what in done if what != f"synced {tmp_path.parent}"], "who only reads writes nothing"
    done.clear()
    with later.transaction():
        assert done == [f"wrote {len(frames)}", f"synced {log}"]
        assert log.read_bytes() == frames
    with later.transaction():
        later.update_slot("kimi", paused="x")
    assert len(done) == 2, "once a process"
    later.close()
    earlier.close()


def test_a_log_that_cannot_be_made_durable_acknowledges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = Store(tmp_path / "state.db")
    earlier.put_candidate(candidate(), "", "a.toml")

    def refuse(fd: int) -> None:
        raise OSError(5, "Input/output error")

    later = Store(tmp_path / "state.db")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", refuse)
        with pytest.raises(StoreError, match="Input/output error"):
            later.update_slot("kimi", paused="x")
    assert later.slot("kimi").paused == ""
    later.update_slot("kimi", paused="x")
    assert earlier.slot("kimi").paused == "x"
    later.close()
    earlier.close()


# --- what is asked each cycle does not grow with the record


def test_the_latest_answers_of_a_candidate_are_found(store: Store) -> None:
    first, second, third = add(store), add(store), add(store)
    made = store.trial(first).candidate_id
    assert store.last_answers("kimi", made) == ()
    store.update_trial(first, answers='["old"]')
    store.update_trial(second, answers='["new", "er"]')
    assert store.trial(third).answers == ()
    assert store.last_answers("kimi", made) == ("new", "er")
    assert store.last_answers("other", made) == ()


def test_launches_of_a_candidate_before_one_are_counted_without_restores(store: Store) -> None:
    for number, trial in enumerate((1, None, 1, 2)):
        store.add_launch(launch_row(f"l{number}", trial_id=trial))
    assert [store.launches_before(store.launch(f"l{number}")) for number in range(4)] == [0, 1, 1, 2]


def test_the_cause_of_the_last_end_is_found_without_those_that_tell_none(store: Store) -> None:
    assert store.last_diagnosis("kimi") is None
    for number, cause in enumerate(("cuda-oom", "port-taken", None)):
        store.add_launch(launch_row(f"l{number}", state=LaunchState.ENDED))
        if cause:
            store.update_launch(
                f"l{number}", diagnosis=TypeAdapter(Diagnosis).dump_json(Diagnosis(cause, "x")).decode()
            )
    store.add_launch(launch_row("l9"))
    found = store.last_diagnosis("kimi")
    assert found is not None
    assert found.cause == "port-taken"
    assert store.last_diagnosis("other") is None


def test_the_ladder_has_each_candidate_once_at_its_latest_and_no_more_than_its_rungs(store: Store) -> None:
    trials = [(name, add(store, name)) for name in "abcadb"]
    rungs = [(store.trial(trial).candidate_id, name, trial) for name, trial in trials]
    for candidate_id, name, trial in rungs:
        store.promote("kimi", candidate_id, name, trial, AT)
    a, d, b = rungs[3:]
    assert store.ladder("kimi") == [b, d, a]
    assert store.ladder("kimi", 1) == [b]
    assert store.ladder("other") == []


def test_trials_are_read_without_what_their_verdicts_were_made_from(store: Store) -> None:
    trial = add(store)
    asked: list[str] = []
    store.db._connection.set_trace_callback(asked.append)
    assert [t.id for t in store.trials_under("kimi", BENCHMARK[1].hash)] == [t.id for t in store.trials()] == [trial]
    assert asked
    assert not any("*" in sql or "basis" in sql for sql in asked)


def test_only_trials_that_were_begun_cost_a_campaign(store: Store) -> None:
    first, second, third = add(store), add(store), add(store)
    for trial in (first, third):
        store.update_trial(trial, begun_at=AT)
    assert [t.id for t in store.begun_trials("kimi", 0)] == [first, third]
    assert [t.id for t in store.begun_trials("kimi", first)] == [third]
    assert store.begun_trials("kimi", second)[0].id == third


def test_the_last_launch_of_a_boot_is_known_once_it_has_ended(store: Store) -> None:
    assert store.last_ended("kimi", "b") is None
    store.add_launch(launch_row("l1", state=LaunchState.ENDED))
    store.add_launch(launch_row("l2", boot_id="other", state=LaunchState.ENDED))
    found = store.last_ended("kimi", "b")
    assert found is not None
    assert found.id == "l1"
    store.add_launch(launch_row("l3"))
    assert store.last_ended("kimi", "b") is None


def test_each_slot_has_its_own_numbers_and_its_own_chain(store: Store) -> None:
    for slot in ("a", "b", "a", "a"):
        store.add_entry(Draft(slot, f"of {slot}", "x"), AT)
    assert [(e.slot, e.number) for e in store.entries()] == [("a", 1), ("b", 1), ("a", 2), ("a", 3)]
    for slot, count in (("a", 3), ("b", 1)):
        found, prev = store.outbox(slot).entries_after(0), GENESIS
        assert (len(found), {e.slot for e in found}) == (count, {slot})
        for entry in found:
            assert entry.prev == prev
            prev = entry.sha256
    store.outbox("a").mark_published(2)
    assert (store.outbox("a").last_published(), store.outbox("b").last_published()) == (2, 0)
    assert store.journals() == ["a", "b"]


@pytest.mark.parametrize("at_start", [True, False])
def test_what_was_one_journal_of_all_slots_is_closed_once_and_each_slot_goes_on_from_it(
    tmp_path: Path, at_start: bool
) -> None:
    store = Store(tmp_path / "state.db")
    for number in (1, 2):
        store.add_entry(Draft("a", f"tried {number}", "x"), AT)
    with_one_journal(store)
    store.db.run("ALTER TABLE launches DROP COLUMN gpu_pids")
    store.db.run("UPDATE meta SET value = '7' WHERE key = 'schema'")
    store.close()
    store = Store(tmp_path / "state.db")
    if at_start:  # at its start a daemon ends it; else the next entry of any slot does
        store.close_common(AT)
    for slot in ("b", "a", "b"):
        store.add_entry(Draft(slot, "tried", "x"), AT)
    store.close_common(AT)
    shown = [(e.slot, e.number, e.title) for e in store.entries()[1:]]
    ended = [("a", 2, "tried 2"), (NO_SLOT, 3, "journal closed")]
    assert shown == [*ended, ("b", 4, "tried"), ("a", 4, "tried"), ("b", 5, "tried")]
    last = store.outbox(COMMON).entries_after(2)[-1]
    for slot in ("a", "b"):
        first = store.outbox(slot).entries_after(0)[0]
        assert (first.number, first.prev) == (last.number + 1, last.sha256)
        assert "the journal of all slots, which ended with entry 0003" in first.text
        assert store.outbox(slot).origin == store.outbox("of a slot to come").origin == (3, last.sha256)
    assert "- Told of so far: a" in last.text
    store.close()


def test_entries_are_published_up_to_a_number(store: Store) -> None:
    assert (
        store.outbox("kimi").last_entry(),
        store.outbox("kimi").last_published(),
        store.outbox("kimi").entry_hash(1),
    ) == (0, 0, "")
    entries = [store.add_entry(Draft("kimi", "note", "Something."), AT) for _ in range(4)]
    store.outbox("kimi").mark_published(2)
    assert (store.outbox("kimi").last_entry(), store.outbox("kimi").last_published()) == (4, 2)
    store.outbox("kimi").mark_published(4)
    assert [number for number, _ in store.outbox("kimi").published()] == [1, 2, 3, 4]
    assert store.outbox("kimi").entry_hash(3) == entries[2].sha256


def test_concluded_trials_after_an_entry_are_told_apart(store: Store) -> None:
    for number in (1, 2):
        trial = add(store, f"c{number}")
        store.move_trial(trial, TrialState.RUNNING)
        store.move_trial(trial, TrialState.DONE, basis=basis_json(unbounded()), entry=number)
    assert [name for _, name, _ in store.bases("kimi", BENCHMARK[1].hash)] == ["c1", "c2"]
    assert [name for _, name, _ in store.bases("kimi", BENCHMARK[1].hash, 1)] == ["c2"]


def test_launches_to_keep_are_those_that_run_the_newest_of_each_slot_and_the_last_of_each_best_known(
    store: Store,
) -> None:
    for number in range(6):
        store.put_candidate(made := candidate(f"c{number}", flag=str(number)), "", "")
        store.add_launch(launch_row(f"l{number}", candidate_id=made.id))
        if number:
            store.update_launch(f"l{number}", state=LaunchState.ENDED)
        if number == 2:
            store.promote("kimi", made.id, made.name, 1, AT)
    assert store.launches_to_keep(["kimi"], 2) == {"l0", "l2", "l4", "l5"}
    assert store.launches_to_keep(["other"], 2) == {"l0"}
    assert [store.has_ended(name) for name in ("l0", "l1", "nobody's")] == [False, True, False]
