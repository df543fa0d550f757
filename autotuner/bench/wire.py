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

from autotuner.bench.hotloop import reads_are_stamped, unwatch, watch
from autotuner.edge.clock import monotonic_s, realtime_ahead_s

READ_BYTES = 16_384  # larger ones leave holes in the heap: a flood of merged events then took 100 MB more
_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; the socket module does not name it
_STAMP = struct.Struct("@qq")  # struct timespec: seconds and nanoseconds
_unpack = _STAMP.unpack
_ANCILLARY_BYTES = socket.CMSG_SPACE(_STAMP.size)
# What a stamp may be off, since the two clocks are set side by side by hand, and how much later than epoll's return a read may
# come that still takes what arrived meanwhile. A stamp beyond tells that the wall clock was set, and is not used.
_BEFORE_S = 0.001
_LATER_S = 0.05
_SET_S = 0.001  # by so much the wall clock does not drift between two looks

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

    @property
    def sending(self) -> bool:
        """Whether some of what was to be sent is still here."""

    def send(self, data: bytes) -> None:
        """Send all of it, as fast as the server takes it. Where that fails, `lost` hears of it once all that came is read."""

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

    def check(self) -> None:
        """Measure it again if the wall clock seems to have been set; cheap enough for many times a second."""
        if abs(realtime_ahead_s(readings=1) - self.s) > _SET_S:
            self.refresh()


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
        self._loop = asyncio.get_running_loop()
        self._rest: memoryview | None = None
        self._failure: OSError | None = None
        self._last = monotonic_s()  # what is read next came after this
        self.open = True
        self.stamped = False
        watch(self._fd, self._read)

    @property
    def sending(self) -> bool:
        """Whether some of what was to be sent is still here."""
        return self._rest is not None

    def _read(self, now: float) -> bool:
        """One read; this is the hot path."""
        # What is called here is an attribute, and calling it as one would look for a method first, at length.
        recvmsg, received = self._recvmsg, self._received
        try:
            data, ancillary, _, _ = recvmsg(READ_BYTES, _ANCILLARY_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self.close()
            self._lost(error)
            return True
        if not data:
            self.close()
            self._lost(self._failure)
            return True
        at, last = now, self._last
        if ancillary:
            seconds, nanoseconds = _unpack(ancillary[0][2])
            stamp = seconds - self._ahead.s + nanoseconds * 1e-9
            if last <= stamp < now + _LATER_S:
                if not self.stamped:
                    self.stamped = True
                    reads_are_stamped()
                at = stamp
            elif last - _BEFORE_S < stamp < last:
                at = last
        # A read that was not full took all there was: whatever is read next arrived after it.
        self._last = at if at > now or len(data) == READ_BYTES else now
        return received(data, at, now)

    def send(self, data: bytes) -> None:
        """Send all of it, as fast as the server takes it. Where that fails, `lost` hears of it once all that came is read."""
        self._last = monotonic_s()
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._failure = error  # the socket is at its end, which the reader finds, with what came before it
            return
        if sent < len(data):
            self._rest = memoryview(data)[sent:]
            self._loop.add_writer(self._fd, self._send_rest)

    def _send_rest(self) -> None:
        if self._rest is None:
            return
        try:
            self._rest = self._rest[self._socket.send(self._rest) :]
        except BlockingIOError:
            return
        except OSError as error:
            self._failure = error
            self._loop.remove_writer(self._fd)  # the rest stays, so that nobody takes this for a whole request
            return
        if not self._rest:
            self._rest = None
            self._loop.remove_writer(self._fd)

    def close(self) -> None:
        """Close at once; what the server still sends is answered with a reset."""
        if self.open:
            self.open = False
            unwatch(self._fd)
            if self._rest is not None:
                self._loop.remove_writer(self._fd)
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

    @property
    def open(self) -> bool:
        """Whether anything may still be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def sending(self) -> bool:
        """Whether some of what was to be sent is still here."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def send(self, data: bytes) -> None:
        """Send all of it, as fast as the server takes it."""
        if self._transport is not None:
            self._transport.write(data)

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
        self._lost(exc)


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
