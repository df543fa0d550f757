"""An answer kept on disk holds for one program and one version; a broken or foreign one is as if it were not there."""

import json
import os
from pathlib import Path

import pytest

from autotuner.edge.helpcache import HelpCache, identity_of, interpreter_of
from autotuner.engines.flags import Help

ARGV = ("/opt/python", "-m", "sglang.launch_server", "--help")
ANSWER = Help(
    frozenset({"--tp-size", "-h"}), {"--old": "has been removed"}, {"--older": "deprecated"}, abbreviates=True
)


def test_an_answer_is_found_again_whole_by_another_process(tmp_path: Path) -> None:
    HelpCache(tmp_path / "cache").write(ARGV, "who", ANSWER)
    assert HelpCache(tmp_path / "cache").read(ARGV, "who") == ANSWER


def test_another_version_or_command_is_asked_again(tmp_path: Path) -> None:
    cache = HelpCache(tmp_path)
    cache.write(ARGV, "who", ANSWER)
    assert cache.read(ARGV, "who else") is None
    assert cache.read((*ARGV, "more"), "who") is None
    assert cache.read(ARGV, "") is None
    cache.write(ARGV, "who else", ANSWER)
    assert len(list(tmp_path.iterdir())) == 1, "a new answer takes the place of the old one"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"{}", b"null", b'{"argv": 1}', b"[" * 100_000])
def test_a_broken_file_is_as_if_it_were_not_there(tmp_path: Path, content: bytes) -> None:
    cache = HelpCache(tmp_path)
    cache.write(ARGV, "who", ANSWER)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    assert cache.read(ARGV, "who") is None
    cache.write(ARGV, "who", ANSWER)
    assert cache.read(ARGV, "who") == ANSWER


def test_an_answer_of_another_shape_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    cache = HelpCache(tmp_path)
    cache.write(ARGV, "who", ANSWER)
    (path,) = tmp_path.iterdir()
    body = json.loads(path.read_text())
    body["help"] = {"flags": 7}
    path.write_text(json.dumps(body))
    assert cache.read(ARGV, "who") is None


def test_a_folder_that_cannot_be_written_to_costs_the_answer_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = HelpCache(tmp_path / "file" / "cache")
    cache.write(ARGV, "who", ANSWER)
    assert cache.read(ARGV, "who") is None
    assert HelpCache(None).read(ARGV, "who") is None


def test_a_program_is_another_one_when_it_its_libraries_or_its_version_change(tmp_path: Path) -> None:
    program, library = tmp_path / "llama-server", tmp_path / "libllama.so"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    seen = [identity_of(str(program), None), identity_of(str(program), "2")]
    library.write_text("x")
    seen.append(identity_of(str(program), None))
    os.utime(program, ns=(1, 1))
    seen.append(identity_of(str(program), None))
    program.write_text("#!/bin/sh\n#\n")
    os.utime(program, ns=(1, 1))
    seen.append(identity_of(str(program), None))
    assert len(set(seen)) == 5
    assert identity_of(str(program), None) == seen[-1]
    assert identity_of(str(tmp_path / "none"), None) == ""


@pytest.mark.parametrize(
    ("first", "python"),
    [
        (b"#!/opt/vllm/bin/python3.12\n", "/opt/vllm/bin/python3.12"),
        (b"#!/usr/bin/env python3\n", "python3"),
        (b"#!/bin/sh\n", None),
        (b"\x7fELF\x02\xff", None),
        (b"", None),
    ],
)
def test_the_interpreter_of_a_script_is_read_from_its_first_line(
    tmp_path: Path, first: bytes, python: str | None
) -> None:
    script = tmp_path / "vllm"
    script.write_bytes(first)
    script.chmod(0o755)
    assert interpreter_of(str(script)) == python
    assert interpreter_of(str(tmp_path / "none")) is None
