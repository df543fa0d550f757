"""What was measured -> medians, tables in Markdown, ratios and bars. Pure."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from clientbench.schedule import Mode

OURS, RUST, VLLM = "autotuner", "SGLang Rust", "vllm bench serve"
KEPT_UP, LEFT_BEHIND = 0.97, 0.90  # shares of the possible at which a client was surely not, and surely was, the limit
SERVER_LATE_MS = (
    1.0  # median lateness against its own schedule: from there on the server may have been the limit instead
)


@dataclass
class Run:
    """One run of one client. Times in ms or s as named; `truth` is the server's /stats when the last answer was written.

    `cpu_s` is user and system time of the client's processes from the first request that the server got to the end of the last
    process, `load_cpu_s` to the last answer only; `start_s` from the start of the process to the first request.
    """

    client: str
    mode: Mode
    truth: dict[str, float] = field(default_factory=dict)
    cpu_s: float | None = None
    load_cpu_s: float | None = None
    start_s: float | None = None
    exit_s: float | None = None  # from the signal to the end, where it was stopped
    pss_mb: float | None = None
    exit_code: int | None = None
    left_behind: int = 0  # processes
    ttft_ms: dict[str, float] = field(default_factory=dict)
    itl_ms: dict[str, float] = field(default_factory=dict)
    limited: bool | None = None  # it said that itself was the limit; None where a client never says such a thing
    said: str = ""
    failure: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def delivered_tok_s(self) -> float | None:
        """Tokens a second between the first request and the last answer, as the server saw them."""
        ns = self.truth.get("last_ns", 0) - self.truth.get("first_ns", 0)
        return self.truth["tokens"] / ns * 1e9 if ns > 0 else None

    @property
    def share(self) -> float | None:
        """Of what the schedule allows."""
        delivered, possible = self.delivered_tok_s, self.mode.possible_tok_s
        return delivered / possible if delivered and possible else None

    @property
    def tok_per_cpu_s(self) -> float | None:
        """Tokens delivered for a second of the client's CPU."""
        return self.truth["tokens"] / self.cpu_s if self.cpu_s and self.truth.get("tokens") else None

    def off_ms(self, what: str, name: str) -> float | None:
        """By how much the reported "ttft" or "itl" quantile ("p50", "p99") is above the server's own."""
        said, true = getattr(self, f"{what}_ms").get(name), self.truth.get(f"{what}_{name}")
        return None if said is None or true is None else said - true

    def as_json(self) -> dict[str, Any]:
        """Everything, with what is computed from it."""
        computed = {n: getattr(self, n) for n in ("delivered_tok_s", "share", "tok_per_cpu_s")}
        return {**asdict(self), **computed, "possible_tok_s": self.mode.possible_tok_s}


def values(runs: Iterable[Run], of: Callable[[Run], float | None]) -> list[float]:
    """What is known of the runs that did not fail."""
    return [v for run in runs if not run.failure and (v := of(run)) is not None]


def median(runs: Iterable[Run], of: Callable[[Run], float | None]) -> float | None:
    """The median of what is known, or None."""
    found = values(runs, of)
    return statistics.median(found) if found else None


def spread(found: list[float], form: str) -> str:
    """Given values and how to write one, return "median (least-most)", one value alone, or a dash."""
    if not found:
        return "-"
    middle, least, most = (format(v, form) for v in (statistics.median(found), min(found), max(found)))
    return middle if least == most else f"{middle} ({least}-{most})"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Given a head and rows, return a Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


HEAD = (
    "client",
    "delivered tok/s",
    "of possible",
    "tok per client CPU-s",
    "TTFT p50 / p99 ms (truth)",
    "ITL p50 / p99 ms (truth)",
    "peak PSS MB",
    "first request s",
    "said of itself",
)


def mode_table(runs: list[Run]) -> str:
    """Given all runs of one mode, return their table: a row a client, medians and ranges."""
    rows = []
    for client in dict.fromkeys(run.client for run in runs):
        own = [run for run in runs if run.client == client]
        good = [run for run in own if not run.failure]
        if not good:
            rows.append((client, f"failed: {own[0].failure}", *["-"] * (len(HEAD) - 2)))
            continue
        rows.append(
            (
                client,
                spread(values(good, lambda r: r.delivered_tok_s), ",.0f"),
                spread(values(good, lambda r: r.share), ".3f"),
                spread(values(good, lambda r: r.tok_per_cpu_s), ",.0f"),
                _latency(good, "ttft"),
                _latency(good, "itl"),
                _number(max(values(good, lambda r: r.pss_mb), default=None), ".0f"),
                spread(values(good, lambda r: r.start_s), ".2f"),
                said(own),
            )
        )
    return table(HEAD, rows)


def _latency(runs: list[Run], what: str) -> str:
    reported = [median(runs, lambda r, q=q: getattr(r, f"{what}_ms").get(q)) for q in ("p50", "p99")]
    true = [median(runs, lambda r, q=q: r.truth.get(f"{what}_{q}")) for q in ("p50", "p99")]
    if reported == [None, None]:
        return f"withheld ({_pair(true)})"
    return f"{_pair(reported)} ({_pair(true)})"


