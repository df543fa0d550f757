"""Whether a server keeps up with requests that are sent at a rate, whether or not earlier ones were answered. Pure.

One that does has about as many in flight at any time; one that does not answers fewer than are sent, and the rest piles up.
"""

import math
from collections.abc import Sequence

from autotuner.bench.measurement import Progress
from autotuner.core.statistics import Interval

KEEPS_UP_MIN = 0.9  # of the requests sent; below, what is in flight grows by a tenth of all that is sent
SENT_MIN = 20  # as few requests as tell anything
# How many are in flight is Poisson distributed of M/G/inf, and about so where a server keeps up: the numbers at two moments
# differ by a standard deviation of sqrt(2 * their mean). Three of those, and the tenth of what was sent beyond which a rule
# acts, are more than 3.4 of them for any rate: a chance of 3 in 10,000 at a look. Shipped rules ask for three looks besides.
DEVIATIONS = 3.0


def answered_ratio(progress: Sequence[Progress], rate: float) -> Interval | None:
    """Given what the client has said and the requests sent a second, return answered / sent requests of late, with bounds.

    "Of late" is the later half of the load, as far as it is after the warm-up. None before that can be told: with fewer than
    SENT_MIN requests sent in it, and while half of what was sent before it was not answered by its begin. Until then the
    first requests may still be on their way, and what is in flight grows with any server. (So a server that never answers
    half of what is sent is not told by this, but by its queue.)

    Where the client holds requests back, because as many as are allowed are in flight, the ratio is to those that were due.
    """
    if not progress:
        return None
    now = progress[-1]
    begun = next((p for p in progress if p.phase == "steady" and p.at_s >= now.at_s / 2), None)
    if begun is None or begun is now or _answered(begun) < begun.in_flight:
        return None
    expected = rate * (now.at_s - begun.at_s)
    answered = _answered(now) - _answered(begun)
    sent = answered + now.in_flight - begun.in_flight
    due = max(float(sent), expected - DEVIATIONS * math.sqrt(expected))
    if due < SENT_MIN:
        return None
    half = DEVIATIONS * math.sqrt(2 * begun.in_flight) / due
    ratio = answered / due
    return Interval(ratio, max(0.0, ratio - half), ratio + half)


def _answered(progress: Progress) -> int:
    """Requests that are over, answered or failed: neither waits any more."""
    return progress.done + progress.failed
