"""A flag is judged as the installed program would judge it: abbreviations, spellings, renamed and removed ones."""

import argparse
from typing import Any

import pytest

from autotuner.core.candidate import Candidate, Launch
from autotuner.engines.flags import Findings, against_help, read_help, without_help
from autotuner.engines.renamed import TABLE, older_name, renamed
from autotuner.engines.version import release, version_argv, within

LLAMA_HELP = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
                                        (env: LLAMA_ARG_CTX_SIZE)
-fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'auto')
-lm,   --load-mode MODE                 how the model is loaded, instead of --mmap and --mlock
--spec-draft-n-max N                    number of tokens to draft (default: 3)
--draft, --draft-n, --draft-max N
                                        the argument has been removed. use --spec-draft-n-max or
                                        --spec-ngram-mod-n-max
"""


def argparse_help(*flags: str, deprecated: tuple[str, ...] = ()) -> str:
    """What Python's own parser prints for flags, the deprecated ones with SGLang's words about them."""
    parser = argparse.ArgumentParser(prog="server")
    for flag in flags:
        parser.add_argument(
            *flag.split(), type=int, help="how many; see also --something-else for the other half of it"
        )
    for flag in deprecated:
        parser.add_argument(flag, action="store_true", help=f"NOTE: {flag} is deprecated. Please use another.")
    return parser.format_help()


def check(engine: Any, help_text: str, version: str | None = None, **args: Any) -> Findings:
    candidate = Candidate(name="x", engine=engine, launch=Launch(model="/m", args=args))
    return against_help(candidate, read_help(engine, help_text), version, "the program")


SGLANG_NEW = argparse_help(
    "--mem-fraction-static", "--cuda-graph-max-bs-decode", "--cuda-graph-max-bs-prefill", "--tp-size --tensor-parallel-size",
    "--dsa-prefill-backend", "--ep-size", "--enable-metrics",
)  # fmt: skip
SGLANG_OLD = argparse_help("--mem-fraction-static", "--cuda-graph-max-bs", "--nsa-prefill-backend")
SGLANG_BETWEEN = argparse_help("--cuda-graph-max-bs-decode", "--cuda-graph-max-bs", deprecated=("--enable-ep-moe",))
VLLM = argparse_help(
    "--tensor-parallel-size -tp", "--speculative-config -sc", "--compilation-config -cc", "--max-num-seqs"
)


def test_flags_named_in_a_description_are_not_taken_for_flags_the_program_has() -> None:
    assert "--something-else" not in read_help("sglang", SGLANG_NEW).flags
    found = read_help("llamacpp", LLAMA_HELP)
    assert "--mmap" not in found.flags
    assert {"-h", "--usage", "-c", "--ctx-size", "-fa", "--flash-attn", "--draft-max"} <= found.flags
    assert not found.abbreviates
    assert found.underscores


def test_a_description_that_speaks_of_other_things_removes_nothing() -> None:
    text = "  --evict N    how long until a request is removed\n  --mode M     fast; the mode slow has been removed\n"
    found = read_help("llamacpp", text)
    assert (found.removed, found.deprecated) == ({}, {})


def test_a_help_without_definitions_still_yields_its_flags() -> None:
    assert "--port" in read_help("llamacpp", "usage: server [--port PORT] [--model FILE]").flags


def test_a_unique_beginning_is_let_through_with_the_full_name() -> None:
    found = check("sglang", SGLANG_NEW, **{"mem-frac": 0.9})
    assert found.problems == ()
    assert "--mem-frac is taken as an abbreviation of --mem-fraction-static" in found.warnings[0]


def test_an_ambiguous_beginning_is_refused_with_all_that_it_could_mean() -> None:
    (said,) = check("sglang", SGLANG_NEW, **{"cuda-graph-max": 8}).problems
    assert "ambiguous" in said
    assert "--cuda-graph-max-bs-decode, --cuda-graph-max-bs-prefill" in said


def test_llama_server_takes_no_abbreviations_but_underscores() -> None:
    assert check("llamacpp", LLAMA_HELP, ctx_size=1) == Findings()
    assert "has no flag --ctx; did you mean --ctx-size?" in check("llamacpp", LLAMA_HELP, ctx=1).problems[0]


def test_vllm_takes_underscores_and_dots_and_optimisation_levels() -> None:
    args = {"max_num_seqs": 4, "speculative-config.num_speculative_tokens": 3, "-cc.cudagraph_mode": "FULL", "-tp": 2}
    assert check("vllm", VLLM, **args) == Findings()
    assert check("vllm", argparse_help("--optimization-level -O"), **{"-O3": True}) == Findings()
    assert "abbreviation of --max-num-seqs" in check("vllm", VLLM, max_num=4).warnings[0]


def test_sglang_takes_no_underscores() -> None:
    (said,) = check("sglang", SGLANG_NEW, tp_size=8).problems
    assert "has no flag --tp_size; it is spelt --tp-size" in said


def test_a_renamed_flag_is_refused_with_its_new_name_where_the_old_one_is_gone() -> None:
    (said,) = check("sglang", SGLANG_NEW, **{"cuda-graph-max-bs": 8}).problems
    assert "is called --cuda-graph-max-bs-decode now (from 0.5.15 on, gone in 0.5.23)" in said
    (said,) = check("sglang", SGLANG_NEW, **{"nsa-prefill-backend": "x"}).problems
    assert "--dsa-prefill-backend" in said
    (said,) = check("sglang", SGLANG_NEW, **{"enable-beta-spec": True}).problems
    assert "was removed" in said
    assert "SGLANG_ENABLE_SPEC_V2" in said


def test_an_old_name_that_still_works_is_let_through_with_the_new_one() -> None:
    for version in ("0.5.18", None):
        found = check("sglang", SGLANG_BETWEEN, version, **{"cuda-graph-max-bs": 8})
        assert found.problems == ()
        assert "gone in 0.5.23; write --cuda-graph-max-bs-decode" in found.warnings[0]
    found = check("sglang", SGLANG_BETWEEN, **{"enable-ep-moe": True})
    assert found.problems == ()
    assert "deprecated" in found.warnings[0]


def test_a_new_name_on_an_old_release_is_refused_with_the_old_one() -> None:
    (said,) = check("sglang", SGLANG_OLD, "0.5.9", **{"cuda-graph-max-bs-decode": 8}).problems
    assert "calls it --cuda-graph-max-bs in this version" in said
    (said,) = check("sglang", SGLANG_OLD, None, **{"dsa-prefill-backend": "x"}).problems
    assert "calls it --nsa-prefill-backend" in said


def test_the_name_of_its_own_time_is_fine_on_every_release() -> None:
    assert check("sglang", SGLANG_OLD, "0.5.9", **{"cuda-graph-max-bs": 8}) == Findings()
    assert check("sglang", SGLANG_NEW, "0.5.23", **{"cuda-graph-max-bs-decode": 8}) == Findings()


def test_a_flag_that_its_help_calls_removed_is_refused_in_the_programs_own_words() -> None:
    (said,) = check("llamacpp", LLAMA_HELP, **{"draft-max": 4}).problems
    assert "the argument has been removed. use --spec-draft-n-max or --spec-ngram-mod-n-max" in said
    (said,) = check("llamacpp", LLAMA_HELP, mlock=True).problems
    assert 'is called --load-mode now; write load-mode = "mlock"' in said


def test_without_the_program_the_table_alone_warns() -> None:
    launch = Launch(model="/m", args={"cuda-graph-max-bs": 8, "tp-size": 8})
    candidate = Candidate(name="x", engine="sglang", launch=launch)
    assert "cuda-graph-max-bs-decode" in without_help(candidate, None).warnings[0]
    assert "cuda-graph-max-bs-decode" in without_help(candidate, "0.5.15.post1").warnings[0]
    assert without_help(candidate, "0.5.9") == Findings()


def test_every_row_names_its_source_and_leads_from_one_name_to_another() -> None:
    for row in TABLE:
        assert row.source
        old = row.old.replace("*", "prefill-backend")
        assert renamed(row.engine, old) is row
        assert row.successor(old) != old
        if row.new:
            assert row in older_name(row.engine, row.successor(old) or "")
        assert row.new or row.gone, f"{row.old}: neither a new name nor a release in which it went"
        assert not (row.since and row.gone) or release(row.since) <= release(row.gone)


@pytest.mark.parametrize(
    ("version", "since", "before", "holds"),
    [
        ("0.5.15", "0.5.15", "", True),
        ("0.5.15.post1", "0.5.15", "0.5.23", True),
        ("v0.5.9rc1", "0.5.15", "", False),
        ("0.5.23", "", "0.5.23", False),
        ("0.33.0+cu128", "0.19", "", True),
        (None, "0.5.15", "", True),
        (None, "", "0.5.6", False),
        ("unknown", "", "0.5.6", False),
    ],
)
def test_what_holds_for_a_range_of_versions(version: str | None, since: str, before: str, holds: bool) -> None:
    assert within(version, since, before) is holds


def test_the_version_is_read_without_importing_the_engine() -> None:
    argv = version_argv("/opt/python", "sglang.launch_server")
    assert argv is not None
    assert argv[:2] == ("/opt/python", "-c")
    assert "version('sglang')" in argv[2]
    assert "import sglang" not in argv[2]
    assert version_argv("/opt/python", "some.module") is None
