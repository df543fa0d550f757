"""A rehearsed server as a process of a test: started, asked, read, and ended however the test ends."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from patience import FOR_EVER_S, PATIENCE_S

from autotuner.engines import ENGINES
from autotuner.engines.base import Counters, LogFact
from autotuner.engines.logtext import split_lines

PROGRAMS = {
    "sglang": ("python3", "-m", "sglang.launch_server", "--model-path", "/models/m", "--enable-metrics"),
    "vllm": ("vllm", "serve", "/models/m"),
    "llamacpp": ("llama-server", "--model", "/models/m", "--metrics"),
}


class Rehearsed:
    """One server: the engine's argv with a port of its own, loading two thousand times faster unless told otherwise."""

    def __init__(
        self, folder: Path, engine: str, *flags: str, env: dict[str, str] | None = None, **options: object
    ) -> None:
        self.engine = ENGINES[engine]
        self.port = free_port()
        self._log = folder / f"server-{self.port}.log"
        own = {"time_scale": 2000, "max_seconds": FOR_EVER_S, **options}
        words = [word for key, value in own.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        server = [sys.executable, "-m", "autotuner.rehearsal.server", "--as", engine, *words]
        argv = [*server, "--", *PROGRAMS[engine], "--port", str(self.port), *flags]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("AUTOTUNER_", "SGLANG_", "VLLM_"))}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**clean, **(env or {})}
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)

    @property
    def text(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def facts(self) -> list[LogFact]:
        return [fact for line in split_lines(self._log.read_bytes()) for fact in self.engine.read_line(line)]

    @property
    def counters(self) -> Counters:
        return self.engine.read_metrics(self.get("/metrics")[1])

    def get(self, path: str, timeout_s: float = PATIENCE_S) -> tuple[int, str]:
        return self._ask("GET", path, None, timeout_s)

    def complete(
        self, tokens: int, prompt: str = "a b c", timeout_s: float = PATIENCE_S, **more: object
    ) -> dict[str, Any]:
        status, text = self._ask("POST", "/v1/completions", {"prompt": prompt, "max_tokens": tokens, **more}, timeout_s)
        assert status == 200, text
        return dict(json.loads(text))

    def events(self, tokens: int, path: str = "/v1/completions", **more: object) -> list[Any]:
        body = {"prompt": "a b c", "max_tokens": tokens, "stream": True, **more}
        status, text = self._ask("POST", path, body, PATIENCE_S)
        assert status == 200
        data = [line.removeprefix("data: ") for line in text.split("\n") if line]
        assert data[-1] == "[DONE]"
        return [json.loads(line) for line in data[:-1]]

    def load(self, count: int, tokens: int) -> list[dict[str, int]]:
        """So many requests at once; their usage."""
        with ThreadPoolExecutor(count) as pool:
            asked = [pool.submit(self.complete, tokens + i, "w " * (10 + i)) for i in range(count)]
            return [dict(a.result()["usage"]) for a in asked]

    def wait_ready(self) -> Self:
        self.wait(self._healthy, "ready")
        return self

    def wait(self, what: Callable[[], Any], why: str, timeout_s: float = PATIENCE_S) -> Any:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if got := what():
                return got
            time.sleep(0.02)
        raise AssertionError(f"never {why}: {self.text[-2000:]}")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def _healthy(self) -> bool:
        assert self.process.poll() is None, self.text
        try:
            return self.get("/health")[0] == 200
        except OSError:
            return False

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
