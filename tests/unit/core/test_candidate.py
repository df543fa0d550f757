"""A candidate is what would be launched: the same launch is the same candidate, and a wrong file says what is wrong."""

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotuner.core.candidate import (
    SWEEP_MAX,
    Candidate,
    Launch,
    derive,
    flag_argv,
    flag_name,
    parse_candidates,
    setting_problem,
    to_toml,
    with_settings,
)
from autotuner.core.source import Source
from autotuner.errors import InvalidInput, Problem

KIMI = """\
name = "eagle3-aq-medai"
engine = "sglang"
hypothesis = "A ready-made EAGLE-3 drafter raises single-stream speed"

[launch]
model = "/shared/kimi-k2.5-int4"
python = "/opt/ml-env/bin/python3"

[launch.args]
tp-size = 8
mem-fraction-static = 0.85
trust-remote-code = true
speculative-algorithm = "EAGLE3"
speculative-num-steps = 3

[launch.env]
NCCL_PROTO = "LL"
"""
LAUNCH = '[launch]\nmodel = "m"\n'
HEAD = 'name = "a"\nengine = "vllm"\n' + LAUNCH

words = st.text("abcdefgh", min_size=1, max_size=6)
flags = st.lists(words, min_size=1, max_size=3).map("-".join)
scalars = st.one_of(st.booleans(), st.integers(-9, 99), st.floats(-2, 2), st.text("xyz /=", max_size=5))
tables = st.dictionaries(flags, st.one_of(scalars, st.lists(scalars, min_size=1, max_size=3).map(tuple)), max_size=5)
variables = st.dictionaries(st.text("ABC_", min_size=1, max_size=5), st.text("xyz ", max_size=4), max_size=4)


def parsed(text: str) -> tuple[Candidate, ...]:
    return parse_candidates(Source("c.toml", text))


def problems(text: str) -> list[Problem]:
    with pytest.raises(InvalidInput) as caught:
        parsed(text)
    return caught.value.problems


def error_of(text: str) -> InvalidInput | None:
    try:
        assert parsed(text), "a good file is at least one candidate"
    except InvalidInput as error:
        return error
    return None


def only(text: str) -> str:
    (problem,) = problems(text)
    return str(problem)


def make(args: dict[str, Any], env: dict[str, str] | None = None, **more: Any) -> Candidate:
    launch = {"model": "m", "args": args, "env": env or {}, **more.pop("launch", {})}
    return Candidate(**{"name": "a", "engine": "sglang", "launch": Launch(**launch), **more})


# --- identity


def test_the_id_of_a_written_file_stays_what_it_was() -> None:
    """Ids are kept in stores and journals; a change of the canonical form would orphan them."""
    (candidate,) = parsed(KIMI)
    assert json.loads(candidate.canonical) == {
        "engine": "sglang",
        "launch": {
            "args": {
                "mem-fraction-static": ["0.85"],
                "speculative-algorithm": ["EAGLE3"],
                "speculative-num-steps": ["3"],
                "tp-size": ["8"],
                "trust-remote-code": [],
            },
            "env": {"NCCL_PROTO": "LL"},
            "model": "/shared/kimi-k2.5-int4",
            "python": "/opt/ml-env/bin/python3",
        },
    }
    assert candidate.id == "90f2e0644b8051bc"


@given(tables, variables, st.integers(0, 2**32))
def test_the_id_does_not_depend_on_order_spelling_or_anything_that_is_not_launched(
    args: dict[str, Any], env: dict[str, str], seed: int
) -> None:
    shuffle = random.Random(seed)
    items, variables_ = list(args.items()), list(env.items())
    shuffle.shuffle(items)
    shuffle.shuffle(variables_)
    spelled = {shuffle.choice(["", "-", "--"]) + k.replace("-", shuffle.choice("-_")): v for k, v in items}
    other = make(
        spelled,
        dict(variables_),
        name="b",
        hypothesis="x",
        benchmark="y",
        slots=("z",),
        launch={"start_timeout_s": 5.0},
    )
    assert other.id == make(args, env).id


