"""The ways in which a rehearsed server behaves, by name; chosen on its command line or by the candidate's environment. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ENV_VAR = "AUTOTUNER_FAKE_PERSONALITY"  # in launch.env of a candidate file
AFTER_VAR = "AUTOTUNER_FAKE_AFTER"  # after how many answers the personality shows, where it waits for some
AFTER = 12
CAPPED_AT = 16
HALF_LIFE_S = 15.0  # of acceptance, where it decays

LoadStage = Literal["process", "nccl", "weights", "capture", "warmup"]


@dataclass(frozen=True)
class Personality:
    """What is odd about a server; the default is a healthy one."""

    name: str
    says: str
    load_factor: float = 1.0
    hangs_at: LoadStage | None = None
    out_of_memory_at: LoadStage | None = None
    dies_silently: bool = False  # after some answers
    falls_dumb: bool = False  # after some answers: health says 200, nothing is generated
    times_out: bool = False  # it falls dumb, and NCCL's watchdog says why
    engine_dies: bool = False  # after some answers, and the front end exits with 0
    orphans: bool = False
    capped: bool = False
    decays: bool = False
    broken: bool = False
    corrupt: bool = False
    noisy_stop: bool = False
    ignores_term: bool = False


_ALL = (
    Personality("healthy", "behaves"),
    Personality("slow-load", "takes ten times as long to load, and shows that it moves", load_factor=10.0),
    Personality("hang-process", "hangs before anything is loaded", hangs_at="process"),
    Personality("hang-nccl", "hangs while NCCL's ranks connect", hangs_at="nccl"),
    Personality("hang-weights", "hangs while it loads weights", hangs_at="weights"),
    Personality("hang-capture", "hangs while it captures graphs", hangs_at="capture"),
    Personality("hang-warmup", "hangs in its warm-up", hangs_at="warmup"),
    Personality("oom-load", "runs out of memory while it loads weights", out_of_memory_at="weights"),
    Personality("oom-capture", "runs out of memory while it captures graphs", out_of_memory_at="capture"),
    Personality("dies-silently", "kills itself under load without a word", dies_silently=True),
    Personality("health-200-but-dead", "says that it is healthy and generates no more", falls_dumb=True),
    Personality(
        "hang-collective", "hangs in an all-reduce under load, healthy as ever", falls_dumb=True, times_out=True
    ),
    Personality("orphaned-workers", "has workers that survive it", orphans=True),
    Personality("capped", f"runs {CAPPED_AT} requests at most, whatever was asked for", capped=True),
    Personality("decaying-acceptance", "accepts fewer drafted tokens as time goes on", decays=True),
    Personality("drafter-broken", "accepts no drafted token", broken=True),
    Personality("corrupt", "answers every prompt with the same nonsense, as fast as ever", corrupt=True),
    Personality("exit-0-after-engine-death", "exits with 0 after its engine died", engine_dies=True),
    Personality("sigterm-noise", "prints frightening lines when it is stopped", noisy_stop=True),
    Personality("ignores-sigterm", "ignores SIGTERM", ignores_term=True),
)
PERSONALITIES: Mapping[str, Personality] = MappingProxyType({personality.name: personality for personality in _ALL})


def personality_of(text: str, rank: int = 0) -> Personality | None:
    """Given a name, return its personality, None if there is none; `NAME@1` is that of rank 1, and other ranks are healthy."""
    name, _, only = text.partition("@")
    found = PERSONALITIES.get(name)
    return PERSONALITIES["healthy"] if found is not None and only and only != str(rank) else found
