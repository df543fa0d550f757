"""Asks a server how long words are: which are one token each, and what it adds to a prompt. A few small requests."""

import asyncio
import json
from collections import deque
from typing import Any

import httpx
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from autotuner.bench.benchmark import Benchmark
from autotuner.bench.words import WORDS, Texts, Words
from autotuner.edge.probes import ANSWER_BYTES_MAX, NO_TLS

COUNT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0  # a real answer of one token: the first request of a shape may compile kernels
TOTAL_S = 90.0  # for all of it, whatever the server does
COUNTS_MAX = 40  # questions about groups of words, at most, where not all are one token
ENOUGH_WORDS = 192  # the search ends with so many,
FEWEST_WORDS = 64  # and with fewer it has failed
LONGER_MAX = 0.5  # more than so many tokens too many for the pool, and the search is not begun
OPENERS = 12  # words tried at the start of a text, one by one
SAMPLE_WORDS = (16, 128)  # of a text whose tokens are compared: the least and the most
_LOST = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)  # the connection broke
ANCHOR = "the"  # stands first in each question, since a word may be encoded otherwise where nothing is before it


class _NoAnswerError(Exception):
    """The server has no such endpoint, or its answer says nothing."""


async def words_for(url: str, benchmark: Benchmark, model: str | None, api_key: str | None = None) -> Words:
    """Given a server, a benchmark and the model's name, return the words to make the prompts of. Never raises for a server.

    With a tokenizer endpoint (POST /tokenize: vLLM, SGLang, llama.cpp) the words are one token each, and for completions
    nothing is generated. Else, and for a chat's template, one or two real requests for one token tell by `usage`.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        # No proxy of the environment may stand between the daemon and a server on its own host.
        async with (
            asyncio.timeout(TOTAL_S),
            httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, verify=NO_TLS) as client,
        ):
            return await _words(_Server(client, benchmark, model))
    except (_NoAnswerError, TimeoutError, httpx.InvalidURL, UnicodeError):
        said = f"the server tells neither how it counts tokens nor how many a prompt has; {Words().said}"
        return Words(said=said)


async def _words(server: "_Server") -> Words:
    try:
        found = await _by_tokenizer(server)
    except _NoAnswerError:
        return await _by_usage(server)
    if server.benchmark.endpoint == "completions":
        return found
    return await _with_template(server, found)


async def _by_tokenizer(server: "_Server") -> Words:
    """The words that the tokenizer endpoint counts as one token. Raise _NoAnswerError if there is none, or too few are."""
    good = await _single_words(server)
    tried = good[:OPENERS]
    # The fewest tokens that one word alone has are the server's own and one more.
    counts = await asyncio.gather(*(server.count(word) for word in tried))
    overhead = min(counts) - 1
    found = Words(
        how="exact",
        said=_exactly(server.benchmark, overhead),
        words=tuple(good),
        openers=tuple(word for word, count in zip(tried, counts, strict=True) if count == overhead + 1),
        tokens_per_word=1.0,
        overhead=overhead,
    )
    sample = _sample(found, 0, SAMPLE_WORDS[1])
    if await server.count(sample) != len(sample.split()) + overhead:
        raise _NoAnswerError("words have other lengths together than alone")
    return found


async def _single_words(server: "_Server") -> list[str]:
    """The words that are one token each behind another: those of groups that have as many tokens as words."""
    alone = await server.count(ANCHOR)

    async def extra(group: tuple[str, ...]) -> int:
        more = await server.count(" ".join([ANCHOR, *group])) - alone - len(group)
        if more < 0:
            raise _NoAnswerError("that is no number of tokens")
        return more

    longer = await extra(WORDS)
    if not longer:
        return list(WORDS)
    if longer > LONGER_MAX * len(WORDS):
        raise _NoAnswerError("too few words are one token each")
    # Groups so small that most of them are good: with a share d of longer words, (1 - d)^(0.7 / d) is about a half.
    size = max(1, round(0.7 * len(WORDS) / longer))
    waiting = deque(WORDS[place : place + size] for place in range(0, len(WORDS), size))
    good: list[str] = []
    for _ in range(COUNTS_MAX):
        if not waiting or len(good) >= ENOUGH_WORDS:
            break
        group = waiting.popleft()
        if not await extra(group):
            good += group
        elif len(group) > 1:
            half = len(group) // 2
            waiting += (group[:half], group[half:])
    if len(good) < FEWEST_WORDS:
        raise _NoAnswerError("too few words are one token each")
    return good


async def _with_template(server: "_Server", found: Words) -> Words:
    """Given words of one token, return them with what a chat's template adds: two prompts that begin otherwise must agree."""
    samples = [_sample(found, number, SAMPLE_WORDS[0]) for number in range(2)]
    try:
        added = [await server.prompt_tokens(sample) - len(sample.split()) for sample in samples]
    except _NoAnswerError:
        said = "words are one token each; what the server's chat template adds to each prompt it does not tell"
        return found.model_copy(update={"how": "calibrated", "said": said})
    if added[0] != added[1] or added[0] < 0:
        said = "words are one token each within a text, but not where a chat's message begins: prompts differ by a token or two"
        return found.model_copy(update={"how": "calibrated", "said": said, "overhead": max(0, min(added))})
    return found.model_copy(update={"said": _exactly(server.benchmark, added[0]), "overhead": added[0]})


