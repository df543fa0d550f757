"""The requests of a dataset: which format a file has, where its records lie, and what each asks for. Pure.

The content is held once; a record is taken apart when it is asked for.
"""

import codecs
import datetime as dt
import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotuner.errors import InvalidInput, Problem

BLOCK_TOKENS = 512  # what a hash id of a Mooncake trace stands for
PROBLEMS_MAX = 5
CHUNK_BYTES = 1 << 20
ACCEPTED = (
    'accepted are JSON lines (or one JSON list) of {"prompt": …}, {"messages": [{"role": …, "content": …}]}, '
    '{"conversations": [{"from": "human", "value": …}, …]} (ShareGPT) or {"timestamp": ms, "input_length": …, '
    '"output_length": …, "hash_ids": […]} (Mooncake), and CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens '
    "(Azure) or Timestamp, Request tokens, Response tokens (BurstGPT)"
)
_AZURE = ("timestamp", "contexttokens", "generatedtokens")
_BURSTGPT = ("timestamp", "request tokens", "response tokens")
_SECONDS = re.compile(r"\d{1,15}(\.\d*)?", re.ASCII)
_WHOLE = re.compile(r"\d{1,9}", re.ASCII)
_GAP = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")
_USERS = {"human", "user"}


@dataclass(frozen=True, slots=True)
class Record:
    """One request or conversation: the user's texts in turn, or a whole history as (role, content), or a length alone.

    `blocks` are ids of stretches of BLOCK_TOKENS tokens that it shares with other records; `at_s` is its recorded time.
    """

    texts: tuple[str, ...] = ()
    messages: tuple[tuple[str, str], ...] = ()
    prompt_tokens: int = 0
    blocks: tuple[int, ...] = ()
    output_tokens: int | None = None
    at_s: float | None = None

    @property
    def asks(self) -> bool:
        """Whether there is anything to send: traces hold failed requests, and conversations may lack a user."""
        return bool(self.texts or self.messages or self.prompt_tokens) and self.output_tokens != 0


class Records:
    """The records of a dataset in the order of the file; `first_untimed` is the line of the first without a time, if any."""

    def __init__(self, data: bytes, read: Callable[[bytes], Record]) -> None:
        self._data = data
        self._read = read
        self._starts, self._ends, self._times = array("Q"), array("Q"), array("d")
        self._by_time: array[int] | None = None
        self.first_untimed: int | None = None

    def add(self, start: int, end: int, at_s: float | None) -> None:
        """Note where a record lies, and when it was."""
        if at_s is None and self.first_untimed is None:
            self.first_untimed = line_at(self._data, start)
        self._starts.append(start)
        self._ends.append(end)
        self._times.append(at_s or 0.0)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Record:
        return self._read(self._data[self._starts[index] : self._ends[index]])

    def timed(self, index: int) -> Record:
        """Given a place in the order of time, return the record. Raise IndexError behind the last."""
        return self[self._order[index]]

    def at_s(self, index: int) -> float:
        """Given a place in the order of time, return how long after the first record it was."""
        return self._times[self._order[index]] - self._times[self._order[0]]

    @property
    def _order(self) -> "array[int]":
        if self._by_time is None:
            self._by_time = array("L", sorted(range(len(self)), key=self._times.__getitem__))
        return self._by_time


def parse_records(name: str, data: bytes, *, cut: bool = False, most: int | None = None) -> Records:
    """Given a file's name and content, return its records. Raise InvalidInput naming file and line of what is wrong.

    `cut` says that the content is the beginning of a longer file: a record that is not whole is then left out. `most` ends
    the reading after so many records. Records that ask for nothing are left out.
    """
    at = _blank(data, 0)
    begin = data[at : at + 1]
    read: Callable[[bytes], Record] = _json_record
    pieces = _elements(data) if begin == b"[" else _lines(data, 0, whole=not cut)
    if begin not in {b"[", b"{", b""}:
        read, pieces = _csv_reader(name, data[:4096]), _lines(data, 1, whole=not cut)
    records, problems = Records(data, read), list[Problem]()
    for start, end in pieces:
        try:
            record = read(data[start:end])
        except ValueError as error:
            if cut and end == len(data):
                break
            hint = "" if problems else ACCEPTED
            problems.append(Problem(name, str(error), line_at(data, start), hint=hint))
            if len(problems) == PROBLEMS_MAX:
                break
            continue
        if record.asks:
            records.add(start, end, record.at_s)
        if len(records) == most:
            break
    if problems:
        raise InvalidInput(problems)
    if not records:
        raise InvalidInput([Problem(name, "holds no request", hint=ACCEPTED)])
    return records


def line_at(data: bytes, place: int) -> int:
    """Given a file's content and a byte's place in it, return the number of its line."""
    return data.count(b"\n", 0, place) + 1


# Where records lie: the places of their first bytes and behind their last ones.


def _lines(data: bytes, skipped: int, *, whole: bool) -> Iterator[tuple[int, int]]:
    start, number = 0, 0
    while start < len(data):
        end = data.find(b"\n", start)
        if end < 0 and not whole:
            return
        end = len(data) if end < 0 else end
        number += 1
        if number > skipped and data[start:end].strip():
            yield start, end
        start = end + 1


