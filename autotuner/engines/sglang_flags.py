"""SGLang's flags for speculation: what a candidate asks for, and what contradicts itself."""

import re

from autotuner.core.candidate import Candidate
from autotuner.engines.base import Speculation

_ALGORITHM = ("speculative-algorithm", "speculative-algo")
_STEPS = "speculative-num-steps"
_TOPK = "speculative-eagle-topk"
_DRAFT_TOKENS = "speculative-num-draft-tokens"
_DRAFTER = ("speculative-draft-model-path", "speculative-draft-model")

# These need steps, top-k and draft tokens; the others draft a whole block and know draft tokens only.
STEPPED = {"EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP"}
_NEEDS_DRAFTER = {"EAGLE3", "STANDALONE", "DFLASH"}
_NO_DP_ATTENTION = {"STANDALONE", "NGRAM"}
_BLOCKS = {"DFLASH", "DSPARK"}  # these force one step of top-k 1 and draft a whole block
ADAPTIVE = {"EAGLE", "EAGLE3", "NEXTN"}
_PAGED_TREES = {"flashinfer", "fa3", "triton"}  # the backends that take a tree with pages of more than one token
_BACKEND = ("attention-backend", "decode-attention-backend")
_THRESHOLDS = ("speculative-accept-threshold-single", "speculative-accept-threshold-acc")

# The slot owns these; the model has a key of its own.
_TAKEN = {
    "port": "belongs to the slot; set it in the settings",
    "host": "belongs to the slot; set it in the settings",
    "model-path": "contradicts launch.model; keep only that one",
    "model": "contradicts launch.model; keep only that one",
}


def speculation(candidate: Candidate) -> Speculation | None:
    """Given a candidate, return the speculation it asks for, or None; what SGLang chooses is None inside."""
    method = method_of(candidate)
    if not method:
        return None
    draft_tokens = _number(candidate, _DRAFT_TOKENS)
    if method not in STEPPED:
        if draft_tokens is None:
            draft_tokens = _number(candidate, "speculative-dflash-block-size")
        # One of the draft tokens is the root: a block of N gives a length of at most N, bonus included.
        return Speculation(method, draft_tokens - 1 if draft_tokens else None, draft_tokens)
    steps = _number(candidate, _STEPS)
    if candidate.arg("speculative-adaptive"):
        steps = None  # SGLang changes the depth while it runs, up to 7 in its own table
    if steps is not None and _number(candidate, _TOPK) == 1:
        draft_tokens = steps + 1  # a chain: SGLang overrides whatever was asked for
    return Speculation(method, steps, draft_tokens)


def problems(candidate: Candidate) -> tuple[str, ...]:
    """Given a candidate, return what SGLang would refuse, ignore or override, a sentence each."""
    taken = [f"args.{flag} {why}" for flag, why in _TAKEN.items() if candidate.arg(flag) is not None]
    method = method_of(candidate)
    if not method:
        return (*taken, *_without_algorithm(candidate))
    shape = _shape(candidate) if method in STEPPED else _block(candidate, method)
    forced = [*_attention(candidate, method), *_adaptive(candidate, method), *_tree(candidate)]
    return (*taken, *shape, *_drafter(candidate, method), *forced)


def warnings(candidate: Candidate) -> tuple[str, ...]:
    """Given a candidate, return what SGLang does with it that nobody asked for, a sentence each."""
    if not method_of(candidate):
        return ()
    found = []
    if candidate.arg("max-running-requests") is None:
        found.append(
            "args.max-running-requests is unset: with speculation SGLang lets 48 requests run at once (32 in 0.4.3); "
            "set it, or higher levels measure that cap"
        )
    if candidate.arg("enable-mixed-chunk"):
        found.append("args.enable-mixed-chunk is turned off by speculation")
    found += [
        f"args.{flag} below 1 changes what the model says: the output is no longer the target's"
        for flag in _THRESHOLDS
        if (_real(candidate, flag) or 1.0) < 1.0
    ]
    return tuple(found)


def method_of(candidate: Candidate) -> str:
    """Given a candidate, return its speculative algorithm in capitals; empty if it has none."""
    value = candidate.arg(*_ALGORITHM)
    return "" if value is None or str(value).lower() == "none" else str(value).upper()


def _number(candidate: Candidate, flag: str) -> int | None:
    value = candidate.arg(flag)
    return int(str(value)) if value is not None and re.fullmatch(r"-?\d+", str(value)) else None


def _real(candidate: Candidate, flag: str) -> float | None:
    try:
        return float(str(candidate.arg(flag)))
    except ValueError:
        return None


def _without_algorithm(candidate: Candidate) -> list[str]:
    companions = (_STEPS, _TOPK, _DRAFT_TOKENS, *_DRAFTER)
    named = [flag for flag in companions if candidate.arg(flag) is not None]
    if not named:
        return []
    why = "is set without args.speculative-algorithm, so nothing would be speculated"
    return [f"args.{named[0]} {why}; name the algorithm, e.g. EAGLE3"]


