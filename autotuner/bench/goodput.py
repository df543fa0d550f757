"""Goodput: the requests a second that meet latency limits, from a level's samples. Pure.

The word and the count are those of DistServe (Zhong et al., OSDI 2024) and of `vllm bench serve --goodput`: a request is
good if its own TTFT and its own TPOT are within the limits; one that failed is not.
"""

from autotuner.bench.measurement import (
    Figures,
    GoodputLimits,
    LevelSamples,
    RequestSample,
    figures,
    request_rate,
    tpot_ms,
)
from autotuner.core.statistics import Interval


def goodput(samples: LevelSamples, limits: GoodputLimits) -> Interval | None:
    """Given a level's samples and limits, return good requests per second of the steady part with a 95 % interval.

    None where no request ended in the steady part. It is counted as `request_rate` says.
    """
    return request_rate(samples, lambda request: meets(request, limits))


def meets(request: RequestSample, limits: GoodputLimits) -> bool:
    """Tell whether a request was answered within the limits; a single token has no TPOT, and so meets any."""
    if request.error or request.cut or request.first_s is None:
        return False
    ttft_ms = 1000 * (request.first_s - request.began_s)
    if limits.ttft_ms_max is not None and ttft_ms > limits.ttft_ms_max:
        return False
    per_token = tpot_ms(request)
    return limits.tpot_ms_max is None or per_token is None or per_token <= limits.tpot_ms_max


def figures_under(samples: LevelSamples, limits: GoodputLimits | None, *, ignore_eos: bool = False) -> Figures:
    """Given a level's samples and the limits of the objective, if it has any, return its figures, goodput included."""
    return with_goodput(figures(samples, ignore_eos=ignore_eos), samples, limits)


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
