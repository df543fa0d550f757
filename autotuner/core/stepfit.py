"""Known break-evens of one model, hardware and engine -> the break-even at another depth or batch. Pure.

R, the break-even accept length, is the ratio of two step times, so it depends on the depth of the draft, on the batch and
on what drafts, hardly on how good the draft is: what a bad drafter showed holds for a good one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotuner.core.speculation import PRIOR_ERROR, prior_needed

# What is known before anything was measured, as relative standard deviations: how far one measured R is from a smooth curve;
# how far the curve lies from the prior as a whole, how far it bends with the depth (for each e-fold of it) and with each
# doubling of the batch, and how far two methods lie apart. PRIOR_ERROR is the prior's own; the others are rounded from
# how published rows of one group scatter.
POINT_SD = 0.10
LEVEL_SD = PRIOR_ERROR
DEPTH_SD = 0.15
DOUBLING_SD = 0.05
METHOD_SD = 0.20
# A point's weight falls with the square of its distance in doublings of the batch: 1 at the same batch, half at 1.8.
NEARNESS = 0.3


@dataclass(frozen=True)
class KnownRatio:
    """One measured break-even accept length: drafted depth, running requests, R, and the name of what drafts."""

    num_steps: float
    running: float
    needed: float
    method: str = ""


def predicted_needed(known: Sequence[KnownRatio], num_steps: float, running: float, method: str = "") -> float:
    """Given break-evens known for one model, hardware and engine, return R at a depth and batch; the prior if there are none.

    A ridge regression of log(R / prior) on depth, batch and method around the point that is asked for; its ridge is the
    ratio of the variances above, which is the Bayes estimate under normal priors, so that few points pull the prior a
    little and many replace it.
    """
    prior = prior_needed(num_steps, running)
    size = 4
    ridge = [(POINT_SD / sd) ** 2 for sd in (LEVEL_SD, DEPTH_SD, DOUBLING_SD, METHOD_SD)]
    matrix = [[ridge[i] if i == j else 0.0 for j in range(size)] for i in range(size)]
    right = [0.0] * size
    for point in known:
        doublings = math.log2(max(1.0, point.running) / max(1.0, running))
        other = 0.0 if point.method == method else 1.0
        row = (1.0, math.log((1 + point.num_steps) / (1 + num_steps)), doublings, other)
        weight = 1 / (1 + NEARNESS * doublings**2)
        off = math.log(point.needed / prior_needed(point.num_steps, point.running))
        for i in range(size):
            right[i] += weight * row[i] * off
            for j in range(size):
                matrix[i][j] += weight * row[i] * row[j]
    return prior * math.exp(_solved(matrix, right)[0])


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a few linear equations with a positive definite matrix, by elimination (no pivot is needed)."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i, pivot in enumerate(rows):
        for j, row in enumerate(rows):
            if i != j:
                factor = row[i] / pivot[i]
                rows[j] = [a - factor * b for a, b in zip(row, pivot, strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]
