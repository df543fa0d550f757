"""A command line runs exactly its argv: nothing in it is ever interpreted by the shell."""

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotuner.core.shell import command_line

SHOW = (
    "import json, os, sys; print(json.dumps([sys.argv[1:], {n: v for n, v in os.environ.items() if n[:3] == 'AT_'}]))"
)
HOSTILE = [
    "", " ", "  a  b ", "\n", "a\nb\n", "\t", "'", '"', "''", "'\"'\"'", "\\", "\\'", "$HOME", "${HOME}", "$(id)", "`id`", "$'\\n'",
    "*", "?", "[a-z]*", "~", "~root", "{a,b}", "!", "!!", "#", "# x", ";", "; id", "&", "&&", "|", "||", "<", ">", "> /dev/null", "2>&1", "(",
    ")", "A=1", "--x=y z", "-", "--", "-e", "\x01", "\x7f", "\x1b[31m", "é", "日本", "\U0001f600", "%s", "%n", "\r", "\r\n", "a\\\nb", "\ufeff",
    "-n", "$((1+1))", "<(id)", "\\0", "eval", "exit 1",
]  # fmt: skip

anything = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=12)
shelly = st.text("'\"\\$`(){}[]*?~!#;&|<> \n\t=-%ab", max_size=12)


def through_sh(line: str) -> str:
    ran = subprocess.run(["/bin/sh", "-c", line], capture_output=True, timeout=120, check=True)
    assert ran.stderr == b""
    return ran.stdout.decode()


def read_back(words: list[str], env: dict[str, str] | None = None) -> tuple[list[str], dict[str, str]]:
    argv, seen = json.loads(through_sh(command_line((sys.executable, "-c", SHOW, *words), env)))
    return argv, seen


def test_hostile_words_come_back_from_a_real_shell_as_they_were() -> None:
    assert read_back(HOSTILE)[0] == HOSTILE


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_thousands_of_generated_words_come_back_from_a_real_shell(seed: int) -> None:
    import random

    source = random.Random(seed)
    alphabet = "'\"\\$`(){}[]*?~!#;&|<> \n\t\r=-%,.:/@^+_aZ09é日\U0001f600\x01\x7f\x1b\u202e"
    words = ["".join(source.choices(alphabet, k=source.randrange(12))) for _ in range(500)]
    assert read_back(words)[0] == words


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(anything, shelly), max_size=30), st.lists(st.one_of(anything, shelly), max_size=3))
def test_words_and_variables_come_back_together(words: list[str], values: list[str]) -> None:
    env = {f"AT_{i}": value for i, value in enumerate(values)}
    assert read_back(words, env) == (words, env)


@pytest.mark.parametrize("word", ["A=1", "PATH=/tmp", "_=x"])
def test_a_program_whose_name_looks_like_an_assignment_is_a_program(word: str) -> None:
    ran = subprocess.run(["/bin/sh", "-c", command_line((word, "true"))], capture_output=True, timeout=120, check=False)
    assert ran.returncode == 127, "no such program, instead of running `true` with a variable"


@pytest.mark.parametrize("word", ["eval", "exec", ".", "if", "{", "!", "trap", "command", "while", "[[", "exit", "for"])
def test_no_word_of_the_shell_itself_interprets_what_follows(word: str) -> None:
    ran = subprocess.run(
        ["/bin/sh", "-c", command_line((word, "echo forged; echo $((6*7))", "EXIT")) + "; echo alive"],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert b"42" not in ran.stdout
    assert ran.stdout.split() == [b"alive"]


def test_a_plain_command_reads_as_a_person_would_type_it() -> None:
    argv = ("python3", "-m", "sglang.launch_server", "--model", "/m/a b", "--x=1")
    assert (
        command_line(argv, {"NCCL_ALGO": "Ring"})
        == "NCCL_ALGO=Ring python3 -m sglang.launch_server --model '/m/a b' --x=1"
    )
    assert command_line(()) == ""
    assert command_line(("",)) == "''"


@pytest.mark.parametrize("argv", [("a\0b",), ("a", "b\0")])
def test_a_nul_byte_is_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="NUL"):
        command_line(argv)


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A;id", "$(id)", "A=", "é", "A\n"])
def test_a_name_that_is_no_variable_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="environment variable"):
        command_line(("true",), {name: "x"})


def test_a_nul_byte_in_a_variable_is_refused() -> None:
    with pytest.raises(ValueError, match="environment variable"):
        command_line(("true",), {"A": "x\0"})
