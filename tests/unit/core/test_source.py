"""Errors in files an operator wrote name the place, and what would be right there."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, model_validator

from autotuner.core.source import Source, dotted, line_of, lines_of, nearest, parse, problem_at, validate, wrong_at
from autotuner.errors import InvalidInput, Problem


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    port: int = 1
    colour: bool | int | float | str | tuple[int, ...] = 1


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    slots: dict[str, Inner] = {}
    rule: tuple[Inner, ...] = ()
    either: Inner | None = None

    @model_validator(mode="after")
    def _no_port_13(self) -> "Outer":
        for name, slot in self.slots.items():
            if slot.port == 13:
                raise wrong_at(("slots", name, "port"), "13 brings bad luck")
        return self


def problems(text: str) -> list[Problem]:
    with pytest.raises(InvalidInput) as caught:
        validate(Outer, Source("file.toml", text))
    return caught.value.problems


def error_of(text: str) -> InvalidInput | None:
    try:
        parse(Source("file.toml", text))
    except InvalidInput as error:
        return error
    return None


def only(text: str) -> str:
    (problem,) = problems(text)
    return str(problem)


def test_every_kind_of_key_is_found_on_its_line() -> None:
    text = (
        'top = 1\n"quoted key" = 2\n[a.b]\nc.d = 3  # a comment\n'
        '[[list]]\nx = 1\n[[list]]\nx = 2\nlong = """\ny = 9\n[not.a.table]\n"""\n'
        "[ 'spaced' . \"out\" ] # why not\nz = 1\n"
    )
    lines = lines_of(text)
    assert lines[("top",)] == 1
    assert lines[("quoted key",)] == 2
    assert lines[("a", "b", "c", "d")] == 4
    assert lines[("list", 0, "x")] == 6
    assert lines[("list", 1, "x")] == 8
    assert lines[("spaced", "out", "z")] == 14
    assert not {("list", 1, "y"), ("not", "a", "table")} & set(lines), "text inside a string holds no keys"


@given(st.lists(st.sampled_from(["a", "b-c", "d_e", '"f g"']), min_size=1, max_size=4, unique=True), st.integers(0, 5))
def test_blank_lines_and_comments_move_a_key_but_do_not_lose_it(keys: list[str], gap: int) -> None:
    text, expected = "", {}
    for key in keys:
        text += "# b-c = 1\n\n" * gap + f"[t.{key}]\n" + "\n" * gap + f"{key} = 1\n"
        name = key.strip('"')
        expected["t", name, name] = text.count("\n")
    assert {path: line for path, line in lines_of(text).items() if len(path) == 3} == expected


def test_only_line_feeds_count_as_lines_as_editors_count_them() -> None:
    text = "# a \u2028 b \x85 c\r\nname = 1\n"
    assert lines_of(text)[("name",)] == 2


def test_a_key_inside_an_inline_table_has_the_line_of_its_parent() -> None:
    lines = lines_of("[slots]\n\nkimi = { prt = 1 }\n")
    assert line_of(lines, ("slots", "kimi", "prt")) == 3
    assert line_of(lines, ("elsewhere",)) is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a = 1\nb = \nc = 3\n", 2),
        ("a = 1\n\nb = [1, 2\n", 3),
        ("a = 1\na = 2\n", 2),
        ("[a\n", 1),
        ('a = "x', 1),
        ("= 1", 1),
    ],
)
def test_broken_toml_is_reported_with_its_line(text: str, line: int) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(Source("file.toml", text))
    (problem,) = caught.value.problems
    assert (problem.file, problem.line) == ("file.toml", line)
    assert problem.message.startswith("not valid TOML: ")
    assert "at line" not in problem.message, "the place is said once, in front"


@pytest.mark.parametrize("text", ["x = " + "[" * 20_000, "x = " + "9" * 5_000, "x = " + "{a=" * 5_000])
def test_toml_that_would_exhaust_the_parser_is_an_ordinary_error(text: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be read as TOML"):
        parse(Source("file.toml", text))


@given(st.text(max_size=200))
@example("\x00")
@example('"\\ud800" = 1')
def test_any_text_parses_or_is_an_error_with_a_file_name(text: str) -> None:
    error = error_of(text)
    assert error is None or str(error).startswith("file.toml")


def test_an_unknown_key_names_file_line_key_and_the_nearest_right_one() -> None:
    assert only("[slots.a]\nprot = 1\n") == "file.toml:2: slots.a.prot: unknown key (did you mean port?)"
    assert (
        only("[[rule]]\nport = 1\n[[rule]]\nprt = 2\n") == "file.toml:4: rule[1].prt: unknown key (did you mean port?)"
    )
    assert only("[either]\nprt = 2\n") == "file.toml:2: either.prt: unknown key (did you mean port?)"
    assert only("[slot]\n") == "file.toml:1: slot: unknown key (did you mean slots?)"


def test_every_problem_is_named_not_the_first_alone() -> None:
    found = problems('[slots.a]\nprt = 1\n[slots.b]\nport = "x"\n')
    assert [(p.line, p.key) for p in found] == [(2, "slots.a.prt"), (4, "slots.b.port")]


def test_a_value_that_fits_no_type_of_a_union_is_one_problem() -> None:
    assert only("[either]\ncolour = { r = 1 }\n") == (
        "file.toml:2: either.colour: should be true or false, a whole number, a number, a text or a list, found {'r': 1}"
    )


def test_a_rule_over_several_keys_names_the_key_to_change() -> None:
    assert only("[slots.a]\nport = 1\n[slots.b]\nport = 13\n") == "file.toml:4: slots.b.port: 13 brings bad luck"


def test_a_message_never_repeats_a_value_that_may_be_a_secret() -> None:
    message = only("[slots.HF_TOKEN]\nport = 'hunter2'\n")
    assert "hunter2" not in message
    assert "***" in message


def test_a_message_shows_a_long_value_in_short() -> None:
    assert len(only(f"[either]\nport = '{'x' * 5000}'\n")) < 300


def test_few_right_names_are_all_told_many_are_not() -> None:
    assert nearest("zzz", ["port", "gpus"]) == "known: gpus, port"
    assert nearest("zzz", [f"name{i}" for i in range(40)]) == ""
    assert nearest("zzz", []) == ""


def test_a_path_is_written_as_an_operator_would_write_it() -> None:
    assert dotted(("window", 0, "from")) == "window[0].from"
    assert str(problem_at(Source("f", "[a]\nb=1"), ("a", "b"), "is bad", "be good")) == "f:2: a.b: is bad (be good)"
