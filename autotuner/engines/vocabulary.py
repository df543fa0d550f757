"""The closed lists of words for what a server's output amounts to: its state, the cause, and what to do next.

A cause is one word, so that entries, policies and people can compare; the sentence beside it says the particulars.
"""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How a server is, as far as the evidence goes."""

    LOADING = "loading"  # alive, not yet ready, progress is seen or plausible
    READY = "ready"  # start-up complete, nothing yet to be said about speed
    SERVING = "serving"  # answers; figures usable as far as the cause allows
    DEGRADED = "degraded"  # answers, in a lasting bad condition that only a restart ends
    HUNG = "hung"  # alive without progress
    CRASHED = "crashed"  # the process, or a rank it cannot do without, is dead; the port may still answer
    STOPPED = "stopped"  # ended because we asked for it
    AMBIGUOUS = "ambiguous"  # the evidence fits two states; another probe is needed
    UNOBSERVED = "unobserved"  # client output, a table: nothing can be said about the server


class Action(StrEnum):
    """What a careful operator does next."""

    KEEP = "keep"
    WAIT = "wait"
    REMEASURE = "remeasure"
    MEASURE_BASELINE = "measure-baseline"
    READ_OTHER_SOURCE = "read-other-source"
    FIX_FLAGS = "fix-flags"
    RELAUNCH_SAME = "relaunch-same"
    ABANDON = "abandon"
    GATE = "gate"
    STOP_LADDER = "stop-ladder"
    STOP_SWEEP = "stop-sweep"
    REJECT_DATA = "reject-data"
    LOOK_OUTSIDE = "look-outside"
    IGNORE = "ignore"


@dataclass(frozen=True)
class Cause:
    """One word of the list: what it means, and what is done about it unless the particulars say otherwise."""

    meaning: str
    action: Action


_A = Action
CAUSES: dict[str, Cause] = {
    "none": Cause("nothing is wrong", _A.KEEP),
    "acceptance-not-speed": Cause("acceptance and speed point different ways; the clock decides", _A.KEEP),
    "adaptive-depth": Cause(
        "the engine changes the draft depth itself, so rates are not comparable over time", _A.READ_OTHER_SOURCE
    ),
    "admission-cap": Cause("a default limit on running requests binds", _A.FIX_FLAGS),
    "bad-flag-combination": Cause("flags are wrong, contradict each other or resolve to another thing", _A.FIX_FLAGS),
    "baseline-mismatch": Cause(
        "there is no baseline in the same mode and at the same concurrency", _A.MEASURE_BASELINE
    ),
    "benign-noise": Cause("frightening words without consequence", _A.IGNORE),
    "by-design": Cause("the figure is what this run or request class is meant to show", _A.KEEP),
    "capture-failed-other": Cause("graph capture failed, and not for lack of memory", _A.FIX_FLAGS),
    "client-bound": Cause("the load generator limits the figures", _A.REMEASURE),
    "cold-start-window": Cause("compilation or warm-up is inside the measured window", _A.IGNORE),
    "collective-cost": Cause("communication between GPUs dominates the step", _A.KEEP),
    "collective-timeout": Cause("a collective operation between the ranks timed out", _A.RELAUNCH_SAME),
    "device-busy": Cause(
        "another process, often the previous server, still holds the GPU or the port", _A.RELAUNCH_SAME
    ),
    "draft-broken": Cause("nothing is ever accepted: the draft head is mis-loaded or miscomputed", _A.ABANDON),
    "draft-depth": Cause("draft depth or tree width do not suit this batch or machine", _A.FIX_FLAGS),
    "draft-mismatch": Cause("drafter and target do not fit each other", _A.ABANDON),
    "effective-differs": Cause("the value in force differs from the requested or documented one", _A.READ_OTHER_SOURCE),
    "engine-regression": Cause("another build of the engine behaves differently", _A.REMEASURE),
    "engine-state-bad": Cause("the running engine has drifted or collapsed; a restart cures it", _A.RELAUNCH_SAME),
    "gpu-fault": Cause("a hardware or driver fault", _A.STOP_SWEEP),
    "graphs-off": Cause("decoding ran without CUDA graphs", _A.FIX_FLAGS),
    "host-contention": Cause("step time changed because of memory pressure, clocks or neighbours", _A.REMEASURE),
    "host-down": Cause("the host lost power or rebooted", _A.STOP_SWEEP),
    "host-oom": Cause("the host ran out of memory and a process was killed", _A.FIX_FLAGS),
    "io-stall": Cause("a process waits for storage that does not deliver", _A.FIX_FLAGS),
    "jit-compile": Cause("kernels are being compiled", _A.WAIT),
    "kv-pressure": Cause("the KV pool is full: retraction, preemption or pre-allocation", _A.FIX_FLAGS),
    "kv-too-small": Cause("nothing or too little is left for the KV pool", _A.FIX_FLAGS),
    "leaked-requests": Cause("requests run that nobody waits for", _A.RELAUNCH_SAME),
    "long-context": Cause("acceptance falls with context length", _A.GATE),
    "metric-defect": Cause("the engine prints a wrong or misleading figure", _A.READ_OTHER_SOURCE),
    "metric-scope": Cause("wrong series, rank, unit or window for the question asked", _A.READ_OTHER_SOURCE),
    "near-break-even": Cause("gain or loss is too small to call", _A.REMEASURE),
    "no-feasible-memory": Cause("no memory fraction works: model, drafter and context do not fit", _A.ABANDON),
    "no-output": Cause("alive, but nothing comes out", _A.RELAUNCH_SAME),
    "no-sample": Cause("there were no drafts in the window", _A.WAIT),
    "non-monotonic-load": Cause("the verdict changes sign along the concurrency ladder", _A.GATE),
    "oom-in-capture": Cause("out of GPU memory during graph capture", _A.FIX_FLAGS),
    "oom-in-load": Cause("out of GPU memory, not in graph capture", _A.FIX_FLAGS),
    "output-corrupt": Cause("the server returns wrong text", _A.ABANDON),
    "own-stop": Cause("a consequence of our own stop signal", _A.IGNORE),
    "p2p-blocked": Cause("peer-to-peer transfer between GPUs does not complete", _A.FIX_FLAGS),
    "prompts-unlike-traffic": Cause("the prompts or their format differ from real traffic", _A.REMEASURE),
    "rank-skew": Cause("one rank is so much slower that its peers time out", _A.RELAUNCH_SAME),
    "rendezvous-timeout": Cause("ranks did not find each other in time", _A.RELAUNCH_SAME),
    "request-unservable": Cause("one request can never be admitted", _A.FIX_FLAGS),
    "sample-too-small": Cause("too few tokens, prompts, boots or repeats", _A.WAIT),
    "saturated": Cause("queue time is being measured", _A.STOP_LADDER),
    "silent-stage": Cause("a stage that prints nothing, or only a repeating warning", _A.WAIT),
    "speculation-inactive": Cause("speculation is configured, but nothing is drafted", _A.FIX_FLAGS),
    "state-slots-limit": Cause("recurrent-state slots, not KV, limit the running requests", _A.FIX_FLAGS),
    "step-cost": Cause("the speculative step is so much dearer that its accept length does not pay", _A.ABANDON),
    "thermal-or-power-limit": Cause("clocks are held down by heat or a power cap", _A.REMEASURE),
    "told-to-stop": Cause("somebody other than autotuner ended the server", _A.LOOK_OUTSIDE),
    "unequal-outputs": Cause("the arms produced outputs of different length or text", _A.REMEASURE),
    "unknown": Cause("the cause is not in the lines shown", _A.READ_OTHER_SOURCE),
    "unsuitable-prior": Cause("an expectation or imported number does not apply or cannot be true", _A.REJECT_DATA),
    "unsupported": Cause("this engine, as it is installed, lacks the method or cannot read the model", _A.ABANDON),
    "upstream-starved": Cause("the worker waits for other workers", _A.LOOK_OUTSIDE),
    "warm-prefix-cache": Cause("repeated prompts were served from cache", _A.REMEASURE),
    "watchdog-timeout": Cause("the engine's own watchdog ended it", _A.RELAUNCH_SAME),
    "window-spans-gap": Cause("the window contains idle or prefill time", _A.IGNORE),
    "workload-dependent": Cause("the verdict differs between classes of prompts", _A.GATE),
}