@given(tables, flags, scalars)
def test_any_other_flag_or_value_is_another_candidate(args: dict[str, Any], flag: str, value: Any) -> None:
    same = flag in args and flag_argv({flag: args[flag]}) == flag_argv({flag: value})
    assert (make({**args, flag: value}).id == make(args).id) is same


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "vllm"},
        {"launch": {"model": "m2"}},
        {"launch": {"python": "/p"}},
        {"launch": {"binary": "/b"}},
        {"env": {"A": "2"}},
        {"env": {}},
        {"args": {}},
    ],
)
def test_whatever_is_launched_counts(change: dict[str, Any]) -> None:
    table: dict[str, Any] = {"args": {"x": 1}, "env": {"A": "1"}}
    assert make(**{**table, **change}).id != make(**table).id


def test_a_value_counts_as_the_word_it_becomes() -> None:
    assert make({"n": 8}).id == make({"n": "8"}).id == make({"n": ("8",)}).id
    assert make({"n": True}).id == make({"n": ()}).id
    assert make({"n": True}).id != make({"n": "true"}).id
    assert make({"n": 8}).id != make({"n": 8.5}).id


def test_a_flag_turned_off_is_not_a_flag_left_out() -> None:
    """An engine may set a flag unless the file turns it off, so the two need not launch the same."""
    assert make({"enable-metrics": False}).id != make({}).id


# --- argv


def test_argv_has_bare_flags_values_and_repeated_values_in_the_order_of_the_file() -> None:
    args = {"tp-size": 8, "--already": "x", "bare": True, "off": False, "many": (1, "b c", True), "f": 0.85}
    assert flag_argv(args) == (
        "--tp-size", "8", "--already", "x", "--bare", "--many", "1", "b c", "true", "--f", "0.85",
    )  # fmt: skip


@given(tables)
def test_every_flag_that_is_not_off_is_in_argv_with_its_values(args: dict[str, Any]) -> None:
    argv = list(flag_argv(args))
    for key, value in args.items():
        at = [i for i, word in enumerate(argv) if word == f"--{key}"]
        assert bool(at) == (value is not False)
    assert all(isinstance(word, str) for word in argv)


@pytest.mark.parametrize("spelled", ["tp-size", "tp_size", "--tp-size", "--tp_size", "-tp-size"])
def test_a_flag_is_found_in_any_spelling(spelled: str) -> None:
    assert flag_name(spelled) == "tp-size"
    assert make({spelled: 4}).arg("tp", "tp-size") == 4
    assert make({"tp-size": 4}).arg(spelled) == 4
    assert make({spelled: 4}).arg("tp") is None


# --- sweeps


def test_a_file_without_a_sweep_is_one_candidate_under_its_own_name() -> None:
    (candidate,) = parsed(KIMI + '[benchmark]\nuse = "chat"\n')
    assert (candidate.name, candidate.benchmark) == ("eagle3-aq-medai", "chat")
    assert candidate.arg("tp-size") == 8
    assert candidate.arg("trust-remote-code") is True


def test_a_sweep_makes_every_combination_each_named_by_what_differs() -> None:
    text = KIMI + '[sweep]\n"args.speculative-num-steps" = [1, 2]\n"env.NCCL_PROTO" = ["LL", "Simple"]\n'
    found = parsed(text)
    assert [c.name for c in found] == [
        "eagle3-aq-medai+speculative-num-steps-1+NCCL-PROTO-LL",
        "eagle3-aq-medai+speculative-num-steps-1+NCCL-PROTO-Simple",
        "eagle3-aq-medai+speculative-num-steps-2+NCCL-PROTO-LL",
        "eagle3-aq-medai+speculative-num-steps-2+NCCL-PROTO-Simple",
    ]
    assert [(c.arg("speculative-num-steps"), c.launch.env["NCCL_PROTO"]) for c in found] == list(
        itertools.product((1, 2), ("LL", "Simple"))
    )
    assert len({c.id for c in found}) == 4


