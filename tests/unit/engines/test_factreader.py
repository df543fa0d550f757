"""The fast way through a log says exactly what the engine's own reader says, line by line, for any bytes."""

import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.engines import ENGINES, engine_for
from autotuner.engines.base import LogFact, Note, Window
from autotuner.engines.factreader import SHAPES_MAX, FactReader
from autotuner.engines.logtext import split_lines

RECORDINGS = Path(__file__).parent / "recordings"
LOGS = sorted(RECORDINGS.glob("*.log"))
DECODE = (
    "[2026-11-29 15:02:20 DP{dp} TP0] Decode batch, #running-req: {a}, #token: {b}, token usage: 0.{c}, "
    "accept len: {d}.{e}, accept rate: 0.41, cuda graph: {graph}, gen throughput (token/s): {b}.{c}, #queue-req: {a}"
)


def slowly(name: str, data: bytes) -> list[LogFact]:
    return [fact for line in split_lines(data) for fact in engine_for(name).read_line(line)]


def quickly(name: str, data: bytes, piece: int = 1 << 16) -> list[LogFact]:
    reader = FactReader(engine_for(name))
    found = [fact for at in range(0, len(data), piece) for fact in reader.feed(data[at : at + piece])]
    return [*found, *reader.flush()]


def engine_of(log: Path) -> str:
    return log.name.partition("-")[0]


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_every_recording_reads_the_same_both_ways(log: Path) -> None:
    data = log.read_bytes() * 3
    assert quickly(engine_of(log), data) == slowly(engine_of(log), data)


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_every_recording_with_other_numbers_reads_the_same_both_ways(log: Path) -> None:
    """What was learnt from one line must hold for its copies, whatever their digits."""
    other = random.Random(7)
    data = log.read_bytes()
    copies = [re.sub(rb"\d", lambda _: b"%d" % other.randrange(10), data) for _ in range(6)]
    whole = b"\n".join((data, data, *copies))
    assert quickly(engine_of(log), whole) == slowly(engine_of(log), whole)


numbers = st.integers(0, 10**6)


@given(st.lists(st.tuples(numbers, numbers, numbers, st.booleans(), st.integers(0, 9)), min_size=1, max_size=30))
def test_decode_lines_read_the_same_both_ways(rows: list[tuple[int, int, int, bool, int]]) -> None:
    lines = [DECODE.format(a=a, b=b, c=c, d=a % 5, e=c, graph=g, dp=r) for a, b, c, g, r in rows]
    data = "\n".join(lines).encode()
    assert quickly("sglang", data) == slowly("sglang", data)


@given(st.sampled_from(sorted(ENGINES)), st.lists(st.binary(max_size=80), max_size=12), st.integers(1, 40))
def test_any_bytes_in_any_pieces_read_the_same_both_ways(name: str, lines: list[bytes], piece: int) -> None:
    data = b"\n".join(lines * 3)
    assert quickly(name, data, piece) == slowly(name, data)


def test_a_number_that_decides_what_is_said_is_never_taken_for_any_other() -> None:
    line = b"[2026-11-29 15:02:38] Subprocess scheduler_0 (pid=4891) crashed with exit code -%d.\n"
    data = b"".join(line % code for code in (15, 15, 15, 9, 9, 11))
    notes = [fact for fact in quickly("sglang", data) if isinstance(fact, Note)]
    assert len(notes) == 3, "our own SIGTERM is no error; the others are"


def test_texts_that_never_repeat_do_not_fill_the_memory() -> None:
    reader = FactReader(engine_for("sglang"), tail=10)
    for number in range(3 * SHAPES_MAX):
        word = "".join(chr(97 + (number >> 4 * i) % 16) for i in range(4))
        reader.feed(f"prompt {word}\n".encode() * 2)
    assert len(reader._plans) <= SHAPES_MAX
    assert len(reader.tail) == 10


def test_the_tail_is_clean_text() -> None:
    reader = FactReader(engine_for("vllm"), tail=3)
    reader.feed(b"one\n\x1b[31mtwo\x1b[0m\r\n\nthree \xff\nfo")
    reader.feed(b"ur")
    reader.flush()
    assert reader.tail == ("three �", "four")


def test_a_window_cut_by_a_piece_of_the_log_is_read_once() -> None:
    data = (RECORDINGS / "sglang-0.5.12-eagle3-capped.log").read_bytes()
    windows = [fact for fact in slowly("sglang", data) if isinstance(fact, Window)]
    assert windows
    assert [fact for fact in quickly("sglang", data, 7) if isinstance(fact, Window)] == windows