async def _by_usage(server: "_Server") -> Words:
    """Calibrate by the prompt tokens of two real requests. Raise _NoAnswerError if the server does not tell them."""
    least, most = SAMPLE_WORDS
    # The longer one is all the words that are used afterwards: if each of them is one token, every prompt is exact.
    words = WORDS[: max(least * 2, min(most, server.benchmark.prompt_tokens))]
    short = await server.prompt_tokens(" ".join(words[:least]))
    whole = await server.prompt_tokens(" ".join(words))
    each = (whole - short) / (len(words) - least)
    if not 0.5 <= each <= 8:
        raise _NoAnswerError("what the server counts has nothing to do with the words")
    overhead = max(0, round(short - least * each))
    if each == 1.0 and short == least + overhead:
        said = _exactly(server.benchmark, overhead)
        return Words(how="exact", said=said, words=words, openers=words[:1], tokens_per_word=1.0, overhead=overhead)
    said = f"the length of prompts is calibrated: {each:.3g} tokens a word by the server's own count of two prompts"
    return Words(how="calibrated", said=said, words=words, openers=words, tokens_per_word=each, overhead=overhead)


def _sample(words: Words, number: int, length: int) -> str:
    """A text as prompts are, of all sorts of words."""
    return Texts(words, "sample").text("sample", number, length, opens=True)


def _exactly(benchmark: Benchmark, overhead: int) -> str:
    least = overhead + 1
    if benchmark.prompt_tokens < least:
        return f"prompts have {least} tokens, since the server itself adds {overhead} to each: more than prompt_tokens"
    own = f", {overhead} of them added by the server itself" if overhead else ""
    return f"synthetic prompts have exactly {benchmark.prompt_tokens} tokens by the server's own count{own}"


class _Server:
    """One server that is asked for numbers of tokens."""

    def __init__(self, client: httpx.AsyncClient, benchmark: Benchmark, model: str | None) -> None:
        self.benchmark = benchmark
        self._client = client
        self._model = {"model": model} if model else {}

    async def count(self, text: str) -> int:
        """How many tokens a text has as a prompt.

        One body serves all engines: prompt is the key of vLLM and SGLang, content that of llama.cpp. A release that refuses a
        key it does not know is asked by its own keys alone.
        """
        vllm = {**self._model, "prompt": text, "add_special_tokens": True}
        for body in (vllm | {"content": text, "add_special": True}, vllm):
            answer = await self._ask("/tokenize", body, COUNT_TIMEOUT_S)
            if answer is not None:
                break
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        count = answer.get("count", len(tokens) if isinstance(tokens, list) else None) if answer else None
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise _NoAnswerError("no number of tokens")
        return count

    async def prompt_tokens(self, text: str) -> int:
        """How many prompt tokens a real request with this text has, by its usage."""
        chat = self.benchmark.endpoint == "chat"
        content: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = {**self._model, **content, "max_tokens": 1, "temperature": 0}
        usage = (await self._ask(path, body, ANSWER_TIMEOUT_S) or {}).get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise _NoAnswerError("no prompt tokens")
        return count

    async def _ask(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Post a body; return the answer, None if it was refused for its keys. Raise _NoAnswerError for anything else."""
        try:
            status, content = await self._posted(path, body, timeout_s)
            found = json.loads(content) if status == 200 else None
        except (TimeoutError, httpx.HTTPError, ValueError, RecursionError) as error:
            raise _NoAnswerError(type(error).__name__) from None
        if status in {400, 422}:
            return None
        if not isinstance(found, dict):
            raise _NoAnswerError(f"HTTP {status}")
        return found

    # A server closes a connection unannounced, as uvicorn does after an error of its own, just as the next request goes out
    # on it: asked again, it answers.
    @retry(stop=stop_after_attempt(2), retry=retry_if_exception_type(_LOST), reraise=True)
    async def _posted(self, path: str, body: dict[str, Any], timeout_s: float) -> tuple[int, bytes]:
        received = bytearray()
        async with (
            asyncio.timeout(timeout_s),
            self._client.stream("POST", path, json=body, timeout=timeout_s) as answer,
        ):
            async for piece in answer.aiter_bytes():
                received += piece
                if len(received) > ANSWER_BYTES_MAX:
                    raise _NoAnswerError("an answer without end")
        return answer.status_code, bytes(received)
