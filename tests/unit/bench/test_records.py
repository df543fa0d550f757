"""A dataset's file: its format is seen from its content, each record means what it says, and a wrong line is named."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.bench.records import CHUNK_BYTES, Record, parse_records
from autotuner.errors import InvalidInput, Problem

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46.6805900,879,55
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
120,GPT-4,300,0,300,API log
"""
SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "Wie geht's?"}, {"from": "gpt", "value": "Gut 🙂"}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "nobody asked"}]},
    {
        "id": "c",
        "conversations": [{"from": f, "value": v} for f, v in (("human", "one"), ("gpt", "x"), ("human", "two"))],
    },
]
MOONCAKE = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
texts = st.text(min_size=1)


def records(data: str | bytes, *, cut: bool = False) -> list[Record]:
    found = parse_records("d", data.encode() if isinstance(data, str) else data, cut=cut)
    return [found[index] for index in range(len(found))]


def problems(data: str | bytes) -> list[Problem]:
    with pytest.raises(InvalidInput) as caught:
        records(data)
    return caught.value.problems


# --- the formats


def test_prompts_of_the_operators_own_come_as_lines() -> None:
    data = '{"prompt": "a", "max_tokens": 7}\n\n{"prompt": "b", "timestamp": 1500, "note": "kept by its owner"}\r\n'
    assert records(data) == [Record(texts=("a",), output_tokens=7), Record(texts=("b",), at_s=1.5)]


def test_messages_keep_their_roles() -> None:
    line = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "output_tokens": 3}
    assert records(json.dumps(line)) == [Record(messages=(("system", "s"), ("user", "u")), output_tokens=3)]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_of_shared_conversations_is_read_in_any_layout_without_those_in_which_nobody_asks(
    indent: int | None,
) -> None:
    whole = json.dumps(SHAREGPT, indent=indent, ensure_ascii=False)
    assert [record.texts for record in records(whole)] == [("Wie geht's?",), ("one", "two")]
    lines = "\n".join(json.dumps(item) for item in SHAREGPT)
    assert records(lines) == records(whole)


def test_a_mooncake_trace_has_lengths_blocks_and_milliseconds() -> None:
    assert records(json.dumps(MOONCAKE)) == [
        Record(prompt_tokens=6955, output_tokens=52, blocks=(46, 47, 2353), at_s=27.482)
    ]


def test_an_azure_trace_has_dates_of_which_only_the_differences_count() -> None:
    found = parse_records("d", AZURE.encode())
    assert [(found.timed(i).prompt_tokens, found.timed(i).output_tokens) for i in range(3)] == [
        (374, 44),
        (396, 109),
        (879, 55),
    ]
    assert [round(found.at_s(i), 4) for i in range(3)] == [0.0, 4.3146, 60.0]
    later = AZURE.replace("46.6805900,374", "46.680590+00:00,374")
    assert parse_records("d", later.encode()).at_s(1) == pytest.approx(4.3146, abs=1e-3)


def test_a_burstgpt_trace_is_read_without_its_failed_requests() -> None:
    assert records(BURSTGPT) == [
        Record(prompt_tokens=472, output_tokens=18, at_s=5.0),
        Record(prompt_tokens=1087, output_tokens=230, at_s=45.0),
    ]


@given(st.lists(st.tuples(texts, st.one_of(st.none(), st.integers(1, 10**6))), min_size=1, max_size=20), st.booleans())
def test_any_text_comes_back_as_it_was_written_from_lines_and_from_a_list(
    wanted: list[tuple[str, int | None]], ascii_only: bool
) -> None:
    items = [{"prompt": text, "max_tokens": tokens} for text, tokens in wanted]
    lines = "\n".join(json.dumps(item, ensure_ascii=ascii_only) for item in items)
    as_list = json.dumps(items, ensure_ascii=ascii_only)
    expected = [Record(texts=(text,), output_tokens=tokens) for text, tokens in wanted]
    assert records(lines) == records(as_list) == expected


@pytest.mark.parametrize("size", range(1, 40, 3))
def test_elements_are_found_wherever_the_reading_is_cut_into_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotuner.bench.records.CHUNK_BYTES", size)
    said = ["a", "Straße", "🙂🙂", '"],[{', "\\", "z" * 50]
    for indent in (None, 1):
        data = "  " + json.dumps([{"prompt": text} for text in said], ensure_ascii=False, indent=indent) + " \n"
        assert [record.texts[0] for record in records(data)] == said


def test_an_element_longer_than_what_is_read_at_once_is_read_whole() -> None:
    long = "é" * CHUNK_BYTES
    assert [r.texts[0] for r in records(json.dumps([{"prompt": long}, {"prompt": "b"}], ensure_ascii=False))] == [
        long,
        "b",
    ]


@given(st.integers(1, 400))
def test_of_a_file_that_goes_on_only_whole_records_are_used(length: int) -> None:
    lines = "".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(30))
    as_list = json.dumps([{"prompt": f"number {i}"} for i in range(30)])
    for data in (lines, as_list):
        found = [record.texts[0] for record in records(data[:length], cut=True)] if length > 24 else []
        assert found == [f"number {i}" for i in range(len(found))]
        assert len(found) >= length // 25 - 1


