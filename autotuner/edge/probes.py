"""HTTP probes of a server: health, a real generation, metrics. Short deadlines, loopback only as a rule.

A 200 from /health is not serving: only generated tokens are.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from autotuner.core.redact import one_line
from autotuner.engines.base import Endpoints, Place

PROMPT = "The capital of France is"
PROBE_TOKENS = 8
GENERATE_TIMEOUT_S = 60.0  # the first request of a fresh server may compile kernels


@dataclass(frozen=True)
class Generated:
    """What came of asking for a few tokens."""

    ok: bool
    tokens: int = 0
    text: str = ""
    error: str = ""


class Probe:
    """One server's HTTP interface, for asking how it is."""

    def __init__(self, place: Place, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        # No proxy of the environment may stand between the daemon and a server on its own host.
        self._client = httpx.AsyncClient(base_url=place.url, timeout=5.0, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def healthy(self) -> bool:
        """Tell whether the server says that it is up; its models list stands in where it has no health endpoint."""
        try:
            answer = await self._client.get(self._endpoints.health or self._endpoints.models)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    async def model(self) -> str | None:
        """Return the name under which the server offers its model; None if it does not say."""
        try:
            data = (await self._client.get(self._endpoints.models)).json()
            return str(data["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
            return None

    async def generate(self, model: str | None) -> Generated:
        """Have the server generate a few tokens; the only proof that it serves."""
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": PROBE_TOKENS, "temperature": 0}
        if model:
            body["model"] = model
        try:
            answer = await self._client.post(self._endpoints.completions, json=body, timeout=GENERATE_TIMEOUT_S)
        except httpx.HTTPError as error:
            return Generated(ok=False, error=f"{type(error).__name__}: {one_line(str(error), 120)}".rstrip(": "))
        if answer.status_code != 200:
            return Generated(ok=False, error=f"HTTP {answer.status_code}: {one_line(answer.text, 200)}")
        return _generated(answer)

    async def scrape(self) -> str | None:
        """Return the metrics page; None if there is none."""
        return await self._get(self._endpoints.metrics)

    async def info(self) -> str | None:
        """Return what the server says about its configuration; None if it does not."""
        return await self._get(self._endpoints.info)

    async def flush_cache(self) -> None:
        """Have the server forget its prefix cache, where it can."""
        if self._endpoints.flush_cache:
            try:
                await self._client.post(self._endpoints.flush_cache)
            except httpx.HTTPError:
                return  # fresh prompts do the same; this only saves memory

    async def _get(self, path: str | None) -> str | None:
        if path is None:
            return None
        try:
            answer = await self._client.get(path)
        except httpx.HTTPError:
            return None
        return answer.text if answer.status_code == 200 else None


def _generated(answer: httpx.Response) -> Generated:
    try:
        data = answer.json()
        text = str(data["choices"][0].get("text") or "")
        tokens = int((data.get("usage") or {}).get("completion_tokens") or (1 if text else 0))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return Generated(ok=False, error=f"an answer that is no completion: {one_line(answer.text, 200)}")
    if tokens < 1:
        return Generated(ok=False, error="an answer without a single token")
    return Generated(ok=True, tokens=tokens, text=one_line(text, 120))
