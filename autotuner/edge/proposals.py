"""What rules proposed, in the state database: wanted while a trial runs, worked out once it is over, then queued or not."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from autotuner.bench.benchmark import Level
from autotuner.core.candidate import Candidate
from autotuner.core.policy import Fired
from autotuner.core.state import ProposalState
from autotuner.edge.database import Database
from autotuner.engines.base import Effective

_KNOWN = TypeAdapter(Effective)


@dataclass(frozen=True)
class ProposalRow:
    """One rule's proposal on one trial. `candidate`, `said`, `gain` and `gpu_s` are there once it was worked out."""

    id: int
    trial_id: int
    slot: str
    state: ProposalState
    fired: Fired
    level: Level | None
    known: Effective | None
    at: str
    name: str
    candidate: Candidate | None
    file: str
    said: str
    gain: float | None
    gpu_s: float | None
    why: str
    queued_as: int | None


class Proposals:
    """Reads and writes the table of proposals."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def want(
        self, slot: str, trial_id: int, fired: Iterable[Fired], level: Level | None, known: Effective | None, at: str
    ) -> None:
        """Note what rules propose on a trial; each rule once a trial, where it fired first."""
        body = _KNOWN.dump_json(known).decode() if known is not None else None
        for one in fired:
            if any((row.fired.file, row.fired.rule) == (one.file, one.rule) for row in self.of_trial(trial_id)):
                continue
            self._db.run(
                "INSERT INTO proposals (trial_id, slot, state, fired, level, known, at) VALUES (?, ?, ?, ?, ?, ?, ?)",
                *(trial_id, slot, ProposalState.WANTED, one.model_dump_json(), level, body, at),
            )

    def of_trial(self, trial_id: int) -> list[ProposalRow]:
        """Return what was proposed on a trial: what is worth most first, then in the order in which it was noted."""
        return self._rows("trial_id = ? ORDER BY gain IS NULL, -gain / MAX(1.0, COALESCE(gpu_s, 1.0)), id", trial_id)

    def of_slot(self, slot: str | None = None) -> list[ProposalRow]:
        """Return every proposal, oldest first."""
        return self._rows("(? IS NULL OR slot = ?) ORDER BY id", slot, slot)

    def update(self, proposal_id: int, candidate: Candidate | None = None, **columns: Any) -> None:
        """Set columns of a proposal, and its candidate."""
        if candidate is not None:
            columns |= {"name": candidate.name, "body": candidate.model_dump_json()}
        sets = ", ".join(f"{column} = ?" for column in columns)
        values = [self._db.hidden(value) for value in columns.values()]
        self._db.run(f"UPDATE proposals SET {sets} WHERE id = ?", *values, proposal_id)  # noqa: S608

    def drop(self, proposal_id: int) -> None:
        """Forget a proposal that came to nothing worth saying."""
        self._db.run("DELETE FROM proposals WHERE id = ?", proposal_id)

    def drop_of_trial(self, trial_id: int) -> None:
        """Forget what an interrupted trial proposed: it is measured anew."""
        self._db.run("DELETE FROM proposals WHERE trial_id = ?", trial_id)

    def _rows(self, where: str, *values: Any) -> list[ProposalRow]:
        rows = self._db.all(f"SELECT * FROM proposals WHERE {where}", *values)  # noqa: S608
        return [
            ProposalRow(
                id=row["id"],
                trial_id=row["trial_id"],
                slot=row["slot"],
                state=ProposalState(row["state"]),
                fired=Fired.model_validate_json(row["fired"]),
                level=row["level"],
                known=_KNOWN.validate_json(row["known"]) if row["known"] is not None else None,
                at=row["at"],
                name=row["name"],
                candidate=Candidate.model_validate_json(row["body"]) if row["body"] is not None else None,
                file=row["file"],
                said=row["said"],
                gain=row["gain"],
                gpu_s=row["gpu_s"],
                why=row["why"],
                queued_as=row["queued_as"],
            )
            for row in rows
        ]
