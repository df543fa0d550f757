"""Where requests go: the URL taken apart, its addresses, and how a request is written."""

import asyncio
import json
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

from autotuner.bench.wire import Address

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Target:
    """A server's OpenAI endpoint; the API key appears on the wire only. Raises ValueError for a URL that cannot be used."""

    def __init__(self, url: str, api_key: str | None = None, endpoint: str = "completions") -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"the URL must be like http://127.0.0.1:8080, not {parts.scheme or url!r}")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        name = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {parts.path.rstrip('/').removesuffix('/v1')}{PATHS[endpoint]} HTTP/1.1",
            f"Host: {name}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "Accept-Encoding: identity",
            "User-Agent: autotuner-bench",
        ]
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        if any(c < " " for line in lines for c in line):
            raise ValueError("the URL or the API key contains control characters")
        self._head = "\r\n".join(lines).encode()

    def request(self, body: dict[str, Any]) -> bytes:
        """Given a JSON body, return the whole request as it goes on the wire."""
        content = json.dumps(body).encode()
        return b"%b\r\nContent-Length: %d\r\n\r\n%b" % (self._head, len(content), content)

    async def addresses(self) -> list[Address]:
        """Look the host up, once a level; raise OSError (socket.gaierror) where it has no address."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return [(family, address) for family, _, _, _, address in found]
