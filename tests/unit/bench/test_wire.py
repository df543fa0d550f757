"""Times are the kernel's and never go back, a server may answer whenever it likes, and nobody is trusted unseen."""

import asyncio
import contextlib
import socket
import ssl
import struct
import subprocess
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from patience import FOR_EVER_S, PATIENCE_S

from autotuner.bench import wire
from autotuner.bench.connection import Connection
from autotuner.bench.hotloop import HotLoop
from autotuner.bench.meter import Record
from autotuner.bench.target import Target
from autotuner.bench.wire import Ahead, PlainWire, open_wire
from autotuner.edge.clock import monotonic_s

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LONG = b"POST / HTTP/1.1\r\nContent-Length: 30000000\r\n\r\n" + b"x" * 30_000_000  # far more than sockets hold


def chunk(text: str) -> bytes:
    event = b'data: {"choices":[{"text":"%b"}]}\n\n' % text.encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=HotLoop) as runner:
        return runner.run(asyncio.wait_for(work, PATIENCE_S))


@contextlib.asynccontextmanager
async def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[wire.Address]:
    """A server whose every connection is `handler`; none of them outlives the block."""
    tasks: set[asyncio.Task[Any]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await handler(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield socket.AF_INET, server.sockets[0].getsockname()
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)


async def asked(
    handler: Handler,
    request: bytes = b"GET / HTTP/1.1\r\n\r\n",
    timeout_s: float = PATIENCE_S,
    ahead: Ahead | None = None,
    tls: tuple[ssl.SSLContext, ssl.SSLContext, str] | None = None,
) -> tuple[Record, bool]:
    """One request to such a server: how it went, and whether the connection could be used again."""
    theirs, ours, host = tls or (None, None, "127.0.0.1")
    connection, record = Connection(array("d")), Record(sent=0.0)
    async with serving(handler, theirs) as address:
        try:
            connection.wire = await open_wire(
                [address], ours, host, ahead or Ahead(), connection.received, connection.lost
            )
            await connection.ask(request, record, timeout_s)
            return record, connection.usable
        finally:
            connection.drop()
            await asyncio.sleep(0.01)


async def five_tokens(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(HEAD)
    for word in "abcde":
        writer.write(chunk(word))
        await asyncio.sleep(0.01)
    writer.write(END)
    await reader.read()


def in_order(record: Record) -> bool:
    times = [record.sent, *record.times, record.end or 0.0]
    return all(a <= b for a, b in pairwise(times)) and times[-1] <= monotonic_s() + 0.01


def test_the_time_of_an_event_is_when_the_kernel_had_it_however_late_it_is_read() -> None:
    async def work() -> tuple[float, float, list[float]]:
        ours, theirs = socket.socket(), socket.create_server(("127.0.0.1", 0))
        ours.connect(theirs.getsockname())
        peer, _ = theirs.accept()
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, 35, 1)
        peer.send(b"early")  # the first read after stamps were asked for may have none
        heard: list[float] = []
        made = PlainWire(ours, Ahead(), lambda _d, at, _now: bool(heard.append(at)), lambda _: None)
        await asyncio.sleep(0.02)
        before = monotonic_s()
        peer.send(b"x")
        after = monotonic_s()
        made._read(monotonic_s() + 0.3)  # as a loop that comes 300 ms late
        made.close()
        peer.close()
        theirs.close()
        if not made.stamped:
            pytest.skip("this kernel gives no receive times")
        return before, after, heard

    before, after, heard = run(work())
    assert before - 0.001 <= heard[-1] <= after + 0.001


@pytest.mark.parametrize("set_by_s", [-3600.0, -2.0, -0.02, 0.2, 3600.0])
def test_times_stay_in_order_when_the_wall_clock_is_set_meanwhile(set_by_s: float) -> None:
    async def work() -> Record:
        ahead = Ahead()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + chunk("a"))
            await asyncio.sleep(0.02)
            ahead.s -= set_by_s  # as if the kernel's stamps had jumped by so much
            for word in "bcd":
                writer.write(chunk(word))
                await asyncio.sleep(0.02)
            writer.write(END)
            await reader.read()

        return (await asked(handler, ahead=ahead))[0]

    record = run(work())
    assert len(record.times) == 4
    assert in_order(record)
    assert record.times[-1] - record.times[0] < 2.0, "nobody believes a clock that jumped"


