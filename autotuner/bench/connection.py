"""One keep-alive connection to the server under load: sends a request, times its answer, names each failure.

An event's time is when the kernel received it, as the wire says.
"""

import asyncio
import json
from array import array
from collections.abc import Callable

from autotuner.bench.meter import DELAY_EVERY, Record
from autotuner.bench.sse import DONE, Answer, NotHttpError, event_data, has_error, has_finish, has_usage
from autotuner.bench.wire import Wire
from autotuner.edge.clock import monotonic_s

DETAIL_MAX = 500  # characters of what the server said about an error
GRACE_S = 1.0  # how long an answer may go on after [DONE] or an error event before its connection is given up

CONNECT_REFUSED = "connect refused"
CONNECTION_RESET = "connection reset"
TIMEOUT = "timeout"
NOT_HTTP = "not HTTP"
NOT_SSE = "not SSE"
ERROR_IN_200 = "error in a 200 answer"
EMPTY = "empty stream"
TRUNCATED = "truncated stream"


class Connection:
    """Carries one request at a time; `unanswered` tells that the server closed before any byte of the answer."""

    def __init__(self, read_delays: "array[float]") -> None:
        self.wire: Wire | None = None  # set as soon as it is open
        self._read_delays = read_delays
        self._record: Record | None = None
        self._add: Callable[[float], None] = _nothing_asked
        self._heard: list[bytes] | None = None
        self._reads = 0
        self._answer = Answer()
        self._is_one_token = self._answer.is_one_token  # False for whatever comes before an answer or after it
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
        if self._record is not None or self.wire is None or not self.wire.open:
            return False
        return not self.sent or (self._answer.complete and self._answer.reusable and not self.wire.sending)

    @property
    def unread_bytes(self) -> int:
        """How many bytes lie in the kernel unread."""
        return self.wire.unread_bytes() if self.wire is not None else 0

    async def ask(self, request: bytes, record: Record, timeout_s: float) -> None:
        """Given a request as it goes on the wire, send it and return when it ended, well or not: see the record."""
        if self.wire is None:
            raise RuntimeError("asked before the connection was made")
        loop = asyncio.get_running_loop()
        self._answer, self._done, self._final, self._latest, self._usage = Answer(), False, False, b"", b""
        self._is_one_token = self._answer.is_one_token
        self._record, self._future, self.unanswered = record, loop.create_future(), False
        self._add, self._heard = record.times.append, record.heard
        self._timer = loop.call_later(timeout_s, self._expire)
        self.sent += 1
        record.sent = monotonic_s()
        self.wire.send(request)
        await self._future

    def drop(self) -> None:
        """Cut the connection now; a request that has not ended keeps its record as it is."""
        if self._record is not None and self._record.end is not None:
            self._end(self._record.end, *self._verdict(None))
        self._record = None
        if self._timer is not None:
            self._timer.cancel()
        if self.wire is not None:
            self.wire.close()

    def received(self, data: bytes, at: float, now: float) -> bool:
        """Sort what one read brought: bytes, when they came, when they were read. This is the hot path.

        Returns whether that ended a request, so that somebody waits to go on.
        """
        is_one_token, add = self._is_one_token, self._add
        if not is_one_token(data):
            return self._received_else(data, at, now)
        self._latest = data
        add(at)
        self._reads = reads = self._reads + 1
        if not reads % DELAY_EVERY:
            self._read_delays.append(now - at)
        if self._heard is not None:
            self._heard.append(data)
        return False

    def _received_else(self, data: bytes, at: float, now: float) -> bool:
        record, answer = self._record, self._answer
        if record is None:
            self.drop()  # nothing was asked: an answer now would be taken for that of the next request
            return False
        self._read_delays.append(now - at)
        tokens, over = 0, record.end is not None
        try:
            while data:
                pieces, used = answer.leading_tokens(data)
                tokens += self._note_texts(pieces, record)
                data = data[used:] if used else data
                if not data:
                    break
                end = answer.boundary(len(data))
                tokens += self._sort(answer.feed(data[:end]), record, at)
                data = data[end:]
        except NotHttpError as error:
            record.add(at, tokens)
            self._end(at, NOT_HTTP, str(error))
            self.drop()
            return True
        record.add(at, tokens)
        if answer.complete:
            self._end(at, *self._verdict(None))
        elif record.end is not None and not over:
            self._wind_up()
        return record.end is not None  # also where only a timer was set, which the loop must hear of

    def _note_texts(self, events: list[bytes], record: Record) -> int:
        if events:
            self._latest = events[-1]
            if record.heard is not None:
                record.heard += events
        return len(events)

    def lost(self, error: Exception | None) -> None:
        """The connection ended, None meaning in order: judge what had come of the answer."""
        record = self._record
        if record is None:
            return
        now = monotonic_s()
        self.unanswered = not self._answer.started
        if error is None:
            record.add(now, self._sort(self._answer.eof(), record, now))
        self._end(now, *self._verdict(error))

    def _sort(self, events: list[bytes], record: Record, at: float) -> int:
        """Take what events without text say, and return how many have text."""
        has_text = self._answer.event_has_text
        texts = []
        for event in events:
            if has_text(event):
                texts.append(event)
            elif data := event_data(event):
                self._sort_textless(data, record, at)
        return self._note_texts(texts, record)

    def _sort_textless(self, data: bytes, record: Record, at: float) -> None:
        if data == DONE:
            self._done, record.end = True, at
        if has_usage(data):
            self._usage, self._final = data, True
        if has_finish(data):
            self._final = True
        if has_error(data) and (message := error_message(data)) is not None:
            record.error, record.detail, record.end = ERROR_IN_200, message, at

    def _wind_up(self) -> None:
        """All that matters has come; what HTTP still owes must not hold the stream up for long."""
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
        record.said = self._usage or event_data(self._latest)
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
        if record is not None and not record.times:
            return EMPTY, ""
        return "", ""


def _nothing_asked(at: float) -> None:
    raise RuntimeError(f"an event at {at} that nothing was asked for")


def error_message(body: bytes) -> str | None:
    """Given JSON, return the message of the error that it reports, or None if it reports none.

    Knows `{"error": {"message": …}}`, `{"error": "…"}`, `{"object": "error", "message": …}` and `{"detail": …}`.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    error = document.get("error") or document.get("detail")
    if document.get("object") == "error":  # vLLM before 0.10
        error = document
    if not error:
        return None
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:DETAIL_MAX]
