"""llama.cpp's llama-server, the operator's own binary or the embedded one: argv, endpoints, facts, diagnosis."""

import re
import sys

from autotuner.core.candidate import Candidate, flag_argv
from autotuner.engines import llamacpp_info, llamacpp_moves, prometheus
from autotuner.engines.base import (
    Counters,
    Diagnosis,
    Effective,
    Endpoints,
    LogFact,
    Note,
    Place,
    Rank,
    ServerExit,
    Speculation,
    Stage,
    StageSeen,
    Window,
)
from autotuner.engines.diagnosis import choose, signature
from autotuner.engines.wishes import Answer, Wish

EMBEDDED = "embedded"  # as launch.binary: the server inside the xllamacpp wheel

_ENVELOPE = re.compile(r"^(?:\d+\.\d\d\.\d{3}\.\d{3}\s+)?([A-Z])\s+(?=\S)")
_ACCEPTANCE = re.compile(
    r"draft acceptance(?: rate)?\s*=\s*([\d.]+)\s*\(\s*(\d+)\s+accepted\s*/\s*(\d+)\s+generated\)"
    r"(?:,\s*mean len\s*=\s*([\d.]+))?"
)
_SLOTS = re.compile(r"initializing, n_slots = (\d{1,9}), n_ctx_slot = (\d{1,9})(?:, kv_unified = '(true|false)')?")
_SYNTHETIC = re.compile(r"synthetic acceptance: n_max = (\d+), mean length = ([\d.]+)")

_STAGES: tuple[tuple[str, StageSeen], ...] = (
    ("loading model", StageSeen(Stage.WEIGHTS)),
    ("loading draft model", StageSeen(Stage.DRAFT_WEIGHTS)),
    ("n_ctx_slot", StageSeen(Stage.KV_POOL)),
    ("warming up the model", StageSeen(Stage.WARM_UP)),
    ("model loaded", StageSeen(Stage.WARM_UP, ended=True)),
    ("listening on http", StageSeen(Stage.HTTP_UP)),
)

SIGNATURES = (
    signature(
        "bad-flag-combination",
        r"invalid argument:|the argument has been removed|error while handling argument|unrecognized arguments",
        "the server refused a flag",
        "compare with `llama-server --help` of this very binary; flags were renamed over time",
    ),
    signature(
        "draft-mismatch",
        r"failed to initialize speculative decoding context|failed to load draft model"
        r"|vocab.*(mismatch|not compatible|must match|does not match)",
        "the draft model does not fit the target model",
        "use a drafter made for this very model: same tokenizer, same vocabulary",
    ),
    signature(
        "unsupported",
        r"unknown model architecture|invalid magic|tensor .* (data is not within|not found)|failed to read (magic|tensor)|"
        r"error loading model|model is corrupted or incomplete|gguf_init_from_file",
        "the model file is damaged, cut short, or of a kind this build does not know",
        "compare the file's size and hash with its source, and the build with the model's requirements",
    ),
    signature(
        "bad-flag-combination",
        r"failed to open (GGUF file|.*\.gguf)|No such file or directory",
        "the model file was not found",
        "check launch.model",
    ),
    signature(
        "oom-in-load",
        r"unable to allocate|failed to allocate (buffer|compute)|cudaMalloc failed|OutOfDeviceMemory"
        r"|allocation of size \d+ failed",
        "the server ran out of memory",
        "lower ctx-size or parallel, or keep fewer layers on the GPU (n-gpu-layers)",
    ),
    signature("unknown", r"GGML_ASSERT|CUDA error|GGML_ABORT", "the engine aborted", "report it with the lines below"),
    signature(
        "unsupported",
        r"failed to load model|exiting due to model loading error",
        "the model could not be loaded",
        weak=True,
    ),
)