def _elements(data: bytes) -> Iterator[tuple[int, int]]:
    """The elements of a JSON list; what cannot be one comes as a last stretch up to the end, for the reader to refuse."""
    decoder, place, size = json.JSONDecoder(), data.index(b"[") + 1, CHUNK_BYTES
    while True:
        last = place + size >= len(data)
        try:
            text = codecs.utf_8_decode(data[place : place + size], "strict", last)[0]
        except UnicodeDecodeError:
            yield place + _blank(data, place), len(data)
            return
        before = done = 0
        while True:
            before = _GAP.match(text, done).end()  # type: ignore[union-attr]  # it matches nothing at all, too
            if text[before : before + 1] == "]" or (last and before == len(text)):
                return
            try:
                _, after = decoder.raw_decode(text, before)
            except (ValueError, RecursionError):
                break
            start = place + len(text[done:before].encode())
            place, done = start + len(text[before:after].encode()), after
            yield start, place
        if done == 0 and last:
            yield place + len(text[:before].encode()), len(data)
            return
        size = size * 4 if done == 0 else CHUNK_BYTES


def _blank(data: bytes, place: int) -> int:
    """How much white space there is from a place on."""
    end = place
    while data[end : end + 1] in {b" ", b"\n", b"\r", b"\t"}:
        end += 1
    return end - place


# What a record asks for.


def _json_record(content: bytes) -> Record:
    try:
        found = json.loads(content)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(": line")[0]
        raise ValueError(f"not valid JSON: {why}") from None
    if not isinstance(found, dict):
        raise ValueError("is no JSON object")  # noqa: TRY004 - like every other wrong line
    at_ms = found.get("timestamp")
    at_s = None if at_ms is None else _number(found, "timestamp") / 1000
    output = next((_whole(found, key) for key in ("max_tokens", "output_tokens") if found.get(key) is not None), None)
    if output == 0:
        raise ValueError("max_tokens must be at least 1")
    if "conversations" in found:
        return Record(texts=_shared_texts(found["conversations"]), output_tokens=output, at_s=at_s)
    if "messages" in found:
        return Record(messages=_messages(found["messages"]), output_tokens=output, at_s=at_s)
    if "prompt" in found:
        if not isinstance(found["prompt"], str) or not found["prompt"]:
            raise ValueError("prompt must be a text that is not empty")
        return Record(texts=(found["prompt"],), output_tokens=output, at_s=at_s)
    if "input_length" in found:
        blocks = found.get("hash_ids") or []
        if not isinstance(blocks, list) or not all(isinstance(b, int) and b >= 0 for b in blocks):
            raise ValueError("hash_ids must be a list of whole numbers")
        lengths = _whole(found, "input_length"), _whole(found, "output_length")
        return Record(prompt_tokens=lengths[0], blocks=tuple(blocks), output_tokens=lengths[1], at_s=at_s)
    raise ValueError(
        f"has none of prompt, messages, conversations, input_length; its keys: {', '.join(found) or 'none'}"
    )


def _messages(found: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(found, list) or not found:
        raise ValueError("messages must be a list of {role, content}")
    said = [(m.get("role"), m.get("content")) if isinstance(m, dict) else (None, None) for m in found]
    if not all(isinstance(role, str) and isinstance(content, str) for role, content in said):
        raise ValueError("each of messages must have a role and a content that is a text")
    return tuple((str(role), str(content)) for role, content in said)


def _shared_texts(found: Any) -> tuple[str, ...]:
    """The user's texts of a ShareGPT conversation; the recorded answers are not sent, the server's own are."""
    if not isinstance(found, list) or not all(isinstance(turn, dict) for turn in found):
        raise ValueError("conversations must be a list of {from, value}")
    texts = list[str]()
    for turn in found:
        said = turn.get("value", turn.get("content"))
        if (turn.get("from") or turn.get("role")) in _USERS and isinstance(said, str) and said:
            texts.append(said)
    return tuple(texts)


def _csv_reader(name: str, beginning: bytes) -> Callable[[bytes], Record]:
    """Given how a CSV file begins, return the reader of its lines. Raise InvalidInput if it is not such a file."""
    header = beginning.partition(b"\n")[0].decode("utf-8", "replace")
    columns = {column.strip().lower(): place for place, column in enumerate(header.split(","))}
    for wanted in (_AZURE, _BURSTGPT):
        if set(wanted) <= set(columns):
            places = {column: columns[column] for column in wanted}
            return lambda line: _csv_record(line, places, len(columns))
    raise InvalidInput([Problem(name, "is neither JSON nor a CSV file with known columns", 1, hint=ACCEPTED)])


def _csv_record(content: bytes, places: Mapping[str, int], size: int) -> Record:
    cells = content.decode("utf-8", "replace").strip().split(",")  # none of these traces has a quoted cell
    if len(cells) != size:
        raise ValueError(f"has {len(cells)} columns, the first line {size}")
    at, *lengths = (cells[place].strip() for place in places.values())
    for column, text in zip(list(places)[1:], lengths, strict=True):
        if not _WHOLE.fullmatch(text):
            raise ValueError(f"{column} must be a whole number, found {text!r}")
    return Record(prompt_tokens=int(lengths[0]), output_tokens=int(lengths[1]), at_s=_seconds(at))


def _seconds(text: str) -> float:
    """A time in seconds, or a date and time."""
    if _SECONDS.fullmatch(text):
        return float(text)
    try:
        at = dt.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"timestamp must be seconds or like 2023-11-16 18:15:46.68, found {text!r}") from None
    return at.replace(tzinfo=at.tzinfo or dt.UTC).timestamp()


def _number(found: dict[str, Any], key: str) -> float:
    value = found.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e18 < value < 1e18:
        raise ValueError(f"{key} must be a number, found {value!r}")
    return float(value)


def _whole(found: dict[str, Any], key: str) -> int:
    value = found.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError(f"{key} must be a whole number, found {value!r}")
    return value
