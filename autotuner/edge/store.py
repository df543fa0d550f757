"""The state of every slot in SQLite: queue, trials, launches, best-known, outbox. Every change is one transaction.

SQLite is the state, and the journal is its projection: an entry is committed here together with the outcome it
explains, and only then appended to the journal. Rows go out as the core's own types.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from autotuner.bench.benchmark import Benchmark, Level, level_name
from autotuner.core.candidate import Candidate
from autotuner.core.effective import Configuration
from autotuner.core.policy import Policy, load_policy
from autotuner.core.source import Source
from autotuner.core.state import LaunchState, TrialState, launch_may, trial_may
from autotuner.core.verdict import LevelResult, TrialSoFar
from autotuner.edge.database import Database
from autotuner.edge.outbox import Outboxes
from autotuner.edge.proposals import Proposals
from autotuner.edge.rows import (
    LaunchRow,
    SlotRow,
    Trial,
    configuration_json,
    plain_json,
    read_basis,
    read_candidate,
    read_result,
    read_row,
)
from autotuner.engines.base import Diagnosis
from autotuner.errors import NotFound, StoreError

MEASURED_MAX = 50  # launches of a best-known that are looked at; one that serves for years has thousands
_OF_TRIAL = ", ".join(Trial.__annotations__)
_WAITING = "slot = ? AND state = 'queued'"
RECENT_LAUNCHES = 5000  # more than can fail within the window of the restart budget


class Store(Outboxes):
    """Reads and writes the state."""

    def __init__(self, path: Path) -> None:
        super().__init__(Database(path))
        self.proposals = Proposals(self.db)

    def close(self) -> None:
        """Close the database."""
        self.db.close()

    def version(self) -> tuple[int, int]:
        """Return what changes with each change of the state, whoever made it: this program or another."""
        return self.db.data_version(), self.db.changes

    def transaction(self) -> AbstractContextManager[None]:
        """Group changes: all of them are committed together, or none."""
        return self.db.transaction()

    # --- candidates and the queue

    def put_candidate(self, candidate: Candidate, source: str, source_name: str) -> None:
        """Keep a candidate under its id; the first file that described it stays on record."""
        self.db.run(
            "INSERT OR IGNORE INTO candidates VALUES (?, ?, ?, ?)",
            candidate.id,
            candidate.model_dump_json(),
            source,
            source_name,
        )

    def candidate(self, candidate_id: str) -> Candidate:
        """Return the candidate with this id. Raise NotFound."""
        row = self.db.one("SELECT body FROM candidates WHERE id = ?", candidate_id)
        if row is None:
            raise NotFound(f"there is no candidate {candidate_id}")
        return read_candidate(row["body"])

    def candidate_source(self, candidate_id: str) -> tuple[str, str]:
        """Return the name and the text of the file that a candidate came from. Raise NotFound."""
        row = self.db.one("SELECT source_name, source FROM candidates WHERE id = ?", candidate_id)
        if row is None:
            raise NotFound(f"there is no candidate {candidate_id}")
        return row["source_name"], row["source"]

    def add_trial(
        self,
        slot: str,
        candidate: Candidate,
        benchmark: tuple[str, Benchmark],
        at: str,
        *,
        priority: int = 0,
        is_baseline: bool = False,
        confirms: int | None = None,
        parent: int | None = None,
    ) -> int:
        """Put a trial at the end of its priority in the queue; `benchmark` is (name, definition). Return its id.

        `confirms` is the trial whose win it measures again, or, of a baseline, for whose sake the best-known is; `parent`
        is the one whose rule proposed it, or, of a baseline, the measurement that it repeats.
        """
        cursor = self.db.run(
            "INSERT INTO trials (slot, candidate_id, name, hypothesis, benchmark, benchmark_hash, benchmark_body, state,"
            " priority, is_baseline, confirms, parent, enqueued_at, position) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?,"
            " (SELECT COALESCE(MAX(position), 0) + 1 FROM trials WHERE slot = ?))",
            *(slot, candidate.id, candidate.name, candidate.hypothesis, benchmark[0], benchmark[1].hash),
            *(benchmark[1].model_dump_json(), TrialState.QUEUED, priority, is_baseline, confirms, parent, at, slot),
        )
        return int(cursor.lastrowid or 0)

    def same_trials(self, slot: str, candidate_id: str, benchmark_hash: str) -> list[Trial]:
        """Return earlier trials of this candidate under this benchmark, newest first, without cancelled ones."""
        return self._trials(
            "slot = ? AND candidate_id = ? AND benchmark_hash = ? AND state != 'cancelled' ORDER BY id DESC",
            *(slot, candidate_id, benchmark_hash),
        )

    def confirming(self, win: int) -> list[Trial]:
        """Return the trials that were queued because this trial won: of the winner and of the best-known, oldest first."""
        return self._trials("confirms = ? ORDER BY id", win)

    def trial(self, trial_id: int) -> Trial:
        """Return the trial with this number. Raise NotFound."""
        found = self._trials("id = ?", trial_id)
        if not found:
            raise NotFound(f"there is no trial {trial_id}")
        return found[0]

    def trials(self, slot: str | None = None) -> list[Trial]:
        """Return every trial, oldest first."""
        return self._trials("(? IS NULL OR slot = ?) ORDER BY id", slot, slot)

    def trials_under(self, slot: str, benchmark_hash: str) -> list[Trial]:
        """Return every trial under a benchmark, oldest first."""
        return self._trials("slot = ? AND benchmark_hash = ? ORDER BY id", slot, benchmark_hash)

    def begun_trials(self, slot: str, after: int) -> list[Trial]:
        """Return the trials after this one that were begun, oldest first: what a campaign has cost."""
        return self._trials("slot = ? AND id > ? AND begun_at IS NOT NULL ORDER BY id", slot, after)

    def queue(self, slot: str) -> list[Trial]:
        """Return the trials that wait, next first."""
        return self._trials(f"{_WAITING} ORDER BY priority DESC, position, id", slot)

    def next_queued(self, slot: str) -> Trial | None:
        """Return the trial that is next, if any waits."""
        found = self._trials(f"{_WAITING} ORDER BY priority DESC, position, id LIMIT 1", slot)
        return found[0] if found else None

    def trial_in_hand(self, slot: str) -> Trial | None:
        """Return the trial that is being worked, if any."""
        return next(iter(self._trials("slot = ? AND state = 'running'", slot)), None)

    def move_trial(self, trial_id: int, state: TrialState, **columns: Any) -> None:
        """Bring a trial into another state, with other columns. Raise StoreError for a step that is not legal."""
        with self.transaction():  # another process may move it too, and only one of two steps can be legal
            old = self.trial(trial_id).state
            if not trial_may(old, state):
                raise StoreError(f"trial {trial_id} cannot go from {old} to {state}")
            self.update_trial(trial_id, state=state, **columns)

    def update_trial(self, trial_id: int, **columns: Any) -> None:
        """Set columns of a trial."""
        self._update("trials", "id", trial_id, columns)

    def put_first(self, trial_id: int) -> None:
        """Move a queued trial to the head of its slot's queue."""
        with self.transaction():
            trial = self.trial(trial_id)
            row = self.db.one(
                "SELECT MIN(position), MAX(priority) FROM trials WHERE slot = ? AND state = 'queued' AND id != ?",
                *(trial.slot, trial_id),
            )
            position, priority = (row[0], row[1]) if row and row[0] is not None else (1.0, trial.priority)
            self.update_trial(trial_id, position=position - 1, priority=max(priority, trial.priority))

    # --- what was measured

    def put_result(self, trial_id: int, result: LevelResult, evidence: dict[str, Any]) -> None:
        """Keep one level's result and, compressed, what it rests on; gaps between events in a column of their own."""
        body = self.db.hidden(plain_json(result.model_dump(mode="json")))
        samples = evidence.get("samples") or {}
        gaps = base64.b64decode(samples["gaps"]) if samples.get("gaps") else None
        if gaps is not None:
            evidence = {**evidence, "samples": {key: value for key, value in samples.items() if key != "gaps"}}
        packed = zlib.compress(json.dumps(self.db.hidden(evidence), separators=(",", ":")).encode(), 6)
        self.db.run(
            "INSERT OR REPLACE INTO results (trial_id, level, body, evidence, gaps) VALUES (?, ?, ?, ?, ?)",
            *(trial_id, result.concurrency, body, packed, gaps),
        )

    def results(self, trial_id: int) -> tuple[LevelResult, ...]:
        """Return a trial's measured levels, in their order."""
        rows = self.db.all("SELECT body FROM results WHERE trial_id = ? ORDER BY level", trial_id)
        return tuple(read_result(row["body"]) for row in rows)

    def evidence(self, trial_id: int, level: Level) -> dict[str, Any]:
        """Return what one level's result rests on. Raise NotFound."""
        row = self.db.one("SELECT evidence, gaps FROM results WHERE trial_id = ? AND level = ?", trial_id, level)
        if row is None or row["evidence"] is None:
            load = Benchmark.model_validate_json(self.trial(trial_id).benchmark_body).load
            raise NotFound(f"nothing is kept of trial {trial_id} at {level_name(load, level)}")
        loaded: dict[str, Any] = json.loads(zlib.decompress(row["evidence"]))
        if row["gaps"] is not None:
            loaded["samples"]["gaps"] = base64.b64encode(row["gaps"]).decode("ascii")
        return loaded

    def drop_results(self, trial_id: int) -> None:
        """Forget what an interrupted trial measured."""
        self.db.run("DELETE FROM results WHERE trial_id = ?", trial_id)

    def keep_policies(self, policies: tuple[Policy, ...]) -> None:
        """Keep the text of policies that a level was looked at with."""
        for policy in policies:
            self.db.run("INSERT OR IGNORE INTO policies VALUES (?, ?, ?)", policy.sha256, policy.file, policy.text)

    def kept_policies(self) -> dict[str, Policy]:
        """Return every policy that was kept, by the hash of its text."""
        rows = self.db.all("SELECT * FROM policies")
        return {row["sha256"]: load_policy(Source(row["file"], row["text"])) for row in rows}

    def basis(self, trial_id: int) -> TrialSoFar | None:
        """Return what a trial's verdict was made from; None for one that was concluded before that was recorded."""
        row = self.db.one("SELECT basis FROM trials WHERE id = ?", trial_id)
        return read_basis(row["basis"]) if row is not None and row["basis"] is not None else None

    def error_spent(self, slot: str, after: int) -> tuple[float, int]:
        """Return what the concluded trials of a slot after this one have spent of its campaign's error budget, and how many.

        One of which nothing was measured could not be wrong by chance, and has spent nothing.
        """
        row = self.db.one(
            "SELECT COALESCE(SUM(COALESCE(alpha, json_extract(basis, '$.alpha'))), 0), COUNT(*) FROM trials"
            " WHERE slot = ? AND id > ? AND NOT is_baseline AND basis IS NOT NULL"
            " AND EXISTS (SELECT 1 FROM results WHERE trial_id = trials.id)",
            *(slot, after),
        )
        return (float(row[0]), int(row[1])) if row else (0.0, 0)

    def bases(self, slot: str, benchmark_hash: str, after: int = 0) -> Iterator[tuple[str, str, TrialSoFar]]:
        """Yield (candidate id, name, what the verdict was made from) of a benchmark's concluded trials, oldest first.

        `after` leaves out those that were concluded by this entry or before. One is read at a time: all of them are large.
        """
        rows = self.db.all(
            "SELECT id, candidate_id, name FROM trials WHERE slot = ? AND benchmark_hash = ? AND state = 'done'"
            " AND basis IS NOT NULL AND COALESCE(entry, 1) > ? ORDER BY entry, id",
            *(slot, benchmark_hash, after),
        )
        for row in rows:
            if (basis := self.basis(row["id"])) is not None:
                yield row["candidate_id"], row["name"], basis

    def last_answers(self, slot: str, candidate_id: str) -> tuple[str, ...]:
        """Return a candidate's latest answers to the fixed prompts; empty if it has given none."""
        row = self.db.one(
            "SELECT answers FROM trials WHERE slot = ? AND candidate_id = ? AND answers != '[]' ORDER BY id DESC LIMIT 1",
            *(slot, candidate_id),
        )
        return tuple(json.loads(row["answers"])) if row is not None else ()

    # --- launches

    def add_launch(self, launch: LaunchRow) -> None:
        """Commit the intent to start a server."""
        self.db.run(
            "INSERT INTO launches (id, slot, candidate_id, name, purpose, trial_id, state, intended_at, boot_id, mono_s,"
            " gpu_used_mib) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(launch.id, launch.slot, launch.candidate_id, launch.name, launch.purpose, launch.trial_id, launch.state),
            *(launch.intended_at, launch.boot_id, launch.mono_s, json.dumps(launch.gpu_used_mib)),
        )

    def move_launch(self, launch_id: str, state: LaunchState, **columns: Any) -> None:
        """Bring a launch into another state, with other columns. Raise StoreError for a step that is not legal."""
        with self.transaction():
            old = self.launch(launch_id).state
            if not launch_may(old, state):
                raise StoreError(f"launch {launch_id} cannot go from {old} to {state}")
            self.update_launch(launch_id, state=state, **columns)

    def update_launch(self, launch_id: str, **columns: Any) -> None:
        """Set columns of a launch."""
        self._update("launches", "id", launch_id, columns)

    def note_gpu_pids(self, launch_id: str, pids: Iterable[int]) -> None:
        """Record which processes were seen on the GPUs as a launch's own; none once its memory is back."""
        self.update_launch(launch_id, gpu_pids=json.dumps(sorted(pids)))

    def launch(self, launch_id: str) -> LaunchRow:
        """Return the launch with this id. Raise NotFound."""
        found = self.launches_where("id = ?", launch_id)
        if not found:
            raise NotFound(f"there is no launch {launch_id}")
        return found[0]

    def open_launches(self, slot: str) -> list[LaunchRow]:
        """Return the launches that have not ended."""
        return self.launches_where("slot = ? AND state != 'ended' ORDER BY intended_at, id", slot)

    def launches_before(self, launch: LaunchRow) -> int:
        """Count the launches of the same candidate that were for trials before this one."""
        row = self.db.one(
            "SELECT COUNT(*) FROM launches WHERE slot = ? AND candidate_id = ? AND trial_id IS NOT NULL"
            " AND rowid < (SELECT rowid FROM launches WHERE id = ?)",
            *(launch.slot, launch.candidate_id, launch.id),
        )
        return int(row[0]) if row else 0

    def last_ended(self, slot: str, boot_id: str) -> LaunchRow | None:
        """Return the last launch of this boot, if it has ended."""
        found = self.launches_where("slot = ? AND boot_id = ? ORDER BY rowid DESC LIMIT 1", slot, boot_id)
        return found[0] if found and found[0].state is LaunchState.ENDED else None

    def last_levels(self, slot: str) -> dict[int, float]:
        """Return the GPU memory before the last launch for which it was known, of any boot; empty if there is none."""
        found = self.launches_where("slot = ? AND gpu_used_mib != '{}' ORDER BY rowid DESC LIMIT 1", slot)
        return found[0].gpu_used_mib if found else {}

    def last_diagnosis(self, slot: str) -> Diagnosis | None:
        """Return why the last launch that ended with a known cause did; None without one."""
        found = self.launches_where(
            "slot = ? AND state = 'ended' AND diagnosis IS NOT NULL ORDER BY rowid DESC LIMIT 1", slot
        )
        return found[0].diagnosis if found else None

    def launches(self, slot: str | None = None, trial_id: int | None = None) -> list[LaunchRow]:
        """Return launches, oldest first."""
        return self.launches_where(
            "(? IS NULL OR slot = ?) AND (? IS NULL OR trial_id = ?) ORDER BY rowid", slot, slot, trial_id, trial_id
        )

    def launches_to_keep(self, slots: Iterable[str], newest: int) -> set[str]:
        """Return the ids of launches that have not ended, of so many newest of each slot, and of each best-known's last."""
        kept = {row["id"] for row in self.db.all("SELECT id FROM launches WHERE state != 'ended'")}
        for slot in slots:
            last = "SELECT id FROM launches WHERE +slot = ? ORDER BY rowid DESC LIMIT ?"
            kept |= {row["id"] for row in self.db.all(last, slot, newest)}
            for candidate, _, _ in self.ladder(slot):
                mine = "SELECT id FROM launches WHERE +slot = ? AND candidate_id = ? ORDER BY rowid DESC LIMIT 1"
                kept |= {row["id"] for row in self.db.all(mine, slot, candidate)}
        return kept

    def has_ended(self, launch_id: str) -> bool:
        """Tell whether a launch is on record as ended; one that nobody knows is not."""
        return self.db.one("SELECT 1 FROM launches WHERE id = ? AND state = 'ended'", launch_id) is not None

    def twin_trials(self, trial: Trial, identity: str) -> list[Trial]:
        """Return the ended trials of other candidates on servers of this identity, under one benchmark, newest first."""
        return self._trials(
            "slot = ? AND benchmark_hash = ? AND candidate_id != ? AND id != ? AND state = 'done' AND verdict != 'error'"
            " AND EXISTS (SELECT 1 FROM launches WHERE trial_id = trials.id"
            " AND json_extract(configuration, '$.identity') = ?) ORDER BY id DESC",
            *(trial.slot, trial.benchmark_hash, trial.candidate_id, trial.id, identity),
        )

    def restore_failures(self, slot: str, candidate_id: str, boot_id: str) -> list[float]:
        """Return when the launches of a best-known began that ended without being asked to, in this boot, oldest first.

        Those since a trial made it the best-known, that trial's own included, and since a person last forgave them.
        """
        rows = self.db.all(
            "SELECT mono_s FROM launches WHERE slot = ?1 AND candidate_id = ?2 AND state = 'ended' AND end_asked = 0"
            " AND boot_id = ?3 AND rowid > (SELECT COALESCE(MAX(failures_from), 0) FROM slots WHERE name = ?1)"
            " AND rowid > (SELECT COALESCE(MAX(rowid), 0) FROM launches) - ?4"
            " AND rowid >= (SELECT COALESCE(MAX(rowid), 0) FROM launches WHERE trial_id = (SELECT trial_id FROM incumbents"
            " WHERE slot = ?1 AND candidate_id = ?2 ORDER BY id DESC LIMIT 1)) ORDER BY mono_s",
            *(slot, candidate_id, boot_id, RECENT_LAUNCHES),
        )
        return [row["mono_s"] for row in rows]

    def forgive_failures(self, slot: str) -> None:
        """Begin the restart budget anew: a person has looked, and asks for another try."""
        row = self.db.one("SELECT COALESCE(MAX(rowid), 0) FROM launches")
        self.update_slot(slot, failures_from=int(row[0]) if row else 0)

    def launch_served(
        self,
        launch_id: str,
        ready_s: float,
        stages: tuple[tuple[str, float], ...],
        engine_version: str | None = None,
        configuration: Configuration | None = None,
    ) -> None:
        """Record that a launch serves, how long that took, when it reached each stage, and what it resolved."""
        resolved = configuration_json(configuration) if configuration is not None else None
        columns = {"ready_s": ready_s, "stages": json.dumps(stages), "engine_version": engine_version}
        self.move_launch(launch_id, LaunchState.SERVING, configuration=resolved, **columns)

    # --- the best-known

    def promote(self, slot: str, candidate_id: str, name: str, trial_id: int, at: str) -> None:
        """Make a candidate the best-known of a slot."""
        self.db.run(
            "INSERT INTO incumbents (slot, candidate_id, name, trial_id, at) VALUES (?, ?, ?, ?, ?)",
            *(slot, candidate_id, name, trial_id, at),
        )

    def ladder(self, slot: str, rungs: int = 3) -> list[tuple[str, str, int]]:
        """Return (candidate id, name, trial) of the last best-known ones, newest first, each candidate once."""
        rows = self.db.all(
            "SELECT candidate_id, name, trial_id, MAX(id) FROM incumbents WHERE slot = ? GROUP BY candidate_id"
            " ORDER BY MAX(id) DESC LIMIT ?",  # beside MAX, SQLite takes the other columns from the row that has it
            *(slot, rungs),
        )
        return [(row["candidate_id"], row["name"], row["trial_id"]) for row in rows]

    def measured(self, slot: str, candidate_id: str, benchmark_hash: str) -> list[Trial]:
        """Return the last trials in which a candidate was measured to the end under a benchmark, newest first."""
        return self._trials(
            "slot = ? AND candidate_id = ? AND benchmark_hash = ? AND state = 'done'"
            " AND verdict IN ('pass', 'inconclusive') ORDER BY id DESC LIMIT ?",
            *(slot, candidate_id, benchmark_hash, MEASURED_MAX),
        )

    # --- slots

    def slot(self, name: str) -> SlotRow:
        """Return what was said about a slot; a slot nobody has spoken of is plain."""
        row = self.db.one("SELECT * FROM slots WHERE name = ?", name)
        if row is None:
            return SlotRow(name)
        return SlotRow(**{**dict(row), "restore_hold": bool(row["restore_hold"]), "force": bool(row["force"])})

    def update_slot(self, name: str, **columns: Any) -> None:
        """Set columns of a slot."""
        with self.transaction():
            self.db.run("INSERT OR IGNORE INTO slots (name) VALUES (?)", name)
            self._update("slots", "name", name, columns)

    # --- rows

    def _update(self, table: str, key: str, value: Any, columns: dict[str, Any]) -> None:
        if columns:
            sets = ", ".join(f"{column} = ?" for column in columns)
            values = [self.db.hidden(column) for column in columns.values()]
            self.db.run(f"UPDATE {table} SET {sets} WHERE {key} = ?", *values, value)  # noqa: S608

    def _trials(self, where: str, *values: Any) -> list[Trial]:
        query = f"SELECT {_OF_TRIAL} FROM trials WHERE {where}"  # noqa: S608 - the basis of each is large, and left out
        return [read_row(Trial, row) for row in self.db.all(query, *values)]

    def launches_where(self, where: str, *values: Any) -> list[LaunchRow]:
        """Return the launches for which a condition in SQL, with its order and limit, holds."""
        return [read_row(LaunchRow, row) for row in self.db.all(f"SELECT * FROM launches WHERE {where}", *values)]  # noqa: S608
