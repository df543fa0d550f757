"""One keep-alive connection to the server under load: sends a request, times its answer, names each failure.

An event's time is that of the read that brought it, taken before anything else is done with the bytes. The loop's own
time would not do: uvloop keeps it in whole milliseconds and reads it once a turn.
"""

import asyncio
import json
from typing import cast

from autotuner.bench.meter import Meter, Record
from autotuner.bench.sse import DONE, Answer, NotHttpError, event_data, has_error, has_finish, has_text, has_usage
from autotuner.edge.clock import monotonic_s

GRACE_S = 1.0  # how long an answer may go on after [DONE] or an error event before its connection is given up

CONNECT_REFUSED = "connect refused"
CONNECTION_RESET = "connection reset"
TIMEOUT = "timeout"
NOT_HTTP = "not HTTP"
NOT_SSE = "not SSE"
ERROR_IN_200 = "error in a 200 answer"
EMPTY = "empty stream"
TRUNCATED = "truncated stream"


class Connection(asyncio.Protocol):
    """Carries one request at a time; `unanswered` tells that the server closed before any byte of the answer."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._transport: asyncio.Transport | None = None
        self._record: Record | None = None
        self._answer = Answer()
        self._future: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._done = False  # [DONE] came
        self._final = False  # an event after the last text came: the answer is whole even without [DONE]
        self._latest = b""  # the latest event with text
        self._usage = b""
        self.sent = 0  # requests sent so far
        self.unanswered = False

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        if self._record is not None or self._transport is None or self._transport.is_closing():
            return False
        return not self.sent or (self._answer.complete and self._answer.reusable)

    async def ask(self, request: bytes, record: Record, timeout_s: float) -> None:
        """Given a request as it goes on the wire, send it and return when it ended, well or not: see the record."""
        if self._transport is None:
            raise RuntimeError("asked before the connection was made")
        loop = asyncio.get_running_loop()
        self._answer, self._done, self._final, self._latest, self._usage = Answer(), False, False, b"", b""
        self._record, self._future, self.unanswered = record, loop.create_future(), False
        self._timer = loop.call_later(timeout_s, self._expire)
        self.sent += 1
        record.sent = monotonic_s()
        self._transport.write(request)
        await self._future

    def drop(self) -> None:
        """Cut the connection now; a request that has not ended keeps its record as it is."""
        if self._record is not None and self._record.end is not None:
            self._end(self._record.end, *self._verdict(None))
        self._record = None
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; called by asyncio."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Time and sort what one read brought; called by asyncio. This is the hot path."""
        now = monotonic_s()
        record = self._record
        if record is None:
            self.drop()  # nothing was asked: an answer now would be taken for that of the next request
            return
        if self._answer.is_one_token(data):
            self._latest = data
            self._meter.tokens(record, now, 1)
            return
        try:
            events = self._answer.feed(data)
        except NotHttpError as error:
            self._end(now, NOT_HTTP, str(error))
            self.drop()
            return
        self._sort(events, record, now)
        if self._answer.complete:
            self._end(now, *self._verdict(None))

    def connection_lost(self, exc: Exception | None) -> None:
        """Judge what had come of the answer; called by asyncio."""
        record = self._record
        if record is None:
            return
        now = monotonic_s()
        self.unanswered = not self._answer.started
        if exc is None:
            self._sort(self._answer.eof(), record, now)
        self._end(now, *self._verdict(exc))

    def _sort(self, events: list[bytes], record: Record, now: float) -> None:
        tokens = 0
        for event in events:
            if has_text(event):
                tokens += 1
                self._latest = event
            elif data := event_data(event):
                self._sort_textless(data, record, now)
        if tokens:
            self._meter.tokens(record, now, tokens)

    def _sort_textless(self, data: bytes, record: Record, now: float) -> None:
        if data == DONE:
            self._done = True
            self._wind_up(record, now)
        if has_usage(data):
            self._usage, self._final = data, True
        if has_finish(data):
            self._final = True
        if has_error(data) and (message := error_message(data)) is not None:
            record.error, record.detail = ERROR_IN_200, message
            self._wind_up(record, now)

    def _wind_up(self, record: Record, now: float) -> None:
        """All that matters has come; what HTTP still owes must not hold the stream up for long."""
        record.end = now
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(GRACE_S, self._expire)

    def _expire(self) -> None:
        record = self._record
        if record is None:
            return
        ended = record.end is not None  # then the request is over, and only the connection is not
        self._end(monotonic_s(), *(self._verdict(None) if ended else (TIMEOUT, "")))
        self.drop()

    def _end(self, now: float, error: str, detail: str) -> None:
        record, future = self._record, self._future
        if record is None or future is None:
            return
        self._record = None
        if self._timer is not None:
            self._timer.cancel()
        record.end = now if record.end is None else record.end
        record.error, record.detail = (record.error, record.detail) if record.error else (error, detail)
        # Some servers send running counts with every event; then the latest text event has the right ones.
        record.read_usage(self._usage or event_data(self._latest))
        if not future.done():
            future.set_result(None)

    def _verdict(self, lost: Exception | None) -> tuple[str, str]:
        """Return the error's name and what the server said, both empty for a good answer."""
        answer, record = self._answer, self._record
        if not answer.status:
            return CONNECTION_RESET, "closed before an answer"
        if answer.status != 200:
            return f"HTTP {answer.status}", error_message(answer.body) or ""
        if not answer.streams:
            message = error_message(answer.body)
            return (NOT_SSE, "") if message is None else (ERROR_IN_200, message)
        if not (self._done or self._final or has_finish(self._latest)):
            return (CONNECTION_RESET, str(lost)) if lost is not None else (TRUNCATED, "")
        if record is not None and not record.events:
            return EMPTY, ""
        return "", ""


def error_message(body: bytes) -> str | None:
    """Given JSON, return the message of the error that it reports, or None if it reports none.

    Knows `{"error": {"message": …}}`, `{"error": "…"}`, `{"object": "error", "message": …}` and `{"detail": …}`.
    """
    try:
        document = json.loads(body)
    except ValueError:
        return None
    if not isinstance(document, dict):
        return None
    error = document.get("error") or document.get("detail")
    if document.get("object") == "error":  # vLLM before 0.10
        error = document
    if not error:
        return None
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)
