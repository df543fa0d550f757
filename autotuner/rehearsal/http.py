"""As much HTTP/1.1 as a rehearsed server needs: one request in, one answer or one stream of events out."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

BODY_BYTES_MAX = 16 << 20
JSON = "application/json"
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 501: "Not Implemented", 503: "Service Unavailable"}


@dataclass(frozen=True)
class Request:
    """One request; `body` is empty unless it was JSON."""

    method: str
    path: str
    body: dict[str, Any] = field(default_factory=dict)
    valid: bool = True


async def read_request(reader: asyncio.StreamReader) -> Request:
    """Return the next request of a connection. Raise IncompleteReadError at its end."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, _, rest = first.partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    length = min(int(headers.get("content-length", "0") or 0), BODY_BYTES_MAX)
    content = await reader.readexactly(length) if length else b""
    try:
        body = json.loads(content) if content else {}
    except ValueError:
        return Request(method, path, valid=False)
    return Request(method, path, body if isinstance(body, dict) else {}, isinstance(body, dict))


async def answer(writer: asyncio.StreamWriter, status: int, body: dict[str, Any] | str, kind: str = JSON) -> None:
    """Write a whole answer."""
    content = (body if isinstance(body, str) else json.dumps(body)).encode()
    writer.write(_head(status, kind, f"Content-Length: {len(content)}") + content)
    await writer.drain()


def begin_stream(writer: asyncio.StreamWriter) -> None:
    """Write the head of a stream of events."""
    writer.write(_head(200, "text/event-stream; charset=utf-8", "Transfer-Encoding: chunked"))


def event(writer: asyncio.StreamWriter, data: str) -> None:
    """Write one event."""
    content = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%b\r\n" % (len(content), content))


def end_stream(writer: asyncio.StreamWriter) -> None:
    """Write the last event, and the end."""
    event(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")


def _head(status: int, kind: str, framing: str) -> bytes:
    reason = REASONS.get(status, "Whatever")
    return f"HTTP/1.1 {status} {reason}\r\nServer: rehearsal\r\nContent-Type: {kind}\r\n{framing}\r\n\r\n".encode()
