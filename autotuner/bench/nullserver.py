"""A server that generates nothing: tokens on a schedule, as cheaply as Python can, to measure the client itself with.

`python -m autotuner.bench.nullserver TTFT_MS ITL_MS` listens on a free port of 127.0.0.1, which it prints, and ends with its
stdin. Token k of a request is due at its arrival + TTFT + k * ITL, whatever the client does.
"""

import heapq
import json
import select
import socket
import sys
from dataclasses import dataclass

from autotuner.edge.clock import monotonic_s

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_BATCH_MAX = 256  # sends before the sockets are looked at again


@dataclass(eq=False)
class _Stream:
    """One connection and the answer on it; `due` is when its next token is."""

    sock: socket.socket
    unread: bytes = b""
    left: int = 0
    count: int = 0
    due: float = 0.0

    def __lt__(self, other: "_Stream") -> bool:
        return self.due < other.due


class NullServer:
    """The server's loop: `serve` until stdin ends."""

    def __init__(self, ttft_s: float, itl_s: float) -> None:
        self._ttft_s = ttft_s
        self._itl_s = itl_s
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._streams: dict[int, _Stream] = {}
        self._due: list[_Stream] = []

    def serve(self, stdin: int) -> None:
        """Answer requests until `stdin` is at its end."""
        self._epoll.register(stdin, select.EPOLLIN)
        while True:
            wait = self._due[0].due - monotonic_s() if self._due else 1.0
            for fd, _ in self._epoll.poll(max(0.0, wait)):
                if fd == stdin:
                    return
                self._accept() if fd == self._listener.fileno() else self._read(self._streams[fd])
            self._send_due()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._streams[sock.fileno()] = _Stream(sock)
        self._epoll.register(sock, select.EPOLLIN)

    def _read(self, stream: _Stream) -> None:
        try:
            data = stream.sock.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(stream)
            return
        stream.unread += data
        head, blank, body = stream.unread.partition(b"\r\n\r\n")
        length = next((int(h[15:]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length:")), 0)
        if not blank or len(body) < length:
            return
        stream.unread = body[length:]
        asked = json.loads(body[:length])
        stream.left = stream.count = int(asked.get("max_tokens") or 16)
        stream.due = monotonic_s() + self._ttft_s
        heapq.heappush(self._due, stream)

    def _send_due(self) -> None:
        now = monotonic_s()
        for _ in range(_BATCH_MAX):
            if not self._due or self._due[0].due > now:
                return
            stream = self._due[0]
            if self._send(stream) and stream.left:
                stream.due += self._itl_s
                heapq.heapreplace(self._due, stream)
            else:
                heapq.heappop(self._due)

    def _send(self, stream: _Stream) -> bool:
        """Send the next token, and with the last one what ends an answer; tell whether the client took it."""
        stream.left -= 1
        data = _TOKEN if stream.left else _TOKEN + _end(stream.count)
        data = _HEAD + data if stream.left == stream.count - 1 else data
        try:
            taken = stream.sock.send(data) == len(data)
        except OSError:
            taken = False
        if not taken:  # a client that is so far behind has had its measurement
            self._drop(stream)
        return taken

    def _drop(self, stream: _Stream) -> None:
        if self._streams.pop(stream.sock.fileno(), None) is not None:
            stream.left = 0
            self._epoll.unregister(stream.sock)
            stream.sock.close()


def _chunk(document: dict[str, object]) -> bytes:
    event = b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def _end(count: int) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
    return _chunk({"id": "cmpl-0", "choices": [], "usage": usage}) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


_TOKEN = _chunk(
    {
        "id": "cmpl-00000000000000000000",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "null",
        "choices": [{"index": 0, "text": " the", "logprobs": None, "finish_reason": None, "stop_reason": None}],
        "usage": None,
    }
)


def main() -> None:
    """Serve with the times of the command line."""
    server = NullServer(float(sys.argv[1]) / 1000, float(sys.argv[2]) / 1000)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    server.serve(sys.stdin.fileno())


if __name__ == "__main__":
    main()