def _shape(candidate: Candidate) -> list[str]:
    """Steps, top-k and draft tokens: all three or none, and no more draft tokens than the tree can hold."""
    flags = (_STEPS, _TOPK, _DRAFT_TOKENS)
    missing = [flag for flag in flags if candidate.arg(flag) is None]
    if missing:
        given = [flag for flag in flags if flag not in missing]
        if missing[0] == _STEPS and given:
            return [
                f"args.{given[0]} needs args.{_STEPS}: without it SGLang stops with an assertion; set all three or none"
            ]
        return [f"args.{given[0]} needs args.{missing[0]}: SGLang wants all three or none"] if given else []
    steps, topk, draft_tokens = (_number(candidate, flag) for flag in flags)
    if steps is None or topk is None or draft_tokens is None:
        return ["args.speculative-num-steps, -eagle-topk and -num-draft-tokens must be whole numbers"]
    if topk == 1 and draft_tokens != steps + 1:
        # Said rather than passed over: two such candidates would turn out to be one.
        return [f"args.{_DRAFT_TOKENS} = {draft_tokens} would become {steps + 1}: with top-k 1 it is steps + 1"]
    most = 1 + topk + topk * topk * (steps - 1)
    if draft_tokens > most:
        return [f"args.{_DRAFT_TOKENS} = {draft_tokens} is more than {steps} steps of top-k {topk} yield ({most})"]
    return []


def _block(candidate: Candidate, method: str) -> list[str]:
    """Methods that draft a block know draft tokens only; what else is asked for is overridden or ignored."""
    found = []
    for flag in (_STEPS, _TOPK) if method in _BLOCKS | {"NGRAM"} else ():
        value = candidate.arg(flag)
        if value is not None and not (method in _BLOCKS and _number(candidate, flag) == 1):
            why = "would become 1" if method in _BLOCKS else "is not used"
            found.append(f"args.{flag} = {value} {why}: {method} knows args.{_DRAFT_TOKENS} only")
    size, draft_tokens = _number(candidate, "speculative-dflash-block-size"), _number(candidate, _DRAFT_TOKENS)
    if method == "DFLASH" and None not in (size, draft_tokens) and size != draft_tokens:
        found.append(f"args.speculative-dflash-block-size = {size} contradicts args.{_DRAFT_TOKENS} = {draft_tokens}")
    if method == "DFLASH" and (_number(candidate, "pp-size") or _number(candidate, "pp") or 1) > 1:
        found.append(f"args.{_ALGORITHM[0]} = DFLASH does not run with pipeline parallelism (args.pp-size)")
    return found


def _adaptive(candidate: Candidate, method: str) -> list[str]:
    """SGLang switches adaptive speculation off where it cannot be, and goes on with fixed values."""
    if not candidate.arg("speculative-adaptive"):
        return []
    why = ""
    if method not in ADAPTIVE:
        why = f"works with EAGLE and EAGLE3, not with {method}"
    elif _number(candidate, _TOPK) not in {None, 1}:
        why = f"needs args.{_TOPK} = 1"
    elif candidate.arg("enable-dp-attention"):
        why = "does not work with args.enable-dp-attention"
    return [f"args.speculative-adaptive {why}; it would be switched off"] if why else []


def _tree(candidate: Candidate) -> list[str]:
    topk, page = _number(candidate, _TOPK), _number(candidate, "page-size") or 1
    if topk is None or topk < 2:
        return []
    found = []
    for flag in _BACKEND:
        backend = candidate.arg(flag)
        if backend == "trtllm_mha":
            found.append(f"args.{_TOPK} = {topk} does not run on args.{flag} = trtllm_mha, which takes chains only")
        elif backend is not None and page > 1 and backend not in _PAGED_TREES:
            allowed = ", ".join(sorted(_PAGED_TREES))
            found.append(f"args.{_TOPK} = {topk} with args.page-size = {page} runs on {allowed}, not on {backend}")
    if candidate.arg("speculative-use-rejection-sampling"):
        found.append(f"args.speculative-use-rejection-sampling needs args.{_TOPK} = 1")
    return found


def _drafter(candidate: Candidate, method: str) -> list[str]:
    path = candidate.arg(*_DRAFTER)
    if path is None:
        return [f"args.{_ALGORITHM[0]} = {method} needs args.{_DRAFTER[0]}"] if method in _NEEDS_DRAFTER else []
    if method == "EAGLE" and re.search(r"eagle[-_.]?3", str(path), re.IGNORECASE):
        # SGLang starts such a pair without an error, and then nothing is ever accepted.
        return [f'args.{_DRAFTER[0]} looks like an EAGLE-3 drafter; then {_ALGORITHM[0]} must be "EAGLE3"']
    return []


def _attention(candidate: Candidate, method: str) -> list[str]:
    if not candidate.arg("enable-dp-attention"):
        return []
    if method in _NO_DP_ATTENTION:
        return [f"args.{_ALGORITHM[0]} = {method} does not run with args.enable-dp-attention"]
    if method == "DFLASH" and not candidate.arg("enable-dp-lm-head"):
        return [
            f"args.{_ALGORITHM[0]} = DFLASH runs with args.enable-dp-attention only if args.enable-dp-lm-head is set"
        ]
    return []
