"""What was read, in a form that rules can ask: lines with their figures, grouped by server, beside what is known.

Owns the comparisons that every rule needs: speculative rows against plain ones of the same load, never across servers
or loads that differ.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property

from autotuner.engines.context import Arm, Context, LineKnown
from autotuner.engines.figures import Figures, columns, figures, row
from autotuner.engines.logtext import clean_line
from autotuner.engines.vocabulary import CAUSES, Action, State

_WAYS = {"offline", "online", "serving", "server", "closed-loop", "open-loop", "static-batch"}
NEAR_RATIO = 0.03  # gains and losses below this are within what hosts vary by between launches
# Words that sound like a failure; a logger of uvicorn's is named so whatever it says.
FRIGHTENING = re.compile(
    r"Traceback|(?<!uvicorn\.)\b[A-Za-z]*(?:Error|Exception)\b|\bfail(?:ed|ure)?\b|leaked|\bcrash|\bfatal"
    r"|destroy_process_group|Performance might be sub-?optimal|Using default MoE",
    re.IGNORECASE,
)
_DP_RANK = re.compile(r"\"dp_rank\"\s*:\s*(\d+)|\bDP(\d+)\b|\bEngine (\d+): |\bengine=\"(\d+)\"|\bdp_rank=\"(\d+)\"")
_TP_RANK = re.compile(r"\bTP(\d+)\b|\btp_rank=\"(\d+)\"")
# Counted things add up over time; levels do not: of those the last one is the one in force.
_COUNTED = ("accepted_tokens", "drafted_tokens", "drafts_count", "emitted_tokens", "verify_count", "new_tokens")


@dataclass(frozen=True)
class Reading:
    """What the evidence amounts to. `action` is the cause's usual one unless the rule says otherwise."""

    state: State
    cause: str
    action: Action
    sentence: str
    advice: str = ""
    evidence: tuple[str, ...] = ()


def reading(
    state: State,
    cause: str,
    sentence: str,
    advice: str = "",
    *,
    action: Action | None = None,
    evidence: tuple[str, ...] = (),
) -> Reading:
    """Given a state, a cause of the list and the words, return the Reading; raise KeyError for a word not listed."""
    return Reading(state, cause, action or CAUSES[cause].action, sentence, advice, evidence)


@dataclass(frozen=True)
class Line:
    """One non-blank line: its number from 1, its text as last redrawn, its figures, and what else is known of it."""

    number: int
    text: str
    figures: Figures
    known: LineKnown

    def get(self, name: str) -> float | None:
        """The figure of this name as a number; None where the line has none."""
        value = self.figures.get(name)
        return float(value) if isinstance(value, int | float) else None

    @property
    def graph(self) -> str | None:
        """`true`, `false` or `unknown` on a decode line, else None: a prefill has graphs of its own."""
        value = self.figures.get("cuda_graph_flag") if "new_tokens" not in self.figures else None
        return str(value) if value is not None else None

    @property
    def running(self) -> float:
        """Running requests, 0 where the line does not say."""
        return self.get("running_reqs") or 0.0

    @property
    def rank(self) -> str:
        """The data-parallel rank as printed, '' where there is none."""
        match = _DP_RANK.search(self.text)
        return next(group for group in match.groups() if group is not None) if match else ""


@dataclass(frozen=True)
class Gain:
    """A speculative row and its speed over the plain row of the same load."""

    arm: Arm
    ratio: float


