"""No secret reaches a log, a journal or a store, and no text a server wrote drives a terminal."""

import base64
import json
import re
import urllib.parse
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.core.redact import HIDDEN, hide, hide_values, names_secret, one_line, plain, redact_argv, redact_text

CANARY = "c4n4ry-0f-th3-m1ne"

SECRET_NAMES = [
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "GITHUB_TOKEN", "admin-token", "ADMIN_TOKEN", "RUBYGEMS_TOKEN", "STEP_TOKEN",
    "NEW_RELIC_TOKEN", "token", "TOKEN", "auth-token", "api-key", "api_key", "API_KEYS", "apikey", "admin-api-key",
    "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "secret", "client-secret", "password", "DB_PASSWORD", "PGPASSWORD",
    "ssl-keyfile-password", "passphrase", "credentials", "private-key", "access_key",
]  # fmt: skip
PLAIN_NAMES = [
    "max-total-tokens", "max_total_tokens", "max-num-batched-tokens", "num-speculative-tokens", "max-prefill-tokens",
    "speculative-num-draft-tokens", "speculative-token-map", "tbo-token-distribution-threshold", "tokenizer-path",
    "bucket-time-to-first-token", "bucket-inter-token-latency", "kt-max-deferred-experts-per-token", "skip-tokenizer-init",
    "eos-token", "pad-token", "stop-token-ids", "swa-full-tokens-ratio", "model", "keyboard", "monkey", "secretary",
    "compass", "num-token", "max-new-token", "kv-cache-dtype", "CUDA_VISIBLE_DEVICES", "NCCL_ALGO", "",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_name_of_a_secret_is_known(name: str) -> None:
    assert names_secret(name)
    assert names_secret(name.upper())
    assert names_secret(name.lower())


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_a_flag_that_counts_tokens_or_only_sounds_like_one_is_no_secret(name: str) -> None:
    assert not names_secret(name)


@pytest.mark.parametrize("name", [n for n in SECRET_NAMES if n == n.lower()])
def test_secret_flags_are_hidden_in_both_forms(name: str) -> None:
    assert redact_argv(("s", f"--{name}", CANARY, "-x", "1")) == ("s", f"--{name}", HIDDEN, "-x", "1")
    assert redact_argv(("s", f"--{name}={CANARY}", "y")) == ("s", f"--{name}={HIDDEN}", "y")


def test_every_value_of_a_secret_flag_is_hidden() -> None:
    shown = redact_argv(("s", "--api-key", CANARY, CANARY + "2", "--port", "1"))
    assert shown == ("s", "--api-key", HIDDEN, HIDDEN, "--port", "1")


def test_a_secret_that_begins_with_a_dash_is_hidden() -> None:
    assert redact_argv(("s", "--api-key", f"-{CANARY}", "--port", "1")) == ("s", "--api-key", HIDDEN, "--port", "1")


def test_a_secret_flag_without_a_value_hides_no_other_flag() -> None:
    assert redact_argv(("s", "--api-key", "--port", "1")) == ("s", "--api-key", "--port", "1")


def test_variables_given_as_words_are_hidden() -> None:
    assert redact_argv(("env", f"HF_TOKEN={CANARY} x", "NCCL_ALGO=Ring")) == (
        "env",
        f"HF_TOKEN={HIDDEN}",
        "NCCL_ALGO=Ring",
    )


def test_ordinary_argv_is_shown_as_it_is() -> None:
    argv = (
        "python",
        "-m",
        "sglang.launch_server",
        "--max-total-tokens",
        "5",
        "--x=a=b",
        "--url=http://h:1/p?q=1",
        "-",
        "",
    )
    assert redact_argv(argv) == argv


@pytest.mark.parametrize(
    "text",
    [
        f"http://me:{CANARY}@host:80/x",
        f"redis://:{CANARY}@host",
        f"Authorization: Bearer {CANARY}",
        "hf_" + "aB3" * 10,
        "sk-" + "aB3" * 10,
        "ghp_" + "aB3" * 10,
        "AKIA" + "ABCD" * 4,
        f"GET /v1/models?api_key={CANARY}&x=1",
        f"ServerArgs(model='m', api_key='{CANARY} with blanks', port=1)",
        f"HF_TOKEN={CANARY} python",
        f'--admin-api-key="{CANARY}"',
    ],
)
def test_secrets_in_free_text_are_hidden_by_their_shape(text: str) -> None:
    shown = redact_text(f"before {text} after")
    assert not any(piece in shown for piece in (CANARY, "aB3aB3", "ABCDABCD"))
    assert shown.startswith("before ")
    assert shown.endswith(" after")


def test_the_rest_of_a_text_stays() -> None:
    assert redact_text("http://me:pass@host:80/x?api_key=k&x=1") == f"http://{HIDDEN}@host:80/x?api_key={HIDDEN}&x=1"
    for text in ("max_total_tokens=5, context=8", "a=b", "http://host:80/x@y", "next token: 42", "rate = 3"):
        assert redact_text(text) == text


@given(st.text(max_size=60), st.text(max_size=60), st.text(min_size=4, max_size=30))
def test_a_known_secret_never_survives_wherever_it_stands(before: str, after: str, secret: str) -> None:
    shown = redact_text(before + secret + after, frozenset({secret}))
    assert secret not in shown or secret in HIDDEN * 30


def test_a_secret_that_holds_another_is_hidden_whole() -> None:
    assert redact_text("x abcdefgh y abcd z", frozenset({"abcd", "abcdefgh"})) == f"x {HIDDEN} y {HIDDEN} z"


def test_a_secret_too_short_to_tell_does_not_eat_the_text() -> None:
    assert redact_text("a cat sat", frozenset({"a", ""})) == "a cat sat"


ODD = 'p@ss/w0rd+ "é" %=\\end'


@pytest.mark.parametrize(
    "form",
    [
        urllib.parse.quote(ODD),
        urllib.parse.quote(ODD, safe=""),
        urllib.parse.quote_plus(ODD),
        re.sub("%..", lambda m: m[0].lower(), urllib.parse.quote(ODD, safe="")),
        json.dumps(ODD),
        json.dumps(ODD, ensure_ascii=False),
        repr(ODD),
    ],
)
def test_a_known_secret_is_hidden_as_programs_print_it(form: str) -> None:
    shown = redact_text(f"before {form} after", frozenset({ODD}))
    assert "w0rd" not in shown
    assert shown.startswith("before ")
    assert shown.endswith(" after")


@pytest.mark.parametrize("before", [b"", b"u:", b"user:", b"\x00\x01\x02"])
@pytest.mark.parametrize("code", [base64.b64encode, base64.urlsafe_b64encode])
def test_a_known_secret_is_hidden_in_base64_wherever_it_begins(before: bytes, code: Any) -> None:
    raw = code(before + ODD.encode() + b"tail").decode()
    shown = redact_text(raw, frozenset({ODD}))
    left = [piece for piece in shown.split(HIDDEN) if piece]
    assert HIDDEN in shown
    assert all(len(piece) <= len(before) * 2 + 8 for piece in left)


def test_each_line_of_a_key_is_a_secret_of_its_own() -> None:
    key = "-----BEGIN KEY-----\nMIIabcdefgh1234\nMIIijklmnop5678\n-----END KEY-----"
    shown = redact_text("MIIijklmnop5678 MIIabcdefgh1234 -----BEGIN KEY-----", frozenset({key}))
    assert shown == f"{HIDDEN} {HIDDEN} -----BEGIN KEY-----"


def test_a_secret_that_escapes_keep_apart_is_hidden() -> None:
    assert hide("c4n4ry\x1b[0m-0f-th3-m1ne", frozenset({CANARY})) == HIDDEN


def test_data_keeps_its_shape_and_json_stays_json() -> None:
    secrets = frozenset({"1234", CANARY})
    assert hide_values({"a": [CANARY, 12345, None, (True, f"x{CANARY}")]}, secrets) == {
        "a": [HIDDEN, 12345, None, (True, f"x{HIDDEN}")]
    }
    assert json.loads(hide_values('{"a": 12345, "b": "12345"}', secrets)) == {"a": 12345, "b": f"{HIDDEN}5"}
    untouched = '{"a":  1.50}'
    assert hide_values(untouched, secrets) is untouched
    assert hide_values("{not json " + CANARY, secrets) == "{not json " + HIDDEN
    assert hide_values(CANARY, frozenset()) == CANARY


@given(st.text(alphabet=st.characters(), max_size=200))
def test_plain_text_has_no_control_characters_but_line_breaks_and_tabs(text: str) -> None:
    shown = plain(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert not set(shown) & set("\u2028\u2029\u200b\u200e\u200f\u061c\u202a\u202e\u2066\u2069\ufeff")
    shown.encode()  # a file can be written with it
    assert plain(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bcreset", "reset"),
        ("10%\r20%\r\n30%", "10%\n20%\n30%"),
        ("a\u202eb\udcffc\x9bd", "abcd"),
        ("tab\tstays", "tab\tstays"),
    ],
)
def test_escapes_are_taken_out_and_progress_bars_become_lines(text: str, shown: str) -> None:
    assert plain(text) == shown


@given(st.text(max_size=400), st.integers(1, 50))
def test_text_is_cut_to_its_limit(text: str, limit: int) -> None:
    assert len(plain(text, limit)) <= limit
    assert len(one_line(text, limit)) <= limit
    assert len(one_line(text).splitlines()) <= 1
    assert plain("x" * 60, limit).endswith("…")


SECRET = "s3cr/t+Key 4=you?"


@given(st.binary(max_size=9), st.binary(max_size=9))
def test_a_secret_is_hidden_in_base64_whatever_stands_beside_it(before: bytes, after: bytes) -> None:
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        text = encode(before + SECRET.encode() + after).decode()
        shown = redact_text(f"it sent {text}.", frozenset({SECRET}))
        left = len(shown.removeprefix("it sent ").removesuffix(".").replace(HIDDEN, "", 1))
        assert len(text) - left >= 8 * len(SECRET) // 6 - 2, "all characters that are the secret's alone"


@pytest.mark.parametrize("safe", ["", "/"])
def test_a_secret_is_hidden_in_a_url(safe: str) -> None:
    url = f"http://host/v1?key={urllib.parse.quote(SECRET, safe=safe)}&n=1"
    assert redact_text(url.replace("key", "k"), frozenset({SECRET})) == "http://host/v1?k=***&n=1"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"api_key": "abc", "top_k": "3"}', '{"api_key": "***", "top_k": "3"}'),
        ("{'hf_token' : 'a,b c', 'model': 'm'}", "{'hf_token' : '***', 'model': 'm'}"),
        (r'"{\"password\":\"x y\"}"', r'"{\"password\":\"***\"}"'),
        (
            '{"api_key": null, "api_keys": 3, "eos-token": "</s>"}',
            '{"api_key": null, "api_keys": 3, "eos-token": "</s>"}',
        ),
    ],
)
def test_a_secret_is_hidden_by_its_name_in_json_and_in_what_python_prints(text: str, shown: str) -> None:
    assert redact_text(text) == shown