def test_a_swept_flag_replaces_its_own_other_spelling() -> None:
    found = parsed(HEAD + '[launch.args]\ntp_size = 1\n[sweep]\n"args.tp-size" = [2, 4]\n')
    assert [dict(c.launch.args) for c in found] == [{"tp-size": 2}, {"tp-size": 4}]


def test_a_sweep_key_may_be_written_without_quotes() -> None:
    quoted = parsed(HEAD + '[sweep]\n"args.x" = [1, 2]\n"env.E" = ["a"]\n')
    assert parsed(HEAD + '[sweep]\nargs.x = [1, 2]\nenv.E = ["a"]\n') == quoted
    assert parsed(HEAD + '[sweep.args]\nx = [1, 2]\n[sweep.env]\nE = ["a"]\n') == quoted


def test_combinations_that_launch_the_same_are_one_candidate() -> None:
    assert len(parsed(HEAD + '[sweep]\n"args.x" = [1, "1", 2]\n')) == 2


def test_environment_values_in_a_sweep_become_text() -> None:
    assert [c.launch.env for c in parsed(HEAD + '[sweep]\n"env.E" = [1, true]\n')] == [{"E": "1"}, {"E": "true"}]


@pytest.mark.parametrize(
    ("sweep", "says"),
    [
        ('"args.x" = []', "c.toml:6: sweep.args.x: has no values to sweep over"),
        ('"arg.x" = [1]', "c.toml:6: sweep.arg.x: cannot be swept"),
        ('"args." = [1]', "c.toml:6: sweep.args.: cannot be swept"),
        ("name = ['b']", "c.toml:6: sweep.name: cannot be swept"),
        ("engine = ['sglang']", "c.toml:6: sweep.engine: cannot be swept"),
        ("model = [1]", "c.toml:6: sweep.model: cannot be swept: cannot be 1"),
        ('"env.A-B" = ["x"]', "c.toml:6: sweep.env.A-B: cannot be swept"),
        ('"args.a b" = ["x"]', "c.toml:6: sweep.args.a b: cannot be swept"),
        ('"env.HF_TOKEN" = ["hunter2"]', "c.toml:6: sweep.env.HF_TOKEN: cannot be swept: looks like a secret"),
        ('"args.api-key" = ["hunter2"]', "c.toml:6: sweep.args.api-key: cannot be swept: looks like a secret"),
        (
            '"args.x" = [1]\n"args.x_y" = [1]\n"args.x-y" = [1]',
            "c.toml:8: sweep.args.x-y: is the same flag as args.x_y",
        ),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_with_its_place(sweep: str, says: str) -> None:
    message = only(HEAD + "[sweep]\n" + sweep + "\n")
    assert message.startswith(says)
    assert "hunter2" not in message


def test_a_sweep_too_large_is_refused_before_it_is_expanded() -> None:
    axes = "".join(f'"args.x{i}" = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n' for i in range(9))
    assert only(HEAD + "[sweep]\n" + axes) == (
        f"c.toml:5: sweep: makes 1000000000 candidates; {SWEEP_MAX} is the most one file may"
    )
    assert len(parsed(HEAD + f'[sweep]\n"args.x" = {list(range(SWEEP_MAX))}\n')) == SWEEP_MAX


# --- errors


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD + "[launch.arg]\n", "c.toml:5: launch.arg: unknown key (did you mean args?)"),
        (HEAD + 'modle = "x"\n', "c.toml:5: launch.modle: unknown key (did you mean model?)"),
        ('hypothsis = "x"\n' + HEAD, "c.toml:1: hypothsis: unknown key (did you mean hypothesis?)"),
        (HEAD + '[benchmark]\nuses = "x"\nuse = "y"\n', "c.toml:6: benchmark.uses: unknown key (did you mean use?)"),
        ('name = "a"\nengine = "sglan"\n' + LAUNCH, "c.toml:2: engine: 'sglan' is not one of them (did you mean sglang?)"),
        ('name = "a b"\nengine = "vllm"\n' + LAUNCH, "c.toml:1: name: string should match pattern"),
        ('engine = "vllm"\n' + LAUNCH, "c.toml: name: is missing"),
        ('name = "a"\nengine = "vllm"\n[launch]\n', 'c.toml:3: launch: engine "vllm" needs launch.model'),
        ('name = "a"\nengine = "command"\n[launch]\n', 'c.toml:3: launch: engine "command" needs launch.command'),
        (HEAD + 'command = ["x"]\n', 'c.toml:5: launch.command: is for engine "command", not "vllm"'),
        (HEAD + "start_timeout_s = 0\n", "c.toml:5: launch.start_timeout_s: input should be greater than 0, found 0"),
        (HEAD + "[launch.env]\nN = 1\n", "c.toml:6: launch.env.N: input should be a valid string, found 1"),
        (HEAD + '[launch.env]\n"A-B" = "1"\n', "c.toml:6: launch.env.A-B: string should match pattern"),
        (HEAD + '[launch.args]\n"a=b" = 1\n', "c.toml:6: launch.args.a=b: string should match pattern"),
        (HEAD + "[launch.args]\nx = { a = 1 }\n", "c.toml:6: launch.args.x: should be true or false, a whole number,"),
        (HEAD + "[launch.args]\ntp-size = 1\ntp_size = 2\n", "c.toml:7: launch.args.tp_size: is the same flag as tp-size"),
        (HEAD + '[launch.env]\nA = "x\\u0000y"\n', "c.toml:6: launch.env.A: holds a NUL character"),
        (HEAD + '[launch.args]\na = "x\\u0000y"\n', "c.toml:6: launch.args.a:"),
    ],
)  # fmt: skip
def test_a_wrong_file_names_file_line_key_and_what_would_be_right(text: str, says: str) -> None:
    assert only(text).startswith(says)


