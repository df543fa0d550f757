"""HTTP probes of a server: health, a real generation, metrics. Short deadlines, loopback only as a rule.

A 200 from /health is not serving: only generated tokens are.
"""

import asyncio
import contextlib
import dataclasses
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from autotuner.core.redact import one_line
from autotuner.engines.base import Counters, Endpoints, Place

PROMPT = "The capital of France is"
PROBE_TOKENS = 8
GENERATE_TIMEOUT_S = 60.0  # the first request of a fresh server may compile kernels
LOOK_TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 8 << 20  # a metrics page has some 100 KiB; a server that never stops answering is cut off

# Servers are asked in the clear. Without this, each client would parse some 150 certificates to no use: 15 ms and a megabyte.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

# What taking apart JSON of any shape can raise; an endless [[[[ is the RecursionError, 1e999 the OverflowError.
_NONSENSE = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, OverflowError)


class _NoAnswerError(Exception):
    """The server did not answer in time, or not in HTTP, or without end."""


class _LostConnectionError(_NoAnswerError):
    """The connection broke before a single byte of the answer."""


@dataclass(frozen=True)
class _Answer:
    status: int
    text: str


@dataclass(frozen=True)
class Generated:
    """What came of asking for a few tokens; the server's own text is not made harmless."""

    ok: bool
    tokens: int = 0
    text: str = ""
    error: str = ""


class Probe:
    """One server's HTTP interface, for asking how it is."""

    def __init__(self, place: Place, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        # No proxy of the environment may stand between the daemon and a server on its own host.
        self._client = httpx.AsyncClient(base_url=place.url, timeout=GENERATE_TIMEOUT_S, trust_env=False, verify=NO_TLS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def healthy(self) -> bool:
        """Tell whether the server says that it is up; its models list stands in where it has no health endpoint."""
        try:
            answer = await self._ask("GET", self._endpoints.health or self._endpoints.models, LOOK_TIMEOUT_S)
        except _NoAnswerError:
            return False
        return answer.status == 200

    async def model(self) -> str | None:
        """Return the name under which the server offers its model; None if it does not say."""
        try:
            data = json.loads((await self._ask("GET", self._endpoints.models, LOOK_TIMEOUT_S)).text)
            return str(data["data"][0]["id"])
        except (_NoAnswerError, *_NONSENSE):
            return None

    async def generate(self, model: str | None) -> Generated:
        """Have the server generate a few tokens; the only proof that it serves."""
        said = await self.complete(PROMPT, PROBE_TOKENS, model)
        if said.ok and said.tokens < 1:
            return Generated(ok=False, error="an answer without a single token")
        return dataclasses.replace(said, text=one_line(said.text, 120))

    async def complete(self, prompt: str, tokens: int, model: str | None) -> Generated:
        """Have the server go on with a prompt greedily; the text comes as it is, and may be empty."""
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        if model:
            body["model"] = model
        try:
            answer = await self._ask("POST", self._endpoints.completions, GENERATE_TIMEOUT_S, body)
        except _NoAnswerError as error:
            return Generated(ok=False, error=str(error))
        if answer.status != 200:
            return Generated(ok=False, error=f"HTTP {answer.status}: {one_line(answer.text, 200)}")
        return _generated(answer.text)

    async def scrape(self) -> str | None:
        """Return the metrics page; None if there is none."""
        return await self._get(self._endpoints.metrics)

    async def info(self, paths: str) -> tuple[str, str] | None:
        """Ask at `new|old` what the server says of itself; return the path that answered with its text, None if none did."""
        for path in paths.split("|"):
            text = await self._get(path)
            if text is not None:
                return path, text
        return None

    async def requests(self, read_metrics: Callable[[str], Counters]) -> float:
        """Given how its metrics are read, return how many requests run or wait; 0 where the server does not say.

        SGLang sets its gauges when it logs a batch: where the last requests end between two lines, or are cut off, they stand
        still for 30 s (of vLLM the same is reported, its issue 29928). Where something seems to run, a request of our own
        makes it set them anew.
        """
        busy = _busy(await self.scrape(), read_metrics)
        if busy <= 0:
            return 0.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                await self.generate(await self.model())
        return _busy(await self.scrape(), read_metrics)

    async def flush_cache(self) -> None:
        """Have the server forget its prefix cache, where it can."""
        if self._endpoints.flush_cache:
            try:
                await self._ask("POST", self._endpoints.flush_cache, LOOK_TIMEOUT_S)
            except _NoAnswerError:
                return  # fresh prompts do the same; this only saves memory

    async def _get(self, path: str | None) -> str | None:
        if path is None:
            return None
        try:
            answer = await self._ask("GET", path, LOOK_TIMEOUT_S)
        except _NoAnswerError:
            return None
        return answer.text if answer.status == 200 else None

    # A server closes an idle connection just as the next request goes out on it (llama.cpp does): asked again, it answers.
    @retry(stop=stop_after_attempt(2), retry=retry_if_exception_type(_LostConnectionError), reraise=True)
    async def _ask(self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None) -> _Answer:
        """Send one request and read its answer to the end, within one deadline for all of it: httpx's are per read."""
        received = bytearray()
        try:
            async with asyncio.timeout(timeout_s), self._client.stream(method, path, json=body) as answer:
                async for piece in answer.aiter_bytes():
                    received += piece
                    if len(received) > ANSWER_BYTES_MAX:
                        raise _NoAnswerError(f"an answer without end: more than {ANSWER_BYTES_MAX >> 20} MiB")
        except TimeoutError:
            raise _NoAnswerError(f"no whole answer within {timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            said = f"{type(error).__name__}: {one_line(str(error), 120)}".rstrip(": ")
            lost = isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError) and not received
            raise (_LostConnectionError if lost else _NoAnswerError)(said) from None
        return _Answer(answer.status_code, received.decode("utf-8", "replace"))


def _generated(answer: str) -> Generated:
    try:
        data = json.loads(answer)
        text = str(data["choices"][0].get("text") or "")
        tokens = int((data.get("usage") or {}).get("completion_tokens") or (1 if text else 0))
    except _NONSENSE:
        return Generated(ok=False, error=f"an answer that is no completion: {one_line(answer, 200)}")
    return Generated(ok=True, tokens=tokens, text=text)


def _busy(text: str | None, read_metrics: Callable[[str], Counters]) -> float:
    counters = read_metrics(text) if text else Counters()
    return (counters.running or 0.0) + (counters.queued or 0.0)