# --- what is wrong is named


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not valid JSON: Expecting property name enclosed in double quotes"),
        ("[1]", "is no JSON object"),
        ("{}", "has none of prompt, messages, conversations, input_length; its keys: none"),
        ('{"promt": "a"}', "its keys: promt"),
        ('{"prompt": ["a"]}', "prompt must be a text that is not empty"),
        ('{"prompt": ""}', "prompt must be a text that is not empty"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be at least 1"),
        ('{"prompt": "a", "max_tokens": "9"}', "max_tokens must be a whole number, found '9'"),
        ('{"prompt": "a", "timestamp": "now"}', "timestamp must be a number, found 'now'"),
        ('{"prompt": "a", "timestamp": NaN}', "timestamp must be a number, found nan"),
        ('{"messages": []}', "messages must be a list of {role, content}"),
        (
            '{"messages": [{"role": "user", "content": null}]}',
            "each of messages must have a role and a content that is a text",
        ),
        ('{"conversations": "hi"}', "conversations must be a list of {from, value}"),
        ('{"input_length": -1, "output_length": 1}', "input_length must be a whole number, found -1"),
        ('{"input_length": 1}', "output_length must be a whole number, found None"),
        ('{"input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "hash_ids must be a list of whole numbers"),
        ("[" * 100_000, "not valid JSON: nested too deeply"),
    ],
)
def test_a_wrong_line_is_named_with_what_would_be_right(line: str, says: str) -> None:
    (problem,) = problems('{"prompt": "good"}\n\n' + line + "\n")
    assert says in problem.message
    assert (problem.file, problem.line) == ("d", 3)
    assert "accepted are JSON lines" in problem.hint


def test_a_line_that_is_no_utf_8_is_named() -> None:
    (problem,) = problems(b'{"prompt": "good"}\n{"prompt": "\xff"}\n')
    assert (problem.line, problem.message) == (2, "is not UTF-8 text")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("2023-11-16 18:15:46,374", "has 2 columns, the first line 3"),
        ("2023-11-16 18:15:46,many,44", "contexttokens must be a whole number, found 'many'"),
        ("nan,374,44", "timestamp must be seconds or like 2023-11-16 18:15:46.68, found 'nan'"),
        ("yesterday,374,44", "timestamp must be seconds or like 2023-11-16 18:15:46.68, found 'yesterday'"),
    ],
)
def test_a_wrong_row_of_a_table_is_named(row: str, says: str) -> None:
    (problem,) = problems(AZURE + row + "\n")
    assert (problem.line, problem.message) == (5, says)


def test_an_element_of_a_list_is_named_by_its_line() -> None:
    data = '[\n  {"prompt": "a"},\n  {"prompt": 7}\n]'
    assert [(p.line, p.message) for p in problems(data)] == [(3, "prompt must be a text that is not empty")]
    assert problems('[{"prompt": "a"},\n oops]')[0].line == 2


def test_a_file_of_wrong_lines_is_not_told_line_by_line() -> None:
    found = problems("{}\n" * 1000)
    assert [p.line for p in found] == [1, 2, 3, 4, 5]
    assert [bool(p.hint) for p in found] == [True, False, False, False, False]


@pytest.mark.parametrize("data", ["", "\n \n", "[]", "TIMESTAMP,ContextTokens,GeneratedTokens\n"])
def test_a_file_without_a_request_says_so(data: str) -> None:
    assert problems(data)[0].message == "holds no request"


@pytest.mark.parametrize("data", ["a,b,c\n1,2,3\n", "what is this?\n", "\x00\x01\x02"])
def test_another_kind_of_file_is_told_what_is_accepted(data: str) -> None:
    (problem,) = problems(data)
    assert problem.message == "is neither JSON nor a CSV file with known columns"
    assert "BurstGPT" in problem.hint


@given(st.binary(max_size=200))
def test_whatever_a_file_holds_is_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidInput):
        assert len(parse_records("d", data)) > 0


def test_the_first_request_without_a_time_is_known_by_its_line() -> None:
    data = '{"prompt": "a", "timestamp": 1}\n{"prompt": "b"}\n{"prompt": "c"}\n'
    assert parse_records("d", data.encode()).first_untimed == 2
    assert parse_records("d", AZURE.encode()).first_untimed is None


def test_names_of_formats_in_the_guide_are_those_that_are_accepted() -> None:
    guide = (
        (Path(__file__).parents[3] / "docs/guide.md")
        .read_text(encoding="utf-8")
        .split("### Workloads")[1]
        .split("\n### ")[0]
    )
    for said in (
        "ShareGPT",
        "Mooncake",
        "Azure",
        "BurstGPT",
        "hash_ids",
        "ContextTokens",
        "Request tokens",
        "conversations",
    ):
        assert said in guide
