"""A server that somebody names by its URL: whether anything listens there, and which models it offers."""

import json
from urllib.parse import urlsplit

import httpx

from autotuner.core.redact import one_line
from autotuner.errors import HostError, NotFound, Refused

TIMEOUT_S = 10.0


def base_url(text: str) -> str:
    """Given what a person typed, return the server's root: with a scheme, without `/v1`. Raise Refused for no URL of HTTP."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number
        good = False
    if not good or any(c <= " " for c in text):
        raise Refused(f"{one_line(text, 100)!r} is no URL of a server; it must be like http://127.0.0.1:8000")
    if parts.query or parts.fragment or parts.username is not None:
        raise Refused(
            "the URL must be the server's root alone, like http://127.0.0.1:8000; a key goes into --api-key-file"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


async def model_at(url: str, wanted: str | None, api_key: str | None) -> str | None:
    """Given a server's root, return the model to ask for: the wanted one, else the first that it offers.

    None where it has no list of models and none is wanted. Raise HostError where nothing answers, Refused where the key is
    not taken, NotFound where the server does not have the wanted model or is no OpenAI-compatible one.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, headers=headers) as client:
            answer = await client.get(f"{url}/v1/models")
    except httpx.ConnectError as error:
        raise HostError(f"nothing listens at {url}: {one_line(str(error), 120)}") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        said = one_line(str(error), 120) or type(error).__name__
        raise HostError(f"{url} does not answer like an HTTP server: {said}") from None
    if answer.status_code in {401, 403}:
        raise Refused(f"{url} wants another API key: set $AUTOTUNER_API_KEY, or name a file with --api-key-file")
    if answer.status_code >= 500:
        raise HostError(f"{url} is not ready: HTTP {answer.status_code}: {one_line(answer.text, 120)}")
    offered = _names(answer.text) if answer.status_code == 200 else None
    if offered is None:
        if wanted is not None:
            return wanted
        raise NotFound(
            f"{url}/v1/models lists no models (HTTP {answer.status_code}): is this an OpenAI-compatible server's root? "
            "If it just has no such list, name the model with --model"
        )
    if wanted is not None and offered and wanted not in offered:
        raise NotFound(f"{url} has no model {wanted}; it offers {', '.join(offered[:8])}")
    return wanted or next(iter(offered), None)


def _names(text: str) -> list[str] | None:
    try:
        return [str(model["id"]) for model in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
