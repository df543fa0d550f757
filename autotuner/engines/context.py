"""What a tuner knows beside the lines it read: the launch, the load, the host, its own earlier measurements.

Every field is optional, and an absent one means unknown, never "no". Units stand in the names: tok/s, ms, s, GiB, and
ratios from 0 to 1. Read from the `[context]` table of a case, or filled in by the daemon.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Source = Literal[
    "server-log",
    "metrics",
    "reply",
    "server-info",
    "benchmark",
    "table",
    "kernel-log",
    "gpu-query",
    "pattern",
]


class _Known(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Prompts(_Known):
    """The prompt set: whether it is like the real traffic, and whether its prompts are all different."""

    count: int | None = None
    dataset: str | None = None
    template: str | None = None
    drafter_template: str | None = None
    unique: bool | None = None
    same_seed: bool | None = None
    longer_than_kv_pool: bool | None = None
    repeats_identical: bool | None = None


class Gpu(_Known):
    """What the driver says; lists are by GPU."""

    count: int | None = None
    name: str | None = None
    interconnect: Literal["pcie", "nvlink"] | None = None
    total_gib: float | list[float] | None = None
    used_gib: float | list[float] | None = None
    utilisation_pct: float | list[float] | None = None
    idle: list[int] | None = None
    processes: list[Any] | None = None


class Http(_Known):
    """The last answer of each probe: a status code, or `refused`, `timeout`, `no-answer`."""

    health: int | str | None = None
    generate: int | str | None = None
    models: int | str | None = None


class HostSigns(_Known):
    """What the host says about itself and about the process."""

    oom_killer: str | bool | None = None
    rebooted: bool | None = None
    unified_memory: bool | None = None
    read_bytes_flat: bool | None = None
    kernel_cache_empty: bool | None = None
    process_state: str | None = None
    waits_for: str | None = None


class Previous(_Known):
    """An earlier launch or measurement on the same place."""

    what: Literal["candidate", "same-flags", "same-server"] | None = None
    asked_to_stop: bool | None = None
    gone: bool | None = None
    outcome: str | None = None
    tok_s: float | None = None
    capture_s: float | None = None


class LineKnown(_Known):
    """What is known of one line of the log; lines of different `server` are never compared or added."""

    line: int
    server: str | None = None
    engine: str | None = None
    build: str | None = None
    run: int | None = None
    speculation: str | None = None
    prompts: str | None = None
    context: Literal["short", "long"] | None = None
    after: Literal["idle", "prefill"] | None = None
    mem_fraction_ratio: float | None = None


class Arm(_Known):
    """One measurement or launch of our own (`arms`), or one published or imported figure (`claims`)."""

    engine: str | None = None
    build: str | None = None
    mode: str | None = None
    run: int | None = None
    outcome: Literal["served", "ready", "hung", "died-on-long-request"] | None = None
    concurrency: int | None = None
    context_tokens: int | None = None
    prompts: str | None = None
    tp_size: int | None = None
    gpu_count: int | None = None
    gpu_bandwidth_tb_s: float | None = None
    params_b: float | None = None
    weight_bits: float | None = None
    mem_fraction_ratio: float | None = None
    graphs: bool | None = None
    p2p: bool | None = None
    speculation: str | None = None
    num_steps: int | None = None
    topk: int | None = None
    draft_tokens: int | None = None
    drafts_per_step: int | None = None
    accept_len_tokens: float | None = None
    accept_rate_ratio: float | None = None
    draft_accept_ratio: float | None = None
    pos0_accept_ratio: float | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    tok_s: float | None = None
    tok_s_per_gpu: float | None = None
    tok_s_per_user: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    step_ms: float | None = None
    gain_pct: float | None = None
    speedup_ratio: float | None = None
    speed_vs_this_ratio: float | None = None
    kv_tokens: int | None = None
    power_cap_w: float | None = None
    power_w: float | None = None
    clock_mhz: float | None = None
    throttled_pct: float | None = None

    @property
    def speed(self) -> float | None:
        """Output speed in whatever unit this row has; rows of one table have the same."""
        known = (self.tok_s, self.tok_s_per_gpu, self.tok_s_per_user)
        return next((value for value in known if value is not None), None)

    @property
    def depth(self) -> int | None:
        """Proposed drafts a step, the bonus slot not counted."""
        return self.drafts_per_step if self.drafts_per_step is not None else self.num_steps

    @property
    def plain(self) -> bool:
        """Whether it ran without speculation."""
        return self.speculation == "none"

    @property
    def accept_len(self) -> float | None:
        """Accept length, bonus included: as given, else 1 + depth x accepted/drafted, as every engine defines it."""
        if self.accept_len_tokens is not None or self.draft_accept_ratio is None or self.depth is None:
            return self.accept_len_tokens
        return 1 + self.depth * self.draft_accept_ratio


class BaselinePoint(_Known):
    """A plain server's figure at one concurrency."""

    tok_s: float | None = None
    tpot_ms: float | None = None