@dataclass(frozen=True, eq=False)
class Evidence:
    """Everything a reading is a function of. What many rules ask for is worked out once."""

    engine: str
    version: str
    context: Context
    lines: tuple[Line, ...]
    text: str = field(default="", repr=False)

    @property
    def observed(self) -> bool:
        """Whether any of the sources shows the server itself rather than a client or a table."""
        return bool({"server-log", "metrics", "reply", "server-info", "kernel-log", "gpu-query"} & set(self.sources))

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the lines come from."""
        return tuple(self.context.log_source)

    def having(self, *names: str) -> tuple[Line, ...]:
        """The lines that have all of these figures."""
        return tuple(line for line in self.lines if all(line.get(name) is not None for name in names))

    @cached_property
    def decode(self) -> tuple[Line, ...]:
        """The lines that report decoding: a load and a rate, or a graph flag."""
        return tuple(
            line
            for line in self.lines
            if line.graph is not None or (line.get("gen_tok_s") is not None and line.get("running_reqs") is not None)
        )

    @cached_property
    def ranks(self) -> frozenset[str]:
        """Every data-parallel rank that is named, several on one line included."""
        found = (group for match in _DP_RANK.finditer(self.text) for group in match.groups())
        return frozenset(group for group in found if group is not None)

    @cached_property
    def loads(self) -> tuple[Line, ...]:
        """The lines that state a load; a scrape states it on several lines, which are one."""
        if self.decode or "metrics" not in self.sources or not self.lines:
            return self.decode
        totals = self.totals()
        return (Line(0, "", totals, self.lines[0].known),) if totals else ()

    @property
    def speculates(self) -> bool:
        """Whether speculation is configured, or figures of it stand in the log."""
        if self.context.speculates is not None:
            return self.context.speculates
        return any(line.get("accept_len_tokens") is not None or line.get("drafted_tokens") for line in self.lines)

    @cached_property
    def arms(self) -> tuple[Arm, ...]:
        """Our own measurements: the rows given, the baseline table, and the servers that lines name."""
        return (*self.context.arms, *self._baseline_arms(), *self._line_arms(), *self._window_arms())

    def gains(self) -> tuple[Gain, ...]:
        """Every speculative row with its speed over the plain row of the same load."""
        plain = [arm for arm in self.arms if arm.plain and _speed(arm)]
        found = []
        for arm in self.arms:
            this = arm.speed_vs_this_ratio
            if arm.plain and this and self.speculates:
                found.append(Gain(self._this(), 1 / this))
                continue
            ratio = _stated_gain(arm)
            if ratio is None and not arm.plain and arm.speculation is not None and (speed := _speed(arm)):
                base = next((p for p in plain if _same_load(arm, p)), None)
                ratio = speed / (_speed(base) or speed) if base is not None else None
            if ratio is not None:
                found.append(Gain(arm, ratio))
        return tuple(found)

    def _this(self) -> Arm:
        """The candidate that the lines are of, as a row."""
        length = next((v for line in self.lines if (v := line.get("accept_len_tokens"))), None)
        known = self.context
        return Arm(
            speculation=known.speculation or "on", concurrency=known.concurrency, num_steps=known.num_steps,
            accept_len_tokens=length,
        )  # fmt: skip

    def totals(self) -> Figures:
        """Figures over the lines of one server: data-parallel ranks added, tensor-parallel copies counted once.

        What is counted adds up over time; of rates and levels each rank's last one is taken. Empty for several servers.
        """
        if len({line.known.server for line in self.lines}) > 1:
            return {}
        counted: dict[str, float] = {}
        last: dict[str, dict[str, float]] = {}
        seen: set[tuple[str, str]] = set()
        for line in self.lines:
            copy = (_TP_RANK.sub("", line.text), line.rank)
            if copy in seen and _TP_RANK.search(line.text):
                continue
            seen.add(copy)
            for name, value in line.figures.items():
                if isinstance(value, str):
                    continue
                if name in _COUNTED:
                    counted[name] = counted.get(name, 0) + value
                elif name.endswith(("_reqs", "_tok_s", "used_tokens")):
                    last.setdefault(name, {})[line.rank] = value
        return {**counted, **{name: sum(ranks.values()) for name, ranks in last.items()}}

    def _baseline_arms(self) -> tuple[Arm, ...]:
        found = []
        for concurrency, point in (self.context.baseline or {}).items():
            count = int(concurrency) if concurrency.isdigit() else None
            found.append(Arm(speculation="none", concurrency=count, tok_s=point.tok_s, tpot_ms=point.tpot_ms))
        return tuple(found)

    def _window_arms(self) -> tuple[Arm, ...]:
        """The candidate's own figures, by what was running, to set against the baseline table."""
        context = self.context
        if not context.baseline or not context.speculates:
            return ()
        found = []
        for line in self.lines:
            running = line.get("running_reqs")
            load = int(running) if running else context.concurrency
            rate, tpot = line.get("gen_tok_s") or line.get("output_tok_s"), line.get("tpot_ms")
            if line.known.after is None and line.known.server is None and (rate or tpot):
                found.append(
                    Arm(
                        speculation=context.speculation,
                        concurrency=load,
                        tok_s=rate,
                        tpot_ms=tpot if rate is None else None,
                        accept_len_tokens=line.get("accept_len_tokens"),
                        drafts_per_step=context.depth,
                    )
                )
        return tuple(found)

    def _line_arms(self) -> tuple[Arm, ...]:
        """One row for each server that a line names with its speculation, from its best-filled lines."""
        rows: dict[tuple[str | None, str | None], list[Line]] = {}
        for line in self.lines:
            if line.known.speculation is not None and line.known.server is not None:
                rows.setdefault((line.known.server, line.known.prompts), []).append(line)
        found = []
        for (_, prompts), lines in rows.items():
            speed = next((v for line in lines if (v := line.get("gen_tok_s") or line.get("output_tok_s"))), None)
            accept_len = next((v for line in lines if (v := line.get("accept_len_tokens"))), None)
            found.append(
                Arm(
                    speculation=lines[0].known.speculation,
                    prompts=prompts,
                    concurrency=self.context.concurrency,
                    tok_s=speed,
                    accept_len_tokens=accept_len,
                    drafts_per_step=self.context.drafts_per_step,
                )
            )
        return tuple(found)


