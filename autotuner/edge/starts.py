"""What earlier starts of a candidate, or of another of its model and engine, tell about the next one."""

from autotuner.core.candidate import Candidate
from autotuner.edge.rows import LaunchRow
from autotuner.edge.store import Store


def usual_ready_s(store: Store, candidate: Candidate) -> float | None:
    """Return the median time from launch to generating tokens: of this candidate lately, else of its model and engine."""
    ready = "SELECT l.ready_s FROM launches l JOIN candidates c ON c.id = l.candidate_id WHERE l.ready_s IS NOT NULL"
    same_model = "json_extract(c.body, '$.engine') = ? AND json_extract(c.body, '$.launch.model') IS ?"
    last = "ORDER BY l.rowid DESC LIMIT 25"
    rows = store.db.all(f"{ready} AND c.id = ? {last}", candidate.id) or store.db.all(
        f"{ready} AND {same_model} {last}", candidate.engine, candidate.launch.model
    )
    usual = sorted(float(row["ready_s"]) for row in rows)
    return usual[len(usual) // 2] if usual else None


def earlier_starts(store: Store, candidate: Candidate, engine_version: str | None, most: int = 5) -> list[LaunchRow]:
    """Return the last successful starts of a candidate's model and engine whose stages were followed, newest first.

    Those of the same engine version, if there are any; else of any version.
    """
    same_model = (  # a model that is not named is like no other
        "ready_s IS NOT NULL AND stages != '[]' AND (candidate_id = ? OR candidate_id IN (SELECT id FROM candidates"
        " WHERE json_extract(body, '$.engine') = ? AND json_extract(body, '$.launch.model') = ?))"
    )
    newest = "ORDER BY rowid DESC LIMIT ?"
    model = (candidate.id, candidate.engine, candidate.launch.model)
    same = store.launches_where(f"{same_model} AND engine_version = ? {newest}", *model, engine_version, most)
    return same or store.launches_where(f"{same_model} {newest}", *model, most)