class Context(_Known):
    """Everything known beside the lines. `baseline` maps concurrency to a figure; empty says that none was measured."""

    log_source: tuple[Source, ...] = ("server-log",)
    phase: Literal["starting", "level", "idle", "stopping"] | None = None
    role: Literal["prefill", "decode"] | None = None
    became_ready: bool | None = None
    asked_to_stop: bool | None = None
    exit_code: int | None = None
    seconds_since_launch: float | None = None
    seconds_since_output: float | None = None
    seconds_since_tokens: float | None = None
    silent_for: Literal["seconds", "minutes", "hours"] | None = None
    usual_step_s: float | None = None
    looks_unchanged: int | None = None
    line_repeats: bool | None = None
    windows_alike: int | None = None
    repeats_per_min: float | None = None
    load_falling: bool | None = None
    load_present: bool | None = None
    concurrency: int | None = None
    in_flight_reqs: int | None = None
    requests_done: int | None = None
    requests_dp_rank: int | None = None
    context_tokens: int | None = None
    completion_tokens: int | None = None
    temperature: float | None = None
    prompts: Prompts = Prompts()
    output_text: Literal["ok", "empty", "one-repeated-token"] | None = None
    args: tuple[str, ...] = ()
    args_absent: tuple[str, ...] = ()
    env: dict[str, Any] = {}
    model: str | None = None
    speculation: str | None = None
    num_steps: int | None = None
    topk: int | None = None
    draft_tokens: int | None = None
    drafts_per_step: int | None = None
    draft_context_tokens: int | None = None
    spec_off_from_batch: int | None = None
    tp_size: int | None = None
    draft_tp_size: int | None = None
    dp_size: int | None = None
    host_count: int | str | None = None
    gpu: Gpu = Gpu()
    http: Http = Http()
    host: HostSigns = HostSigns()
    baseline: dict[str, BaselinePoint] | None = None
    arms: tuple[Arm, ...] = ()
    claims: tuple[Arm, ...] = ()
    lines: tuple[LineKnown, ...] = ()
    previous: Previous | None = None
    same: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    counters: Literal["delta", "since-start"] | None = None
    server_tok_s: float | None = None
    later_tok_s: tuple[float, ...] = ()
    recovered_after_s: float | None = None
    restart_restores: bool | None = None

    @property
    def speculates(self) -> bool | None:
        """Whether speculation is configured; None where that is not known."""
        return None if self.speculation is None else self.speculation != "none"

    @property
    def depth(self) -> int | None:
        """Configured drafts a step, the bonus slot not counted."""
        if self.drafts_per_step is not None:
            return self.drafts_per_step
        if self.num_steps is not None:
            return self.num_steps
        return self.draft_tokens - 1 if self.draft_tokens else None

    @property
    def silence_s(self) -> float | None:
        """The shortest time without output that the facts allow, in seconds; None where nothing is known."""
        if self.seconds_since_output is not None:
            return self.seconds_since_output
        return {"seconds": 1.0, "minutes": 120.0, "hours": 3600.0}.get(self.silent_for or "")

    def has_arg(self, *flags: str) -> bool:
        """Whether any of these flags was given."""
        return any(word.partition("=")[0] in flags for word in self.args)

    def arg(self, *flags: str) -> str | None:
        """The value of the first of these flags that was given with one; None if there is none."""
        for number, word in enumerate(self.args):
            name, equals, value = word.partition("=")
            if name not in flags:
                continue
            if equals:
                return value
            following = self.args[number + 1 : number + 2]
            return following[0] if following and not following[0].startswith("--") else None
        return None

    def known(self, line: int) -> LineKnown | None:
        """What is known of a line, by its number; None if nothing is."""
        return next((row for row in self.lines if row.line == line), None)
