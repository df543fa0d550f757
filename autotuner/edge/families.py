"""Which trials are of one family: the candidates that one sweep made."""

from pathlib import PurePath

from autotuner.core.family import Variant, told
from autotuner.core.state import TrialState
from autotuner.core.verdict import Judgement
from autotuner.edge.rows import Trial
from autotuner.edge.store import Store


def family(store: Store, trial: Trial, judgement: Judgement) -> str:
    """Given a trial and its verdict, which is not on record yet, say where the family of its candidate stands.

    Empty for a candidate that no sweep made, and for trials that only confirm or repeat another.
    """
    file, text = store.candidate_source(trial.candidate_id)
    if not text or trial.is_baseline or trial.confirms is not None:
        return ""
    made = store.db.all("SELECT id FROM candidates WHERE source_name = ? AND source = ?", file, text)
    ids = {row["id"] for row in made}
    if len(ids) < 2:
        return ""
    latest: dict[str, Variant] = {}
    for other in store.trials_under(trial.slot, trial.benchmark_hash):
        aside = other.is_baseline or other.confirms is not None or other.state is TrialState.CANCELLED
        if aside or other.candidate_id not in ids:
            continue
        done = judgement if other.id == trial.id else other
        state = TrialState.DONE if other.id == trial.id else other.state
        score = done.score.mean if done.score is not None else None
        latest[other.candidate_id] = Variant(other.name, state, done.verdict, score)
    return told(PurePath(file).name, tuple(latest.values()))
