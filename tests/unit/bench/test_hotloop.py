"""Hot sockets are read at once and never after they were dropped, and asyncio's own business goes on beside them."""

import asyncio
import os
import socket
from collections.abc import Coroutine, Iterator
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.bench import hotloop
from autotuner.bench.hotloop import GATHER_S, HotLoop, HotSelector, unwatch, watch
from autotuner.edge.clock import monotonic_s


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=HotLoop) as runner:
        return runner.run(asyncio.wait_for(work, 120))


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made = [socket.socketpair() for _ in range(3)]
    for pair in made:
        pair[0].setblocking(False)
    yield made
    for pair in made:
        for end in pair:
            end.close()


def test_a_reader_is_called_while_the_loop_sleeps_and_wakes_it_only_if_it_says_so(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    async def work() -> None:
        heard, woken = [], asyncio.Event()
        ours, theirs = pairs[0]

        def reader(_: float) -> bool:
            heard.append(ours.recv(100))
            if heard[-1] == b"last":
                woken.set()
            return heard[-1] == b"last"

        watch(ours.fileno(), reader)
        theirs.send(b"first")
        await asyncio.sleep(0.05)
        assert heard == [b"first"]
        theirs.send(b"last")
        await woken.wait()
        unwatch(ours.fileno())
        theirs.send(b"more")
        await asyncio.sleep(0.02)
        assert heard == [b"first", b"last"]

    run(work())


def test_a_reader_that_another_dropped_in_the_same_batch_is_not_called(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    async def work() -> None:
        called: list[int] = []

        def reader(mine: int) -> Any:
            def read(_: float) -> bool:
                called.append(mine)
                for ours, _theirs in pairs:
                    unwatch(ours.fileno())
                return True

            return read

        for number, (ours, theirs) in enumerate(pairs):
            watch(ours.fileno(), reader(number))
            theirs.send(b"x")  # all are ready before the loop looks again
        await asyncio.sleep(0.02)
        assert len(called) == 1

    run(work())


def test_a_number_that_a_new_socket_got_belongs_to_the_new_socket() -> None:
    async def work() -> None:
        heard: list[str] = []
        one, other = socket.socketpair()
        number = one.fileno()
        watch(number, lambda _: bool(heard.append("old")))
        unwatch(number)
        one.close()
        other.close()
        again, peer = socket.socketpair()
        assert number in {again.fileno(), peer.fileno()}
        mine, theirs = (again, peer) if again.fileno() == number else (peer, again)
        watch(number, lambda _: bool(heard.append(mine.recv(9).decode())))
        theirs.send(b"new")
        await asyncio.sleep(0.02)
        unwatch(number)
        again.close()
        peer.close()
        assert heard == ["new"]

    run(work())


def test_timers_threads_pipes_and_processes_work_while_hot_sockets_are_busy(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    async def work() -> None:
        ours, theirs = pairs[0]
        theirs.setblocking(False)
        watch(ours.fileno(), lambda _: bool(ours.recv(1)) and bool(theirs.send(b"x")) and False)  # ready for ever
        theirs.send(b"x")
        fired: list[str] = []
        asyncio.get_running_loop().call_later(0.01, fired.append, "timer")
        assert await asyncio.to_thread(lambda: 7) == 7
        read, write = os.pipe()
        asyncio.get_running_loop().add_reader(read, lambda: fired.append("pipe" if os.read(read, 1) else ""))
        os.write(write, b"x")
        await asyncio.sleep(0.05)
        asyncio.get_running_loop().remove_reader(read)
        os.close(read)
        os.close(write)
        process = await asyncio.create_subprocess_exec("true")
        assert await process.wait() == 0
        unwatch(ours.fileno())
        assert sorted(fired) == ["pipe", "timer"]

    run(work())


@pytest.mark.parametrize("precise", [False, True])
def test_no_wait_ends_before_its_time(precise: bool) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HotLoop)
        loop.hot.precise = precise
        for seconds in (0.0, 0.0003, 0.0017, 0.02):
            began = loop.time()
            await asyncio.sleep(seconds)
            assert loop.time() - began >= seconds - 1e-6

    run(work())


def gathered(*, streams: int, per_s: float, batch: int = 4, ended: int = 0) -> float:
    """For how long a selector pauses after many such events, so many at a time; `ended` requests end within a look."""
    hot = HotSelector()
    try:
        fds, now, pause_s = cycle(range(100, 100 + streams)), monotonic_s(), 0.0
        for _ in range(400):
            now += batch / per_s
            hot._ended = ended
            pause_s = hot._to_gather([(next(fds), 1) for _ in range(batch)], now)
        return pause_s
    finally:
        hot.close()


def test_wake_ups_are_gathered_where_many_bring_few_events() -> None:
    assert gathered(streams=128, per_s=20_000) == pytest.approx(GATHER_S)
    assert gathered(streams=128, per_s=86_000) == pytest.approx(24 / 86_000, rel=0.05), "until they bring enough"
    assert gathered(streams=128, per_s=20_000, batch=30) == 0, "they do by themselves"
    assert gathered(streams=128, per_s=1_000) == 0, "there are few of them"
    assert gathered(streams=128, per_s=20_000, ended=80) == 0, (
        "requests end so often that their next ones would be late"
    )


@given(st.integers(1, 300), st.floats(100.0, 1e6), st.integers(1, 40))
def test_two_events_of_one_stream_do_not_meet_because_wake_ups_are_gathered(
    streams: int, per_s: float, batch: int
) -> None:
    pause_s = gathered(streams=streams, per_s=per_s, batch=batch)
    assert pause_s <= min(GATHER_S, 0.26 * streams / per_s)


def test_a_timer_is_not_late_because_wake_ups_are_gathered(
    pairs: list[tuple[socket.socket, socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    monkeypatch.setattr(hotloop, "pause", paused.append)
    monkeypatch.setattr(HotSelector, "_to_gather", lambda *_: 60.0)
    hot = HotSelector()
    hot.gather = True
    ours, theirs = pairs[0]
    hot.add_hot(ours.fileno(), lambda _: bool(ours.recv(9)) and False)
    theirs.send(b"x")
    hot.select(0.05)
    hot.close()
    assert 0 <= paused[0] <= 0.05


def test_on_any_other_loop_sockets_are_read_too(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    async def work() -> None:
        heard: list[bytes] = []
        ours, theirs = pairs[0]
        watch(ours.fileno(), lambda _: bool(heard.append(ours.recv(9))))
        theirs.send(b"x")
        await asyncio.sleep(0.02)
        unwatch(ours.fileno())
        assert heard == [b"x"]

    asyncio.run(work())
