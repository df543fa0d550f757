"""Behaves like another benchmark client, good and bad: python fake_client.py CLIENT MODE ARGUMENTS… as that client would get.

It sends nothing anywhere; it writes a result file of the client's form where the arguments say, or does not. MODE is one of
good, all-failed (exit 0), half-file, nothing (exit 0 without a file), no-tokenizer, hangs (ignores SIGINT and SIGTERM), child
(leaves one in a session of its own, then ends well); `hangs` and `child` write the child's pid into the file of $FAKE_CLIENT_PID.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

COUNT, TOKENS, ITL_S, TTFT_S = 12, 4, 0.05, 0.1


def main(client: str, mode: str, arguments: list[str]) -> int:
    print("2026-01-01|INFO| completed | successful=3 errored=1 incomplete=0", flush=True)
    if mode == "no-tokenizer":
        print("OSError: We couldn't connect to 'https://huggingface.co' to load the files", file=sys.stderr)
        return 1
    if mode in {"hangs", "child"}:
        child = subprocess.Popen([sys.executable, "-c", _STUBBORN], start_new_session=True)
        Path(os.environ["FAKE_CLIENT_PID"]).write_text(str(child.pid))
    if mode == "hangs":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(600)
    if mode == "nothing":
        return 0
    text = result(client, failed=mode == "all-failed")
    where(client, arguments).write_text(text[: len(text) // 2] if mode == "half-file" else text)
    return 0


_STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def where(client: str, arguments: list[str]) -> Path:
    def of(flag: str) -> str:
        return arguments[arguments.index(flag) + 1]

    if client == "vllm":
        return Path(of("--result-dir")) / of("--result-filename")
    if client == "sglang":
        return Path(of("--output-file"))
    return Path(json.loads(Path(of("--config")).read_text())["spec"]["outputs"][0]["path"])


def result(client: str, *, failed: bool) -> str:
    """Two streams, one request after another on each."""
    each = TTFT_S + (TOKENS - 1) * ITL_S
    starts = [1000 + each * (i // 2) for i in range(COUNT)]
    if client == "guidellm":
        rows = [guidellm_row(start, failed=failed) for start in starts]
        kept = {"errored" if failed else "successful": rows, "incomplete": []}
        return json.dumps({"benchmarks": [{"requests": kept}]})
    columns: dict[str, object] = {
        "duration": each * COUNT / 2,
        "input_lens": [16] * COUNT,
        "output_lens": [0 if failed else TOKENS] * COUNT,
        "ttfts": [0.0 if failed else TTFT_S] * COUNT,
        "itls": [[] if failed else [ITL_S] * (TOKENS - 1)] * COUNT,
        "errors": ["Internal Server Error" if failed else ""] * COUNT,
    }
    if client == "vllm":
        columns |= {"start_times": starts, "queue_times": [0.0] * COUNT}
    return json.dumps(columns) + "\n"


def guidellm_row(start: float, *, failed: bool) -> dict[str, object]:
    first, last = start + TTFT_S, start + TTFT_S + (TOKENS - 1) * ITL_S
    timings = {
        "targeted_start": start,
        "request_start": start,
        "resolve_start": start,
        "first_token_iteration": None if failed else first,
        "last_token_iteration": None if failed else last,
        "token_iterations": 0 if failed else TOKENS,
        "request_end": None if failed else last,
        "resolve_end": last,
    }
    status, error = ("errored", "HTTPStatusError('500')") if failed else ("completed", None)
    return {
        "info": {"status": status, "timings": timings, "error": error},
        "input_metrics": {"total_tokens": 16, "cached_tokens": 0},
        "output_metrics": {"total_tokens": None if failed else TOKENS},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