def test_a_look_at_the_clocks_finds_one_that_was_set_and_leaves_others_alone() -> None:
    ahead = Ahead()
    right = ahead.s
    ahead.s += 5.0
    ahead.check()
    assert ahead.s == pytest.approx(right, abs=0.5)


def test_a_request_longer_than_the_sockets_hold_arrives_whole() -> None:
    got: list[int] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        got.append(len(await reader.readexactly(30_000_000)))
        writer.write(HEAD + chunk("a") + END)
        await reader.read()

    record, _ = run(asked(handler, LONG))
    assert (got, record.error, len(record.times)) == ([30_000_000], "", 1)
    assert in_order(record)


@pytest.mark.parametrize("then", ["keeps the connection", "closes", "resets"])
def test_a_server_that_answers_before_the_request_is_sent_is_heard_and_its_connection_is_not_used_again(
    then: str,
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"error":{"message":"too long"}}'
        writer.write(b"HTTP/1.1 413 No\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await asyncio.sleep(0.05)
        if then == "keeps the connection":
            await asyncio.sleep(FOR_EVER_S)
        elif then == "resets":
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    record, usable = run(asked(handler, LONG))
    assert (record.error, record.detail) == ("HTTP 413", "too long")
    assert not usable


@pytest.mark.parametrize("how", ["resets", "times out"])
def test_a_request_that_a_server_stops_taking_ends_with_its_name(how: str) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if how == "resets":
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(FOR_EVER_S)

    record, _ = run(asked(handler, LONG, PATIENCE_S if how == "resets" else 0.2))
    assert record.error == ("connection reset" if how == "resets" else "timeout")


def test_the_next_socket_of_the_same_number_works_after_one_was_dropped_while_sending() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(FOR_EVER_S)

    async def work() -> list[str]:
        given_up = await asked(never, LONG, 0.15)
        return [record.error for record, _ in (given_up, await asked(five_tokens))]

    assert run(work()) == ["timeout", ""]


def test_an_early_hint_and_many_continues_come_before_the_answer() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 2000 + b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\n")
        writer.write(HEAD + chunk("a") + END)
        await reader.read()

    record, _ = run(asked(handler))
    assert (record.error, len(record.times)) == ("", 1)


@pytest.mark.parametrize("body", [b"[" * 50_000, b'{"error":' + b"[" * 50_000, b"\xff\xfe{"])
def test_nonsense_instead_of_an_error_breaks_nothing(body: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 500 X\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await reader.read()

    assert run(asked(handler))[0].error == "HTTP 500"


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    argv += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    try:
        subprocess.run([*argv, "-keyout", str(path), "-out", str(path) + ".crt"], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    path.write_text(path.read_text() + Path(str(path) + ".crt").read_text())
    return path


async def over_tls(certificate: Path, ours: ssl.SSLContext, host: str = "localhost") -> tuple[Record, bool]:
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(certificate)
    return await asked(five_tokens, tls=(theirs, ours, host))


def trusting(certificate: Path) -> ssl.SSLContext:
    made = ssl.create_default_context()
    made.load_verify_locations(certificate)
    return made


def test_an_answer_over_tls_is_measured_like_any_other(certificate: Path) -> None:
    record, usable = run(over_tls(certificate, trusting(certificate)))
    assert (record.error, len(record.times), usable) == ("", 5, True)
    assert in_order(record)


def test_a_certificate_that_nobody_vouches_for_or_of_another_host_is_refused(certificate: Path) -> None:
    usual = Target("https://localhost").tls
    assert usual is not None
    assert (usual.verify_mode, usual.check_hostname) == (ssl.CERT_REQUIRED, True)
    for tls, host in ((usual, "localhost"), (trusting(certificate), "other.example")):
        with pytest.raises(ssl.SSLCertVerificationError):
            run(over_tls(certificate, tls, host))


def test_the_first_address_that_answers_is_taken() -> None:
    async def work() -> bool:
        async with serving(five_tokens) as (_, address):
            addresses: list[wire.Address] = [(socket.AF_INET6, ("::1", address[1])), (socket.AF_INET, address)]
            made = await open_wire(addresses, None, "localhost", Ahead(), lambda *_: False, lambda _: None)
            found = made.open
            made.close()
        with pytest.raises(OSError, match="no address"):
            await open_wire([], None, "x", Ahead(), lambda *_: False, lambda _: None)
        return found

    assert run(work())
