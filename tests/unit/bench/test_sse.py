"""The parser's promises: what it cuts does not depend on how the bytes arrive, and nonsense is refused, not guessed at."""

import contextlib
import itertools
import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.bench.connection import Connection, error_message
from autotuner.bench.meter import Record
from autotuner.bench.sse import Answer, NotHttpError, event_data, has_error, has_finish, has_text, has_usage

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"

texts = st.one_of(
    st.text('ab"\\\n\r {}:é', max_size=12),
    st.sampled_from(['"text":"', "\n\n", "\r\n", "data: x", "[DONE]", "é\u2028"]),
)
spacing = st.sampled_from([(",", ":"), (", ", ": ")])


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    document = {"id": "1", "choices": [{"text": draw(texts), "finish_reason": None}], "usage": None}
    return json.dumps(document, separators=draw(spacing), ensure_ascii=draw(st.booleans())).encode()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({p % (len(data) + 1) for p in places}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


def frame(body: bytes, framing: str, places: list[int]) -> bytes:
    if framing == "chunked":
        chunks = b"".join(b"%X;ext=1\r\n%b\r\n" % (len(c), c) for c in cut(body, places))
        return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nTrailer: x\r\n\r\n"
    if framing == "length":
        return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    return HEAD + b"Connection: close\r\n\r\n" + body


def parse(pieces: list[bytes]) -> tuple[Answer, list[bytes]]:
    answer, events = Answer(), []
    for piece in pieces:
        events += answer.feed(piece)
    if not answer.complete:
        events += answer.eof()
    return answer, [data for event in events if (data := event_data(event))]


@given(
    st.lists(documents(), max_size=6),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["chunked", "length", "close"]),
    st.lists(st.integers(0, 4000), max_size=12),
    st.lists(st.integers(0, 4000), max_size=12),
)
def test_the_same_events_come_out_however_the_bytes_are_cut(
    docs: list[bytes], newline: str, framing: str, chunks: list[int], reads: list[int]
) -> None:
    end = newline.encode()
    lines = [b": ping" + end + end]
    lines += [b"event: x" + end + b"data: " + doc + end + end for doc in docs]
    lines.append(b"data: [DONE]" + end + end)
    answer, events = parse(cut(frame(b"".join(lines), framing, chunks), reads))
    assert events == [*docs, b"[DONE]"]
    assert answer.complete
    assert answer.reusable is (framing != "close")


@given(st.lists(documents(), max_size=6), st.lists(st.integers(0, 4000), max_size=12), st.booleans())
def test_a_connection_counts_the_same_tokens_however_the_bytes_are_cut(
    docs: list[bytes], reads: list[int], one_chunk_an_event: bool
) -> None:
    body = [b"data: " + doc + b"\n\n" for doc in [*docs, b'{"choices":[],"usage":{"completion_tokens":7}}', b"[DONE]"]]
    if one_chunk_an_event:
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in body)
        stream = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
    else:
        stream = HEAD + b"\r\n" + b"".join(body)
    pieces = cut(stream, reads) if reads else [HEAD + stream[len(HEAD) : stream.index(b"\r\n\r\n") + 4]]
    if not reads:  # one chunk a read: the short cut that nearly all reads take
        at = len(pieces[0])
        pieces += cut(stream[at:], _edges(body)) if one_chunk_an_event else [stream[at:]]
    connection, record = Connection(array("d")), Record(sent=0.0)
    connection._record, connection._add = record, record.times.append
    connection._wind_up = lambda *_: None  # type: ignore[method-assign]
    for piece in pieces:
        connection.received(piece, 0.0, 0.0)
    assert len(record.times) == sum(bool(json.loads(doc)["choices"][0]["text"]) for doc in docs)
    assert connection._verdict(None)[0] == ("" if record.times else "empty stream")


def _edges(body: list[bytes]) -> list[int]:
    edges, at = [], 0
    for event in body:
        at += len(b"%x\r\n%b\r\n" % (len(event), event))
        edges.append(at)
    return edges


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_arbitrary_bytes_are_refused_or_followed_but_never_break_the_parser(data: bytes, reads: list[int]) -> None:
    for start in (b"", b"HTTP/1.1 200 OK\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n"):
        with contextlib.suppress(NotHttpError):
            parse(cut(start + data, reads))


@pytest.mark.parametrize(
    ("event", "text", "usage", "finish", "error"),
    [
        (b'{"choices":[{"text":" a","finish_reason":null}],"usage":null}', True, False, False, False),
        (b'{"choices": [{"text": " a", "finish_reason": null}], "usage": null}', True, False, False, False),
        (b'{"choices":[{"text":"","finish_reason":"length"}]}', False, False, True, False),
        (b'{"choices": [{"text": "", "finish_reason": "length"}]}', False, False, True, False),
        (b'{"choices":[],"usage":{"completion_tokens":3}}', False, True, False, False),
        (b'{"choices":[{"text":null}],"error":null}', False, False, False, False),
        (b'{"error":{"message":"x"}}', False, False, False, True),
        (rb'{"choices":[{"text":"\"usage\":{ \"error\":{","finish_reason":null}]}', True, False, False, False),
    ],
)  # fmt: skip
def test_events_are_told_apart_without_parsing_them(
    event: bytes, text: bool, usage: bool, finish: bool, error: bool
) -> None:
    assert (has_text(event), has_usage(event), has_finish(event), has_error(event)) == (text, usage, finish, error)


