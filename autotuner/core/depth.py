"""The number of draft tokens that the measured acceptance and step times speak for: a prediction, never a verdict. Pure.

Two models are joined. Acceptance: each drafted token is accepted with chance a, independently, so a chain of k gives
AL(k) = (1 - a^(k+1)) / (1 - a) (Leviathan et al., arXiv 2211.17192, eq. 1). Step time: R(k) = t_spec(k) / t_base is a
line in k, its fixed part the verify step itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# Published fits at batch 1: EAGLE R = 1.09 + 0.105 k, EAGLE-3 R = 1.18 + 0.143 k (vLLM, Llama-3.1-8B, k = 2 to 7). The
# fixed part is their mean; the slope, which a larger batch raises most, is taken from what was measured here.
FIXED_PART = 1.14
DEPTH_MAX = 8  # published fits end at 7, and acceptance further on is below what the model says


@dataclass(frozen=True)
class StepLine:
    """R(k) = fixed + slope x k, the step time with k draft tokens over the plain one's."""

    fixed: float
    slope: float

    def at(self, steps: int) -> float:
        """R at this depth."""
        return self.fixed + self.slope * steps


@dataclass(frozen=True)
class BestDepth:
    """The depth of the best predicted rate: accept length, ratio to the plain server, gain over now (0.05 is 5 %)."""

    steps: int
    accept_len: float
    ratio: float
    gain: float


def acceptance(accept_len: float, steps: int) -> float:
    """Given an accept length (bonus included) at a depth, return the chance of each drafted token, 0 to 1."""
    if accept_len <= 1 or steps < 1:
        return 0.0
    if accept_len >= steps + 1:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_accept_len(middle, steps) < accept_len else (low, middle)
    return (low + high) / 2


def chain_accept_len(chance: float, steps: int) -> float:
    """Given the chance of a drafted token and a depth, return the accept length with the bonus token."""
    return steps + 1.0 if chance >= 1 else (1 - chance ** (steps + 1)) / (1 - chance)


def step_line(measured: Mapping[int, float]) -> StepLine | None:
    """Given R by depth as it was measured at one batch, return the line; None where nothing was.

    Two depths or more give the line by least squares, if it rises; one gives the slope, with the published fixed part,
    or all of it in proportion where R itself is below that.
    """
    points = {steps: ratio for steps, ratio in measured.items() if steps >= 1 and ratio > 0}
    if not points:
        return None
    mean_k, mean_r = sum(points) / len(points), sum(points.values()) / len(points)
    if len(points) > 1:
        spread = sum((k - mean_k) ** 2 for k in points)
        slope = sum((k - mean_k) * (r - mean_r) for k, r in points.items()) / spread
        if slope > 0 and mean_r - slope * mean_k > 0:
            return StepLine(mean_r - slope * mean_k, slope)
    if mean_r > FIXED_PART:
        return StepLine(FIXED_PART, (mean_r - FIXED_PART) / mean_k)
    usual_slope = 0.124  # the mean of the two published fits
    scale = mean_r / (FIXED_PART + usual_slope * mean_k)
    return StepLine(FIXED_PART * scale, usual_slope * scale)


def best_depth(accept_len: float, steps: int, measured: Mapping[int, float]) -> BestDepth | None:
    """Given accept length and R of a chain by depth, `steps` the depth now, return the best other depth, 1 to 8.

    None where R is not known at the depth of now.
    """
    line = step_line(measured)
    if line is None or steps not in measured:
        return None
    chance, now = acceptance(accept_len, steps), accept_len / measured[steps]
    found = [
        BestDepth(k, length := chain_accept_len(chance, k), length / line.at(k), length / line.at(k) / now - 1)
        for k in range(1, DEPTH_MAX + 1)
        if k != steps
    ]
    return max(found, key=lambda depth: depth.ratio)
