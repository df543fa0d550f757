"""The socket under one connection: sends requests, reads answers, and says when the kernel received what it read.

A plain socket is read with the kernel's receive time (SO_TIMESTAMPNS), so that a client that comes late still knows when
a token arrived. The stamp is that of the last byte read; where several events shared a read only the last one's time is known.
Over TLS, and where the kernel gives no stamps, an event's time is that of the read.
"""

import asyncio
import fcntl
import socket
import ssl
import struct
import termios
from collections.abc import Callable
from typing import Any, Protocol, cast

from autotuner.bench.hotloop import unwatch, watch
from autotuner.edge.clock import monotonic_s, realtime_ahead_s

READ_BYTES = 65_536
_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; the socket module does not name it
_STAMP = struct.Struct("@qq")  # struct timespec: seconds and nanoseconds
_ANCILLARY_BYTES = socket.CMSG_SPACE(_STAMP.size)
# A stamp may be this much later than the read, since the two clocks are set side by side by hand; one that is much earlier
# tells that the wall clock was set meanwhile.
_BEFORE_S = 0.001
_STALE_S = 5.0

Address = tuple[socket.AddressFamily, tuple[Any, ...]]
Received = Callable[
    [bytes, float, float], bool
]  # bytes, when they came, when they were read; whether the loop is to run


class Wire(Protocol):
    """What a connection needs of its socket."""

    stamped: bool

    @property
    def open(self) -> bool:
        """Whether anything may still be sent."""

    async def send(self, data: bytes) -> None:
        """Send all of it; raise OSError."""

    def close(self) -> None:
        """Close at once, without waiting for anything."""

    def unread_bytes(self) -> int:
        """How many bytes lie in the kernel unread."""


class Ahead:
    """How far the clock of the kernel's stamps is ahead of ours, in seconds; to be set anew about once a second."""

    def __init__(self) -> None:
        self.s = realtime_ahead_s()

    def refresh(self) -> None:
        """Measure it again: the wall clock is slewed, or set."""
        self.s = realtime_ahead_s()


class PlainWire:
    """A TCP socket. `received` gets what each read brought, `lost` hears of the end (None: closed in order)."""

    def __init__(
        self, sock: socket.socket, ahead: Ahead, received: Received, lost: Callable[[Exception | None], None]
    ) -> None:
        self._socket = sock
        self._fd = sock.fileno()
        self._ahead = ahead
        self._received = received
        self._lost = lost
        self._recvmsg = sock.recvmsg
        self.open = True
        self.stamped = False
        watch(self._fd, self._read)

    def _read(self, now: float) -> bool:
        """One read; this is the hot path."""
        try:
            data, ancillary, _, _ = self._recvmsg(READ_BYTES, _ANCILLARY_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self.close()
            self._lost(error)
            return True
        if not data:
            self.close()
            self._lost(None)
            return True
        if ancillary:
            seconds, nanoseconds = _STAMP.unpack(ancillary[0][2])
            at = seconds - self._ahead.s + nanoseconds * 1e-9
            if now - _STALE_S < at < now + _BEFORE_S:
                self.stamped = True
                return self._received(data, at, now)
        return self._received(data, now, now)

    async def send(self, data: bytes) -> None:
        """Send all of it; raise OSError."""
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            await asyncio.get_running_loop().sock_sendall(self._socket, memoryview(data)[sent:])

    def close(self) -> None:
        """Close at once; what the server still sends is answered with a reset."""
        if self.open:
            self.open = False
            unwatch(self._fd)
            self._socket.close()

    def unread_bytes(self) -> int:
        """How many bytes lie in the kernel unread."""
        return struct.unpack("i", fcntl.ioctl(self._fd, termios.FIONREAD, b"\0\0\0\0"))[0] if self.open else 0


class TlsWire(asyncio.Protocol):
    """The same over TLS, on asyncio's transport; there are no stamps, since the kernel sees no events."""

    stamped = False

    def __init__(self, received: Received, lost: Callable[[Exception | None], None]) -> None:
        self._received = received
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def open(self) -> bool:
        """Whether anything may still be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, data: bytes) -> None:
        """Send all of it; raise OSError."""
        if self._transport is None:
            raise ConnectionResetError("closed")
        self._transport.write(data)
        await self._writable.wait()

    def close(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def unread_bytes(self) -> int:
        """Unknown under TLS, so 0."""
        return 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; called by asyncio."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Hand on what was read; called by asyncio."""
        now = monotonic_s()
        self._received(data, now, now)

    def connection_lost(self, exc: Exception | None) -> None:
        """Hand on the end; called by asyncio."""
        self._writable.set()
        self._lost(exc)

    def pause_writing(self) -> None:
        """The buffer is full; called by asyncio."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The buffer has room again; called by asyncio."""
        self._writable.set()


async def open_wire(
    addresses: list[Address],
    tls: ssl.SSLContext | None,
    host: str,
    ahead: Ahead,
    received: Received,
    lost: Callable[[Exception | None], None],
) -> Wire:
    """Connect to the first address that takes it. Raise OSError (ssl.SSLError among them) of the last one if none does."""
    failure: OSError = ConnectionRefusedError("no address")
    for family, address in addresses:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(sock, address)
            if tls is None:
                _ask_for_stamps(sock)
                return PlainWire(sock, ahead, received, lost)
            loop = asyncio.get_running_loop()
            _, wire = await loop.create_connection(
                lambda: TlsWire(received, lost), sock=sock, ssl=tls, server_hostname=host
            )
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return wire
    raise failure


def _ask_for_stamps(sock: socket.socket) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:  # a kernel or sandbox without them; the reads' own times serve
        return