class LlamaCpp:
    """Reader of llama-server. The embedded server takes the same flags, so either is a drop-in for the other."""

    name = "llamacpp"

    def argv(self, candidate: Candidate, place: Place, rank: Rank | None = None) -> tuple[str, ...]:
        """The server's command, with metrics and slots on: without them speculation cannot be judged."""
        launch = candidate.launch
        reporting = {"metrics": True, "slots": True}
        args = {**reporting, **launch.args}
        return (
            *self._program(candidate),
            *("--model", launch.model or "", "--host", place.host, "--port", str(place.port)),
            *flag_argv(args),
        )

    def environment(self, candidate: Candidate) -> dict[str, str]:
        """No colours; and no LLAMA_ARG_* of the daemon's own, each of which silently sets a flag."""
        return {"NO_COLOR": "1", "PYTHONUNBUFFERED": "1", **candidate.launch.env}

    def endpoints(self, candidate: Candidate) -> Endpoints:
        """llama-server answers 503 on /health while it loads."""
        return Endpoints(health="/health")

    def info_paths(self, candidate: Candidate) -> tuple[str, ...]:
        """The properties, and the slots: only they tell whether anything is speculated."""
        return llamacpp_info.PATHS

    def read_info(self, path: str, text: str) -> Effective:
        """Slots, context, the build, and whether it speculates."""
        return llamacpp_info.read(path, text)

    def asked(self, candidate: Candidate) -> Effective:
        """What the flags ask for."""
        speculative = self.speculation(candidate)
        steps = speculative.num_steps if speculative else None
        return llamacpp_info.asked(candidate, speculating=speculative is not None, steps=steps)

    def help_argv(self, candidate: Candidate) -> tuple[str, ...] | None:
        """`--help` of the very program the candidate starts."""
        return (*self._program(candidate), "--help")

    def check(self, candidate: Candidate) -> tuple[str, ...]:
        """Speculation that llama-server would silently not do, and flags that belong to the slot."""
        problems = [
            f"args.{flag} belongs to the slot; set it in the settings"
            for flag in ("port", "host")
            if candidate.arg(flag)
        ]
        drafter = candidate.arg("spec-draft-model", "model-draft", "md")
        method = str(candidate.arg("spec-type") or "none")
        if drafter and method == "none":
            problems.append(
                "args.spec-draft-model loads a drafter, but args.spec-type is unset, so nothing would be speculated; "
                'add spec-type = "draft-simple" (or the drafter\'s own type)'
            )
        if "draft-simple" in method and not drafter:
            problems.append('args.spec-type = "draft-simple" needs args.spec-draft-model')
        if candidate.arg("spec-synth-len") and method == "none":
            problems.append("args.spec-synth-len needs args.spec-type")
        return tuple(problems)

    def check_nodes(self, candidate: Candidate, count: int) -> tuple[str, ...]:
        """A llama-server is one process; its RPC backend is another program, with neither a key nor a check of its peer."""
        return ("llama.cpp serves from one node; take a slot on one host for it",)

    def speculation(self, candidate: Candidate) -> Speculation | None:
        """From --spec-type and --spec-draft-n-max (3 unless set); n-gram methods draft as long as they match."""
        method = str(candidate.arg("spec-type") or "none")
        if method == "none":
            return None
        steps = candidate.arg("spec-draft-n-max", "draft-max")
        if "ngram" in method:
            return Speculation(method, int(str(steps)) if steps is not None else None)
        return Speculation(method, int(str(steps if steps is not None else 3)))

    def change(self, candidate: Candidate, wish: Wish, version: str | None) -> Answer:
        """See llamacpp_moves."""
        return llamacpp_moves.change(candidate, wish)

    def silence_limit_s(self, stage: Stage) -> float:
        """llama-server prints nothing while it loads, so bytes read and memory are the only signs there.

        Nor while it works at prompts, which on a CPU takes minutes where many long ones come at once.
        """
        if stage is Stage.GENERATING:
            return 600.0
        return 300.0 if stage in {Stage.WEIGHTS, Stage.DRAFT_WEIGHTS} else 120.0

    def read_line(self, line: str) -> tuple[LogFact, ...]:
        """Stages, slots (the running cap), per-request draft acceptance, warnings and errors."""
        facts: list[LogFact] = [seen for text, seen in _STAGES if text in line]
        if slots := _SLOTS.search(line):
            facts.append(_slots(slots))
        if acceptance := _ACCEPTANCE.search(line):
            facts.append(_acceptance_window(acceptance))
        if _SYNTHETIC.search(line):
            facts.append(Effective(speculating=True))
        if "failed to initialize speculative decoding context" in line:
            facts.append(Effective(speculating=False))
        envelope = _ENVELOPE.match(line)
        if envelope and envelope.group(1) in "WE":
            facts.append(Note("error" if envelope.group(1) == "E" else "warning", line[envelope.end() :]))
        return tuple(facts)

    def read_metrics(self, text: str) -> Counters:
        """llama-server raises its token and draft counters when a request ends, not while it runs."""
        scrape = prometheus.samples(text)

        def total(name: str) -> float | None:
            return prometheus.total(scrape, f"llamacpp:{name}")

        return Counters(
            running=total("requests_processing"),
            queued=total("requests_deferred"),
            generated_tokens=total("tokens_predicted_total"),
            prompt_tokens=total("prompt_tokens_total"),
            cached_prompt_tokens=total("prompt_tokens_cached_total"),
            drafts=total("spec_decode_num_drafts_total"),
            drafted=total("spec_decode_num_draft_tokens_total"),
            accepted=total("spec_decode_num_accepted_tokens_total"),
        )

    def diagnose(self, exit_: ServerExit, lines: tuple[str, ...]) -> Diagnosis:
        """Why llama-server ended."""
        return choose(SIGNATURES, exit_, lines)

    def _program(self, candidate: Candidate) -> tuple[str, ...]:
        launch = candidate.launch
        if launch.binary in {None, EMBEDDED}:
            return (launch.python or sys.executable, "-m", "autotuner.engines.embedded")
        return (str(launch.binary),)


def _slots(match: re.Match[str]) -> Effective:
    """Slots share one KV cache, or have a part of it each; older builds do not say which."""
    slots, context, unified = int(match.group(1)), int(match.group(2)), match.group(3)
    tokens = {"true": context, "false": slots * context}.get(unified)
    return Effective(running_cap=slots, context_len=context, kv_tokens=tokens)


def _acceptance_window(match: re.Match[str]) -> Window:
    """The lines of one finished request: mean len is 1 + accepted / verify steps; older builds do not print it."""
    accepted, drafted = int(match.group(2)), int(match.group(3))
    mean_len = float(match.group(4)) if match.group(4) else None
    drafts = round(accepted / (mean_len - 1)) if mean_len and mean_len > 1 else None
    return Window(
        source="log",
        accept_len=mean_len,
        certainty="derived",
        accept_rate=accepted / drafted if drafted else None,
        drafts=drafts,
        drafted=drafted,
        accepted=accepted,
    )
