"""Rounds of `vllm bench serve` in one process: its command lines come in, its results go out, a JSON line each.

Run by the Python of vLLM's environment, and needs nothing of ours. The command takes ten to twenty seconds to start and a
round a few; this runs the command's own `main` again and again, so that rounds of two clients can be neighbours in time.
"""

import json
import os
import sys


def main() -> None:
    """Say that we are ready, then run what stdin says until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the command prints is not for who reads our answers
    from vllm.benchmarks import serve  # noqa: PLC0415 - it may print, which goes to stderr from here on
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        result = serve.main(parser.parse_args(json.loads(line)))
        print(json.dumps(result, default=float), file=answers, flush=True)


if __name__ == "__main__":
    main()
