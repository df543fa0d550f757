"""A link that a test can break: a TCP proxy on loopback that resets, hangs or refuses, at a moment or after so many bytes."""

import contextlib
import socket
import struct
import threading
import time
from typing import Self

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, no time, so that closing sends a reset


class Link:
    """Passes connections on to a port, until told otherwise."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._left: int | None = None
        self._hangs_until = 0.0
        self.refuses = False
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.reset()

    def reset(self) -> None:
        """Reset every connection, on both sides."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
            self._left = None
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):  # its other side may have gone already
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    end.shutdown(socket.SHUT_RD)  # wakes whoever reads from it
                end.close()
        self.cuts += bool(pairs)

    def reset_after(self, count: int) -> None:
        """Reset every connection once so many more bytes have passed, in either direction."""
        self._left = count

    def hang(self, seconds: float) -> None:
        """Pass nothing on for so long; nobody is told."""
        self._hangs_until = time.monotonic() + seconds

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self.refuses:
                    raise ConnectionRefusedError
                far = socket.create_connection(("127.0.0.1", self._target), 5)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._pairs.append((near, far))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                while time.monotonic() < self._hangs_until:
                    time.sleep(0.01)
                if self._left is not None:
                    self._left -= len(data)
                    if self._left < 0:
                        self.reset()
                        return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return