def test_all_mistakes_of_a_file_are_told_at_once() -> None:
    found = problems('nam = "a"\nengine = "x"\n[launch]\nmodle = "m"\n')
    assert [p.key for p in found] == ["name", "engine", "launch.modle", "nam"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (HEAD + '[launch.env]\nHF_TOKEN = "hunter2"\n', "launch.env.HF_TOKEN"),
        (HEAD + '[launch.env]\nADMIN_TOKEN = "hunter2"\n', "launch.env.ADMIN_TOKEN"),
        (HEAD + '[launch.env]\nPROXY = "http://me:hunter2@proxy:3128"\n', "launch.env.PROXY"),
        (HEAD + '[launch.env]\nX = "hf_hunter2hunter2hunter2hunter2"\n', "launch.env.X"),
        (HEAD + '[launch.args]\napi-key = "hunter2"\n', "launch.args.api-key"),
        (HEAD + '[launch.args]\napi_key = ["hunter2"]\n', "launch.args.api_key"),
        (HEAD + '[launch.args]\nheader = ["a", "Authorization: Bearer hunter2hunter2"]\n', "launch.args.header"),
        (HEAD.replace('"m"', '"https://me:hunter2@host/m"'), "launch.model"),
        ('name="a"\nengine="command"\n[launch]\ncommand = ["s", "--api-key", "hunter2"]\n', "launch.command"),
        ('name="a"\nengine="command"\n[launch]\ncommand = ["s", "--api-key=hunter2"]\n', "launch.command"),
        ('name="a"\nengine="command"\n[launch]\ncommand = ["env", "API_KEY=hunter2", "s"]\n', "launch.command"),
    ],
)
def test_a_secret_in_a_candidate_file_is_refused_and_not_repeated(text: str, key: str) -> None:
    (problem,) = problems(text)
    assert problem.key == key
    assert problem.line is not None
    assert "looks like a secret" in problem.message
    assert "secret_files" in problem.hint
    assert "hunter2" not in str(problem)


