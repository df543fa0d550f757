"""The rehearsed server: takes an engine's whole argv, prints, answers and takes its time as that engine would.

    python -m autotuner.rehearsal.server --as sglang --personality healthy -- python3 -m sglang.launch_server --port 30000 …

It listens on loopback alone, whatever host it is given, and ends by itself when its parent does or after --max-seconds.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from autotuner.edge import clock
from autotuner.rehearsal import asked as reading
from autotuner.rehearsal import http, routes
from autotuner.rehearsal.asked import Asked, WrongFlagError
from autotuner.rehearsal.batch import Batch, Step, Work
from autotuner.rehearsal.llamacpp_voice import LlamaVoice
from autotuner.rehearsal.nccl_voice import WATCHDOG
from autotuner.rehearsal.personalities import (
    AFTER,
    AFTER_VAR,
    ENV_VAR,
    PERSONALITIES,
    LoadStage,
    Personality,
    personality_of,
)
from autotuner.rehearsal.ranks import Peers
from autotuner.rehearsal.sglang_voice import SGLangVoice
from autotuner.rehearsal.speeds import SHAPES
from autotuner.rehearsal.stream import Stream
from autotuner.rehearsal.vllm_voice import INTERVAL_S, VLLMVoice
from autotuner.rehearsal.voice import Ledger, Stamps, Voice

LOAD_SCALE = 20.0  # a minute of loading takes three seconds
EVENTS_PER_S = 1500  # over all streams; a faster batch sends more tokens an event, so that one process is enough
STEP_SLEEP_MIN_S = 0.001
TICK_S = 0.25
PARENT_LOOK_S = 0.5
ORPHANS = 2
_ORPHAN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.alarm({}); time.sleep(1e6)"


@dataclass(frozen=True)
class Pace:
    """How much faster than recorded it loads and decodes, and after how many answers a personality shows."""

    load: float = LOAD_SCALE
    decode: float = 1.0
    after: int = AFTER


class Server:
    """One server from its first line to its last; `run` returns its exit code, negative for a signal to end by."""

    def __init__(self, asked: Asked, personality: Personality, pace: Pace, max_seconds: int) -> None:
        self.asked = asked
        self.personality = personality
        self.pace = pace
        self.batch = Batch(asked.costs, asked.cap, asked.acceptance)
        self.ledger = Ledger()
        self.ready = False
        self._began_s = clock.monotonic_s()
        self._zero_s = self._began_s
        self._max_seconds = max_seconds
        self._streams: dict[Work, Stream] = {}
        self._wake = asyncio.Event()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._listener: asyncio.Server | None = None
        stamps = Stamps(lambda form: clock.local_now().strftime(form), lambda: clock.monotonic_s() - self._began_s)
        self.voice = _voice(asked, self.batch, self.ledger, stamps)
        self.peers = Peers(asked.ranks, pace.load)

    async def run(self) -> int:
        """Load, serve, and end as the personality or a signal wants it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)
        tasks = [asyncio.create_task(work) for work in (self._life(), self._watch_parent())]
        for task in tasks:
            task.add_done_callback(self._judge)
        code = await self._ended
        for task in tasks:
            task.cancel()
        return code

    async def _life(self) -> None:
        if self.personality.orphans:
            self._leave_orphans()
        await self._load()
        self._zero_s = clock.monotonic_s()
        self.ready = True
        while self.asked.ranks.number:
            await self._follow()
        while True:
            await self._turn()

    async def _load(self) -> None:
        who = self.personality
        out_of_memory: LoadStage | None = who.out_of_memory_at or ("capture" if self.asked.out_of_memory else None)
        for said in self.voice.starting():
            await clock.sleep(said.after_s * who.load_factor / self.pace.load)
            if self.peers.lost:
                await asyncio.Event().wait()
            if said.listens:
                await self.peers.loaded()
            _write([said.text])
            if said.meets:
                await self._meet()
            if said.listens:
                await self._listen()
            if said.ends:
                await self._over(self.voice.exit_code_failed)
            if said.stage is not None and said.stage == who.hangs_at:
                await asyncio.Event().wait()
            if said.stage is not None and said.stage == out_of_memory:
                _write(self.voice.out_of_memory(out_of_memory))
                await self._over(self.voice.exit_code_failed)
        if self.asked.ranks.number:
            await self.peers.loaded()

    async def _meet(self) -> None:
        if error := await self.peers.meet():
            _write(self.voice.failed(error))
            await self._over(self.voice.exit_code_failed)

    async def _follow(self) -> None:
        """A rank without an interface shows its character by the answers that rank 0 tells of."""
        await clock.sleep(TICK_S)
        self.ledger.ended = self.peers.ended
        self._show_character()

    async def _listen(self) -> None:
        try:
            self._listener = await asyncio.start_server(self._connected, "127.0.0.1", self.asked.port, backlog=1024)
        except OSError as error:
            _write(
                [f"[Errno 98] error while attempting to bind on address ('127.0.0.1', {self.asked.port}): {error}\n"]
            )
            await self._over(1)

    async def _turn(self) -> None:
        """Do what is due, tell those who wait for it, and sleep until the next thing is."""
        now_s = self._now_s()
        for step in [] if self._dumb else self.batch.advance(now_s):
            await self._take(step)
        streams = list(self._streams.values())
        for stream in streams:
            if stream.gone:
                self._forget(stream)
            elif now_s - stream.sent_at_s >= len(streams) / EVENTS_PER_S * self.pace.decode:
                stream.flush(now_s)
        _write(self.voice.tick(now_s))
        next_s = self.batch.next_s
        if next_s is None or self._dumb:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_S)
        else:
            await clock.sleep(max(STEP_SLEEP_MIN_S, (next_s - now_s) / self.pace.decode))

    async def _take(self, step: Step) -> None:
        self.ledger.add(step, self.asked.draft_tokens)
        _write(self.voice.step(step))
        if step.ended:
            self.peers.tell(self.ledger.ended)
        for work in step.ended:
            stream = self._streams.pop(work, None)
            if stream is not None and not stream.gone:
                stream.flush(step.at_s)
                stream.over.set()
        self._show_character()

    def _show_character(self) -> None:
        who = self.personality
        if self.ledger.ended < self.pace.after:
            return
        if who.dies_silently:
            os.kill(os.getpid(), signal.SIGKILL)
        if who.engine_dies:
            _write(self.voice.engine_died())
            self._end(0)
        if who.times_out:
            _write([WATCHDOG])

    @property
    def _dumb(self) -> bool:
        return self.peers.lost or (self.personality.falls_dumb and self.ledger.ended >= self.pace.after)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ValueError):
                while True:
                    await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # the server ends; asyncio would call a cancelled handler an error
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await http.read_request(reader)
        host, port = writer.get_extra_info("peername")[:2]
        if not self.ready:
            found = routes.LOADING if self.asked.engine == "llamacpp" else routes.Answer(503, "")
        elif self._dumb and request.path == "/health_generate":
            await asyncio.Event().wait()
            return
        elif request.path in routes.GENERATING:
            if request.valid and request.method == "POST":
                _write([self.voice.access(f"{host}:{port}", request.method, request.path, 200)])
                await self._generate(request, reader, writer)
                return
            found = routes.Answer(400, {"error": {"message": "not a JSON object", "code": 400}})
        else:
            found = routes.answer_to(request.path, request.body, self.asked, self.batch, self.voice)
        _write([self.voice.access(f"{host}:{port}", request.method, request.path, found.status)])
        await http.answer(writer, found.status, found.body, found.kind)

    async def _generate(
        self, request: http.Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.ledger.received += 1
        corrupt = self.personality.corrupt
        stream = Stream(request, self.asked.model, self.ledger.received, reader, writer, corrupt)
        self._streams[stream.work] = stream
        self.batch.add(stream.work, self._now_s())
        self._wake.set()
        await stream.over.wait()
        if stream.work.done:
            await stream.end()

    def _forget(self, stream: Stream) -> None:
        self.batch.drop(stream.work)
        self._streams.pop(stream.work, None)
        stream.over.set()

    def _asked_to_stop(self) -> None:
        if self.personality.ignores_term:
            return
        _write(self.voice.stopping(noisy=self.personality.noisy_stop))
        self._end(self.voice.exit_code_stopped)

    async def _watch_parent(self) -> None:
        parent = os.getppid()
        while os.getppid() == parent:
            await clock.sleep(PARENT_LOOK_S)
        self._end(1)

    def _leave_orphans(self) -> None:
        """Processes in sessions of their own, deaf to SIGTERM, that end by themselves in the end."""
        code = _ORPHAN.format(self._max_seconds)
        for _ in range(ORPHANS):
            child = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
            _write([f"worker pid={child.pid} started\n"])
            child.returncode = 0  # it is meant to outlive this process

    def _judge(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _write([f"the rehearsed server itself failed: {type(error).__name__}: {error}\n"])
            self._end(70)

    async def _over(self, code: int) -> None:
        """End, and do nothing more until that has come to pass."""
        self._end(code)
        await asyncio.Event().wait()

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    def _now_s(self) -> float:
        """Seconds of the batch's own time."""
        return (clock.monotonic_s() - self._zero_s) * self.pace.decode


def _voice(asked: Asked, batch: Batch, ledger: Ledger, stamps: Stamps) -> Voice:
    if asked.engine == "vllm":
        interval_s = float(os.environ.get("VLLM_LOG_STATS_INTERVAL") or INTERVAL_S)
        return VLLMVoice(asked, batch, ledger, stamps, os.getpid(), interval_s=interval_s)
    kind = SGLangVoice if asked.engine == "sglang" else LlamaVoice
    return kind(asked, batch, ledger, stamps, os.getpid())


def _write(pieces: Iterable[str]) -> None:
    """Write to the log at once: it is read while it grows."""
    text = "".join(pieces)
    if text:
        os.write(2, text.encode())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autotuner.rehearsal.server", description=__doc__, allow_abbrev=False)
    parser.add_argument("--as", "--engine", dest="engine", required=True, choices=reading.ENGINES)
    parser.add_argument("--personality", choices=sorted(PERSONALITIES), help=f"else ${ENV_VAR}, else healthy")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="the recorded model; else by the model's name")
    parser.add_argument("--time-scale", type=float, default=LOAD_SCALE, help="how much faster it loads")
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster it decodes")
    parser.add_argument("--after", type=int, help="answers after which a personality shows")
    parser.add_argument("--max-seconds", type=int, default=3600, help="its own end")
    parser.add_argument("argv", nargs="*", help="behind --: the engine's whole command line")
    return parser


async def _run(asked: Asked, personality: Personality, pace: Pace, max_seconds: int) -> int:
    return await Server(asked, personality, pace, max_seconds).run()


def main() -> None:
    """Run the server and end as it does."""
    options = _parser().parse_args()
    if {"--help", "-h", "--help=all"} & set(options.argv):
        sys.stdout.write(reading.help_text(options.engine))
        return
    name = options.personality or os.environ.get(ENV_VAR) or "healthy"
    if personality_of(name) is None:
        sys.exit(f"there is no personality {name}; known: {', '.join(PERSONALITIES)}")
    try:
        who = personality_of(name, reading.ranks_of(options.engine, options.argv).number) or PERSONALITIES["healthy"]
        asked = reading.read(options.engine, options.argv, os.environ, who, options.shape)
    except WrongFlagError as error:
        program = reading.PROGRAMS[options.engine]
        if options.engine == "llamacpp":
            _write([f"error: {error}\n"])
            sys.exit(1)
        _write([f"usage: {program} [-h] [options]\n{program}: error: {error}\n"])
        sys.exit(2)
    signal.alarm(max(1, options.max_seconds))  # its default action ends the process, whatever else it ignores
    after = options.after if options.after is not None else int(os.environ.get(AFTER_VAR) or AFTER)
    pace = Pace(options.time_scale, options.speed, after)
    code = asyncio.run(_run(asked, who, pace, options.max_seconds))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
