"""A server that lies: liar.py PORT MODE [TURNS]. A program; standard library, no site packages.

It answers /health, /v1/models and /v1/completions as an engine would, but for what MODE says, at once or from when the file TURNS
is there. It shares its port with whoever asks for that, and ends after two minutes.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

GOOD = json.dumps({"choices": [{"text": " Paris"}], "usage": {"completion_tokens": 2}})
BODIES = {  # 200, and what is in it
    "error-in-200": json.dumps({"error": {"message": "CUDA error", "code": 500}}),
    "no-json": "<html>It works!</html>",
    "no-choices": json.dumps({"choices": []}),
    "no-token": json.dumps({"choices": [{"text": ""}], "usage": {"completion_tokens": 0}}),
    "null": json.dumps({"choices": [{"text": None}], "usage": None}),
}
MODES = ("silent", "chatter", "dies-loading", "refuses", "hangs", "500", "cut", "endless", "reset", "ends", *BODIES)


def main(port: int, mode: str, turns: Path | None) -> None:
    """Serve, or do not."""
    signal.alarm(120)
    if turns is None:
        before_listening(mode)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            now = mode if turns is None or turns.exists() else "good"
            threading.Thread(target=answer, args=(connection, now), daemon=True).start()


def before_listening(mode: str) -> None:
    """What never comes as far as a socket."""
    if mode == "dies-loading":
        for part in range(100):
            print(f"Loading safetensors checkpoint shards: {part}% Completed", flush=True)
            time.sleep(0.005)
        os._exit(1)
    while mode in {"silent", "chatter"}:
        if mode == "chatter":
            print("INFO: still busy", flush=True)
        time.sleep(0.05)


def answer(connection: socket.socket, mode: str) -> None:
    """One request, and the end of its connection."""
    with connection:
        head = b""
        while b"\r\n\r\n" not in head:
            data = connection.recv(65536)
            if not data:
                return
            head += data
        if mode == "refuses":
            say(connection, "503 Service Unavailable", "{}")
        elif head.startswith(b"GET /health"):
            say(connection, "200 OK", "")
        elif head.startswith(b"GET /v1/models"):
            say(connection, "200 OK", json.dumps({"data": [{"id": "m"}]}))
        elif head.startswith(b"POST /v1/completions"):
            complete(connection, mode)
        else:
            say(connection, "404 Not Found", "{}")


def complete(connection: socket.socket, mode: str) -> None:
    """The lie itself."""
    if mode == "hangs":
        time.sleep(120)
    elif mode == "500":
        say(connection, "500 Internal Server Error", GOOD)
    elif mode == "cut":
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + GOOD.encode())
    elif mode == "endless":
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
    elif mode == "ends":
        os._exit(7)
    elif mode != "reset":
        say(connection, "200 OK", BODIES.get(mode, GOOD))


def say(connection: socket.socket, status: str, body: str) -> None:
    """A whole answer."""
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    connection.sendall((head + body).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]) if len(sys.argv) > 3 else None)