def gather(engine: str, version: str, log: str, context: Context) -> Evidence:
    """Given a log as text, return the evidence: one Line for each non-blank line, in its last redraw."""
    lines: list[Line] = []
    header: tuple[str, ...] = ()
    for raw in log.split("\n"):
        if not raw.strip():
            continue
        drawn = [part for part in raw.rstrip("\r").split("\r") if part.strip()]
        text = clean_line((drawn[-1] if drawn else raw).encode("utf-8", "surrogateescape"))
        number = len(lines) + 1
        found = row(text, header) if header else figures(text)
        header = columns(text) or header
        lines.append(Line(number, text, found, context.known(number) or LineKnown(line=number)))
    return Evidence(engine, version, context, tuple(lines), "\n".join(line.text for line in lines))


def way_of_measuring(arm: Arm) -> str | None:
    """The row's mode if it names how was measured; a mode may as well be the method's own name, which is no load."""
    return arm.mode if arm.mode in _WAYS else None


def _speed(arm: Arm) -> float | None:
    """Higher is better: a rate, or the inverse of a time per token."""
    if arm.speed is not None:
        return arm.speed
    return 1000 / arm.tpot_ms if arm.tpot_ms else None


def _stated_gain(arm: Arm) -> float | None:
    if arm.gain_pct is not None:
        return 1 + arm.gain_pct / 100
    return arm.speedup_ratio


def _same_load(arm: Arm, plain: Arm) -> bool:
    """Same unit, and nothing that is known of both differs."""
    if (arm.speed is None) != (plain.speed is None):
        return False
    pairs = (
        (arm.concurrency, plain.concurrency),
        (arm.prompts, plain.prompts),
        (arm.context_tokens, plain.context_tokens),
        (arm.tp_size, plain.tp_size),
        (arm.build, plain.build),
        (arm.engine, plain.engine),
        (way_of_measuring(arm), way_of_measuring(plain)),
        (arm.power_cap_w, plain.power_cap_w),
    )
    return all(a is None or b is None or a == b for a, b in pairs)
