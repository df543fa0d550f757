"""sd_notify datagrams: READY, STATUS, WATCHDOG, RELOADING, STOPPING. Silent where no service manager listens."""

import os
import socket

from autotuner.edge import clock

SEND_TIMEOUT_S = 1.0


class Notifier:
    """Speaks to the service manager named by NOTIFY_SOCKET, and takes that name out of the environment.

    A server launched later must not be able to speak for the daemon.
    """

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        asked, pid = os.environ.pop("WATCHDOG_USEC", ""), os.environ.pop("WATCHDOG_PID", "")
        ours = pid in {"", str(os.getpid())}  # it may be meant for a process that started this one
        self._watchdog_us = int(asked) if ours and asked.isdecimal() else 0
        self._was_ready = False

    @property
    def watchdog_s(self) -> float:
        """The longest silence the manager allows, in seconds; 0 if it does not watch."""
        return self._watchdog_us / 1e6

    def ready(self) -> None:
        """The daemon works its slots."""
        self._was_ready = True
        self._send("READY=1")

    def status(self, sentence: str) -> None:
        """The last decision, for `systemctl status`."""
        self._send("STATUS=" + " ".join(sentence.split())[:300])

    def cycle_completed(self) -> None:
        """Feed the watchdog; called from the end of a completed cycle only, so that a wedged loop looks wedged.

        The first one is what makes the daemon ready: the record is open, and every slot was looked at.
        """
        if not self._was_ready:
            self.ready()
        if self._watchdog_us:
            self._send("WATCHDOG=1")

    def reloading(self) -> None:
        """Settings are being read again; the manager wants the time in the same datagram."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={clock.monotonic_us()}")

    def stopping(self) -> None:
        """The daemon ends; this is final."""
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
                s.settimeout(SEND_TIMEOUT_S)
                s.sendto(message.encode("utf-8", "replace"), address)
        except OSError:
            # A manager that went away, or does not read, must not take the daemon with it.
            return