@pytest.mark.parametrize(
    "line", ["# once with hf_abcdefghijklmnopqrstuvwxyz", 'hypothesis = "hf_abcdefghijklmnopqrstuvwxyz"']
)
def test_a_secret_anywhere_in_a_candidate_file_is_refused_for_the_file_is_kept(line: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_candidates(Source("c.toml", f'name = "a"\nengine = "vllm"\n{line}\n[launch]\nmodel = "m"\n'))
    (problem,) = caught.value.problems
    assert (problem.line, "looks like a secret" in problem.message) == (3, True)
    assert "hf_" not in str(problem)


def test_flags_that_count_tokens_are_no_secrets() -> None:
    args = "max-total-tokens = 1\nspeculative-token-map = 'x'\nmax-num-batched-tokens = 2\nnum-speculative-tokens = 3\n"
    assert len(parsed(HEAD + "[launch.args]\n" + args)) == 1


@settings(max_examples=300)
@given(st.integers(0, len(KIMI)), st.integers(0, 40), st.text('=[]{}"\n.#\\\u2028\x00aé1-', max_size=4))
def test_a_damaged_file_is_a_candidate_or_an_error_that_names_the_file(at: int, cut: int, put: str) -> None:
    error = error_of(KIMI[:at] + put + KIMI[at + cut :])
    for problem in error.problems if error else []:
        assert problem.file == "c.toml"
        assert problem.message
        assert "pydantic" not in str(problem)
        assert problem.line is None or 1 <= problem.line <= KIMI.count("\n") + 5
    assert error is None or error.problems


# --- changes


def test_a_derived_candidate_says_in_its_name_what_was_changed() -> None:
    (candidate,) = parsed(KIMI)
    changed = derive(candidate, {"args.max-running-requests": 256}, "to isolate the cap")
    assert changed.name == "eagle3-aq-medai+max-running-requests-256"
    assert changed.hypothesis == "to isolate the cap"
    assert changed.arg("max-running-requests") == 256
    assert (changed.arg("tp-size"), changed.launch.env) == (8, candidate.launch.env)
    assert changed.id != candidate.id


@given(
    tables,
    variables,
    st.one_of(scalars, st.just("/models/a b")),
    st.sampled_from(["args.x", "args.x/y", "env.A", "model"]),
)
def test_a_derived_candidate_can_be_written_as_a_file_that_launches_the_same(
    args: dict[str, Any], env: dict[str, str], value: Any, key: str
) -> None:
    value = str(value) if key == "model" else value
    changed = derive(make(args, env, benchmark="chat", slots=("a",)), {key: value}, 'because\nof "this"')
    if changed.launch.model:
        (back,) = parsed(to_toml(changed))
        assert (back.id, back) == (changed.id, changed)


def test_a_name_is_bounded_however_much_is_swept() -> None:
    assert len(derive(make({}), {f"args.long-flag-name-{i}": i for i in range(50)}, "").name) == 120


def test_settings_reach_every_part_of_a_launch() -> None:
    launch = with_settings(
        Launch(model="m", args={"x_y": 1}), {"args.x-y": False, "env.E": 3, "model": "n", "python": "p"}
    )
    assert launch == Launch(model="n", python="p", args={"x-y": False}, env={"E": "3"})


@pytest.mark.parametrize("key", ["args", "args.", "env.", "", "launch.args.x", "start_timeout_s", "command", "foo.bar"])
def test_what_cannot_be_changed_is_known_before_it_is_tried(key: str) -> None:
    assert setting_problem(key, (1,))


@pytest.mark.parametrize(("key", "value"), [("args.x", 1), ("env.A", "b"), ("model", "m"), ("args.x", True)])
def test_what_can_be_changed_is_no_problem(key: str, value: Any) -> None:
    assert setting_problem(key, (value,)) == ""
    with_settings(Launch(), {key: value})
