"""One run of one client against the null server, measured the same way for every client."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from clientbench.contestants import Client
from clientbench.nullserver import NullServer
from clientbench.processes import Watched, end_orphans, pinned, tree, watch
from clientbench.report import Run
from clientbench.schedule import Mode

LIMIT_S = 120.0
GOES_ON_S = 0.05  # between looks, after the last answer, whether a client asks for more than it was told to


@dataclass
class Bench:
    """Where runs take place: the server, the core of the clients and the server's, a folder to work in."""

    server: NullServer
    server_core: int
    client_core: int
    folder: Path

    def run(
        self,
        client: Client,
        mode: Mode,
        *,
        disturbed: Callable[[list[int]], AbstractContextManager[None]] | None = None,
        stop_after_s: float | None = None,
    ) -> Run:
        """Run a client through a mode and return what was seen.

        `disturbed` is given the client's processes at the first request, and what it returns lasts until they end. With
        `stop_after_s` the client is sent SIGTERM so long after the first request.
        """
        work = self.folder / "run"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        self.server.prepare(mode)
        run = Run(client.name, mode)
        stack = ExitStack()
        stopped_at: list[float] = []

        def on_event(line: str, seen: Watched) -> None:
            if line == "first" and (disturbed or stop_after_s is not None):
                seen.known = tree(seen.pid)
                stack.enter_context(disturbed(seen.known) if disturbed else nullcontext())
                if stop_after_s is not None:
                    time.sleep(stop_after_s)
                    stopped_at.append(time.monotonic())
                    os.kill(seen.pid, signal.SIGTERM)
            elif line == "last" and not run.truth:
                run.truth = self.server.stats()
                seen.look_again_at = time.monotonic() + GOES_ON_S
            elif line == "again":
                if self.server.stats()["requests"] > mode.requests:
                    os.kill(seen.pid, signal.SIGTERM)  # it goes on; what is compared ended with the last answer
                else:
                    seen.look_again_at = time.monotonic() + GOES_ON_S

        start = client.start(mode, self.server.url, work)
        with (work / "stdout").open("wb") as out, (work / "stderr").open("wb") as err:
            began = time.monotonic_ns()
            process = subprocess.Popen(
                start.argv,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd=work,
                env=os.environ | start.env,
                preexec_fn=pinned(self.client_core),  # noqa: PLW1509 - this program has one thread
            )
            assert process.stdin is not None
            with stack:
                process.stdin.write(start.order)
                process.stdin.flush()
                seen = watch(process, began, self.server.events, on_event, LIMIT_S)
            ended = time.monotonic()
            process.stdin.close()
        run.truth = run.truth or self.server.stats()
        run.exit_s = ended - stopped_at[0] if stopped_at else None
        run.left_behind = end_orphans({self.server.pid})
        self._fill(run, seen)
        try:
            client.read(run, work)
        except (OSError, ValueError, LookupError) as error:
            run.failure = run.failure or f"no usable result ({error})"
        return run

    @staticmethod
    def _fill(run: Run, seen: Watched) -> None:
        run.exit_code, run.pss_mb = seen.exit_code, seen.pss_mb
        if seen.cpu_first_s is not None:
            run.cpu_s = seen.cpu_end_s - seen.cpu_first_s
            run.load_cpu_s = None if seen.cpu_last_s is None else seen.cpu_last_s - seen.cpu_first_s
        if run.truth.get("first_ns"):
            run.start_s = (run.truth["first_ns"] - seen.started_ns) / 1e9
        if seen.timed_out:
            run.failure = f"not ended after {LIMIT_S:.0f} s"
        elif seen.exit_code:
            run.failure = f"exit code {seen.exit_code}"
        elif seen.cpu_first_s is None:
            run.failure = "it sent no request"