def test_an_error_field_of_old_llama_cpp_reads_like_any_other_error() -> None:
    assert error_message(event_data(b'error: {"code":500,"message":"slot unavailable"}')) == "slot unavailable"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"a"}}', "a"),
        (b'{"error":"b"}', "b"),
        (b'{"object":"error","message":"c"}', "c"),
        (b'{"detail":"d"}', "d"),
        (b'{"choices":[]}', None),
        (b"[1]", None),
        (b"<html>", None),
    ],
)
def test_what_the_server_said_about_an_error_is_found(body: bytes, message: str | None) -> None:
    assert error_message(body) == message


def test_a_head_that_says_continue_is_passed_over() -> None:
    answer, events = parse([b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 9\r\n\r\ndata: 1\n\n"])
    assert (answer.status, events) == (200, [b"1"])


def test_a_second_answer_to_one_request_makes_the_connection_unusable() -> None:
    answer, _ = parse([HEAD + b"Content-Length: 9\r\n\r\ndata: 1\n\nHTTP/1.1 200 OK\r\n"])
    assert answer.complete
    assert not answer.reusable


def test_a_done_without_its_blank_line_counts_but_half_an_event_does_not() -> None:
    assert parse([HEAD + b"\r\ndata: 1\n\ndata: [DONE]\n"])[1] == [b"1", b"[DONE]"]
    assert parse([HEAD + b'\r\ndata: 1\n\ndata: {"te'])[1] == [b"1"]


@pytest.mark.parametrize("chunk", [b"zz\r\n", b"-5\r\nabc", b"1" * 5000])
def test_a_chunk_without_a_size_is_refused(chunk: bytes) -> None:
    with pytest.raises(NotHttpError):
        parse([HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk])


def test_a_server_of_http_1_0_closes_unless_it_says_otherwise() -> None:
    answer, _ = parse([b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"])
    assert (answer.reusable, answer.body) == (False, b"{}")


KINDS = ("completions", "chat", "thinking")


def token(kind: str, text: str, padding: int = 0) -> bytes:
    """One chunk with one event, as servers send them."""
    choice: dict[str, object] = {"index": 0, "finish_reason": None}
    match kind:
        case "completions":
            choice["text"] = text
        case "chat":
            choice["delta"] = {"role": None, "content": text}
        case _:
            choice["delta"] = {"content": "", "reasoning_content": text}
    event = b"data: " + json.dumps({"id": "x" * padding, "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def between_chunks() -> Answer:
    answer = Answer()
    answer.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + token("completions", "a"))
    return answer


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_one_token_is_known_at_every_size_by_the_short_cut_as_by_the_long_way(kind: str) -> None:
    for padding in range(4200):
        data = token(kind, "b", padding)
        short, long = between_chunks(), between_chunks()
        events = long.feed(data)
        assert [has_text(event) for event in events] == [True]
        assert short.is_one_token(data) is (len(data) < 4096), len(data)
        assert short.leading_tokens(data)[1] == (len(data) if len(data) < 4096 else 0)


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.text('ab"\\\n', max_size=4), st.integers(0, 300)), max_size=12),
    st.lists(st.integers(0, 6000), max_size=8),
)
def test_many_tokens_in_a_read_are_counted_and_heard_as_one_by_one(
    tokens: list[tuple[str, str, int]], reads: list[int]
) -> None:
    body = b"".join(token(*t) for t in tokens) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    stream = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    connection, record = Connection(array("d")), Record(sent=0.0, heard=[])
    connection._record, connection._add, connection._heard = record, record.times.append, record.heard
    connection._wind_up = lambda *_: None  # type: ignore[method-assign]
    for number, piece in enumerate([stream, *cut(body, reads)]):
        connection.received(piece, float(number), float(number))
    with_text = [text for _, text, _ in tokens if text]
    assert len(record.times) == len(with_text)
    assert record.text() == "".join(text for kind, text, _ in tokens if kind != "thinking")
    assert list(record.times) == sorted(record.times)
    assert connection._answer.complete
    assert connection._answer.reusable


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"text":"b"}\n\ndata: {"text":"c"}\n\n',
        b'data: {"text":"b"}\nid: 7\n\n',
        b'data: {"text":\ndata: "b"}\n\n',
        b'data: {"text":"b"}\r\n\r\n',
        b'data: {"text":"b"}\n',
        b'data: {"text":"b"}\n\n\n',
        b'data: {"text":"b"}\nx',
        b'data: {"text":"b"} \n',
        b'data: {"text":"b"}',
    ],
)
def test_no_short_cut_is_taken_with_anything_but_one_line_that_is_one_event(event: bytes) -> None:
    data = b"%x\r\n%b\r\n" % (len(event), event)
    assert not between_chunks().is_one_token(data)
    assert between_chunks().leading_tokens(data) == ([], 0)


def test_what_follows_the_tokens_in_a_read_is_not_taken_for_one() -> None:
    data = token("completions", "b") * 3
    for more in (b"5\r\n: hi\n\r\n", token("completions", ""), token("completions", "c")[:-3], b"0\r\n\r\n"):
        events, used = between_chunks().leading_tokens(data + more)
        assert (len(events), used) == (3, len(data))
    two_in_a_chunk = b'data: {"text":"b"}\n\ndata: {"text":"c"}\n\n'
    assert between_chunks().leading_tokens(b"%x\r\n%b\r\n" % (len(two_in_a_chunk), two_in_a_chunk)) == ([], 0)
    assert Answer().leading_tokens(data) == ([], 0), "before a head nothing is a token"
