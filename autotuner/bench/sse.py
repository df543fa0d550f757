"""One HTTP/1.1 answer and the server-sent events in it, cut from bytes however they arrive. Pure.

Events are told apart by byte patterns, not by parsing JSON: that would cost more than everything else together, and a
client that falls behind reports wrong latencies. The patterns are safe: inside a JSON string every quote comes after a
backslash, so `"text":"` can only be a key and the opening quote of its value.
"""

from collections.abc import Callable

_HEAD_MAX = 65_536
_LINE_MAX = 4_096  # of a chunk's size or a trailer
_EVENT_MAX = 16 * 1024 * 1024
_BODY_MAX = 65_536  # of a body that is not a stream: enough for any error message
_NO_BODY = frozenset({204, 304})
_QUOTE = b'"'
_QUOTE_BYTE = _QUOTE[0]
_LINE_END = b"\n"[0]

DONE = b"[DONE]"


class NotHttpError(ValueError):
    """The bytes are no HTTP/1.1 answer that can be followed any further."""


# Text is under one of these keys: `text` of completions, `content` of chat, the others of models that think first.
_KEYS = tuple(
    b'"%b":%b"' % (name, space)
    for name in (b"text", b"content", b"reasoning_content", b"reasoning")
    for space in (b"", b" ")
)


def text_key(event: bytes) -> tuple[int, bytes] | None:
    """Given an event's data, return where its text's key stands and how it is written; None where it has no text.

    An empty text says that nothing was generated yet.
    """
    if not (b'text"' in event or b'content"' in event or b'reasoning"' in event):
        return None  # three looks instead of eight, and most of what comes here has none of them
    for key in _KEYS:
        at = event.find(key)
        if at >= 0 and not event.startswith(_QUOTE, at + len(key)):
            return at, key
    return None


def has_text(event: bytes) -> bool:
    """Given an event's data, tell whether it carries text."""
    return text_key(event) is not None


def has_usage(event: bytes) -> bool:
    """Given an event's data, tell whether it carries token counts (vLLM writes `"usage":null` into all others)."""
    return b'"usage":{' in event or b'"usage": {' in event


def has_finish(event: bytes) -> bool:
    """Given an event's data, tell whether it says why the generation ended."""
    return b'"finish_reason":"' in event or b'"finish_reason": "' in event


def has_error(event: bytes) -> bool:
    """Given an event's data without text, tell whether it may report an error (`"error":null` does not)."""
    at = event.find(b'"error":')
    return at >= 0 and not event[at + 8 : at + 16].lstrip().startswith(b"null")


def event_data(block: bytes) -> bytes:
    """Given one event's lines, return its data, or nothing if it has none (a comment to keep the connection alive).

    llama.cpp up to 2025 reported errors in a field of their own, `error: {…}`; they come out as `{"error":{…}}`.
    """
    data = []
    for line in block.split(b"\n"):
        name, colon, value = line.partition(b":")
        if colon and name == b"data":
            data.append(value[1:] if value.startswith(b" ") else value)
        elif colon and name == b"error":
            data.append(b'{"error":' + value + b"}")
    return b"\n".join(data)


def _opening(size: int) -> bytes:
    """What a read of so many bytes begins with if it is one chunk with one event; nothing begins so for impossible sizes."""
    for digits in range(1, 4):
        chunk = size - digits - 4  # two line ends
        if chunk > 0 and len(b"%x" % chunk) == digits:
            return b"%x\r\ndata: {" % chunk
    return b"\0"


_OPENINGS_MAX = 4_096
_OPENINGS = tuple(_opening(size) for size in range(_OPENINGS_MAX))
_SIZE_LINE_MAX = 5  # bytes of the line before such a chunk
_EVENT_END = b"\n\n\r\n"  # of a chunk that is one event
_SIZES = {b"%x\r" % size: size for size in range(1, _OPENINGS_MAX)}