def _pair(pair: list[float | None]) -> str:
    return " / ".join(_number(v, ".2f") for v in pair)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def said(runs: list[Run]) -> str:
    """What the runs said of themselves, each thing with how often, and how many failed."""
    counts: dict[str, int] = {}
    for run in runs:
        text = f"failed: {run.failure}" if run.failure else run.said
        if text:
            counts[text] = counts.get(text, 0) + 1
    return "; ".join(f"{text} ({n} of {len(runs)})" for text, n in counts.items()) or "nothing"


@dataclass(frozen=True)
class Bar:
    """A figure and what it should be: at least, or at most, `bar`; `figure` is None where nothing was measured."""

    what: str
    figure: float | None
    bar: float
    at_least: bool
    unit: str = ""
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """None where there is no figure."""
        if self.figure is None:
            return None
        return self.figure >= self.bar if self.at_least else self.figure <= self.bar

    def as_json(self) -> dict[str, Any]:
        """Everything, with whether it was reached."""
        return {**asdict(self), "reached": self.reached}

    @property
    def verdict(self) -> str:
        """In words: reached, or by how much it fell short."""
        if self.figure is None or self.reached is None:
            return "not measured"
        short = abs(self.figure - self.bar)
        return "reached" if self.reached else f"fell short by {short:.3g}{self.unit}"


def bars(runs: list[Run]) -> list[Bar]:
    """Given all runs, return our client's figures against what is asked of it."""
    by: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by.setdefault((run.mode.name, run.client), []).append(run)

    def ours(mode: str) -> list[Run]:
        return by.get((mode, OURS), [])

    def against(mode: str, peer: str, least: float) -> Bar:
        mine, theirs = (median(by.get((mode, name), []), lambda r: r.tok_per_cpu_s) for name in (OURS, peer))
        ratio = mine / theirs if mine and theirs else None
        rounds = round_ratios(ours(mode), by.get((mode, peer), []))
        note = f"by round {min(rounds):.2f} to {max(rounds):.2f}" if rounds else ""
        return Bar(f"{mode}: tok per CPU-s against {peer}", ratio, least, at_least=True, unit="x", note=note)

    def added(what: str, name: str, most: float) -> Bar:
        figure = median(ours("acc"), lambda r: r.off_ms(what, name))
        return Bar(f"acc: {what.upper()} {name} above the truth", figure, most, at_least=False, unit=" ms")

    mine = [run for run in runs if run.client == OURS]
    return [
        against("paced20k", RUST, 1.3),
        against("paced20k", VLLM, 2.4),
        against("over128", RUST, 1.0),
        against("flood", RUST, 1.5),
        *(
            Bar(f"{mode}: delivered, of possible", median(ours(mode), lambda r: r.share), 0.98, at_least=True)
            for mode in ("over128", "over512")
        ),
        added("ttft", "p50", 0.1),
        added("ttft", "p99", 0.5),
        added("itl", "p99", 0.1),
        Bar("first request after", median(mine, lambda r: r.start_s), 0.5, at_least=False, unit=" s"),
        Bar("peak PSS", max(values(mine, lambda r: r.pss_mb), default=None), 80, at_least=False, unit=" MB"),
    ]


def round_ratios(mine: list[Run], theirs: list[Run]) -> list[float]:
    """Given the runs of two clients, in the order of their rounds, return the ratio of tok per CPU-s in each round."""
    pairs = ((a.tok_per_cpu_s, b.tok_per_cpu_s) for a, b in zip(mine, theirs, strict=False))
    return [a / b for a, b in pairs if a and b]


def bar_table(found: list[Bar]) -> str:
    """Given bars, return their table."""
    rows = [
        (
            one.what,
            _number(one.figure, ".3g") + (one.unit if one.figure is not None else ""),
            f"{'>=' if one.at_least else '<='} {one.bar:g}{one.unit}",
            one.verdict,
            one.note,
        )
        for one in found
    ]
    return table(("our client", "figure", "bar", "", ""), rows)


def was_the_limit(run: Run) -> bool | None:
    """Given a run, return whether the truth shows its client to have been the limit; None where it shows neither.

    Nothing the client said comes in: only how much of the schedule it let the server deliver, and whether the server kept that
    schedule itself, which counts from each request's arrival and waits for no client.
    """
    share = run.share
    if share is None:
        return None
    if share >= KEPT_UP:
        return False
    return True if share < LEFT_BEHIND and run.truth["late_p50"] <= SERVER_LATE_MS else None


def verdict_table(kinds: dict[str, list[Run]]) -> str:
    """Given runs of our client by kind, return how often it was the limit, said so, and was wrong."""
    rows = []
    for kind, runs in kinds.items():
        good = [run for run in runs if not run.failure]
        limit = [run for run in good if was_the_limit(run) is True]
        fine = [run for run in good if was_the_limit(run) is False]
        missed = sum(not run.limited for run in limit)
        blamed = sum(bool(run.limited) for run in fine)
        rows.append(
            (
                kind,
                f"{len(good)}" + (f" ({len(runs) - len(good)} failed)" if len(good) < len(runs) else ""),
                spread(values(good, lambda r: r.share), ".3f"),
                f"{len(limit)} / {len(fine)} / {len(good) - len(limit) - len(fine)}",
                str(sum(bool(run.limited) for run in good)),
                str(missed),
                str(blamed),
            )
        )
    head = ("our client", "runs", "of possible", "was the limit / was not / unclear", "said so", "missed", "wrongly")
    return table(head, rows)
