"""An asyncio loop whose load sockets are read at once, without a turn of the loop for each: several times less CPU an event.

A socket given to `HotLoop.hot` has its reader called right where epoll reports it. The loop itself runs only when a reader
says that something of it is due, when a timer is, or when anything else became ready. Measured against uvloop's protocols
on a paced null server: 1.2 to 1.5 times the events per CPU second (docs/benchmark-client.md).
"""

import asyncio
import select
import selectors
from collections.abc import Callable, Mapping
from typing import Any

from autotuner.edge.clock import monotonic_s, pause

Reader = Callable[[float], bool]  # given the time at which epoll returned, read; tell whether the loop is to run now

_PRECISE_BELOW_S = 0.05  # epoll waits in whole milliseconds; shorter waits than this are worth a second system call
_EVENTS_MAX = 4096
# A request that ends may wait so long for its reader: half of it on average, which is said as lateness.
GATHER_S = 0.001
_MANY_PER_S = 4000  # below this rate of events single wake-ups are cheap enough
_LOOK_EVENTS = 512
_STREAMS_OF_EVENTS = 128  # so many of these are enough to see of how many streams they are
_OF_A_GAP = 0.25  # a pause is no longer than this share of the time between two events of a stream
_EVENTS_LEAST = 8  # that requests have on average
_BATCH_ENOUGH = 24  # events that a wake-up should bring: then it costs little beside them


class HotSelector(selectors.BaseSelector):
    """An epoll that calls the readers of hot sockets itself, and hands everything else to an ordinary selector."""

    def __init__(self) -> None:
        self._slow = selectors.EpollSelector()
        self._epoll = select.epoll()
        self._epoll.register(self._slow.fileno(), select.EPOLLIN)
        self._readers: dict[int, Reader] = {self._slow.fileno(): lambda _: True}
        self.precise = False  # wait to the microsecond, as an open loop must that sends on time
        self.gather = (
            False  # readers know from the kernel when bytes came, so that reading them a moment later costs no truth
        )
        self._events = self._ended = 0
        self._fds: set[int] = set()
        self._events_since = monotonic_s()
        self._pause_s = 0.0  # how long to gather now

    def add_hot(self, fd: int, reader: Reader) -> None:
        """Call `reader` whenever `fd` can be read or has ended."""
        self._epoll.register(fd, select.EPOLLIN)
        self._readers[fd] = reader

    def remove_hot(self, fd: int) -> None:
        """Call its reader no more; to be done before `fd` is closed."""
        if self._readers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Read hot sockets until the loop has something to do or `timeout` seconds are over; return what else is ready."""
        reader_of, poll = self._readers.get, self._epoll.poll
        until = None if timeout is None else monotonic_s() + timeout
        while True:
            ready = self._poll(timeout, poll)
            now = monotonic_s()
            ended = 0
            for fd, _ in ready:
                reader = reader_of(fd)  # one dropped by another in this very batch has none
                if reader is not None and reader(now):
                    ended += 1
            if ended:
                self._ended += ended
                return self._slow.select(0)
            if self.gather and (pause_s := self._to_gather(ready, now)):
                pause(pause_s if until is None else min(pause_s, max(0.0, until - now)))
                now = monotonic_s()
            if until is not None:
                timeout = until - now
                if timeout <= 0:
                    return []

    def _to_gather(self, ready: list[tuple[int, int]], now: float) -> float:
        """Given what just came, return for how long the next batch may grow: a wake-up costs more than the few events in it.

        A client that has no time to lose finds large batches, and does not pause. Two events of one stream must not meet in a
        read, and of requests with few events the pause before the next one would be too much of their time.
        """
        if self._events < _STREAMS_OF_EVENTS:
            self._fds.update([fd for fd, _ in ready])
        self._events += len(ready)
        if self._events >= _LOOK_EVENTS:
            rate = self._events / max(1e-9, now - self._events_since)
            worth = rate > _MANY_PER_S and self._events > _EVENTS_LEAST * self._ended
            wanted = min(_BATCH_ENOUGH, len(self._fds) * _OF_A_GAP)
            self._pause_s = min(GATHER_S, wanted / rate) if worth else 0.0
            self._events, self._events_since, self._ended = 0, now, 0
            self._fds.clear()
        return self._pause_s if 0 < len(ready) < _BATCH_ENOUGH else 0.0

    def _poll(self, timeout: float | None, poll: Callable[..., list[tuple[int, int]]]) -> list[tuple[int, int]]:
        if timeout is None:
            return poll(None, _EVENTS_MAX)
        if self.precise and 0 < timeout < _PRECISE_BELOW_S:
            select.select([self._epoll.fileno()], [], [], timeout)
            timeout = 0
        return poll(max(0.0, timeout), _EVENTS_MAX)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Watch an ordinary file; called by asyncio."""
        return self._slow.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Watch an ordinary file no more; called by asyncio."""
        return self._slow.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Change what an ordinary file is watched for; called by asyncio."""
        return self._slow.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Return the ordinary files; called by asyncio."""
        return self._slow.get_map()

    def close(self) -> None:
        """Give back both epolls; called by asyncio."""
        self._epoll.close()
        self._slow.close()


class HotLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop on a HotSelector, which stands open as `hot`."""

    def __init__(self) -> None:
        self.hot = HotSelector()
        super().__init__(self.hot)


def watch(fd: int, reader: Reader) -> None:
    """Have the running loop call `reader` when `fd` can be read: at once on a HotLoop, in its own turn on any other."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, HotLoop):
        loop.hot.add_hot(fd, reader)
    else:
        loop.add_reader(fd, lambda: reader(monotonic_s()))


def unwatch(fd: int) -> None:
    """Undo `watch`."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, HotLoop):
        loop.hot.remove_hot(fd)
    else:
        loop.remove_reader(fd)


def reads_are_stamped() -> None:
    """Say that the kernel's times come with what is read, so that reads need not be prompt to be true."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, HotLoop):
        loop.hot.gather = True