class Answer:
    """Follows one answer: `feed` it what was read, then see `status`, `complete` and, if no stream, `body`."""

    __slots__ = (
        "_between", "_event_key", "_event_key_at", "_events", "_key", "_key_at", "_left", "_rest", "_step", "_tail",
        "body", "complete", "reusable", "started", "status", "streams",
    )  # fmt: skip

    def __init__(self) -> None:
        self.status = 0
        self.started = False  # a byte came
        self.streams = False  # the body is text/event-stream
        self.complete = False  # the body ended as HTTP says it ends
        self.reusable = False  # the connection may carry another request
        self.body = b""
        self._rest = b""  # not yet a whole head or line
        self._tail = b""  # not yet a whole event
        self._left = 0  # bytes still to come of the chunk or body; -1: until the connection closes
        self._between = False  # between two chunks of a stream, with nothing pending
        self._key, self._key_at = _KEYS[0], 0  # where the text's key stood in the last whole chunk
        self._event_key, self._event_key_at = _KEYS[0], 0  # and in the last event
        self._events: list[bytes] = []
        self._step: Callable[[bytes], bytes] = self._read_head

    def is_one_token(self, data: bytes) -> bool:
        """Given bytes as read, tell if they are one whole chunk with one event with text, no more and no less.

        That is nearly every read, and then nothing needs cutting, and `feed` must not see the bytes. Else False.
        """
        size = len(data)
        if (
            not self._between
            or size >= _OPENINGS_MAX
            or not data.startswith(_OPENINGS[size])  # a chunk of just this size, which begins with `data: {`
            # The first line end behind that of the chunk's size ends the event, and the chunk's own comes after another: so it
            # is one line and one event. To look for one byte takes a third of the time that looking for two takes.
            or data.find(b"\n", _SIZE_LINE_MAX) != size - 4
            or data[-3] != _LINE_END
        ):
            return False
        key, at = self._key, self._key_at
        if data.startswith(key, at):  # the server's events look alike, so the key is where it was before
            return data[at + len(key)] != _QUOTE_BYTE
        found = text_key(data)
        if found is None:
            return False
        self._key_at, self._key = found
        return True

    def leading_tokens(self, data: bytes) -> tuple[list[bytes], int]:
        """Given bytes as read, return the chunks at their start that `is_one_token` would know, and how many bytes those are.

        `feed` must not see them. A client that comes late finds many in one read, and must not be later for it.
        """
        if not self._between:
            return [], 0
        pieces = data.split(_EVENT_END)
        pieces.pop()
        found, used = 0, 0
        for piece in pieces:
            size = len(piece) + len(_EVENT_END)
            if size >= _OPENINGS_MAX or not piece.startswith(_OPENINGS[size]) or piece.find(b"\n", _SIZE_LINE_MAX) >= 0:
                break
            if not piece.startswith(self._key, self._key_at):
                place = text_key(piece)
                if place is None:
                    break
                self._key_at, self._key = place
            elif piece.startswith(_QUOTE, self._key_at + len(self._key)):
                break
            found += 1
            used += size
        return pieces[:found], used

    def boundary(self, size: int) -> int:
        """Given how many bytes were read, return after how many of them a chunk that began earlier is over; else all."""
        inside = self._left + 2 if self._step == self._read_chunks and self._left and not self._rest else size
        return min(size, inside)

    def event_has_text(self, event: bytes) -> bool:
        """Given an event that `feed` returned, tell whether it carries text."""
        key, at = self._event_key, self._event_key_at  # where it was before: the server's events look alike
        if event.startswith(key, at) and not event.startswith(_QUOTE, at + len(key)):
            return True
        found = text_key(event)
        if found is None:
            return False
        self._event_key_at, self._event_key = found
        return True

    def feed(self, data: bytes) -> list[bytes]:
        """Given bytes as read, return the data of the events that they complete; raise NotHttpError for nonsense."""
        self.started = True
        if self._rest:
            data = self._rest + data
            self._rest = b""
        self._events = []
        step = None
        while data and step is not self._step and not self.complete:
            step = self._step
            data = step(data)
        if self.complete and data:
            self.reusable = False  # more than one answer to one request: never trust this connection again
        elif data:
            self._rest = data
        self._between = step == self._read_chunks and not (self._left or self._rest or self._tail or self.complete)
        return self._events

    def eof(self) -> list[bytes]:
        """The server closed: return the events that this completes. Only a body without a length ends this way."""
        self._events = []
        if self._step == self._read_plain and self._left < 0:
            self._finish()
        self.reusable = False
        return self._events

    # Each step takes bytes, returns those that it did not use, and has chosen the next step if it is done.

    def _read_head(self, data: bytes) -> bytes:
        while (end := data.find(b"\r\n\r\n")) >= 0:
            first, *lines = data[:end].split(b"\r\n")
            self._read_status(first)
            data = data[end + 4 :]
            if self.status >= 200:  # 100 Continue and 103 Early Hints come before the real head
                self._read_headers(first, lines)
                return data
        if len(data) > _HEAD_MAX or not data.startswith(b"HTTP/1."[: len(data)]):
            raise NotHttpError("no HTTP/1.1 answer")
        return data

    def _read_status(self, line: bytes) -> None:
        words = line.split(b" ", 2)
        if not line.startswith(b"HTTP/1.") or len(words) < 2 or not words[1].isdigit() or len(words[1]) != 3:
            raise NotHttpError("no HTTP/1.1 status line")
        self.status = int(words[1])

    def _read_headers(self, first: bytes, lines: list[bytes]) -> None:
        headers: dict[bytes, bytes] = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip().lower()
        connection = headers.get(b"connection", b"keep-alive" if first.startswith(b"HTTP/1.1") else b"close")
        self.reusable = b"close" not in connection
        self.streams = self.status == 200 and headers.get(b"content-type", b"").startswith(b"text/event-stream")
        length = headers.get(b"content-length", b"")
        if b"chunked" in headers.get(b"transfer-encoding", b""):
            self._step = self._read_chunks
            return
        if length and not length.isdigit():
            raise NotHttpError("a content length that is no number")
        self._step = self._read_plain
        self._left = 0 if self.status in _NO_BODY else int(length) if length else -1
        if not self._left:
            self._finish()

    def _read_plain(self, data: bytes) -> bytes:
        if self._left < 0:
            self._take(data)
            return b""
        piece = data[: self._left]
        self._left -= len(piece)
        self._take(piece)
        if not self._left:
            self._finish()
        return data[len(piece) :]

    def _read_chunks(self, data: bytes) -> bytes:
        at, end, pieces = 0, len(data), []
        while at < end:
            if self._left:
                piece = data[at : at + self._left]
                self._left -= len(piece)
                at += len(piece)
                pieces.append(piece)
                continue
            line = data.find(b"\n", at)
            if line < 0:
                if end - at > _LINE_MAX:
                    raise NotHttpError("a chunk without a size")
                break
            size_line, at = data[at:line], line + 1
            if size_line == b"\r":  # the empty line that closes the chunk before
                continue
            size = _SIZES.get(size_line) or _chunk_size(size_line)
            if not size:
                self._step = self._read_trailers
                break
            if data.startswith(b"\r\n", at + size):  # the whole chunk is here
                pieces.append(data[at : at + size])
                at += size + 2
            else:
                self._left = size
        self._take(b"".join(pieces))
        return data[at:]

    def _read_trailers(self, data: bytes) -> bytes:
        while (line := data.find(b"\r\n")) > 0:
            data = data[line + 2 :]
        if line == 0:
            self._finish()
            return data[2:]
        if len(data) > _LINE_MAX:
            raise NotHttpError("a trailer without an end")
        return data

    def _take(self, piece: bytes) -> None:
        """A piece of body: cut into events, or kept if it is no stream."""
        if not self.streams:
            self.body = (self.body + piece)[:_BODY_MAX] if len(self.body) < _BODY_MAX else self.body
            return
        text = self._tail + piece if self._tail else piece
        if b"\r" in text:
            # A \r at the very end stays as it is, and meets its \n when the tail is looked at again.
            text = text.replace(b"\r\n", b"\n")
        events = text.split(b"\n\n")
        self._tail = events.pop()
        self._events += events
        if len(self._tail) > _EVENT_MAX:
            raise NotHttpError("an event without an end")

    def _finish(self) -> None:
        self.complete = True
        # An event that no blank line ends is no event, says the standard; but some servers end so, and mean it.
        if event_data(self._tail) == DONE:
            self._events.append(self._tail)
        self._tail = b""


def _chunk_size(line: bytes) -> int:
    try:
        size = int(line, 16)  # int() takes no offence at the \r
    except ValueError:
        return _chunk_size(line.partition(b";")[0]) if b";" in line else _no_size()
    return size if size >= 0 else _no_size()


def _no_size() -> int:
    raise NotHttpError("a chunk without a size")
