"""Goodput: the requests a second that meet latency limits, from a level's samples. Pure.

The word and the count are those of DistServe (Zhong et al., OSDI 2024) and of `vllm bench serve --goodput`: a request is
good if its own TTFT and its own TPOT are within the limits; one that failed is not.
"""

import math

from autotuner.bench.measurement import (
    Figures,
    GoodputLimits,
    LevelSamples,
    RequestSample,
    figures,
    stretches,
    tpot_ms,
)
from autotuner.core.statistics import Interval, mean_interval, quantile


def goodput(samples: LevelSamples, limits: GoodputLimits) -> Interval | None:
    """Given a level's samples and limits, return good requests per second of the steady part with a 95 % interval.

    A request counts where it ended, so that long ones are not lost at the level's end. None where no request ended in the
    steady part. The interval is of batch means over stretches as for output tok/s, and never narrower than one request
    more or less, since a count is not known better than that at its edges.
    """
    start, end = samples.steady_from_s, samples.steady_to_s
    if start is None or end is None or end <= start:
        return None
    ended = [r for r in samples.requests if not r.cut and r.end_s is not None and start <= r.end_s <= end]
    if not ended:
        return None
    seconds = end - start
    lasted = quantile(sorted(r.end_s - r.sent_s for r in ended if r.end_s is not None), 0.5)
    count = stretches(seconds, lasted)
    good = [r.end_s - start for r in ended if r.end_s is not None and meets(r, limits)]
    per_stretch = [0] * count
    for at_s in good:
        per_stretch[min(count - 1, math.floor(at_s / seconds * count))] += 1
    spread = mean_interval([n * count / seconds for n in per_stretch])
    half = max((spread.high - spread.low) / 2, 1 / seconds)
    rate = len(good) / seconds
    return Interval(rate, max(0.0, rate - half), rate + half)


def meets(request: RequestSample, limits: GoodputLimits) -> bool:
    """Tell whether a request was answered within the limits; a single token has no TPOT, and so meets any."""
    if request.error or request.cut or request.first_s is None:
        return False
    ttft_ms = 1000 * (request.first_s - request.sent_s)
    if limits.ttft_ms_max is not None and ttft_ms > limits.ttft_ms_max:
        return False
    per_token = tpot_ms(request)
    return limits.tpot_ms_max is None or per_token is None or per_token <= limits.tpot_ms_max


def figures_under(samples: LevelSamples, limits: GoodputLimits | None) -> Figures:
    """Given a level's samples and the limits of the objective, if it has any, return its figures, goodput included."""
    return with_goodput(figures(samples), samples, limits)


def with_goodput(measured: Figures, samples: LevelSamples, limits: GoodputLimits | None) -> Figures:
    """Given figures and the samples they came from, return them with the goodput under these limits."""
    found = goodput(samples, limits) if limits is not None else None
    return measured.model_copy(
        update={
            "goodput_limits": limits,
            "goodput_req_s": found.mean if found else None,
            "goodput_req_s_low": found.low if found else None,
            "goodput_req_s_high": found.high if found else None,
        }
    )
