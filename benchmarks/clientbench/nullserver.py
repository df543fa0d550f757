"""The null server's process: compiled, started on a core of its own, told its schedule, asked for the truth."""

import http.client
import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Self

from clientbench.processes import end, pinned
from clientbench.schedule import Mode

SOURCE = Path(__file__).resolve().parents[1] / "nullserver.c"


def compiled(folder: Path) -> Path:
    """Compile the server into this folder and return it; end the program where that cannot be done."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        sys.exit(
            "no C compiler found (cc, gcc or clang; Debian: apt-get install gcc libc6-dev): the null server is written in C"
        )
    made = folder / "nullserver"
    done = subprocess.run([compiler, "-O2", "-o", made, SOURCE], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{compiler} could not compile {SOURCE.name} (it needs Linux 5.11 and glibc 2.35):\n{done.stderr}")
    return made


class NullServer:
    """A running server; use as a context manager."""

    def __init__(self, program: Path, core: int) -> None:
        self._process = subprocess.Popen([program], stdout=subprocess.PIPE, preexec_fn=pinned(core))  # noqa: PLW1509 - one thread
        assert self._process.stdout is not None
        self.events = self._process.stdout.fileno()
        words = os.read(self.events, 64).decode().split()
        if len(words) != 2:
            end(self._process)
            sys.exit("the null server did not start")
        self.port = int(words[1])
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end(self._process)
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    def prepare(self, mode: Mode) -> None:
        """Set a mode's schedule and forget what was counted."""
        self._get(f"/ctl?ttft={mode.ttft_ms}&itl={mode.itl_ms}&burst={mode.burst}&expect={mode.requests}")
        self._get("/reset")
        poll = select.poll()
        poll.register(self.events, select.POLLIN)
        while poll.poll(0):  # what was said of an earlier run
            os.read(self.events, 4096)

    def stats(self) -> dict[str, float]:
        """The truth so far."""
        return self._get("/stats")

    def _get(self, path: str) -> dict[str, float]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            answer: dict[str, float] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return answer
