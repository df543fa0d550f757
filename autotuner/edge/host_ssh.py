"""A host over SSH behind the same seam as this machine: an agent there does what the local host does here.

The agent is this package's own code, copied as one file that is named by its hash. A connection that is lost costs nothing:
the servers live on, a new connection gets a new agent, and what was asked is asked again; so every question can be asked twice.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import PurePosixPath
from typing import Any

import asyncssh
from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential, wait_random

from autotuner import log
from autotuner.core.redact import one_line
from autotuner.edge import clock, ssh
from autotuner.edge.bundle import bundle
from autotuner.edge.destination import Destination
from autotuner.edge.far_programs import PROBE, STARTER
from autotuner.edge.host import Activity, GpuUse, LaunchSpec, PortHolder, Ran, Readings, ServerSeen
from autotuner.edge.host_local import AFTER_GRACE_S, READ_S, START_WAIT_S
from autotuner.errors import HostError, HostUnreachable

AGENT = "autotuner.edge.agent"
BENCH = "autotuner.bench.worker"
PATIENCE_S = 20.0  # how long a question waits for a lost connection to come back before it is given up
RETRY_MAX_S = 15.0
REFUSED_FOR_S = 30.0  # a host with a wrong key is not asked again at once
ANSWER_S = 60.0  # what an answer may take beyond its own time; an agent that is later is replaced
LOG_PIECE_MAX = 1 << 18
NOISE_LINES_MAX = 200  # what a login shell may print before the agent speaks


class _LostError(Exception):
    """The connection, or the agent on it, is gone."""


class SshHost:
    """Runs servers on another machine.

    `way` leads there: (name, destination) of each jump host, the host itself last. `controller` is the id of this daemon, under
    which it works its folder there; without one the host is only looked at.
    """

    here = False

    def __init__(self, way: Sequence[tuple[str, Destination]], controller: str = "") -> None:
        self._cuts = 0
        self.name, self.destination = way[-1]
        self._way = tuple(way)
        self._controller = controller
        self._link: _Link | None = None
        self._connecting: asyncio.Task[_Link] | None = None
        self._down_since_s: float | None = None
        self._why = ""
        self._refused: tuple[float, HostError] | None = None
        self._forwards: dict[tuple[str, int], int] = {}
        self._log = log.get().bind(host=self.name) if controller else None  # a command says itself what it found

    @property
    def cuts(self) -> int:
        """How often a connection was lost; the present one counts once it is, whoever asks next."""
        return self._cuts + (self._link is not None and bool(self._link.lost))

    @property
    def can_bench(self) -> bool:
        """Whether the settings name a Python there that can run the load client."""
        return self.destination.bench_python is not None

    async def start(self, spec: LaunchSpec) -> None:
        """Start a launch there; one whose answer was lost with its connection is not started twice."""
        given = {
            "launch_id": spec.launch_id,
            "slot": spec.slot,
            "argv": spec.argv,
            "env": spec.env,
            "secret_files": spec.secret_files,
            "stop_grace_s": spec.stop_grace_s,
        }
        await self._ask("start", START_WAIT_S, **given)

    async def inspect(self, launch_id: str) -> ServerSeen:
        """Look at a launch."""
        return _seen(await self._ask("inspect", launch_id=launch_id))

    async def stop(self, launch_id: str, grace_s: float) -> ServerSeen:
        """Stop a launch and everything below it."""
        longest_s = 2 * (grace_s + AFTER_GRACE_S)  # the shim's time, then that for what slipped away from it
        return _seen(await self._ask("stop", longest_s, launch_id=launch_id, grace_s=grace_s))

    async def read_log(self, launch_id: str, offset: int, limit: int = 1 << 20) -> bytes:
        """Return bytes of a launch's log; the offset is the caller's, so no connection can lose or double one."""
        limit = min(limit, LOG_PIECE_MAX)
        return base64.b64decode(await self._ask("read_log", launch_id=launch_id, offset=offset, limit=limit))

    async def activity(self, launch_id: str) -> Activity:
        """Sum the signs of life over a launch's processes."""
        return Activity(**await self._ask("activity", launch_id=launch_id))

    async def port_holder(self, port: int) -> PortHolder | None:
        """Tell who listens on a port there."""
        found = await self._ask("port_holder", port=port)
        return PortHolder(**found) if found is not None else None

    async def gpus(self, indices: tuple[int, ...]) -> tuple[GpuUse, ...]:
        """Report memory and processes of these GPUs."""
        found = await self._ask("gpus", indices=indices)
        return tuple(GpuUse(**{**gpu, "processes": tuple(map(tuple, gpu["processes"]))}) for gpu in found)

    async def free_disk_mib(self) -> float:
        """Free space where the launches live there."""
        return float(await self._ask("free_disk_mib"))

    async def readings(self, gpus: tuple[int, ...]) -> Readings:
        """Read GPUs and host there."""
        found = await self._ask("readings", READ_S, gpus=gpus)
        return Readings(**{**found, "gpus": tuple(found["gpus"])})

    async def cut_logs(self, launch_ids: Sequence[str], most_bytes: int) -> dict[str, str]:
        """Cut the logs there that are too long."""
        return dict(await self._ask("cut_logs", launch_ids=list(launch_ids), most_bytes=most_bytes))

    async def old_launches(self, protected: AbstractSet[str]) -> list[str]:
        """List the folders of launches there that are not protected."""
        return list(await self._ask("old_launches", protected=sorted(protected)))

    async def remove_launches(self, launch_ids: Sequence[str]) -> int:
        """Remove folders of launches there, but of none that lives."""
        return int(await self._ask("remove_launches", ANSWER_S, launch_ids=list(launch_ids)))

    async def forget_programs(self) -> int:
        """Remove agents, load clients and shims of earlier versions there."""
        return int(
            await self._ask("forget_programs", but=[bundle("agent", AGENT).file_name, bundle("bench", BENCH).file_name])
        )

    async def run(self, argv: tuple[str, ...], timeout_s: float) -> Ran:
        """Run a short command there; one whose answer is lost is run again."""
        return Ran(**await self._ask("run", timeout_s, argv=argv, timeout_s=timeout_s))

    async def launch_of(self, pid: int) -> str | None:
        """Tell the launch that a process belongs to."""
        found = await self._ask("launch_of", pid=pid)
        return str(found) if found is not None else None

    async def facts(self) -> dict[str, Any]:
        """What `hosts test` shows: Python's version, the host's name, its wall time in seconds."""
        return dict(await self._ask("facts"))

    async def reach(self, address: str, port: int) -> tuple[str, int]:
        """Forward a port of ours to one there; it stays the same over lost connections, where it can."""
        link = await self._linked()
        if (address, port) not in link.forwarded:
            await self._forward(link, address, port)
        return "127.0.0.1", self._forwards[address, port]

    async def start_bench(self) -> tuple[asyncssh.SSHClientProcess[bytes], int]:
        """Start the load client there, copied and compared first; return its process, and the cores that it may use.

        Raise HostError where its Python cannot run it.
        """
        link, program = await self._linked(), bundle("bench", BENCH)
        path = str(PurePosixPath(link.folder) / program.file_name)
        if (found := await self.bench_state()) == "missing":
            await link.connection.put(link.folder, program)
        elif found != "ready":
            raise HostError(f"the benchmark cannot run on host {self.name}: {found} ([hosts.{self.name}] bench_python)")
        cores = int((await self.facts())["cores"])
        argv = (str(self.destination.bench_python), "-I", "-c", STARTER, path, program.sha256)
        return await link.connection.start(argv), cores

    async def bench_state(self) -> str:
        """Whether the load client is there: `ready`, `missing`, or why the Python named for it cannot run it."""
        link, program, python = await self._linked(), bundle("bench", BENCH), str(self.destination.bench_python)
        path = str(PurePosixPath(link.folder) / program.file_name)
        ran = await self.run((python, "-I", "-c", PROBE, path, program.sha256), ANSWER_S)
        last = ran.output.strip().splitlines()[-1:] or ["it says nothing"]
        found = one_line(last[0], 200)
        return found if found in {"ready", "missing"} else f"{python}: {found}"

    def close(self) -> None:
        """Let go of the host; its servers live on."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._link is not None:
            self._link.abort()

    async def _ask(self, what: str, longest_s: float = 0.0, **given: Any) -> Any:
        """Ask the agent, over one connection after another until one lives long enough.

        Raise HostUnreachable when there was none for PATIENCE_S, HostKeyRefused at once.
        """
        while True:
            link = await self._linked()
            try:
                return await link.ask(what, given, ANSWER_S + longest_s)
            except _LostError as error:
                self._lost(link, str(error))

    def _lost(self, link: "_Link", why: str) -> None:
        """Take note of a lost connection, once however many were waiting on it."""
        link.abort()
        if self._link is link:
            self._link = None
            self._down_since_s = clock.monotonic_s()
            self._why = why
            self._cuts += 1
            self._say("connection lost", why=why)

    async def _linked(self) -> "_Link":
        """The open connection, or the next; the attempts go on behind whoever has lost patience."""
        if self._link is not None and self._link.lost:
            self._lost(self._link, self._link.lost)
        if self._link is not None:
            return self._link
        if self._refused is not None and clock.monotonic_s() < self._refused[0]:
            raise type(self._refused[1])(str(self._refused[1]))
        if self._down_since_s is None:
            self._down_since_s = clock.monotonic_s()
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        task = self._connecting
        left_s = self._down_since_s + PATIENCE_S - clock.monotonic_s()
        done, _ = await asyncio.wait({task}, timeout=max(0.0, left_s))
        if not done:
            raise self._away()
        return self._connected(task)

    def _away(self) -> HostUnreachable:
        why = self._why or "no answer"
        head = why if why.startswith(f"host {self.name} ") else f"host {self.name} cannot be reached: {why}"
        return HostUnreachable(
            f"{head}; what runs there runs on, and is taken up again as soon as the host answers: "
            f"autotuner hosts test {self.name}"
        )

    def _connected(self, task: "asyncio.Task[_Link]") -> "_Link":
        """Take over what an attempt came to. Several may wait for it: the first takes it over."""
        if self._connecting is task:
            self._connecting = None
            error = None if task.cancelled() else task.exception()
            if isinstance(error, HostError):
                self._refused, self._down_since_s = (clock.monotonic_s() + REFUSED_FOR_S, error), None
            elif error is None and not task.cancelled():
                self._link, self._down_since_s, self._refused = task.result(), None, None
        return task.result()

    async def _connect(self) -> "_Link":
        """Try until it works or cannot: a wrong key, an agent that is refused."""
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type((HostUnreachable, _LostError)),
            wait=wait_exponential(multiplier=0.1, max=RETRY_MAX_S) + wait_random(0, 0.2),
            before_sleep=lambda state: self._failed(state.outcome.exception() if state.outcome else None),
            reraise=True,
        ):
            with attempt:
                link = await open_link(self._way, self._controller)
                try:
                    for address, port in self._forwards:
                        await self._forward(link, address, port)
                except BaseException:
                    link.abort()
                    raise
                self._say("connected", folder=link.folder)
                return link
        raise HostUnreachable(f"host {self.name} was given up")  # never: the attempts have no end

    def _failed(self, error: BaseException | None) -> None:
        why = str(error) or type(error).__name__
        if why != self._why:
            self._say("cannot be reached", why=why)
        self._why = why

    def _say(self, what: str, **more: str) -> None:
        if self._log is not None:
            self._log.info(what, **more)

    async def _forward(self, link: "_Link", address: str, port: int) -> None:
        listener = await link.connection.forward(self._forwards.get((address, port), 0), address, port)
        self._forwards[address, port] = listener.get_port()
        link.forwarded.add((address, port))


class _Link:
    """One connection with its agent: questions go out with a number, answers come back with it, in any order."""

    def __init__(self, connection: ssh.Connection, process: asyncssh.SSHClientProcess[bytes], folder: str) -> None:
        self.connection = connection
        self.folder = folder
        self.forwarded: set[tuple[str, int]] = set()
        self.lost = ""
        self._process = process
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def ask(self, what: str, given: dict[str, Any], longest_s: float) -> Any:
        """Ask one question. Raise what the host raised there, or _LostError if no answer can come any more."""
        if self.lost:
            raise _LostError(self.lost)
        self._number += 1
        number = self._number
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(longest_s):
                line = json.dumps({"id": number, "do": what, "with": given}).encode()
                self._process.stdin.write(line + b"\n")
                await self._process.stdin.drain()
                reply = await answer
        except TimeoutError:
            raise _LostError(f"the agent did not {what} within {longest_s:.0f} s") from None
        except (OSError, asyncssh.Error) as error:
            raise _LostError(ssh.said(error)) from None
        finally:
            self._waiting.pop(number, None)
        if "error" in reply:
            raise (
                ssh.full(self.connection.name, self.folder)
                if reply["kind"] == "DiskFull"
                else HostError(reply["error"])
            )
        return reply["gives"]

    def abort(self) -> None:
        """Let go of the connection; whoever waits for an answer gets none."""
        self.connection.abort()
        self._end("it was given up")

    async def _read(self) -> None:
        why = "the host closed the connection"
        try:
            async for line in ssh.lines(self._process.stdout):
                reply = json.loads(line)
                waiting = self._waiting.get(reply["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
            error = await self._process.stderr.read(4000)
            why = one_line(error.decode("utf-8", "replace")[-300:], 300) or why
        except (OSError, ValueError, KeyError, TypeError, asyncssh.Error) as error:
            why = ssh.said(error)
        finally:
            self._end(why)

    def _end(self, why: str) -> None:
        self.lost = self.lost or why
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_LostError(self.lost))


def _seen(answer: dict[str, Any]) -> ServerSeen:
    """One host has no ranks, and JSON no tuples."""
    return ServerSeen(**{**answer, "ranks": ()})


async def open_link(way: Sequence[tuple[str, Destination]], controller: str) -> _Link:
    """Connect, copy the agent if it is not there or not whole, and start it.

    Raise HostUnreachable if that may work later; HostKeyRefused or another HostError if a person is needed.
    """
    connection = await ssh.connect(way)
    try:
        process, hello = await _start_agent(connection, way[-1][1], controller)
        if hello["autotuner"] in {"missing", "damaged"}:
            await _ended(process)  # a host may allow one program at a time
            await connection.put(way[-1][1].folder, bundle("agent", AGENT))
            process, hello = await _start_agent(connection, way[-1][1], controller)
        _must_be_ready(connection.name, way[-1][1], hello)
    except BaseException:
        connection.abort()
        raise
    return _Link(connection, process, str(hello["folder"]))


async def _start_agent(
    connection: ssh.Connection, to: Destination, controller: str
) -> tuple[asyncssh.SSHClientProcess[bytes], dict[str, Any]]:
    """Start the agent if it is there and whole; return its process with the first line that it says."""
    program = bundle("agent", AGENT)
    path = str(PurePosixPath(to.folder) / program.file_name)
    argv = (to.python, "-I", "-c", STARTER, path, program.sha256, to.folder, controller)
    process = await connection.start(argv)
    noise = b""
    try:
        async with asyncio.timeout(ANSWER_S):
            for _ in range(NOISE_LINES_MAX):
                line = await process.stdout.readline()
                if line.startswith(b'{"autotuner": '):
                    return process, dict(json.loads(line))
                noise = line or noise
                if not line:
                    break
            noise = await process.stderr.read(4000) or noise
    except TimeoutError:
        raise HostUnreachable(f"host {connection.name}: the agent said nothing within {ANSWER_S:.0f} s") from None
    except (OSError, ValueError, asyncssh.Error) as error:
        raise HostUnreachable(f"host {connection.name}: {ssh.said(error)}") from None
    await _ended(process)
    why = one_line(noise.decode("utf-8", "replace")[-300:], 300)
    raise _not_started(connection.name, to, process.exit_status, why)


async def _ended(process: asyncssh.SSHClientProcess[bytes]) -> None:
    """Wait a little for the end of a program, and of its channel."""
    with contextlib.suppress(OSError, asyncssh.Error, TimeoutError):
        await asyncio.wait_for(process.wait_closed(), 5.0)


def _not_started(name: str, to: Destination, status: int | None, why: str) -> HostError:
    """Why there is no agent: the connection was lost, or the host ran something else, and a person is needed.

    Shells have their own words for a program that is not there, and not all of them its exit status.
    """
    if status is None:
        return HostUnreachable(f"host {name}: the agent did not start: {why or 'it said nothing'}")
    if status == 127 or "not found" in why:
        return HostError(
            f"there is no {to.python} on host {name} ({why}): install Python 3.10 or newer there, or name it with "
            f"[hosts.{name}] python"
        )
    return HostError(
        f"host {name} runs no programs for {to.user}, or {to.python} is no Python there: {why or f'exit status {status}'}; the "
        "user needs a login shell that runs what it is told"
    )


def _must_be_ready(name: str, to: Destination, hello: dict[str, Any]) -> None:
    status = hello["autotuner"]
    if status == "old":
        raise HostError(
            f"{to.python} on host {name} is Python {hello['python']}; autotuner needs 3.10 or newer there: name one with "
            f"[hosts.{name}] python"
        )
    if status == "full":
        raise ssh.full(name, to.folder)
    if status == "refused":
        raise HostError(f"host {name}: {hello['why']}")
    if status != "ready":
        raise HostError(f"the agent in {to.folder} on host {name} is {status} although it was just copied there")
