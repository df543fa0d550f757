"""Connections to the server under load: opened where a request needs one, or ahead of the load; each failure has its name."""

import asyncio
import contextlib
import socket
import ssl
from array import array

from autotuner.bench.connection import CONNECT_REFUSED, CONNECTION_RESET, TIMEOUT, Connection
from autotuner.bench.meter import Record
from autotuner.bench.target import Target
from autotuner.bench.wire import Address, Ahead, open_wire
from autotuner.edge.clock import monotonic_s

CONNECT_TIMEOUT_S = 10.0


class Dialer:
    """Opens connections to one target; its connections note in `read_delays` how long what they read had lain there."""

    def __init__(self, target: Target, read_delays: "array[float]", timeout_s: float) -> None:
        self.ahead = Ahead()
        self._target = target
        self._read_delays = read_delays
        self._timeout_s = min(CONNECT_TIMEOUT_S, timeout_s)
        self._addresses: list[Address] = []

    async def look_up(self) -> None:
        """Find the target's addresses; where that fails, each connection will try again, and have it named."""
        with contextlib.suppress(OSError):
            self._addresses = await self._target.addresses()

    async def connect(self, record: Record) -> Connection | None:
        """Open a connection; where that fails, say why in the record and return None."""
        made = Connection(self._read_delays)
        try:
            async with asyncio.timeout(self._timeout_s):
                self._addresses = self._addresses or await self._target.addresses()
                made.wire = await open_wire(
                    self._addresses, self._target.tls, self._target.host, self.ahead, made.received, made.lost
                )
        except OSError as error:  # TimeoutError and ssl.SSLError are such
            record.error, record.detail = _connect_error(error), str(error)
            record.end = monotonic_s()
            return None
        return made


def _connect_error(error: OSError) -> str:
    """Given why a connection could not be made, return its name."""
    match error:
        case ConnectionRefusedError():
            return CONNECT_REFUSED
        case ConnectionResetError():
            return CONNECTION_RESET
        case TimeoutError():
            return TIMEOUT
        case socket.gaierror():
            return "host not found"
        case ssl.SSLError():
            return "TLS failed"
        case _:
            return "connect failed"
