"""What a step costs: step times by batch, taken from recordings of SGLang 0.5.12 on one NVIDIA H200. Pure.

A model of recorded speeds, good to about 15 % at the recorded levels of the recorded models, whose requests came in bursts. If
they are replaced one by one, with a prefill between nearly all steps, the real server was slower at 32 and 128 in flight: there
the model is too fast by a fifth to two fifths (docs/case-study-h200.md). It says nothing about other hardware or other models,
and serves to rehearse a campaign, not to predict one.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

Curve = tuple[tuple[int, float], ...]  # (running requests, milliseconds a step), rising in the first

DRAFTED_STEPS = 3  # the depth of the recorded drafters; the cost of another depth is in proportion
DRAFTED_NGRAM = 7


@dataclass(frozen=True)
class Shape:
    """A recorded model: step times of each kind of server, and what a prompt costs."""

    name: str
    plain: Curve
    no_graph: Curve
    eagle: Curve
    standalone: Curve
    ngram: Curve
    prefill_ms: float  # of any prefill batch
    prefill_tok_s: float
    admit_ms: float  # each request, one after the other: tokenizing and HTTP, while the GPU goes on
    latency_ms: float  # each request, side by side


BIG = Shape(
    name="big",  # the shape of an 8B model
    plain=((1, 4.57), (8, 4.8), (32, 5.3), (128, 6.8)),
    no_graph=((1, 20.9), (8, 21.9), (32, 24.4), (128, 24.6)),
    eagle=((1, 8.2), (8, 8.9), (16, 9.8), (32, 12.2), (48, 15.6), (128, 30.0)),
    standalone=((1, 15.5), (8, 17.0), (32, 22.0), (128, 41.0)),
    ngram=((1, 6.9), (8, 8.0), (32, 13.0), (48, 18.0), (128, 42.0)),
    prefill_ms=5.0,
    prefill_tok_s=60_000.0,
    admit_ms=1.6,
    latency_ms=35.0,
)
SMALL = Shape(
    name="small",  # a 135M model
    plain=((1, 1.53), (8, 1.8), (32, 2.2), (128, 4.3)),
    no_graph=((1, 16.8), (8, 17.4), (32, 18.0), (128, 18.3)),
    eagle=((1, 3.55), (8, 4.7), (32, 5.6), (48, 6.9), (128, 10.2)),
    standalone=((1, 6.0), (8, 15.2), (32, 15.8), (128, 24.5)),
    ngram=((1, 3.4), (8, 6.4), (32, 11.0), (48, 11.2), (128, 21.0)),
    prefill_ms=4.0,
    prefill_tok_s=200_000.0,
    admit_ms=1.0,
    latency_ms=25.0,
)
SHAPES: Mapping[str, Shape] = MappingProxyType({shape.name: shape for shape in (BIG, SMALL)})


@dataclass(frozen=True)
class Costs:
    """What one server's steps cost. `method` is none, eagle, standalone or ngram; `drafted` its tokens a step."""

    shape: Shape
    method: str = "none"
    drafted: int = 0
    graphs: bool = True
    graph_max_batch: int = 256

    def step_s(self, running: int) -> float:
        """Given how many requests run, return what one step of all of them takes."""
        shape = self.shape
        plain_ms = at(shape.plain, running)
        spent_ms = plain_ms
        if self.method != "none":
            curve = {"eagle": shape.eagle, "standalone": shape.standalone, "ngram": shape.ngram}[self.method]
            depth = DRAFTED_NGRAM if self.method == "ngram" else DRAFTED_STEPS
            spent_ms += (at(curve, running) - plain_ms) * self.drafted / depth
        if not self.graphed(running):
            spent_ms += at(shape.no_graph, running) - plain_ms
        return spent_ms / 1000

    def graphed(self, running: int) -> bool:
        """Tell whether a captured graph holds so many requests; SGLang says so in its lines and nowhere else."""
        return self.graphs and running <= self.graph_max_batch

    def prefill_s(self, tokens: int) -> float:
        """Given the tokens of the new prompts, return how long decoding waits for them."""
        return self.shape.prefill_ms / 1000 + tokens / self.shape.prefill_tok_s


def at(curve: Curve, running: int) -> float:
    """Given a curve, return its value: linear between recorded points, the last slope kept beyond them."""
    if running <= curve[0][0]:
        return curve[0][1]
    pairs = list(itertools.pairwise(curve))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if running <= pair[1][0]), pairs[-1])
    return y0 + (y1 - y0) * (running - x0) / (x1 - x0)


def shape_for(model: str) -> Shape:
    """Given a model's name or path, return the recorded shape that stands in for it."""
    lowered = model.lower()
    return SMALL if any(word in lowered for word in ("smol", "tiny", "135m", "0.5b", "0.6b", "360m")) else BIG
