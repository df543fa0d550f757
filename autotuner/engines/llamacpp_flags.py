"""llama-server's flags for speculation that contradict each other, beyond what the engine itself says of them. Pure."""

from autotuner.core.candidate import Candidate

_DRAFTER = ("spec-draft-model", "model-draft", "md")
_FROM_HUB = ("spec-draft-hf", "hfd", "hfrd", "hf-repo-draft")
_N_MAX_DEFAULT = 3


def problems(candidate: Candidate) -> tuple[str, ...]:
    """Given a candidate, return what llama-server would refuse or ignore, a sentence each."""
    method = str(candidate.arg("spec-type") or "none")
    n_max = _number(candidate.arg("spec-draft-n-max", "draft-max"))
    n_min = _number(candidate.arg("spec-draft-n-min", "draft-min"))
    length = _number(candidate.arg("spec-synth-len"))
    most = n_max if n_max is not None else _N_MAX_DEFAULT
    found = []
    if method == "none" and n_max is not None and not any(candidate.arg(*names) for names in (_DRAFTER, _FROM_HUB)):
        found.append("args.spec-draft-n-max is set without args.spec-type, so nothing would be speculated")
    if n_min is not None and n_min > most:
        found.append(f"args.spec-draft-n-min = {n_min:g} is above args.spec-draft-n-max = {most:g}")
    if length is not None and "ngram" not in method and not 1 <= length <= most + 1:
        found.append(f"args.spec-synth-len = {length:g} must lie between 1 and {most + 1:g}, spec-draft-n-max + 1")
    return tuple(found)


def warnings(candidate: Candidate) -> tuple[str, ...]:
    """Given a candidate, return what it should be known to do, a sentence each."""
    found = []
    if candidate.arg("spec-synth-len") or candidate.arg("spec-synth-rates"):
        found.append("args.spec-synth-…: acceptance is thrown by dice and the text is garbage: never promote it")
    if candidate.arg(*_FROM_HUB) and not candidate.arg("spec-type"):
        found.append(
            "args.spec-draft-hf without args.spec-type speculates only where the drafter's kind shows in its file"
        )
    return tuple(found)


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None
