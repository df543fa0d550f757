"""The null server's tokens come when they are due, as many as asked for, and it ends with its stdin."""

import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotuner.bench.nullserver import NullServer

ROOT = Path(__file__).parents[3]


@pytest.fixture
def port() -> Iterator[int]:
    argv = [sys.executable, "-m", "autotuner.bench.nullserver", "30", "10"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.stdin.close()
        assert process.wait(120) == 0, "it ends with its stdin"


def request(**body: object) -> bytes:
    content = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)


def answer(sock: socket.socket) -> bytes:
    heard = b""
    while not heard.endswith(b"0\r\n\r\n"):
        piece = sock.recv(65_536)
        assert piece, "closed in the middle"
        heard += piece
    return heard


def test_an_answer_has_the_tokens_asked_for_and_usage_and_the_connection_is_kept(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        for tokens in (3, 1, 5):
            began = time.monotonic()
            sock.sendall(request(max_tokens=tokens))
            heard = answer(sock)
            assert time.monotonic() - began >= 0.030 + (tokens - 1) * 0.010 - 0.001
            assert heard.startswith(b"HTTP/1.1 200 OK\r\n")
            assert heard.count(b'"text":" the"') == tokens
            assert b'"completion_tokens":%d,' % tokens in heard
            assert heard.count(b"data: [DONE]") == 1


def test_a_request_may_come_in_pieces_and_a_client_may_leave_in_the_middle(port: int) -> None:
    whole = request(max_tokens=2)
    with socket.create_connection(("127.0.0.1", port)) as leaver:
        leaver.sendall(request(max_tokens=1000))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        for a, b in itertools.pairwise((0, 20, len(whole) - 3, len(whole))):
            sock.sendall(whole[a:b])
            time.sleep(0.02)
        assert answer(sock).count(b'"text":" the"') == 2


def test_a_client_that_never_reads_is_dropped_and_holds_nobody_up() -> None:
    server = NullServer(0.0, 0.0)
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(request(max_tokens=10**9))
        server._accept()
        stream = next(iter(server._streams.values()))
        stream.sock.setblocking(False)
        while not stream.left:
            server._read(stream)
        for _ in range(100_000):
            if not server._streams:
                break
            server._send_due()
    assert not server._streams
    assert not server._due
    server._listener.close()
    server._epoll.close()
