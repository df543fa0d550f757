"""A sweep's variants are told together: what is tried, what leads, what waits."""

from autotuner.core.family import Variant, told
from autotuner.core.state import TrialState, Verdict

DONE = TrialState.DONE


def test_the_family_is_told_with_its_best_first() -> None:
    variants = [
        Variant("n+LL", DONE, Verdict.INCONCLUSIVE, 1.01),
        Variant("n+Simple", DONE, Verdict.PASS, 1.08),
        Variant("n+LL128", DONE, Verdict.FAIL),
        Variant("n+Tree", TrialState.QUEUED),
    ]
    assert told("nccl.toml", variants) == (
        "3 of 4 variants of nccl.toml are tried; best against the best-known: n+Simple (1.080), n+LL (1.010); "
        "1 without a score; 1 waits"
    )


def test_a_candidate_alone_is_no_family() -> None:
    assert told("nccl.toml", [Variant("n", DONE, Verdict.PASS, 1.0)]) == ""
    assert told("nccl.toml", []) == ""


def test_only_the_leading_ones_are_named() -> None:
    variants = [Variant(f"n{i}", DONE, Verdict.FAIL, 1 - i / 10) for i in range(6)]
    assert told("s.toml", variants).count("(") == 3
