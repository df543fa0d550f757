"""The simulated part: campaigns of the real daemon in virtual time, as many as fit, each of its own seed."""

import gc
import time
from collections.abc import Iterable

from torture import simedge
from torture.simcampaign import JUMPS_EVERY, Campaign
from torture.tally import Tally

REPLAY_EVERY = 10  # campaigns of which every verdict is computed again
GC_EVERY = 50


def run(seed: int, seconds: float) -> Tally:
    """Work campaigns from this seed on until the time is over."""
    simedge.install()
    found = Tally()
    until = time.monotonic() + seconds
    gc.disable()
    number = seed
    while time.monotonic() < until or number == seed:
        campaign(number, found)
        number += 1
        if number % GC_EVERY == 0:
            gc.collect()
    return found


def some(seeds: Iterable[int]) -> tuple[Tally, list[str]]:
    """Work the campaigns of these seeds; return what was found and the hash of each one's decisions."""
    simedge.install()
    found = Tally()
    return found, [campaign(seed, found) for seed in seeds]


def campaign(seed: int, found: Tally) -> str:
    """Work the campaign of a seed; return the hash of its decisions."""
    first = Campaign(seed, found)
    first.run(replayed=seed % REPLAY_EVERY == 0)
    trace = first.checker.trace.hexdigest()
    if seed % JUMPS_EVERY == 0:
        again = Campaign(seed, Tally(), jumps=False)
        again.run()
        same = again.checker.trace.hexdigest() == trace
        first.checker.check("P19", "without steps of the wall clock it decides otherwise", kept=same)
    return trace
